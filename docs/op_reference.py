"""The generated parts of docs/ops.md: signatures, formulas, modules, the contract table.

Signatures and formulas come from the functions and their docstrings, types from the schemas, most
columns of the table from the specs. ``NOTES`` holds the facts that no spec has a field for.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import torchkiln
from torchkiln import nn
from torchkiln.testing import OpSpec
from torchkiln.testing.sample import FLOATING
from torchkiln.testing.specs import FAMILIES


@dataclass(frozen=True)
class Notes:
    """Facts about a family that its specs have no field for."""

    beside: str = ""
    """Dtypes of other arguments beside half precision, added to the dtypes."""
    other: str = "an error"
    """Result for a call with other dtypes."""
    strides: str = "any"
    layout: str = "contiguous"
    compiled: str = ""
    """Added to the policy of the specs under torch.compile."""
    gradients: str = ""
    autocast: str = "follows the inputs"
    """Behaviour if the specs name no argument that autocast casts, else added to them."""


NOTES = {
    "pointwise": Notes(
        other="as torch promotes",
        strides="any; arguments broadcast",
        layout="as `torch.add`",
    ),
    "activation": Notes(layout="that of a dense `x`"),
    "bias_act": Notes(
        beside="float32 bias beside half precision",
        compiled="its backward is faster than Inductor's",
        autocast="as `linear`",
    ),
    "gated": Notes(),
    "dropout": Notes(
        beside="float32 bias beside half precision",
        gradients="vmap by torch's rules for random ops",
    ),
    "reduction": Notes(
        beside="`dtype=` any of them",
        other="`sum` of integers and bools in int64, `mean` of them with `dtype=`; else an error",
        autocast="as torch's",
    ),
    "norm": Notes(
        beside="float32 weight and bias beside half precision",
        strides="any; evenly spaced rows are not copied",
    ),
    "batch_norm": Notes(
        beside="float32 parameters and statistics beside half precision",
        strides="any; a copy unless contiguous or with adjacent channels, all tensors alike",
        layout="that of `x`",
    ),
    "group_norm": Notes(
        beside="float32 weight and bias beside half precision",
        strides="any; a copy unless contiguous or with adjacent channels",
        layout="that of `x`",
    ),
    "gated_norm": Notes(
        beside="float32 weight beside half precision",
        strides="any; evenly spaced rows are not copied",
    ),
    "rope": Notes(
        beside="float32 `cos` and `sin` beside half precision; int64 and int32 positions",
        strides="any; a copy if the elements of a head are not adjacent; fewer than 2^31 tokens",
        layout="without gaps, heads and tokens in the order of the input",
    ),
    "softmax": Notes(strides="any; a mask broadcasts"),
    "cross_entropy": Notes(
        beside="float32 weight of classes and bias beside half precision; `loss_dtype=` any of "
        "them; `logprob`, `linear_logprob`, `linear_kl`: results at least float32",
        other="an error; int64 target",
        strides="any; a copy if classes are not adjacent",
        layout="contiguous; classes adjacent in the gradient",
        gradients="the gradient may take the place of the logits (`inplace_backward=True`)",
        autocast="a loss in float32; logits and a float32 bias are read as they are",
    ),
    "quantize": Notes(
        beside="a weight of another one of them, a float32 bias beside half precision",
        strides="any; evenly spaced rows are not copied",
        gradients="of the first order only: straight through the rounding",
        autocast="the weight is quantised from its own dtype",
    ),
    "spmm": Notes(
        beside="int32 and int64 indices",
        strides="any; a copy of `b` if its columns are not adjacent, but not for few entries on a "
        "GPU; 2^31 elements not tried; fewer than 2^31 entries for backward",
        autocast="as `matmul`",
    ),
    "matmul": Notes(
        beside="float32 bias of `linear` beside half precision",
        strides="any; batches broadcast",
        autocast="as torch's; `linear` reads a float32 bias as it is",
    ),
}

COLUMNS = (
    "ops",
    "dtypes on CPU and CUDA",
    "other dtypes",
    "strides; empty and more than 2^31 elements too",
    "layout of the result",
    "gradients of both orders, forward mode, `torch.func`",
    "in place",
    "`torch.compile`, `torch.export`",
    "AOTInductor",
    "autocast",
    "bitwise equal from run to run",
    "waits for the device",
)
LAST = "## The contract of a family\n"
"""The last heading of docs/ops.md."""
INDUCTOR = "yes, seen on the CPU, from C++ too"
NONE = "-"


def plain(text: str) -> str:
    """The first paragraph of a docstring as Markdown, without the word Returns."""
    line = " ".join(text.partition("\n\n")[0].split())
    line = re.sub(r":\w+:`~?([^`]+)`", r"``\1``", line).replace("``", "`")
    return line.removeprefix("Returns ")


def call_of(function: Callable[..., Any]) -> str:
    """Name, arguments and defaults, without types; a default that is a function by its name."""
    if inspect.isclass(function) and function.__init__ is torch.nn.Module.__init__:
        return f"{function.__name__}()"
    signature = inspect.signature(function)
    parameters = [
        parameter.replace(
            annotation=inspect.Parameter.empty,
            default=getattr(parameter.default, "__name__", parameter.default)
            if inspect.isfunction(parameter.default)
            else parameter.default,
        )
        for parameter in signature.parameters.values()
    ]
    shown = signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)
    return f"{function.__name__}{shown}"


def schema_of(spec: OpSpec) -> str:
    """The schema, with short numbers."""
    schema = str(spec.overload._schema)
    return re.sub(r"(?<==)(\d+\.[\de+-]*)", lambda match: repr(float(match[1])), schema)


def names_of(spec: OpSpec, positions: Iterable[int]) -> list[str]:
    """Arguments of the schema at these positions."""
    arguments = spec.overload._schema.arguments
    return [f"`{arguments[i].name}`" for i in positions]


def per_op(specs: Sequence[OpSpec], words: Callable[[OpSpec], str]) -> str:
    """The words that hold for all specs, or a part for each."""
    found = {spec.name: words(spec) for spec in specs}
    if len(set(found.values())) == 1:
        return next(iter(found.values()))
    groups: dict[str, list[str]] = {}
    for name, said in found.items():
        groups.setdefault(said, []).append(f"`{name}`")
    return "; ".join(f"{', '.join(ops)}: {said}" for said, ops in groups.items())


def joined(*parts: str) -> str:
    """The parts that are not empty."""
    return "; ".join(part for part in parts if part)


def dtypes(spec: OpSpec) -> str:
    """The dtypes of a spec, in the order of the library."""
    order = [dtype for dtype in FLOATING if dtype in spec.dtypes]
    order += [dtype for dtype in spec.dtypes if dtype not in order]
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in order)


def gradients(spec: OpSpec) -> str:
    """The differentiable arguments."""
    return f"of {', '.join(names_of(spec, spec.differentiable))}"


def in_place(specs: Sequence[OpSpec]) -> str:
    """The ops that write into their arguments."""
    names = [form.name for spec in specs for form in spec.forms if form.name.endswith("_")]
    return ", ".join(f"`{name}`" for name in names) or NONE


def compiled(spec: OpSpec) -> str:
    """Whether a graph keeps the op."""
    policy = {True: "stays an op", False: "becomes ATen ops, which Inductor fuses", None: NONE}
    return policy[spec.opaque]


def autocast(spec: OpSpec, note: str) -> str:
    """The arguments that autocast casts."""
    cast = names_of(spec, spec.autocast)
    return joined(f"casts {', '.join(cast)}", note) if cast else note


def reproducible(spec: OpSpec) -> str:
    """Whether bits depend on anything but the call."""
    if spec.threads_matter:
        return "yes; on the CPU for one number of threads"
    return "yes, from the same seed" if "vmap" in spec.excluded else "yes, gradients too"


def waits(specs: Sequence[OpSpec]) -> str:
    """Arguments that make the host wait."""
    found = dict.fromkeys(name for spec in specs for name in spec.waits_for)
    return joined("never" if not found else "", *(f"if `{name}=True`" for name in found))


def table() -> Iterable[str]:
    """A line for each family."""
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---" * len(COLUMNS) + "|"
    for family, specs in FAMILIES.items():
        notes = NOTES.get(family, Notes())
        cells = (
            ", ".join(f"`{spec.name}`" for spec in specs),
            joined(per_op(specs, dtypes), notes.beside),
            notes.other,
            notes.strides,
            notes.layout,
            joined(per_op(specs, gradients), notes.gradients),
            in_place(specs),
            joined(per_op(specs, compiled), notes.compiled),
            INDUCTOR,
            per_op(specs, partial(autocast, note=notes.autocast)),
            per_op(specs, reproducible),
            waits(specs),
        )
        yield f"| {' | '.join(cells)} |"


def functions(family: str) -> list[Callable[..., Any]]:
    """Public functions of a family."""
    found = [getattr(torchkiln, name) for name in torchkiln.__all__]
    home = f"torchkiln.ops.{family}"
    homes = {f: f.__globals__["__name__"] for f in found if inspect.isfunction(f)}
    return [f for f, name in homes.items() if f"{name}.".startswith(f"{home}.")]


def modules(family: str) -> list[type[torch.nn.Module]]:
    """Public modules of a family."""
    found = [getattr(nn, name) for name in nn.__all__]
    home = f"torchkiln.nn.{family}."
    return [cls for cls in found if f"{cls.__module__}.".startswith(home)]


def calls(family: str) -> Iterable[str]:
    """Functions and modules with their formulas, then the schemas of ops."""
    yield from ("| call | result |", "|---|---|")
    for function in functions(family):
        yield f"| `torchkiln.{call_of(function)}` | {plain(inspect.getdoc(function) or '')} |"
    for cls in modules(family):
        yield f"| `torchkiln.nn.{call_of(cls)}` | {plain(inspect.getdoc(cls) or '')} |"
    if family in FAMILIES:
        yield from ("", "```text", *map(schema_of, FAMILIES[family]), "```")


def block(family: str) -> str:
    """The generated part of a family, or the table of all."""
    return "\n".join([*(table() if family == "all" else calls(family)), ""])


def with_all_families(page: str) -> str:
    """The page docs/ops.md with a section for each family that has none."""
    for family in FAMILIES:
        begin = f"<!-- ops:{family} -->\n"
        if begin not in page:
            section = f"## {family}\n\n{begin}<!-- /ops:{family} -->\n\n"
            page = page.replace(LAST, section + LAST)
    return page
