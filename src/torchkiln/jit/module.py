"""Modules of CUDA kernels: a compiled source whose kernels are attributes that can be launched."""

from __future__ import annotations

import functools
import math
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchkiln.jit.call.packing import MAX_BLOCK, MAX_GRID, Size, common_device, dimensions, pack
from torchkiln.jit.compile import driver
from torchkiln.jit.compile.build import architecture_of
from torchkiln.jit.compile.code import Code
from torchkiln.jit.compile.nvrtc import CompileError
from torchkiln.jit.compile.reload import Files

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchkiln.jit.call.signature import Signature
    from torchkiln.jit.compile.cache import Binary


class Instance:
    """A kernel of one version of a source, with the signature and the code of that version."""

    def __init__(self, code: Code, name: str) -> None:
        self.code = code
        self.signature = code.signature(name)
        self._functions: dict[int, driver.Function] = {}
        self._lock = threading.Lock()

    def function(self, device: int) -> driver.Function:
        """The kernel loaded on a device, which must be the current one."""
        function = self._functions.get(device)
        if function is not None:
            return function
        with self._lock:
            if device not in self._functions:
                name = self.signature.name
                binary = self.code.binary(architecture_of(device), name)
                self._functions[device] = driver.Function(name, binary.code, binary.names[name])
            return self._functions[device]


class Kernel:
    """A kernel of a :class:`Module`: ``kernel[grid, block](tensor, ..., n)`` launches it."""

    def __init__(self, module: Module, name: str) -> None:
        self.module = module
        self.name = name
        self._instance = Instance(module.code(), name)
        self.where = f"torchkiln.jit: {self.signature.name}"

    def instance(self) -> Instance:
        """The version that the next launch runs."""
        code = self.module.code()
        instance = self._instance
        if instance.code is not code:
            instance = self._instance = Instance(code, self.name)
        return instance

    @property
    def signature(self) -> Signature:
        """The kernel's name and parameters."""
        return self._instance.signature

    def __getitem__(self, launch: Any) -> Launch:
        """The launch for ``kernel[grid, block]`` or ``kernel[grid, block, bytes, stream]``.

        Grid (blocks) and block (threads) are a number or a tuple of up to three. ``bytes`` is the
        size of dynamic shared memory per block, by default 0; ``stream`` a torch.cuda.Stream.
        """
        if not isinstance(launch, tuple) or not 2 <= len(launch) <= 4:
            raise TypeError(
                f"{self.where}: got [{launch!r}], expected [grid, block, bytes, stream]"
            )
        grid, block, *more = launch
        shared_bytes = more[0] if more else 0
        return Launch(self, grid, block, shared_bytes, more[1] if len(more) > 1 else None)

    def __call__(self, *arguments: Any) -> None:
        """Raises a TypeError, because a launch needs a grid and a block."""
        call = f"{self.signature.name}[grid, block](...)"
        raise TypeError(
            f"{self.where}: got {len(arguments)} arguments and no grid, expected {call}"
        )

    def __repr__(self) -> str:
        return f"<kernel {self.signature} of {self.module.path}>"


class Launch:
    """A kernel with its grid and block, ready to be called."""

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
        self.grid = dimensions(where, "grid", grid, MAX_GRID)
        self.block = dimensions(where, "block", block, MAX_BLOCK)
        if math.prod(self.block) > MAX_BLOCK[0]:
            raise ValueError(f"{where}: block: got {block}, expected at most 1024 threads")
        if not isinstance(shared_bytes, int) or shared_bytes < 0:
            raise ValueError(f"{where}: bytes: got {shared_bytes!r}, expected 0 or more")
        if not (stream is None or hasattr(stream, "cuda_stream")):
            raise TypeError(f"{where}: stream: got {stream!r}, expected a torch.cuda.Stream")
        self.shared_bytes = shared_bytes
        self.stream = stream

    def __call__(self, *arguments: Any) -> None:
        """Checks the arguments and queues the kernel on the given or the current stream."""
        where, instance = self.kernel.where, self.kernel.instance()
        packed = pack(where, instance.signature, arguments)
        driver.require_gpu(instance.signature.name)
        device = common_device(where, instance.signature, arguments)
        index = torch.cuda.current_device() if device is None else device
        with driver.on_device(index):
            driver.make_current(index)
            if self.stream is None:
                stream = torch._C._cuda_getCurrentRawStream(index)
            else:
                stream = self.stream.cuda_stream
            function = instance.function(index)
            function.launch(self.grid, self.block, self.shared_bytes, stream, packed)


