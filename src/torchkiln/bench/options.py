"""Words of command lines, and what they stand for."""

from __future__ import annotations

import argparse
import re

import torch

from torchkiln.bench.machine import default_device
from torchkiln.bench.peers import PEERS
from torchkiln.cli.options import dtype_name


def dtypes(text: str) -> tuple[torch.dtype, ...]:
    """Names separated by commas."""
    return tuple(getattr(torch, dtype_name(name)) for name in text.split(","))


def counts(text: str) -> tuple[int, ...]:
    """Numbers separated by commas."""
    if re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text) is None:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected numbers, such as 1,2")
    return tuple(int(number) for number in text.split(","))


def minutes(text: str) -> float:
    """A number of minutes, in seconds."""
    return 60 * positive(text)


def percent(text: str) -> float:
    """A number of hundredths, as a share."""
    return positive(text.removesuffix("%")) / 100


def positive(text: str) -> float:
    """A number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number above 0")
    return value


def peers(text: str) -> tuple[str, ...]:
    """Names separated by commas."""
    for name in text.split(","):
        if name not in PEERS:
            raise argparse.ArgumentTypeError(f"got {name!r}, expected one of {', '.join(PEERS)}")
    return tuple(text.split(","))


def device_of(where: str, name: str | None) -> torch.device:
    """The device that ``--device`` names; a GPU where nothing is said and there is one."""
    usable = default_device()
    if name == "cuda" and usable.type == "cpu":
        raise ValueError(
            f"{where}: --device: got cuda, expected a GPU and a build with kernels for it; "
            "torchkiln.build_info() and torch.cuda.is_available() say which is missing"
        )
    return torch.device("cpu") if name == "cpu" else usable
