#pragma once

// Torch's rules for elementwise operands: broadcasting, dtype promotion, CPU scalars together with
// CUDA tensors, and the layout of the result.

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <ATen/native/TypeProperties.h>

#include <string>

#include "torchkiln/torch/checks.h"
#include "torchkiln/torch/note.h"

namespace torchkiln {

/// Whether a tensor is a 0-dimensional CPU tensor, for example a number that torch wrapped.
inline bool is_cpu_scalar(const at::Tensor& tensor) { return tensor.dim() == 0 && tensor.is_cpu(); }

namespace detail {
template <class Word>
std::string join(Operands operands, const char* last, const Word& word) {
  std::string text;
  size_t i = 0;
  for (const Operand& operand : operands) {
    if (i > 0) text += i + 1 == operands.size() ? last : ", ";
    text += word(operand);
    ++i;
  }
  return text;
}
}  // namespace detail

/// Checks that the operands are strided and, except for CPU scalars, on one device.
inline void check_devices(const char* op, Operands operands) {
  for (const Operand& operand : operands) check_tensor(op, operand.name, operand.tensor);
  const Operand* first = operands.begin();
  for (const Operand& operand : operands) {
    // A CPU scalar may be combined with CUDA or meta tensors.
    if (operand.tensor.device() == first->tensor.device()) continue;
    if (is_cpu_scalar(operand.tensor) && !first->tensor.is_cpu()) continue;
    if (is_cpu_scalar(first->tensor) && !operand.tensor.is_cpu()) {
      first = &operand;
      continue;
    }
    check_same_device(op, operand.name, operand.tensor, first->name, first->tensor);
  }
}

/// The state of torch's dtype promotion after these operands.
inline at::native::ResultTypeState promotion_state(Operands operands) {
  at::native::ResultTypeState state;
  for (const Operand& operand : operands)
    state = at::native::update_result_type_state(operand.tensor, state);
  return state;
}

/// Checks that the promoted dtype of the operands, `dtype`, is supported.
inline void check_promoted(const char* op, Operands operands, at::ScalarType dtype) {
  TORCH_CHECK(is_supported_dtype(dtype), "torchkiln.", op, ": ",
              detail::join(operands, ", ", [](const Operand& o) { return std::string(o.name); }),
              ": got dtypes ",
              detail::join(operands, " and ",
                           [](const Operand& o) { return dtype_name(o.tensor.scalar_type()); }),
              ", which promote to ", dtype_name(dtype), ", expected ", kSupportedDtypes);
}

/// Checks devices and dtypes. Returns the promoted dtype.
inline at::ScalarType check_promotion(const char* op, Operands operands) {
  check_devices(op, operands);
  const at::ScalarType dtype = at::native::result_type(promotion_state(operands));
  check_promoted(op, operands, dtype);
  return dtype;
}

/// Checks that shapes broadcast. Returns the broadcast shape.
inline c10::SymDimVector check_broadcast(const char* op, Operands operands) {
  c10::SymDimVector shape(operands.begin()->tensor.sym_sizes());
  std::string before = operands.begin()->name;
  for (const Operand* operand = operands.begin() + 1; operand != operands.end(); ++operand) {
    const c10::SymIntArrayRef other = operand->tensor.sym_sizes();
    if (!other.equals(shape)) {
      const size_t common = std::min(shape.size(), other.size());
      for (size_t d = 1; d <= common; ++d) {
        const c10::SymInt& left = shape[shape.size() - d];
        const c10::SymInt& right = other[other.size() - d];
        TORCH_CHECK(left == right || left == 1 || right == 1, "torchkiln.", op, ": ", operand->name,
                    ": got shape ", other, ", expected one that broadcasts with ", before,
                    " of shape ", c10::SymIntArrayRef(shape));
      }
      shape = at::infer_size_symdimvector(shape, other);
    }
    before += std::string(" and ") + operand->name;
  }
  return shape;
}

/// Checks the shapes of operands and returns the uninitialised output. As in torch's elementwise
/// ops, it has the strides of the first operand that is dense and has the output's shape.
inline at::Tensor broadcast_output(const char* op, Operands operands, at::ScalarType dtype) {
  const c10::SymDimVector shape = check_broadcast(op, operands);
  const at::Tensor* placed = &operands.begin()->tensor;
  for (const Operand& operand : operands)
    if (is_cpu_scalar(*placed)) placed = &operand.tensor;
  const at::TensorOptions options = placed->options().dtype(dtype);
  for (const Operand& operand : operands) {
    const at::Tensor& tensor = operand.tensor;
    if (tensor.sym_sizes().equals(shape) && tensor.is_non_overlapping_and_dense())
      return at::empty_like(tensor, options);
  }
  return at::empty_symint(shape, options);
}

/// An operand on the output's device, in a dtype that kernels support; other dtypes are cast to the
/// compute dtype. A CPU scalar goes through at::full(), which passes it as a kernel argument and
/// does not synchronise.
inline at::Tensor readable(const at::Tensor& input, const at::Tensor& out) {
  const at::ScalarType compute = compute_dtype(out.scalar_type());
  if (input.device() != out.device())
    return at::full({}, input.item(), out.options().dtype(compute));
  if (is_supported_dtype(input.scalar_type())) return input;
  trace::note("cast: no kernel reads ", dtype_name(input.scalar_type()));
  return input.to(compute);
}

}  // namespace torchkiln
