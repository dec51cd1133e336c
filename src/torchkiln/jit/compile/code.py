"""One version of a source: the signatures of its kernels and their machine code."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

from torchkiln.jit.call.signature import Signature, kernels_of, split
from torchkiln.jit.compile.build import architecture_of, build

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torchkiln.jit.compile.cache import Binary


class Code:
    """An immutable version of a source. A saved file gives a new version."""

    def __init__(
        self, source: str, path: str, include: Sequence[Path], options: Sequence[str]
    ) -> None:
        self.source = source
        self.path = path
        self.signatures = kernels_of(source)
        self._include = include
        self._options = options
        self._binaries: dict[tuple[str, str], Binary] = {}
        # Kernels that are not templates are compiled together here, so that errors appear early.
        self._plain = [name for name, found in self.signatures.items() if not found.template]
        self.binary(architecture_of(), *self._plain[:1])

    def binary(self, architecture: str, name: str = "") -> Binary:
        """The machine code that contains a kernel, for an architecture such as sm_90a."""
        names = self._plain if name in self._plain or not name else [name]
        key = (architecture, names[0] if names else "")
        if key not in self._binaries:
            self._binaries[key] = build(
                self.source,
                self.path,
                names,
                architecture=architecture,
                include=self._include,
                options=self._options,
            )
        return self._binaries[key]

    def signature(self, name: str) -> Signature:
        """The signature of the kernel of that C++ name, template arguments included."""
        base, _, rest = name.partition("<")
        signature = self.signatures.get(base.strip())
        if signature is None:
            raise AttributeError(self._missing_kernel(name))
        if rest:
            return signature.instance(tuple(split(rest.rstrip().removesuffix(">"))))
        if signature.template:
            example = f"{name}<{', '.join(signature.template)}>"
            raise AttributeError(
                f"torchkiln.jit: {self.path}: {name}: got no template arguments,"
                f" expected module[{example!r}] with types for {', '.join(signature.template)}"
            )
        return signature

    def _missing_kernel(self, name: str) -> str:
        close = get_close_matches(name, self.signatures, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        known = (
            f"one of {', '.join(self.signatures)}" if self.signatures else "a __global__ function"
        )
        return f"torchkiln.jit: {self.path}: got kernel {name!r}, expected {known}{hint}"
