#pragma once

// Argument checks. Every message reads "<package>.<op>: <argument>: got ..., expected ...", and
// adds the remedy where it is not obvious. The package is TORCHKILN_PACKAGE. Checks work on
// symbolic sizes, so that Meta kernels reject the same calls as CPU and CUDA kernels.
//
//     check_tensors("my_op", {{"x", x}, {"weight", weight}});  // strided, all on the device of x
//     check_dtype("my_op", "x", x);
//     check_size("my_op", "weight", weight, 0, x.sym_size(-1), "the last dimension of x");

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <initializer_list>
#include <string>

#include "torchkiln/core/status.h"

namespace torchkiln {

/// The name of a dtype in Python: float32, not Float.
inline std::string dtype_name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return "float32";
    case at::kDouble:
      return "float64";
    case at::kHalf:
      return "float16";
    case at::kBFloat16:
      return "bfloat16";
    case at::kBool:
      return "bool";
    case at::kByte:
      return "uint8";
    case at::kChar:
      return "int8";
    case at::kShort:
      return "int16";
    case at::kInt:
      return "int32";
    case at::kLong:
      return "int64";
    case at::kComplexHalf:
      return "complex32";
    case at::kComplexFloat:
      return "complex64";
    case at::kComplexDouble:
      return "complex128";
    case at::kFloat8_e4m3fn:
      return "float8_e4m3fn";
    default:
      return c10::toString(dtype);
  }
}

inline bool is_half(at::ScalarType dtype) { return dtype == at::kHalf || dtype == at::kBFloat16; }

inline bool is_supported_dtype(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || is_half(dtype);
}

/// The dtype in which an op computes: float64 for float64, otherwise float32.
inline at::ScalarType compute_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

inline constexpr const char* kSupportedDtypes = "one of float32, float64, float16, bfloat16";

inline void check_dtype(const char* op, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK(is_supported_dtype(tensor.scalar_type()), TORCHKILN_PACKAGE ".", op, ": ", name,
              ": got dtype ", dtype_name(tensor.scalar_type()), ", expected ", kSupportedDtypes);
}

inline void check_strided(const char* op, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK_TYPE(tensor.defined(), TORCHKILN_PACKAGE ".", op, ": ", name,
                   ": got NoneType, expected a torch.Tensor");
  TORCH_CHECK(tensor.layout() == at::kStrided && !tensor.is_nested(), TORCHKILN_PACKAGE ".", op,
              ": ", name, ": got ",
              tensor.is_nested() ? "a nested tensor" : c10::str("layout ", tensor.layout()),
              ", expected Strided; call .to_dense() first");
}

/// Checks that a tensor is strided and on a device that has kernels.
inline void check_tensor(const char* op, const char* name, const at::Tensor& tensor) {
  check_strided(op, name, tensor);
#ifdef TORCHKILN_WITH_CUDA
  TORCH_CHECK(tensor.is_cpu() || tensor.is_cuda() || tensor.is_meta(), TORCHKILN_PACKAGE ".", op,
              ": ", name, ": got device ", tensor.device(), ", expected cpu or cuda");
#else
  TORCH_CHECK(!tensor.is_cuda(), TORCHKILN_PACKAGE ".", op, ": ", name, ": got device ",
              tensor.device(),
              ", expected cpu: this build of " TORCHKILN_PACKAGE
              " has no CUDA kernels; build it with "
              "-C torchkiln.cuda=on");
  TORCH_CHECK(tensor.is_cpu() || tensor.is_meta(), TORCHKILN_PACKAGE ".", op, ": ", name,
              ": got device ", tensor.device(), ", expected cpu");
#endif
}

inline void check_same_device(const char* op, const char* name, const at::Tensor& tensor,
                              const char* other_name, const at::Tensor& other) {
  TORCH_CHECK(tensor.device() == other.device(), TORCHKILN_PACKAGE ".", op, ": ", name,
              ": got device ", tensor.device(), ", expected ", other.device(), ", the device of ",
              other_name);
}

inline void check_same_dtype(const char* op, const char* name, const at::Tensor& tensor,
                             const char* other_name, const at::Tensor& other) {
  TORCH_CHECK(tensor.scalar_type() == other.scalar_type(), TORCHKILN_PACKAGE ".", op, ": ", name,
              ": got dtype ", dtype_name(tensor.scalar_type()), ", expected ",
              dtype_name(other.scalar_type()), ", the dtype of ", other_name);
}

/// Whether a weight or bias may have this dtype: that of x, or float32 if x has half precision.
/// `name_of_x` names the argument whose dtype is `dtype`.
inline bool is_parameter_dtype(at::ScalarType parameter, at::ScalarType dtype) {
  return parameter == dtype || (is_half(dtype) && parameter == at::kFloat);
}
inline void check_parameter_dtype(const char* op, const char* name, at::ScalarType parameter,
                                  const char* name_of_x, at::ScalarType dtype) {
  TORCH_CHECK(is_parameter_dtype(parameter, dtype), TORCHKILN_PACKAGE ".", op, ": ", name,
              ": got dtype ", dtype_name(parameter), ", expected ", dtype_name(dtype),
              ", the dtype of ", name_of_x, is_half(dtype) ? ", or float32" : "");
}

