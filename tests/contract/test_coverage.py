"""Every public function has a contract."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

import torch

import torchkiln
from torchkiln import _C
from torchkiln.ops import names as ops_names
from torchkiln.testing import SPECS

ROOT = Path(__file__).resolve().parents[2]

# What the package offers beside ops: spmm is spmm_csr of the parts of a tensor, csr_transpose its
# helper. conv_bn_act calls torch's convolutions; tests/ops/test_convolution.py checks it.
OTHER_FUNCTIONS = {
    "add_layer_norm_",
    "add_rms_norm_",
    "addcmul",
    "aoti_options",
    "build_info",
    "explain",
    "conv_bn_act",
    "csr_transpose",
    "fuse",
    "replaced",
    "spmm",
}

UNLISTED = {name for family in ops_names.UNLISTED.values() for name in family}

# Parts of bn_act, between which the processes of a group communicate, and the module that calls
# them; tests/ops/test_sync_batch_norm.py checks them.
PARTS = {
    "sync_bn_moments",
    "sync_bn_statistics",
    "sync_bn_forward",
    "sync_bn_backward_sums",
    "sync_bn_backward_input",
}
OF_PARTS = {"SyncBatchNormAct"}

# Modules of an op for other ranks of its input; tests/ops/test_batch_norm.py checks them.
OTHER_RANKS = {"BatchNormAct1d", "BatchNormAct3d"}

# Modules of conv_bn_act.
COMPOSED = {"ConvBNAct1d", "ConvBNAct2d", "ConvBNAct3d"}

# Modules of several ops, and the cache of one; tests/ops/test_attention.py, test_multihead.py and
# test_transformer.py check them.
COMPOSED |= {
    "Attention",
    "KVCache",
    "MultiheadAttention",
    "TransformerBlock",
    "TransformerDecoderLayer",
    "TransformerEncoderLayer",
}

# Ops that return more than the op of the same loss; tests/ops/test_cross_entropy_metrics.py and
# test_linear_cross_entropy_metrics.py check them.
FORMS = {"cross_entropy_with_metrics", "linear_cross_entropy_with_metrics"}

# The op that bn_act calls to update running statistics; tests/ops/test_batch_norm.py checks it.
UPDATES = {"bn_act_update", "bn_act_update_forward"}

# Parts of conv_bn_act in training, and what fuse calls; tests/ops/test_conv_moments.py and
# test_pool.py check them.
OF_CONVOLUTIONS = {
    "bn_act_from_moments",
    "bn_act_from_moments_forward",
    "bn_act_pool",
    "bn_act_pool_backward",
    "bn_act_pool_forward",
    "pixel_conv",
    "pixel_conv_gains",
}

# Helpers of torchkiln.distributed; tests/ops/test_cross_entropy_shard.py checks them.
SHARDS = {"cross_entropy_shard", "cross_entropy_shard_backward"}

# Ops that write into tensors of the caller; tests/ops/test_written.py and test_rope_cache.py check
# them.
WRITTEN = {"add_layer_norm_", "add_rms_norm_", "layer_norm_out", "rms_norm_out", "swiglu_out"}
WRITTEN |= {"qkv_norm_rope_cache"}

# The op of KVCache.mask(); tests/ops/test_cache_mask.py checks it.
MASKS = {"cache_mask"}

IN_PLACE = [(spec.inplace, spec.inplace_overload) for spec in SPECS if spec.inplace is not None]


def registered() -> set[str]:
    """The names of all ops in the namespace."""
    names = torch._C._dispatch_get_all_op_names()
    return {
        n.removeprefix("torchkiln::").split(".")[0] for n in names if n.startswith("torchkiln::")
    }


def test_every_op_has_a_spec() -> None:
    covered = {spec.name for spec in SPECS} | {h for spec in SPECS for h in spec.helpers}
    covered |= FORMS | UPDATES | SHARDS | WRITTEN | MASKS | PARTS | OF_CONVOLUTIONS
    covered |= {function.__name__ for function, _ in IN_PLACE}
    assert registered() == covered


def test_every_public_function_has_a_spec() -> None:
    functions = {name for name in torchkiln.__all__ if inspect.isroutine(getattr(torchkiln, name))}
    ops = [(spec.op, spec.overload) for spec in SPECS] + IN_PLACE
    names = {function.__name__ for function, _ in ops}
    assert functions - OTHER_FUNCTIONS == names - UNLISTED
    for function, overload in ops:
        name = function.__name__
        assert name in UNLISTED or function is getattr(torchkiln, name)
        assert overload is not None
        assert overload.name() == f"torchkiln::{name}"
    assert {spec.name for spec in SPECS} <= names


def test_an_op_in_place_has_the_name_of_its_op() -> None:
    for spec in SPECS:
        if spec.inplace is not None:
            assert spec.inplace.__name__ == f"{spec.name}_"


def test_functions_are_reachable_where_they_are_written() -> None:
    """Both as torchkiln.<name> and as torchkiln.<family>.<name>."""
    for spec in SPECS:
        module = importlib.import_module(spec.op.__module__)
        assert getattr(module, spec.name) is spec.op
        assert module.__name__.split(".")[0] == "torchkiln"


def test_every_module_has_a_spec() -> None:
    cpu = torch.device("cpu")
    made = {type(spec.module(cpu, torch.float32)) for spec in SPECS if spec.module is not None}
    offered = set(torchkiln.nn.__all__) - OTHER_RANKS - COMPOSED - OF_PARTS
    assert {getattr(torchkiln.nn, name) for name in offered} == made


def test_public_functions_are_documented() -> None:
    for name in torchkiln.__all__:
        thing = getattr(torchkiln, name)
        if inspect.isroutine(thing) or inspect.isclass(thing):
            assert inspect.getdoc(thing), name
    for name in torchkiln.nn.__all__:
        assert inspect.getdoc(getattr(torchkiln.nn, name)), name


def test_stub_and_extension_agree() -> None:
    """The stub names the functions that are no ops; __getattr__ stands for the ops."""
    stub = ast.parse((ROOT / "src" / "torchkiln" / "_C.pyi").read_text())
    told = {node.name for node in stub.body if isinstance(node, ast.FunctionDef)}
    exported = {name for name in dir(_C) if not name.startswith("_")}
    assert told - {"__getattr__"} <= exported
    ops = {spec.op.__name__ for spec in SPECS} | {function.__name__ for function, _ in IN_PLACE}
    assert ops <= exported
