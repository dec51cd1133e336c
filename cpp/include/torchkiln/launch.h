#pragma once

// From a tensor to a launch: one function that runs a kernel where the tensor lives.
//
//     launch("my_op", x, x.numel(), 1 << 15,
//            [&](auto stream) { return my_cuda_kernel(arguments, stream); },
//            [&](int64_t begin, int64_t end) { return my_cpu_kernel(arguments, begin, end); });

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include "torchkiln/cuda.h"
#include "torchkiln/status.h"

namespace torchkiln {

inline void check_status(const char* op, Status status) {
  TORCH_CHECK(status.ok(), TORCHKILN_PACKAGE ".", op, ": ", status.error);
}

/// Calls on_cuda(stream), on the tensor's device and its current stream, or on_cpu(begin, end) over
/// [0, count) in pieces of at least `grain` on torch's threads. Both return a Status. on_cuda must
/// be a generic lambda: in a build without CUDA it is never instantiated.
template <class OnCuda, class OnCpu>
void launch(const char* op, const at::Tensor& where, int64_t count, int64_t grain,
            const OnCuda& on_cuda, const OnCpu& on_cpu) {
#ifdef TORCHKILN_WITH_CUDA
  if (where.is_cuda()) {
    cuda_of_torch().on_stream(where.device(),
                              [&](CUstream_st* stream) { check_status(op, on_cuda(stream)); });
    return;
  }
#else
  (void)where, (void)on_cuda;
#endif
  at::parallel_for(0, count, grain,
                   [&](int64_t begin, int64_t end) { check_status(op, on_cpu(begin, end)); });
}

}  // namespace torchkiln
