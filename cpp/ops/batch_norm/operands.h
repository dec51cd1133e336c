#pragma once

// Tensors in the form that the kernels of batch norm read and write.

#include "batch_norm/batch_norm.h"
#include "detail/contiguous_copy.h"
#include "detail/maybe_copy.h"
#include "torchkiln/torch/elementwise.h"
#include "torchkiln/torch/empty.h"
#include "torchkiln/torch/launch.h"

namespace torchkiln::batch_norm_ops {

/// Elements per unit of work on the CPU. With 64, threads never share a byte of the signs.
inline constexpr int64_t kUnit = 64;
/// Units per task of a thread.
inline constexpr int64_t kGrain = kElementwiseGrain / kUnit;

/// x with its channels as the last dimension.
inline Tensor with_channels_last(const Tensor& x) { return x.movedim(1, -1); }

/// An uninitialised dense tensor of x's shape, with adjacent channels if `channels_last`.
inline Tensor empty_in_channel_layout(const Tensor& x, bool channels_last) {
  if (!channels_last) return empty_contiguous(x);
  c10::SymDimVector strides(static_cast<size_t>(x.dim()), 1);
  c10::SymInt next = x.sym_size(1);
  for (int64_t d = x.dim() - 1; d >= 0; --d) {
    if (d == 1) continue;
    strides[static_cast<size_t>(d)] = next;
    next = next * x.sym_size(d);
  }
  return at::empty_strided_symint(x.sym_sizes(), strides, x.options());
}

/// An input for kernels: the tensor itself if its memory has the layout, else a copy.
inline MaybeCopy in_layout(const char* name, const Tensor& tensor, bool channels_last) {
  const bool fits =
      channels_last ? with_channels_last(tensor).is_contiguous() : tensor.is_contiguous();
  if (fits) return MaybeCopy::borrowed(tensor);
  trace::note("copied: ", name, " has strides ", tensor.strides(), ", expected ",
              channels_last ? "adjacent channels, the layout of x" : "a contiguous tensor");
  Tensor copy = empty_in_channel_layout(tensor, channels_last);
  copy_elements(copy, tensor);
  return MaybeCopy::owned(std::move(copy));
}

inline MaybeCopy in_layout(const char* name, const MaybeTensor& tensor, bool channels_last) {
  return tensor ? in_layout(name, *tensor, channels_last) : MaybeCopy::owned(Tensor());
}

/// x for a kernel of gradients, in the memory order that x had in forward, because the signs have
/// that order. Hooks may have saved x in another order.
inline MaybeCopy in_order_of_signs(const Tensor& x, const Tensor& signs, bool channels_last) {
  if (!signs.defined() || channels_are_last(x) == channels_last) return MaybeCopy::borrowed(x);
  return MaybeCopy::owned(std::in_place, empty_in_channel_layout(x, channels_last).copy_(x));
}

/// The layout of x for kernels. A single channel is one plane of all elements.
inline ChannelLayout layout_of(const Tensor& x, bool channels_last) {
  const int64_t channels = x.size(1);
  const int64_t count = x.numel() / std::max<int64_t>(channels, 1);
  if (channels_last) return {count, channels, 1};
  if (channels == 1) return {1, 1, count};
  return {x.size(0), channels, count / x.size(0)};
}

/// The address of an output; null if it is empty, because it is not wanted.
inline void* output(const Tensor& tensor) {
  return tensor.numel() == 0 ? nullptr : tensor.data_ptr();
}

inline RunningStatistic running(const MaybeTensor& tensor) {
  if (!tensor) return {nullptr, 0};
  return {const_cast<void*>(tensor->const_data_ptr()), tensor->stride(0)};
}

/// The dense tensors that forward and backward read, with the layout of x.
class Operands {
 public:
  Operands(const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias,
           const MaybeTensor& residual)
      : channels_last_(channels_are_last(x)),
        layout_(layout_of(x, channels_last_)),
        x_(in_layout("x", x, channels_last_)),
        residual_(in_layout("residual", residual, channels_last_)),
        weight_(contiguous(weight)),
        bias_(contiguous(bias)) {}

  bool channels_last() const { return channels_last_; }

  /// Sets the inputs of a problem, their dtypes and their layout.
  template <class Problem>
  void fill(Problem& problem) const {
    problem.x = x_->const_data_ptr();
    problem.residual = data(*residual_);
    problem.weight = data(weight_);
    problem.bias = data(bias_);
    problem.dtype = dtype_of(*x_);
    problem.parameter_dtype = dtype_of(weight_.defined() ? weight_ : bias_.defined() ? bias_ : *x_);
    problem.layout = layout_;
  }

 private:
  bool channels_last_;
  ChannelLayout layout_;
  MaybeCopy x_;
  MaybeCopy residual_;
  Tensor weight_;
  Tensor bias_;
};

/// Runs a CPU kernel over all elements of a problem.
template <class Kernel>
void for_each_element(const char* name, const Tensor& x, const Kernel& kernel) {
  const int64_t numel = x.numel();
  at::parallel_for(0, (numel + kUnit - 1) / kUnit, kGrain, [&](int64_t begin, int64_t end) {
    check_status(name, kernel(begin * kUnit, std::min(end * kUnit, numel)));
  });
}

/// Calls launch() with a GPU kernel and a CPU kernel over all elements of a problem.
template <class OnCuda, class OnCpu>
void launch_elements(const char* name, const Tensor& x, const OnCuda& on_cuda,
                     const OnCpu& on_cpu) {
  const int64_t numel = x.numel();
  launch(name, x, (numel + kUnit - 1) / kUnit, kGrain, on_cuda, [&](int64_t begin, int64_t end) {
    return on_cpu(begin * kUnit, std::min(end * kUnit, numel));
  });
}

}  // namespace torchkiln::batch_norm_ops
