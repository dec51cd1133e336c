"""Judges one candidate, or a folder of them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import torch

from torchkiln.judge import review
from torchkiln.judge.checks import Checks
from torchkiln.judge.exchange import Candidate, secret, total_bytes
from torchkiln.judge.problem import Problem, kernel_problem, op_problem
from torchkiln.judge.timing import baselines, race
from torchkiln.judge.verdict import Verdict
from torchkiln.judge.watched import Watched
from torchkiln.judge.zygote import CandidateError, Zygote

READS, WRITES = "reads the reference", "writes to the judge's files"
PR_SET_DUMPABLE = 4

GPU_CALLS = 8
"""Maximum number of calls between two readings of the clock: sending inputs to a process and
reading its outputs takes as long as many kernels."""
MOST_BYTES = 1 << 32
"""Maximum number of bytes of GPU memory for these calls."""

PACKAGE = Path(__file__).parents[1]


def hide_memory() -> None:
    """Keep other processes of this user from reading the memory of this one."""
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def judge(
    candidate: str | Path,
    reference: str | Path | None = None,
    *,
    op: str | None = None,
    specs: str | None = None,
    device: str | torch.device = "cpu",
    compiled: bool = False,
    budget: float = 3.0,
    rounds: int = 30,
    zygote: Zygote | None = None,
) -> Verdict:
    """Judge whether a kernel is right, fast and honest.

    Args:
        candidate: A Python file with a class ``ModelNew``, or with a function of the op's name.
        reference: A file of KernelBench's format; None with ``op``.
        op: An op of this package, whose spec is the problem.
        specs: A module, or its file, with ``SPECS``, from which ``op`` is taken.
        device: Where the candidate runs.
        compiled: Whether the reference under ``torch.compile`` is timed, too.
        budget: Seconds for timed calls.
        rounds: Most timed calls of each process; 0 for none.
        zygote: Starts the processes; by default a new one, which no other candidate has seen.

    Returns:
        The verdict. It names a problem that cannot be judged in :attr:`Verdict.void`.

    Raises:
        ValueError: The files do not exist or cannot be watched, or the reference does not run.
    """
    file, place = Path(candidate).resolve(), torch.device(device)
    if (reference is None) == (op is None):
        raise ValueError("torchkiln.judge: got both or none of REFERENCE and --op, expected one")
    for path in (file, reference):
        if path is not None and not Path(path).is_file():
            raise ValueError(f"torchkiln.judge: got {path}, expected a file")
    if op is not None:
        problem = op_problem(op, specs, place, torch.float32)
    else:
        assert reference is not None
        problem = kernel_problem(Path(reference).resolve(), place)
    verdict = Verdict(file.name, problem.name, str(place))
    if op is None:
        verdict.void = review.weaknesses(problem)
    if verdict.void:
        return verdict
    with ExitStack() as stack:
        chosen = zygote or stack.enter_context(Zygote())
        _judge(
            problem, file, verdict, chosen, stack, compiled=compiled, budget=budget, rounds=rounds
        )
    return verdict


def _judge(
    problem: Problem,
    file: Path,
    verdict: Verdict,
    zygote: Zygote,
    stack: ExitStack,
    *,
    compiled: bool,
    budget: float,
    rounds: int,
) -> None:
    samples = (problem.given(secret(), 0), *problem.others)
    size = max(total_bytes((s.args, *s.kwargs.values())) for s in samples)
    written = max(sum(y.numel() * 8 for y in problem.truth(s)) for s in samples)
    at_once = 1
    if problem.device.type == "cuda":
        at_once = max(1, min(GPU_CALLS, MOST_BYTES // (size + written)))
    # Other dtypes and strides need up to four times the bytes of the given call.
    room, out = max(4, at_once) * size, at_once * written + 2 * size
    try:
        process = stack.enter_context(Candidate(zygote, problem.device, room, out))
    except CandidateError as error:
        verdict.add("does not run", str(error))
        return
    checks = Checks(problem, process, verdict, file, at_once)
    fixed = [file, *sorted(PACKAGE.glob("judge/*.py")), *sorted(PACKAGE.glob("testing/*.py"))]
    hidden = [] if problem.file is None else [problem.file]
    with Watched(hidden, fixed) as watched:
        checks.run()
        opened, changed = watched.seen()
        if verdict.accepted and process.is_open and rounds:
            with process.paused():  # baselines may read the reference: the candidate is stopped
                peers = baselines(checks, zygote, stack, compiled=compiled)
                changed += watched.seen()[1]
            race(checks, zygote, budget=budget, rounds=rounds, peers=peers)
        if process.is_open and problem.device.type == "cuda" and verdict.accepted:
            try:
                checks.on_streams()
            except CandidateError as error:
                verdict.add("does not run", f"on a stream: {error}")
        try:
            found = process.ask({"do": "compare"})["findings"] if process.is_open else []
            for trick, evidence in found:
                verdict.add(str(trick), str(evidence))
        except (CandidateError, TypeError, ValueError) as error:
            verdict.add("patched judge", str(error))
        more_opened, more_changed = watched.seen()
    for path in opened + more_opened:
        verdict.add(READS, f"{path.name} was opened while the candidate ran")
    for path in changed + more_changed:
        verdict.add(WRITES, f"{path.name} was changed while the candidate ran")


def judge_folder(
    folder: str | Path,
    judged: Callable[[Path, Path], Verdict],
) -> Iterator[Verdict]:
    """Judge each candidate ``NAME.py`` of a folder, whose reference is ``reference/NAME.py``.

    A candidate whose name has a double underscore, ``NAME__WORDS.py``, is one of several for one
    reference.
    """
    for path in sorted(Path(folder).glob("*.py")):
        yield judged(path, path.parent / "reference" / f"{path.stem.split('__')[0]}.py")
