"""Reads the memory access and the template arguments of a CUDA kernel from its C++ name."""

from __future__ import annotations

import re
from typing import NamedTuple

VECTOR_BYTES = 16
TYPE_BYTES = {"float": 4, "double": 8, "__half": 2, "__nv_bfloat16": 2}
TYPE_NAMES = {"__half": "float16", "__nv_bfloat16": "bfloat16"}

NAMESPACES = (
    *("torchkiln", "device", "elementwise", "rowwise", "reduce", "rows", "columns", "cuda", "gemm"),
    *("sm90", "tensor_core", "simt", "wgmma", "fp8"),
)
ENUMERATORS = {"Major": ("k", "outer")}
SHOWN_NAMESPACES = ("elementwise", "rows", "columns", "sm90", "tensor_core", "simt")
"""Namespaces shown in kernel names, because several contain kernels of the same name."""


class Access(NamedTuple):
    """A class of accessors, or a kernel, whose accesses to memory are all of one kind."""

    name: str
    """The C++ name below ``torchkiln::``. A test searches the sources for each name."""
    arguments: str
    """Pattern of the template arguments, with the element type and the lanes if these vary."""
    words: str
    """Text for reports; "in vectors" means 16-byte accesses, or accesses of all lanes."""


ACCESSES = (
    Access(
        "device::elementwise::LinearAccess",
        r"(?P<type>\w+)",
        "all operands in one order, in vectors",
    ),
    Access(
        "device::elementwise::RowAccess",
        r"\w+, (?P<type>\w+)",
        "operands adjacent in rows, in vectors",
    ),
    Access(
        "device::elementwise::TransposedAccess",
        r"(?P<type>\w+)",
        "a transposed operand, in squares through shared memory",
    ),
    Access(
        "device::elementwise::ElementAccess",
        r"(?P<type>\w+)",
        "rows at any alignment, or elements apart, an element at a time",
    ),
    Access(
        "device::elementwise::AnyAccess",
        r"(?P<type>\w+)",
        "other strides or dtypes, an element at a time",
    ),
    Access("rowwise::RowVectors", r"(?P<type>\w+), (?P<lanes>\d+)", "rows, in vectors"),
    Access("rowwise::UnalignedRowTile", r"(?P<type>\w+)", "rows at any alignment, in vectors"),
    Access("rowwise::PartTile", r"(?P<type>\w+)", "parts of long rows, in vectors"),
    Access(
        "cuda::cross_entropy_flat_rows",
        r"(?P<type>\w+)",
        "short rows through shared memory, in vectors",
    ),
    Access(
        "cuda::cross_entropy_flat_gradient",
        r"(?P<type>\w+), (?P<lanes>\d+)",
        "adjacent rows as one, in vectors",
    ),
    Access("reduce::rows::packed", r"(?P<type>\w+), \w+, (?P<lanes>\d+)", "short rows, in vectors"),
    Access(
        "reduce::rows::staged", r"(?P<type>\w+)", "short rows through shared memory, in vectors"
    ),
    Access("cuda::ColumnBody", r"(?P<type>\w+), \w+, (?P<lanes>\d+)", "columns, in vectors"),
    Access("cuda::GradientBody", r"(?:.*, )?(?P<type>\w+), (?P<lanes>\d+)", "columns, in vectors"),
    Access("cuda::ChannelAccess", r"(?P<type>\w+), \w+, (?P<lanes>\d+)", "channels, in vectors"),
    Access(
        "cuda::norm_slab_rows",
        r"(?P<type>\w+), (?P<lanes>\d+)",
        "slabs of rows copied in bulk to shared memory, in vectors",
    ),
    Access(
        "cuda::norm_gradients::slab_rows",
        r"(?P<type>\w+), (?P<lanes>\d+)",
        "slabs of rows copied in bulk to shared memory, in vectors",
    ),
    Access("gemm::sm90::matmul_kernel", "", "tiles copied by the tensor memory accelerator"),
    Access("gemm::sm90::gate_kernel", "", "tiles copied by the tensor memory accelerator"),
    Access("gemm::sm90::gate_gradient_kernel", "", "tiles copied by the tensor memory accelerator"),
    Access(
        "gemm::sm90::pixel_convolution_kernel",
        "",
        "tiles copied by the tensor memory accelerator, moments in registers",
    ),
)
# Matches the number of vectors of a row that a thread keeps in registers.
ITEMS = re.compile(r"rowwise::(?:RowTile<.*?>|UnalignedRowTile<\w+|PartTile<\w+), (\d+)[>,]")


def access_of(demangled: str) -> tuple[str, int | None, int | None]:
    """Memory access, bytes per access, and vectors per thread; None if the name is not known."""
    kernel = _without_parameters(demangled)
    for access in ACCESSES:
        match = re.search(rf"\btorchkiln::{access.name}<{access.arguments}\b", kernel)
        if match is None:
            continue
        found = match.groupdict()
        element = TYPE_BYTES.get(found.get("type", ""), 0)
        if "lanes" in found:
            width = min(element * int(found["lanes"]), VECTOR_BYTES)
        else:
            width = VECTOR_BYTES if "in vectors" in access.words else element
        words = access.words
        if width == element:
            words = words.replace("in vectors", "an element at a time")
        items = ITEMS.search(kernel)
        return words, width or None, int(items[1]) if items else None
    return "", None, None


def pretty(demangled: str) -> tuple[str, str]:
    """Name and template arguments of a kernel, without namespaces, with torch's names of dtypes."""
    name, bracket, arguments = _without_parameters(demangled).partition("<")
    *namespaces, name = name.split("::")
    if namespaces and namespaces[-1] in SHOWN_NAMESPACES:
        name = f"{namespaces[-1]}::{name}"
    elif namespaces and namespaces[0] not in NAMESPACES:
        name = "::".join([*namespaces, name])
    arguments = re.sub(rf"\b(?:{'|'.join(NAMESPACES)})::", "", arguments)
    arguments = re.sub(r"\((\w+)\)(\d+)", _enumerator, arguments)
    for cpp, dtype in TYPE_NAMES.items():
        arguments = arguments.replace(cpp, dtype)
    return name, (bracket + arguments).replace("> >", ">>")


def _enumerator(cast: re.Match[str]) -> str:
    """``Major::k`` for ``(Major)0``."""
    known = ENUMERATORS.get(cast[1], ())
    value = int(cast[2])
    return f"{cast[1]}::{known[value] if value < len(known) else value}"


def _without_parameters(demangled: str) -> str:
    """Remove the return type, parameters, casts of numbers and unnamed namespaces."""
    # Nsight Compute writes unnamed>:: and omits the namespaces before it.
    kernel = re.sub(r"\(anonymous namespace\)::|<?unnamed>::", "", demangled.removeprefix("void "))
    kernel = re.sub(r"\((?:int|bool|long)\)", "", kernel)
    depth = 0
    for i, letter in enumerate(kernel):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0:
            return kernel[:i]
    return kernel
