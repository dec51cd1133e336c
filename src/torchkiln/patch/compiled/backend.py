"""``torch.compile(model, backend="torchkiln")``: the ops of torchkiln, then Inductor.

Dynamo records the calls of a model as a graph of torch's functions, with guards for modes,
constants, ranks and sizes. The search of ``torchkiln.replace`` finds formulas in this graph, also
across the borders of modules.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from torchkiln.patch.compiled import gates, layers, losses, norms, ropes
from torchkiln.patch.compiled.choice import OPS, Choice
from torchkiln.patch.compiled.facts import Facts
from torchkiln.patch.table import given_table, read

WHERE = "torchkiln.compile"

LOG = logging.getLogger("torchkiln.compile")

KINDS = (norms, gates, ropes, losses, layers)

OWN = ("then", "ours", "table")


def backend(
    module: fx.GraphModule,
    inputs: Sequence[Tensor],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compiles a graph of Dynamo, which finds this function by the entry point ``torchkiln``.

    Args:
        module: the graph.
        inputs: examples of its inputs.
        mode: a mode of Inductor, such as ``"reduce-overhead"``.
        options: ``then``: ``"inductor"``, or ``"eager"`` to run the graph without a compiler;
            ``ours``: names of the ops to use, instead of those that the table chooses; ``table``: a
            file that ``torchkiln bench --compile`` wrote. Other options are Inductor's.
    """
    given = dict(options or {})
    then = given.get("then", "inductor")
    choice = chosen(then, given)
    compiler = compiler_of(then, mode, {k: v for k, v in given.items() if k not in OWN})
    return compiler(rewritten(module, choice), inputs)


def chosen(then: str, given: Mapping[str, Any]) -> Choice:
    """The choice of ops; ValueError for options that have no meaning."""
    if then not in ("inductor", "eager"):
        raise ValueError(f"{WHERE}: then: got {then!r}, expected 'inductor' or 'eager'")
    ours = given.get("ours")
    if ours is not None:
        ours = {ours} if isinstance(ours, str) else set(ours)
        if unknown := sorted(ours - set(OPS)):
            raise ValueError(f"{WHERE}: ours: got {unknown[0]!r}, expected ops of {', '.join(OPS)}")
    table = given_table() if given.get("table") is None else Path(given["table"])
    if table is not None:
        read(table)
    elif ours is None and then == "eager":
        ours = OPS
    return Choice(ours=ours, table=table)


def compiler_of(then: str, mode: str | None, options: dict[str, Any]) -> Callable[..., Any]:
    """A function that compiles a graph."""
    known = {} if then == "eager" else torch._inductor.config.get_config_copy()
    for name in options:
        if name.replace("-", "_") not in known:
            others = "" if then == "eager" else ", or an option of Inductor"
            raise ValueError(
                f"{WHERE}: options: got {name!r}, expected one of {', '.join(OWN)}{others}"
            )
    if then == "inductor":
        return torch._TorchCompileInductorWrapper(mode, options, None)
    if mode is not None:
        raise ValueError(f"{WHERE}: mode: got {mode!r}, expected None with then='eager'")
    return lambda module, _: module.forward


def rewritten(module: fx.GraphModule, choice: Choice) -> fx.GraphModule:
    """Puts the ops that are found into the graph of the module, and returns the module."""
    before = copy.deepcopy(module.graph)
    facts = Facts(module.graph)
    if facts.mode is None:
        return module
    try:
        names = [n for kind in KINDS for n in kind.rewrite(facts, choice)]
        module.graph.lint()
    except Exception as error:  # rewrites may raise for an unexpected graph
        warnings.warn(
            f"{WHERE}: the search raised {type(error).__name__}: {error}; the graph stays as it is",
            stacklevel=2,
        )
        pairs = zip(before.nodes, facts.given, strict=False)  # inputs are the first nodes
        for node, given in pairs:
            vars(node).update({k: v for k, v in vars(given).items() if k == "_dynamo_source"})
        module.graph = before
        names = []
    module.recompile()
    LOG.info("%s", ", ".join(f"{n} {name}" for name, n in Counter(names).items()) or "no op found")
    return module
