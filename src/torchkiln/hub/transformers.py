"""``torchkiln.replace`` as a callback of Hugging Face's ``Trainer``."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from transformers import TrainerCallback

from torchkiln.patch import Report, replace


class ReplaceCallback(TrainerCallback):
    """The callback that :func:`torchkiln.hub.trainer_callback` returns."""

    report: Report | None = None
    """The report about the last model."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def on_init_end(self, *_: Any, model: nn.Module | None = None, **__: Any) -> None:
        """Replaces modules of the model, if the trainer has one and has not replaced it yet."""
        if model is None or self.has_replaced(model):
            return
        self.report = replace(model, **self.options)
        logging.getLogger(__name__).info("%s", self.report)

    def on_train_begin(self, *_: Any, model: nn.Module | None = None, **__: Any) -> None:
        """Replaces modules of a model that the trainer did not have before."""
        if model is None or self.has_replaced(model):
            return
        if any(map(is_sharded, model.modules())):
            raise RuntimeError(
                "torchkiln.hub.trainer_callback: model: got a model that FSDP has "
                "sharded, expected one that is not; pass the callback to the Trainer"
            )
        self.on_init_end(model=model)

    def has_replaced(self, model: nn.Module) -> bool:
        """Whether this is the model of the report, or FSDP's wrapper around it."""
        return self.report is not None and any(m is self.report.model for m in model.modules())


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP wraps the module."""
    return isinstance(module, FSDPModule | FullyShardedDataParallel)
