"""Facts that several findings share, each read once: torch, build, driver, GPUs, a test import."""

from __future__ import annotations

import ctypes
import json
import re
import signal
from dataclasses import dataclass, field
from typing import Any

from torchkiln._loader import RECORD, Torch, mismatch, read_record, read_torch
from torchkiln.doctor.environment import Environment

NO_DEVICE = 100
"""CUDA_ERROR_NO_DEVICE, which cuInit returns without a visible GPU."""
MAJOR, MINOR = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR."""

IMPORT_SECONDS = 300
# Imports torch and torchkiln and runs a kernel on each device; the last line is the result.
PROGRAM = """
import json, torch
print("torch is there", flush=True)
import torchkiln
devices = {}
# If torch sees no GPU, the attempt on cuda:0 fails with the reason.
for index in range((torch.cuda.device_count() or 1) if torchkiln.build_info()["cuda"] else 0):
    try:
        assert torchkiln.square(torch.full((3,), 3.0, device=f"cuda:{index}")).sum().item() == 27
        devices[f"cuda:{index}"] = None
    except Exception as error:
        devices[f"cuda:{index}"] = (str(error) or type(error).__name__).splitlines()[0]
assert torchkiln.square(torch.full((3,), 3.0)).sum().item() == 27
try:
    with open("/proc/self/maps") as maps:
        libraries = sorted({line.split(None, 5)[5].strip() for line in maps if ".so" in line})
except OSError:
    libraries = []
print(json.dumps({"devices": devices, "libraries": libraries}))
"""


@dataclass(frozen=True)
class Gpu:
    """One GPU; torch numbers GPUs in the same order."""

    name: str
    capability: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.name} (compute capability {self.capability[0]}.{self.capability[1]})"


@dataclass(frozen=True)
class Driver:
    """Facts from libcuda and nvidia-smi."""

    version: str | None = None
    """The driver's version from nvidia-smi, such as 580.159.04."""
    cuda: str | None = None
    """Newest CUDA version that the driver supports, such as 13.0."""
    gpus: tuple[Gpu, ...] = ()
    """GPUs that a process sees."""
    present: tuple[str, ...] = ()
    """Names of all installed GPUs, visible or not."""
    smi_error: str | None = None
    """Message of a failed nvidia-smi; None if it worked or is not installed."""
    library_error: str | None = None
    """The reason why libcuda.so.1 cannot be loaded."""
    code: int = 0
    """First error code of libcuda."""

    @property
    def device_there(self) -> bool:
        """Whether a GPU is installed, visible or not."""
        return bool(self.gpus or self.present)


@dataclass(frozen=True)
class Trial:
    """The result of importing torchkiln and running a kernel in a separate process."""

    torch_error: str | None = None
    """The reason why ``import torch`` fails."""
    error: str | None = None
    """The reason why ``import torchkiln`` fails although torch can be imported."""
    devices: dict[str, str | None] = field(default_factory=dict)
    """For each GPU, by torch's name, the reason why no kernel ran; None if one ran."""
    libraries: tuple[str, ...] = ()
    """Shared libraries that the process had loaded."""

    def error_on(self, device: str) -> str | None:
        """The reason why no kernel ran on a GPU that the driver sees; None if one ran."""
        return self.devices.get(device, "torch does not see it")


@dataclass(frozen=True)
class Facts:
    """All facts about one environment."""

    torch: Torch | None
    torch_error: str | None
    """The reason why the version of an installed torch cannot be read."""
    record: dict[str, Any] | None
    """Record that was written when torchkiln was built."""
    record_error: str | None
    driver: Driver
    trial: Trial

    @property
    def building(self) -> bool:
        """Whether torchkiln must be built here, which needs compilers."""
        if self.record is None:
            return True
        if found := mismatch(self.record, self.torch):
            return not found.torches  # if another torch fits, no build is needed
        return bool(
            self.record["cuda"] is None
            and self.driver.device_there
            and self.torch
            and self.torch.cuda
        )


def gather(environment: Environment) -> Facts:
    """Read all facts about an environment."""
    torch, torch_error = None, None
    if environment.torch:
        try:
            torch = read_torch(environment.torch)
        # torch/version.py is executed: a damaged file may raise any error.
        except Exception as error:
            torch_error = f"{type(error).__name__}: {error}"
    record, record_error = None, None
    if environment.package:
        try:
            record = read_record(environment.package)
        except ImportError as error:
            record_error = f"{RECORD} is damaged: {error.__cause__}"
    trial = try_import(environment) if record else Trial()
    return Facts(torch, torch_error, record, record_error, read_driver(environment), trial)


def read_driver(environment: Environment) -> Driver:
    """Query nvidia-smi and libcuda."""
    version, present, smi_error = _query_smi(environment)
    if not present:
        folder = environment.at("/proc/driver/nvidia/gpus")
        present = tuple(path.name for path in sorted(folder.glob("*")))
    try:
        library = environment.load_library("libcuda.so.1")
    except OSError as error:
        return Driver(version, None, (), present, smi_error, str(error))
    number, code = _query(library, "cuDriverGetVersion")
    cuda = None if code else f"{number // 1000}.{number % 1000 // 10}"
    code = library.cuInit(0)  # required before the device functions
    if code:
        return Driver(version, cuda, (), present, smi_error, None, code)
    count, code = _query(library, "cuDeviceGetCount")
    gpus = tuple(_gpu(library, index) for index in range(0 if code else count))
    return Driver(version, cuda, gpus, present, smi_error, None, code)


def _query(library: Any, function: str, *arguments: int) -> tuple[int, int]:
    """Call a function that stores one number; returns the number and the error code."""
    value = ctypes.c_int()
    code = getattr(library, function)(ctypes.byref(value), *arguments)
    return value.value, int(code)


def _gpu(library: Any, index: int) -> Gpu:
    device, _ = _query(library, "cuDeviceGet", index)
    name = ctypes.create_string_buffer(256)
    library.cuDeviceGetName(name, len(name), device)
    major, _ = _query(library, "cuDeviceGetAttribute", MAJOR, device)
    minor, _ = _query(library, "cuDeviceGetAttribute", MINOR, device)
    return Gpu(name.value.decode(errors="replace"), (major, minor))


def _query_smi(environment: Environment) -> tuple[str | None, tuple[str, ...], str | None]:
    """Driver version, names of all GPUs and error message of nvidia-smi."""
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


def try_import(environment: Environment) -> Trial:
    """Import torchkiln in a separate process, which may crash, and run a kernel per device."""
    # -P: do not import files of the current folder.
    answer = environment.run(environment.python, "-P", "-c", PROGRAM, timeout=IMPORT_SECONDS)
    if answer.status == 0:
        found: dict[str, Any] = json.loads(answer.out.strip().splitlines()[-1])
        return Trial(None, None, found["devices"], tuple(found["libraries"]))
    if answer.status is None:
        why = answer.error
    elif answer.status < 0:
        why = f"the process was killed by {_signal_name(-answer.status)}"
    else:
        why = _last_error(answer.error) or f"the process ended with status {answer.status}"
    return Trial(error=why) if "torch is there" in answer.out else Trial(torch_error=why)


def _last_error(text: str) -> str:
    """The message below the last traceback, which may have several lines."""
    _, traceback, after = text.strip().rpartition("Traceback (most recent call last):")
    lines = after.splitlines()
    starts = [i for i, line in enumerate(lines) if re.match(r"\S", line)]
    if not starts:
        return ""
    return "\n".join(lines[starts[0] if traceback else starts[-1] :])


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
