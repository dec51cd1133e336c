"""The driver and its GPUs, from libcuda itself; what it does not tell, from nvidia-smi."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from torchkiln.doctor.environment import Environment

NO_DEVICE = 100
MAJOR, MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_...


@dataclass(frozen=True)
class Gpu:
    """A GPU, in the order of torch's numbers."""

    name: str
    capability: tuple[int, int]

    def __str__(self) -> str:
        """The name, as a person would write it."""
        return f"{self.name} (compute capability {self.capability[0]}.{self.capability[1]})"


@dataclass(frozen=True)
class Driver:
    """What the driver says."""

    version: str | None = None
    """Of nvidia-smi: 580.159.04."""
    cuda: str | None = None
    """The newest CUDA that it runs: 13.0."""
    gpus: tuple[Gpu, ...] = ()
    """Those that a process sees."""
    present: tuple[str, ...] = ()
    """Those that are there, visible or not, as nvidia-smi names them."""
    smi_error: str | None = None
    """What nvidia-smi said instead of answering; none where it is not there, too."""
    library_error: str | None = None
    """Why libcuda.so.1 cannot be loaded."""
    code: int = 0
    """What libcuda answered first that was not success."""

    @property
    def device_there(self) -> bool:
        """Whether there is a GPU, whoever sees it."""
        return bool(self.gpus or self.present)


def read_driver(environment: Environment) -> Driver:
    """Ask both."""
    version, present, smi_error = _ask_smi(environment)
    if not present:
        present = tuple(
            path.name for path in sorted(environment.at("/proc/driver/nvidia/gpus").glob("*"))
        )
    try:
        library = environment.load_library("libcuda.so.1")
    except OSError as error:
        return Driver(version, None, (), present, smi_error, str(error))
    cuda, code = _number(library, "cuDriverGetVersion")
    words = None if code else f"{cuda // 1000}.{cuda % 1000 // 10}"
    # Without this, device functions say that nothing has been initialised.
    code = library.cuInit(0)
    if code:
        return Driver(version, words, (), present, smi_error, None, code)
    count, code = _number(library, "cuDeviceGetCount")
    gpus = tuple(_gpu(library, index) for index in range(count if code == 0 else 0))
    return Driver(version, words, gpus, present, smi_error, None, code)


def _number(library: Any, function: str, *arguments: int) -> tuple[int, int]:
    """What a function writes behind its first pointer, and what it returns."""
    value = ctypes.c_int()
    code = getattr(library, function)(ctypes.byref(value), *arguments)
    return value.value, int(code)


def _gpu(library: Any, index: int) -> Gpu:
    device, _ = _number(library, "cuDeviceGet", index)
    name = ctypes.create_string_buffer(256)
    library.cuDeviceGetName(name, len(name), device)
    major, _ = _number(library, "cuDeviceGetAttribute", MAJOR, device)
    minor, _ = _number(library, "cuDeviceGetAttribute", MINOR, device)
    return Gpu(name.value.decode(errors="replace"), (major, minor))


def _ask_smi(environment: Environment) -> tuple[str | None, tuple[str, ...], str | None]:
    smi = environment.which("nvidia-smi")
    if smi is None:
        return None, (), None
    answer = environment.run(smi, "--query-gpu=driver_version,name", "--format=csv,noheader")
    if answer.status != 0:
        said = (answer.out + answer.error).strip().splitlines()
        return None, (), said[0] if said else f"exit status {answer.status}"
    rows = [line.split(", ", 1) for line in answer.out.strip().splitlines()]
    rows = [row for row in rows if len(row) == 2]
    return (rows[0][0] if rows else None), tuple(name for _, name in rows), None
