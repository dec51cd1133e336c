"""Names of the ops by family, without torch: for ``--help``, and for the doctor."""

from __future__ import annotations

FAMILIES: dict[str, tuple[str, ...]] = {
    "pointwise": ("add", "muladd"),
    "activations": ("square", "relu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh"),
    "bias, activation": ("bias_act",),
    "gates": ("swiglu", "geglu", "geglu_tanh"),
    "dropout": ("dropout_add", "bias_dropout_add"),
    "reductions": ("sum", "mean"),
    "norms": ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"),
    "softmax": ("softmax", "log_softmax"),
    "loss": ("cross_entropy",),
    "sparse": ("spmm_csr",),
    "products": ("matmul", "linear"),
}
"""Ops by family. A test compares them with the specs of :mod:`torchkiln.testing`."""

OPS = tuple(name for family in FAMILIES.values() for name in family)

ALIASES = {"spmm": "spmm_csr"}
"""Functions without a spec of their own: ``spmm`` calls ``spmm_csr`` with the parts of a matrix."""
