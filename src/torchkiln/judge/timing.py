"""Times of a candidate, and of eager and compiled torch, on the clock of the judge."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from torchkiln.bench.clock import Times, in_turns
from torchkiln.judge import nothing
from torchkiln.judge.checks import TIMED, Checks
from torchkiln.judge.exchange import Call, Candidate, Reply, secret
from torchkiln.judge.least_time import LeastTime
from torchkiln.judge.zygote import CandidateError, Zygote
from torchkiln.testing.sample import Sample

WARM_CALLS = 10
MOST_KEPT = 1 << 28
"""Bytes of outputs that are kept for the comparison after a race."""


@dataclass(frozen=True)
class Runner:
    """A process in a race, with the check of its outputs."""

    candidate: Candidate
    takes_state: bool
    is_judged: bool


class Race:
    """Timed calls of several processes in turns, each call with inputs that are new."""

    def __init__(self, checks: Checks) -> None:
        self.checks = checks
        self.kept: list[tuple[list[Sample], Reply]] = []
        sample = checks.given()
        self.weights = sample.args[len(checks.problem.inputs(sample).args) :]
        self.expected = checks.problem.expected(sample)

    def sample(self) -> Sample:
        """A call with new inputs."""
        problem = self.checks.problem
        call = problem.inputs(problem.given(secret(), 0))
        return replace(call, name="timed", args=(*call.args, *self.weights))

    def calls(self, samples: Sequence[Sample]) -> list[Call]:
        """The messages for a process: inputs, and shapes and dtypes of the outputs."""
        return [Call(self.checks.problem.inputs(s), self.expected) for s in samples]

    def prepare(self, runner: Runner) -> None:
        """Send the weights, which all calls share, and warm up.

        A forked process copies the pages that it writes to, which takes longer than a small call.
        """
        sample = self.sample()
        state = self.checks.problem.state(sample) if runner.takes_state else {}
        for _ in range(WARM_CALLS):
            runner.candidate.call(self.calls([sample]), state)

    def seconds(self, runner: Runner) -> float:
        """Seconds of a call, on the clock of :meth:`Candidate.call`."""
        checks = self.checks
        samples = [self.sample() for _ in range(checks.at_once)]
        reply = runner.candidate.call(self.calls(samples))
        if runner.is_judged:
            self.keep(samples, reply)
        return reply.seconds / checks.at_once

    def keep(self, samples: list[Sample], reply: Reply) -> None:
        """Keep the outputs of a turn.

        If memory is short, they replace the outputs of a random turn, or are dropped. Outputs are
        compared after the race: the next process in turn would wait for a judge that has used up
        its share of a busy CPU.
        """
        size = sum(y.nbytes for outputs in reply.outputs for y in outputs)
        if len(self.kept) < max(2, MOST_KEPT // max(size, 1)):
            self.kept.append((samples, reply))
        elif (at := secrets.randbelow(2 * len(self.kept))) < len(self.kept):
            self.kept[at] = samples, reply

    def compare(self) -> None:
        """Compare the outputs that were kept."""
        for samples, reply in self.kept:
            for sample, found in zip(samples, reply.outputs, strict=True):
                if text := self.checks.difference(found, sample, torch.float32):
                    self.checks.verdict.add(TIMED, text)
                    return


def own_clock(call: Callable[[], object]) -> float:
    """The seconds that a timed call returns."""
    seconds = call()
    assert isinstance(seconds, float)
    return seconds


def race(
    checks: Checks, zygote: Zygote, *, budget: float, rounds: int, peers: Mapping[str, Candidate]
) -> None:
    """Time the candidate in turns with the baselines, and check each of its outputs."""
    verdict = checks.verdict
    runs = Race(checks)
    with spawn(checks, zygote) as idle:
        shapes, dtypes = zip(*runs.expected, strict=True)
        idle.load(Path(nothing.__file__), "Nothing", [shapes, dtypes], 0, torch.float32)
        idle.use_gpu_memory()
        runners = {
            "candidate": Runner(checks.candidate, checks.takes_state, is_judged=True),
            **{n: Runner(one, takes_state=True, is_judged=False) for n, one in peers.items()},
            "exchange": Runner(idle, takes_state=False, is_judged=False),
        }
        try:
            for one in runners.values():
                runs.prepare(one)
            calls = {name: partial(runs.seconds, one) for name, one in runners.items()}
            measured = in_turns(own_clock, calls, budget, rounds)
        except CandidateError as error:
            checks.fail(error, "time")
            return
    runs.compare()
    times = {name: Times.of(values) for name, values in measured.items()}
    exchange = times.pop("exchange")
    resolution = max(exchange.high - exchange.low, 0.05 * exchange.seconds)
    for name, each in times.items():
        verdict.seconds[name] = max(each.seconds - exchange.seconds, resolution)
    if verdict.seconds["candidate"] <= resolution:
        words = f"{resolution * 1e6:.0f} us: too coarse for this candidate; give larger inputs"
        verdict.answers["clock"] = words
    least = LeastTime.of(checks.problem, checks.given())
    verdict.seconds["ceiling"] = least.ceiling
    if verdict.seconds["candidate"] > resolution:
        for trick, evidence in least.findings(verdict.seconds["candidate"]):
            verdict.add(trick, evidence)


def spawn(checks: Checks, zygote: Zygote) -> Candidate:
    """Another process with as much memory as the candidate's."""
    mine = checks.candidate
    return Candidate(zygote, mine.device, mine.in_bytes, mine.out_bytes, mine.timeout)


def baseline(
    checks: Checks, zygote: Zygote, stack: ExitStack, *, compiled: bool
) -> Candidate | None:
    """A process of the reference; None if it does not run."""
    problem = checks.problem
    made = stack.enter_context(spawn(checks, zygote))
    name = problem.name if problem.file is None else "Model"
    sample = checks.problem.given(secret(), 0)
    try:
        made.load(
            problem.file,
            name,
            problem.init,
            0,
            torch.float32,
            compiled=compiled,
            specs=problem.specs,
        )
        made.use_gpu_memory()
        call = Call(problem.inputs(sample), problem.expected(sample))
        made.call([call], problem.state(sample))
    except CandidateError as error:
        checks.verdict.answers["compiled" if compiled else "eager"] = f"not timed: {error}"
        return None
    return made


def baselines(
    checks: Checks, zygote: Zygote, stack: ExitStack, *, compiled: bool
) -> dict[str, Candidate]:
    """Processes of the reference by name, made while the candidate is stopped."""
    names = ("eager", "compiled") if compiled else ("eager",)
    found = {n: baseline(checks, zygote, stack, compiled=n == "compiled") for n in names}
    return {name: one for name, one in found.items() if one is not None}
