"""The contracts of pairs of layers with an activation or a gate between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchkiln
from torchkiln.testing.compare import steps
from torchkiln.testing.data import normal
from torchkiln.testing.derive import layer
from torchkiln.testing.refusals import GoodCall, Refusals
from torchkiln.testing.sample import Invalid, Sample, Traffic
from torchkiln.testing.spec import OpSpec
from torchkiln.testing.specs.activation import FORMULAS
from torchkiln.testing.specs.matmul.layers import FLAT

# Shapes of x, hidden features and output features.
SHAPES: Mapping[str, tuple[tuple[int, ...], int, int]] = (
    {"one": ((1, 1), 1, 1), "one row": ((1, 37), 5, 3), "prime": ((7, 13), 11, 17)}
    | {"no leading sizes": ((5,), 6, 3), "no rows": ((0, 5), 4, 3), "no terms": ((4, 0), 3, 2)}
    | {"no hidden": ((4, 5), 0, 2), "no columns": ((4, 5), 3, 0), "batch": ((2, 3, 5), 8, 4)}
    | {"tile and one": ((33, 65), 129, 31)}
)

GATES = ("silu", "gelu", "gelu_tanh")


def call(
    name: str, x: Tensor, hidden: int, out: int, *options: str, has_bias: bool, halves: int
) -> Sample:
    """A call with random weights whose rows have a Euclidean norm of about 1."""
    device, dtype, terms = x.device, x.dtype, x.shape[-1]
    up = normal("up", (halves * hidden, terms), device, torch.float64) / max(terms, 1) ** 0.5
    down = normal("down", (out, hidden), device, torch.float64) / max(hidden, 1) ** 0.5
    biases: tuple[Tensor | None, ...] = (None, None)
    if has_bias:
        sizes = {"up_bias": halves * hidden, "down_bias": out}
        biases = tuple(normal(each, (size,), device, dtype) for each, size in sizes.items())
    return Sample(name, (x, up.to(dtype), down.to(dtype), *biases, *options))


def inputs(
    acts: tuple[str, ...], halves: int, device: torch.device, dtype: torch.dtype
) -> Iterator[Sample]:
    """Calls with each activation, then each shape; they alternate the values of ``save``."""
    x = normal("x", (6, 10), device, dtype)
    turns = ("preact", "none")
    for i, act in enumerate(acts):
        for save in turns if i == 0 else turns[i % 2 :][:1]:
            name = "typical" if i == 0 and save == "preact" else f"{act}, {save}"
            yield call(name, x, 8, 7, act, save, has_bias=True, halves=halves)
    for i, (name, (shape, hidden, out)) in enumerate(SHAPES.items()):
        rows = normal("x", shape, device, dtype)
        options = (acts[i % len(acts)], turns[i % 2])
        yield call(name, rows, hidden, out, *options, has_bias=i % 3 == 0, halves=halves)
    yield call("defaults", x, 8, 7, has_bias=False, halves=halves)


class Hidden(NamedTuple):
    """The hidden layer, and the terms of its rounding errors."""

    value: Tensor
    moved: Tensor
    """The change of the value per relative error of the argument and of the value."""
    terms: Tensor
    """The sum of the absolute values of the value's terms, with the effect of errors in the
    argument."""
    linear: Tensor
    """A function whose gradients are the sums of the absolute terms of the value's gradients."""


