// Plans of all families for GPUs that are not there: a program that g++ compiles without CUDA.
//
// It reads a shape per line, `rows columns`, perhaps with the op that is asked for, and writes a
// line per plan: the call, the fields of Launch and the GPU, separated by tabs. A family has a file
// here, with a Family object that writes the plans of its choose.h; main() in plans.cpp calls all
// of them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "torchkiln/core/dtype.h"
#include "torchkiln/device/alignment.h"
#include "torchkiln/device/device.h"

namespace torchkiln::plans {

/// A GPU: what choices read, and what their plans have to fit in.
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
  int most_threads = 1;        // of __launch_bounds__
  int per_multiprocessor = 1;  // blocks, of __launch_bounds__
  int cluster = 1;
  int shared_bytes = 0;  // dynamic and static, and what the system takes
  bool cooperative = false;
};

/// The op has no kernel for the call; it is composed of other ops.
inline Launch composed() { return {"other ops", "No plan applies: the op is composed of others."}; }

/// A call of a family. Elements of float16 take the same plans as those of bfloat16.
struct Call {
  int64_t rows;
  int64_t columns;
  Dtype dtype;
  device::Alignment alignment;
};

/// Calls of a shape in every dtype and alignment. Aligned rows are rounded up to whole vectors,
/// rows with an offset have an odd number of columns.
std::vector<Call> calls(int64_t rows, int64_t columns);

/// The same for kernels of channels, whose vectors have 8 elements in every dtype: rows and planes
/// that are aligned are whole vectors of 8, and an offset is as bad as different ones.
std::vector<Call> channel_calls(int64_t rows, int64_t columns);

/// Blocks of an SM, at most `blocks`: GPUs before 9.0 may have shared memory for fewer than the
/// launch bounds allow.
int resident_blocks(const Gpu& gpu, int blocks, int shared_bytes);

/// An address at a 16-byte boundary, for tensors of which a plan reads the address alone.
inline void* address() { return reinterpret_cast<void*>(uintptr_t{1} << 20); }

/// Writes a plan: `op` is the op or its gradient, and `operands` says which tensors it has.
void write(const Gpu& gpu, const Call& call, const std::string& op, const std::string& operands,
           const Launch& launch);

/// Writes the plans of a family.
struct Family {
  using Write = void (*)(const Gpu&, int64_t rows, int64_t columns);
  explicit Family(Write write) { all().push_back(write); }
  static std::vector<Write>& all();
};

}  // namespace torchkiln::plans
