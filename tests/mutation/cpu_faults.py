"""Faults of the operators and of their CPU kernels."""

from __future__ import annotations

from fault import Fault

ELEMENTWISE = "cpp/include/torchkiln/cpu/elementwise.h"
LAUNCH = "cpp/include/torchkiln/torch/launch.h"
FUNCTORS = "cuda/include/torchkiln/core/functors.h"

CPU = (
    Fault(
        *("rows begin one element late", "cpu", ELEMENTWISE),
        "move(layout, d, -rows * layout.size[d]);",
        "move(layout, d, 1 - rows * layout.size[d]);",
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
        "  if (chunk_sum != nullptr) std::fill_n(chunk_sum + left, right - left, 0.0);\n",
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
        "return empty_of(shape, x.options().dtype(result_dtype(x, call.dtype)));",
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
