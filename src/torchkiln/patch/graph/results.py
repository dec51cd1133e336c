"""The calls whose results depend on shapes and elements of their arguments, and not on strides."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from torchkiln import nn as ours
from torchkiln.patch.graph.chain import CHANGING, FACTS, is_harmless
from torchkiln.patch.graph.flat import class_of

NEW, VIEW, COPY, FACT = "new", "view", "copy", "fact"
"""Results in memory of their own; in that of the arguments; in either, which strides decide; and
values that are no tensors, or tensors of their sizes only."""

MODULES = {
    NEW: (
        *(nn.Conv2d, nn.ConvTranspose2d, nn.Linear),
        *(nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm, nn.InstanceNorm2d),
        *(nn.GroupNorm, nn.LayerNorm, nn.RMSNorm),
        *(nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d),
        *(nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d),
        *(nn.ZeroPad2d, nn.ConstantPad2d, nn.ReflectionPad2d, nn.ReplicationPad2d),
        *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish),
        *(nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.Sigmoid, nn.LogSigmoid, nn.Tanh),
        *(nn.Softplus, nn.Softsign, nn.PReLU, nn.Softmax, nn.Softmax2d, nn.LogSoftmax),
        *(ours.ReLU, ours.ReLU2, ours.GELU, ours.QuickGELU, ours.SiLU, ours.Sigmoid, ours.Tanh),
        *(ours.BatchNormAct1d, ours.BatchNormAct2d, ours.SyncBatchNormAct, ours.GroupNorm),
        *(ours.LayerNorm, ours.RMSNorm, ours.Linear, ours.Softmax, ours.LogSoftmax),
    ),
    VIEW: (nn.Identity, nn.Dropout, nn.Dropout2d, nn.Unflatten),
    COPY: (nn.Flatten, nn.PixelShuffle, nn.PixelUnshuffle),
}
"""Modules of torch and torchkiln, by their results."""

NAMES = {
    NEW: """
        conv2d conv_transpose2d linear matmul bmm mm einsum scaled_dot_product_attention
        batch_norm instance_norm group_norm layer_norm rms_norm normalize
        max_pool2d avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d interpolate pad
        relu relu6 leaky_relu elu celu selu gelu silu mish hardswish hardsigmoid hardtanh sigmoid
        logsigmoid tanh softplus softsign prelu softmax log_softmax glu
        add sub mul div truediv true_divide neg pow square sqrt rsqrt reciprocal exp log abs sin
        cos erf clamp clamp_min clamp_max clip minimum maximum where lerp addcmul
        eq ne lt le gt ge sum mean amax amin var std cat concat stack roll flip repeat tile
        zeros_like ones_like
        iadd isub imul itruediv add_ sub_ mul_ div_ relu_ clamp_ sigmoid_ tanh_ silu_
    """,
    VIEW: """
        chunk split tensor_split unbind narrow select getitem squeeze unsqueeze transpose permute
        movedim swapaxes swapdims unflatten expand expand_as broadcast_to detach
        dropout dropout2d to float double half bfloat16 type_as
    """,
    COPY: "reshape flatten contiguous ravel pixel_shuffle pixel_unshuffle",
    FACT: f"""
        {" ".join(FACTS)} numel is_floating_point requires_grad is_cuda
        new_zeros new_ones new_full new_empty
    """,
}
"""Functions of torch, operators, and methods and attributes of tensors, by their results."""

PLACES: tuple[Any, ...] = (torch, F, torch._C._nn, operator)
BY_MODULE = {id(cls): result for result, classes in MODULES.items() for cls in classes}
BY_NAME = {name: result for result, names in NAMES.items() for name in names.split()}
BY_FUNCTION = {
    id(getattr(place, name)): result
    for name, result in BY_NAME.items()
    for place in PLACES
    if hasattr(place, name)
}


class Call(NamedTuple):
    """The effect of a call."""

    result: str
    """One of the constants above; empty for calls that are in no list."""
    changes: bool
    """Whether the call may change its arguments in place."""


def call_of(root: nn.Module, node: fx.Node) -> Call:
    """The effect of a node."""
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        in_place = bool(getattr(module, "inplace", False))
        return Call(BY_MODULE.get(id(class_of(module)), ""), in_place)
    in_place = bool(node.kwargs.get("inplace", False))
    if node.target is getattr:
        return Call(FACT if BY_NAME.get(str(node.args[1])) == FACT else "", changes=False)
    if node.op == "call_method":
        name = str(node.target)
        found = BY_NAME.get(name, "") if hasattr(Tensor, name) else ""
        return Call(found, in_place or name.endswith("_"))
    found = BY_FUNCTION.get(id(node.target), "")
    name = str(getattr(node.target, "__name__", "_"))
    if found:
        return Call(found, in_place or name in CHANGING or name.endswith("_"))
    return Call("", not is_harmless(root, node))


def name_of(root: nn.Module, node: fx.Node) -> str:
    """The name of the called module's class, function or method."""
    if node.op == "call_module":
        return class_of(root.get_submodule(str(node.target))).__name__
    if node.target is getattr:
        return str(node.args[1])
    return str(getattr(node.target, "__name__", node.target))
