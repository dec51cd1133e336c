"""Each check of the contract is given an op that violates its clause, and must fail."""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from testing_faults import Row, show, title
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import torchkiln
from torchkiln import testing
from torchkiln.testing.contract import CHECKS, state
from torchkiln.testing.contract.cuda import rest_of_block
from torchkiln.testing.specs.bias_act import BIAS_ACT
from torchkiln.testing.specs.pointwise import ADD

add: Callable[..., Tensor] = torch.add


def off_by_a_thousandth(a: Tensor, b: Tensor) -> Tensor:
    return add(a, b) * 1.001


def cut_off(a: Tensor, b: Tensor) -> Tensor:
    """Rounds to bfloat16 by dropping the lower half of a float32."""
    out = add(a, b)
    if out.dtype != torch.bfloat16:
        return out
    full = add(a.float(), b.float()).view(torch.int32) & -65536
    return full.view(torch.float32).to(out.dtype)


def in_the_dtype_of_the_first(a: Tensor, b: Tensor) -> Tensor:
    return add(a, b).to(a.dtype)


def wrong_beside_another_dtype(a: Tensor, b: Tensor) -> Tensor:
    """Computes in the narrower of two dtypes."""
    out = add(a, b)
    narrow = a.dtype if a.itemsize < b.itemsize else b.dtype
    return add(a.to(narrow), b.to(narrow)).to(out.dtype)


def loses_nan(a: Tensor, b: Tensor) -> Tensor:
    out = add(a, b)
    return torch.where(out.isnan(), 0, out)


def wrong_in_the_tail(a: Tensor, b: Tensor) -> Tensor:
    """Sets the last element to 0 if a vector's number of elements is odd."""
    out = add(a, b)
    if out.numel() % 2 and out.dim() == 1:
        return out * (torch.arange(out.numel(), device=out.device) < out.numel() - 1)
    return out


def ignores_strides(a: Tensor, b: Tensor) -> Tensor:
    if a.dim() == 2 and a.numel() > 1 and a.untyped_storage().nbytes() >= a.nbytes:
        a = a.as_strided(a.shape, (a.shape[1], 1), a.storage_offset())
    return add(a, b)


def writes_to_its_input(a: Tensor, b: Tensor) -> Tensor:
    out = add(a, b)
    a.detach().mul_(1 if a.is_contiguous() else 2)
    return out


