#include "torch_binding.h"

#include <torch/csrc/stable/library.h>

#include "registration.h"

// The namespace is another one for each build, so that several versions can be loaded together.
STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def("OPNAME_forward(Tensor x) -> Tensor");
  ops.def("OPNAME_backward(Tensor grad, Tensor x) -> Tensor");
}

#if defined(CPU_KERNEL)
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) {
#elif defined(CUDA_KERNEL)
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) {
#endif
  ops.impl("OPNAME_forward", TORCH_BOX(&OPNAME_forward));
  ops.impl("OPNAME_backward", TORCH_BOX(&OPNAME_backward));
}

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
