"""Views of leaves that require a gradient, taken under torch.no_grad()."""

from __future__ import annotations

import pytest
import torch

from torchkiln import testing
from torchkiln.testing.compare import outputs


@pytest.mark.parametrize("spec", testing.SPECS, ids=lambda spec: spec.name)
def test_results_require_a_gradient_as_torchs_do(
    spec: testing.OpSpec, device: torch.device
) -> None:
    """Results require a gradient as in torch, so backward() raises no error."""
    sample = spec.typical(device, torch.float32, requires_grad=True)
    for position in spec.wanted(sample):
        leaves = spec.leaves(sample, (position,))
        leaf = leaves.args[position]
        with torch.no_grad():
            call = leaves.substitute(position, leaf.view_as(leaf))
        assert call.args[position].requires_grad
        results = [outputs(call.call(f)) for f in (spec.op, spec.composite)]
        found, expected = ([t for t in every if t.requires_grad] for every in results)
        assert bool(found) == bool(expected)
        torch.autograd.backward(found, [torch.ones_like(t) for t in found])
        assert leaf.grad is None
