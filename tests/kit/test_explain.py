"""explain() reports the kernels, copies and notes of a call."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torchkiln
from torchkiln import _C
from torchkiln.bench import plan
from torchkiln.cli import main
from torchkiln.cli.status import Status
from torchkiln.testing import SPECS, OpSpec
from torchkiln.trace import KernelLaunch, Step, explain

CPU = torch.device("cpu")
CUDA = Path(__file__).parents[2] / "cuda"


def kinds(steps: tuple[KernelLaunch | Step, ...]) -> list[str]:
    return [step.name if isinstance(step, KernelLaunch) else step.kind for step in steps]


def test_a_kernel_and_nothing_else() -> None:
    x, weight = torch.randn(64, 32, requires_grad=True), torch.ones(32)
    found = torchkiln.explain(torchkiln.rms_norm, x, 32, weight)
    assert found.op == "rms_norm"
    assert found.inputs == ("float32 [64, 32]", "float32 [32]")
    assert kinds(found.forward.steps) == ["norm"]
    assert found.forward.notes == ()
    assert found.spec
    assert found.forward.bytes >= 2 * 64 * 32 * 4
    assert found.forward.allocated >= 64 * 32 * 4
    assert found.forward.ceiling is not None
    assert found.forward.ceiling > 0
    assert found.backward is not None
    assert kinds(found.backward.steps)[0] == "norm_backward"
    assert "torchkiln::rms_norm" in found.forward.route


def test_no_backward_without_gradients() -> None:
    assert explain(torchkiln.relu, torch.randn(8)).backward is None


def test_a_copy_comes_with_its_reason() -> None:
    x = torch.randn(4, 5, 6, 7).permute(3, 1, 0, 2)
    found = explain("softmax", x, 1)
    copy, kernel = found.forward.steps
    assert isinstance(copy, Step)
    assert (copy.kind, copy.inside) == ("copy", "torchkiln::softmax")
    assert copy.bytes == 2 * x.numel() * 4
    assert isinstance(kernel, KernelLaunch)
    assert len(found.forward.notes) == 1
    assert "no single stride leads through" in found.forward.notes[0]
    plain = explain("softmax", x.contiguous(), 1)
    assert kinds(plain.forward.steps) == ["softmax"]
    assert plain.forward.notes == ()


def test_a_copy_of_rows() -> None:
    """A kernel transposes matrices; torch copies rows with any other strides."""
    found = explain(torchkiln.layer_norm, torch.randn(512, 100).t(), 512)
    assert kinds(found.forward.steps) == ["transpose", "norm"]
    assert "no evenly spaced rows" in found.forward.notes[0]
    found = explain(torchkiln.layer_norm, torch.randn(512, 200)[:, ::2].t(), 512)
    assert kinds(found.forward.steps) == ["copy", "norm"]


def test_a_copy_of_a_reduction() -> None:
    """Strides that no kernel reads are copied first, exchanged kept dimensions at the end."""
    spread = torch.randn(4, 5, 6, 7, 8)[:, ::2, :, ::2, ::2]
    found = explain(torchkiln.sum, spread, [0, 2, 4])
    assert kinds(found.forward.steps)[0] == "copy"
    assert "more dimensions that do not merge" in found.forward.notes[0]
    exchanged = explain(torchkiln.sum, torch.randn(3, 4, 5).permute(1, 0, 2), [2])
    assert kinds(exchanged.forward.steps) == ["reduce", "copy"]
    assert "in memory order" in exchanged.forward.notes[0]
    assert explain(torchkiln.sum, torch.randn(3, 4, 5), [1]).forward.notes == ()


def test_a_cast() -> None:
    found = explain(torchkiln.add, torch.randn(3, 5), torch.arange(5))
    cast = found.forward.extra[0]
    assert cast.kind == "cast"
    assert cast.words == "int64 [5] to float32"
    assert "no kernel reads int64" in found.forward.notes[0]


def test_a_fallback() -> None:
    """Ops of torch count as a fallback: torch's own functions, and second derivatives of ours."""
    x = torch.randn(8, 16, requires_grad=True)
    found = explain(torch.nn.functional.layer_norm, x, (16,))
    assert kinds(found.forward.steps) == ["fallback"]
    assert found.forward.kernels == ()
    assert found.forward.extra[0].op == "aten::native_layer_norm"
    assert not found.spec
    assert found.forward.bytes == 2 * 8 * 16 * 4

    product = explain(torch.mul, x, 2)  # torch first casts the number
    assert [step.op for step in product.forward.extra if step.kind == "fallback"] == ["aten::mul"]
    assert product.forward.allocated >= 8 * 16 * 4

    def both(x: torch.Tensor) -> torch.Tensor:
        (grad,) = torch.autograd.grad(torchkiln.silu(x).sum(), x, create_graph=True)
        return torch.autograd.grad(grad.sum(), x)[0]

    ours = [step.kind for step in explain(both, x).forward.extra]
    assert "fallback" in ours


