"""torchkiln judge: exit statuses, JSON, a folder of candidates, a spec instead of a reference."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from torchkiln.cli import main
from torchkiln.judge import Verdict, fast_p, judge, judging
from torchkiln.judge.watched import Watched
from torchkiln.judge.zygote import Zygote

FOLDER = Path(__file__).parent
CPU = ("--device", "cpu", "--no-compile")
SOFTMAX = """
import torch

def softmax(x, dim=-1, *, scale=1.0, mask=None, causal=False):
    if mask is not None or causal:
        raise ValueError("mask: expected none")
    return torch.softmax({}, dim)
"""
SPECS = """
import torch
from torchkiln.testing import OpSpec, alike

@torch.library.custom_op("judged_specs::tripled", mutates_args=())
def tripled(x: torch.Tensor) -> torch.Tensor:
    return x * 3

SPECS = (
    OpSpec(
        op=tripled, reference=lambda x: x * 3, magnitude=lambda x: (x * 3).abs(), inputs=alike("x"),
        excluded={"bad_input": "it has no checks"},
    ),
)
"""


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    """The process that forks candidates' processes; it imports torch once for all tests."""
    with Zygote() as made:
        yield made


@pytest.fixture
def one_zygote(zygote: Zygote, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command uses the shared zygote instead of starting one."""
    monkeypatch.setattr(judging, "Zygote", lambda: nullcontext(zygote))


def test_a_folder_with_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "reference").mkdir()
    for name, source in (("gate", "problems/gate.py"), ("weak", "weak/constant.py")):
        (tmp_path / "reference" / f"{name}.py").write_text((FOLDER / source).read_text())
    for name in ("cheats/zeros.py", "honest/same_calls.py"):
        (tmp_path / f"gate__{Path(name).stem}.py").write_text((FOLDER / name).read_text())
    (tmp_path / "weak.py").write_text("")
    found = tmp_path / "verdicts.json"
    assert main(["judge", "--folder", str(tmp_path), *CPU, f"--json={found}"]) == 2
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "ACCEPTED" in rows["gate__same_calls.py"]
    assert rows["gate__zeros.py"].endswith("REFUSED               constant result")
    assert "NOT JUDGED" in rows["weak.py"]
    content = json.loads(found.read_text())
    assert content["schema"] == "torchkiln.judge/1"
    assert [one["accepted"] for one in content["verdicts"]] == [True, False, False]
    assert set(content["scores"]) == {"fast_0", "fast_1", "fast_1.5", "fast_2"}


@pytest.mark.usefixtures("one_zygote")
def test_json_alone_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(FOLDER / "cheats" / "zeros.py"), str(FOLDER / "problems" / "gate.py")]
    assert main(["judge", *words, *CPU, "--json=-"]) == 1
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["findings"][0]["trick"] == "constant result"
    assert verdict["answers"]["right"].startswith("no: ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "got both or none of CANDIDATE and --folder, expected one"),
        (["no_file.py", "other.py"], "no_file.py, expected a file"),
        ([__file__], "got both or none of REFERENCE and --op, expected one"),
        (
            [__file__, "--op", "sofmax"],
            "got 'sofmax' (did you mean softmax or log_softmax?), expected one of ",
        ),
        ([__file__, __file__], "got no Model, expected a file as of KernelBench"),
    ],
)
def test_wrong_calls(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["judge", *words, *CPU]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("one_zygote")
@pytest.mark.parametrize(("argument", "status"), [("x * scale", 0), ("x", 1)])
def test_a_function_beside_a_spec_of_ours(
    argument: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "softmax_candidate.py"
    file.write_text(SOFTMAX.format(argument))
    assert main(["judge", str(file), "--op", "softmax", *CPU]) == status
    out = capsys.readouterr().out
    assert "refuses mask, whole: ValueError: mask: expected none" in out or status == 1
    assert ("only the given shape" in out) == (status == 1)


def test_a_spec_of_another_package(tmp_path: Path, zygote: Zygote) -> None:
    specs, candidate = tmp_path / "specs_of_tripled.py", tmp_path / "triples.py"
    specs.write_text(SPECS)
    candidate.write_text("def tripled(x):\n    return x + x + x\n")
    verdict = judge(candidate, op="tripled", specs=str(specs), zygote=zygote, rounds=5, budget=0.0)
    assert verdict.accepted, str(verdict)
    assert "gradients" in verdict.answers
    assert {"candidate", "eager"} <= verdict.seconds.keys()


def test_a_candidate_that_hangs_or_crashes_is_refused(tmp_path: Path, zygote: Zygote) -> None:
    file = tmp_path / "crash.py"
    file.write_text("import os\nprint('about to end', flush=True)\nos._exit(3)\n")
    verdict = judge(file, FOLDER / "problems" / "gate.py", zygote=zygote, rounds=0)
    assert verdict.tricks == ("does not run",)
    assert "about to end" in verdict.findings[0].evidence


def test_a_candidate_that_ends_when_gradients_are_asked_for_is_refused(
    tmp_path: Path, zygote: Zygote
) -> None:
    file = tmp_path / "ends.py"
    source = (FOLDER / "honest" / "same_calls.py").read_text()
    exits = "        if torch.is_grad_enabled():\n            __import__('os')._exit(3)\n"
    file.write_text(source.replace("        return", f"{exits}        return"))
    verdict = judge(file, FOLDER / "problems" / "gate.py", zygote=zygote, rounds=0)
    assert verdict.tricks == ("does not run",), str(verdict)
    assert verdict.findings[0].evidence.startswith("gradients: the process ended")


def test_a_candidate_of_one_shape_may_refuse_the_small_calls_of_a_slow_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zygote: Zygote
) -> None:
    monkeypatch.setattr("torchkiln.judge.checks.SLOW", 0.0)
    file = tmp_path / "one_shape.py"
    source = (FOLDER / "honest" / "refuses_dtypes.py").read_text()
    file.write_text(source.replace("x.dtype != torch.float32", "x.shape != (44, 72)"))
    verdict = judge(file, FOLDER / "problems" / "rows.py", zygote=zygote, rounds=0)
    assert verdict.accepted, str(verdict)
    assert verdict.answers["shapes"].startswith("0 of 6; refuses")
    assert verdict.answers["values"].startswith("yes")
    assert verdict.answers["dtypes"] == "yes, 3"


def test_a_file_that_cannot_be_watched_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"inotify: got No such file .*, expected to watch .*gone"):
        Watched([tmp_path / "gone.py"], [])


def test_fast_p_counts_accepted_candidates_alone() -> None:
    def verdict(candidate: float, *, refused: bool = False, void: bool = False) -> Verdict:
        made = Verdict("c.py", "r", "cpu", seconds={"candidate": candidate, "eager": 3.0})
        if refused:
            made.add("cached result", "...")
        made.void = ["it is constant"] if void else []
        return made

    found = [verdict(1.0), verdict(2.0), verdict(1.0, refused=True), verdict(1.0, void=True)]
    assert fast_p(found, 1.0) == pytest.approx(2 / 3)
    assert fast_p(found, 2.0) == pytest.approx(1 / 3)
    assert fast_p(found, 3.0) == 0
    assert fast_p([], 1.0) == 0


def test_the_process_of_a_candidate_has_no_memory_of_the_judge(tmp_path: Path) -> None:
    marker = "a value that only the judge's process has"
    file = tmp_path / "looks.py"
    file.write_text(
        "import gc\n"
        "found = [d for d in gc.get_objects() if type(d) is dict and 'marker_of_judge' in d]\n"
        "raise RuntimeError(f'{len(found)} found')\n"
    )
    kept = {"marker_of_judge": marker}
    with Zygote() as zygote:
        verdict = judge(file, FOLDER / "problems" / "gate.py", zygote=zygote, rounds=0)
    assert "RuntimeError: 0 found" in verdict.findings[0].evidence
    assert kept["marker_of_judge"] == marker
