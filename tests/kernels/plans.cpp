#include "plans.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <initializer_list>
#include <iostream>
#include <sstream>

namespace torchkiln::plans {
namespace {

constexpr int kKiB = 1 << 10;

std::string wanted;  // the op whose plans are written; empty for all

/// A GPU with clusters. `capability`: the major number. `gpcs`: the number of SMs of each GPC.
device::Device with_clusters(int capability, int shared_bytes, std::initializer_list<int> gpcs) {
  device::Device found{0, capability, true, true, shared_bytes, {}};
  for (const int multiprocessors : gpcs) {
    found.multiprocessors += multiprocessors;
    for (int log = 0; log < 5; ++log) found.clusters[log] += multiprocessors >> log;
  }
  return found;
}

device::Device without_clusters(int shared_bytes, int multiprocessors) {
  return {multiprocessors, 8, true, false, shared_bytes, {multiprocessors, 0, 0, 0, 0}};
}

// The GPCs of a GPU of 9.0 or 10.0 differ in size, also between two cards of the same model.
const Gpu kGpus[] = {
    {"A100", without_clusters(163 * kKiB, 108), 164 * kKiB, 2048},
    {"RTX 4090", without_clusters(99 * kKiB, 128), 100 * kKiB, 1536},
    {"H100", with_clusters(9, 227 * kKiB, {16, 16, 16, 16, 16, 16, 18, 18}), 228 * kKiB, 2048},
    {"H200", with_clusters(9, 227 * kKiB, {16, 16, 16, 16, 16, 16, 18, 18}), 228 * kKiB, 2048},
    {"B200", with_clusters(10, 227 * kKiB, {18, 18, 18, 18, 18, 18, 20, 20}), 228 * kKiB, 2048},
};

const char* name_of(Dtype dtype) {
  if (dtype == Dtype::float64) return "float64";
  return dtype == Dtype::float32 ? "float32" : "bfloat16";
}

const char* name_of(device::Alignment alignment) {
  if (alignment == device::Alignment::vector) return "vector";
  return alignment == device::Alignment::shared_offset ? "shared_offset" : "scalar";
}

}  // namespace

std::vector<Call> calls(int64_t rows, int64_t columns) {
  std::vector<Call> found;
  for (const Dtype dtype : {Dtype::bfloat16, Dtype::float32, Dtype::float64}) {
    const int64_t lanes = device::vector_lanes(dtype);
    found.push_back(
        {rows, device::ceil_div(columns, lanes) * lanes, dtype, device::Alignment::vector});
    if (device::alignment_with_offset(dtype) == device::Alignment::shared_offset)
      found.push_back({rows, columns | 1, dtype, device::Alignment::shared_offset});
    found.push_back({rows, columns | 1, dtype, device::Alignment::scalar});
  }
  return found;
}

void write(const Gpu& gpu, const Call& call, const std::string& op, const std::string& operands,
           const Launch& launch) {
  if (!wanted.empty() && wanted != op) return;
  const device::Device& device = gpu.device;
  std::printf("%s\t%s\t%s\t%s\t%s\t%" PRId64 "\t%" PRId64 "\t", gpu.name, op.c_str(),
              operands.c_str(), name_of(call.dtype), name_of(call.alignment), call.rows,
              call.columns);
  std::printf("%s\t%s\t%" PRId64 "\t%" PRId64 "\t%d\t%d\t%d\t%d\t%d\t%d\t", launch.kernel.c_str(),
              launch.why.c_str(), launch.blocks_x, launch.blocks_y, launch.threads,
              launch.most_threads, launch.per_multiprocessor, launch.cluster, launch.shared_bytes,
              static_cast<int>(launch.cooperative));
  std::printf("%d\t%d\t%d\t%d\t%d\n", device.multiprocessors, static_cast<int>(device.runs_90_code),
              device.shared_bytes, gpu.shared_of_multiprocessor, gpu.threads_of_multiprocessor);
}

std::vector<Call> channel_calls(int64_t rows, int64_t columns) {
  std::vector<Call> found;
  for (const Dtype dtype : {Dtype::bfloat16, Dtype::float32, Dtype::float64}) {
    found.push_back({rows, device::ceil_div(columns, 8) * 8, dtype, device::Alignment::vector});
    found.push_back({rows, columns | 1, dtype, device::Alignment::scalar});
  }
  return found;
}

int resident_blocks(const Gpu& gpu, int blocks, int shared_bytes) {
  constexpr int kReserved = 1 << 10;  // bytes per block, for the system
  return std::clamp(gpu.shared_of_multiprocessor / (shared_bytes + kReserved), 1, blocks);
}

std::vector<Family::Write>& Family::all() {
  static std::vector<Write> families;
  return families;
}

}  // namespace torchkiln::plans

int main() {
  using namespace torchkiln::plans;
  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream fields(line);
    int64_t rows = 0;
    int64_t columns = 0;
    fields >> rows >> columns >> std::ws;
    wanted.clear();
    std::getline(fields, wanted);
    for (const Family::Write write : Family::all()) {
      for (const Gpu& gpu : kGpus) write(gpu, rows, columns);
    }
  }
  return 0;
}
