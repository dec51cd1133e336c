"""What was found of a call."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class Kernel:
    """A kernel of ours that ran."""

    name: str
    variant: str = ""
    """The types and numbers that it was compiled for."""
    access: str = ""
    """How it reaches memory, where its name says so."""
    vector_bytes: int | None = None
    """Of one access to memory."""
    items: int | None = None
    """Vectors of a row that a thread keeps in registers."""
    blocks: tuple[int, ...] = ()
    threads: tuple[int, ...] = ()
    """Of a block."""
    cluster: int = 1
    shared_bytes: int = 0
    """Of a block, static and dynamic."""
    registers: int = 0
    """Of a thread."""
    local_bytes: int = 0
    """Of a thread, in memory: spilled registers."""
    occupancy: float | None = None
    """Threads that fit into a multiprocessor, of those that it holds."""
    waves: float | None = None
    """Blocks, of those that all multiprocessors hold at a time."""
    instruction_set: str | None = None
    """Of a CPU."""
    parts: int = 1
    """Pieces that a CPU's threads took."""
    workers: int = 1
    """CPU threads that took them."""

    def __str__(self) -> str:
        """One line."""
        if self.instruction_set is not None:
            pieces = f"{self.parts} pieces" if self.parts > 1 else "1 piece"
            workers = f"{self.workers} threads" if self.workers > 1 else "1 thread"
            return f"kernel {self.name}, {self.instruction_set}, {pieces} on {workers}"
        words = [f"kernel {self.name}{self.variant}", self.access]
        if self.vector_bytes is not None:
            words.append(f"{self.vector_bytes} bytes an access")
        if self.items is not None:
            words.append(f"{self.items} vectors a thread")
        words.append(f"{_times(self.blocks)} blocks of {_times(self.threads)} threads")
        if self.cluster > 1:
            words.append(f"clusters of {self.cluster}")
        if self.shared_bytes:
            words.append(f"{self.shared_bytes} bytes shared")
        if self.registers:
            words.append(f"{self.registers} registers")
        if self.local_bytes:
            words.append(f"{self.local_bytes} bytes of local memory")
        if self.occupancy is not None:
            words.append(f"occupancy {self.occupancy:.0%}")
        if self.waves is not None:
            words.append(f"{self.waves:.2g} waves")
        return ", ".join(word for word in words if word)


@dataclass(frozen=True)
class Step:
    """Something else that was done with memory: by torch, on behalf of the op."""

    kind: str
    """``copy``, ``cast``, ``transfer`` (between devices), ``fill``, ``wait`` (for the device) or
    ``fallback``: an op of torch's that computes."""
    op: str
    inside: str
    """The op of ours that called it, if any."""
    bytes: int
    words: str

    def __str__(self) -> str:
        """One line."""
        where = f" in {self.inside}" if self.inside else ""
        return f"{self.kind}: {self.op}{where}, {self.words}"


@dataclass(frozen=True)
class Part:
    """The forward or the backward of a call."""

    route: tuple[str, ...]
    """Ops of ours that the dispatcher saw, in order."""
    steps: tuple[Kernel | Step, ...]
    notes: tuple[str, ...]
    """Reasons, in the ops' own words."""
    allocated: int
    """Bytes asked of the allocator, results included."""
    bytes: int
    """The least that has to be moved."""
    operations: int | None
    """Arithmetic, where the op's spec counts it."""
    floor: float | None
    """Seconds that moving as many bytes took, just now."""

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """Ours alone."""
        return tuple(step for step in self.steps if isinstance(step, Kernel))

    @property
    def extra(self) -> tuple[Step, ...]:
        """What is not ours: copies, casts, fallbacks."""
        return tuple(step for step in self.steps if isinstance(step, Step))


@dataclass(frozen=True, repr=False)
class Explanation:
    """A call, as it happened."""

    op: str
    device: str
    inputs: tuple[str, ...]
    forward: Part
    backward: Part | None = None
    """Where an argument requires a gradient."""
    spec: bool = field(default=True)
    """Whether bytes and operations come from the op's spec; else bytes are those of all tensors
    that go in and come out."""

    def as_dict(self) -> dict[str, Any]:
        """Everything, in types that JSON knows."""
        return asdict(self)

    def __str__(self) -> str:
        """Some lines."""
        lines = [f"{self.op} of {', '.join(self.inputs)} on {self.device}"]
        for name, part in ((FORWARD, self.forward), (BACKWARD, self.backward)):
            if part is not None:
                lines += [f"{name}: {_least(part, self.spec)}", *_lines(part)]
        return "\n".join(lines)

    __repr__ = __str__

    def __rich__(self) -> Any:
        """A tree, for rich's console."""
        from rich.text import Text  # noqa: PLC0415
        from rich.tree import Tree  # noqa: PLC0415

        tree = Tree(Text(f"{self.op} of {', '.join(self.inputs)} on {self.device}", style="bold"))
        for name, part in ((FORWARD, self.forward), (BACKWARD, self.backward)):
            if part is None:
                continue
            branch = tree.add(Text(f"{name}: {_least(part, self.spec)}"))
            for step in part.steps:
                style = "green" if isinstance(step, Kernel) else "yellow"
                branch.add(Text(str(step), style=style))
            for note in part.notes:
                branch.add(Text(f"because: {note}", style="italic"))
            branch.add(Text(_allocated(part)))
        return tree


def _times(sizes: tuple[int, ...]) -> str:
    return " x ".join(str(n) for n in sizes if n != 1) or "1"


def _least(part: Part, from_spec: bool) -> str:
    from torchkiln.bench.table import duration, size  # noqa: PLC0415

    words = f"{size(part.bytes)} " + ("at least" if from_spec else "in and out")
    if part.operations:
        words += f", {part.operations:.3g} operations"
    return words + (f", a copy of as many took {duration(part.floor)}" if part.floor else "")


def _allocated(part: Part) -> str:
    from torchkiln.bench.table import size  # noqa: PLC0415

    return f"allocated: {size(part.allocated)}"


def _lines(part: Part) -> list[str]:
    words = [*map(str, part.steps), *(f"because: {note}" for note in part.notes)]
    return [f"  {line}" for line in [*words, _allocated(part)]]
