"""Routes a call: to C++ in eager mode, to an op in the graph under torch.compile and export."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch.compiler import is_compiling

F = TypeVar("F", bound=Callable[..., Any])

ROUTE = """\
def routes(entry, traced, is_compiling):
    def {name}({parameters}):
        if is_compiling():
            return traced({arguments})
        return entry({values})
    return {name}
"""


def eager(entry: Callable[..., Any]) -> Callable[[F], F]:
    """Makes a function call ``entry`` in eager mode; its body is for torch.compile and export.

    The function is generated once, with the signature of the body, so that a call adds a single
    Python frame. The entry handles tensor subclasses and torch-function modes.

    Args:
        entry: function of ``_C`` that takes all arguments of the body by position.
    """

    def decorate(traced: F) -> F:
        parameters = inspect.signature(traced).parameters.values()
        kinds = [parameter.kind for parameter in parameters]
        names = [parameter.name for parameter in parameters]
        keywords = [
            name if kind is inspect.Parameter.POSITIONAL_OR_KEYWORD else f"{name}={name}"
            for name, kind in zip(names, kinds, strict=True)
        ]
        named = names.copy()
        if inspect.Parameter.KEYWORD_ONLY in kinds:
            named.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
        source = ROUTE.format(
            name=traced.__name__,
            parameters=", ".join(named),
            arguments=", ".join(keywords),
            values=", ".join(names),
        )
        scope: dict[str, Any] = {}
        file = inspect.getfile(traced)
        exec(compile(source, f"<eager route in {file}>", "exec"), traced.__globals__, scope)
        route = scope["routes"](entry, traced, is_compiling)
        route.__defaults__ = traced.__defaults__
        route.__kwdefaults__ = traced.__kwdefaults__
        return cast("F", functools.update_wrapper(route, traced))

    return decorate
