"""Plans of formulas, and the conditions under which they are used."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from torchkiln.patch.formula.linear import is_tracing
from torchkiln.patch.formula.reads import Reads
from torchkiln.patch.formula.trace import Proof
from torchkiln.patch.plan import Plan


@dataclass(frozen=True, kw_only=True)
class ProvenPlan(Plan):
    """A plan for the calls in which a module is proven to compute a formula."""

    proof: Proof | None = None
    reads: Reads = Reads()  # noqa: RUF009  immutable

    def settings(self) -> dict[str, Any]:
        """The fields for pickles, with proof and conditions as types of Python."""
        proof = None if self.proof is None else tuple(self.proof)
        return {**super().settings(), "proof": proof, "reads": self.reads.settings()}

    @classmethod
    def loaded(cls, settings: dict[str, Any]) -> Plan:
        """The plan with these settings from a pickle."""
        proof = None if settings["proof"] is None else Proof(*settings["proof"])
        reads = Reads.loaded(settings["reads"])
        return super().loaded({**settings, "proof": proof, "reads": reads})

    def takes(self, module: Any, *args: Any) -> bool:
        """Whether tensors have a proven rank and dtype, and the conditions on the module hold."""
        proof, first = self.proof, args[0]
        if proof is None or is_tracing() or not is_torchs(first):
            return False
        dtype = first.dtype
        for x in args:
            if not (x is first or is_torchs(x)) or not is_dense(x) or x.dtype is not dtype:
                return False
            if x.dim() not in proof.ranks or not self.is_laid_out(x):
                return False
        if dtype not in proof.dtypes or (not proof.keeps_dtype and is_narrow(first)):
            return False
        return self.reads.hold(module)

    def is_laid_out(self, x: Tensor) -> bool:
        """Whether the new forward returns the strides of the original for this layout of ``x``."""
        return is_ordered(x)

    @property
    def keeps_dtype(self) -> bool:
        """Whether autocast computes no part of the formula in another dtype."""
        return self.proof is not None and self.proof.keeps_dtype


def is_torchs(x: Tensor) -> bool:
    """Whether the class of a tensor is torch's: ops of other classes may compute something else."""
    return type(x) is Tensor or type(x).__module__.startswith("torch.")


def is_dense(x: Tensor) -> bool:
    """Whether a tensor is strided: our ops take no nested or sparse tensors."""
    return x.layout is torch.strided and not x.is_nested


def is_narrow(x: Tensor) -> bool:
    """Whether autocast may compute in another dtype than that of ``x``."""
    return x.dtype is not torch.float32 and torch.is_autocast_enabled(x.device.type)


def is_ordered(x: Tensor) -> bool:
    """Whether torch's elementwise ops return a contiguous result: strides of ``x`` descend."""
    if x.is_contiguous():
        return True
    strides = [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size != 1]
    return all(strides) and all(a >= b for a, b in pairwise(strides))


def memory_order(x: Tensor) -> list[int] | None:
    """The dimensions in the order of memory; None unless the last one is the innermost.

    Torch's elementwise ops return a result with this order. None also if strides do not tell it.
    """
    strides = x.stride()
    order = sorted(range(len(strides)), key=strides.__getitem__, reverse=True)
    sizes = x.shape
    found = [strides[d] for d in order if sizes[d] != 1]
    is_told = all(found) and all(a > b for a, b in pairwise(found))
    return order if is_told and order[-1] == x.dim() - 1 else None