class WrongGradient(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return add(a, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        ctx.shapes = tuple(i.shape for i in inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad.sum_to_size(ctx.shapes[0]) * 1.01, grad.sum_to_size(ctx.shapes[1])


class NoSecondGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, scale: float) -> Tensor:
        out = torch.relu(x * scale + bias)
        ctx.save_for_backward(out)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (out,) = ctx.saved_tensors
        passed = grad * (out > 0)
        return passed * ctx.scale, passed.reshape(-1, out.shape[-1]).sum(0), None


def differs_when_recorded(a: Tensor, b: Tensor) -> Tensor:
    out = add(a, b)
    return out * 1.0000002 if a.requires_grad else out


class AssumesContiguousGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.shapes = a.shape, b.shape
        return add(a, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        if grad.dim() == 2 and grad.stride(1) != 1:
            grad = grad.t().contiguous().reshape(grad.shape)
        return grad.sum_to_size(ctx.shapes[0]), grad.sum_to_size(ctx.shapes[1])


class WrongTangent(torch.autograd.Function):
    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return add(a, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG004
        return grad, grad

    @staticmethod
    def jvp(ctx: Any, a: Tensor, b: Tensor) -> Tensor:  # noqa: ARG004
        return a - b


def graph_without_need(a: Tensor, b: Tensor) -> Tensor:
    with torch.enable_grad():
        return add(a, b)


def other_strides_on_meta(a: Tensor, b: Tensor) -> Tensor:
    out = add(a, b)
    return out if a.is_meta else out.mT.contiguous().mT if out.dim() > 1 else out


def always_casts(a: Tensor, b: Tensor) -> Tensor:
    out = add(a, b)
    return out.bfloat16() if torch.is_autocast_enabled(out.device.type) else out


def reads_a_value(a: Tensor, b: Tensor) -> Tensor:
    return add(a, b) if a.sum().item() < 1e9 else a


class LeavesTheLast(torch.autograd.Function):
    """Leaves one element of the result uninitialised."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.shapes = a.shape, b.shape
        full = add(a, b)
        out = torch.empty(full.shape, dtype=full.dtype)
        out.view(-1)[:-1] = full.reshape(-1)[:-1]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad.sum_to_size(ctx.shapes[0]), grad.sum_to_size(ctx.shapes[1])


class WritesToSaved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return add(a, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        a, b = ctx.saved_tensors
        a.data.add_(1)
        return grad.sum_to_size(a.shape), grad.sum_to_size(b.shape)


SHARED = torch.zeros(1 << 16)


class SharedScratch(torch.autograd.Function):
    """Concurrent calls use the same scratch memory."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.shapes = a.shape, b.shape
        out = add(a, b)
        scratch = SHARED[: out.numel()]
        scratch.copy_(out.reshape(-1))
        time.sleep(1e-3)
        return scratch.reshape(out.shape).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad.sum_to_size(ctx.shapes[0]), grad.sum_to_size(ctx.shapes[1])


def unrolled(a: Tensor, b: Tensor) -> Tensor:
    out = add(a, b)
    for _ in range(a.shape[0]):
        out = out + 0
    return out


def stays_an_op(a: Tensor, b: Tensor) -> Tensor:
    return ADD.overload(a, b)


CALLS = itertools.count()


def changes_rarely(a: Tensor, b: Tensor) -> Tensor:
    """Changes each 13th result in the last bits, as a race might."""
    out = add(a, b)
    return out * (1 + 1e-6) if next(CALLS) % 13 == 12 else out


def changes_from_run_to_run(a: Tensor, b: Tensor) -> Tensor:
    out = add(a, b)
    return out * (1 + 1e-7 * torch.rand(out.shape, device=out.device))


def vague(a: Tensor, b: Tensor) -> Tensor:
    try:
        return torchkiln.add(a, b)
    except RuntimeError as error:
        raise RuntimeError("torchkiln.add: wrong input") from error


def drops_the_subclass(a: Tensor, b: Tensor) -> Tensor:
    return add(a.as_subclass(Tensor), b.as_subclass(Tensor))


KEPT: dict[object, Tensor] = {}


def leaks(a: Tensor, b: Tensor) -> Tensor:
    KEPT[len(KEPT)] = add(a, b).detach()
    return add(a, b)


def takes_device_memory(a: Tensor, b: Tensor) -> Tensor:
    """Allocates device memory by the CUDA runtime that torch has loaded."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").split()
    runtime = ctypes.CDLL(next(path for path in maps if "/libcudart.so" in path))
    pointer = ctypes.c_void_p()
    assert runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(512)) == 0
    assert runtime.cudaFree(pointer) == 0
    return add(a, b)


def remembers(a: Tensor, b: Tensor) -> Tensor:
    """Returns the result of the first call with the same addresses."""
    out = add(a, b)
    first = KEPT.setdefault((a.data_ptr(), b.data_ptr()), out.detach().clone())
    return first + (out - out.detach())


def writes_behind_its_output(a: Tensor, b: Tensor) -> Tensor:
    out = add(a, b)
    rest_of_block(out)[:4].zero_()
    return out


def on_the_default_stream(a: Tensor, b: Tensor) -> Tensor:
    with torch.cuda.stream(torch.cuda.default_stream(a.device)):
        return add(a, b)


BROKEN: list[Row] = [
    ("values", off_by_a_thousandth, torch.float32, "elements are wrong"),
    ("values", wrong_in_the_tail, torch.bfloat16, "elements are wrong"),
    ("rounded_to_nearest", cut_off, torch.bfloat16, "mean error -0.* steps"),
    (
        "mixed_dtypes",
        in_the_dtype_of_the_first,
        torch.float32,
        "a in torch.float16.*found torch.float16, expected torch.float32",
    ),
    ("mixed_dtypes", wrong_beside_another_dtype, torch.float32, "in torch.*elements are wrong"),
    ("not_finite", loses_nan, torch.float32, "nan in argument 0.*elements are wrong"),
    ("strides", ignores_strides, torch.float32, "elements are wrong"),
    ("strides", writes_to_its_input, torch.float32, "wrote to its input"),
    ("gradient_values", WrongGradient.apply, torch.float32, "gradient of argument 0"),
    ("gradients_that_are_recorded", WrongGradient.apply, torch.float32, "gradient of argument 0"),
    ("gradient_values", differs_when_recorded, torch.float32, "recorded: not bitwise equal"),
    (
        "gradient_strides",
        AssumesContiguousGradient.apply,
        torch.float32,
        "incoming gradient every second column",
    ),
    ("gradcheck", WrongGradient.apply, torch.float64, "Jacobian mismatch"),
    ("only_the_gradients_asked_for", graph_without_need, torch.float32, "a graph under no_grad"),
    ("meta_and_fake", other_strides_on_meta, torch.float32, "but the real result has"),
    ("autocast", always_casts, torch.float32, "found torch.bfloat16"),
    ("vmap", reads_a_value, torch.float32, "item"),
    ("func_grad", WrongGradient.apply, torch.float32, "func_grad.*gradient of argument 0"),
    ("vmap_of_grad", WrongGradient.apply, torch.float32, "vmap_of_grad.*gradient of argument 0"),
    ("func_jvp", WrongTangent.apply, torch.float32, "func_jvp.*elements are wrong"),
    ("forward_mode", WrongTangent.apply, torch.float32, "forward_mode.*elements are wrong"),
    ("retained_graph", WrongGradient.apply, torch.float32, "gradient of argument 0"),
    ("compile_aot_eager", reads_a_value, torch.float32, "data-dependent"),
    ("export", reads_a_value, torch.float32, "data-dependent"),
    ("determinism", changes_from_run_to_run, torch.float32, "not bitwise equal"),
    ("determinism", changes_rarely, torch.float32, "not bitwise equal"),
    ("checkpointed", changes_from_run_to_run, torch.float32, "not bitwise equal"),
    ("every_element_is_written", LeavesTheLast.apply, torch.float32, "not bitwise equal"),
    ("gradient_strides", WritesToSaved.apply, torch.float32, "wrote to an argument"),
    ("calls_from_several_threads", SharedScratch.apply, torch.float32, "thread .* bitwise equal"),
    ("no_recompilation_storm", unrolled, torch.float32, "5 sizes took 5 graphs"),
    ("compile_policy", stays_an_op, torch.float32, "the graph has .*torchkiln.add"),
    ("no_memory_growth", leaks, torch.float32, "1000 calls kept .* bytes of the C library"),
    ("subclasses", drops_the_subclass, torch.float32, "expected <class"),
    ("bad_input", vague, torch.float32, "expected RuntimeError matching"),
]
BROKEN_ON_CUDA: list[Row] = [
    ("around_the_outputs", writes_behind_its_output, torch.float32, "4 bytes behind the end"),
    ("side_stream", on_the_default_stream, torch.float32, "elements are wrong"),
    ("graph_capture", remembers, torch.float32, "data times -3.0.*elements are wrong"),
    ("no_synchronisation", reads_a_value, torch.float32, "synchroniz"),
    ("only_the_caching_allocator", leaks, torch.float32, "stay allocated"),
    ("only_the_caching_allocator", takes_device_memory, torch.float32, "calls took device memory"),
]


@pytest.mark.parametrize("row", BROKEN, ids=title)
def test_a_broken_op_is_found(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "TRIES", state.TRIES[:2])  # test_a_leak_of_each_call has all four
    show(row, torch.device("cpu"))
    KEPT.clear()


@pytest.mark.cuda
@pytest.mark.parametrize("row", BROKEN_ON_CUDA, ids=title)
def test_a_broken_op_is_found_on_cuda(row: Row) -> None:
    show(row, torch.device("cuda", 0))
    KEPT.clear()


def test_a_missing_second_gradient_is_found() -> None:
    spec = dataclasses.replace(
        BIAS_ACT,
        op=lambda x, bias, scale=1.0, act="relu": NoSecondGradient.apply(x, bias, scale),  # type: ignore[no-untyped-call]  # noqa: ARG005
    )
    with pytest.raises(RuntimeError, match="Jacobian mismatch"):
        testing.Case(spec, CHECKS["gradgradcheck"], torch.device("cpu"), torch.float64).run()


def test_a_missing_meta_kernel_is_found() -> None:
    library = torch.library.Library("torchkiln_broken", "DEF")
    library.define("add(Tensor a, Tensor b) -> Tensor")
    library.impl("add", lambda a, b: torch.add(a.detach(), b.detach()), "CPU")
    spec = dataclasses.replace(ADD, overload=torch.ops.torchkiln_broken.add.default)
    with pytest.raises(Exception, match="opcheck"):
        testing.Case(spec, CHECKS["opcheck"], torch.device("cpu"), torch.float32).run()


class Forgetful(nn.Module):
    """A module whose copies are initialised again."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(10))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.bias)

    def __deepcopy__(self, memo: object) -> Forgetful:
        other = Forgetful()
        with torch.no_grad():
            other.bias.copy_(copy.copy(self.bias) + 1)
        return other


def test_a_forgetful_module_is_found() -> None:
    spec = dataclasses.replace(BIAS_ACT, module=lambda *_: Forgetful())
    with pytest.raises(AssertionError, match=r"deepcopy|state_dict"):
        testing.Case(spec, CHECKS["modules"], torch.device("cpu"), torch.float32).run()


def test_a_wrong_sharding_rule_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.tensor import Shard  # noqa: PLC0415

    from torchkiln.distributed import rules  # noqa: PLC0415

    def summed_dimension(call: Any) -> Iterator[Any]:
        yield [Shard(call.dim)], {"x": Shard(call.dim)}

    op = torch.ops.torchkiln.softmax.default
    monkeypatch.setitem(rules.registered(), op, summed_dimension)
    spec = next(spec for spec in testing.SPECS if spec.name == "softmax")
    with pytest.raises(AssertionError, match="not close"):
        testing.Case(spec, CHECKS["sharding"], torch.device("cpu"), torch.float64).run()


def test_every_check_that_runs_here_is_shown_a_fault() -> None:
    """Each check that runs here has a row above; a new check needs one."""
    shown = {row[0] for row in BROKEN + BROKEN_ON_CUDA}
    shown |= {"gradgradcheck", "opcheck", "modules", "written", "sharding"}
    # These checks differ from one above only in the tool, the device or the size of tensors.
    same = {
        "opcheck_helpers",
        "compile_inductor",
        "aot_inductor",
        "other_current_device",
        "more_than_2_to_the_31_elements",
        "gradients_of_more_than_2_to_the_31_elements",
        "fork_of_a_cpu_only_parent",
    }
    assert shown | same == set(CHECKS)


def test_the_message_tells_where() -> None:
    def op(a: Tensor, b: Tensor) -> Tensor:
        out = torch.add(a, b).clone()
        if out.shape == (6, 10):
            out[4, 7] += 1
        return out

    spec = dataclasses.replace(ADD, op=op)
    with pytest.raises(AssertionError) as caught:
        testing.Case(spec, CHECKS["values"], torch.device("cpu"), torch.float32).run()
    message = str(caught.value)
    for word in ("add: values", "'typical'", "torch.float32", "1 of 60", "[4, 7]", "allowed"):
        assert word in message


def test_names_are_unique() -> None:
    for device in ("cpu", "cuda"):
        found = [str(case) for case in testing.cases(testing.SPECS, torch.device(device))]
        assert len(found) == len(set(found))
