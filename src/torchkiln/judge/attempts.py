"""Calls of one candidate, each compared with the truth."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from torchkiln.judge import tricks
from torchkiln.judge.exchange import Call, Candidate, ForgedError, Reply, secret
from torchkiln.judge.probe import JUDGE
from torchkiln.judge.problem import Problem, compact
from torchkiln.judge.review import perturbed
from torchkiln.judge.verdict import Verdict
from torchkiln.judge.zygote import CandidateError, first_line
from torchkiln.testing.compare import Where, require_values
from torchkiln.testing.sample import Sample

CHANGED, LAZY, FAILS = "input changed", "lazy tensor", "does not run"

LATER = 0.2
"""Seconds after which a wrong result is read again: a thread may wait for a busy core."""


@dataclass
class Attempts:
    """Calls of one candidate, and the findings of wrong results."""

    problem: Problem
    candidate: Candidate
    verdict: Verdict
    file: Path
    at_once: int = 1
    """Timed calls between two readings of the clock."""
    is_small: bool = False
    """Whether most checks use smaller sizes."""
    takes_state: bool = False
    """Whether the candidate has the reference's weights under the same names."""
    weights_seed: int = 0
    history: list[tuple[Tensor, ...]] = field(default_factory=list)

    def load(self, dtype: torch.dtype = torch.float32) -> None:
        """Make an instance, with the weights of a new seed."""
        problem = self.problem
        self.weights_seed = secret()
        state = self.candidate.load(
            self.file, problem.entry, problem.init, self.weights_seed, dtype
        )
        if reason := self.candidate.use_gpu_memory():
            self.verdict.answers["memory"] = f"of the host; the GPU's cannot be shared: {reason}"
        wanted = problem.state(problem.given(0, 0))
        self.takes_state = bool(wanted) and all(
            state.get(n) == tuple(t.shape) for n, t in wanted.items()
        )

    def given(self) -> Sample:
        """A new call; its weights are changed if the candidate takes weights by name."""
        sample = self.problem.given(secret(), self.weights_seed)
        return perturbed(self.problem, sample, secret()) if self.takes_state else sample

    def varied(self) -> Sample:
        """A new call for checks that do not need the given sizes; a small one if ``is_small``."""
        sample = self.given()
        return compact(self.problem, sample) if self.is_small else sample

    def send(
        self,
        sample: Sample,
        *,
        same_place: bool = False,
        hold: bool = False,
        late: bool = False,
    ) -> Reply:
        """Make one call. Check the types of the outputs, and that no input was written to."""
        problem = self.problem
        state = problem.state(sample) if self.takes_state else {}
        call = Call(problem.inputs(sample), problem.expected(sample), hold=hold, late=late)
        reply = self.candidate.call([call], state, same_place=same_place)
        if reply.kinds:
            self.verdict.add(LAZY, f"an output is a {reply.kinds[0]}, expected a plain tensor")
        if reply.changed:
            self.verdict.add(CHANGED, f"tensor {reply.changed[0]} of the call was written to")
        return reply

    def difference(self, found: Sequence[Tensor], sample: Sample, dtype: torch.dtype) -> str:
        """The difference of outputs from the truth, as text; empty if they are right."""
        where = Where(self.problem.for_dtype(dtype), "judge", sample)
        try:
            require_values(tuple(found), sample, where)
        except AssertionError as error:
            return str(error)
        return ""

    def attempt(
        self,
        stage: str,
        sample: Sample,
        *,
        dtype: torch.dtype = torch.float32,
        same_place: bool = False,
        late: bool = False,
    ) -> Reply | None:
        """Make one call; a wrong result is a finding, and None is returned."""
        reply = self.send(sample, hold=True, same_place=same_place, late=late)
        outputs = reply.outputs[0]
        problem = self.difference(outputs, sample, dtype)
        if not problem:
            self.history = [*self.history[-3:], tuple(outputs)]
            return reply
        if not self.history:  # a second result shows whether it depends on the inputs
            self.history.append(tuple(self.send(self.given()).outputs[0]))
        truth = self.problem.truth(sample)
        inputs = [t for t in self.problem.inputs(sample).args if isinstance(t, Tensor)]
        name = tricks.name_of(outputs, truth, inputs, self.history)
        if name != tricks.META and not self.difference(self.candidate.again(LATER), sample, dtype):
            name = tricks.LATE
        if stage and name in {tricks.WRONG, tricks.SKIPPED, tricks.META}:
            name = stage
        elif stage:
            self.verdict.add(stage, problem)
        self.verdict.add(name, problem)
        self.history.append(tuple(outputs))
        return None

    def fail(self, error: CandidateError, question: str) -> None:
        """Refuse a candidate that raises an error where it may not."""
        is_forged = isinstance(error, ForgedError)
        self.verdict.add(JUDGE if is_forged else FAILS, f"{question}: {error}")
        self.verdict.answers[question] = f"no: {error}"

    def each(
        self,
        stage: str,
        samples: Iterator[Sample],
        *,
        may_refuse: bool,
        dtype: Callable[[Sample], torch.dtype] = lambda _: torch.float32,
    ) -> str:
        """Attempt all samples; returns a summary."""
        done, refused = 0, []
        for sample in samples:
            try:
                if self.attempt(stage, sample, dtype=dtype(sample)) is None:
                    return f"no: {sample.name}"
            except CandidateError as error:
                if isinstance(error, ForgedError):
                    raise
                if not may_refuse or not self.candidate.is_open:
                    self.verdict.add(stage, f"{sample.name}: {error}")
                    return f"no: {sample.name}: {error}"
                refused.append(f"{sample.name}: {first_line(error)}")
            done += 1
        if refused:
            return f"{done - len(refused)} of {done}; refuses {refused[0]}"
        return f"yes, {done}" if done else "the problem has no other"
