"""The contracts of products in E4M3, and of functions with a result in E4M3."""

from torchkiln.testing.forms import with_forms
from torchkiln.testing.specs.quantize import layer, producers
from torchkiln.testing.specs.quantize.producers import quantising

LINEAR_FP8 = with_forms(layer.LINEAR_FP8, producers.QUANTIZE, producers.GATED_LINEAR)

__all__ = ["LINEAR_FP8", "quantising"]
