"""Requirements of a build: pip must keep the installed torch, and download one only on request."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from sandbox import ROOT, Ground, Outcome

HOOK = "import build_backend; print(build_backend.get_requires_for_build_wheel({!r}))"
METADATA = "import build_backend; build_backend.prepare_metadata_for_build_wheel({!r}, {{}})"


@pytest.fixture
def ground(tmp_path: Path) -> Ground:
    """An environment without torch, like that of an isolated build."""
    ground = Ground(tmp_path)
    for name in ("scikit_build_core", "packaging", "pathspec"):
        spec = find_spec(name)
        assert spec, f"found no {name}, needed it to run the hooks"
        assert spec.origin
        (ground.site / name).symlink_to(Path(spec.origin).parent)
    return ground


def run(ground: Ground, code: str, **variables: str) -> Outcome:
    done = subprocess.run(
        [ground.python, "-c", code],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT / "cpp/cmake/tools")} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return Outcome(done.returncode == 0, done.stdout)


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_isolated_build_is_refused(ground: Ground, kind: str) -> None:
    outcome = run(ground, f"import build_backend; build_backend.get_requires_for_build_{kind}()")
    assert not outcome.ended_well
    assert outcome.says(
        "would replace it. Nothing was changed.",
        "python -m pip install 'scikit-build-core>=1.1' 'cmake>=3.28' ninja",
        "python -m pip install -v --no-build-isolation .",
        "-Ctorchkiln.torch=2.13.0",
    )
    assert "Traceback" not in outcome.text


def test_named_torch(ground: Ground) -> None:
    outcome = run(ground, HOOK.format({"torchkiln.torch": "2.12.1", "torchkiln.cuda": "off"}))
    assert outcome.ended_well
    assert outcome.says("'torch==2.12.1'")
    outcome = run(ground, HOOK.format({"torchkiln.torch": "newest"}))
    assert not outcome.ended_well
    assert outcome.says("found torchkiln.torch=newest, needed a version such as 2.13.0")


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1+cpu", "2.13.0+cpu"])
def test_installed_torch_is_kept(ground: Ground, version: str, tmp_path: Path) -> None:
    """Without isolation the build requires no torch; the wheel requires the installed version."""
    ground.torch(version=version)
    outcome = run(ground, HOOK.format({"torchkiln.cuda": "off"}))
    assert outcome.ended_well
    assert "torch==" not in outcome.text
    outcome = run(ground, METADATA.format(str(tmp_path)))
    assert outcome.ended_well, outcome.text
    (metadata,) = tmp_path.glob("torchkiln-*.dist-info/METADATA")
    minor = version[: len("2.11")]
    required = [line for line in metadata.read_text().splitlines() if "Requires-Dist" in line]
    assert [line for line in required if "extra" not in line] == [
        f"Requires-Dist: torch=={minor}.*"
    ]


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1+cpu", "2.13.0+cu130"])
def test_pip_installs_nothing_but_torchkiln(ground: Ground, version: str) -> None:
    """The documented command installs only torchkiln beside this torch."""
    pytest.importorskip("pip")
    ground.torch(version=version)
    info = ground.site / f"torch-{version}.dist-info"
    ground.write(info / "METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    before = ground.files()
    pip = (sys.executable, "-m", "pip", f"--python={ground.python}", "install")
    done = subprocess.run(
        [*pip, "--no-build-isolation", "--dry-run", "--no-index", "--quiet", "--report=-", ROOT],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["install"]
    assert found["metadata"]["name"] == "torchkiln"
    assert f"torch=={version[:4]}.*" in found["metadata"]["requires_dist"]
    assert ground.files() == before


@pytest.mark.parametrize(
    ("cuda", "expression"),
    [("off", "BSD-3-Clause"), ("on", "BSD-3-Clause AND LicenseRef-NVIDIA-CUDA-EULA")],
)
def test_license_of_a_published_wheel(
    ground: Ground, cuda: str, expression: str, tmp_path: Path
) -> None:
    """A wheel with kernels contains NVIDIA's CUDA runtime, so it names that license, too."""
    variables = {"TORCHKILN_TORCHES": "/torches/2.13", "TORCHKILN_CUDA": cuda}
    outcome = run(ground, METADATA.format(str(tmp_path)), **variables)
    assert outcome.ended_well, outcome.text
    (info,) = tmp_path.glob("torchkiln-*.dist-info")
    lines = (info / "METADATA").read_text().splitlines()
    assert f"License-Expression: {expression}" in lines
    assert {"License-File: LICENSE", "License-File: THIRD_PARTY_NOTICES.txt"} <= set(lines)
    notices = (ROOT / "THIRD_PARTY_NOTICES.txt").read_text()
    for name in ("PyTorch", "pybind11", "CUB", "libcu++", "libstdc++", "CPython", "CUDA runtime"):
        assert name in notices


def test_older_python_is_refused(ground: Ground) -> None:
    """An older Python is refused before torch is downloaded for the build."""
    code = "import build_backend, sys; sys.version_info = (3, 10, 13)\n"
    outcome = run(ground, code + HOOK.format({"torchkiln.torch": "2.13.0"}))
    assert not outcome.ended_well
    assert outcome.says(f"found Python 3.10.13 ({ground.python}), needed 3.11 or newer")
