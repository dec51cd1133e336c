"""Faults of kernels for rows, channels and products, all of them mistakes that are easily made."""

from __future__ import annotations

from fault import Fault

NORM = "cuda/ops/norm"
BATCH_NORM = "cuda/ops/batch_norm"
GROUP_NORM = "cuda/ops/group_norm"
ROWWISE = "cuda/detail/rowwise"
BY_DTYPE = "cuda/by_dtype"
"""The folder in the build folder where CMake writes these files."""

NORMS = (
    Fault(
        *("distances from a centre of each lane", "cuda", f"{NORM}/forward_by_dtype.cuh"),
        "center = __shfl_sync(~0u, near, 0, lanes);",
        "center = near;",
        *("layer_norm", "values@bfloat16", f"{BY_DTYPE}/norm_forward_by_dtype_bfloat16.cu"),
    ),
    Fault(
        *("rank of a block in its cluster forgotten", "cuda", f"{ROWWISE}/team.cuh"),
        "block_ * warps() + warp, team_warps()",
        "warp, team_warps()",
        *("layer_norm", "values@float32", f"{BY_DTYPE}/norm_forward_by_dtype_float32.cu"),
    ),
    Fault(
        *("lanes outside of the row counted", "cuda", f"{NORM}/forward_slabs.cu"),
        "count[0] += has(k, l) ? 1 : 0;",
        "count[0] += 1;",
        *("layer_norm", "test_norm_slabs.py::test_norms"),
    ),
    Fault(
        *("sign of a term of merged moments", "cuda", f"{NORM}/forward_moments.cuh"),
        "from_b * (b[0] * from_b - C(2) * b[3])",
        "from_b * (b[0] * from_b + C(2) * b[3])",
        *("layer_norm", "test_norm_rows.py::test_long_rows", f"{NORM}/forward_split.cu"),
    ),
    Fault(
        *("sums of another team of the block", "cuda", f"{NORM}/backward_bulk.cu"),
        "slots[value][team * warps + lane % kLanes]",
        "slots[value][lane % kLanes]",
        *("layer_norm", "test_norm_rows.py::test_gradients_of_aligned_rows"),
    ),
    Fault(
        *("two stages of the ring share memory", "cuda", f"{NORM}/slab_ring.cuh"),
        "(at.stage * kTensors + tensor)",
        "(at.stage * (kTensors - 1) + tensor)",
        *("layer_norm", "test_norm_slabs.py::test_gradients", f"{NORM}/backward_slabs.cu"),
    ),
    Fault(
        *("partial sum not initialised", "cuda", f"{NORM}/backward_split_columns.cuh"),
        "C sum = is_first ? C(0) : to[at];",
        "C sum = is_first && plan.teams == 1 ? C(0) : to[at];",
        *("layer_norm", "gradient_values@float64", f"{NORM}/backward_split.cu"),
    ),
    Fault(
        *("last element of a partial vector cleared", "cuda", f"{ROWWISE}/pipeline.cuh"),
        "if (!access().has(column(k), i)) part",
        "if (!access().has(column(k), i + 1)) part",
        *("layer_norm", "gradient_values@float32", f"{BY_DTYPE}/norm_backward_by_dtype_float32.cu"),
    ),
)

CHANNELS = (
    Fault(
        *("no barrier of the grid behind the totals", "cuda", f"{BATCH_NORM}/resident.cuh"),
        "    total(channel, static_cast<int>(threadIdx.x) % kWarpLanes);\n  grid.sync();",
        "    total(channel, static_cast<int>(threadIdx.x) % kWarpLanes);",
        *("bn_act", "values@float32 or test_batch_norm_resident.py::test_against_the_truth"),
        f"{BATCH_NORM}/forward_resident.cu",
    ),
    Fault(
        *("second pass begins one stage late", "cuda", f"{BATCH_NORM}/resident.cuh"),
        "(rows_ - 1 - kept_) % kAhead",
        "(rows_ - kept_) % kAhead",
        *("bn_act", "test_batch_norm_resident.py::test_against_the_truth"),
        f"{BATCH_NORM}/backward_resident.cu",
    ),
    Fault(
        *("rows of a block miscounted", "cuda", f"{BATCH_NORM}/channels.cuh"),
        "rest = plan_.rows % step_;",
        "rest = plan_.rows % plan_.threads_y;",
        *("bn_act", "values@float32", f"{BATCH_NORM}/forward_rows.cu"),
    ),
    Fault(
        *("vectors counted, not elements", "cuda", f"{BATCH_NORM}/forward.cuh"),
        "count = reduce_block(count * kLanes);",
        "count = reduce_block(count);",
        *("bn_act", "values@float32", f"{BATCH_NORM}/forward_planes.cu"),
    ),
    Fault(
        *("gradient over images, not pixels", "cuda", f"{BATCH_NORM}/sums.cuh"),
        "static_cast<double>(p.layout.outer) * static_cast<double>(p.layout.inner)",
        "static_cast<double>(p.layout.outer)",
        *("bn_act", "gradient_values@float32", f"{BATCH_NORM}/backward_planes.cu"),
    ),
    Fault(
        *("last step of a reduction left out", "cuda", f"{GROUP_NORM}/backward_planes.cu"),
        "other > 0; other /= 2",
        "other > 1; other /= 2",
        *("group_norm", "gradient_values@float32"),
    ),
    Fault(
        *("eps of a group outside of the root", "cuda", f"{GROUP_NORM}/forward_rows.cu"),
        "1 / sqrt(merged.squares / merged.count + p.eps)",
        "1 / (sqrt(merged.squares / merged.count) + p.eps)",
        *("group_norm", "values@float32 or values@float64"),
    ),
)

