"""Options of the command line that need torch or the file system."""

from __future__ import annotations

import argparse
import os
from importlib.util import find_spec
from pathlib import Path

import torch

from torchkiln.bench.plan import default_device
from torchkiln.cli.bench_parser import DRAWN, SUFFIXES
from torchkiln.cli.options import make_folder


def device_of(where: str, name: str | None) -> torch.device:
    """The device that ``--device`` names; by default a GPU if one is usable."""
    usable = default_device()
    if name == "cuda" and usable.type == "cpu":
        raise ValueError(
            f"{where}: --device: got cuda, expected a GPU and a build with kernels for it; "
            "torchkiln.build_info() and torch.cuda.is_available() say which is missing"
        )
    return torch.device("cpu") if name == "cpu" else usable


def require_outputs(options: argparse.Namespace) -> None:
    """Refuse output files that could not be written, before anything is measured."""
    if options.report:
        make_folder("torchkiln.bench", "--report", options.report)
    for name in SUFFIXES:
        path: Path | None = getattr(options, name)
        if path is None:
            continue
        if name in DRAWN and find_spec("matplotlib") is None:
            raise ValueError(
                f"torchkiln.bench: --{name}: got no module matplotlib, expected the packages that "
                "draw; type: python -m pip install 'torchkiln[cli]'"
            )
        folder = path.absolute().parent
        if not folder.is_dir():
            raise ValueError(
                f"torchkiln.bench: --{name}: got {path}, expected a file in a folder that exists; "
                f"type: mkdir -p {folder}"
            )
        if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
            raise ValueError(
                f"torchkiln.bench: --{name}: got {path}, expected a file that can be written"
            )
