"""A stand-in for nvidia-cudnn-frontend with the same names and arguments; torch computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

BUILT: list[Graph] = []
"""The graphs that have been built, oldest first."""
DTYPES = {
    "FLOAT": torch.float32,
    "HALF": torch.float16,
    "BFLOAT16": torch.bfloat16,
    "BOOLEAN": torch.bool,
}
ROWS, PIXELS = (1,), (0, 2, 3)
"""The dimensions that layer norm and batch norm reduce."""


class Node:
    """A tensor of a graph: an input, or the result of an operation."""

    def __init__(self, of: Callable[[dict[Node, Tensor]], Tensor] | None = None) -> None:
        self.of = of
        self.is_output = False
        self.dtype = torch.float32

    def set_output(self, wanted: bool) -> Node:
        self.is_output = wanted
        return self

    def set_data_type(self, dtype: torch.dtype) -> Node:
        self.dtype = dtype
        return self


class Graph:
    """A graph that records operations, and computes their values when it is executed."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.given: list[tuple[Node, dict[str, Any]]] = []
        self.steps: list[str] = []
        self.workspaces: list[Tensor] = []

    def tensor(self, **described: Any) -> Node:
        node = Node()
        self.given.append((node, described))
        return node

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """A function that adds an operation of ``OPERATIONS``; it returns the node or nodes."""
        count, function = OPERATIONS[name]

        def operation(*args: Node, **named: Any) -> Any:
            named.pop("name", None)
            self.steps.append(name)

            def value(i: int, memory: dict[Node, Tensor]) -> Tensor:
                def read(a: Any) -> Any:
                    return of(a, memory) if isinstance(a, Node) else a

                found = function(*map(read, args), **{k: read(a) for k, a in named.items()})
                return found[i] if isinstance(found, tuple) else found

            nodes = [Node(partial(value, i)) for i in range(count)]
            return nodes if count > 1 else nodes[0]

        return operation

    def validate(self) -> None:
        for _, described in self.given:
            if described["dim"][1] % 2 and described["dim"][1] > 1:
                raise RuntimeError("No valid engine configs\nand much more")
        BUILT.append(self)

    def build_operation_graph(self) -> None:
        assert self.steps

    def create_execution_plans(self, modes: list[str]) -> None:
        assert modes == ["A", "FALLBACK"]

    def check_support(self) -> None:
        pass

    def build_plans(self) -> None:
        pass

    def get_workspace_size(self) -> int:
        return 16

    def execute(self, memory: dict[Node, Tensor], workspace: Tensor, handle: object) -> None:
        assert handle == self.options["handle"]
        self.workspaces.append(workspace)
        for node, described in self.given:
            t = memory[node]
            assert t.dtype == described["data_type"]
            assert t.numel() == torch.Size(described["dim"]).numel()
            if not described.get("is_pass_by_value"):
                assert t.as_strided(described["dim"], described["stride"]).equal(t)
        wide = {node: t if t.dtype == torch.bool else t.float() for node, t in memory.items()}
        inputs = {node: wide[node] for node, _ in self.given}
        for node, t in memory.items():
            if node.of is not None:
                assert node.is_output
                assert t.dtype == node.dtype
                t.copy_(of(node, inputs))


def of(node: Node, memory: dict[Node, Tensor]) -> Tensor:
    """The value of a node: given in ``memory``, or computed from the nodes that it depends on."""
    return memory[node] if node.of is None else node.of(memory)


def statistics(x: Tensor, epsilon: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    mean = x.mean(dims, keepdim=True)
    return mean, ((x - mean).square().mean(dims, keepdim=True) + epsilon).rsqrt()


def forward(dims: tuple[int, ...]) -> Callable[..., Any]:
    def norm(
        *, input: Tensor, scale: Tensor, bias: Tensor, epsilon: Tensor, **_: Any
    ) -> tuple[Tensor, ...]:
        mean, rstd = statistics(input, epsilon, dims)
        return (input - mean) * rstd * scale + bias, mean, rstd

    return norm


def batch_forward(
    *, in_running_mean: Tensor, in_running_var: Tensor, momentum: Tensor, **given: Tensor
) -> tuple[Tensor, ...]:
    y, mean, rstd = forward(PIXELS)(**given)
    var = given["input"].var(PIXELS, keepdim=True)
    moved = (a + momentum * (b - a) for a, b in ((in_running_mean, mean), (in_running_var, var)))
    return y, mean, rstd, *moved


def backward(dims: tuple[int, ...]) -> Callable[..., Any]:
    others = (0,) if dims == ROWS else PIXELS

    def norm(
        *, grad: Tensor, input: Tensor, scale: Tensor, mean: Tensor, inv_variance: Tensor
    ) -> tuple[Tensor, ...]:
        n, g = (input - mean) * inv_variance, grad * scale
        from_mean = g - g.mean(dims, keepdim=True) - n * (g * n).mean(dims, keepdim=True)
        return from_mean * inv_variance, *(t.sum(others, keepdim=True) for t in (grad * n, grad))

    return norm


def rms_forward(*, input: Tensor, scale: Tensor, epsilon: Tensor, **_: Any) -> tuple[Tensor, ...]:
    rstd = (input.square().mean(1, keepdim=True) + epsilon).rsqrt()
    return input * rstd * scale, rstd


def rms_backward(
    *, grad: Tensor, input: Tensor, scale: Tensor, inv_variance: Tensor, has_dbias: bool
) -> tuple[Tensor, ...]:
    assert not has_dbias
    n, g = input * inv_variance, grad * scale
    grad_x = (g - n * (g * n).mean(1, keepdim=True)) * inv_variance
    return grad_x, (grad * n).sum(0, keepdim=True), grad


OPERATIONS: dict[str, tuple[int, Callable[..., Any]]] = {
    "layernorm": (3, forward(ROWS)),
    "layernorm_backward": (3, backward(ROWS)),
    "rmsnorm": (2, rms_forward),
    "rmsnorm_backward": (3, rms_backward),
    "batchnorm": (5, batch_forward),
    "batchnorm_backward": (3, backward(PIXELS)),
    "batchnorm_inference": (
        1,
        lambda *, input, scale, bias, mean, inv_variance: (
            (input - mean) * inv_variance * scale + bias
        ),
    ),
    "add": (1, torch.add),
    "relu": (1, torch.relu),
    "relu_backward": (1, lambda *, loss, input: loss * (input > 0)),
    "cmp_gt": (1, lambda *, input, comparison: input > comparison),
    "scale": (1, lambda *, input, scale: input * scale),
}


def module() -> Any:
    """The stand-in module. Handles are the number 7, and ``streams`` records each set_stream()."""
    streams: list[tuple[object, object]] = []
    return SimpleNamespace(
        data_type=SimpleNamespace(**DTYPES),
        heur_mode=SimpleNamespace(A="A", FALLBACK="FALLBACK"),
        norm_forward_phase=SimpleNamespace(TRAINING="TRAINING"),
        pygraph=Graph,
        create_handle=lambda: 7,
        set_stream=lambda *given: streams.append(given),
        streams=streams,
    )
