"""Attention and layers of torch.nn: results, gradients, parameters and errors equal torch's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchkiln

DIM, HEADS, BATCH, TARGETS, SOURCES = 12, 3, 2, 5, 4


def pair(name: str, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Our module and torch's, with equal parameters."""
    made = []
    for home in (torchkiln.nn, nn):
        torch.manual_seed(0)
        made.append(getattr(home, name)(*args, dtype=torch.float64, **kwargs))
    ours, theirs = made
    assert isinstance(ours, type(theirs))
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()), rtol=0, atol=0)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        nn.init.normal_(b, std=0.4)  # also biases, which would be 0
        a.data.copy_(b)
    return ours, theirs


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def compare(ours: Any, theirs: Any, inputs: list[Tensor], call: Any) -> None:
    """Results, and gradients of inputs and parameters, of both modules are equal."""
    found = []
    for module in (ours, theirs):
        result = call(module)
        outputs = [t for t in (result if isinstance(result, tuple) else (result,)) if t is not None]
        torch.manual_seed(1)
        grads = [torch.randn(t.shape, dtype=t.dtype) for t in outputs]  # the strides do not matter
        leaves = [*dict.fromkeys(inputs), *module.parameters()]
        found.append((outputs, torch.autograd.grad(outputs, leaves, grads, allow_unused=True)))
    torch.testing.assert_close(found[0], found[1])


def causal(tokens: int) -> Tensor:
    return torch.ones(tokens, tokens, dtype=torch.bool).triu(1)


PADDING = torch.tensor([[False, False, True, False], [False, False, False, True]])
MASK = torch.zeros(TARGETS, SOURCES, dtype=torch.bool)
MASK[1, 2] = MASK[3, 0] = True
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "padding": {"key_padding_mask": PADDING},
    "bool": {"attn_mask": MASK},
    "float": {"attn_mask": torch.linspace(-2, 2, MASK.numel()).view(MASK.shape).double()},
    "heads": {"attn_mask": torch.stack([MASK, MASK.flip(0)] * HEADS)},
    "both": {"attn_mask": MASK, "key_padding_mask": PADDING},
}


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
def test_masks(masks: str, batch_first: bool, need_weights: bool) -> None:
    ours, theirs = pair("MultiheadAttention", DIM, HEADS, batch_first=batch_first)
    query, memory = draw(TARGETS, BATCH, DIM), draw(SOURCES, BATCH, DIM)

    def call(module: Any) -> Any:
        q, m = (t.transpose(0, 1) if batch_first else t for t in (query, memory))
        return module(q, m, m, need_weights=need_weights, **MASKS[masks])

    compare(ours, theirs, [query, memory], call)


