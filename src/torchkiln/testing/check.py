"""A check of the contract, and the table of checks, filled by torchkiln.testing.contract."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from torchkiln.testing.spec import OpSpec

CheckFunction = Callable[[OpSpec, torch.device, torch.dtype], None]


class UnavailableError(Exception):
    """A check cannot run on this machine; the message names the missing part."""


class ExcludedError(UnavailableError):
    """The spec excludes a check that cannot hold for its op; the message gives the reason."""


@dataclass(frozen=True)
class Check:
    """One clause of the contract. ``run`` raises AssertionError where the op breaks it."""

    name: str
    run: CheckFunction
    dtypes: tuple[torch.dtype, ...]
    device: str | None
    slow: bool
    large: bool
    needs: str | None
    """The field of the spec that the check needs; the check does not apply if the field has no
    value."""

    @property
    def promise(self) -> str:
        """The promise that the check verifies, as text for tables."""
        return " ".join((self.run.__doc__ or "").split())

    def applies(self, spec: OpSpec, device: torch.device) -> bool:
        """Whether the check applies to the spec."""
        wanted = self.needs is None or getattr(spec, self.needs) not in (None, ())
        here = self.device in (None, device.type) and device.type in spec.devices
        return wanted and here


CHECKS: dict[str, Check] = {}


def check(
    *,
    dtypes: tuple[torch.dtype, ...] = (torch.float32,),
    device: str | None = None,
    slow: bool = False,
    large: bool = False,
    needs: str | None = None,
) -> Callable[[CheckFunction], CheckFunction]:
    """Register a check under the name of its function."""

    def register(function: CheckFunction) -> CheckFunction:
        name = function.__name__
        if name in CHECKS:
            raise ValueError(f"torchkiln.testing: check {name} exists already")
        CHECKS[name] = Check(name, function, dtypes, device, slow, large, needs)
        return function

    return register