inline void check_same_shape(const char* op, const char* name, const at::Tensor& tensor,
                             const char* other_name, const at::Tensor& other) {
  TORCH_CHECK(tensor.sym_sizes().equals(other.sym_sizes()), TORCHKILN_PACKAGE ".", op, ": ", name,
              ": got shape ", tensor.sym_sizes(), ", expected ", other.sym_sizes(),
              ", the shape of ", other_name);
}

/// Checks that a tensor has the device, dtype and shape of x.
inline void check_like(const char* op, const char* name, const at::Tensor& tensor,
                       const char* name_of_x, const at::Tensor& x) {
  check_tensor(op, name, tensor);
  check_same_device(op, name, tensor, name_of_x, x);
  check_same_dtype(op, name, tensor, name_of_x, x);
  check_same_shape(op, name, tensor, name_of_x, x);
}

/// Whether one dtype is half precision and the other float32. Some kernels read both together.
inline bool is_mixed(at::ScalarType a, at::ScalarType b) {
  return (is_half(a) && b == at::kFloat) || (a == at::kFloat && is_half(b));
}

/// check_like(), except that is_mixed() dtypes are allowed, too.
inline void check_like_or_mixed(const char* op, const char* name, const at::Tensor& tensor,
                                const char* name_of_x, const at::Tensor& x) {
  check_tensor(op, name, tensor);
  check_same_device(op, name, tensor, name_of_x, x);
  if (!is_mixed(tensor.scalar_type(), x.scalar_type()))
    check_same_dtype(op, name, tensor, name_of_x, x);
  check_same_shape(op, name, tensor, name_of_x, x);
}

/// Checks that a tensor has `least` to `most` dimensions. `what` lists the dimensions, as "[rows,
/// columns]".
inline void check_rank(const char* op, const char* name, const at::Tensor& tensor, int64_t least,
                       int64_t most, const char* what) {
  TORCH_CHECK(least <= tensor.dim() && tensor.dim() <= most, TORCHKILN_PACKAGE ".", op, ": ", name,
              ": got shape ", tensor.sym_sizes(), ", expected ", what);
}

/// Checks the size of dimension `dim`, which may be negative; `what` describes the size.
inline void check_size(const char* op, const char* name, const at::Tensor& tensor, int64_t dim,
                       const c10::SymInt& size, const char* what) {
  TORCH_CHECK(tensor.sym_size(dim) == size, TORCHKILN_PACKAGE ".", op, ": ", name, ": got size ",
              tensor.sym_size(dim), " in dimension ", dim < 0 ? dim + tensor.dim() : dim,
              " of shape ", tensor.sym_sizes(), ", expected ", size, ", ", what);
}

/// Checks that a tensor has at least 1 dimension.
inline void check_not_0_dim(const char* op, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.dim() >= 1, TORCHKILN_PACKAGE ".", op, ": ", name,
              ": got a 0-dimensional tensor, expected at least 1 dimension");
}

/// Checks that a tensor has the shape [size]; `what` describes the size.
inline void check_vector(const char* op, const char* name, const at::Tensor& tensor,
                         const c10::SymInt& size, const char* what) {
  TORCH_CHECK(tensor.dim() == 1 && tensor.sym_size(0) == size, TORCHKILN_PACKAGE ".", op, ": ",
              name, ": got shape ", tensor.sym_sizes(), ", expected [", size, "], ", what);
}

/// Checks a dimension, which may be negative, and returns it counted from the front. A
/// 0-dimensional tensor accepts 0 and -1.
inline int64_t check_dim(const char* op, const char* name, const at::Tensor& tensor, int64_t dim) {
  const int64_t rank = tensor.dim();
  const int64_t range = rank > 0 ? rank : 1;
  TORCH_CHECK_INDEX(-range <= dim && dim < range, TORCHKILN_PACKAGE ".", op, ": dim: got ", dim,
                    ", expected a number from ", -range, " to ", range - 1, ": ", name, " has ",
                    rank, " dimensions");
  return dim < 0 ? dim + range : dim;
}

/// Checks that a tensor is contiguous, for kernels that do not read strides.
inline void check_contiguous(const char* op, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.is_contiguous(), TORCHKILN_PACKAGE ".", op, ": ", name, ": got strides ",
              tensor.sym_strides(), " of shape ", tensor.sym_sizes(),
              ", expected a contiguous tensor; call .contiguous() first");
}

/// A tensor argument and its name in error messages.
struct Operand {
  const char* name;
  const at::Tensor& tensor;
};
using Operands = std::initializer_list<Operand>;

/// Checks that all tensors are strided and on one device that has kernels.
inline void check_tensors(const char* op, Operands operands) {
  for (const Operand& operand : operands) {
    check_tensor(op, operand.name, operand.tensor);
    check_same_device(op, operand.name, operand.tensor, operands.begin()->name,
                      operands.begin()->tensor);
  }
}

}  // namespace torchkiln
