"""Aliases of a tensor for two uses, whose gradients are added in the kernel that reads them."""

from __future__ import annotations

from torch import Tensor
from torch.compiler import is_compiling

from torchkiln import _C
from torchkiln.ops._folding import is_transformed


def two_uses(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` twice. The values are to be read only: a change in place has no gradient.

    If ``x`` is the result of a batch norm with a residual and relu, its backward adds the gradients
    of both where autograd would add them in a kernel of its own. The sum is rounded as there.
    """
    if is_compiling() or type(x) is not Tensor or not x.requires_grad or is_transformed():
        return x, x
    found: tuple[Tensor, Tensor] = _C.two_uses(x)
    return found
