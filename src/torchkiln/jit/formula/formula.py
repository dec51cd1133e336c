"""Kernels of formulas: their source for given types and layouts, and their launch."""

from __future__ import annotations

import struct
import threading
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchkiln.jit.call.layout import layout
from torchkiln.jit.compile import driver
from torchkiln.jit.module import Module

if TYPE_CHECKING:
    from collections.abc import Sequence

CUDA_TYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "__half",
    torch.bfloat16: "__nv_bfloat16",
}

SOURCE = """#include <torchkiln/device/jit_elementwise.cuh>

using C = {compute};
using Math = ::torchkiln::{math};
{preamble}
struct Formula {{
  {members}
  __device__ __forceinline__ void operator()({parameters}) const {{
    {body}
  }}
}};

namespace ts = ::torchkiln::device::jit_elementwise;
{operands}

extern "C" __global__ void __launch_bounds__(ts::kThreads)
    formula(const __grid_constant__ ts::Space<{count}> space, const Formula numbers) {{
  constexpr int kLanes = {lanes};
  int64_t offset[ts::kUnroll][{count}];
  int valid[ts::kUnroll];
  C in[{inputs}][ts::kUnroll][kLanes];
#pragma unroll
  for (int u = 0; u < ts::kUnroll; ++u) {{
    const int64_t at = (int64_t{{blockIdx.x}} * ts::kUnroll + u) * ts::kThreads + threadIdx.x;
    valid[u] = 0;
    if (at >= space.count) continue;
    int64_t innermost = 0;
    space.locate(at, offset[u], innermost);
    const int64_t rest = space.elements - innermost * kLanes;
    valid[u] = rest < kLanes ? static_cast<int>(rest) : kLanes;
    {fetches}
  }}
#pragma unroll
  for (int u = 0; u < ts::kUnroll; ++u) {{
    if (valid[u] == 0) continue;
    C out[{outputs}][kLanes];
#pragma unroll
    for (int i = 0; i < kLanes; ++i) numbers({call});
    {stores}
  }}
}}
"""


class Formula:
    """Some outputs of some inputs, element by element.

    Args:
        names: what the body calls the inputs, each with an underscore behind it.
        numbers: the same of numbers.
        body: C++ that assigns result0_, result1_, ... of type C.
        outputs: how many there are.
        preamble: C++ before it.
        path: where the preamble was read, for its includes and for messages.
    """

    def __init__(
        self,
        names: Sequence[str],
        numbers: Sequence[str],
        body: str,
        *,
        outputs: int = 1,
        preamble: str = "",
        path: str = "formula.cu",
    ) -> None:
        self.names = tuple(names)
        self.numbers = tuple(numbers)
        self.body = body
        self.outputs = outputs
        self.preamble = preamble
        self.path = path
        self._modules: dict[object, Module] = {}
        self._lock = threading.Lock()

    def source(
        self, dtypes: Sequence[torch.dtype], lanes: int, reaches: Sequence[str], math: str
    ) -> str:
        """The source for operands of these dtypes, the outputs first."""
        compute = "double" if torch.float64 in dtypes else "float"
        out, count = self.outputs, len(dtypes)
        parameters = [f"C {name}_" for name in self.names]
        parameters += [f"C& result{k}_" for k in range(out)]
        pairs = enumerate(zip(dtypes, reaches, strict=True))
        operands = [
            f"using Operand{k} = ts::Operand<{CUDA_TYPES[dtype]}, ts::Reach::{reach}>;"
            for k, (dtype, reach) in pairs
        ]
        fetches = [
            f"ts::fetch<Operand{k}, kLanes>(space.data[{k}], offset[u][{k}], valid[u],"
            f" in[{k - out}][u]);"
            for k in range(out, count)
        ]
        stores = [
            f"ts::leave<Operand{k}, kLanes>(space.data[{k}], offset[u][{k}], valid[u], out[{k}]);"
            for k in range(out)
        ]
        call = [f"in[{k}][u][i]" for k in range(len(self.names))]
        return SOURCE.format(
            compute=compute,
            math=math,
            preamble=self.preamble,
            members=" ".join(f"C {name}_;" for name in self.numbers),
            parameters=", ".join(parameters),
            body=self.body,
            operands="\n".join(operands),
            count=count,
            lanes=lanes,
            inputs=len(self.names),
            outputs=out,
            fetches="\n    ".join(fetches),
            call=", ".join([*call, *(f"out[{k}][i]" for k in range(out))]),
            stores="\n    ".join(stores),
        )

    def module(self, dtypes: Sequence[torch.dtype], lanes: int, reaches: Sequence[str]) -> Module:
        """The kernel for operands of these dtypes."""
        key = (tuple(dtypes), lanes, tuple(reaches))
        with self._lock:
            if key not in self._modules:
                half = all(dtype.itemsize == 2 for dtype in dtypes[: self.outputs])
                math = "FastMath" if half and torch.float64 not in dtypes else "ExactMath"
                source = self.source(dtypes, lanes, reaches, math)
                self._modules[key] = Module(source, self.path)
            return self._modules[key]

    def launch(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], numbers: Sequence[float]
    ) -> None:
        """Writes the outputs, which are dense and of the shape that the inputs broadcast to."""
        shape = outputs[0].shape
        if outputs[0].numel() == 0:
            return
        expanded = [t.expand(shape) for t in inputs]
        found = layout(shape, (*outputs, *expanded))
        if found is None:
            expanded = [t.contiguous() for t in expanded]
            found = layout(shape, (*outputs, *expanded))
            assert found is not None  # dense operands have one dimension
        dtypes = [t.dtype for t in (*outputs, *inputs)]
        module = self.module(dtypes, found.lanes, found.reaches)
        kind = "d" if torch.float64 in dtypes else "f"
        packed = struct.pack(f"<{len(numbers)}{kind}", *numbers) if numbers else bytes(8)
        with driver.on_device(outputs[0].get_device()):
            module.formula[found.blocks, 256](found.space, packed)
