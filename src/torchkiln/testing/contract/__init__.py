"""The checks of the contract. Importing this package fills CHECKS."""

from torchkiln.testing.check import CHECKS
from torchkiln.testing.contract import (
    autograd,
    bad_input,
    compiler,
    cuda,
    dispatch,
    dtypes,
    gradients,
    modules,
    repeat,
    sharding,
    state,
    values,
    written,
)

__all__ = [
    "CHECKS",
    "autograd",
    "bad_input",
    "compiler",
    "cuda",
    "dispatch",
    "dtypes",
    "gradients",
    "modules",
    "repeat",
    "sharding",
    "state",
    "values",
    "written",
]
