"""The programs in docs/examples run and print what their pages state."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from processes import launched, processes_on

from torchkiln import jit

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "examples"


@pytest.fixture
def example(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """An example program, imported as a module."""
    name = f"example_{request.param}"
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{request.param}.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[name]


@pytest.mark.parametrize("example", ["train"], indirect=True)
def test_both_trainings_are_the_same(example: ModuleType) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are small
    try:
        runs = example.main(60)
    finally:
        torch.set_num_threads(threads)
    ours, theirs = runs["torchkiln"].losses, runs["torch"].losses
    assert ours[0] == pytest.approx(theirs[0], abs=1e-5)
    # Rounding differences grow from step to step, so only the first 20 losses are compared.
    assert ours[:20] == pytest.approx(theirs[:20], abs=1e-3)
    assert sum(ours[-5:]) < 0.5 * sum(ours[:5])


@pytest.mark.parametrize("example", ["resnet"], indirect=True)
def test_a_fused_resnet_learns_the_same(
    example: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "resnet.png"
    words = ["--steps", "25", "--batch", "16", "--device", "cpu"]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are small
    try:
        runs = example.main([*words, "--picture", str(picture)])
    finally:
        torch.set_num_threads(threads)
    said = capsys.readouterr().out
    ours, theirs = runs["torchkiln.fuse"].losses, runs["eager"].losses
    assert ours[:10] == pytest.approx(theirs[:10], abs=1e-3)
    assert sum(ours[-5:]) < 0.7 * sum(ours[:5])
    assert "fused: 9 of 9 batch norms" in said
    assert "ms per step" in said
    assert picture.exists() or "there is no module matplotlib" in said


@pytest.mark.parametrize("example", ["resnet"], indirect=True)
def test_a_resnet_whose_losses_differ_is_told(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example, "difference", lambda *_: 1.0)
    words = ["--steps", "1", "--batch", "4", "--image", "8", "--width", "4", "--device", "cpu"]
    with pytest.raises(AssertionError, match="losses: got a difference of 1, expected less than"):
        example.main([*words, "--bottleneck", "--bfloat16"])


@pytest.mark.parametrize("example", ["transformer"], indirect=True)
def test_a_transformer_learns_to_add(example: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib").use("Agg")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are small
    try:
        runs, text = example.main(100, picture=tmp_path / "runs.png")
    finally:
        torch.set_num_threads(threads)
    ours, theirs = runs["torchkiln"], runs["torch"]
    assert ours.losses[0] == pytest.approx(theirs.losses[0], abs=1e-5)
    assert ours.losses[:20] == pytest.approx(theirs.losses[:20], abs=1e-3)
    assert sum(ours.losses[-5:]) < 0.4 * sum(ours.losses[:5])
    assert ours.kept < 0.8 * theirs.kept
    assert len(text) == example.LENGTH
    assert text.startswith("3+4=")
    assert (tmp_path / "runs.png").stat().st_size > 10_000


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("example", ["jit_to_package"], indirect=True)
def test_an_op_by_formula_and_by_hand(
    example: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    example.main()
    said = capsys.readouterr().out
    assert "checks of the contract passed" in said
    assert "torchkiln_op is" in said
    x = torch.ones(3)
    with pytest.raises(ValueError, match=r"gate: got torch\.float64 of shape \[3\], expected"):
        example.by_hand(x, x.double(), 0.0, 1.0)


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("example", ["jit_to_package"], indirect=True)
def test_its_kernels_compile(example: ModuleType) -> None:
    try:
        module = jit.inline(example.KERNELS)
    except RuntimeError as error:
        pytest.skip(str(error).split("\n")[0])
    assert module.binary("sm_90", "backward").code


def losses(device: torch.device, processes: int, folder: Path, *options: str) -> dict[int, float]:
    """The loss of each step, from a run of the parallel example."""
    words = ("--dtype", "float64", *options)
    said = launched(FOLDER / "parallel.py", device, processes, folder, *words)
    found = re.findall(r"^step (\d+): loss (\S+)$", said, re.MULTILINE)
    return {int(step): float(loss) for step, loss in found}


@pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")
@pytest.mark.parametrize("tensor_parallel", [pytest.param("1", marks=pytest.mark.cuda), "2"])
def test_several_processes_have_the_losses_of_one(
    device: torch.device, tensor_parallel: str, tmp_path: Path
) -> None:
    """Losses of four processes, and of two that load their checkpoint, are those of one."""
    count = processes_on(device, 4)
    folder, way = str(tmp_path / "checkpoint"), ("--tensor-parallel", tensor_parallel)
    alone = losses(device, 1, tmp_path, "--steps", "5")
    first = losses(device, count, tmp_path, *way, "--steps", "3", "--save", folder)
    then = losses(device, count // 2, tmp_path, *way, "--steps", "5", "--load", folder)
    assert (list(first), list(then)) == ([0, 1, 2], [3, 4])
    assert first | then == pytest.approx(alone, rel=1e-9)


def test_every_example_is_tested() -> None:
    here = {"train", "transformer", "resnet", "jit_to_package", "parallel"}
    tested = here | {"grpo", "post_training"}  # tested in test_post_training.py
    assert {path.stem for path in FOLDER.glob("*.py")} == tested
