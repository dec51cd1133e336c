"""Functions that write their results into tensors of the caller."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchkiln.testing.check import check
from torchkiln.testing.compare import (
    Where,
    bits,
    outputs,
    require,
    require_gradients,
    require_identical,
    require_same,
    require_values,
    vector_jacobian,
)
from torchkiln.testing.contract.gradients import incoming, small
from torchkiln.testing.contract.values import SMALL, TINY
from torchkiln.testing.data import layouts
from torchkiln.testing.sample import FLOATING, Sample
from torchkiln.testing.spec import OpSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torchkiln.testing.data import Placed
    from torchkiln.testing.forms import Written

    Function = Callable[..., Any]


def form_of(spec: OpSpec) -> Written:
    """The field ``written`` of the spec, which must be set."""
    if spec.written is None:
        raise TypeError(f"{spec.name}: written: got None, expected a Written")
    return spec.written


def is_in_place(spec: OpSpec) -> bool:
    """Whether the function writes into an argument that has a gradient."""
    form = form_of(spec)
    return any(form.names.index(name) in spec.differentiable for name in form.targets)


@check(dtypes=FLOATING, needs="written")
def written(spec: OpSpec, device: torch.device, dtype: torch.dtype) -> None:
    """The results are written where they belong and nowhere else; gradients are as for torch's ops.

    A call without a gradient refuses tensors that require one. A compiled graph writes to the same
    places.
    """
    for way, function in form_of(spec).ways().items():
        for sample in spec.samples(device, dtype):
            where = Where(spec, "written", sample, way)
            require_all_written(spec, function, sample, where)
            if is_in_place(spec) and sample.numel <= TINY:
                wanted = spec.wanted(sample)
                grads = incoming(spec, sample.call(spec.op))
                found = vector_jacobian(on_clone(function), spec.leaves(sample), wanted, grads)
                require_gradients(found, sample, wanted, grads, where)
        typical = spec.typical(device, dtype)
        where = Where(spec, "written", typical, way)
        if is_in_place(spec):
            require_first_row(spec, function, typical, where.at("a view"))
            require_refused_as_by_torch(spec, function, typical, where)
            if dtype == torch.float64:
                require_second_gradients(spec, function, device, way)
        elif not spec.differentiable and way == "the function":
            require_no_gradient(spec, function, typical, where)
        if not form_of(spec).statistics:
            require_one_place_each(spec, function, typical, where)
        if dtype == torch.float32 and way == "the function":
            require_graph_writes(spec, function, typical, where.at("compiled"))


def require_all_written(spec: OpSpec, function: Function, sample: Sample, where: Where) -> None:
    """Check the call with each target inside a buffer, at all strides that the target may have."""
    form = form_of(spec)
    dense = form.given(sample)
    start = {name: dense[name].clone() for name in form.targets}
    expected = outputs(form.on_copies(function).results(function(**dense), dense))
    if form.plain is not None:
        plain = outputs(sample.call(form.plain))
        require(len(expected) == len(plain), where, "returned another tensor than its argument")
        require_same(expected, plain, where.at("beside the op"))
    for name in form.targets:
        for placed in layouts(start[name]):
            is_first = placed.name == "contiguous"
            if form.takes(placed) and (is_first or sample.numel <= SMALL):
                given = {**dense, **{k: t.clone() for k, t in start.items()}, name: placed.tensor}
                place = where.at(f"{name} {placed.name}")
                require_written(sample, function, given, placed, dense[name], expected, place)


def require_written(
    sample: Sample,
    function: Function,
    given: Mapping[str, Any],
    placed: Placed,
    content: Tensor,
    expected: tuple[Tensor, ...],
    where: Where,
) -> None:
    """Check that the call gives the results, writes ``content`` and nothing around it.

    On a GPU, kernels for unaligned and for aligned tensors may add in different orders.
    """
    form = form_of(where.spec)
    targets = [given[name] for name in form.targets]
    x = placed.tensor
    whole = placed.buffer.clone()
    versions = [target._version for target in targets]
    found = outputs(form.on_copies().results(function(**given), given))
    is_own = len(found) == len(expected)
    require(is_own, where, "returned another tensor than its argument")
    if placed.name == "contiguous" or not x.is_cuda:
        require_same(found, expected, where)
    else:
        require_values(found if len(found) > 1 else found[0], sample, where)
        content = x
    whole.as_strided(x.shape, x.stride(), x.storage_offset()).copy_(content)
    require(torch.equal(placed.bits(), whole.view(torch.uint8)), where, "wrote around its argument")
    control = torch.zeros_like(x)
    before = control._version
    torch.relu_(control)
    by_torch = control._version - before
    for target, version in zip(targets, versions, strict=True) if not form.statistics else ():
        raised = target._version - version
        require(raised == by_torch, where, f"_version went up by {raised}, expected {by_torch}")


def on_clone(function: Function) -> Callable[..., Tensor]:
    """Applies an in-place op to a copy of ``x``, because ``x`` may be a leaf; returns the copy."""

    def call(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y = x.clone()
        function(y, *args, **kwargs)
        return y

    return call


def on_first_row(function: Function) -> Callable[..., Tensor]:
    """Applies an in-place op to the first row of a copy of ``x``, and returns the copy."""

    def call(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y = x.clone()
        function(y[0], *args, **kwargs)
        return y

    return call


def with_first_row(function: Function) -> Callable[..., Tensor]:
    """``on_first_row`` for a function that returns its result instead of writing it into ``x``."""

    def call(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torch.cat([function(x[:1], *args, **kwargs), x[1:]])

    return call


def refusal(call: Callable[[], object]) -> str:
    """The class and the first line of the error of a call."""
    try:
        result = call()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return f"no error, but {result!r}"


def require_refused_as_by_torch(
    spec: OpSpec, function: Function, sample: Sample, where: Where
) -> None:
    """Check that tensors that must not be written are refused with torch's message."""
    x = sample.args[0]
    leaf = x.clone().requires_grad_()
    overlapping = x[:1].clone().expand_as(x)
    for name, tensor in (
        ("a leaf", leaf),
        ("a view of a leaf", leaf[0]),
        ("an expanded tensor", overlapping),
    ):
        before = bits(tensor)

        def by_torch(tensor: Tensor = tensor) -> Tensor:
            return torch.relu_(tensor)

        found = refusal(lambda t=tensor: sample.substitute(0, t).call(function))  # type: ignore[misc]
        expected = refusal(by_torch)
        require(found == expected, where.at(name), f"{found!r}, expected {expected!r}")
        require(torch.equal(bits(tensor), before), where.at(name), "the refused call wrote")
    with torch.no_grad():
        sample.substitute(0, leaf).call(function)
    require(leaf.is_leaf and leaf.requires_grad, where, "a leaf under no_grad is one no more")
    require_identical(leaf, sample.call(spec.op), where.at("a leaf under no_grad"))