def argument(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The argument of the activation, its magnitude, and a function linear in all arguments."""
    factor = steps(x.shape[-1])
    with torch.no_grad():
        value = F.linear(x, weight, bias)
        size = F.linear(x.abs(), weight.abs()) * factor
        terms = size if bias is None else size + bias.abs()
    linear = F.linear(x, weight.detach().abs()) + F.linear(x.detach().abs(), weight, bias)
    return value, terms, linear * factor


def plain(x: Tensor, weight: Tensor, bias: Tensor | None, act: str) -> Hidden:
    """The hidden layer of mlp."""
    formula = FORMULAS[act]
    z, terms, linear = argument(x, weight, bias)
    slope = formula.slope_terms(z) + formula.curvature * terms
    value = formula.exact(z)
    moved = value.abs() + slope * z.abs()
    return Hidden(value, moved, formula.terms(z) + slope * terms, linear * slope)


def gated(x: Tensor, weight: Tensor, bias: Tensor | None, act: str) -> Hidden:
    """The hidden layer of gated_mlp."""
    formula = FORMULAS[act]
    values = argument(x, weight, bias)
    (gate, up), (of_gate, of_up), (by_gate, by_up) = (v.chunk(2, -1) for v in values)
    slope = formula.slope_terms(gate) + formula.curvature * of_gate
    of_act = formula.terms(gate) + slope * of_gate
    size = up.abs() + of_up
    linear = by_gate * slope * size + by_up * of_act
    value = formula.exact(gate) * up
    moved = 2 * value.abs() + slope * gate.abs() * up.abs()
    return Hidden(value, moved, of_act * size, linear)


class Kind(NamedTuple):
    """The differences between mlp and gated_mlp."""

    hidden: Callable[..., Hidden]
    value: Callable[[str, Tensor], Tensor]
    """The activation or the gate by torch's functions."""
    exact: Callable[[str, Tensor], Tensor]
    act: str
    halves: int

    def arguments(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """x, weights, biases and the activation."""
        defaults = (None, None, self.act)
        return (*args, *defaults[len(args) - 3 :])[:6]

    def reference(self, *args: Any) -> Tensor:
        """The formula of the op in plain torch."""
        x, up, down, up_bias, down_bias, act = self.arguments(args)
        return F.linear(self.exact(act, F.linear(x, up, up_bias)), down, down_bias)

    def composite(self, *args: Any) -> Tensor:
        """The ops that a user would write."""
        x, up, down, up_bias, down_bias, act = self.arguments(args)
        return F.linear(self.value(act, F.linear(x, up, up_bias)), down, down_bias)

    def magnitude(self, *args: Any) -> Tensor:
        """The magnitude of the output, from both products."""
        x, up, down, up_bias, down_bias, act = self.arguments(args)
        hidden = self.hidden(x, up, up_bias, act)
        terms = F.linear(hidden.terms, down.abs()) * steps(down.shape[1])
        return terms if down_bias is None else terms + down_bias.abs()

    def intermediate_sensitivity(self, *args: Any) -> Tensor:
        """The effect of rounding the argument of the activation and the hidden layer."""
        x, up, down, up_bias, _, act = self.arguments(args)
        return F.linear(self.hidden(x, up, up_bias, act).moved, down.abs())

    def gradient_magnitude(self, *args: Any) -> Tensor:
        """A function whose gradients are the op's, with the absolute values of all terms."""
        x, up, down, up_bias, down_bias, act = self.arguments(args)
        hidden = self.hidden(x, up, up_bias, act)
        of_down = F.linear(hidden.terms.detach(), down, down_bias)
        of_up = F.linear(hidden.linear, down.detach().abs())
        return (of_down + of_up) * steps(max(*down.shape, 1))

    def bench(self, device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> Sample:
        """A call as in a transformer: 4 hidden features for each of x, or 8/3 with a gate."""
        rows, columns = shape
        hidden = 4 * columns if self.halves == 1 else -(-8 * columns // (3 * 64)) * 64
        sizes = ((rows, columns), (self.halves * hidden, columns), (columns, hidden))
        x, *weights = (torch.randn(size, device=device, dtype=dtype) for size in sizes)
        return Sample("bench", (x, *(weight / weight.shape[1] ** 0.5 for weight in weights)))


def products(sample: Sample) -> int:
    """Operations of the products of forward."""
    x, up, down = sample.args[:3]
    return 2 * int(x.shape[:-1].numel()) * int(up.numel() + down.numel())


def traffic(sample: Sample) -> Traffic:
    """Reads x and the weights, writes the output."""
    x, up, down = sample.args[:3]
    out = x.shape[:-1].numel() * down.shape[0] * x.itemsize
    return Traffic(x.nbytes + up.nbytes + down.nbytes + out, products(sample))


def backward_traffic(sample: Sample) -> Traffic:
    """Traffic that reads gradient, kept tensors, x and weights, and writes gradients."""
    x, up, down = sample.args[:3]
    rows = x.shape[:-1].numel() * x.itemsize
    kept = rows * (down.shape[0] + up.shape[0])
    return Traffic(2 * (x.nbytes + up.nbytes + down.nbytes) + kept, 2 * products(sample))


def halves_of(act: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """``act`` of the first half, times the second half."""
    gate, up = z.chunk(2, -1)
    return act(gate) * up


def activated(act: str, z: Tensor) -> Tensor:
    """The activation, computed with torch's function."""
    return FORMULAS[act].value(z)


def exactly_activated(act: str, z: Tensor) -> Tensor:
    """The formula of an activation."""
    return FORMULAS[act].exact(z)


def exact_gate(act: str, z: Tensor) -> Tensor:
    """The formula of a gate."""
    return halves_of(FORMULAS[act].exact, z)


def gate_rounded_once(act: str, z: Tensor) -> Tensor:
    """A gate that is computed in float32 or float64."""
    wide = z.to(torch.promote_types(z.dtype, torch.float32))
    return halves_of(FORMULAS[act].value, wide).to(z.dtype)


def invalid(name: str, device: torch.device) -> Iterator[Invalid]:
    """Calls with weights that do not match."""
    up_name = "up_weight" if name == "mlp" else "gate_up_weight"
    x, up = torch.ones(2, 4, device=device), torch.ones(6, 4, device=device)
    hidden = 6 if name == "mlp" else 3
    down = torch.ones(5, hidden, device=device)
    overload = getattr(torch.ops.torchkiln, name).default
    good = GoodCall(overload, Sample("good", (x, up, down)))
    yield good.changed(f"x: {FLAT}", x=x[0, 0])
    words = "expected 2 dimensions, the last of size 4, the last size of x"
    for wrong in (up[0], up.T, up[None]):
        said = f"{up_name}: got shape {list(wrong.shape)}, {words}"
        yield good.changed(said, **{up_name: wrong})
    of = f"the first size of {up_name}" if name == "mlp" else f"half of the first size of {up_name}"
    words = f"expected 2 dimensions, the last of size {hidden}, {of}"
    for wrong in (down[0], down.T, down[:, :-1]):
        yield good.changed(
            f"down_weight: got shape {list(wrong.shape)}, {words}", down_weight=wrong
        )
    if name == "gated_mlp":
        words = "expected an even number of rows, those of gate and up"
        yield good.changed(f"{up_name}: got shape [5, 4], {words}", gate_up_weight=up[:5])


def module_inputs(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The input of the modules."""
    return (normal("x", (6, 10), device, dtype),)


def spec(
    op: Callable[..., Tensor], kind: Kind, acts: tuple[str, ...], module: Callable[..., nn.Module]
) -> OpSpec:
    """The contract of mlp or gated_mlp."""
    name = op.__name__
    up = "up" if name == "mlp" else "gate_up"
    return OpSpec(
        op=op,
        reference=kind.reference,
        composite=kind.composite,
        magnitude=kind.magnitude,
        gradient_magnitude=kind.gradient_magnitude,
        # The hidden layer and its gradient are rounded before they are multiplied.
        output_sensitivity=kind.gradient_magnitude,
        intermediate_sensitivity=kind.intermediate_sensitivity,
        inputs=lambda device, dtype: inputs(acts, kind.halves, device, dtype),
        refusals=Refusals(
            dtypes={f"{up}_weight": "x", "down_weight": "x", f"{up}_bias": "x", "down_bias": "x"},
            shapes={
                f"{up}_bias": f"the first size of {up}_weight",
                "down_bias": "the first size of down_weight",
            },
            words={"act": acts_in_order(acts), "save": ("preact", "none")},
        ),
        invalid=lambda device: invalid(name, device),
        bench=kind.bench,
        large=None,
        traffic=traffic,
        backward_traffic=backward_traffic,
        autocast=(0, 1, 2, 3, 4),
        bench_shapes=((8192, 1024), (8192, 2048), (8192, 4096)),
        small_shapes=((1, 1024), (64, 1024)),
        opaque=True,
        threads_matter=True,
        helpers=("_gated_backward_with_output",) if name == "gated_mlp" else (),
        module=layer(module, 10, 8),
        module_inputs=module_inputs,
    )


def acts_in_order(acts: tuple[str, ...]) -> tuple[str, ...]:
    """The activations as messages list them."""
    return tuple(FORMULAS) if len(acts) > len(GATES) else GATES


MLP = spec(
    torchkiln.mlp,
    Kind(plain, activated, exactly_activated, "gelu", 1),
    ("gelu", *(act for act in FORMULAS if act != "gelu")),
    torchkiln.nn.MLP,
)
GATED_MLP = spec(
    torchkiln.gated_mlp,
    Kind(gated, gate_rounded_once, exact_gate, "silu", 2),
    GATES,
    torchkiln.nn.GatedMLP,
)
