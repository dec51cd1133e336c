"""Cross-entropy of logits and classes or probabilities."""

import torch
from torch import Tensor

from torchkiln import _C
from torchkiln.ops._eager import eager


@eager(_C.cross_entropy)
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    dtype: torch.dtype | None = None,
    check_target: bool = False,
    inplace_backward: bool = False,
) -> Tensor:
    """Returns the cross-entropy of ``logits`` and ``target``, of each row or reduced.

    With ``lse = log(sum(exp(logits)))`` over the classes, the loss of a row is
    ``sum(q * (lse - logits)) + z_loss * w * lse**2``, where ``q`` is ``weight * ((1 -
    label_smoothing) * p + label_smoothing / classes)``, ``p`` the probabilities, or 1 at the target
    class and 0 elsewhere, and ``w`` the weight of the target class, or 1 beside probabilities. The
    mean is over the sum of ``w``: rows that are ignored have none. The mean of no rows is NaN.

    Nothing of the size of ``logits`` is stored beside their gradient: backward computes the softmax
    again from the logits and ``lse``. A half precision is read as it is and computed in float32.

    Args:
        logits: ``[classes]``, ``[rows, classes]`` or ``[rows, classes, ...]``; float32, float64,
            float16 or bfloat16. Where classes are not adjacent in memory, they are copied for the
            time of the call; in backward the gradient takes the place of the copy.
        target: int64 classes, one for each row: the shape of ``logits`` without its classes. Or
            probabilities, of the shape and dtype of ``logits``; they get a gradient if they need
            one. A class that does not exist is an IndexError on the CPU; on CUDA it stops the
            kernel, and with it the process's use of the GPU, as torch's own assertion does: see
            ``check_target``.
        weight: ``[classes]``, of the dtype of ``logits`` or float32 beside a half precision; ones
            when it is None. It gets no gradient.
        ignore_index: the target class of rows that count for nothing.
        reduction: none, mean or sum.
        label_smoothing: the share, between 0 and 1, that is spread evenly over the classes.
        z_loss: the factor of ``lse**2``, which keeps logits from drifting.
        dtype: of the loss; that of ``logits`` when it is None, but float32 for a half precision
            under autocast, which leaves the logits as they are.
        check_target: whether to look at the target before anything else and name the first value
            that is no class. It waits for the GPU.
        inplace_backward: whether backward writes the gradient over the memory of ``logits``, whose
            rows must be of adjacent classes. What made the logits must not need them in its own
            backward - a linear layer does not - and any later use of them in autograd is an error.
            A backward that is differentiated again is refused. Under torch.compile and torch.func
            the gradient gets memory of its own.
    """
    return torch.ops.torchkiln.cross_entropy.default(
        logits,
        target,
        weight=weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        dtype=dtype,
        check_target=check_target,
        inplace_backward=inplace_backward,
    )
