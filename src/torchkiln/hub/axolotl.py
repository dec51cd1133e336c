"""``torchkiln.replace`` as a plug-in of axolotl.

A configuration names it, and may have the options of ``torchkiln.replace``::

    plugins: [torchkiln.hub.axolotl.ReplacePlugin]
    torchkiln_replace: {skip: ["model.vision*"]}
"""

from __future__ import annotations

import logging
from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel
from torch import nn

from torchkiln.patch import Report, replace


class ReplaceArguments(BaseModel):
    """The keys that the plug-in adds to a configuration."""

    torchkiln_replace: dict[str, Any] | None = None
    """Options of ``torchkiln.replace``."""


class ReplacePlugin(BasePlugin):
    """Replaces modules of the model when it is loaded, with its adapters and before the trainer."""

    report: Report | None = None
    """The report about the last model."""

    def get_input_args(self) -> str:
        """The path of the class with the keys of the configuration."""
        return f"{__name__}.{ReplaceArguments.__name__}"

    def post_model_load(self, cfg: Any, model: nn.Module) -> None:
        """Replaces modules of the model."""
        self.report = replace(model, **(cfg.torchkiln_replace or {}))
        logging.getLogger(__name__).info("%s", self.report)
