"""The linear layer in float8_e4m3fn."""

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.optim.optimizer import register_optimizer_step_post_hook

from torchkiln import _C
from torchkiln.ops.quantize import Quantized, QuantizedWeight, linear_fp8, quantize_weight


class Steps:
    """The number of steps that all optimizers of the process have made since the first use.

    Some optimizers write to a parameter through ``.data``, which does not change its version.
    """

    def __init__(self) -> None:
        self.count = 0
        self.is_counting = False

    def seen(self) -> int:
        """The count. The first call begins to count."""
        if not self.is_counting:
            self.is_counting = True
            register_optimizer_step_post_hook(self.add)
        return self.count

    def add(self, *_: Any) -> None:
        """Count a step."""
        self.count += 1


# As torch.compiler.disable does, which imports the compiler: else the graph of a compiled step is
# guarded by the count, and compiled again in each step.
Steps.add._torchdynamo_disable = True  # type: ignore[attr-defined]
STEPS = Steps()


def has_group() -> bool:
    """Whether the process is one of a group.

    FSDP2, and collectives such as broadcast, write to a weight without a change of its version.
    """
    return dist.is_available() and dist.is_initialized()


class WeightCache:
    """A weight in float8_e4m3fn, quantised again where the weight may have changed."""

    def __init__(self) -> None:
        self.watch: _C.Watch | None = None
        self.steps = 0
        self.value: QuantizedWeight | None = None
        self.stream: torch.cuda.Stream | None = None

    def of(self, weight: Tensor) -> QuantizedWeight | None:
        """The quantised weight; None where the op must quantise it in every call.

        That is in a graph of ``torch.compile`` or of CUDA, which would keep old values, for tensors
        without a version, and in a process of a group.
        """
        if is_compiling() or weight.is_inference() or type(weight) is not nn.Parameter:
            return None
        if has_group():
            self.value = None
            return None
        if weight.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        stream = torch.cuda.current_stream(weight.device) if weight.is_cuda else None
        steps = STEPS.seen() if weight.requires_grad else 0  # optimizers skip frozen weights
        is_current = self.watch is not None and self.watch.is_current((weight,))
        if self.value is None or not is_current or self.steps != steps:
            self.value = None  # freed before the new one is made
            with torch.inference_mode(mode=False), torch.no_grad():
                self.value = quantize_weight(weight)
            self.watch, self.steps, self.stream = _C.Watch((weight,)), steps, stream
            if stream is not None:  # calls on other streams read it, too
                stream.synchronize()
        elif stream is not None and stream != self.stream:
            for tensor in self.value:
                tensor.record_stream(stream)
        return self.value


CACHES: WeakKeyDictionary[nn.Module, WeightCache] = WeakKeyDictionary()
"""The quantised weights of layers, beside the layers: copies and pickles hold none."""


def weight_of(layer: nn.Linear) -> QuantizedWeight | None:
    """The quantised weight of a layer, once per version; None where the op must quantise it."""
    if is_compiling():
        return None
    cache = CACHES.get(layer)
    if cache is None:
        cache = CACHES[layer] = WeightCache()
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
