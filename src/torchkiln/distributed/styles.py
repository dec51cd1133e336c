"""Parallel styles of torch for modules with several inputs and outputs."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import style

Layouts = tuple[Placement, ...]


def distributed(value: Any, mesh: DeviceMesh, placements: Layouts) -> Any:
    """A DTensor with these placements; values that are no tensors are returned unchanged.

    A plain tensor is taken as the local part of such a DTensor.
    """
    if isinstance(value, DTensor):
        is_there = value.placements == placements
        return value if is_there else value.redistribute(placements=placements, async_op=True)
    if isinstance(value, Tensor):
        return DTensor.from_local(value, mesh, placements, run_check=False)
    return value


class SequenceParallel(style.SequenceParallel):
    """:class:`torch.distributed.tensor.parallel.SequenceParallel` for all inputs and outputs.

    Every tensor that is passed by position is sharded in ``sequence_dim``, and so is each output.
    Use it for modules with a residual, such as :class:`torchkiln.nn.AddRMSNorm` and
    :class:`torchkiln.nn.DropoutAdd`. Torch's style takes the first input only.
    """

    @staticmethod
    def _prepare_input_fn(
        sequence_sharding: Layouts, _mod: nn.Module, inputs: Any, device_mesh: DeviceMesh
    ) -> tuple[Any, ...]:
        return tuple(distributed(value, device_mesh, sequence_sharding) for value in inputs)

    @staticmethod
    def _prepare_output_fn(
        use_local_output: bool, _mod: nn.Module, outputs: Any, _mesh: DeviceMesh
    ) -> Any:
        if not use_local_output:
            return outputs
        if isinstance(outputs, tuple):
            return tuple(y.to_local() if isinstance(y, DTensor) else y for y in outputs)
        return outputs.to_local()


class ColwiseParallel(style.ColwiseParallel):
    """:class:`torch.distributed.tensor.parallel.ColwiseParallel` with a residual.

    The residual of :class:`torchkiln.nn.Linear` is sharded in the last dimension, like the product.
    Torch's style would drop the residual.
    """

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Layouts,
        desired_input_layouts: Layouts,
        _mod: nn.Module,
        inputs: Any,
        device_mesh: DeviceMesh,
    ) -> tuple[Any, ...]:
        given = distributed_input(input_layouts, desired_input_layouts, inputs, device_mesh)
        columns = (Shard(inputs[0].ndim - 1),)
        return given, *(distributed(value, device_mesh, columns) for value in inputs[1:])


class RowwiseParallel(style.RowwiseParallel):
    """:class:`torch.distributed.tensor.parallel.RowwiseParallel` with a residual.

    The residual of :class:`torchkiln.nn.Linear` is equal on all devices. An activation is refused,
    because each device has only a part of the sum to which it applies.
    """

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Layouts,
        desired_input_layouts: Layouts,
        _mod: nn.Module,
        inputs: Any,
        device_mesh: DeviceMesh,
    ) -> tuple[Any, ...]:
        given = distributed_input(input_layouts, desired_input_layouts, inputs, device_mesh)
        return given, *(distributed(value, device_mesh, (Replicate(),)) for value in inputs[1:])

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        act = getattr(module, "act", "none")
        if act != "none":
            raise ValueError(
                f"torchkiln.distributed.RowwiseParallel: got a layer with act={act!r}, expected "
                "'none': each device has a part of the sum; use ColwiseParallel, or apply the "
                "activation after the layer"
            )
        return super()._apply(module, device_mesh)


def distributed_input(layouts: Layouts, desired: Layouts, inputs: Any, mesh: DeviceMesh) -> Any:
    """The first input of a layer in the desired layout; a plain tensor has ``layouts`` already."""
    given = inputs[0]
    if not isinstance(given, DTensor):
        given = distributed(given, mesh, layouts)
    return given if layouts == desired else given.redistribute(placements=desired, async_op=True)
