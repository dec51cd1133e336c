"""The planted faults: the replaced text, the file to compile again, the tests that must fail."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """One change to a copy of the sources."""

    name: str
    device: str
    """Devices needed to detect it: cpu, cuda, or 2 x cuda."""
    file: str
    old: str
    new: str
    op: str
    checks: str
    """Checks of that op's contract of which one at least has to fail, `or` between them; `@dtype`
    where one will do."""
    unit: str = ""
    """The source file that is compiled again; none for Python, the file itself where it is one."""
    tests: str = "tests/contract/test_contract.py"
    times: int = 1
    """Number of occurrences of the old text, all of which are replaced."""


ELEMENTWISE = "cpp/include/torchkiln/cpu/elementwise.h"
ACCESS = "cuda/include/torchkiln/device/elementwise_access.cuh"
COLUMNS = "cuda/detail/reduce/columns.cuh"
LAUNCH = "cpp/include/torchkiln/torch/launch.h"
CUDA_OF_TORCH = "cpp/ops/cuda_bridge.cpp"
FUNCTORS = "cuda/include/torchkiln/core/functors.h"

CPU = (
    Fault(
        *("rows begin one element late", "cpu", ELEMENTWISE),
        "move(layout, d, -layout.size[d]);",
        "move(layout, d, 1 - layout.size[d]);",
        *("add", "strides@float32", "cpp/cpu/pointwise.cpp"),
    ),
    Fault(
        *("last element of a thread left out", "cpu", LAUNCH),
        "check_status(op, on_cpu(begin, end));",
        "check_status(op, on_cpu(begin, begin > 0 ? end - 1 : end));",
        *("add", "determinism@float32", "cpp/ops/pointwise.cpp"),
    ),
    Fault(
        *("result in the dtype of the first argument", "cpu", "cpp/ops/pointwise.cpp"),
        """broadcast_output("add", operands, check_promotion("add", operands));""",
        """check_promotion("add", operands),
        broadcast_output("add", operands, a.scalar_type());""",
        *("add", "mixed_dtypes@float16"),
    ),
    Fault(
        *("bfloat16 cut off instead of rounded", "cpu", "cpp/include/torchkiln/cpu/half.h"),
        "const uint32_t rounded = (bits + 0x7fffu + (high & 1u)) >> 16;",
        "const uint32_t rounded = high;",
        *("add", "rounded_to_nearest@bfloat16", "cpp/cpu/pointwise.cpp"),
    ),
    Fault(
        *(
            "dimensions merged that do not run evenly",
            "cpu",
            "cuda/include/torchkiln/core/layout.h",
        ),
        "merges = dim.stride[k] == layout.stride[k][inner] * layout.size[inner];",
        "merges = dim.stride[k] >= layout.stride[k][inner] * layout.size[inner];",
        *("add", "strides@float32", "cpp/ops/pointwise.cpp"),
    ),
    Fault(
        *("broadcast size read as a row", "cpu", "cpp/include/torchkiln/torch/elementwise.h"),
        "at < 0 || inputs[k].size(at) == 1 ? 0 : inputs[k].stride(at)",
        "at < 0 ? 0 : inputs[k].stride(at)",
        *("add", "values@bfloat16", "cpp/ops/pointwise.cpp"),
    ),
    Fault(
        *("relu loses NaN", "cpu", "cuda/include/torchkiln/core/activations.h"),
        "return z <= C(0) ? C(0) : z;",
        "return z > C(0) ? z : C(0);",
        *("relu", "not_finite@float32", "cpp/cpu/activation.cpp"),
    ),
    Fault(
        *("gradients of a and b exchanged", "cpu", FUNCTORS),
        "return {grad * b, grad * a};",
        "return {grad * a, grad * b};",
        *("muladd", "gradient_values@float32", "cpp/cpu/pointwise.cpp"),
    ),
    Fault(
        *("gradient of the gate for up", "cpu", FUNCTORS),
        "grad * Act::template value<Math>(gate)};",
        "grad * Act::template gradient<Math>(up, gate)};",
        *("swiglu", "gradient_values@float32", "cpp/cpu/gated.cpp"),
    ),
    Fault(
        *("workspace not cleared", "cpu", "cpp/cpu/bias_act.cpp"),
        "  if (chunk_sum != nullptr) std::fill_n(chunk_sum, p.columns, 0.0);\n",
        "",
        *("bias_act", "every_element_is_written@float32", "cpp/cpu/bias_act.cpp"),
    ),
    Fault(
        *("wrong bit of the mask in backward", "cpu", "cpp/cpu/detail/bitmask.h"),
        "return static_cast<C>(signs[(at + i) / 8] >> ((at + i) % 8) & 1);",
        "return static_cast<C>(signs[(at + i) / 8] >> ((at + i + 1) % 8) & 1);",
        *("bias_act", "gradient_values@float32", "cpp/cpu/bias_act.cpp"),
    ),
    Fault(
        *("backward keeps its workspace", "cpu", LAUNCH),
        "  Workspace memory;\n",
        "  Workspace& memory = *new Workspace;\n",
        *("bias_act", "no_memory_growth", "cpp/ops/bias_act.cpp"),
    ),
    Fault(
        *("scale forgotten in the second order", "cpu", "cpp/ops/bias_act.cpp"),
        "if (in.wants(0)) grad_x = (passed * scale).to(grad.scalar_type());",
        "if (in.wants(0)) grad_x = (passed * (scale - scale + 1)).to(grad.scalar_type());",
        *("bias_act", "gradients_that_are_recorded@float32"),
    ),
    Fault(
        *("subclasses not looked for", "cpu", "cpp/include/torchkiln/torch/bind.h"),
        "return _PyType_Lookup(type, name) != nullptr;",
        "return argument == nullptr;",
        *("bias_act", "subclasses", "cpp/python/module.cpp"),
    ),
    Fault(
        *("last rows of columns left out", "cpu", "cpp/cpu/reduction.cpp"),
        "for (; r < end; ++r) {",
        "for (; r + 1 < end; ++r) {",
        *("sum", "values@float32"),
    ),
    Fault(
        *("strides of a batch exchanged", "cpu", "cpp/cpu/reduction.cpp"),
        "offset += p.outer_stride - p.inner * p.inner_stride;",
        "offset += p.inner_stride - p.inner * p.outer_stride;",
        *("sum", "values@float32"),
    ),
    Fault(
        *("the output forgets the dtype", "cpu", "cpp/ops/reduction/reduction.cpp"),
        "return empty_of(shape, x.options().dtype(result_dtype(x, dtype)));",
        "return empty_of(shape, x.options());",
        *("sum", "values@float32 or meta_and_fake"),
    ),
    Fault(
        *("a dimension named twice is taken", "cpu", "cpp/ops/reduction/reduction.cpp"),
        "TORCH_CHECK(!named[at],",
        "TORCH_CHECK(true,",
        *("sum", "bad_input"),
    ),
    Fault(
        *("lanes past the end of a row counted", "cpu", "cpp/cpu/norm/forward.cpp"),
        "within<C>(load_lanes(block + i, span) - center, span);",
        "(load_lanes(block + i, span) - center);",
        *("layer_norm", "values@float32"),
    ),
    Fault(
        *("eps outside of the root", "cpu", "cpp/cpu/norm/forward.cpp"),
        "std::sqrt(squares / static_cast<double>(p.columns) + p.eps));",
        "(std::sqrt(squares / static_cast<double>(p.columns)) + p.eps));",
        *("layer_norm", "values@float32"),
    ),
    Fault(
        *("causal mask one short", "cpu", "cpp/cpu/detail/row_mask.h"),
        "std::min(length_, row_ % mask_.queries + 1);",
        "std::min(length_, row_ % mask_.queries);",
        *("softmax", "values@float32", "cpp/cpu/softmax/forward.cpp"),
    ),
    Fault(
        *("random numbers of another place", "cpu", "cpp/cpu/dropout.cpp"),
        "std::copy_n(all + at % 8, count, factor);",
        "std::copy_n(all, count, factor);",
        *("dropout_add", "strides@float32"),
    ),
)

CUDA = (
    Fault(
        *("tail dropped", "cuda", ACCESS),
        "if (at + i < numel) out[i] = convert<Out>(result[i]);",
        "if (at + i + 1 < numel) out[i] = convert<Out>(result[i]);",
        *("add", "values@bfloat16", "cuda/ops/pointwise.cu"),
    ),
    Fault(
        *(
            "last block taken for a full one",
            "cuda",
            "cuda/include/torchkiln/device/elementwise.cuh",
        ),
        "if ((int64_t{blockIdx.x} + 1) * Access::kBlockElements <= numel)",
        "if (int64_t{blockIdx.x} * Access::kBlockElements <= numel)",
        *("add", "around_the_outputs", "cuda/ops/pointwise.cu"),
    ),
    Fault(
        *("32-bit index", "cuda", ACCESS),
        "return blockIdx.x * kBlockElements + (threadIdx.x + u * kThreads) * kLanes;",
        "return static_cast<int>(blockIdx.x * kBlockElements + (threadIdx.x + u * kThreads) * "
        "kLanes);",
        *("add", "more_than_2_to_the_31_elements", "cuda/ops/pointwise.cu"),
        times=2,
    ),
    Fault(
        *(
            "strides of another operand",
            "cuda",
            "cuda/include/torchkiln/device/elementwise_any.cuh",
        ),
        "offset[k] += index * layout.stride[k][d];",
        "offset[k] += index * layout.stride[0][d];",
        *("add", "strides@float32", "cuda/ops/pointwise.cu"),
    ),
    Fault(
        *("stream ignored", "cuda", CUDA_OF_TORCH),
        "c10::cuda::getCurrentCUDAStream(device.index())",
        "c10::cuda::getDefaultCUDAStream(device.index())",
        *("add", "side_stream@float32", CUDA_OF_TORCH),
    ),
    Fault(
        *("device guard missing", "2 x cuda", CUDA_OF_TORCH),
        "const c10::cuda::CUDAGuard guard(device);",
        "",
        *("add", "other_current_device", CUDA_OF_TORCH),
    ),
    Fault(
        *("host waits for the device", "cuda", CUDA_OF_TORCH),
        "const c10::cuda::CUDAGuard guard(device);",
        "const c10::cuda::CUDAGuard guard(device);\n  cudaDeviceSynchronize();",
        *("add", "no_synchronisation", CUDA_OF_TORCH),
    ),
    Fault(
        *("racy sum of a block", "cuda", COLUMNS),
        "shared[i * kThreads + threadIdx.x] = sum[i];\n    __syncthreads();",
        "shared[i * kThreads + threadIdx.x] = sum[i];",
        *("sum", "values@float32 or determinism@float32", "cuda/ops/reduction/reduction.cu"),
    ),
    Fault(
        *("second kernel does not wait for the first", "cuda", COLUMNS),
        "  double sum = 0;\n  wait_for_previous_kernel();\n",
        "  double sum = 0;\n",
        *("sum", "every_element_is_written@float32 or values@float32", "cuda/ops/reduction/reduction.cu"),
    ),
    Fault(
        *("output never written", "cuda", COLUMNS),
        "if (!status.ok() || plan.is_single_pass()) return status;",
        "if (status.ok() || plan.is_single_pass()) return status;",
        *("sum", "every_element_is_written@float32", "cuda/ops/reduction/reduction.cu"),
    ),
    Fault(
        *("tail of a row left out", "cuda", "cuda/detail/reduce/row_loads.cuh"),
        "if (team - 1 - rank < length - tail) edge +=",
        "if (team - 1 - rank < length - tail - 1) edge +=",
        *("sum", "values@float32", "cuda/ops/reduction/reduction.cu"),
    ),
    Fault(
        *("wrong bits of the mask in backward", "cuda", "cuda/ops/bias_act/backward.cuh"),
        "return signs[at / 8] >> (at % 8);",
        "return signs[at / 8] >> (at % 4);",
        *("bias_act", "gradient_values@float32", "cuda/ops/bias_act/backward.cu"),
    ),
    Fault(
        *("other random numbers in backward", "cuda", "cuda/ops/dropout/bias_backward.cu"),
        "const Mask<Lanes> mask(problem.dropout, random, at);",
        "const Mask<Lanes> mask(problem.dropout, random, at + 8);",
        *("bias_dropout_add", "gradient_values@float32"),
    ),
)

FAULTS = CPU + CUDA
