"""Two aliases of a tensor. The next kernel in backward reads and adds the gradients of both."""

from __future__ import annotations

from torch import Tensor
from torch.compiler import is_compiling

from torchkiln import _C
from torchkiln.ops._folding import is_transformed


def two_uses(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns ``x`` twice, for reading only: a change in place has no gradient.

    If ``x`` is the result of a batch norm with a residual and relu, the backward pass of the batch
    norm adds both gradients. Otherwise autograd adds them in a separate kernel. Both round equally.
    The node of the batch norm is found in autograd's graph, which a compiled graph does not have.
    """
    if is_compiling() or type(x) is not Tensor or not x.requires_grad or is_transformed():
        return x, x
    found: tuple[Tensor, Tensor] = _C.two_uses(x)
    return found
