#pragma once

// Runs a kernel on the device of a tensor.
//
//     launch("my_op", x, x.numel(), 1 << 15,
//            [&](auto stream) { return my_cuda_kernel(arguments, stream); },
//            [&](int64_t begin, int64_t end) { return my_cpu_kernel(arguments, begin, end); });

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include "torchkiln/core/status.h"
#include "torchkiln/core/workspace.h"
#include "torchkiln/torch/torch_cuda.h"
#include "torchkiln/torch/workspace.h"

namespace torchkiln {

inline void check_status(const char* op, Status status) {
  TORCH_CHECK(status.ok(), TORCHKILN_PACKAGE ".", op, ": ", status.error);
}

/// For a CUDA tensor, calls on_cuda(stream) with the device's current stream. For a CPU tensor,
/// calls on_cpu(begin, end) on torch's threads for ranges of at least `grain` that cover
/// [0, count). Both return a Status. on_cuda must be a generic lambda, because a build without CUDA
/// must not instantiate it.
template <class OnCuda, class OnCpu>
void launch(const char* op, const at::Tensor& where, int64_t count, int64_t grain,
            const OnCuda& on_cuda, const OnCpu& on_cpu) {
#ifdef TORCHKILN_WITH_CUDA
  if (where.is_cuda()) {
    torch_cuda().on_stream(where.device(),
                           [&](CUstream_st* stream) { check_status(op, on_cuda(stream)); });
    return;
  }
#else
  (void)where, (void)on_cuda;
#endif
  at::parallel_for(0, count, grain,
                   [&](int64_t begin, int64_t end) { check_status(op, on_cpu(begin, end)); });
}

/// launch() for kernels that need temporary memory: on_cuda(allocate, stream) allocates it by
/// allocate(bytes), from torch's allocator.
template <class OnCuda, class OnCpu>
void launch_allocating(const char* op, const at::Tensor& where, int64_t count, int64_t grain,
                       const OnCuda& on_cuda, const OnCpu& on_cpu) {
  c10::SmallVector<Workspace, 4> memory;  // freed once the kernels are queued
  const auto allocate = [&](size_t bytes) {
    return memory.emplace_back(where.device(), bytes).data();
  };
  launch(
      op, where, count, grain, [&](auto stream) { return on_cuda(Allocate(allocate), stream); },
      on_cpu);
}

/// launch_allocating() for kernels that sum over rows. On the CPU, split(problem) returns the
/// number of tasks and the size of the workspace. problem.workspace is set to memory of that size.
/// Then on_cpu(problem, begin, end) runs over the tasks, and finish(problem, begin, end) over the
/// results, in ranges of at least `grain`.
template <class Problem, class OnCuda, class OnCpu, class Finish>
void launch_split(const char* op, const at::Tensor& where, Problem& problem, int64_t grain,
                  cpu::Split (*split)(const Problem&), const OnCuda& on_cuda, const OnCpu& on_cpu,
                  const Finish& finish) {
  cpu::Split cut{};
  Workspace memory;
  if (where.is_cpu()) {
    cut = split(problem);
    memory = Workspace(where.device(), cut.workspace_bytes);
    problem.workspace = memory.data();
  }
  launch_allocating(op, where, cut.tasks, 1, on_cuda,
                    [&](int64_t begin, int64_t end) { return on_cpu(problem, begin, end); });
  if (cut.results == 0) return;
  at::parallel_for(0, cut.results, grain, [&](int64_t begin, int64_t end) {
    check_status(op, finish(problem, begin, end));
  });
}

}  // namespace torchkiln
