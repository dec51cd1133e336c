"""``torchkiln replace MODULE:FACTORY``: print the report for a model that a function makes.

The model is not kept, so nothing is replaced.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchkiln.cli.options import STDOUT, output_json
from torchkiln.cli.status import Status, refused
from torchkiln.patch.replacing import replace

WHERE = "torchkiln.replace"


def run(options: argparse.Namespace) -> int:
    """Make the model, search it, print the report."""
    try:
        model = made(options.factory, on_meta=options.meta)
        if options.dtype:
            model.to(getattr(torch, options.dtype))
        report = replace(
            model,
            only=options.only,
            skip=options.skip,
            exact=options.exact,
            dry_run=True,
        )
        output_json(WHERE, options.json, report.to_json(1))
    except ValueError as error:
        return refused(error)
    if options.json != STDOUT:
        print(report)
    return Status.DONE


def made(factory: str, *, on_meta: bool) -> nn.Module:
    """The model; on the meta device its tensors have no memory."""
    module, _, name = factory.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        function: Any = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
    except Exception as error:  # a user's module may raise any error
        raise ValueError(
            f"{WHERE}: MODULE:FACTORY: got {factory!r} ({brief(error)}), expected a module and a "
            "function that returns a model, such as torchvision.models:resnet50"
        ) from error
    try:
        with torch.device("meta") if on_meta else nullcontext():
            model = function()
    except Exception as error:
        remedy = "; --real makes it outside of the meta device" if on_meta else ""
        raise ValueError(
            f"{WHERE}: MODULE:FACTORY: got {brief(error)} in {factory}(), expected a model from a "
            f"call without arguments, such as torchvision.models:resnet50{remedy}"
        ) from error
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"{WHERE}: MODULE:FACTORY: got a {type(model).__name__} from {factory}(), expected a "
            "torch.nn.Module"
        )
    return model


def brief(error: Exception) -> str:
    """The class and the first line of an error."""
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
