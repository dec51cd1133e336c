"""Modules around the op: copies, files and state."""

from __future__ import annotations

import copy
import io
import pickle

import torch
from torch import nn

from torchkiln.testing.check import check
from torchkiln.testing.compare import Where, require, require_identical
from torchkiln.testing.spec import FLOATING, OpSpec, Sample


def through_file(module: nn.Module) -> nn.Module:
    """A module of the same kind that got its state from a file."""
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(torch.load(file, weights_only=True), strict=True)
    return other


@check(dtypes=FLOATING)
def modules(spec: OpSpec, device: torch.device, dtype: torch.dtype) -> None:
    """pickle, deepcopy and state_dict keep the function; to() moves it."""
    if spec.module is None or spec.module_input is None:
        return
    module = spec.module(device, dtype)
    x = spec.module_input(device, dtype)
    where = Where(spec, "modules", Sample("module", (x,)))
    expected = module(x)
    copies = {
        "pickle": pickle.loads(pickle.dumps(module)),
        "deepcopy": copy.deepcopy(module),
        "state_dict": through_file(module),
        "to": copy.deepcopy(module).to(torch.float64).to(dtype),
    }
    for name, other in copies.items():
        require_identical(other(x), expected, where.at(name))
        require(repr(other) == repr(module), where.at(name), f"repr {other!r}")
        for left, right in zip(other.parameters(), module.parameters(), strict=True):
            require(left is not right, where.at(name), "shares a parameter with the original")
    for parameter in copies["deepcopy"].parameters():
        with torch.no_grad():
            parameter.add_(1)
    require(
        not torch.equal(copies["deepcopy"](x), expected),
        where,
        "the output does not depend on the parameters",
    )
