"""What a call is said to do is what it did."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch

import torchkiln
from torchkiln import _C
from torchkiln.bench import options
from torchkiln.cli import main
from torchkiln.testing import SPECS, OpSpec
from torchkiln.trace import Kernel, Step, explain
from torchkiln.trace.events import read
from torchkiln.trace.kernel_names import access_of, pretty

CPU = torch.device("cpu")


def kinds(steps: tuple[Kernel | Step, ...]) -> list[str]:
    return [step.name if isinstance(step, Kernel) else step.kind for step in steps]


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
    assert found.forward.floor is not None
    assert found.forward.floor > 0
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
    assert isinstance(kernel, Kernel)
    assert len(found.forward.notes) == 1
    assert "no single stride leads through" in found.forward.notes[0]
    plain = explain("softmax", x.contiguous(), 1)
    assert kinds(plain.forward.steps) == ["softmax"]
    assert plain.forward.notes == ()


def test_a_copy_that_has_steps_of_its_own() -> None:
    """Torch transposes through a buffer: one copy, whatever it calls."""
    found = explain(torchkiln.layer_norm, torch.randn(512, 100).t(), 512)
    assert kinds(found.forward.steps) == ["copy", "norm"]
    assert "no evenly spaced rows" in found.forward.notes[0]


def test_a_cast() -> None:
    found = explain(torchkiln.add, torch.randn(3, 5), torch.arange(5))
    cast = found.forward.extra[0]
    assert cast.kind == "cast"
    assert cast.words == "int64 [5] to float32"
    assert "no kernel reads int64" in found.forward.notes[0]


def test_a_fallback() -> None:
    """Second gradients are torch's own ops; so is everything of torch's functions."""
    x = torch.randn(8, 16, requires_grad=True)
    found = explain(torch.nn.functional.layer_norm, x, (16,))
    assert kinds(found.forward.steps) == ["fallback"]
    assert found.forward.kernels == ()
    assert found.forward.extra[0].op == "aten::native_layer_norm"
    assert not found.spec
    assert found.forward.bytes == 2 * 8 * 16 * 4

    product = explain(torch.mul, x, 2)  # which casts the number first
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
    found = explain(spec.op, *sample.args, **sample.kwargs)
    kernels = found.forward.kernels
    assert kernels or any(step.kind == "fallback" for step in found.forward.extra)
    assert found.spec
    assert found.forward.bytes == spec.traffic(sample).bytes
    assert not kernels or {kernel.instruction_set for kernel in kernels} != {None}
    assert json.loads(json.dumps(found.as_dict()))["op"] == spec.name
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

    with pytest.raises(RuntimeError, match="got a call inside of another"):
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


def test_an_unknown_op_has_close_names() -> None:
    with pytest.raises(ValueError, match=r"torchkiln.explain: op: got 'sofmax'.*mean softmax"):
        explain("sofmax", torch.randn(8))


def test_rich_draws_a_tree() -> None:
    console = pytest.importorskip("rich.console").Console(width=200)
    with console.capture() as captured:
        console.print(explain(torchkiln.add, torch.randn(3, 5), torch.arange(5)))
    assert "cast: aten::copy_" in captured.get()


# As `nm -C` shows them in the library of kernels.
IN_ELEMENTWISE = (
    "void torchkiln::device::elementwise::kernel<torchkiln::device::elementwise::Each<torchkiln::ScaleShift<"
    "double> >, torchkiln::device::elementwise::LinearAccess<double, 1, double> >(torchkiln::"
    "elementwise::Each<"
    "torchkiln::ScaleShift<double> >, torchkiln::device::elementwise::LinearAccess<double, 1, double>, "
    "long)"
)
ANY = IN_ELEMENTWISE.replace("LinearAccess<double, 1, double>", "AnyAccess<__half, 1, 1>")
IN_ROWS = (
    "void torchkiln::cuda::(anonymous namespace)::norm_rows<torchkiln::RowPlace<torchkiln::"
    "RowAccess<__nv_bfloat16, 8, true>, 4>, __nv_bfloat16, false>(torchkiln::Norm, "
    "torchkiln::TeamShape)"
)
SINGLE = IN_ROWS.replace("8, true", "1, true")
EDGED = IN_ROWS.replace(
    "RowPlace<torchkiln::RowAccess<__nv_bfloat16, 8, true>, 4>", "EdgedPlace<__nv_bfloat16, 4>"
)
IN_COLUMNS = (
    "void torchkiln::columns::walk<torchkiln::cuda::(anonymous namespace)::GradientBody<torchkiln::"
    "cuda::(anonymous namespace)::Chosen<torchkiln::ExactMath>, double, 2>, 2>(torchkiln::cuda::"
    "(anonymous namespace)::GradientBody<torchkiln::cuda::(anonymous namespace)::Chosen<torchkiln::"
    "ExactMath>, double, 2>, torchkiln::columns::Plan, double*, torchkiln::Result)"
)


@pytest.mark.parametrize(
    ("name", "words", "width", "items"),
    [
        (IN_ELEMENTWISE, "all operands in one order, in vectors", 16, None),
        (ANY, "other strides, alignments or dtypes, an element at a time", 2, None),
        (IN_ROWS, "rows, in vectors", 16, 4),
        (SINGLE, "rows, an element at a time", 2, 4),
        (EDGED, "rows that begin anywhere, in vectors", 16, 4),
        (IN_COLUMNS, "columns, in vectors", 16, None),
        ("void somebody::else_s<float>(float*)", "", None, None),
    ],
)
def test_access_by_the_name(name: str, words: str, width: int | None, items: int | None) -> None:
    assert access_of(name) == (words, width, items)


def test_names_of_kernels() -> None:
    expected = ("norm_rows", "<RowPlace<RowAccess<bfloat16, 8, true>, 4>, bfloat16, false>")
    assert pretty(IN_ROWS) == expected
    assert pretty("kernel") == ("kernel", "")


def test_a_launch_in_words() -> None:
    """As the binding reports it: blocks, threads, cluster, shared bytes, registers, what fits."""
    figures = (8192, 1, 1, 256, 1, 1, 4, 1024, 512, 56, 16, 4, 132, 2048)
    events: list[object] = [
        ("enter", 7, "torchkiln::rms_norm", "", (), []),
        ("launch", 7, IN_ROWS, "", figures, []),
        ("leave", 7, "torchkiln::rms_norm", "", (), []),
    ]
    (kernel,) = read(events).steps
    assert isinstance(kernel, Kernel)
    assert (kernel.blocks, kernel.threads, kernel.cluster) == ((8192, 1, 1), (256, 1, 1), 4)
    assert kernel.shared_bytes == 1536
    assert kernel.occupancy == 0.5
    assert kernel.waves == pytest.approx(8192 / (4 * 132))
    assert str(kernel) == (
        "kernel norm_rows<RowPlace<RowAccess<bfloat16, 8, true>, 4>, bfloat16, false>, "
        "rows, in vectors, 16 bytes an access, 4 vectors a thread, 8192 blocks of 256 threads, "
        "clusters of 4, 1536 bytes shared, 56 registers, 16 bytes of local memory, "
        "occupancy 50%, 16 waves"
    )


def test_a_launch_that_the_runtime_knows_little_of() -> None:
    (kernel,) = read([("launch", 7, "", "", (1, 1, 1, 32, 1, 1, 1) + (0,) * 7, [])]).steps
    assert isinstance(kernel, Kernel)
    assert kernel.occupancy is kernel.waves is kernel.vector_bytes is None


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
def test_a_launch_inside_of_a_graph() -> None:
    x = torch.randn(1024, device="cuda")
    torchkiln.relu(x)
    graph = torch.cuda.CUDAGraph()

    def capture() -> torch.Tensor:
        with torch.cuda.graph(graph):
            return torchkiln.relu(x)

    assert explain(capture).forward.kernels


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to = tmp_path / "folder" / "e.json"
    given = ["explain", "rms_norm", "--device=cpu", "--shape=8x64", "--json", str(to)]
    assert main(given) == 0
    assert "kernel norm" in capsys.readouterr().out
    assert json.loads(to.read_text())["backward"]["steps"]
    assert main([*given[:-2], "--forward", "--json=-"]) == 0
    assert json.loads(capsys.readouterr().out)["backward"] is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["rms_nrm"], "torchkiln.explain: OP: got 'rms_nrm', expected one of add"),
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
    monkeypatch.setattr(options, "default_device", lambda: CPU)
    assert main(["explain", "--device=cpu", "--shape=4x8", *given]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["explain", "profile"])
def test_a_shape_without_memory(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "add", "--device=cpu", "--shape=99999999x9999999"]) == 1
    said = capsys.readouterr().err
    assert (
        f"torchkiln.{name}: --shape: got 99999999x9999999, expected a smaller one: out of" in said
    )
