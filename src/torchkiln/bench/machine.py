"""The device that is timed by default."""

from __future__ import annotations

import torch

import torchkiln


def default_device() -> torch.device:
    """The first GPU if this build has kernels for one and there is one, else the CPU."""
    usable = torchkiln.build_info()["cuda"] and torch.cuda.is_available()
    return torch.device("cuda:0" if usable else "cpu")
