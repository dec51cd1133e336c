"""Shortens TorchInductor's messages about ops of torchkiln and of its kit.

When torch 2.11 meets an op for the first time, it makes a message with the arguments of the op,
even if nothing logs it. The text of an argument has the ops that it comes from, again for each use.
So the time to compile a model whose residual passes through such ops doubles with each layer.
"""

from types import ModuleType
from typing import Any

from torchkiln import _C

MODULE = "torch._inductor.exc"

MADE: set[str] = set()
"""Names of the ops that ``torchkiln.jit`` made."""


def shorten_messages(module: ModuleType) -> None:
    """Leaves the arguments out of messages about ops that jit made, or of a library of the kit.

    A library of the kit is a namespace with an op of ``torchkiln::define``. Does nothing in a torch
    without these messages.
    """
    issue = getattr(module, "OperatorIssue", None)
    usual = getattr(issue, "operator_str", None)
    if issue is None or usual is None:
        return

    def operator_str(target: Any, args: Any, kwargs: Any) -> str:
        """The text about an op."""
        name = getattr(getattr(target, "_schema", None), "name", "")
        defined = {other.partition("::")[0] for other in _C.ops_with_c_function()}
        if name in MADE or name.partition("::")[0] in defined:
            return f"  target: {target}"
        return str(usual(target, args, kwargs))

    issue.operator_str = staticmethod(operator_str)
