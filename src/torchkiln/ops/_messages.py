"""Short messages of TorchInductor about the ops of torchkiln, set when its module is imported.

torch 2.11 prints the arguments of each op that it meets first, in the text of a message that nobody
logs. An argument prints the ops that it comes from, again for each use: the time to compile a model
whose residual passes through our ops doubles with each layer.
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
        """The text about an op."""
        if str(target).startswith("torchkiln."):
            return f"  target: {target}"
        return str(usual(target, args, kwargs))

    issue.operator_str = staticmethod(operator_str)
