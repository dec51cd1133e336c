"""Short messages of TorchInductor about the ops of torchkiln, set when its module is imported.

For each op that torch 2.11 lowers for the first time, it formats a message with the op's arguments,
even if the message is not logged. The text of an argument contains the ops that compute it, once
for each use: the time to compile a model whose residual passes through our ops doubles with each
layer.
"""

from types import ModuleType
from typing import Any

MODULE = "torch._inductor.exc"


def shorten_messages(module: ModuleType) -> None:
    """Leaves the arguments out of messages about our ops; does nothing in a torch without them."""
    issue = getattr(module, "OperatorIssue", None)
    usual = getattr(issue, "operator_str", None)
    if issue is None or usual is None:
        return

    def operator_str(target: Any, args: Any, kwargs: Any) -> str:
        """The text of a message about an op."""
        if str(target).startswith("torchkiln."):
            return f"  target: {target}"
        return str(usual(target, args, kwargs))

    issue.operator_str = staticmethod(operator_str)
