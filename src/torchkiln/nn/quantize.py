"""The linear layer in float8_e4m3fn."""

import functools
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.compiler import is_compiling

from torchkiln import _C
from torchkiln.ops._after_steps import call_after_steps
from torchkiln.ops.quantize import (
    Quantized,
    QuantizedWeight,
    gated_linear_fp8,
    linear_fp8,
    quantize_weight,
)
from torchkiln.typing import Gate

BLOCK = 128
"""Rows and columns of a weight that share a scale."""


def has_group() -> bool:
    """Whether the process is one of a group.

    FSDP2, and collectives such as broadcast, write to a weight without a change of its version.
    """
    return dist.is_available() and dist.is_initialized()


class WeightCache:
    """A weight in float8_e4m3fn, quantised again where the weight may have changed.

    Several weights with the same columns are quantised as one, which has all their rows.
    """

    def __init__(self) -> None:
        self.watch: _C.Watch | None = None
        self.is_trained = False
        """Whether the weight requires a gradient."""
        self.value: QuantizedWeight | None = None
        self.stream = 0
        """The handle of the stream whose kernels wrote it."""

    def of(self, *weights: Tensor) -> QuantizedWeight | None:
        """The quantised weight; None where the op must quantise it in every call.

        It must do so in a CUDA graph, which would keep old values, for tensors without a version,
        and in a process of a group.
        """
        is_trained = False
        for one in weights:
            if one.is_inference() or type(one) is not nn.Parameter:
                return None
            if one.requires_grad:
                is_trained = True
        weight = weights[0]
        if has_group():
            self.value = None
            return None
        stream = 0
        if weight.is_cuda:
            if torch.cuda.is_current_stream_capturing():
                return None
            stream = torch._C._cuda_getCurrentRawStream(weight.device.index)
        self.is_trained = is_trained
        if self.value is None or self.watch is None or not self.watch.is_current(weights):
            self.value = None  # frees the old value before the new one is made
            with torch.inference_mode(mode=False), torch.no_grad():
                self.value = quantize_weight(torch.cat(weights) if weights[1:] else weight)
            self.watch, self.stream = _C.Watch(weights), stream
            if weight.is_cuda:  # calls on other streams read it, too
                torch.cuda.current_stream(weight.device).synchronize()
        elif stream != self.stream:
            for tensor in self.value:
                tensor.record_stream(torch.cuda.current_stream(weight.device))
        return self.value


CACHES: WeakKeyDictionary[nn.Module, WeightCache] = WeakKeyDictionary()
"""The quantised weights by layer, outside of the layers: copies and pickles hold none."""

JOINED: WeakKeyDictionary[nn.Module, WeightCache] = WeakKeyDictionary()
"""The joined quantised weights of two layers, by the first of them."""


@functools.cache
def watch_optimizers() -> None:
    """Have every optimizer drop the quantised weights."""
    call_after_steps(forget_trained)


def forget_trained(_: set[int]) -> None:
    """Drop the quantised forms of all weights that require a gradient.

    All of them, whatever the optimizer has changed: after a step, a program may copy parameters of
    higher precision to the weights through ``.data``.
    """
    for cache in (*CACHES.values(), *JOINED.values()):
        if cache.is_trained:
            cache.value = None


def forget_layer(layer: nn.Module) -> None:
    """Free the quantised weights of a layer."""
    for caches in (CACHES, JOINED):
        caches.pop(layer, None)


def weight_of(layer: nn.Linear, *others: nn.Linear) -> QuantizedWeight | None:
    """The quantised weight of a layer, once per version; None where the op must quantise it.

    With ``others``, one weight that has the rows of all layers.
    """
    if is_compiling():  # the graph would keep old values
        return None
    caches = JOINED if others else CACHES
    cache = caches.get(layer)
    if cache is None:
        cache = caches[layer] = WeightCache()
        watch_optimizers()
    return cache.of(layer.weight, *(other.weight for other in others))


def product(layer: nn.Linear, x: Tensor | Quantized) -> Tensor:
    """The output of a linear layer in float8_e4m3fn."""
    return linear_fp8(x, layer.weight, layer.bias, quantized=weight_of(layer))


class Rows(torch.autograd.Function):
    """Stands for the rows of two weights, and gives each weight its rows of the gradient.

    It has no memory, so its values are undefined: the product reads the quantised weight.
    """

    @staticmethod
    def forward(ctx: Any, one: Tensor, other: Tensor) -> Tensor:
        """A stand-in of the shape of both weights, one below the other."""
        ctx.rows = len(one)
        return one.new_empty(1).expand(len(one) + len(other), one.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of the gradient for each weight, as views."""
        return grad[: ctx.rows], grad[ctx.rows :]


def gated_product(gate: nn.Linear, up: nn.Linear, x: Tensor | Quantized, act: Gate) -> Quantized:
    """``act(gate(x)) * up(x)`` as one product in float8_e4m3fn, for layers that :func:`can_join`.

    The scales of the joined weight are those of the two weights.
    """
    weights = (gate.weight, up.weight)
    quantized = weight_of(gate, up)
    weight: Any = torch.cat(weights) if quantized is None else Rows.apply(*weights)  # type: ignore[no-untyped-call]
    return gated_linear_fp8(x, weight, act, quantized=quantized)


def can_join(gate: Any, up: Any) -> bool:
    """Whether the weights of two layers can be joined for one product: whole blocks of rows."""
    one, other = gate.weight, up.weight
    return (
        not is_compiling()  # the graph would join the weights in each run
        and gate.bias is None
        and up.bias is None
        and all(type(weight) in (Tensor, nn.Parameter) for weight in (one, other))
        and one.shape == other.shape
        and len(one) % BLOCK == 0
        and one.dtype == other.dtype
        and one.device == other.device
        and one.requires_grad == other.requires_grad
    )


class LinearFP8(nn.Linear):
    """``x @ weight.T + bias`` as products in float8_e4m3fn, forward and backward.

    A :class:`torch.nn.Linear`, with its parameters, initial values and ``state_dict``. The
    parameters stay in their dtype. The weight is quantised once per version, not once per call:
    after in-place changes, steps of optimizers, ``load_state_dict`` and moves to a device. After
    other writes through ``weight.data``, such as a merge of LoRA, call
    ``torch.autograd.graph.increment_version(weight)``. In a process of a group of
    :mod:`torch.distributed` it is quantised in every call.

    Args:
        in_features: size of the last dimension of the input.
        out_features: size of the last dimension of the output.
        bias: whether the layer has a bias.
        device: of the parameters.
        dtype: of the parameters: float32, float16 or bfloat16.

    Shape:
        input ``[..., in_features]``, a tensor or the result of :func:`torchkiln.quantize`; output
        ``[..., out_features]``.
    """

    def forward(self, input: Tensor | Quantized) -> Tensor:
        """Applies the op to ``input``."""
        return product(self, input)
