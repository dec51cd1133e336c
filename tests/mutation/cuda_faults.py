"""Faults of kernels for elementwise ops and sums, and of launches."""

from __future__ import annotations

from fault import Fault

ACCESS = "cuda/include/torchkiln/device/elementwise_access.cuh"
COLUMNS = "cuda/detail/reduce/columns.cuh"
CUDA_OF_TORCH = "cpp/ops/cuda_bridge.cpp"

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
        *(
            "sum",
            "every_element_is_written@float32 or values@float32",
            "cuda/ops/reduction/reduction.cu",
        ),
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
