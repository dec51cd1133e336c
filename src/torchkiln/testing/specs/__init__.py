"""One spec for each op, by family."""

from torchkiln.testing.specs.bias_act import SCALE_BIAS_RELU
from torchkiln.testing.specs.pointwise import ADD
from torchkiln.testing.specs.reduction import MEAN, SUM

SPECS = (ADD, SCALE_BIAS_RELU, SUM, MEAN)