def require_no_gradient(spec: OpSpec, function: Function, sample: Sample, where: Where) -> None:
    """Check that tensors that require a gradient are refused, unless gradients are disabled."""
    form = form_of(spec)
    for name, value in form.given(sample).items():
        if not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        given = form.given(sample)
        given[name] = given[name].clone().requires_grad_()
        before = [bits(given[target]) for target in form.targets]
        found = refusal(lambda given=given: function(**given))  # type: ignore[misc]
        place = where.at(f"{name} requires a gradient")
        require(found.startswith("RuntimeError"), place, found)
        same = all(map(torch.equal, before, (bits(given[target]) for target in form.targets)))
        require(same, place, "the refused call wrote")
        with torch.no_grad():
            function(**given)
    with torch.inference_mode():
        function(**form.given(sample.map(torch.clone)))


def require_one_place_each(spec: OpSpec, function: Function, sample: Sample, where: Where) -> None:
    """Check that targets are refused if two of their elements share memory, or two targets do."""
    form = form_of(spec)
    for name in form.targets:
        others = [other for other in form.targets if other != name]
        for kind in ("an expanded tensor", *others):
            given = form.given(sample)
            target = given[name]
            if kind in others:
                given[name] = given[kind]
            else:
                given[name] = target[:1].clone().expand_as(target)
            before = bits(given[name])
            found = refusal(lambda given=given: function(**given))  # type: ignore[misc]
            place = where.at(f"{kind} as {name}")
            require(found.startswith("RuntimeError"), place, found)
            require(torch.equal(bits(given[name]), before), place, "the refused call wrote")


def require_graph_writes(spec: OpSpec, function: Function, sample: Sample, where: Where) -> None:
    """Check that a graph writes into the tensors of the caller, and reads the new values.

    An op that becomes ATen ops rounds differently in the graph, so the results are compared with
    the truth.
    """
    form = form_of(spec)
    names = list(form.targets)
    rest = {name: value for name, value in form.given(sample).items() if name not in names}

    results = form.on_copies().results

    def step(*targets: Tensor) -> tuple[Tensor, ...]:
        given = {**rest, **dict(zip(names, targets, strict=True))}
        return tuple(y * 2 for y in outputs(results(function(**given), given)))

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    both = []
    for call in (step, compiled):
        given = form.given(sample)
        targets = [given[name].detach() for name in names]
        both.append((*call(*targets), *targets))
    eager, graph = both
    if spec.opaque:
        for found, expected in zip(graph, eager, strict=True):
            require_identical(found, expected, where)
        return
    changed = graph[-len(names) :]
    require_values(changed if len(changed) > 1 else changed[0], sample, where)
    for found, target in zip(graph[: -len(names)], changed, strict=True):
        require_identical(found, target * 2, where.at("reads what it wrote"))


def require_first_row(spec: OpSpec, function: Function, sample: Sample, where: Where) -> None:
    """Check values and gradients if the op writes only a part of a tensor."""
    plain = form_of(spec).plain or spec.op
    wanted = spec.wanted(sample)
    grads = incoming(spec, sample.args[0])
    calls = [spec.leaves(sample) for _ in range(2)]
    functions = (on_first_row(function), with_first_row(plain))
    found, expected = (
        (call.call(f), *vector_jacobian(f, call, wanted, grads))
        for f, call in zip(functions, calls, strict=True)
    )
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        require_identical(one, other, where.at(f"gradient of {wanted[i - 1]}" if i else "values"))


def require_second_gradients(
    spec: OpSpec, function: Function, device: torch.device, way: str
) -> None:
    """Check gradients of both orders, and forward mode, against numerical differences."""
    for sample in small(spec, device):
        for wrapped in (on_clone, on_first_row):
            if wrapped is on_first_row and sample.args[0].dim() == 0:
                continue
            wanted = spec.wanted(sample)
            bound = sample.bind(wrapped(function), wanted)
            inputs = sample.take(wanted)
            try:
                torch.autograd.gradcheck(bound, inputs, check_forward_ad=True)
                torch.autograd.gradgradcheck(bound, inputs)
            except Exception as error:
                where = Where(spec, "written", sample, f"{way}, {wrapped.__name__}")
                raise AssertionError(f"{where}: {error}") from error
