"""Modules around the op: copies, files and state."""

from __future__ import annotations

import copy
import io
import pickle

import torch
from torch import nn

from torchkiln.testing.check import check
from torchkiln.testing.compare import Where, outputs, require, require_same
from torchkiln.testing.sample import FLOATING, Sample
from torchkiln.testing.spec import OpSpec


def through_file(module: nn.Module) -> nn.Module:
    """A copy of the module whose state was saved to a file and loaded again."""
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(torch.load(file, weights_only=True), strict=True)
    return other


@check(dtypes=FLOATING, needs="module")
def modules(spec: OpSpec, device: torch.device, dtype: torch.dtype) -> None:
    """pickle, deepcopy, state_dict and to() keep the results of the module."""
    if spec.module is None or spec.module_inputs is None:
        raise TypeError(f"{spec.name}: modules: got None, expected module and module_inputs")
    module = spec.module(device, dtype)
    sample = Sample("module", spec.module_inputs(device, dtype), seed=0)
    where = Where(spec, "modules", sample)
    expected = sample.call(module)
    copies = {
        "pickle": pickle.loads(pickle.dumps(module)),
        "deepcopy": copy.deepcopy(module),
        "state_dict": through_file(module),
        "to": copy.deepcopy(module).to(torch.float64).to(dtype),
    }
    for name, other in copies.items():
        require_same(sample.call(other), expected, where.at(name))
        require(repr(other) == repr(module), where.at(name), f"repr {other!r}")
        for left, right in zip(other.parameters(), module.parameters(), strict=True):
            require(left is not right, where.at(name), "shares a parameter with the original")
    parameters = list(copies["deepcopy"].parameters())
    for parameter in parameters:
        with torch.no_grad():
            parameter.add_(1)
    require(
        not parameters
        or not torch.equal(outputs(sample.call(copies["deepcopy"]))[0], outputs(expected)[0]),
        where,
        "the output does not depend on the parameters",
    )
