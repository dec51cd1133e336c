"""The linear layer in float8_e4m3fn."""

import functools
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.compiler import is_compiling

from torchkiln import _C
from torchkiln.ops._after_steps import call_after_steps
from torchkiln.ops.quantize import Quantized, QuantizedWeight, linear_fp8, quantize_weight


def has_group() -> bool:
    """Whether the process is one of a group.

    FSDP2, and collectives such as broadcast, write to a weight without a change of its version.
    """
    return dist.is_available() and dist.is_initialized()


class WeightCache:
    """A weight in float8_e4m3fn, quantised again where the weight may have changed."""

    def __init__(self) -> None:
        self.watch: _C.Watch | None = None
        self.is_trained = False
        """Whether the weight requires a gradient."""
        self.value: QuantizedWeight | None = None
        self.stream: torch.cuda.Stream | None = None

    def of(self, weight: Tensor) -> QuantizedWeight | None:
        """The quantised weight; None where the op must quantise it in every call.

        That is in a CUDA graph, which would keep old values, for tensors without a version, and in
        a process of a group.
        """
        if weight.is_inference() or type(weight) is not nn.Parameter:
            return None
        if has_group():
            self.value = None
            return None
        if weight.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        stream = torch.cuda.current_stream(weight.device) if weight.is_cuda else None
        is_current = self.watch is not None and self.watch.is_current((weight,))
        if self.value is None or not is_current:
            self.value = None  # freed before the new one is made
            with torch.inference_mode(mode=False), torch.no_grad():
                self.value = quantize_weight(weight)
            self.watch, self.stream = _C.Watch((weight,)), stream
            self.is_trained = weight.requires_grad
            if stream is not None:  # calls on other streams read it, too
                stream.synchronize()
        elif stream is not None and stream != self.stream:
            for tensor in self.value:
                tensor.record_stream(stream)
        return self.value


CACHES: WeakKeyDictionary[nn.Module, WeightCache] = WeakKeyDictionary()
"""The quantised weights of layers, beside the layers: copies and pickles hold none."""


@functools.cache
def watch_optimizers() -> None:
    """Have every optimizer drop the quantised weights."""
    call_after_steps(forget_trained)


def forget_trained(_: set[int]) -> None:
    """Drop the quantised forms of all weights that require a gradient.

    Those that an optimizer has changed are not enough: a program may copy other parameters, of
    higher precision, to the weights through ``.data`` after the step.
    """
    for cache in list(CACHES.values()):
        if cache.is_trained:
            cache.value = None


def weight_of(layer: nn.Linear) -> QuantizedWeight | None:
    """The quantised weight of a layer, once per version; None where the op must quantise it."""
    if is_compiling():  # the graph would keep old values
        return None
    cache = CACHES.get(layer)
    if cache is None:
        cache = CACHES[layer] = WeightCache()
        watch_optimizers()
    return cache.of(layer.weight)


def product(layer: nn.Linear, x: Tensor | Quantized) -> Tensor:
    """The output of a linear layer in float8_e4m3fn."""
    return linear_fp8(x, layer.weight, layer.bias, quantized=weight_of(layer))


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
