"""Kernels do not depend on torch: none of their files includes torch's headers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INCLUDE = re.compile(
    r'^\s*#\s*include\s*[<"]\s*((?:torch|ATen|c10|caffe2)/[^>"]*)[>"]', re.MULTILINE
)
SOURCES = {".cu", ".cuh", ".h", ".hpp", ".cpp", ".cc", ".inl", ".in"}


def torch_includes(text: str) -> list[str]:
    """The torch headers that a source includes."""
    return INCLUDE.findall(text)


@pytest.mark.parametrize("folder", ["cuda", "cpp/cpu"])
def test_no_torch_below(folder: str) -> None:
    files = [p for p in (ROOT / folder).rglob("*") if p.suffix in SOURCES]
    assert len(files) >= 3
    found = {str(p.relative_to(ROOT)): torch_includes(p.read_text()) for p in files}
    assert {name: headers for name, headers in found.items() if headers} == {}


@pytest.mark.parametrize(
    "line",
    [
        "#include <torch/extension.h>",
        '#include "ATen/ATen.h"',
        "  #  include <c10/cuda/CUDAStream.h>",
        "#pragma once\n#include<ATen/Dispatch.h>",
    ],
)
def test_the_search_finds(line: str) -> None:
    assert len(torch_includes(line)) == 1


@pytest.mark.parametrize(
    "line",
    [
        "#include <torchkiln/device/vec.cuh>",
        "// see torch/csrc",
        '#include "torchkiln/core/dtype.h"',
    ],
)
def test_the_search_spares(line: str) -> None:
    assert torch_includes(line) == []
