"""A build of a kernel: the name of its folder, its metadata, its files."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchkiln.hub_check.problem import Problem
from torchkiln.hub_check.project import BACKENDS

DEVICE = r"(?:cpu|cu\d+|rocm\d+|metal|xpu\d+|neuron|cann\d+)"
VARIANT = re.compile(
    rf"torch-(?:{'|'.join(sorted(BACKENDS))}|universal)"
    rf"|torch(?:-stable-abi)?\d+(?:-cxx11)?-{DEVICE}-(?:x86_64|aarch64)-(?:linux|darwin|windows)"
)


def check_build(folder: Path) -> Iterator[Problem]:
    """The problems of build/VARIANT, without problems of Python files and compiled modules."""
    if not VARIANT.fullmatch(folder.name):
        yield Problem(
            folder,
            "got a folder of this name, expected torch-BACKEND, or "
            "torchXY-cxx11-DEVICE-ARCH-linux, or torch-stable-abiXY-DEVICE-ARCH-linux",
        )
    if not (folder / "__init__.py").is_file():
        yield Problem(folder / "__init__.py", "expected the Python package of the kernel")
    path = folder / "metadata.json"
    try:
        metadata = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        yield Problem(path, f"got no JSON ({error}), expected the metadata of the kernel")
        return
    yield from check_metadata(path, metadata)
    yield from check_digests(path, metadata.get("digest"), has_modules=any(folder.rglob("*.so")))
    name = metadata.get("id")
    for module in folder.glob("*.so"):
        if module.name.partition(".")[0] != name:
            yield Problem(path, f"id: got {name!r}, expected the name of the module {module.name}")


def check_metadata(path: Path, metadata: dict[str, Any]) -> Iterator[Problem]:
    """The problems of single entries of the metadata."""
    if not re.fullmatch("[a-z][a-z0-9-]*", str(metadata.get("name", ""))):
        yield Problem(path, f"name: got {metadata.get('name')!r}, expected that of the kernel")
    unique = metadata.get("id")
    if not isinstance(unique, str) or not unique.replace("-", "_").isidentifier():
        yield Problem(path, f"id: got {unique!r}, expected a name for a module")
    if type(metadata.get("version")) is not int:
        yield Problem(path, f"version: got {metadata.get('version')!r}, expected a whole number")
    if not metadata.get("license"):
        yield Problem(path, "license: got none, expected an identifier such as Apache-2.0")
    backend = metadata.get("backend")
    kind = backend.get("type") if isinstance(backend, dict) else None
    if kind not in BACKENDS:
        known = ", ".join(sorted(BACKENDS))
        yield Problem(path, f"backend.type: got {kind!r}, expected one of {known}")


def check_digests(path: Path, digest: Any, *, has_modules: bool) -> Iterator[Problem]:
    """The problems of files whose contents differ from the digest of the build."""
    if not isinstance(digest, dict):
        if has_modules:
            yield Problem(path, "digest: got none, expected the SHA-256 of each file")
        return
    for name, expected in digest.get("files", {}).items():
        file = path.parent / name
        if not file.is_file():
            yield Problem(path, f"digest: got {name!r}, expected an existing file")
            continue
        found = base64.b64encode(hashlib.sha256(file.read_bytes()).digest()).decode()
        if found != expected:
            yield Problem(file, f"got SHA-256 {found}, expected {expected} of metadata.json")
