"""One spec for each op, by family."""

from torchkiln.testing.specs.bias_act import SCALE_BIAS_RELU
from torchkiln.testing.specs.pointwise import ADD

FAMILIES = {
    "pointwise": (ADD,),
    "bias_act": (SCALE_BIAS_RELU,),
}

SPECS = tuple(spec for family in FAMILIES.values() for spec in family)
