"""Usage: check_builds.py [spaces] [part] [nvcc]

Runs builds that are likely to fail, with the torch of this Python; all three unless some are named.
`spaces` builds, installs and imports the package where all paths have spaces; `part` builds the
kernels as a part of another project; `nvcc` compiles a kernel with a toolkit made of links in a
read-only folder, in the system's and in the registry's layout.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sandbox import PARTS, ROOT, Toolkit, real_toolkit

KERNELS = ROOT / "tests" / "consumer" / "kernels"
TRIAL = "import torch, torchkiln; assert torchkiln.relu(-torch.ones(3)).tolist() == [0, 0, 0]"


def run(*command: str | Path, **environment: str) -> None:
    start = time.perf_counter()
    # ccache finds files under another folder's name only if it has the base folder.
    cache = {"CCACHE_BASEDIR": str(ROOT), "CCACHE_NOHASHDIR": "1"}
    done = subprocess.run(command, env=os.environ | cache | environment, check=False)
    print(f"=== {command[0]} ...: {time.perf_counter() - start:.0f} s", flush=True)
    if done.returncode != 0:
        raise SystemExit(f"check_builds: exit {done.returncode} of: {' '.join(map(str, command))}")


def configure(sources: Path, build: Path, *options: str, **environment: str) -> None:
    python = f"-DPython_EXECUTABLE={sys.executable}"
    run("cmake", "-G", "Ninja", "-S", sources, "-B", build, python, *options, **environment)


def build_where_paths_have_spaces(folder: Path) -> None:
    sources, site = folder / "the sources", folder / "the site"
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (sources / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, sources / name)
    build = folder / "the build"
    configure(sources, build, "-DTORCHKILN_CUDA=OFF", "-DCMAKE_CXX_FLAGS_RELEASE=-O1")
    run("cmake", "--build", build)
    run("cmake", "--install", build, "--prefix", site / "torchkiln")
    shutil.copytree(sources / "src" / "torchkiln", site / "torchkiln", dirs_exist_ok=True)
    os.chdir(folder)
    run(sys.executable, "-c", TRIAL, PYTHONPATH=str(site))


def build_as_a_part(folder: Path) -> None:
    build = folder / "the build"
    configure(KERNELS, build, f"-DTORCHKILN_SOURCES={ROOT}", "-DTORCHKILN_CUDA=OFF")
    run("cmake", "--build", build, "--target", "with_kernels")
    run(build / "with_kernels")


def lay_out(toolkit: Toolkit, root: Path, registry: bool) -> None:
    """Creates a folder with links to the parts of a toolkit, and makes it read-only."""
    root.mkdir(parents=True)
    if registry:
        lib = "lib64" if (toolkit.root / "lib64").exists() else "lib"
        links = {"bin": "bin", "include": "include", "nvvm": "nvvm", "lib": lib}
    else:
        links = {path.name: path.name for path in toolkit.root.iterdir()}
    for name, source in links.items():
        (root / name).symlink_to(toolkit.root / source)
    if registry:
        for part in PARTS:
            (root.parents[1] / f"{part}-{toolkit.version}.1.dist-info").mkdir()
    for path in (root, root.parent, root.parents[1]):
        path.chmod(0o555)


def compile_with_links(folder: Path) -> None:
    import torch  # noqa: PLC0415

    toolkit = real_toolkit()
    if toolkit is None or toolkit.version != torch.version.cuda:
        found = toolkit.version if toolkit else "none"
        print(f"nvcc: found {found}, needed {torch.version.cuda}, torch's: no kernel was compiled")
        return
    layouts = [True] if not (toolkit.root / "lib64").exists() else [True, False]
    for registry in layouts:
        place = folder / ("registry" if registry else "system")
        root = place / "site packages" / ("nvidia" if registry else "opt") / "cu13"
        lay_out(toolkit, root, registry)
        build = place / "the build"
        options = ("-DTORCHKILN_CUDA=ON", "-DTORCHKILN_CUDA_ARCHITECTURES=90-real")
        configure(ROOT, build, *options, CUDACXX=str(root / "bin/nvcc"))
        target = "cuda/CMakeFiles/torchkiln_kernels.dir/pointwise.cu.o"
        run("cmake", "--build", build, "--target", target)
        for path in (root.parents[1], root.parent, root):
            path.chmod(0o755)


BUILDS = {
    "spaces": build_where_paths_have_spaces,
    "part": build_as_a_part,
    "nvcc": compile_with_links,
}


def main() -> None:
    wanted = sys.argv[1:] or list(BUILDS)
    for name in wanted:
        if name not in BUILDS:
            raise SystemExit(f"check_builds: got {name}, expected some of {', '.join(BUILDS)}")
        with tempfile.TemporaryDirectory(prefix="torchkiln ") as folder:
            BUILDS[name](Path(folder).resolve())
        print(f"ok     {name}", flush=True)


if __name__ == "__main__":
    main()
