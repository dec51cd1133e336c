"""Modules of the norms, compared with those of torch.nn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchkiln


def modules(**options: Any) -> list[tuple[nn.Module, nn.Module]]:
    """Pairs of our module and torch's, with the same options."""
    return [
        (torchkiln.nn.LayerNorm(7, **options), nn.LayerNorm(7, **options)),
        (torchkiln.nn.AddLayerNorm(7, **options), nn.LayerNorm(7, **options)),
        (torchkiln.nn.RMSNorm(7, **options), nn.RMSNorm(7, **options)),
        (torchkiln.nn.AddRMSNorm(7, **options), nn.RMSNorm(7, **options)),
    ]


@pytest.mark.parametrize(
    "options",
    [{}, {"eps": 1e-3}, {"elementwise_affine": False}, {"dtype": torch.bfloat16}],
    ids=str,
)
def test_modules_are_those_of_torch(options: dict[str, Any]) -> None:
    """The state_dicts are interchangeable with torch's, and results agree with torch."""
    dtype = options.get("dtype", torch.float32)
    for ours, torchs in modules(**options):
        assert isinstance(ours, type(torchs))
        assert ours.extra_repr() == torchs.extra_repr()
        assert list(ours.state_dict()) == list(torchs.state_dict())
        for left, right in zip(ours.parameters(), torchs.parameters(), strict=True):
            assert torch.equal(left, right)
            assert left.dtype == dtype
            nn.init.normal_(right)
        ours.load_state_dict(torchs.state_dict())
        torchs.load_state_dict(ours.state_dict())
        x = torch.randn(5, 7, dtype=dtype)
        rows = [x, torch.zeros_like(x)][: 1 + type(ours).__name__.startswith("Add")]
        found = ours(*rows)
        y = found[0] if isinstance(found, tuple) else found
        torch.testing.assert_close(y, torchs(x))


def test_layer_norm_without_bias() -> None:
    layer = torchkiln.nn.LayerNorm((3, 7), bias=False)
    assert list(layer.state_dict()) == ["weight"]
    x = torch.randn(2, 3, 7)
    torch.testing.assert_close(layer(x), nn.LayerNorm((3, 7), bias=False)(x))


def test_weights_around_zero() -> None:
    """With offset=1.0 a new module has a weight of 0, and scales by 1."""
    for kind in (torchkiln.nn.RMSNorm, torchkiln.nn.AddRMSNorm):
        layer = kind(7, 1e-6, offset=1.0)
        assert layer.weight.tolist() == [0.0] * 7
        settings = "(7,), eps=1e-06, elementwise_affine=True, offset=1.0"
        assert repr(layer) == f"{kind.__name__}({settings})"
    x = torch.randn(5, 7)
    expected = F.rms_norm(x, (7,), eps=1e-6)
    torch.testing.assert_close(torchkiln.nn.RMSNorm(7, 1e-6, offset=1.0)(x), expected)


def test_meta_then_materialised() -> None:
    """A module can be made on meta, moved to empty memory, and loaded, as large models are."""
    layer = torchkiln.nn.AddLayerNorm(4, device="meta")
    x = torch.empty(3, 4, device="meta")
    assert [t.shape for t in layer(x, x)] == [(3, 4), (3, 4)]
    layer = layer.to_empty(device="cpu")
    layer.load_state_dict({"weight": torch.ones(4), "bias": torch.arange(4.0)})
    y, total = layer(torch.ones(1, 4), torch.ones(1, 4))
    assert y.tolist() == [[0.0, 1.0, 2.0, 3.0]]
    assert total.tolist() == [[2.0] * 4]


def test_a_pre_norm_block_trains_as_with_torch(device: torch.device) -> None:
    """A block that passes both results of add_* on has torch's losses over some steps."""
    torch.manual_seed(0)
    first, second = nn.Linear(16, 16), nn.Linear(16, 16)
    state = [first.state_dict(), second.state_dict()]
    x = torch.randn(32, 16, device=device)
    y = torch.randn(32, 16, device=device)
    losses: list[list[float]] = []
    for ours in (True, False):
        layers = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)]).to(device)
        for layer, values in zip(layers, state, strict=True):
            layer.load_state_dict(values)
        norm = (torchkiln.nn.AddRMSNorm(16, 1e-6) if ours else nn.RMSNorm(16, 1e-6)).to(device)
        optimiser = torch.optim.SGD([*layers.parameters(), *norm.parameters()], lr=0.2)
        steps = []
        for _ in range(20):
            optimiser.zero_grad()
            branch = layers[0](x)
            if ours:
                normed, stream = norm(branch, x)
            else:
                stream = branch + x
                normed = norm(stream)
            loss = F.mse_loss(stream + layers[1](normed), y)
            loss.backward()
            optimiser.step()
            steps.append(loss.item())
        losses.append(steps)
    assert losses[0][-1] < 0.8 * losses[0][0]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
