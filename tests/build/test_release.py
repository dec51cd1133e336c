"""Workflows that build and attest wheels pin all packages by digest, and have few permissions."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import fetch_torches
import pytest
from sandbox import ROOT

GITHUB = ROOT / ".github"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def pinned(name: str) -> set[str]:
    """The packages of a requirements file; each must have a version and digests."""
    lines = (GITHUB / name).read_text().replace("\\\n", " ").splitlines()
    wanted = [line for line in lines if not line.startswith("#")]
    form = r"([\w.-]+)==[\w.]+( ;[^\\]+?)?( +--hash=sha256:[0-9a-f]{64})+"
    found = [re.fullmatch(form, line) for line in wanted]
    assert all(found), f"{name}: a line without a version or a digest"
    return {match[1] for match in found if match}


def test_tools_of_the_container_have_digests() -> None:
    groups = PYPROJECT["dependency-groups"]
    wanted = [re.split(r"[\[>=]", line)[0] for line in groups["build"] + groups["packaging"]]
    assert set(wanted) <= pinned("container.txt")
    assert {"cuda-toolkit", "nvidia-cuda-runtime", "nvidia-cuda-nvcc"} <= pinned("cuda.txt")
    commands = " ".join(PYPROJECT["tool"]["cibuildwheel"]["before-build"])
    assert commands.count("pip install") == commands.count("--require-hashes") == 2


def test_each_torch_of_a_release_has_digests() -> None:
    for version in PYPROJECT["tool"]["torchkiln"]["torches"]:
        assert f"torch=={version} " in (GITHUB / "torches" / f"{version}.txt").read_text()
        assert pinned(f"torches/{version}.txt") == {"torch"}


def test_torches_are_fetched_by_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default torches are pinned by digest; another CUDA version's come from its own index."""
    commands: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: commands.append([*command]))
    monkeypatch.delenv("TORCHKILN_TORCH_INDEX", raising=False)
    assert fetch_torches.fetch(tmp_path, "2.13.0", GITHUB / "torches") == tmp_path / "2.13"
    file = str(GITHUB / "torches" / "2.13.0.txt")
    assert commands[0][-3:] == ["--require-hashes", "--requirement", file]
    monkeypatch.setenv("TORCHKILN_TORCH_INDEX", "https://example.org/cu128")
    fetch_torches.fetch(tmp_path, "2.13.0", GITHUB / "torches")
    assert commands[1][-3:] == ["torch==2.13.0", "--index-url", "https://example.org/cu128"]


def test_wheels_are_tested_in_another_job() -> None:
    assert not [name for name in PYPROJECT["tool"]["cibuildwheel"] if name.startswith("test")]
    text = (GITHUB / "workflows" / "wheels.yml").read_text()
    assert re.search(r"\n  attest:\n.*\n    needs: \[sdist, wheels, test\]\n", text)
    assert re.search(r"\n  release_page:\n.*\n    needs: \[attest, test_labelled\]\n", text)


def test_only_a_new_label_runs_a_pull_request_on_our_machine() -> None:
    own = [path for path in GITHUB.glob("workflows/*") if "self-hosted" in path.read_text()]
    assert [path.name for path in own] == ["gpu.yml"]
    text = own[0].read_text()
    assert re.findall(r"pull_request:\n +types: (.*)", text) == ["[labeled]"]
    (condition,) = re.findall(r"\n    if: (.*)", text)
    assert condition == "github.event_name == 'push' || github.event.label.name == 'gpu'"


def test_tools_of_hooks_and_of_ci_have_versions() -> None:
    assert "nox" in pinned("nox.txt")
    workflows = "\n".join(path.read_text() for path in GITHUB.glob("workflows/*.yml"))
    installs = re.findall(r"pip\"? install (.*)", workflows)
    assert all(words.startswith("--require-hashes -r .github/") for words in installs), installs
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    assert re.findall(r"- repo: (.*)", hooks) == ["local"]
    tools = re.findall(r"additional_dependencies: \[(.*)\]", hooks)
    assert len(tools) == hooks.count("language: python")
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", tool) for tool in ", ".join(tools).split(", "))


def test_the_page_tells_how_to_verify_what_is_attested() -> None:
    assert "actions/attest-build-provenance@" in (GITHUB / "workflows" / "wheels.yml").read_text()
    assert "gh attestation verify torchkiln-" in (ROOT / "docs" / "install.md").read_text()
