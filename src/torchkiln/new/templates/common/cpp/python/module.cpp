// The eager fast path: a Python call straight into the C++ dispatcher, half the host time of
// torch.ops. Loading the module registers the operator.

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "PACKAGE/ops.h"

#ifdef TORCHKILN_WITH_CUDA
constexpr bool kHasCuda = true;
#else
constexpr bool kHasCuda = false;
#endif

PYBIND11_MODULE(_C, module) {
  module.attr("has_cuda") = kHasCuda;
  module.def("OPNAME", torch::wrap_pybind_function_no_gil(PACKAGE::OPNAME));
}