class Module:
    """The kernels of one source.

    A kernel is an attribute, ``module.scale``. An instance of a template or a kernel in a namespace
    has its C++ name: ``module["scale<float>"]``, ``module["mine::scale"]``.
    """

    def __init__(
        self,
        source: str,
        path: str,
        include: Sequence[str | Path] = (),
        options: Sequence[str] = (),
        *,
        files: Files | None = None,
    ) -> None:
        self.path = path
        self._include = tuple(map(Path, include))
        self._options = tuple(options)
        self._kernels: dict[str, Kernel] = {}
        self._files = files
        self._broken = ""
        self._lock = threading.Lock()
        self._code = Code(source, path, self._include, self._options)

    def code(self) -> Code:
        """The current version of the source. With ``reload=True`` a saved file is compiled first.

        A version that does not compile raises in every call until the next save. During the capture
        of a CUDA graph nothing is compiled.
        """
        if self._files is None or driver.capturing():
            return self._code
        with self._lock:
            while self._files.changed(closely=bool(self._broken)):
                self._broken = ""
                try:
                    source = self._files.source
                    self._code = Code(source, self.path, self._include, self._options)
                    break
                except CompileError as error:
                    # The file may have been read half-written; the loop checks again.
                    self._broken = str(error)
            if self._broken:
                raise CompileError(self._broken)
            return self._code

    @property
    def source(self) -> str:
        """The source that was compiled last."""
        return self._code.source

    @property
    def signatures(self) -> dict[str, Signature]:
        """The signatures of the kernels, by full name."""
        return self._code.signatures

    def binary(self, architecture: str, name: str = "") -> Binary:
        """The machine code that contains a kernel, for an architecture such as sm_90a."""
        return self.code().binary(architecture, name)

    def __getitem__(self, name: str) -> Kernel:
        """The kernel of that C++ name, template arguments included."""
        if name not in self._kernels:
            self._kernels[name] = Kernel(self, name)
        return self._kernels[name]

    def __getattr__(self, name: str) -> Kernel:
        """The kernel of that name."""
        if name.startswith("__"):
            raise AttributeError(name)
        return self[name]

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.signatures]


def load(
    path: str | Path,
    *,
    include: Sequence[str | Path] = (),
    options: Sequence[str] = (),
    reload: bool = False,
) -> Module:
    """Compiles a file of CUDA kernels, or reads the machine code from the cache.

    Args:
        path: the file. It may include torchkiln's headers and headers of its folder.
        include: folders with more headers.
        options: options for NVRTC, such as ``--use_fast_math``.
        reload: check at every launch whether the file or one of its own headers was saved, and
            compile the new version first. Kernels taken from the module earlier change, too.
    """
    file = Path(path).resolve()
    if not file.is_file():
        raise FileNotFoundError(f"torchkiln.jit: path: got {path}, expected a file")
    if not reload:
        return Module(file.read_text(encoding="utf-8"), str(file), include, options)
    files = Files(file, tuple(map(Path, include)), options)
    return Module(files.source, str(file), include, options, files=files)


def inline(
    source: str, *, include: Sequence[str | Path] = (), options: Sequence[str] = ()
) -> Module:
    """Compiles CUDA kernels from a string; compiler messages call it ``inline.cu``.

    The same string and options give the same module.
    """
    return _inline(source, tuple(include), tuple(options))


@functools.cache
def _inline(source: str, include: tuple[str | Path, ...], options: tuple[str, ...]) -> Module:
    return Module(source, "inline.cu", include, options)
