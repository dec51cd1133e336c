"""Checks of settings when a module is made, in the words of the ops."""

from torchkiln import _C

ACTIVATIONS = tuple(_C.activations())
GATES = ("silu", "gelu", "gelu_tanh")


def check_act(module: str, act: object) -> str:
    """Returns the name of an activation; refuses other values."""
    if not isinstance(act, str) or act not in ACTIVATIONS:
        raise ValueError(
            f"torchkiln.{module}: act: got {act!r}, expected one of {', '.join(ACTIVATIONS)}"
        )
    return act


def check_gate(module: str, act: object) -> str:
    """Returns the name of the activation of a gate; refuses other values."""
    if not isinstance(act, str) or act not in GATES:
        raise ValueError(
            f"torchkiln.{module}: act: got {act!r}, expected one of {', '.join(GATES)}"
        )
    return act


def check_save(module: str, save: object) -> str:
    """Returns the name of what is kept for backward; refuses other values."""
    if save not in ("preact", "none"):
        raise ValueError(f"torchkiln.{module}: save: got {save!r}, expected one of preact, none")
    return str(save)


def check_p(module: str, p: float) -> float:
    """Returns a probability; refuses numbers outside of [0, 1]."""
    if not 0 <= p <= 1:
        raise ValueError(f"torchkiln.{module}: p: got {p}, expected a probability between 0 and 1")
    return p
