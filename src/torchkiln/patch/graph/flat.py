"""Traces of a model through all of its modules, down to those of torch."""

from __future__ import annotations

import inspect
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.nn.utils.parametrize import is_parametrized

from torchkiln.nn.plain import has_hooks
from torchkiln.patch.formula.reads import Reader, Reads, reading
from torchkiln.patch.formula.terms import NoFormulaError
from torchkiln.patch.formula.watch import Watch, is_users
from torchkiln.patch.graph.chain import CallTracer, TensorProxy
from torchkiln.patch.graph.definitions import Ran, called_methods, ran
from torchkiln.patch.plan import plan_of
from torchkiln.patch.probe import shallow_copy

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
QUIET = {
    "is_scripting": "torch/_jit_internal.py",
    "is_tracing": "torch/jit/_trace.py",
    "_log_api_usage_once": "torchvision/utils.py",
}
"""Functions without an effect on a call, with their files: false outside of torch.jit, or a log."""

OWN = ("torch.nn.modules.", "torchkiln.nn.")
"""The packages whose modules are one node of a trace."""


class FlatProxy(TensorProxy):
    """A traced value that may be a parameter."""

    @property
    def _is_param(self) -> bool:
        """Whether ``isinstance(x, torch.nn.Parameter)`` holds."""
        tracer: Any = self.tracer
        return self.node.op == "get_attr" and self.node.target in tracer.parameters


class FlatWatch(Watch):
    """Refuses effects, except in lists of traced values and in functions that torch adds."""

    def event(self, frame: FrameType, event: str, arg: Any) -> None:
        """Handles a profile event."""
        owner = getattr(arg, "__self__", None) if event == "c_call" else None
        is_made = type(owner) is list and any(isinstance(x, fx.Proxy) for x in owner)
        if is_made and arg.__name__ in ("append", "extend", "pop"):
            return
        if event == "call" and is_quiet(frame.f_code):
            self.library = self.library or frame
            return
        super().event(frame, event, arg)


def is_quiet(code: CodeType) -> bool:
    """Whether a function has no effect on a call."""
    return code.co_name in QUIET and code.co_filename.endswith(QUIET[code.co_name])


class FlatTracer(CallTracer):
    """Records the calls of a model; a call of a module of torch or torchkiln is one node.

    Buffers are traced values, so that a branch on one ends the trace. Functions that their library
    keeps out of traces are traced, too.
    """

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        tensors = (*root.named_parameters(), *root.named_buffers())
        self.names = {id(tensor): (name, tensor) for name, tensor in tensors}
        self.parameters = {name for name, _ in root.named_parameters()}

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:  # noqa: ARG002
        """The traced value of a parameter or a buffer; torch's method searches all for each."""
        found = self.names.get(id(attr_val))
        if found is None:
            return attr_val
        if found[0] not in parameter_proxy_cache:
            proxy = self.create_proxy("get_attr", found[0], (), {})
            parameter_proxy_cache[found[0]] = proxy
        return parameter_proxy_cache[found[0]]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:  # noqa: ARG002
        """Whether the call is one node."""
        return is_leaf(m)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """A traced value."""
        return FlatProxy(node, self)

    def create_arg(self, a: Any) -> Any:
        """The node of a traced value."""
        return a.node if type(a) is FlatProxy else super().create_arg(a)

    def create_proxy(
        self, kind: str, target: Any, args: Any, kwargs: Any, *more: Any, **options: Any
    ) -> Any:
        """A traced value; a function of a user is called, and its result returned."""
        if isinstance(target, FunctionType) and is_users(target.__code__.co_filename):
            return target(*args, **kwargs)
        return super().create_proxy(kind, target, args, kwargs, *more, **options)


class FlatTrace(NamedTuple):
    """The calls of a model in training and in eval mode, and the conditions for them."""

    root: nn.Module
    """A copy of the model, in which the nodes find their modules."""
    graphs: tuple[fx.Graph, ...]
    reads: Reads
    ran: Ran


def class_of(module: nn.Module) -> type[nn.Module]:
    """The class of a module, without the forward that ``replace`` gave it."""
    cls = type(module)
    while getattr(cls, "_kiln_class", None) is cls:
        (cls,) = cls.__bases__
    return cls


def is_leaf(module: nn.Module) -> bool:
    """Whether a module is a part of torch or torchkiln, and no container."""
    return is_of_leaves(class_of(module))


def is_of_leaves(cls: type[nn.Module]) -> bool:
    """Whether a class is of torch or torchkiln, and no container."""
    return cls.__module__.startswith(OWN) and cls not in CONTAINERS


def copied(module: nn.Module, reader: Reader) -> nn.Module:
    """A copy of a model whose modules report the attributes that they read, but for leaves."""
    copies: dict[nn.Module, nn.Module] = {}

    def copy_of(original: nn.Module, path: tuple[str, ...]) -> nn.Module:
        if path:
            if has_hooks(original):
                raise NoFormulaError(f"{'.'.join(path)} has hooks")
            reader.parts[".".join(path)] = class_of(original)
        plan = plan_of(original)
        if plan is not None and plan.kind == "registered":
            raise NoFormulaError("a registered forward may depend on strides")
        if is_parametrized(original):
            raise NoFormulaError(f"{'.'.join(path)} has parametrizations")
        if "forward" in vars(original):
            raise NoFormulaError("a forward is an attribute of the instance")
        if is_leaf(original):
            if hidden := called_methods(class_of(original)) & vars(original).keys():
                raise NoFormulaError(f"its {min(hidden)} is an attribute of the instance")
            if "inplace" in vars(original):
                reader.values[*path, "inplace"] = original.inplace
            return original
        if original in copies:
            return copies[original]
        new = copies[original] = shallow_copy(original)
        for name, child in original._modules.items():
            if child is not None:
                new._modules[name] = copy_of(child, (*path, name))
        cls = class_of(original)
        object.__setattr__(new, "__class__", reading(cls, reader, path))
        return new

    return copy_of(module, ())


def flat_trace(module: nn.Module, count: int) -> FlatTrace:
    """The calls of a forward with ``count`` arguments; NoFormulaError if it has no trace."""
    parameters = list(inspect.signature(class_of(module).forward).parameters.values())[1:]
    if len(parameters) != count or any(p.kind is not p.POSITIONAL_OR_KEYWORD for p in parameters):
        raise NoFormulaError("its forward has optional arguments")
    reader, watch, graphs = Reader(takes_tensors=True), FlatWatch(), []
    root = copied(module, reader)
    try:
        with torch.random.fork_rng([]):
            random = torch.get_rng_state()
            for training in (True, False):
                for part in root.modules():
                    if not is_leaf(part):
                        part.__dict__["training"] = training
                with watch:
                    graph = FlatTracer(root).trace(root)
                graphs.append(graph)
            if not torch.equal(random, torch.get_rng_state()):
                raise NoFormulaError("it draws random numbers")
        watch.check(variables=False)
        reader.note_globals(watch.globals)
        classes = {path: cls for path, cls in reader.parts.items() if not is_of_leaves(cls)}
        classes = {"": class_of(module), **classes}
        return FlatTrace(
            root,
            tuple(graphs),
            reader.reads(),
            ran(classes, watch.codes, reader.values),
        )
    except Exception as error:  # any error, from a forward of traced values
        reason = watch.reason or str(error).strip().partition(". ")[0]
        raise NoFormulaError(f"its forward cannot be traced: {reason}") from error