def test_numbers_have_no_spec_traffic() -> None:
    found = explain(torchkiln.muladd, torch.randn(8), 2, torch.randn(8))
    assert not found.spec
    assert found.forward.bytes == 3 * 8 * 4


def test_parts_on_threads() -> None:
    count = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        (kernel,) = explain(torchkiln.add, torch.ones(1 << 18), torch.ones(1 << 18)).forward.kernels
    finally:
        torch.set_num_threads(count)
    assert kernel.parts == 2
    assert kernel.instruction_set in ("baseline", "AVX2", "AVX-512")


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_every_op_can_be_explained(spec: OpSpec) -> None:
    sample = spec.leaves(spec.bench(CPU, torch.float32, (8, 64)))
    sample.start_generators()
    found = explain(spec.op, *sample.arguments(spec.op)[0], **sample.arguments(spec.op)[1])
    kernels = found.forward.kernels
    assert kernels or any(step.kind == "fallback" for step in found.forward.extra)
    assert found.spec
    assert found.forward.bytes == spec.traffic(sample).bytes
    assert not kernels or {kernel.instruction_set for kernel in kernels} != {None}
    assert json.loads(found.to_json())["op"] == spec.name
    for words in (str(found), repr(found)):
        assert words.startswith(f"{spec.name} of ")
        assert ("kernel " if kernels else "fallback: ") in words


def test_nothing_is_recorded_outside() -> None:
    explain(torchkiln.relu, torch.randn(8))
    torchkiln.relu(torch.randn(8))
    assert _C.stop_recording() == []


def test_a_call_that_fails_ends_the_recording() -> None:
    with pytest.raises(RuntimeError, match=r"torchkiln\.layer_norm"):
        explain(torchkiln.layer_norm, torch.randn(4, 5), 6)
    assert explain(torchkiln.relu, torch.randn(8)).forward.kernels


def test_one_at_a_time() -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        explain(torchkiln.relu, x)
        return x

    with pytest.raises(RuntimeError, match="got a call inside another"):
        explain(inner, torch.randn(8))
    assert explain(torchkiln.relu, torch.randn(8)).forward.kernels


def test_other_threads_are_not_disturbed() -> None:
    x, stop = torch.randn(1000), threading.Event()

    def busy() -> None:
        while not stop.is_set():
            torchkiln.silu(x)

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        for _ in range(20):
            found = explain(torchkiln.add, x, x)
            assert found.forward.route == ("torchkiln::add",)
            assert "add" in kinds(found.forward.steps)
    finally:
        stop.set()
        thread.join()


def test_threads_leave_torchs_attention_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads explain at overlapping times; torch's attention is restored afterwards."""
    original, start = F.scaled_dot_product_attention, _C.start_recording
    main, begun, done = threading.current_thread(), threading.Event(), threading.Event()

    def start_later() -> None:
        if threading.current_thread() is not main:
            begun.set()
            done.wait()
        start()

    monkeypatch.setattr(_C, "start_recording", start_later)
    x = torch.randn(8)
    second = threading.Thread(target=explain, args=(torchkiln.silu, x))

    def first(x: Tensor) -> Tensor:
        second.start()
        begun.wait()
        return x

    explain(first, x)
    done.set()
    second.join()
    assert F.scaled_dot_product_attention is original


def test_an_unknown_op_has_close_names() -> None:
    with pytest.raises(ValueError, match=r"torchkiln.explain: op: got 'sofmax'.*mean softmax"):
        explain("sofmax", torch.randn(8))


def test_rich_draws_a_tree() -> None:
    console = pytest.importorskip("rich.console").Console(width=200)
    with console.capture() as captured:
        console.print(explain(torchkiln.add, torch.randn(3, 5), torch.arange(5)))
    assert "cast: aten::copy_" in captured.get()


