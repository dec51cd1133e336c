"""CUDA C++ of an elementwise kernel for a formula, given dtypes and layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

CUDA_TYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "__half",
    torch.bfloat16: "__nv_bfloat16",
}
THREADS = 256
"""Threads per block: kThreads of jit_elementwise.cuh."""

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


def kernel_source(
    names: Sequence[str],
    numbers: Sequence[str],
    body: str,
    *,
    dtypes: Sequence[torch.dtype],
    lanes: int,
    reaches: Sequence[str],
    preamble: str = "",
) -> str:
    """The source of kernel ``formula`` for operands of given dtypes and layout.

    Args:
        names: the input tensors.
        numbers: the numbers.
        body: C++ that assigns result0_, result1_, ... of type C. Names of inputs and numbers end
            with an underscore.
        dtypes: the dtype of each operand: the outputs, then the inputs.
        lanes: elements per vector.
        reaches: how each operand is read; see :func:`torchkiln.jit.call.layout.reach`.
        preamble: C++ before the body's struct.
    """
    count, inputs = len(dtypes), len(names)
    outputs = count - inputs
    is_double = torch.float64 in dtypes
    all_half = all(dtype.itemsize == 2 for dtype in dtypes[:outputs])
    parameters = [f"C {name}_" for name in names]
    parameters += [f"C& result{k}_" for k in range(outputs)]
    operands = [
        f"using Operand{k} = ts::Operand<{CUDA_TYPES[dtype]}, ts::Reach::{reach}>;"
        for k, (dtype, reach) in enumerate(zip(dtypes, reaches, strict=True))
    ]
    fetches = [
        f"ts::fetch<Operand{k}, kLanes>(space.data[{k}], offset[u][{k}], valid[u],"
        f" in[{k - outputs}][u]);"
        for k in range(outputs, count)
    ]
    stores = [
        f"ts::leave<Operand{k}, kLanes>(space.data[{k}], offset[u][{k}], valid[u], out[{k}]);"
        for k in range(outputs)
    ]
    call = [f"in[{k}][u][i]" for k in range(inputs)] + [f"out[{k}][i]" for k in range(outputs)]
    return SOURCE.format(
        compute="double" if is_double else "float",
        math="FastMath" if all_half and not is_double else "ExactMath",
        preamble=preamble,
        members=" ".join(f"C {name}_;" for name in numbers),
        parameters=", ".join(parameters),
        body=body,
        operands="\n".join(operands),
        count=count,
        lanes=lanes,
        inputs=inputs,
        outputs=outputs,
        fetches="\n    ".join(fetches),
        call=", ".join(call),
        stores="\n    ".join(stores),
    )
