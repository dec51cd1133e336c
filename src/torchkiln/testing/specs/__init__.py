"""One spec for each op, by family."""

from torchkiln.testing.spec import OpSpec
from torchkiln.testing.specs import activation, dropout, gated, norm
from torchkiln.testing.specs.bias_act import BIAS_ACT
from torchkiln.testing.specs.cross_entropy import CROSS_ENTROPY
from torchkiln.testing.specs.matmul import LINEAR, MATMUL
from torchkiln.testing.specs.pointwise import ADD, MULADD
from torchkiln.testing.specs.reduction import MEAN, SUM
from torchkiln.testing.specs.softmax import LOG_SOFTMAX, SOFTMAX
from torchkiln.testing.specs.spmm import SPMM_CSR

FAMILIES: dict[str, tuple[OpSpec, ...]] = {
    "pointwise": (ADD, MULADD),
    "activation": (
        activation.SQUARE,
        activation.RELU,
        activation.GELU,
        activation.GELU_TANH,
        activation.SILU,
        activation.SIGMOID,
        activation.TANH,
    ),
    "bias_act": (BIAS_ACT,),
    "gated": (gated.SWIGLU, gated.GEGLU, gated.GEGLU_TANH),
    "dropout": (dropout.DROPOUT_ADD, dropout.BIAS_DROPOUT_ADD),
    "reduction": (SUM, MEAN),
    "norm": (norm.LAYER_NORM, norm.RMS_NORM, norm.ADD_LAYER_NORM, norm.ADD_RMS_NORM),
    "softmax": (SOFTMAX, LOG_SOFTMAX),
    "cross_entropy": (CROSS_ENTROPY,),
    "spmm": (SPMM_CSR,),
    "matmul": (MATMUL, LINEAR),
}

SPECS = tuple(spec for family in FAMILIES.values() for spec in family)
