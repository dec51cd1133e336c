#pragma once

// Fills the argument struct of elementwise kernels from tensors.

#include <ATen/ATen.h>

#include <array>

#include "torchkiln/core/layout.h"
#include "torchkiln/torch/launch.h"
#include "torchkiln/torch/note.h"

namespace torchkiln {

/// Fewest elements per CPU thread. With fewer, starting a thread takes longer than its work.
inline constexpr int64_t kElementwiseGrain = 1 << 15;

inline Dtype dtype_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return Dtype::float64;
    case at::kHalf:
      return Dtype::float16;
    case at::kBFloat16:
      return Dtype::bfloat16;
    default:
      return Dtype::float32;
  }
}
inline Dtype dtype_of(const at::Tensor& tensor) { return dtype_of(tensor.scalar_type()); }

/// Describes outputs = f(inputs), for outputs of one shape and inputs that broadcast to it. Inputs
/// whose strides do not fit in the struct are copied; `inputs` then owns the copies.
template <size_t Inputs, size_t Outputs>
Elementwise<Inputs, Outputs> describe(const std::array<at::Tensor, Outputs>& outputs,
                                      std::array<at::Tensor, Inputs>& inputs) {
  constexpr int kInputs = static_cast<int>(Inputs);
  constexpr int kOutputs = static_cast<int>(Outputs);
  Elementwise<kInputs, kOutputs> arguments{};
  const at::Tensor& out = outputs[0];
  const int rank = static_cast<int>(out.dim());
  c10::SmallVector<Dimension<kInputs, kOutputs>, 8> dims(rank);
  for (int d = 0; d < rank; ++d) {
    const int from = rank - 1 - d;  // innermost first
    dims[d].size = out.size(from);
    for (int o = 0; o < kOutputs; ++o) dims[d].out_stride[o] = outputs[o].stride(from);
    for (int k = 0; k < kInputs; ++k) {
      const int at = from - (rank - static_cast<int>(inputs[k].dim()));
      dims[d].stride[k] = at < 0 || inputs[k].size(at) == 1 ? 0 : inputs[k].stride(at);
    }
  }
  if (!make_layout(dims.data(), rank, arguments.layout)) {
    trace::note("inputs copied: their strides leave more dimensions than the kernels count");
    for (at::Tensor& input : inputs) input = at::empty_like(out, input.options()).copy_(input);
    return describe(outputs, inputs);
  }
  arguments.dtype = dtype_of(out);
  for (int o = 0; o < kOutputs; ++o) arguments.out[o] = outputs[o].data_ptr();
  for (int k = 0; k < kInputs; ++k) {
    arguments.in[k] = inputs[k].const_data_ptr();
    arguments.in_dtype[k] = dtype_of(inputs[k]);
  }
  return arguments;
}

/// Describes outputs = f(inputs) and runs on_cuda(arguments, stream) or on_cpu(arguments, begin,
/// end) over the elements.
///
///     launch_elementwise("add", std::array{out}, std::array{a, b},
///         [](const auto& p, auto stream) { return cuda::add(p, stream); }, cpu::add);
template <size_t Inputs, size_t Outputs, class OnCuda, class OnCpu>
void launch_elementwise(const char* op, const std::array<at::Tensor, Outputs>& outputs,
                        std::array<at::Tensor, Inputs> inputs, const OnCuda& on_cuda,
                        const OnCpu& on_cpu) {
  const at::Tensor& out = outputs[0];
  if (out.numel() == 0) return;
  const auto arguments = describe(outputs, inputs);
  launch(
      op, out, out.numel(), kElementwiseGrain,
      [&](auto stream) { return on_cuda(arguments, stream); },
      [&](int64_t begin, int64_t end) { return on_cpu(arguments, begin, end); });
}

}  // namespace torchkiln
