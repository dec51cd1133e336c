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
from torchkiln.testing.validation import with_forms

ROOT = Path(__file__).resolve().parents[2]

# Functions that are no ops: spmm calls spmm_csr, csr_transpose is its helper. A form of linear_fp8
# calls all functions that quantise.
OTHER_FUNCTIONS = {
    *ops_names.QUANTISING,
    "aoti_options",
    "build_info",
    "include_path",
    "explain",
    "csr_transpose",
    "fuse",
    "replaced",
    "spmm",
}

UNLISTED = {name for family in ops_names.UNLISTED.values() for name in family}

# bn_act of the processes of a group in a module, which tests/ops/test_sync_batch_norm.py checks.
OF_PROCESSES = {"SyncBatchNormAct"}

# Modules of an op for other numbers of dimensions; tests/ops/test_batch_norm.py checks them.
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

# A helper of conv_bn_act that returns whether another op is faster.
CHOICES = {"_pixel_conv_gains"}

# A helper that Inductor's code calls; tests/ops/test_cross_entropy_compiled.py checks it.
OF_INDUCTOR = {"_cross_entropy_backward_"}

# A helper of torchkiln.replace in a trace; tests/kit/test_replace_rope_compiled.py checks it.
OF_TRACES = {"_changes"}

EVERY = with_forms(SPECS)


def registered() -> set[str]:
    """The names of all ops in torch.ops.torchkiln."""
    names = torch._C._dispatch_get_all_op_names()
    return {
        n.removeprefix("torchkiln::").split(".")[0] for n in names if n.startswith("torchkiln::")
    }


def test_every_op_has_a_spec() -> None:
    covered = {spec.overload._schema.name.partition("::")[2] for spec in EVERY}
    covered |= {helper for spec in EVERY for helper in spec.helpers}
    assert registered() == covered | CHOICES | OF_INDUCTOR | OF_TRACES


def test_helpers_have_an_underscore() -> None:
    """Ops without an underscore are public, as docs/stability.md promises their schemas."""
    assert {op for op in registered() if op[0] != "_"} <= {*torchkiln.__all__, *UNLISTED}
    assert not {op for op in registered() if op[0] == "_" and op[1:] in torchkiln.__all__}


def test_every_public_function_has_a_spec() -> None:
    functions = {name for name in torchkiln.__all__ if inspect.isroutine(getattr(torchkiln, name))}
    written = [spec.written for spec in EVERY if spec.written is not None]
    ops = [(spec.op, spec.overload) for spec in SPECS]
    ops += [(form.function, form.overload) for form in written]
    known = {function.__name__: overload for function, overload in ops}
    composed = {spec.name for spec in EVERY if spec.composed}
    assert functions - OTHER_FUNCTIONS - composed <= known.keys()
    for name in functions & known.keys():
        op = known[name].name().partition("::")[2]
        assert op.removeprefix("_").startswith(name)
    for spec in SPECS:
        assert spec.name in UNLISTED or spec.op is getattr(torchkiln, spec.name)
        assert spec.overload.name() == f"torchkiln::{spec.name}"


def test_functions_are_reachable_where_they_are_written() -> None:
    """A function is torchkiln.<name>, unless unlisted, and torchkiln.ops.<family>.<name>."""
    for spec in SPECS:
        (family,) = (family for family, ops in ops_names.FAMILIES.items() if spec.name in ops)
        module = importlib.import_module(f"torchkiln.ops.{family}")
        assert getattr(module, spec.name) is spec.op
        home = module.__name__ if spec.name in UNLISTED else "torchkiln"
        assert spec.op.__module__ == home


def test_every_module_has_a_spec() -> None:
    cpu = torch.device("cpu")
    made = {type(spec.module(cpu, torch.float32)) for spec in SPECS if spec.module is not None}
    offered = set(torchkiln.nn.__all__) - OTHER_RANKS - COMPOSED - OF_PROCESSES
    assert {getattr(torchkiln.nn, name) for name in offered} == made


def test_public_functions_are_documented() -> None:
    for name in torchkiln.__all__:
        thing = getattr(torchkiln, name)
        if inspect.isroutine(thing) or inspect.isclass(thing):
            assert inspect.getdoc(thing), name
    for name in torchkiln.nn.__all__:
        assert inspect.getdoc(getattr(torchkiln.nn, name)), name


def test_stub_and_extension_agree() -> None:
    """The stub lists the functions that are no ops; its __getattr__ covers the ops."""
    stub = ast.parse((ROOT / "src" / "torchkiln" / "_C.pyi").read_text())
    told = {node.name for node in stub.body if isinstance(node, ast.FunctionDef)}
    exported = {name for name in dir(_C) if not name.startswith("_")}
    assert told - {"__getattr__"} <= exported
    assert {spec.name for spec in SPECS} <= exported


KEYWORD_TENSORS = {
    "linear_kl": ["rows"],
    "linear_logprob": ["rows"],
    "log_softmax": ["mask"],
    "qkv_norm_rope": ["positions"],
    "rope": ["positions"],
    "softmax": ["mask"],
    "spmm_csr": ["transpose"],
}


def test_tensors_come_before_the_keywords_of_a_schema() -> None:
    """Only the listed ops have tensors among keywords, which DTensor does not distribute."""
    found: dict[str, list[str]] = {}
    for name in registered():
        arguments = getattr(torch.ops.torchkiln, name).default._schema.arguments
        tensors = [a.name for a in arguments if a.kwarg_only and "Tensor" in str(a.type)]
        if tensors:
            found[name] = tensors
    assert found == KEYWORD_TENSORS
