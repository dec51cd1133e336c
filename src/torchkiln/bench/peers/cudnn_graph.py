"""Graphs of cuDNN: built once, run on the current stream, forward and backward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from torchkiln.bench.peers.package import Refused

PACKAGE = "cudnn"

DTYPES = {torch.float32: "FLOAT", torch.float16: "HALF", torch.bfloat16: "BFLOAT16"}

Described = tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]
"""Dtype, sizes and strides of a tensor of a graph."""


def described(t: Tensor) -> Described:
    """The properties of a tensor that a graph depends on."""
    return t.dtype, tuple(t.shape), tuple(t.stride())


@dataclass(frozen=True)
class Graph:
    """A built graph: its tensors by name, its results, and the bytes of its workspace."""

    graph: Any
    tensors: Mapping[str, Any]
    results: Mapping[str, Described]
    workspace: int


class Builder:
    """Declares the tensors of a graph by name, and builds the graph."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.cudnn = import_module(PACKAGE)
        wide = self.cudnn.data_type.FLOAT
        self.graph = self.cudnn.pygraph(
            io_data_type=self.type_of(dtype),
            intermediate_data_type=wide,
            compute_data_type=wide,
            handle=handle(),
        )
        self.tensors: dict[str, Any] = {}
        self.results: dict[str, Described] = {}

    def type_of(self, dtype: torch.dtype) -> Any:
        """The cuDNN data type of a dtype."""
        name = "BOOLEAN" if dtype == torch.bool else DTYPES[dtype]
        return getattr(self.cudnn.data_type, name)

    def reads(self, name: str, what: Described) -> Any:
        """Declare an input of the graph."""
        dtype, sizes, strides = what
        found = self.graph.tensor(
            name=name, dim=list(sizes), stride=list(strides), data_type=self.type_of(dtype)
        )
        self.tensors[name] = found
        return found

    def reads_number(self, name: str) -> Any:
        """Declare an input: a float32 number in the memory of the host."""
        found = self.graph.tensor(
            name=name,
            dim=[1, 1, 1, 1],
            stride=[1, 1, 1, 1],
            data_type=self.cudnn.data_type.FLOAT,
            is_pass_by_value=True,
        )
        self.tensors[name] = found
        return found

    def writes(self, name: str, tensor: Any, what: Described) -> None:
        """Declare an output of the graph."""
        tensor.set_output(True).set_data_type(self.type_of(what[0]))
        self.tensors[name] = tensor
        self.results[name] = what

    def build(self) -> Graph:
        """Build the graph with a plan that cuDNN chooses; refused if there is none."""
        graph, mode = self.graph, self.cudnn.heur_mode
        try:
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans([mode.A, mode.FALLBACK])
            graph.check_support()
            graph.build_plans()
        except Exception as error:  # its errors have no common class
            dtype, sizes, _ = next(iter(self.results.values()))
            first = next(iter(str(error).strip().splitlines()), type(error).__name__)
            shape = " x ".join(map(str, sizes))
            raise Refused(f"has no plan for {str(dtype)[6:]} {shape}: {first}") from error
        return Graph(graph, self.tensors, self.results, graph.get_workspace_size())


@cache
def handle() -> Any:
    """The handle of cuDNN for this process."""
    return import_module(PACKAGE).create_handle()


class Runner:
    """Calls the graphs of one case, whose workspaces it owns."""

    def __init__(self) -> None:
        self.workspaces: dict[int, Tensor] = {}

    def run(self, graph: Graph, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The results of a graph on the current stream."""
        device = next(iter(given.values())).device
        results = {
            name: torch.empty_strided(sizes, strides, dtype=dtype, device=device)
            for name, (dtype, sizes, strides) in graph.results.items()
        }
        workspace = self.workspaces.get(id(graph))
        if workspace is None:
            workspace = torch.empty(max(1, graph.workspace), dtype=torch.uint8, device=device)
            self.workspaces[id(graph)] = workspace
        import_module(PACKAGE).set_stream(handle(), torch.cuda.current_stream().cuda_stream)
        memory = {graph.tensors[name]: t for name, t in {**given, **results}.items()}
        graph.graph.execute(memory, workspace, handle=handle())
        return results


@dataclass(frozen=True)
class Call:
    """The two graphs of a call, and the constants that they read."""

    runner: Runner
    forward: Graph
    backward: Graph | None
    """The backward graph; None if no gradient is needed."""
    constants: Mapping[str, Tensor]
    """Tensors that do not depend on the call, such as eps."""


class Recorded(torch.autograd.Function):
    """One call of the forward graph, and of the backward graph in backward."""

    @staticmethod
    def forward(ctx: Any, call: Call, names: Sequence[str], *tensors: Tensor) -> Tensor:
        """Run the forward graph on the tensors that ``names`` names."""
        given = dict(zip(names, tensors, strict=True))
        results = call.runner.run(call.forward, {**given, **call.constants})
        y = results.pop("y")
        if call.backward is not None:
            known = {**given, **results}
            kept = [name for name in known if name in call.backward.tensors]
            ctx.call, ctx.names, ctx.kept = call, names, kept
            ctx.save_for_backward(*(known[name] for name in kept))
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Run the backward graph."""
        given = dict(zip(ctx.kept, ctx.saved_tensors, strict=True))
        grad = grad.contiguous(memory_format=torch.channels_last)
        results = ctx.call.runner.run(ctx.call.backward, {"grad": grad, **given})
        return None, None, *(results.get(f"grad_{name}") for name in ctx.names)


def is_recorded(tensors: Iterable[Tensor]) -> bool:
    """Whether a call on these tensors has a backward."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def recorded(call: Call, given: Mapping[str, Tensor]) -> Tensor:
    """The result of the forward graph; a backward through it runs the backward graph."""
    y: Tensor = Recorded.apply(  # type: ignore[no-untyped-call]
        call, tuple(given), *given.values()
    )
    return y


@cache
def number(value: float) -> Tensor:
    """A float32 number in the memory of the host."""
    return torch.full((1, 1, 1, 1), value, dtype=torch.float32)


@cache
def zeros_like(
    device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...], strides: tuple[int, ...]
) -> Tensor:
    """Zeros of these sizes, to which the graph of batch norm compares results."""
    return torch.empty_strided(sizes, strides, dtype=dtype, device=device).zero_()
