"""The result of explain(): kernels, other steps and reasons of one call."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from torchkiln._report import Report

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class KernelLaunch:
    """A kernel of torchkiln that ran."""

    name: str
    variant: str = ""
    """Template arguments: the types and numbers that the kernel was compiled for."""
    access: str = ""
    """The way in which the kernel accesses memory, if its name shows it."""
    vector_bytes: int | None = None
    """Bytes per access to memory."""
    items: int | None = None
    """Vectors of a row that each thread keeps in registers."""
    blocks: tuple[int, ...] = ()
    threads: tuple[int, ...] = ()
    """Threads per block."""
    cluster: int = 1
    """Blocks per cluster."""
    shared_bytes: int = 0
    """Shared memory per block, static and dynamic."""
    registers: int = 0
    """Registers per thread."""
    local_bytes: int = 0
    """Local memory per thread: spilled registers."""
    occupancy: float | None = None
    """Resident threads per multiprocessor, as a share of the maximum."""
    waves: float | None = None
    """Blocks, divided by the blocks that are resident at once."""
    instruction_set: str | None = None
    """Set for kernels on a CPU."""
    parts: int = 1
    """Pieces of work on a CPU."""
    workers: int = 1
    """CPU threads that shared the pieces."""

    def __str__(self) -> str:
        """The kernel and its launch, in one line."""
        if self.instruction_set is not None:
            pieces = f"{self.parts} pieces" if self.parts > 1 else "1 piece"
            workers = f"{self.workers} threads" if self.workers > 1 else "1 thread"
            return f"kernel {self.name}, {self.instruction_set}, {pieces} on {workers}"
        words = [f"kernel {self.name}{self.variant}", self.access]
        if self.vector_bytes is not None:
            words.append(f"{self.vector_bytes} bytes per access")
        if self.items is not None:
            words.append(f"{self.items} vectors per thread")
        words.append(f"{_times(self.blocks)} blocks of {_times(self.threads)} threads")
        if self.cluster > 1:
            words.append(f"clusters of {self.cluster} blocks")
        if self.shared_bytes:
            words.append(f"{self.shared_bytes / 1024:.4g} KiB of shared memory per block")
        if self.registers:
            words.append(f"{self.registers} registers per thread")
        if self.local_bytes:
            words.append(f"{self.local_bytes} bytes of spilled registers per thread")
        if self.occupancy is not None:
            words.append(f"occupancy {self.occupancy:.0%}")
        if self.waves is not None:
            waves = f"{self.waves:.2g}"
            words.append(f"{waves} wave{'' if waves == '1' else 's'}")
        return ", ".join(word for word in words if word)


@dataclass(frozen=True)
class Step:
    """An op of torch that read or wrote memory, called by an op of torchkiln."""

    kind: str
    """``copy``, ``cast``, ``transfer`` (between devices), ``fill``, ``wait`` (for the device) or
    ``fallback`` (an op of torch that computes)."""
    op: str
    inside: str
    """The op of torchkiln that called this op, if any."""
    bytes: int
    words: str

    def __str__(self) -> str:
        """The step, in one line."""
        where = f" in {self.inside}" if self.inside else ""
        return f"{self.kind}: {self.op}{where}, {self.words}"


@dataclass(frozen=True)
class Part:
    """The forward or the backward of a call."""

    route: tuple[str, ...]
    """Ops of torchkiln that the dispatcher called, in order."""
    steps: tuple[KernelLaunch | Step, ...]
    notes: tuple[str, ...]
    """Reasons for the route, reported by the ops."""
    allocated: int
    """Bytes allocated, results included."""
    bytes: int
    """The minimum number of bytes to move."""
    operations: int | None
    """Arithmetic operations, if the op's spec counts them."""
    ceiling: float | None
    """Seconds of a copy of these bytes on this machine."""

    @property
    def kernels(self) -> tuple[KernelLaunch, ...]:
        """The kernels of torchkiln."""
        return tuple(step for step in self.steps if isinstance(step, KernelLaunch))

    @property
    def extra(self) -> tuple[Step, ...]:
        """The copies, casts and fallbacks among the steps."""
        return tuple(step for step in self.steps if isinstance(step, Step))


@dataclass(frozen=True, repr=False)
class Explanation(Report):
    """One call as it ran: its forward and, if gradients are needed, its backward."""

    schema: ClassVar[str] = "torchkiln.explain/1"

    op: str
    device: str
    inputs: tuple[str, ...]
    forward: Part
    backward: Part | None = None
    """Set if an argument requires a gradient."""
    spec: bool = field(default=True)
    """Whether bytes and operations come from the op's spec. If not, ``bytes`` counts all inputs and
    outputs."""

    def as_dict(self) -> dict[str, Any]:
        """The fields in JSON types."""
        return {"schema": self.schema, **asdict(self)}

    def __str__(self) -> str:
        """The explanation, in a few lines."""
        lines = [f"{self.op} of {', '.join(self.inputs)} on {self.device}"]
        for name, part in ((FORWARD, self.forward), (BACKWARD, self.backward)):
            if part is not None:
                lines += [f"{name}: {_least(part, self.spec)}", *_lines(part)]
        return "\n".join(lines)

    __repr__ = __str__

    def __rich__(self) -> Any:
        """A tree, printed by rich."""
        from rich.text import Text  # noqa: PLC0415
        from rich.tree import Tree  # noqa: PLC0415

        tree = Tree(Text(f"{self.op} of {', '.join(self.inputs)} on {self.device}", style="bold"))
        for name, part in ((FORWARD, self.forward), (BACKWARD, self.backward)):
            if part is None:
                continue
            branch = tree.add(Text(f"{name}: {_least(part, self.spec)}"))
            for step in part.steps:
                style = "green" if isinstance(step, KernelLaunch) else "yellow"
                branch.add(Text(str(step), style=style))
            for note in part.notes:
                branch.add(Text(f"because: {note}", style="italic"))
            branch.add(Text(_allocated(part)))
        return tree


def _times(sizes: tuple[int, ...]) -> str:
    return " x ".join(str(n) for n in sizes if n != 1) or "1"


def _least(part: Part, from_spec: bool) -> str:
    from torchkiln.bench.report import duration, size  # noqa: PLC0415

    words = f"{size(part.bytes)} " + ("at least" if from_spec else "in and out")
    if part.operations:
        words += f", {part.operations:.3g} operations"
    return words + (f", ceiling {duration(part.ceiling)}" if part.ceiling else "")


def _allocated(part: Part) -> str:
    from torchkiln.bench.report import size  # noqa: PLC0415

    return f"allocated: {size(part.allocated)}"


def _lines(part: Part) -> list[str]:
    words = [*map(str, part.steps), *(f"because: {note}" for note in part.notes)]
    return [f"  {line}" for line in [*words, _allocated(part)]]
