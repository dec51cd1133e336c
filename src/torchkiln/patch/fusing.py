"""``torchkiln.fuse``: convolution, batch norm, residual sum and activation as one call."""

from __future__ import annotations

from torch import nn

from torchkiln.patch.finding import Skip, is_skipped
from torchkiln.patch.graph import batch_norm
from torchkiln.patch.replacing import swap
from torchkiln.patch.report import Report

MAKER = "torchkiln.fuse"


def fuse(
    model: nn.Module, *, skip: Skip = (), recompute: bool = False, dry_run: bool = False
) -> Report:
    """Makes one call of each convolution, batch norm, residual sum and activation, in place.

    The forward of every module that has a ``torch.nn.BatchNorm1d``, ``2d`` or ``3d``, or a
    ``SyncBatchNorm`` is traced. If an activation follows the batch norm, with or without a sum and
    identities between them, the module gets a subclass of its class, whose forward calls
    :func:`torchkiln.bn_act`. An activation is a function of torch, or a module without parameters
    that computes one. If a convolution of torch precedes the batch norm, with or without an
    activation after it, the forward calls :func:`torchkiln.conv_bn_act`: in eval mode without
    gradients the batch norm is folded into the convolution; otherwise the convolution runs
    unchanged, then ``bn_act``. A :class:`torch.nn.MaxPool2d` after the activation becomes part of
    the call: in training in ``channels_last`` on a GPU, one kernel computes both, and no tensor
    between them is stored. Parameters, names, ``state_dict``, running statistics, process groups
    and memory formats stay; copies, pickles and ``torch.compile`` work. ``report.undo()`` restores
    all modules.

    A batch norm may be of a class derived from ``BatchNorm1d``, ``2d`` or ``3d`` whose forward runs
    torch's batch norm and then calls submodules, such as ``BatchNormAct2d`` of timm. This is proven
    from the code of the class, and a later change of the class is noticed.

    A trace contains the branches that the forward takes now. A module whose forward depends on
    ``training`` or on values, or has optional arguments, is left alone; the report has the reason.
    A batch norm or a convolution with hooks is not fused, and runs the hooks.

    ``torchkiln.replace`` includes this for batch norms on a GPU.

    Args:
        model: any module.
        skip: patterns of names of batch norms to leave alone, or a function of name and module.
        recompute: whether to save memory in training: a result that only another fused convolution
            reads is not kept for backward. Backward computes the same bits again from the tensors
            that the batch norm keeps. Under ``torch.compile`` the compiler decides what to keep.
        dry_run: whether to return the report without a change.
    """
    rows, plans = batch_norm.find_all(
        model,
        lambda name, child: "skip" if is_skipped(name, child, skip) else "",
        recompute=recompute,
    )
    undo = [] if dry_run else [swap(MAKER, module, plan) for module, plan in plans]
    return Report(MAKER, model, rows, undo, dry_run=dry_run)
