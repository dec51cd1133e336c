"""Linear layers as products in float8_e4m3fn, for ``replace(model, precision="fp8")``.

A layer is not replaced if FP8 saves no time, if the layer makes the outputs of the model, or if the
product cannot run. The report has the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn import functional as F

from torchkiln.nn.matmul import MLP, GatedMLP, pair_in_fp8
from torchkiln.nn.plain import has_hooks
from torchkiln.nn.quantize import can_join, forget_layer, gated_product, product, weight_of
from torchkiln.ops import _pair_fp8
from torchkiln.ops.quantize import Quantized, linear_fp8, quantize
from torchkiln.patch.compare import Comparison
from torchkiln.patch.formula.linear import (
    is_called_as_usual,
    is_exporting,
    is_tracing,
    plain_parameters,
)
from torchkiln.patch.plan import Plan, plan_of
from torchkiln.patch.probe import numbers, relative_error
from torchkiln.patch.report import Replacement
from torchkiln.typing import Gate, Head

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

STEP = 16
"""Layers with other sizes than multiples of it are not replaced: every call would pad copies."""

LEAST = 640
"""The least harmonic sum of the sizes of a product in FP8: 1 / (1 / rows + 1 / n + 1 / k).

An estimate for an H100, not a measurement. A training step multiplies 6 * rows * n * k times, at
750 TFLOP/s in bfloat16 and at 1300 in FP8. Quantising moves 4 bytes for each element of the three
matrices, at 2.8 TB/s. Saved and added time are equal at 420; the margin is for the launches of the
added kernels."""

CAPABILITY = (9, 0)
CUDA_VERSION = (12, 9)
"""The compute capability and the least CUDA version for products of scaled blocks of E4M3."""

HEAD = "FP8 leaves outputs of the model alone, unless head='fp8'"


@dataclass(frozen=True)
class LinearInFP8(Plan):
    """The plan that runs a ``torch.nn.Linear`` as a product in float8_e4m3fn."""

    kind = "linear"
    saved_as = "linear_fp8"
    rounds_alike = False

    def __str__(self) -> str:
        return "linear_fp8"

    def fits(self, module: Any, *args: Any) -> bool:
        """Whether the product can run in FP8, and takes less time there."""
        return len(args) == 1 and (type(args[0]) is Quantized or takes(module, args[0]))

    def takes_quantized(self, module: Any, x: Tensor, place: int | str | None) -> bool:
        """Whether the product can read a quantised ``x``."""
        return place is None and takes(module, x)

    def forward(self, module: Any, x: Tensor | Quantized, *_: Any) -> Tensor:
        """The product in FP8."""
        return product(module, x)


@dataclass(frozen=True)
class PairInFP8(Plan):
    """The products of a :class:`torchkiln.nn.MLP` or ``GatedMLP`` in float8_e4m3fn."""

    kind = "linear"
    saved_as = "mlp_fp8"
    rounds_alike = False

    def __str__(self) -> str:
        return "two linear_fp8"

    def fits(self, module: Any, *args: Any) -> bool:
        """Whether both products can run in FP8, and take less time there."""
        if len(args) != 1:
            return False
        return type(args[0]) is Quantized or take_pair(*layers_of(module), x=args[0])

    def takes_quantized(self, module: Any, x: Tensor, place: int | str | None) -> bool:
        """Whether the products can read a quantised ``x``."""
        return place is None and self.fits(module, x)

    def forward(self, module: Any, x: Tensor | Quantized, *_: Any) -> Tensor:
        """Both products in FP8, with the activation or the gate between them."""
        return pair_in_fp8(module, x)


def take_pair(*layers: Any, x: Any) -> bool:
    """Whether a call runs in FP8: the last layer reads the result of the others, which read x."""
    given = [plain_parameters(layer) for layer in layers]
    weights = [parameters[0] for parameters in given if parameters is not None]
    if len(weights) < len(layers) or len({(w.device, w.dtype) for w in weights}) > 1:
        return False
    return all(takes(layer, x) for layer in layers[:-1]) and gains(rows_of(x), weights[-1])


def gated_in_fp8(
    act: Gate, x: Tensor | Quantized, gate: Any, up: Any = None, *, swapped: bool = False
) -> Quantized:
    """A gated unit in FP8: of two layers, or of the halves of one, which ``swapped`` exchanges."""
    if up is None and swapped:
        return _pair_fp8.quantized_gate(act, *product(gate, x).chunk(2, -1)[::-1])
    if up is None:
        return _pair_fp8.gated(act, gate.weight, gate.bias, x, weight_of(gate))
    if can_join(gate, up):
        return gated_product(gate, up, x, act)
    one = x if isinstance(x, Quantized) else quantize(x)
    return _pair_fp8.quantized_gate(act, product(gate, one), product(up, one))


def layers_of(module: nn.Module) -> tuple[Any, Any]:
    """The first and the second layer of a feed-forward module."""
    names = ("up", "down") if isinstance(module, MLP) else ("gate_up", "down")
    first, down = map(module.get_submodule, names)
    return first, down


def missing(kind: str, index: int | None) -> str:
    """The unmet requirement of products in FP8, of device or torch, as text; "" if all are met."""
    return found_missing(kind, index)


# The mark that torch.compiler.assume_constant_result sets. That function is not called, because it
# imports the compiler, which takes 3 s.
missing._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def found_missing(kind: str, index: int | None) -> str:
    """missing(), cached per device. It is separate because Dynamo traces no cached function."""
    if kind != "cuda":
        return f"FP8 needs a GPU of compute capability 9.0, got {kind}"
    found = torch.cuda.get_device_capability(index)
    if found != CAPABILITY:
        return f"FP8 needs compute capability 9.0, got {found[0]}.{found[1]}"
    if not hasattr(F, "scaled_mm"):
        return f"FP8 needs torch.nn.functional.scaled_mm, got torch {torch.__version__}"
    version = torch.version.cuda or "0.0"
    if tuple(map(int, version.split(".")[:2])) < CUDA_VERSION:
        return f"FP8 needs a torch with CUDA 12.9, got {torch.version.cuda}"
    return ""


def device_of(weight: Tensor) -> torch.device:
    """The device on which a layer will run: for a layer on CPU or meta, the GPU."""
    if weight.device.type in {"cpu", "meta"} and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return weight.device


def least_rows(n: int, k: int) -> int | None:
    """The least rows for which FP8 saves time, with a weight ``[n, k]``; None if never."""
    left = n * k - LEAST * (n + k)
    return -(-LEAST * n * k // left) if left > 0 else None


def rows_of(x: Tensor) -> Any:
    """The number of rows of an input, as an integer or a symbol."""
    return x.numel() // x.shape[-1]


def gains(rows: Any, weight: Tensor) -> bool:
    """Whether a product of ``rows`` rows takes less time in FP8, with its quantisations."""
    least = least_rows(weight.shape[0], weight.shape[1])
    if least is None or not is_compiling():
        return least is not None and bool(rows >= least)
    # Imported here, because it imports sympy: at the top of the file it would add half a second to
    # the import of torchkiln.
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # noqa: PLC0415

    return guard_or_false(rows >= least)  # false for rows that depend on data


def takes(layer: Any, x: Any) -> bool:
    """Whether a layer of torch runs a call in FP8."""
    given = plain_parameters(layer)
    if given is None or is_tracing() or is_exporting() or not is_called_as_usual(*given, x):
        return False
    if not is_compiling() and is_differentiated():
        return False
    if x.dtype not in DTYPES or missing(x.device.type, x.device.index):
        return False
    return gains(rows_of(x), given[0])


def is_differentiated() -> bool:
    """Whether torch.func or forward-mode AD transforms the call; the op refuses such calls."""
    stack: Any = torch._C._functorch.peek_interpreter_stack()
    return stack is not None or forward_ad._current_level >= 0


def outputs_in_fp8(x: Any, layers: tuple[Any, ...]) -> list[Any]:
    """The outputs of layers that share an input, quantised once; empty if one is not in FP8."""
    if type(x) is Quantized:
        return [product(layer, x) for layer in layers]
    if len(layers) < 2 or not can_share(layers, x):
        return []
    one = quantize(x)
    return [product(layer, one) for layer in layers]


def can_share(layers: Sequence[Any], x: Any) -> bool:
    """Whether all layers that read x run in FP8, and none of them has hooks."""
    if not all(map(is_in_fp8, layers)) or not is_quantizable(x):
        return False
    return all(takes(layer, x) for layer in layers)


def is_quantizable(x: Any) -> bool:
    """Whether modules may get a quantised x: under autocast it would have no dtype to cast."""
    return type(x) is Tensor and not torch.is_autocast_enabled(x.device.type)


def is_in_fp8(layer: Any) -> bool:
    """Whether a layer is a product in FP8, and has no hooks."""
    return type(plan_of(layer)) is LinearInFP8 and not has_hooks(layer)


def heads_of(model: nn.Module) -> set[nn.Module]:
    """The linear layers that make the outputs of a model.

    These are layers with an output for each row of the largest embedding, layers that share its
    weight, those that the model returns as its output embeddings, and its last child.
    """
    linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    most = max((table.num_embeddings for table in tables), default=-1)
    tied = {id(table.weight) for table in tables}
    found: set[nn.Module] = {
        m for m in linear if m.out_features == most or id(m._parameters.get("weight")) in tied
    }
    outputs = getattr(model, "get_output_embeddings", None)  # models of transformers have it
    if callable(outputs) and isinstance(head := outputs(), nn.Module):
        found.add(head)
    children = [m for m in model.children() if next(m.parameters(), None) is not None]
    return found | set(children[-1:])


def why_not(layer: Any) -> str:
    """The reason why FP8 saves no time in a layer, or cannot run; empty if it saves time."""
    given = plain_parameters(layer)
    if given is None:
        return "its parameters are no plain tensors"
    weight, _ = given
    n, k = weight.shape
    if weight.dtype not in DTYPES:
        return f"FP8 rounds no {str(weight.dtype).removeprefix('torch.')}"
    device = device_of(weight)
    if lacking := missing(device.type, device.index):
        return lacking
    if n % STEP or k % STEP:
        return f"{n} x {k}: FP8 pads sizes that are no multiples of {STEP}"
    if least_rows(n, k) is None:
        return f"{n} x {k}: quantising takes longer than FP8 saves"
    return ""


@cache
def comparison(dtype: torch.dtype, device: torch.device) -> Comparison | str:
    """The errors of a small layer of torch and in FP8; the reason if the product fails."""
    x, weight = numbers(64, 256).to(device, dtype), numbers(128, 256, seed=1).to(device, dtype)
    try:
        with torch.no_grad():
            truth = F.linear(x.double(), weight.double())
            was, now = F.linear(x, weight), linear_fp8(x, weight)
            errors = relative_error(was, truth), relative_error(now, truth)
    except RuntimeError as error:
        return f"FP8 raised {str(error).strip().splitlines()[0]}"
    return Comparison(dtype, *errors, bitwise=False)


Found = tuple[Replacement, nn.Module, Plan]


def find(
    model: nn.Module,
    rows: list[Replacement],
    is_skipped: Callable[[str, nn.Module], bool],
    head: Head,
) -> Iterator[Found]:
    """The layers that take less time in FP8. Adds a row with the outcome for each linear layer."""
    heads = set() if head == "fp8" else heads_of(model)
    known = {row.name: row for row in rows}
    parts: set[nn.Module] = set()
    for name, module in model.named_modules():
        is_pair = type(module) in {MLP, GatedMLP}
        if not is_pair and (type(module) is not nn.Linear or module in parts):
            continue
        layers = layers_of(module) if is_pair else (module,)
        parts.update(layers)  # MLP and GatedMLP do not call their layers
        children = [child for child, _ in module.named_children()] if is_pair else []
        names = [f"{name}.{child}".lstrip(".") for child in children]
        each = ((name, module), *zip(names, layers, strict=False))
        if any(is_skipped(*one) for one in each) or "forward" in vars(module):
            continue
        if not all(type(layer) is nn.Linear for layer in layers):
            continue
        plan: Plan = PairInFP8() if is_pair else LinearInFP8()
        row = Replacement(name, type(module).__name__, plan.kind)
        reasons = [HEAD if layer in heads else why_not(layer) for layer in layers]
        row.reason = next(filter(None, reasons), "")
        if not row.reason:
            row.reason = recorded(row, layers[0].weight)
        if not row.reason:
            row.now = str(plan)
            put(rows, row)
            yield row, module, plan
        elif name in known:
            known[name].reason = row.reason
        else:
            rows.append(row)


def recorded(row: Replacement, weight: Tensor) -> str:
    """Adds the errors of the product to a row; returns the reason if it fails."""
    device = torch.device("cpu") if weight.is_meta else weight.device
    found = comparison(weight.dtype, device)
    if isinstance(found, str):
        return found
    found.record(row)
    return ""


def put(rows: list[Replacement], row: Replacement) -> None:
    """Adds a row, in place of a row with the same name."""
    rows[:] = [*(other for other in rows if other.name != row.name), row]


def forget(modules: Iterable[nn.Module]) -> None:
    """Frees the quantised weights of modules."""
    for module in modules:
        for part in module.modules():
            forget_layer(part)
