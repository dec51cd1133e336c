"""Routes a call: to C++ in eager mode, to an op in the graph under torch.compile and export."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch.compiler import is_compiling

F = TypeVar("F", bound=Callable[..., Any])

ROUTE = """\
def routes(entry, traced, is_compiling, chosen{defaults}):
    def {name}({parameters}):
{renamed}\
        if {is_traced}:
            return traced({arguments})
        return entry({values})
    return {name}
"""
RENAMED = """\
        if {torchs} is not None:
            {name} = chosen("{op}", "{name}", {name}, "{torchs}", {torchs})
"""


def eager(
    entry: Callable[..., Any], *, beside: tuple[str, ...] = (), **names: str
) -> Callable[[F], F]:
    """Makes a function call ``entry`` in eager mode; its body is for torch.compile and export.

    The function is generated once, with the signature of the body, so that a call adds a single
    Python frame. The entry handles tensor subclasses and torch-function modes.

    Args:
        entry: function of ``_C`` that takes all arguments of the body by position.
        beside: arguments that ``entry`` does not take. Calls that change their defaults run the
            body in eager mode, too.
        names: the name of an argument in the torch function that this one replaces, and its name
            here: ``input="x"``. Both are accepted as keywords. Signatures and pages show one.
    """

    def decorate(traced: F) -> F:
        parameters = inspect.signature(traced).parameters
        op = traced.__name__.removeprefix("_")
        source = ROUTE.format(
            name=traced.__name__,
            defaults="".join(f", default_{name}" for name in beside),
            parameters=", ".join(declared(parameters, names)),
            renamed="".join(
                RENAMED.format(op=op, name=name, torchs=torchs) for torchs, name in names.items()
            ),
            is_traced=" or ".join(
                ["is_compiling()", *(f"{name} != default_{name}" for name in beside)]
            ),
            arguments=", ".join(
                f"{name}={name}" if p.kind is p.KEYWORD_ONLY else name
                for name, p in parameters.items()
            ),
            values=", ".join(name for name in parameters if name not in beside),
        )
        scope: dict[str, Any] = {}
        file = inspect.getfile(traced)
        exec(compile(source, f"<eager route in {file}>", "exec"), traced.__globals__, scope)
        defaults = [parameters[name].default for name in beside]
        route = scope["routes"](entry, traced, is_compiling, chosen, *defaults)
        route.__defaults__ = traced.__defaults__
        route.__kwdefaults__ = traced.__kwdefaults__
        if names:
            # An argument that is left out is None, which the entry refuses by name.
            required = [p for p in parameters.values() if p.default is p.empty]
            route.__defaults__ = (None,) * len(required) + (traced.__defaults__ or ())
            route.__kwdefaults__ = {**(traced.__kwdefaults__ or {}), **dict.fromkeys(names)}
        return cast("F", functools.update_wrapper(route, traced))

    return decorate


def declared(parameters: Any, names: dict[str, str]) -> list[str]:
    """The parameters of a route, torch's names last, without defaults."""
    kinds = [parameter.kind for parameter in parameters.values()]
    found = list(parameters)
    if inspect.Parameter.KEYWORD_ONLY in kinds:
        found.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    elif names:
        found.append("*")
    return [*found, *names]


def chosen(op: str, name: str, ours: Any, torchs_name: str, torchs: Any) -> Any:
    """The value of an argument that was given under torch's name; TypeError if under both."""
    if ours is not None:
        raise TypeError(
            f"torchkiln.{op}: {torchs_name}: got {torchs_name} and {name}, expected one of them: "
            "they name the same argument"
        )
    return torchs
