"""Routes a call: to C++ in eager mode, to an op in the graph under torch.compile and export."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, TypeVar, cast

from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import has_torch_function

from torchkiln._deprecated import Renamed, value

F = TypeVar("F", bound=Callable[..., Any])

ROUTE = """\
def routes(entry, traced, is_compiling, chosen, refuse, value, former{defaults}):
    def {name}({parameters}):
{renamed}\
        if {is_traced}:
            return traced({arguments})
        return entry({values})
    return {name}
"""
RENAMED = """\
        if {torchs} is not ...:
            {name} = chosen("{op}", {count}, "{name}", {name}, "{torchs}", {torchs})
"""
EXCESS = "_excess"
"""The parameter that separates positional from keyword parameters if no torch names do."""
FORMER = """\
        if {old} is not ...:
            is_alone = {now} is default_{now}
            {now} = value("{op}", "{old}", former["{old}"], {old}, is_alone=is_alone)
"""
REFUSED = """\
        if _excess is not ...:
            refuse("{op}", {count})
"""


def eager(
    entry: Callable[..., Any],
    *,
    beside: tuple[str, ...] = (),
    former: Mapping[str, Renamed] | None = None,
    **names: str,
) -> Callable[[F], F]:
    """Makes a function that calls ``entry`` in eager mode; its body is for compile and export.

    The function is generated once, with the signature of the body, so that a call adds a single
    Python frame. The entry handles tensor subclasses and torch-function modes.

    Args:
        entry: function of ``_C`` that takes all arguments of the body by position.
        beside: arguments that ``entry`` does not take. Calls that change their defaults run the
            body in eager mode, too.
        former: former names of arguments, which are accepted as keywords, with a warning.
        names: torch's name of an argument and the name in the body: ``input="x"``. Both are
            accepted as keywords. Signatures and pages show only the second.
    """

    def decorate(traced: F) -> F:
        parameters = inspect.signature(traced).parameters
        renames = former or {}
        order = declared(parameters, names, renames)
        # The generated function compares these arguments with their defaults.
        known = dict.fromkeys((*beside, *(one.now for one in renames.values())))
        op = traced.__name__.removeprefix("_")
        count = sum(p.kind is not p.KEYWORD_ONLY for p in parameters.values())
        renamed = [
            RENAMED.format(op=op, count=count, name=name, torchs=torchs)
            for torchs, name in names.items()
        ]
        if EXCESS in order:
            renamed.append(REFUSED.format(op=op, count=count))
        renamed += [FORMER.format(op=op, old=old, now=one.now) for old, one in renames.items()]
        source = ROUTE.format(
            name=traced.__name__,
            defaults="".join(f", default_{name}" for name in known),
            parameters=", ".join(order),
            renamed="".join(renamed),
            is_traced=" or ".join(["is_compiling()", *map(is_changed, beside)]),
            arguments=", ".join(
                f"{name}={name}" if p.kind is p.KEYWORD_ONLY else name
                for name, p in parameters.items()
            ),
            values=", ".join(name for name in parameters if name not in beside),
        )
        scope: dict[str, Any] = {}
        file = inspect.getfile(traced)
        exec(compile(source, f"<eager route in {file}>", "exec"), traced.__globals__, scope)
        defaults = [plain(parameters[name].default) for name in known]
        route = scope["routes"](
            entry, traced, is_compiling, chosen, refuse, value, renames, *defaults
        )
        route.__defaults__ = traced.__defaults__
        if renamed:
            found = [parameters[n].default if n in parameters else ... for n in order]
            if not names and not renames:
                found = [default for default in found if default is not inspect.Parameter.empty]
            # If other names are accepted, a missing argument is None, which the entry refuses.
            route.__defaults__ = tuple(map(plain, found))
        return cast("F", functools.update_wrapper(route, traced))

    return decorate


def plain(default: object) -> object:
    """The default of a parameter, or None if it has none."""
    return None if default is inspect.Parameter.empty else default


def is_changed(name: str) -> str:
    """Code that tests whether an argument differs from its default; identity first, for speed."""
    return f"({name} is not default_{name} and {name} != default_{name})"


def declared(
    parameters: Mapping[str, inspect.Parameter], names: Iterable[str], former: Iterable[str]
) -> list[str]:
    """The parameters of a generated function, without defaults.

    No parameter is keyword-only, because a keyword-only default costs 20 ns in each call. Instead,
    torch's names, or a parameter that must stay empty, follow the positional parameters. Former
    names are last.
    """
    by_position = [n for n, p in parameters.items() if p.kind is not p.KEYWORD_ONLY]
    by_keyword = [n for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
    separators = [*names] or ([EXCESS] if by_keyword or former else [])
    return [*by_position, *separators, *by_keyword, *former]


def chosen(op: str, count: int, name: str, ours: Any, torchs_name: str, torchs: Any) -> Any:
    """The value of an argument given by torch's name; TypeError if both names are given.

    TypeError also if the value is one positional argument too many.
    """
    if ours is not None:
        if not isinstance(torchs, Tensor):
            refuse(op, count)
        raise TypeError(
            f"torchkiln.{op}: {torchs_name}: got a value beside {name}, expected one of the "
            f"two, which name one argument, and at most {count} arguments by position; pass "
            "options by keyword"
        )
    return torchs


def refuse(op: str, count: int) -> NoReturn:
    """Refuses a positional argument too many."""
    raise TypeError(
        f"torchkiln.{op}: got more than {count} positional arguments, expected at most {count}; "
        "pass options by keyword"
    )


def is_foreign(given: object) -> bool:
    """Whether this is no tensor but has a ``__torch_function__``, as a ``torch.fx.Proxy`` has.

    A function whose Python code reads shapes or dtypes then passes the whole call to
    :func:`torch.overrides.handle_torch_function`, as torch's functions do.
    """
    return not isinstance(given, Tensor) and has_torch_function((given,))
