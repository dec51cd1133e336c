"""Cross-entropy of logits, or of the outputs of a linear layer."""

from typing import Literal, NamedTuple, TypedDict, Unpack, overload

import torch
from torch import Tensor
from torch.utils._pytree import _register_namedtuple

from torchkiln import _C
from torchkiln.ops.eager import eager
from torchkiln.typing import Reduction


class CrossEntropyOutput(NamedTuple):
    """The loss, and the optional results that the call requested."""

    loss: Tensor
    z_loss: Tensor | None
    """The part of the loss that the z-loss adds; None unless requested."""
    accuracy: Tensor | None
    """The accuracy; None unless requested."""


# With this, torch.export can save programs that return the class.
_register_namedtuple(CrossEntropyOutput, serialized_type_name="torchkiln.CrossEntropyOutput")


class LossOptions(TypedDict, total=False):
    """The options that all losses have."""

    ignore_index: int
    reduction: Reduction
    label_smoothing: float
    z_loss: float
    loss_dtype: torch.dtype | None
    check_target: bool
    softcap: float | None


class LogitsOptions(LossOptions, total=False):
    """Options of :func:`cross_entropy`."""

    inplace_backward: bool


class LinearOptions(LossOptions, total=False):
    """Options of :func:`linear_cross_entropy`."""

    linear_bias: Tensor | None
    weight: Tensor | None
    temperature: float


@overload
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    return_z_loss: Literal[False] = False,
    return_accuracy: Literal[False] = False,
    **options: Unpack[LogitsOptions],
) -> Tensor: ...
@overload
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    return_z_loss: Literal[True],
    return_accuracy: bool = False,
    **options: Unpack[LogitsOptions],
) -> CrossEntropyOutput: ...
@overload
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    return_z_loss: bool = False,
    return_accuracy: Literal[True],
    **options: Unpack[LogitsOptions],
) -> CrossEntropyOutput: ...
@overload
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    return_z_loss: bool = False,
    return_accuracy: bool = False,
    **options: Unpack[LogitsOptions],
) -> Tensor | CrossEntropyOutput: ...
@eager(_C.cross_entropy, beside=("return_z_loss", "return_accuracy"), input="logits")
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    loss_dtype: torch.dtype | None = None,
    check_target: bool = False,
    inplace_backward: bool = False,
    softcap: float | None = None,
    return_z_loss: bool = False,
    return_accuracy: bool = False,
) -> Tensor | CrossEntropyOutput:
    """Returns the cross-entropy of ``logits`` and ``target``, per row or reduced.

    The loss of a row is ``sum(q * (lse - logits)) + z_loss * w * lse**2``, with sums over the
    classes and

    - ``lse = log(sum(exp(logits)))``;
    - ``p``: the target probabilities, or 1 at the target class and 0 elsewhere;
    - ``q = weight * ((1 - label_smoothing) * p + label_smoothing / classes)``;
    - ``w``: the weight of the target class, or 1 if the target has probabilities.

    The mean is the sum of the losses divided by the sum of ``w``; ignored rows have ``w = 0``. The
    mean of no rows is NaN.

    The only tensor of the size of ``logits`` that is stored is their gradient: backward computes
    the softmax again from the logits and ``lse``. Half precision is computed in float32.

    Args:
        logits: ``[classes]``, ``[rows, classes]`` or ``[rows, classes, ...]``; float32, float64,
            float16 or bfloat16. If the classes of a row are not adjacent in memory, the call
            copies the logits; backward writes the gradient into this copy.
        target: int64 class indices in the shape of ``logits`` without the classes, or
            probabilities of the shape of ``logits``, which may require a gradient. If the
            probabilities have a wider dtype, the loss has it, too; half precision and float32 are
            read together, without a copy. An index out of range raises an IndexError on the
            CPU. On CUDA it fails an assertion in the kernel, after which the process cannot use the
            GPU; see ``check_target``.
        weight: ``[classes]``, of the dtype of ``logits``, or float32 if that is half precision;
            None for ones. It may not require a gradient.
        ignore_index: rows with this target class have no loss and no gradient.
        reduction: none, mean or sum.
        label_smoothing: the share of the probability, between 0 and 1, that is distributed evenly
            over the classes.
        z_loss: the factor of ``lse**2``, a penalty that keeps the logits small.
        loss_dtype: None for the dtype of ``logits``. Under autocast None is float32 for half
            precision logits, which are not converted.
        check_target: whether to validate the target first and raise an error with the first class
            that is out of range. This waits for the GPU.
        inplace_backward: whether backward writes the gradient into the memory of ``logits``. The
            classes of a row must be adjacent; a leaf that requires a gradient, or a view of one, is
            refused. The op that computed the logits must not read them in its backward (a linear
            layer does not). A later use of the logits in autograd is an error, and so is a second
            derivative. Under torch.func the gradient is a new tensor. Code of TorchInductor writes
            it over logits that nothing reads again, whether this is set or not.
        softcap: a number greater than 0: the loss is that of ``softcap * tanh(logits / softcap)``.
            The capped logits are stored in one more tensor, float32 for half precision.
        return_z_loss: whether to return a :class:`CrossEntropyOutput` with the part of the loss
            that ``z_loss`` adds, reduced as the loss. It has no gradient of its own.
        return_accuracy: whether to return a :class:`CrossEntropyOutput` with the accuracy: 1 for
            each row with no logit above that of the target class, else 0, reduced as the loss; the
            mean is taken over rows that are not ignored. Needs class indices. Neither this result
            nor the z-loss reads the logits again.
    """
    options = {
        "ignore_index": ignore_index,
        "reduction": reduction,
        "label_smoothing": label_smoothing,
        "z_loss": z_loss,
        "loss_dtype": loss_dtype,
        "check_target": check_target,
        "inplace_backward": inplace_backward,
        "softcap": softcap,
    }
    ops, given = torch.ops.torchkiln, (logits, target, weight)
    if not return_z_loss and not return_accuracy:
        return ops.cross_entropy.default(*given, **options)
    loss, z, accuracy = ops._cross_entropy_with_metrics.default(
        *given, **options, accuracy=return_accuracy
    )
    return CrossEntropyOutput(
        loss, z if return_z_loss else None, accuracy if return_accuracy else None
    )


