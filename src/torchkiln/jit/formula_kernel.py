"""The kernel of a formula: compiled for each combination of dtypes and layout, and launched."""

from __future__ import annotations

import struct
import threading
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchkiln.jit.call.layout import layout
from torchkiln.jit.compile import driver
from torchkiln.jit.formula.source import THREADS, kernel_source
from torchkiln.jit.module import Module

if TYPE_CHECKING:
    from collections.abc import Sequence


class FormulaKernel:
    """An elementwise kernel from inputs and numbers to one or more outputs.

    Args:
        names: the input tensors.
        numbers: the numbers.
        body: C++ as :func:`torchkiln.jit.formula.source.kernel_source` takes it.
        preamble: C++ before the body.
        path: the file of the preamble, for its includes and for messages.
    """

    def __init__(
        self,
        names: Sequence[str],
        numbers: Sequence[str],
        body: str,
        *,
        preamble: str = "",
        path: str = "formula.cu",
    ) -> None:
        self.names = tuple(names)
        self.numbers = tuple(numbers)
        self.body = body
        self.preamble = preamble
        self.path = path
        self._modules: dict[object, Module] = {}
        self._lock = threading.Lock()

    def module(self, dtypes: Sequence[torch.dtype], lanes: int, reaches: Sequence[str]) -> Module:
        """The compiled kernel for these operands, the outputs first."""
        key = (tuple(dtypes), lanes, tuple(reaches))
        with self._lock:
            if key not in self._modules:
                source = kernel_source(
                    self.names,
                    self.numbers,
                    self.body,
                    dtypes=dtypes,
                    lanes=lanes,
                    reaches=reaches,
                    preamble=self.preamble,
                )
                self._modules[key] = Module(source, self.path)
            return self._modules[key]

    def launch(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], numbers: Sequence[float]
    ) -> None:
        """Computes the outputs on the current stream.

        Args:
            outputs: dense tensors of the shape that the inputs broadcast to.
            inputs: one tensor for each name.
            numbers: the values of the numbers.
        """
        shape = outputs[0].shape
        if outputs[0].numel() == 0:
            return
        expanded = [t.expand(shape) for t in inputs]
        found = layout(shape, (*outputs, *expanded))
        if found is None:
            expanded = [t.contiguous() for t in expanded]
            found = layout(shape, (*outputs, *expanded))
            assert found is not None  # dense operands merge into one dimension
        dtypes = [t.dtype for t in (*outputs, *inputs)]
        kernel = self.module(dtypes, found.lanes, found.reaches)["formula"]
        kind = "d" if torch.float64 in dtypes else "f"
        packed = struct.pack(f"<{len(numbers)}{kind}", *numbers) if numbers else bytes(8)
        with driver.on_device(outputs[0].get_device()):
            kernel[found.blocks, THREADS](found.space, packed)
