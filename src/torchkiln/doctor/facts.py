"""What several findings depend on, read once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchkiln._loader import Torch, mismatch, read_record, read_torch
from torchkiln.doctor.driver import Driver, read_driver
from torchkiln.doctor.environment import Environment
from torchkiln.doctor.trial import Trial, import_once


@dataclass(frozen=True)
class Facts:
    """Of one environment."""

    torch: Torch | None
    torch_error: str | None
    """Why the files of a torch that is there tell no version."""
    record: dict[str, Any] | None
    """What was written down when the package was built."""
    record_error: str | None
    driver: Driver
    trial: Trial

    @property
    def building(self) -> bool:
        """Whether there is something to build, and so a use for compilers."""
        if self.record is None:
            return True
        if found := mismatch(self.record, self.torch):
            return not found.torches  # else another torch will do
        return bool(
            self.record["cuda"] is None
            and self.driver.device_there
            and self.torch
            and self.torch.cuda
        )


def gather(environment: Environment) -> Facts:
    """Read them."""
    torch, torch_error = None, None
    if environment.torch:
        try:
            torch = read_torch(environment.torch)
        # The file is run: whatever is wrong with it may come out.
        except Exception as error:
            torch_error = f"{type(error).__name__}: {error}"
    record, record_error = None, None
    if environment.package:
        try:
            record = read_record(environment.package)
            mismatch(record, torch)
        except (OSError, ValueError, KeyError) as error:
            record, record_error = None, f"{type(error).__name__}: {error}"
    trial = import_once(environment) if record else Trial()
    return Facts(torch, torch_error, record, record_error, read_driver(environment), trial)
