"""The import itself, tried in a process of its own, which may die of it."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass, field
from typing import Any

from torchkiln.doctor.environment import Environment

# Says on its last line what a process has that imported the package, and whether a kernel runs.
PROGRAM = """
import json, torch
print("torch is there", flush=True)
import torchkiln
devices = {}
# Where torch sees none, the first says why.
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
TIMEOUT = 300


@dataclass(frozen=True)
class Trial:
    """How it ended."""

    torch_error: str | None = None
    """Why torch itself cannot be imported."""
    error: str | None = None
    """Why this package cannot, beside a torch that can."""
    devices: dict[str, str | None] = field(default_factory=dict)
    """By torch's name of a GPU: why no kernel ran there; none where one did."""
    libraries: tuple[str, ...] = ()
    """The files that the process had loaded."""

    def error_on(self, device: str) -> str | None:
        """Why no kernel ran on a GPU that the driver sees."""
        return self.devices.get(device, "torch does not see it")


def import_once(environment: Environment) -> Trial:
    """Import the package and call an op on every device."""
    # -P: not what happens to lie in the current folder.
    answer = environment.run(environment.python, "-P", "-c", PROGRAM, timeout=TIMEOUT)
    if answer.status == 0:
        found: dict[str, Any] = json.loads(answer.out.strip().splitlines()[-1])
        return Trial(None, None, found["devices"], tuple(found["libraries"]))
    if answer.status is None:
        why = answer.error
    elif answer.status < 0:
        why = f"the process died of {_signal(-answer.status)}"
    else:
        lines = answer.error.strip().splitlines()
        why = _message(lines) or f"the process ended with status {answer.status}"
    return Trial(error=why) if "torch is there" in answer.out else Trial(torch_error=why)


def _message(lines: list[str]) -> str:
    """The error at the end of a traceback, which may have several lines."""
    starts = [i for i, line in enumerate(lines) if line and not line.startswith((" ", "Traceback"))]
    if not starts:
        return ""
    begin = starts[-1]
    for i in reversed(range(len(lines))):
        if lines[i].startswith("Traceback"):
            begin = next((s for s in starts if s > i), begin)
            break
    return "\n".join(lines[begin:])


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
