// A program that computes launch plans for GPUs that the machine need not have. g++ compiles it
// without CUDA.
//
// It reads lines of `rows columns` or `rows columns op`, and writes a line per plan: the call, the
// fields of Launch and the GPU, separated by tabs. Each family has a file here with a Family
// object, which writes the plans of its choose.h; main() in plans.cpp calls all of them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "torchkiln/core/dtype.h"
#include "torchkiln/device/alignment.h"
#include "torchkiln/device/device.h"

namespace torchkiln::plans {

/// A GPU: the properties that choices read, and the limits of their plans.
struct Gpu {
  const char* name;
  device::Device device;
  int shared_of_multiprocessor;
  int threads_of_multiprocessor;
};

/// A launch, with the limits that its kernel is compiled for.
struct Launch {
  std::string kernel;
  std::string why;
  int64_t blocks_x = 1;
  int64_t blocks_y = 1;
  int threads = 1;
  int most_threads = 1;        // threads in __launch_bounds__
  int per_multiprocessor = 1;  // blocks in __launch_bounds__
  int cluster = 1;
  int shared_bytes = 0;  // dynamic, static, and reserved by the system
  bool cooperative = false;
};

/// The op has no kernel for the call; it is composed of other ops.
inline Launch composed() { return {"other ops", "No plan applies: the op is composed of others."}; }

/// A call of a family. float16 has the plans of bfloat16.
struct Call {
  int64_t rows;
  int64_t columns;
  Dtype dtype;
  device::Alignment alignment;
};

/// Calls of a shape in every dtype and alignment. Aligned rows are rounded up to whole vectors,
/// rows with an offset have an odd number of columns.
std::vector<Call> calls(int64_t rows, int64_t columns);

/// calls() for kernels of channels, whose vectors have 8 elements in every dtype. Aligned rows and
/// planes are whole vectors. Equal offsets have the plans of different offsets.
std::vector<Call> channel_calls(int64_t rows, int64_t columns);

/// Blocks per SM, at most `blocks`: the shared memory of GPUs before 9.0 may hold fewer blocks than
/// the launch bounds allow.
int resident_blocks(const Gpu& gpu, int blocks, int shared_bytes);

/// A 16-byte aligned address, for tensors whose address is all that a plan reads.
inline void* address() { return reinterpret_cast<void*>(uintptr_t{1} << 20); }

/// Writes a plan. `op`: the op or its gradient. `operands`: the tensors of the call, as text.
void write(const Gpu& gpu, const Call& call, const std::string& op, const std::string& operands,
           const Launch& launch);

/// Registers the function that writes the plans of a family.
struct Family {
  using Write = void (*)(const Gpu&, int64_t rows, int64_t columns);
  explicit Family(Write write) { all().push_back(write); }
  static std::vector<Write>& all();
};

}  // namespace torchkiln::plans
