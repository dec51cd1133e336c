"""Sources of kernels as modules whose functions launch them."""

from __future__ import annotations

import functools
import math
import threading
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchkiln.jit import driver
from torchkiln.jit.arguments import MOST_BLOCKS, MOST_THREADS, Size, pack, placed, sizes
from torchkiln.jit.build import architecture_of, build
from torchkiln.jit.signature import Signature, kernels_of, split

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchkiln.jit.cache import Binary


class Kernel:
    """A kernel of a :class:`Module`: ``kernel[grid, block](tensor, ..., n)`` queues it."""

    def __init__(self, module: Module, signature: Signature) -> None:
        self.module = module
        self.signature = signature
        self.where = f"torchkiln.jit: {signature.name}"
        self._functions: dict[int, driver.Function] = {}
        self._lock = threading.Lock()

    def __getitem__(self, launch: Any) -> Launch:
        """Grid, block, and if wanted the bytes of dynamic shared memory and a torch.cuda.Stream.

        Grid and block are a number or a tuple of up to three.
        """
        if not isinstance(launch, tuple) or not 2 <= len(launch) <= 4:
            raise TypeError(
                f"{self.where}: got [{launch!r}], expected [grid, block, bytes, stream]"
            )
        grid, block, shared_bytes, stream = (*launch, 0, None)[:4]
        return Launch(self, grid, block, shared_bytes, stream)

    def __call__(self, *arguments: Any) -> None:
        """An error: how many threads are to run is for the caller to say."""
        call = f"{self.signature.name}[grid, block](...)"
        raise TypeError(
            f"{self.where}: got {len(arguments)} arguments and no grid, expected {call}"
        )

    def function(self, device: int) -> driver.Function:
        """The kernel in the memory of a device, which is the current one."""
        with self._lock:
            if device not in self._functions:
                binary = self.module.binary(architecture_of(device), self.signature.name)
                lowered = binary.names[self.signature.name]
                self._functions[device] = driver.Function(self.signature.name, binary.code, lowered)
            return self._functions[device]

    def __repr__(self) -> str:
        return f"<kernel {self.signature} of {self.module.path}>"


class Launch:
    """A kernel with its grid: what is called."""

    def __init__(
        self,
        kernel: Kernel,
        grid: Size,
        block: Size,
        shared_bytes: Any,
        stream: torch.cuda.Stream | None,
    ) -> None:
        where = kernel.where
        self.kernel = kernel
        self.grid = sizes(f"{where}: grid", grid, MOST_BLOCKS)
        self.block = sizes(f"{where}: block", block, MOST_THREADS)
        if math.prod(self.block) > MOST_THREADS[0]:
            raise ValueError(f"{where}: block: got {block}, expected at most 1024 threads")
        if not isinstance(shared_bytes, int) or shared_bytes < 0:
            raise ValueError(f"{where}: bytes: got {shared_bytes!r}, expected 0 or more")
        self.shared_bytes = shared_bytes
        self.stream = stream

    def __call__(self, *arguments: Any) -> None:
        """Checks the arguments and queues the kernel on the current stream of their device."""
        kernel = self.kernel
        packed = pack(kernel.where, kernel.signature, arguments)
        driver.require_gpu(kernel.signature.name)
        device = placed(kernel.where, kernel.signature, arguments)
        index = torch.cuda.current_device() if device is None else device
        with torch.cuda.device(index):
            driver.make_current(index)
            stream = self.stream or torch.cuda.current_stream(index)
            function = kernel.function(index)
            function.launch(self.grid, self.block, self.shared_bytes, stream.cuda_stream, packed)


class Module:
    """Kernels of one source, as attributes; those of templates and namespaces by their C++ names.

    ``module.scale``, ``module["scale<float>"]``, ``module["mine::scale"]``.
    """

    def __init__(
        self,
        source: str,
        path: str,
        include: Sequence[str | Path] = (),
        options: Sequence[str] = (),
    ) -> None:
        self.source = source
        self.path = path
        self.signatures = kernels_of(source)
        self._include = tuple(map(Path, include))
        self._options = tuple(options)
        self._kernels: dict[str, Kernel] = {}
        self._binaries: dict[tuple[str, str], Binary] = {}
        # All that are no templates are compiled together, at once: errors are heard here.
        self._plain = [name for name, found in self.signatures.items() if not found.template]
        self.binary(architecture_of(), *self._plain[:1])

    def binary(self, architecture: str, name: str = "") -> Binary:
        """The machine code with a kernel for an architecture such as sm_90a."""
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

    def __getitem__(self, name: str) -> Kernel:
        """The kernel of that C++ name, template arguments included."""
        if name not in self._kernels:
            base, _, rest = name.partition("<")
            signature = self.signatures.get(base.strip())
            if signature is None:
                raise AttributeError(self._missing(name))
            if rest:
                signature = signature.instance(tuple(split(rest.rstrip().removesuffix(">"))))
            elif signature.template:
                example = f"{name}<{', '.join(signature.template)}>"
                raise AttributeError(
                    f"torchkiln.jit: {self.path}: {name}: got no template arguments,"
                    f" expected module[{example!r}] with types for {', '.join(signature.template)}"
                )
            self._kernels[name] = Kernel(self, signature)
        return self._kernels[name]

    def _missing(self, name: str) -> str:
        close = get_close_matches(name, self.signatures, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        known = ", ".join(self.signatures) or "a __global__ function, of which it has none"
        return f"torchkiln.jit: {self.path}: got kernel {name!r}, expected one of {known}{hint}"

    def __getattr__(self, name: str) -> Kernel:
        """The kernel of that name."""
        if name.startswith("__"):
            raise AttributeError(name)
        return self[name]

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.signatures]


def load(
    path: str | Path, *, include: Sequence[str | Path] = (), options: Sequence[str] = ()
) -> Module:
    """Compiles a file of CUDA kernels, or takes from the cache what it was compiled to.

    Args:
        path: the file. It may include torchkiln's headers and those beside it.
        include: folders with more headers.
        options: NVRTC's, such as ``--use_fast_math``.
    """
    file = Path(path).resolve()
    if not file.is_file():
        raise FileNotFoundError(f"torchkiln.jit: path: got {path}, expected a file")
    return Module(file.read_text(encoding="utf-8"), str(file), include, options)


def inline(
    source: str, *, include: Sequence[str | Path] = (), options: Sequence[str] = ()
) -> Module:
    """The same of a string, for notebooks; messages call it ``inline.cu``.

    The same string gives the same module.
    """
    return _inline(source, tuple(include), tuple(options))


@functools.cache
def _inline(source: str, include: tuple[str | Path, ...], options: tuple[str, ...]) -> Module:
    return Module(source, "inline.cu", include, options)