@overload
def linear_cross_entropy(
    x: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    return_z_loss: Literal[False] = False,
    return_accuracy: Literal[False] = False,
    **options: Unpack[LinearOptions],
) -> Tensor: ...
@overload
def linear_cross_entropy(
    x: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    return_z_loss: Literal[True],
    return_accuracy: bool = False,
    **options: Unpack[LinearOptions],
) -> CrossEntropyOutput: ...
@overload
def linear_cross_entropy(
    x: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    return_z_loss: bool = False,
    return_accuracy: Literal[True],
    **options: Unpack[LinearOptions],
) -> CrossEntropyOutput: ...
@overload
def linear_cross_entropy(
    x: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    return_z_loss: bool = False,
    return_accuracy: bool = False,
    **options: Unpack[LinearOptions],
) -> Tensor | CrossEntropyOutput: ...
@eager(_C.linear_cross_entropy, beside=("return_z_loss", "return_accuracy"), input="x")
def linear_cross_entropy(
    x: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    loss_dtype: torch.dtype | None = None,
    check_target: bool = False,
    softcap: float | None = None,
    temperature: float = 1.0,
    return_z_loss: bool = False,
    return_accuracy: bool = False,
) -> Tensor | CrossEntropyOutput:
    """Returns the cross-entropy of a linear layer's outputs, without all logits in memory.

    It is ``cross_entropy(x @ linear_weight.T + linear_bias, target)``; arguments are named as in
    :func:`torch.nn.functional.linear_cross_entropy`.

    Logits are computed for a chunk of rows at a time: as many rows as fit in 1 GiB, at least 2048
    and at most 8192. Forward overwrites the logits with their gradient and computes the gradients
    of ``x`` and of the layer from it, chunk by chunk; backward multiplies these by
    the incoming gradient. So forward costs three products if a gradient is required, else one. The
    host never waits for the GPU.

    Apart from the gradients, memory holds the logits of one chunk. The gradient of
    ``linear_weight`` in half precision is summed over the chunks in float32, which takes twice its
    memory. The sum is rounded to bfloat16 at the end of forward; in float16 it stays float32 until
    backward. On a GPU in bfloat16, up to 8192 rows are one chunk if this takes no more memory than
    a smaller chunk and the float32 sum. A chunk of 1 GiB or more, of up to 8192 rows and a multiple
    of 8 classes, lies partly in the memory of the gradient of ``linear_weight`` until that gradient
    is written. The logits that take memory of their own are then 4/7 of all with twice as many rows
    as features, and 1/3 with equally many. This holds for a mean or a sum without ``softcap`` and
    ``return_accuracy``, but not for float16.

    On a GPU, large half-precision products of classes that are no multiple of 8 need copies of
    ``linear_weight`` and of its gradient, too. Losses per row (``reduction="none"``) keep no
    gradients: their backward computes the logits again. With fewer rows than classes it does so for
    a chunk of classes at a time, which needs a float32 sum of the gradient of ``x`` only. Second
    derivatives, ``torch.func`` and forward mode compute all logits with torch's own ops.

    Args:
        x: ``[..., features]``; float32, float64, float16 or bfloat16.
        linear_weight: ``[classes, features]``; of the dtype of ``x``.
        target: ``[...]``, int64: the class of each row.
        linear_bias: ``[classes]``; of the dtype of ``x``, or float32 if ``x`` has half precision.
        weight: ``[classes]``: a factor for each class; a dtype as for ``linear_bias``. It has no
            gradient.
        ignore_index: rows with this target have no loss and no gradient, and do not count in the
            mean.
        reduction: none, mean or sum. The mean is the sum of the losses divided by the sum of
            ``weight`` at the targets.
        label_smoothing: the share of the probability that is distributed evenly over the classes.
        z_loss: the factor of ``log(sum(exp(logits)))**2``, which is added to the loss of each row.
        loss_dtype: None for the dtype of ``x``. Under autocast None is float32 for half precision.
        check_target: whether to validate the target first and raise an error with the first class
            that is out of range. This waits for the GPU.
        softcap: a number greater than 0: the loss is that of ``softcap * tanh(logits / softcap)``.
            Chunks then have fewer rows, because the softcap needs two more tensors per chunk.
        temperature: a number greater than 0 that divides the logits, after the softcap and before
            the z-loss. Without a softcap the quotients are rounded to the dtype of ``x`` and must
            fit in its range. torch.compile makes a graph for each value.
        return_z_loss: as for :func:`cross_entropy`.
        return_accuracy: as for :func:`cross_entropy`.
    """
    options = {
        "linear_bias": linear_bias,
        "weight": weight,
        "ignore_index": ignore_index,
        "reduction": reduction,
        "label_smoothing": label_smoothing,
        "z_loss": z_loss,
        "loss_dtype": loss_dtype,
        "check_target": check_target,
        "softcap": softcap,
        "temperature": temperature,
    }
    ops, given = torch.ops.torchkiln, (x, linear_weight, target)
    if not return_z_loss and not return_accuracy:
        return ops.linear_cross_entropy.default(*given, **options)
    loss, z, accuracy = ops._linear_cross_entropy_with_metrics.default(
        *given, **options, accuracy=return_accuracy
    )
    return CrossEntropyOutput(
        loss, z if return_z_loss else None, accuracy if return_accuracy else None
    )