@pytest.mark.parametrize(
    "options",
    [
        {"bias": False},
        {"kdim": 7, "vdim": 9},
        {"kdim": 7, "vdim": 9, "bias": False},
        {"add_bias_kv": True},
        {"add_zero_attn": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("batched", [True, False])
def test_options(options: dict[str, Any], batched: bool) -> None:
    ours, theirs = pair("MultiheadAttention", DIM, HEADS, **options)
    middle = (BATCH,) if batched else ()
    query = draw(TARGETS, *middle, DIM)
    key = draw(SOURCES, *middle, options.get("kdim", DIM))
    value = draw(SOURCES, *middle, options.get("vdim", DIM))
    mask = MASKS["float"]["attn_mask"]
    for masks in ({}, {"attn_mask": mask}):
        compare(
            ours,
            theirs,
            [query, key, value],
            lambda module, masks=masks: module(query, key, value, need_weights=False, **masks),
        )


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("padding", [None, torch.tensor([[False] * 4 + [True], [False] * 5])])
def test_causal_hint(need_weights: bool, padding: Tensor | None) -> None:
    ours, theirs = pair("MultiheadAttention", DIM, HEADS)
    x = draw(TARGETS, BATCH, DIM)
    options = {"attn_mask": causal(TARGETS), "is_causal": True, "key_padding_mask": padding}
    compare(ours, theirs, [x], lambda module: module(x, x, x, need_weights=need_weights, **options))


def test_weights_of_each_head_and_by_default() -> None:
    ours, theirs = pair("MultiheadAttention", DIM, HEADS)
    x = draw(TARGETS, BATCH, DIM)
    compare(ours, theirs, [x], lambda module: module(x, x, x))
    compare(ours, theirs, [x], lambda module: module(x, x, x, average_attn_weights=False))


@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        (((5, 2, 11), (5, 2, 11), (5, 2, 11)), {}),
        (((5, 2, 12), (4, 2, 12), (3, 2, 12)), {}),
        (((5, 12), (4, 2, 12), (4, 2, 12)), {}),
        (((5, 2, 12), (4, 2, 12), (4, 2, 12)), {"attn_mask": torch.zeros(5, 5).double()}),
        (((5, 2, 12), (4, 2, 12), (4, 2, 12)), {"key_padding_mask": torch.zeros(2, 5).bool()}),
        (((5, 2, 12), (4, 2, 12), (4, 2, 12)), {"attn_mask": torch.zeros(5, 4).int()}),
        (((5, 2, 12), (5, 2, 12), (5, 2, 12)), {"is_causal": True}),
    ],
)
def test_errors_are_torchs(shapes: Any, options: dict[str, Any]) -> None:
    ours, theirs = pair("MultiheadAttention", DIM, HEADS)
    inputs = [draw(*shape) for shape in shapes]
    errors = []
    for module in (ours, theirs):
        with pytest.raises((RuntimeError, AssertionError)) as error:
            module(*inputs, need_weights=False, **options)
        errors.append(error)
    assert errors[0].type is errors[1].type


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize(
    "activation",
    ["relu", "gelu", nn.GELU("tanh"), F.silu, torch.tanh],
    ids=["relu", "gelu", "gelu_tanh", "silu", "tanh"],
)
@pytest.mark.parametrize("dropout", [0.0, 1.0])
def test_layers(norm_first: bool, batch_first: bool, activation: Any, dropout: float) -> None:
    """Layers agree with torch's; with dropout = 1, random masks do not matter."""
    options = {
        "dropout": dropout,
        "activation": activation,
        "norm_first": norm_first,
        "batch_first": batch_first,
        "bias": activation != "gelu",
    }
    x, memory = draw(4, 4, DIM), draw(4, 4, DIM)
    padding = torch.zeros(4, 4, dtype=torch.bool)
    padding[1, 3] = True
    for module in pair("TransformerEncoderLayer", DIM, HEADS, 16, **options):
        assert type(module.self_attn).__name__ == "MultiheadAttention"
    masks = {"src_mask": causal(4), "src_key_padding_mask": padding}
    for given in ({}, masks, {"src_mask": causal(4), "is_causal": True}):
        layers = pair("TransformerEncoderLayer", DIM, HEADS, 16, **options)
        compare(*layers, [x], lambda module, given=given: module(x, **given))
    layers = pair("TransformerDecoderLayer", DIM, HEADS, 16, **options)
    compare(
        *layers,
        [x, memory],
        lambda module: module(
            x, memory, causal(4), tgt_is_causal=True, memory_key_padding_mask=padding
        ),
    )


@pytest.mark.parametrize("name", ["TransformerEncoderLayer", "TransformerDecoderLayer"])
def test_in_eval_compiled_and_copied(name: str) -> None:
    ours, theirs = pair(name, DIM, HEADS, 16, batch_first=True)
    ours, theirs = copy.deepcopy(ours).eval(), theirs.eval()
    inputs = [draw(2, 4, DIM).detach() for _ in range(1 + name.endswith("DecoderLayer"))]
    with torch.no_grad():
        torch.testing.assert_close(ours(*inputs), theirs(*inputs))
    compiled: Any = torch.compile(ours, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), theirs(*inputs))


def test_replaced_layers_and_hooks_are_called() -> None:
    ours, _ = pair("TransformerEncoderLayer", DIM, HEADS, 16, dropout=0.0)
    x = draw(4, 2, DIM)
    seen: list[str] = []
    for name in ("linear1", "linear2", "norm2"):
        getattr(ours, name).register_forward_hook(lambda *_, name=name: seen.append(name))
    ours(x)
    assert seen == ["linear1", "linear2", "norm2"]
    ours.linear1 = nn.Sequential(ours.linear1)
    assert ours(x).shape == x.shape


def test_in_torchs_encoder() -> None:
    layer, plain = pair("TransformerEncoderLayer", DIM, HEADS, 16, dropout=0.0)
    x = draw(4, 2, DIM)
    encoders = [
        nn.TransformerEncoder(module, 2, enable_nested_tensor=False) for module in (layer, plain)
    ]
    torch.testing.assert_close(encoders[0](x), encoders[1](x))


def test_bfloat16_and_autocast() -> None:
    ours, theirs = pair("TransformerEncoderLayer", DIM, HEADS, 16, dropout=0.0)
    x = torch.randn(4, 2, DIM)
    truth = theirs(x.double())
    y = copy.deepcopy(ours).bfloat16()(x.bfloat16())
    torch.testing.assert_close(y.double(), truth, rtol=0.05, atol=0.1)
    with torch.autocast("cpu", torch.bfloat16):
        y = ours.float()(x)
    assert y.dtype == theirs.float()(x).dtype
    torch.testing.assert_close(y.double(), truth, rtol=0.05, atol=0.1)