LOSSES = (
    Fault(
        *("exponentials keep the maximum of the warp", "cuda", "cuda/ops/softmax/forward.cu"),
        "(kKeeps ? Op::rescaled(C(1), warp_largest_, values[0]) : C(1))",
        "C(1)",
        *("softmax", "values@float32"),
    ),
    Fault(
        *("last partial sum of a column left out", "cuda", "cuda/ops/softmax/strided.cuh"),
        "y < blockDim.y; ++y) result",
        "y + 1 < blockDim.y; ++y) result",
        *("softmax", "values@float32", "cuda/ops/softmax/forward.cu"),
    ),
    Fault(
        *("offset of a row in 32 bits", "cuda", "cuda/ops/cross_entropy/forward_row.cuh"),
        "static_cast<const T*>(p.logits) + row * p.row_stride;",
        "static_cast<const T*>(p.logits) + static_cast<int>(row * p.row_stride);",
        *("cross_entropy", "test_cross_entropy.py::test_more_than_2_to_the_31_elements"),
        "cuda/ops/cross_entropy/forward.cu",
    ),
    Fault(
        *("last logit of a block not copied", "cuda", "cuda/ops/cross_entropy/forward_flat.cuh"),
        "if (whole + thread < rows * classes)",
        "if (whole + thread + 1 < rows * classes)",
        *("cross_entropy", "values@bfloat16 or values@float32"),
        "cuda/ops/cross_entropy/forward.cu",
    ),
    Fault(
        *(
            "target of a vector's second row",
            "cuda",
            "cuda/ops/cross_entropy/backward_flat.cuh",
        ),
        "finish(second, -rest, rest, kLanes)",
        "finish(second, 0, rest, kLanes)",
        *("cross_entropy", "gradient_values@float32", "cuda/ops/cross_entropy/backward.cu"),
    ),
)

PRODUCTS = (
    Fault(
        *("residual of adjacent rows", "cuda", "cuda/detail/gemm/sm90_finish.cuh"),
        "from + int64_t{row_offset} * p.n",
        "from + int64_t{i} * p.n",
        *("linear", "test_matmul.py::test_the_fused_kernel", "cuda/ops/matmul/sm90.cu"),
    ),
    Fault(
        *("last word of a row not copied", "cuda", "cuda/ops/matmul/copy_rows.cu"),
        "first + i * kThreads < words ?",
        "first + i * kThreads + 1 < words ?",
        *("linear", "test_matmul.py::test_rows_that_are_no_multiples_of_16_bytes"),
    ),
    Fault(
        *("first strip of the second multiplier left out", "cuda", "cuda/ops/matmul/sm90_gate.cu"),
        "(finisher + multiplier) % kFinishers",
        "finisher + multiplier",
        *("gated_mlp", "test_mlp.py::test_a_gate_in_the_epilogue"),
    ),
    Fault(
        *("tokens read at the strides of the result", "cuda", "cuda/ops/rope/rope.cu"),
        "token * heads.x_stride[1]",
        "token * heads.y_stride[1]",
        *("rope", "strides@float32"),
    ),
    Fault(
        *("warps add to a sum at the same time", "cuda", "cuda/ops/rope/qkv_backward.cu"),
        "    __syncthreads();\n  }\n  for (int64_t i",
        "  }\n  for (int64_t i",
        *("qkv_norm_rope", "gradient_values@float32"),
    ),
)

KERNELS = NORMS + CHANNELS + LOSSES + PRODUCTS
