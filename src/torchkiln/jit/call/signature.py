"""The kernels of a source and their parameters, parsed to check calls before the launch."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

DTYPES = {
    "float": torch.float32,
    "double": torch.float64,
    "__half": torch.float16,
    "half": torch.float16,
    "__nv_bfloat16": torch.bfloat16,
    "nv_bfloat16": torch.bfloat16,
    "__nv_fp8_e4m3": torch.float8_e4m3fn,
    "__nv_fp8_e5m2": torch.float8_e5m2,
    "bool": torch.bool,
    "char": torch.int8,
    "signed char": torch.int8,
    "int8_t": torch.int8,
    "unsigned char": torch.uint8,
    "uint8_t": torch.uint8,
    "short": torch.int16,
    "int16_t": torch.int16,
    "unsigned short": torch.uint16,
    "uint16_t": torch.uint16,
    "int": torch.int32,
    "int32_t": torch.int32,
    "unsigned": torch.uint32,
    "unsigned int": torch.uint32,
    "uint32_t": torch.uint32,
    "long": torch.int64,
    "long long": torch.int64,
    "int64_t": torch.int64,
    "unsigned long": torch.uint64,
    "unsigned long long": torch.uint64,
    "uint64_t": torch.uint64,
    "size_t": torch.uint64,
}
"""The dtype for each C++ type of a tensor's elements."""

NUMBERS: dict[torch.dtype, type[ctypes._SimpleCData[Any]]] = {
    torch.float32: ctypes.c_float,
    torch.float64: ctypes.c_double,
    torch.bool: ctypes.c_bool,
    torch.int8: ctypes.c_int8,
    torch.uint8: ctypes.c_uint8,
    torch.int16: ctypes.c_int16,
    torch.uint16: ctypes.c_uint16,
    torch.int32: ctypes.c_int32,
    torch.uint32: ctypes.c_uint32,
    torch.int64: ctypes.c_int64,
    torch.uint64: ctypes.c_uint64,
}
"""The ctypes type that passes a number of each dtype."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel."""

    name: str
    type: str
    """The type without qualifiers such as const, and without the star of a pointer."""
    pointer: bool

    @cached_property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the tensor or number; None for types that the source defines."""
        return DTYPES.get(self.type)

    def __str__(self) -> str:
        return f"{self.type}{'*' if self.pointer else ''} {self.name}"


@dataclass(frozen=True)
class Signature:
    """A kernel's full name, its parameters and its template parameters."""

    name: str
    parameters: tuple[Parameter, ...]
    template: tuple[str, ...] = ()

    def instance(self, arguments: tuple[str, ...]) -> Signature:
        """The signature with the template parameters replaced by arguments."""
        types = dict(zip(self.template, arguments, strict=False))
        parameters = tuple(replace(p, type=types.get(p.type, p.type)) for p in self.parameters)
        return Signature(f"{self.name}<{', '.join(arguments)}>", parameters)

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.parameters))})"


COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
TOKEN = re.compile(r"namespace\s+([\w:]*)\s*\{|template\s*<|__global__|[{};]")
QUALIFIER = re.compile(
    r"\b(?:const|volatile|__restrict__|__restrict|restrict|__grid_constant__|struct|typename)\b"
)
ATTRIBUTE = re.compile(r"__(?:launch_bounds|cluster_dims|maxnreg)__\s*$")


def kernels_of(source: str) -> dict[str, Signature]:
    """The kernels that a source defines, by full name; templates count once."""
    text = COMMENT.sub(lambda m: m[0] if m[0].startswith('"') else " ", source)
    found: dict[str, Signature] = {}
    scopes: list[str | None] = []  # one for each open brace: the namespace's name, else None
    template: tuple[str, ...] = ()
    at = 0
    while match := TOKEN.search(text, at):
        at = match.end()
        token = match[0]
        if token.startswith("namespace"):
            scopes.append(match[1])
        elif token.startswith("template"):
            inside, at = enclosed(text, at, "<", ">")
            template = tuple(split(QUALIFIER.sub(" ", inside)))
        elif token == "__global__":
            name, parameters, at = declarator(text, at)
            if not name:
                continue
            full = "::".join([*(scope for scope in scopes if scope), name])
            names = tuple(re.findall(r"\w+(?=\s*(?:=|$))", entry)[0] for entry in template)
            found[full] = Signature(full, tuple(map(parameter, parameters)), names)
            template = ()
        else:
            if token == "{":
                scopes.append(None)
            elif token == "}" and scopes:
                scopes.pop()
            template = ()
    return found


def declarator(text: str, at: int) -> tuple[str, list[str], int]:
    """Name and parameters after ``__global__``, and the position after the parameters.

    The name is empty for an unfinished line, for which the compiler has a better message, and for
    an explicit template instantiation, whose definition is elsewhere in the source.
    """
    while True:
        opening = text.find("(", at)
        if opening < 0:
            return "", [], len(text)
        inside, end = enclosed(text, opening + 1, "(", ")")
        before = text[at:opening]
        if not ATTRIBUTE.search(before):
            words = [] if before.rstrip().endswith(">") else re.findall(r"\w+", before)
            return words[-1] if words else "", split(inside), end
        at = end


def enclosed(text: str, at: int, opening: str, closing: str) -> tuple[str, int]:
    """The text up to the closing bracket, and the position after the bracket."""
    depth = 1
    for i in range(at, len(text)):
        depth += (text[i] == opening) - (text[i] == closing)
        if depth == 0:
            return text[at:i], i + 1
    return text[at:], len(text)


def split(text: str) -> list[str]:
    """The parts between commas outside brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "<([{") - (character in ">)]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def parameter(text: str) -> Parameter:
    """The parameter of a declaration such as ``const float* x``."""
    declaration = QUALIFIER.sub(" ", text.partition("=")[0]).replace("std::", "")
    pointer = "*" in declaration or "[" in declaration
    declaration = re.sub(r"\[[^\]]*\]", " ", declaration)
    match = re.match(r"^(.*[\s*&>])(\w+)\s*$", declaration.strip())
    typed, name = (match[1], match[2]) if match else (declaration, "")
    if " ".join([typed, name]).split() == declaration.split() and declaration.strip() in DTYPES:
        typed, name = declaration, ""  # a type of two words without a name: unsigned int
    kind = " ".join(typed.replace("*", " ").replace("&", " ").split())
    return Parameter(name, canonical(kind), pointer)


def canonical(kind: str) -> str:
    """An integer type spelled as in DTYPES: ``int unsigned`` becomes ``unsigned int``."""
    words = kind.split()
    if set(words) <= {"unsigned", "signed", "long", "int", "short", "char"} and words:
        sign = ["unsigned"] if "unsigned" in words else []
        if "char" in words:
            return " ".join([*(["signed"] if "signed" in words else sign), "char"])
        size = ["long"] * min(words.count("long"), 2) or ["short"] * words.count("short") or ["int"]
        return " ".join([*sign, *size])
    return kind
