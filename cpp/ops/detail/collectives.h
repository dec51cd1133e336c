#pragma once

// Collectives of a process group, which is given by its name in torch.distributed. They are calls
// of torch's own ops on the current stream, so that modes see them, and the host does not wait for
// a GPU. They are called from C++, because one call in Python takes as long as all other host work
// of a small op.

#include <ATen/ATen.h>
#include <torch/version.h>

#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

// Weak, because a torch without torch.distributed does not have this function.
namespace c10d {
__attribute__((weak)) c10::intrusive_ptr<ProcessGroup> resolve_process_group(
    const std::string& group_name);
}  // namespace c10d

namespace torchkiln {

/// The process group with this name.
inline c10::intrusive_ptr<c10d::ProcessGroup> group_of(const std::string& name) {
  TORCH_CHECK(c10d::resolve_process_group != nullptr, "torchkiln: group: got ", name,
              ", expected a torch that is built with torch.distributed");
  return c10d::resolve_process_group(name);
}

/// Gathers one contiguous tensor from each process: [processes, numel].
inline at::Tensor gathered(at::Tensor own, const std::string& group) {
  const auto processes = group_of(group);
  const int64_t count = processes->getSize();
  at::Tensor every = at::empty_symint({count * own.sym_numel()}, own.options());
  c10d::AllgatherOptions options;
  options.asyncOp = false;
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13
  const auto work = processes->_allgather_base(every, own, options);
#else
  const auto work = processes->all_gather_single(every, own, options);
#endif
  if (work) work->wait();
  return every.view_symint({count, own.sym_numel()});
}

/// Replaces a tensor by its sum over all processes.
inline void add_over_processes(const at::Tensor& own, const std::string& group) {
  std::vector<at::Tensor> tensors{own};
  c10d::AllreduceOptions options;
  options.asyncOp = false;
  const auto work = group_of(group)->allreduce(tensors, options);
  if (work) work->wait();
}

}  // namespace torchkiln
