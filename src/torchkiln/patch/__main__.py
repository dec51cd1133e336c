"""``torchkiln replace MODULE:FACTORY``: print the report for a model that a function makes."""

from __future__ import annotations

import argparse
import importlib
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchkiln.cli.options import write_file
from torchkiln.patch.replacing import replace

WHERE = "torchkiln.replace"


def run(options: argparse.Namespace) -> int:
    """Make the model, replace, print the report; 2 for wrong arguments."""
    try:
        model = made(options.factory, dry_run=options.dry_run)
        if options.dtype:
            model.to(getattr(torch, options.dtype))
        report = replace(
            model,
            only=options.only,
            skip=options.skip,
            exact=options.exact,
            dry_run=options.dry_run,
        )
        if options.json == Path("-"):
            print(report.to_json())
            return 0
        if options.json:
            write_file(WHERE, "--json", options.json, report.to_json() + "\n")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(report)
    return 0


def made(factory: str, *, dry_run: bool) -> nn.Module:
    """The model; for a dry run it has no memory: its tensors are on the meta device."""
    module, _, name = factory.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        function: Any = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{WHERE}: MODULE:FACTORY: got {factory!r} ({error}), expected a module and a function "
            "that returns a model, such as torchvision.models:resnet50"
        ) from error
    with torch.device("meta") if dry_run else nullcontext():
        model = function()
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"{WHERE}: MODULE:FACTORY: got a {type(model).__name__} from {factory}(), expected a "
            "torch.nn.Module"
        )
    return model
