// The Python module _C. Loading it registers the ops with torch.

#include "PACKAGE/torch/ops.h"
#include "torchkiln/torch/bind.h"

#ifdef TORCHKILN_WITH_CUDA
constexpr bool kHasCuda = true;
#else
constexpr bool kHasCuda = false;
#endif

PYBIND11_MODULE(_C, module, py::mod_gil_not_used()) {
  module.attr("has_cuda") = kHasCuda;
  // A bound function checks the types of its arguments and calls the dispatcher, in half the host
  // time of torch.ops.
  const torchkiln::Binder ops(module);
  ops.bind<&PACKAGE::OPNAME>("OPNAME", {ARGUMENTS});
}
