"""The sources of a kernel: the description of the build, the binding, the Python package."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchkiln.hub_check.problem import Problem
from torchkiln.hub_check.python_source import check_package

BACKENDS = {"cann", "cpu", "cuda", "metal", "neuron", "rocm", "xpu"}
FIXED = re.compile(r"\b(?:STABLE_)?TORCH_LIBRARY(?:_FRAGMENT|_IMPL)?\s*\(\s*(\w+)")
"""A registration in a namespace with a fixed name."""


def check_project(folder: Path) -> Iterator[Problem]:
    """The problems of a project with build.toml."""
    path = folder / "build.toml"
    try:
        config = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        yield Problem(path, f"got no TOML: {error}")
        return
    general = config.get("general", {})
    name = general.get("name")
    yield from check_general(path, general)
    for wanted in ("flake.nix", "CARD.md"):
        if not (folder / wanted).is_file():
            yield Problem(folder / wanted, "expected this file beside build.toml")
    sources = list(sources_of(config))
    for source in sources:
        if not (folder / source).is_file():
            yield Problem(path, f"src: got {source!r}, expected an existing file")
    binding = [s for s in config.get("torch", {}).get("src", []) if str(s).endswith(".cpp")]
    if binding:
        yield from check_bindings([folder / source for source in binding])
    if isinstance(name, str):
        package = folder / "torch-ext" / name.replace("-", "_")
        if (package / "__init__.py").is_file():
            yield from check_package(package)
        else:
            yield Problem(package / "__init__.py", "expected the Python package of the kernel")


def check_general(path: Path, general: dict[str, Any]) -> Iterator[Problem]:
    """The problems of the section [general]."""
    name, version = general.get("name"), general.get("version")
    if not isinstance(name, str) or not re.fullmatch("[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        yield Problem(path, f"general.name: got {name!r}, expected small letters and dashes")
    if type(version) is not int or version < 0:
        yield Problem(path, f"general.version: got {version!r}, expected a whole number")
    if not general.get("license"):
        yield Problem(path, "general.license: got none, expected an identifier such as Apache-2.0")
    backends = general.get("backends")
    if not backends or not set(backends) <= BACKENDS:
        known = ", ".join(sorted(BACKENDS))
        yield Problem(path, f"general.backends: got {backends!r}, expected some of {known}")


def sources_of(config: dict[str, Any]) -> Iterator[str]:
    """The files that the build compiles."""
    for section in (config.get("torch", {}), *config.get("kernel", {}).values()):
        yield from section.get("src", [])


def check_bindings(paths: list[Path]) -> Iterator[Problem]:
    """The problems of the C++ files that register ops."""
    texts = {path: path.read_text(encoding="utf-8") for path in paths if path.is_file()}
    for path, text in texts.items():
        for match in FIXED.finditer(text):
            if match[1] != "TORCH_EXTENSION_NAME":
                yield Problem(
                    path,
                    f"got ops in the namespace {match[1]}, expected TORCH_EXTENSION_NAME with "
                    "TORCH_LIBRARY_EXPAND or STABLE_TORCH_LIBRARY_EXPAND: another one per build",
                    text.count("\n", 0, match.start()) + 1,
                )
    together = "\n".join(texts.values())
    if texts and "REGISTER_EXTENSION(TORCH_EXTENSION_NAME)" not in together:
        yield Problem(
            next(iter(texts)),
            "got no REGISTER_EXTENSION(TORCH_EXTENSION_NAME), expected it: Python imports builds",
        )
