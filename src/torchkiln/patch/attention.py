"""Attention of Hugging Face's models, which stays causal under ``torch.compile``.

Under ``torch.compile`` many versions of transformers and torch build the mask of every call, so
that ``scaled_dot_product_attention`` gets a dense mask instead of ``is_causal=True``. A registered
implementation builds no mask where the sizes alone say that none is needed; every other mask, and
all calls outside of ``torch.compile``, are those of ``sdpa``.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from torchkiln.patch.formula.linear import is_exporting
from torchkiln.patch.plan import Plan
from torchkiln.patch.report import Replacement
from torchkiln.patch.search import replaced_before
from torchkiln.patch.source.code import forward_of, remade
from torchkiln.patch.source.positions import rewrite_positions
from torchkiln.patch.source.text import definition

NAME = "torchkiln"
"""The name of the implementation, for ``attn_implementation``."""

MARK = "_kiln_attention"
"""The attribute of a model whose pickle registers the implementation again."""

COMPARISONS = (ast.Compare, ast.Dict, ast.MatchValue)
"""Kinds of expressions that can choose by a value."""


class Route(NamedTuple):
    """The models below a model that share a config, the outermost one first."""

    name: str
    """The name of the outermost model, for the report."""
    models: tuple[nn.Module, ...]
    config: Any
    reason: str
    """The reason not to route the attention of these models; empty if it is routed."""


class Registration:
    """A marker in replaced models: a copy or a pickle of it registers the implementation again."""

    def __reduce__(self) -> tuple[Callable[[], Registration], tuple[()]]:
        return _restore_attention, ()


REGISTRATION = Registration()


def _restore_attention() -> Registration:
    """Registers the implementation with transformers, and returns the marker of models."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: PLC0415
    from transformers.masking_utils import AttentionMaskInterface  # noqa: PLC0415
    from transformers.modeling_utils import AttentionInterface  # noqa: PLC0415

    AttentionInterface.register(NAME, sdpa_attention_forward)
    AttentionMaskInterface.register(NAME, mask)
    return REGISTRATION


_restore_attention.__module__ = "torchkiln.patch"  # the path that pickles store


def mask(**options: Any) -> Tensor | None:
    """The mask of ``sdpa``; None under ``torch.compile`` if the sizes say that none is needed."""
    from transformers.masking_utils import sdpa_mask  # noqa: PLC0415

    if torch.compiler.is_compiling() and not is_exporting() and needs_none(**options):
        return None
    made: Tensor | None = sdpa_mask(**options)
    return made


def needs_none(
    *,
    q_length: Any = None,
    kv_length: Any = None,
    q_offset: Any = 0,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **_: Any,
) -> bool:
    """Whether causal attention, or attention of one query, has the same keys without the mask.

    The arguments are those of transformers' ``sdpa_mask``, which returns None in the same cases
    outside of ``torch.compile``. ``allow_is_causal_skip`` is false for any pattern except causal
    attention in a window of ``local_size``.
    """
    if attention_mask is not None or isinstance(q_offset, Tensor) or q_length is None:
        return False
    if local_size is not None and kv_length >= local_size:
        return False
    if allow_is_causal_skip and (q_length == 1 or q_length == kv_length):  # noqa: PLR1714  symbols
        return True
    return allow_is_bidirectional_skip


def routes(model: nn.Module) -> Iterator[Route]:
    """The models of transformers that have masks and could run ``sdpa``, by config."""
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if base is None:
        return
    found: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        if isinstance(module, base):
            found.setdefault(id(module.config), []).append((name, module))
    for named in found.values():
        models = tuple(module for _, module in named)
        if any(map(makes_masks, models)) and any(
            getattr(m, "_supports_sdpa", False) for m in models
        ):
            name = f"{named[0][0]}.attention".lstrip(".")
            yield Route(name, models, models[0].config, why_not(models))


def makes_masks(model: nn.Module) -> bool:
    """Whether the file with a model's forward imports a function that makes masks."""
    forward = inspect.unwrap(type(model).forward)
    return any(
        inspect.isfunction(value) and value.__module__ == "transformers.masking_utils"
        for value in getattr(forward, "__globals__", {}).values()
    )


def why_not(models: tuple[nn.Module, ...]) -> str:
    """The reason to keep the attention of models that share a config; empty if there is none."""
    from transformers import masking_utils, modeling_utils  # noqa: PLC0415
    from transformers.integrations import sdpa_attention  # noqa: PLC0415

    config: Any = models[0].config
    if config._attn_implementation == NAME and all(MARK in vars(model) for model in models):
        return "is torchkiln's already"
    if config._attn_implementation not in {"sdpa", NAME}:
        return f"its attn_implementation is {config._attn_implementation}"
    current = modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"]
    makes = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    theirs = sdpa_attention.sdpa_attention_forward, masking_utils.sdpa_mask
    if current is not theirs[0] or makes is not theirs[1]:
        return "another function is registered as sdpa"
    classes = {cls for model in models for part in model.modules() for cls in type(part).__mro__}
    files = {cls.__module__ for cls in classes if not cls.__module__.startswith(NEUTRAL)}
    for file in sorted(files):
        if reason := why_not_file(file):
            return reason
    return ""


