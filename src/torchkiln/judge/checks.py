"""The checks that a judge runs on one candidate."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from torchkiln.bench.clock import synchronize
from torchkiln.judge import tricks
from torchkiln.judge.attempts import Attempts
from torchkiln.judge.exchange import Call, Reply, secret
from torchkiln.judge.problem import compact, crops, families
from torchkiln.judge.zygote import CandidateError, first_line
from torchkiln.testing.compare import Where, require_gradients, require_values
from torchkiln.testing.data import layouts
from torchkiln.testing.sample import Sample

SHAPE, VALUES = "only the given shape", "only the given values"
STRIDES, DTYPE = "strides ignored", "only the given dtype"
WEIGHTS, GRADIENT = "weights ignored", "wrong gradient"
OVERWRITTEN, BETWEEN = "overwritten result", "work between calls"
STREAM, TIMED = "work on another stream", "wrong while timed"

DTYPES = (torch.float64, torch.float16, torch.bfloat16)
REPEATS = 3
SLOW = 0.1
"""Seconds of a call of the reference in float64 from which most checks use smaller sizes."""
IDLE, BUSY = 0.4, 0.03
"""Seconds of a pause without a call, and CPU seconds of the candidate in it that are a finding."""
PAUSES = (0.0, 2.0, 6.0)
"""Seconds before the candidate is observed again: processes of a compiler may be starting."""


@dataclass
class Checks(Attempts):
    """All questions about one candidate, and the calls that answer them."""

    worst: tuple[float, float, str] = (0.0, 0.0, "")
    truth_seconds: float = math.inf
    """Shortest time of a call of the reference in float64."""

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
            if self.attempt(WEIGHTS, self.given()) is None:
                return False
        self.choose_sizes()
        return True

    def choose_sizes(self) -> None:
        """Use smaller sizes in most checks of a slow problem, if the candidate takes them."""
        if self.truth_seconds <= SLOW:
            return
        try:
            self.send(compact(self.problem, self.given()))
            self.is_small = True
        except CandidateError:
            if not self.candidate.is_open:
                raise

    def blame_weights(self) -> None:
        """If results are right for the weights of the constructor, make that the only finding."""
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
        """Record the worst error with torch's own, and the time of the truth."""
        start = time.perf_counter()
        truth = self.problem.truth(sample)
        synchronize(self.problem.device)
        self.truth_seconds = min(self.truth_seconds, time.perf_counter() - start)
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
        """The line of the verdict about errors."""
        mine, torchs, shape = self.worst
        return f"yes, worst error {mine:.2g}, torch's own {torchs:.2g}, against float64, at {shape}"

    def state_kept(self) -> str:
        """Check state that outlives a call: overwritten results, later work, determinism."""
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

    def shapes(self) -> str:
        """Check smaller sizes, or the other samples of a spec."""
        problem = self.problem
        samples = iter(problem.others) if problem.others else crops(problem, self.varied())
        return self.each(SHAPE, samples, may_refuse=True)

    def values(self) -> str:
        """Check other values."""
        samples = (s for _, s in families(self.problem, self.varied(), secret()))
        return self.each(VALUES, samples, may_refuse=False)

    def strides(self) -> str:
        """Check the same values at other strides and offsets."""

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
        """Check other floating dtypes, if the reference takes them."""

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
        """Check gradients of inputs, and of weights that the candidate has by name."""
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
            if not self.candidate.is_open:
                raise
            return f"none: {first_line(error)}"
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
        """Check calls whose inputs arrive late on the stream of a GPU, and a captured call."""
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
            self.verdict.answers["graph capture"] = f"no: {first_line(error)}"
            return
        wrong = self.difference(found, second, torch.float32)
        words = f"no: a replay is wrong: {wrong}" if wrong else "yes"
        self.verdict.answers["graph capture"] = words


def _all_equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(map(tricks.equal, one, other))


def to_dtype(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """The tensor in a floating dtype; integer and boolean tensors are returned unchanged."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
