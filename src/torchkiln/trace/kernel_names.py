"""What the names of kernels say, which are the compiler's own: the choices that were made."""

from __future__ import annotations

import re

VECTOR_BYTES = 16
ACCESSES = (
    (r"LinearAccess<(?P<type>\w+)", "all operands in one order, in vectors"),
    (r"elementwise::RowAccess<\w+, (?P<type>\w+)", "operands adjacent in rows, in vectors"),
    (r"TurnedAccess<(?P<type>\w+)", "a transposed operand, in squares through shared memory"),
    (r"AnyAccess<(?P<type>\w+)", "other strides, alignments or dtypes, an element at a time"),
    (r"RowAccess<(?P<type>\w+), (?P<lanes>\d+), (?:true|false)>", "rows, in vectors"),
    (r"EdgedPlace<(?P<type>\w+), \d+>", "rows that begin anywhere, in vectors"),
    (r"(?:Gradient|Column)Body<(?:.*, )?(?P<type>\w+), (?P<lanes>\d+)>", "columns, in vectors"),
    (r"rows::packed<(?P<type>\w+), \w+, (?P<lanes>\d+)>", "short rows, in vectors"),
)
"""How kernels reach memory, by the types in their names."""

TYPE_BYTES = {"float": 4, "double": 8, "__half": 2, "__nv_bfloat16": 2}
TYPE_NAMES = {"__half": "float16", "__nv_bfloat16": "bfloat16"}


def pretty(demangled: str) -> tuple[str, str]:
    """The name of a kernel and, in angle brackets, what it was compiled for, without namespaces."""
    # Nsight Compute writes <unnamed>:: and drops what stands before.
    words = re.sub(r"\(anonymous namespace\)::|<?unnamed>::", "", demangled.removeprefix("void "))
    words = re.sub(r"\b(?:torchkiln|elementwise|columns|rows|cuda|cpu)::", "", words)
    words = re.sub(r"\((?:int|bool|long)\)", "", words)
    for cpp, name in TYPE_NAMES.items():
        words = words.replace(cpp, name)
    depth = 0
    for i, letter in enumerate(words):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0:
            words = words[:i]
            break
    name, bracket, rest = words.partition("<")
    return name, (bracket + rest).replace("> >", ">>")


def access_of(demangled: str) -> tuple[str, int | None, int | None]:
    """How a kernel reaches memory, bytes of an access, and vectors of a thread, from its name."""
    head = demangled.partition("(torchkiln::")[0] if "<" in demangled else demangled
    head = re.sub(r"\((?:int|bool|long)\)", "", head)
    for pattern, words in ACCESSES:
        match = re.search(pattern, head)
        if match is None:
            continue
        size = TYPE_BYTES.get(match["type"], 0)
        lanes = match.groupdict().get("lanes")
        width = size * int(lanes) if lanes else VECTOR_BYTES if "vectors" in words else size
        place = re.search(r"(?:RowPlace<.*?>|EdgedPlace<\w+), (\d+)>", head)
        told = words.replace("in vectors", "an element at a time") if width == size else words
        return told, width or None, int(place[1]) if place else None
    return "", None, None
