"""A case: a check, a spec, a device and a dtype."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from torchkiln.testing import contract
from torchkiln.testing.check import Check, ExcludedError, UnavailableError
from torchkiln.testing.validation import validate, with_forms

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torchkiln.testing.spec import OpSpec


@dataclass(frozen=True)
class Case:
    """A check of one op on one device in one dtype."""

    spec: OpSpec
    check: Check
    device: torch.device
    dtype: torch.dtype

    def __str__(self) -> str:
        name = f"{self.spec.name}-{self.check.name}-{self.device.type}"
        if len(self.check.dtypes) == 1:
            return name
        return f"{name}-{str(self.dtype).removeprefix('torch.')}"

    def run(self) -> None:
        """Raise AssertionError if the op fails, UnavailableError if the check cannot run here."""
        if reason := self.spec.excluded.get(self.check.name):
            raise ExcludedError(f"not for {self.spec.name}: {reason}")
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise UnavailableError("no CUDA device")
        with warnings.catch_warnings():
            # Torch's own formulas and compiler warn about torch's own deprecations.
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", FutureWarning)
            try:
                self.check.run(self.spec, self.device, self.dtype)
            except Exception as error:
                error.add_note(f"{self.spec.name}: {self.check.name}: on {self.device}")
                raise


def cases(specs: Iterable[OpSpec], device: torch.device) -> Iterator[Case]:
    """A case per dtype for each check that applies to ``specs`` on ``device``.

    Raises SpecError before the first case if a spec is incomplete or contradicts itself.
    """
    known = tuple(specs)
    validate(known)
    for spec in with_forms(known):
        for entry in contract.CHECKS.values():
            if not entry.applies(spec, device):
                continue
            for dtype in entry.dtypes:
                if dtype in spec.dtypes:
                    yield Case(spec, entry, device, dtype)
