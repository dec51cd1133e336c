"""The calls that a judge makes of one candidate, and what it finds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from torchkiln.bench.clock import synchronize
from torchkiln.judge import tricks
from torchkiln.judge.exchange import Call, Candidate, ForgedError, Reply, secret
from torchkiln.judge.probe import JUDGE
from torchkiln.judge.problem import Problem, compact, crops, families
from torchkiln.judge.review import perturbed
from torchkiln.judge.verdict import Verdict
from torchkiln.judge.zygote import CandidateError
from torchkiln.testing.compare import Where, require_gradients, require_values
from torchkiln.testing.data import layouts
from torchkiln.testing.sample import Sample

SHAPE, VALUES = "only the given shape", "only the given values"
STRIDES, DTYPE = "strides ignored", "only the given dtype"
WEIGHTS, GRADIENT = "weights ignored", "wrong gradient"
CHANGED, OVERWRITTEN = "input changed", "overwritten result"
BETWEEN, LAZY, STREAM = "work between calls", "lazy tensor", "work on another stream"
TIMED, FAILS = "wrong while timed", "does not run"

DTYPES = (torch.float64, torch.float16, torch.bfloat16)
REPEATS = 3
LATER = 0.05
"""Seconds after which a wrong result is read again."""
IDLE, BUSY = 0.4, 0.03
"""Seconds between two calls, and of CPU time in them that a candidate does not explain."""
SLOW = 0.1
"""Seconds of a call of the reference in float64 from which most checks use smaller sizes."""
PAUSES = (0.0, 2.0, 6.0)
"""Seconds before the candidate is observed again: processes of a compiler may be starting."""


@dataclass
class Checks:
    """All calls of one candidate."""

    problem: Problem
    candidate: Candidate
    verdict: Verdict
    file: Path
    at_once: int = 1
    """Timed calls between two readings of the clock."""
    is_slow: bool = False
    """Whether the truth takes longer than SLOW."""
    takes_state: bool = False
    """Whether the candidate has the reference's weights under the same names."""
    weights_seed: int = 0
    history: list[tuple[Tensor, ...]] = field(default_factory=list)
    worst: tuple[float, float, str] = (0.0, 0.0, "")

    def load(self, dtype: torch.dtype = torch.float32) -> None:
        """Make an instance, with the weights of a new seed."""
        problem = self.problem
        self.weights_seed = secret()
        state = self.candidate.load(
            self.file, problem.entry, problem.init, self.weights_seed, dtype
        )
        if reason := self.candidate.use_gpu_memory():
            self.verdict.answers["memory"] = f"of the host; the GPU's cannot be shared: {reason}"
        sample = problem.given(0, 0)
        start = time.perf_counter()
        problem.truth(sample)
        synchronize(problem.device)
        self.is_slow = time.perf_counter() - start > SLOW
        wanted = problem.state(sample)
        self.takes_state = bool(wanted) and all(
            state.get(n) == tuple(t.shape) for n, t in wanted.items()
        )

    def given(self) -> Sample:
        """A new call with weights that the candidate has, or can take."""
        sample = self.problem.given(secret(), self.weights_seed)
        return perturbed(self.problem, sample, secret()) if self.takes_state else sample

    def varied(self) -> Sample:
        """A new call for checks other than of the given shape: smaller if the problem is slow."""
        sample = self.given()
        return compact(self.problem, sample) if self.is_slow else sample

    def send(
        self,
        sample: Sample,
        *,
        same_place: bool = False,
        hold: bool = False,
        late: bool = False,
    ) -> Reply:
        """Make one call, and note what does not depend on its values."""
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
        """How outputs differ from the truth; empty if they are right."""
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

    def run(self) -> None:
        """Make all calls; the first failing stage ends most others."""
        say = self.verdict.answers
        try:
            self.load()
            right = self.usual()
        except CandidateError as error:
            self.fail(error, "right")
            return
        say["right"] = self.accuracy() if right else f"no: {self.verdict.findings[0].evidence}"
        if not right:
            return
        for name, check in (
            ("deterministic", self.state_kept),
            ("shapes", self.shapes),
            ("values", self.values),
            ("strides", self.strides),
            ("gradients", self.gradients),
            ("dtypes", self.dtypes),
        ):
            if not self.candidate.is_open:
                return
            try:
                say[name] = check()
            except CandidateError as error:
                self.fail(error, name)

    def fail(self, error: CandidateError, question: str) -> None:
        """Refuse a candidate that raises an error where it may not."""
        is_forged = isinstance(error, ForgedError)
        self.verdict.add(JUDGE if is_forged else FAILS, f"{question}: {error}")
        self.verdict.answers[question] = f"no: {error}"

    def usual(self) -> bool:
        """Calls of the given shape: new values at new addresses, then at the same address."""
        for i in range(REPEATS):
            sample = self.given()
            reply = self.attempt("", sample, same_place=i == 1)
            if reply is None:
                if i == 0:
                    self.blame_weights()
                return False
            self.measure(reply, sample)
        if self.problem.weights and not self.takes_state:
            self.load()
            return self.attempt(WEIGHTS, self.given()) is not None
        return True

    def blame_weights(self) -> None:
        """Name wrong results that are right for the weights of the constructor."""
        if not self.takes_state:
            return
        self.load()
        sample = self.problem.given(secret(), self.weights_seed)
        reply = self.send(sample)
        if not self.difference(reply.outputs[0], sample, torch.float32):
            words = "right only for the weights of the constructor, wrong for later ones"
            self.verdict.findings.clear()
            self.verdict.add(WEIGHTS, words)

    def measure(self, reply: Reply, sample: Sample) -> None:
        """Note the worst error beside torch's own."""
        truth = self.problem.truth(sample)
        with torch.no_grad():
            own = sample.call(self.problem.spec.composite)
        own = (own,) if isinstance(own, Tensor) else own
        for y, z, t in zip(reply.outputs[0], truth, own, strict=True):
            errors = [
                float(torch.nan_to_num((v.double() - z).abs()).max()) if v.numel() else 0.0
                for v in (y, t)
            ]
            shape = "x".join(map(str, y.shape))
            self.worst = max(self.worst, (errors[0], errors[1], shape))

    def accuracy(self) -> str:
        """The line about errors."""
        mine, torchs, shape = self.worst
        return f"yes, worst error {mine:.2g}, torch's own {torchs:.2g}, against float64, at {shape}"

    def state_kept(self) -> str:
        """State that outlives a call: overwritten results, work between calls, determinism."""
        first, second = self.given(), self.given()
        held = self.attempt("", first)
        if held is None:
            return "no"
        repeated = self.send(first).outputs[0]
        self.send(second)
        if not _all_equal(self.candidate.again(0.0), held.outputs[0]):
            self.verdict.add(OVERWRITTEN, "a later call wrote to the outputs of an earlier one")
        same = _all_equal(repeated, held.outputs[0])
        for pause in PAUSES:
            time.sleep(pause)
            before = self.candidate.cpu_seconds()
            time.sleep(IDLE)
            if (used := self.candidate.cpu_seconds() - before) < BUSY:
                break
        else:
            words = f"{used * 1e3:.0f} ms of CPU time in {IDLE * 1e3:.0f} ms without a call"
            self.verdict.add(BETWEEN, words)
        return "yes, bitwise equal" if same else "no, two calls with the same inputs differ"

    def each(
        self,
        stage: str,
        samples: Iterator[Sample],
        *,
        may_refuse: bool,
        dtype: Callable[[Sample], torch.dtype] = lambda _: torch.float32,
    ) -> str:
        """Attempt all samples; a summary."""
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
                refused.append(f"{sample.name}: {first_line(str(error))}")
            done += 1
        if refused:
            return f"{done - len(refused)} of {done}; refuses {refused[0]}"
        return f"yes, {done}" if done else "the problem has no other"

    def shapes(self) -> str:
        """Smaller sizes, or the other samples of a spec."""
        problem = self.problem
        samples = iter(problem.others) if problem.others else crops(problem, self.varied())
        return self.each(SHAPE, samples, may_refuse=True)

    def values(self) -> str:
        """Other values."""
        samples = (s for _, s in families(self.problem, self.varied(), secret()))
        return self.each(VALUES, samples, may_refuse=False)

    def strides(self) -> str:
        """The same values at other strides and offsets."""

        def samples() -> Iterator[Sample]:
            sample = self.varied()
            inputs = self.problem.inputs(sample)
            kinds = [layouts(inputs.args[i]) for i in inputs.positions]
            for placed in zip(*kinds, strict=False):
                found = replace(sample, name=placed[0].name)
                for i, one in zip(inputs.positions, placed, strict=True):
                    found = found.substitute(i, one.tensor)
                yield found

        return self.each(STRIDES, samples(), may_refuse=True)

    def dtypes(self) -> str:
        """Other floating dtypes, if the reference takes them."""

        def samples() -> Iterator[Sample]:
            for dtype in DTYPES:
                sample = self.varied()
                found = sample.map(partial(to_dtype, dtype))
                try:
                    self.problem.expected(found)
                except Exception:
                    continue
                self.load(dtype)
                if not self.takes_state:
                    found = self.varied().map(partial(to_dtype, dtype))
                yield replace(found, name=str(dtype).removeprefix("torch."))

        text = self.each(DTYPE, samples(), may_refuse=True, dtype=lambda s: getattr(torch, s.name))
        if self.candidate.is_open:
            self.load()
        return text

    def gradients(self) -> str:
        """Gradients of inputs, and of weights that the candidate has by name."""
        problem, spec = self.problem, self.problem.spec
        sample = self.varied()
        count = len(problem.inputs(sample).args)
        inputs = tuple(i for i in spec.wanted(sample) if i < count)
        names = problem.parameters if self.takes_state else ()
        positions = inputs + tuple(count + problem.weights.index(n) for n in names)
        if not positions:
            return "the problem has none"
        expected = problem.expected(sample)
        grads = tuple(
            torch.randn(shape, device=problem.device).to(dtype) for shape, dtype in expected
        )
        shapes = [(tuple(sample.args[i].shape), sample.args[i].dtype) for i in positions]
        call = Call(problem.inputs(sample), shapes, inputs, names, grads)
        state = problem.state(sample) if self.takes_state else {}
        try:
            found = self.candidate.call([call], state).outputs[0]
        except CandidateError as error:
            return f"none: {first_line(str(error))}"
        if not found:
            return "none: forward only"
        try:
            if problem.make is None:
                where = Where(spec, "judge", sample)
                require_gradients(found, sample, positions, grads, where)
            else:
                derived = problem.gradient(sample, positions)
                whole = replace(sample, name="gradients", args=(*sample.args, *grads))
                where = Where(derived.for_dtype(torch.float32), "judge", whole)
                require_values(tuple(found), whole, where)
        except AssertionError as error:
            self.verdict.add(GRADIENT, str(error))
            return f"no: {error}"
        return f"yes, of {len(positions)} tensors"

    def on_streams(self) -> None:
        """Calls whose inputs arrive late on the stream of a GPU, and the capture of a call."""
        for _ in range(REPEATS):
            if self.attempt(STREAM, self.given(), late=True) is None:
                return
        first, second = self.given(), self.given()
        second = replace(
            second,
            args=(
                *self.problem.inputs(second).args,
                *first.args[len(self.problem.inputs(first).args) :],
            ),
        )
        state = self.problem.state(first) if self.takes_state else {}
        calls = [Call(self.problem.inputs(s), self.problem.expected(s)) for s in (first, second)]
        try:
            found = self.candidate.call(calls, state, do="capture").outputs[0]
        except CandidateError as error:
            self.verdict.answers["graph capture"] = f"no: {first_line(str(error))}"
            return
        wrong = self.difference(found, second, torch.float32)
        words = f"no: a replay is wrong: {wrong}" if wrong else "yes"
        self.verdict.answers["graph capture"] = words


def _all_equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(map(tricks.equal, one, other))


def to_dtype(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """The tensor in a floating dtype; integer and boolean tensors are returned unchanged."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def first_line(text: str) -> str:
    """The first line of an error."""
    return next(iter(text.splitlines()), "")