@pytest.mark.cuda
def test_a_launch_on_a_gpu() -> None:
    x = torch.randn(512, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(4096, device="cuda", dtype=torch.bfloat16)
    found = explain(torchkiln.rms_norm, x, 4096, weight)
    (kernel,) = found.forward.kernels
    assert kernel.name == "norm_rows"
    assert kernel.vector_bytes == 16
    assert kernel.blocks[0] >= 1
    assert kernel.registers > 0
    assert kernel.occupancy is not None
    assert 0 < kernel.occupancy <= 1
    assert found.backward is not None
    assert found.backward.kernels
    assert found.forward.extra == found.backward.extra == ()


@pytest.mark.cuda
def test_the_product_of_linear_on_a_gpu() -> None:
    """From k = 2048 on, linear with gelu is one kernel of torchkiln, for compute capability 9.0."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("a kernel for compute capability 9.0")
    x = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    found = explain(torchkiln.linear, x, weight, act="gelu")
    (kernel,) = found.forward.kernels
    assert kernel.name == "sm90::matmul_kernel"
    assert kernel.variant == "<bfloat16, Major::k, Major::k>"
    multiprocessors = torch.cuda.get_device_properties("cuda").multi_processor_count
    assert kernel.blocks == (multiprocessors, 1, 1)  # persistent: 1024 tiles
    assert kernel.threads[0] % 128 == 0
    assert kernel.shared_bytes > 100 * 1024
    assert kernel.registers > 0
    assert kernel.occupancy is not None
    assert 0 < kernel.occupancy <= 1
    assert kernel.waves == 1
    assert "product by sm90" in found.forward.notes
    assert found.forward.extra == ()


@pytest.mark.cuda
def test_a_launch_inside_of_a_graph() -> None:
    x = torch.randn(1024, device="cuda")
    torchkiln.relu(x)
    graph = torch.cuda.CUDAGraph()

    def capture() -> torch.Tensor:
        with torch.cuda.graph(graph):
            return torchkiln.relu(x)

    assert explain(capture).forward.kernels


def test_spmm_is_spmm_csr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "spmm", "--device=cpu", "--shape=8x16", "--dtype=fp32"]) == 0
    assert capsys.readouterr().out.startswith("spmm_csr of float32 ")


def test_a_function_that_calls_ops() -> None:
    x, weight, vector = torch.randn(2, 4, 5, 5), torch.randn(6, 4, 3, 3), torch.ones(6)
    found = explain("conv_bn_act", x, weight, None, vector, vector, vector, vector)
    assert found.op == "conv_bn_act"
    assert found.forward.route == ("torchkiln::bn_act",)
    assert found.forward.notes == ("convolution, then bn_act: the weight is no torch.nn.Parameter",)


@pytest.mark.parametrize("variant", ["", "1x1", "residual", "silu"])
def test_the_command_of_a_function_that_calls_ops(
    variant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["explain", "conv_bn_act", "--device=cpu", "--shape=784x8", f"--variant={variant}"]
    assert main([*given, "--direction=forward"]) == 0
    assert "because: folded convolution" in capsys.readouterr().out
    assert main(given) == 0
    assert "because: convolution, then bn_act: gradients are needed" in capsys.readouterr().out
    assert main([*given[:-1], "--variant=7x7"]) == 2
    assert "--variant: got '7x7', expected '1x1' or" in capsys.readouterr().err


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to = tmp_path / "folder" / "e.json"
    given = ["explain", "rms_norm", "--device=cpu", "--shape=8x64", "--json", str(to)]
    assert main(given) == 0
    assert "kernel norm" in capsys.readouterr().out
    assert json.loads(to.read_text())["schema"] == "torchkiln.explain/1"
    assert json.loads(to.read_text())["backward"]["steps"]
    assert main([*given[:-2], "--direction=forward", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["backward"] is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["rms_nrm"], "torchkiln.explain: OP: got 'rms_nrm' (did you mean rms_norm or "),
        (["add", "--dtype=float64", "--device=cuda"], "--device: got cuda, expected a GPU"),
        (["add", "--variant=x"], "torchkiln.explain: --variant: got 'x', expected none: add has"),
        (["swiglu", "--shape=8x2", "--variant=y"], "--variant: got 'y', expected "),
    ],
)
def test_a_refused_command(
    given: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan, "default_device", lambda: CPU)
    status = Status.CANNOT_RUN if "--device=cuda" in given else Status.WRONG_CALL
    assert main(["explain", "--device=cpu", "--shape=4x8", *given]) == status
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["explain", "profile"])
def test_a_shape_without_memory(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "add", "--device=cpu", "--shape=99999999x9999999"]) == Status.CANNOT_RUN
    said = capsys.readouterr().err
    assert (
        f"torchkiln.{name}: --shape: got 99999999x9999999, expected a smaller one: out of" in said
    )
