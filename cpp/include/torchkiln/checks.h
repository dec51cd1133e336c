#pragma once

// Argument checks. Every message reads "torchkiln.<op>: <argument>: got ..., expected ...": what
// was found, what would have been right, and where it is not obvious, what to do. They work on
// symbolic sizes, so that the Meta kernels refuse what the real ones refuse.

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <string>

namespace torchkiln {

/// The dtype as Python names it: float32, not Float.
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
    default:
      return c10::toString(dtype);
  }
}

inline bool is_supported_dtype(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf ||
         dtype == at::kBFloat16;
}

inline constexpr const char* kSupportedDtypes = "one of float32, float64, float16, bfloat16";

inline void check_dtype(const char* op, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK(is_supported_dtype(tensor.scalar_type()), "torchkiln.", op, ": ", name,
              ": got dtype ", dtype_name(tensor.scalar_type()), ", expected ", kSupportedDtypes);
}

inline void check_strided(const char* op, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK_TYPE(tensor.defined(), "torchkiln.", op, ": ", name,
                   ": got NoneType, expected a torch.Tensor");
  TORCH_CHECK(tensor.layout() == at::kStrided && !tensor.is_nested(), "torchkiln.", op, ": ", name,
              ": got ",
              tensor.is_nested() ? "a nested tensor" : c10::str("layout ", tensor.layout()),
              ", expected Strided; call .to_dense() first");
}

/// Strided, and on a device that has kernels.
inline void check_tensor(const char* op, const char* name, const at::Tensor& tensor) {
  check_strided(op, name, tensor);
#ifdef TORCHKILN_WITH_CUDA
  TORCH_CHECK(tensor.is_cpu() || tensor.is_cuda() || tensor.is_meta(), "torchkiln.", op, ": ", name,
              ": got device ", tensor.device(), ", expected cpu or cuda");
#else
  TORCH_CHECK(!tensor.is_cuda(), "torchkiln.", op, ": ", name, ": got device ", tensor.device(),
              ", expected cpu: this build of torchkiln has no CUDA kernels; build it with "
              "-C torchkiln.cuda=on");
  TORCH_CHECK(tensor.is_cpu() || tensor.is_meta(), "torchkiln.", op, ": ", name, ": got device ",
              tensor.device(), ", expected cpu");
#endif
}

inline void check_same_device(const char* op, const char* name, const at::Tensor& tensor,
                              const char* other_name, const at::Tensor& other) {
  TORCH_CHECK(tensor.device() == other.device(), "torchkiln.", op, ": ", name, ": got device ",
              tensor.device(), ", expected ", other.device(), ", the device of ", other_name);
}

}  // namespace torchkiln