NEUTRAL = (
    *("builtins", "abc", "torch.", "torchkiln.", "transformers.modeling_utils"),
    *("transformers.generation.", "transformers.integrations.", "transformers.utils."),
)
"""Prefixes of Python modules that are not searched: no forward there chooses by the name."""


def why_not_file(name: str) -> str:
    """The reason if code of a Python module depends on the name of the implementation."""
    from transformers.modeling_utils import AttentionInterface  # noqa: PLC0415

    scope = vars(sys.modules[name]) if name in sys.modules else {}
    interfaces = [value for value in scope.values() if isinstance(value, AttentionInterface)]
    if any(interface._local_mapping for interface in interfaces):
        return f"{name} has its own attention functions"
    try:
        compares = compares_name(name)
    except (KeyError, OSError, TypeError, SyntaxError):
        return f"the source of {name} is not available"
    return f"{name} compares the name of the implementation" if compares else ""


@functools.cache
def compares_name(file: str) -> bool:
    """Whether a Python module compares a value with ``"sdpa"``, or looks one up by it."""
    source = inspect.getsource(sys.modules[file])
    if "sdpa" not in source:
        return False
    found = (node for node in ast.walk(ast.parse(source)) if isinstance(node, COMPARISONS))
    parts = (part for node in found for part in ast.walk(node))
    return any(isinstance(part, ast.Constant) and part.value == "sdpa" for part in parts)


@dataclass(frozen=True)
class Counted(Plan):
    """The forward of a class that counts positions itself, and does not pass them to its masks."""

    kind: ClassVar[str] = "attention"
    saved_as: ClassVar[str] = "counted"
    takes_options: ClassVar[bool] = True

    owner: type[nn.Module]
    function: Callable[..., Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        made = remade(
            self.owner, lambda node, forward: rewrite_positions(node, forward.__globals__)
        )
        object.__setattr__(self, "function", made)

    def class_name(self, original: type[nn.Module]) -> str:
        """The original name, because transformers saves it."""
        return original.__name__

    def method(self, _: type[nn.Module]) -> Callable[..., Any]:
        """The rewritten forward, with the decorators of the original."""
        return self.function

    def __str__(self) -> str:
        return "its masks, without the positions that it counts"

    def forward(self, module: Any, *args: Any, **options: Any) -> Any:
        """The rewritten forward."""
        return self.function(module, *args, **options)


def counted(model: nn.Module) -> Counted | None:
    """The plan of a model that counts positions and passes them to its masks; None for others."""
    function = forward_of(type(model))
    node = function if isinstance(function, str) else definition(function)
    if isinstance(function, str) or isinstance(node, str) or replaced_before(model):
        return None
    return Counted(type(model)) if rewrite_positions(node, function.__globals__) else None


def routed(
    model: nn.Module,
    rows: list[Replacement],
    skipped: Callable[[str, nn.Module], bool],
    taken: Collection[nn.Module],
    *,
    dry_run: bool,
) -> tuple[list[tuple[Replacement, nn.Module, Plan]], list[Callable[[], None]]]:
    """Gives transformers' models torchkiln's attention, and adds rows.

    The name ``attention`` stands for all of them. Returns the plans of models that count positions,
    except those in ``taken``, and functions that undo the rest.
    """
    plans: list[tuple[Replacement, nn.Module, Plan]] = []
    undo: list[Callable[[], None]] = []
    for found in routes(model):
        row = Replacement(found.name, str(found.config._attn_implementation), "attention")
        rows.append(row)
        row.reason = found.reason
        if any(skipped(name, found.models[0]) for name in ("attention", found.name)):
            row.reason = "skip"
        if row.reason:
            continue
        row.now, row.outcome = f'attn_implementation="{NAME}"', "replaced"
        if not dry_run:
            undo.append(route(found))
        for name, part in model.named_modules():
            is_free = part in found.models and part not in taken and not skipped(name, part)
            if is_free and (plan := counted(part)):
                of_part = Replacement(name, type(part).__name__, plan.kind, str(plan))
                rows[:] = [other for other in rows if other.name != name] + [of_part]
                plans.append((of_part, part, plan))
    return plans, undo


def route(found: Route) -> Callable[[], None]:
    """Gives torchkiln's attention to models that share a config; returns the undo."""
    registration = _restore_attention()
    found.config._attn_implementation_internal = NAME
    for model in found.models:
        vars(model)[MARK] = registration

    def undo() -> None:
        # otherwise the user has set another implementation since
        if found.config._attn_implementation == NAME:
            found.config._attn_implementation_internal = "sdpa"
        for model in found.models:
            vars(model).pop(MARK, None)

    return undo
