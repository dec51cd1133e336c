#include "ops/group_norm/choose.h"

#include "plans.h"

namespace torchkiln::plans {
namespace {

using namespace cuda;

constexpr int64_t kGroups = 8;

Launch launch_of(const Gpu& gpu, int lanes, int blocks) {
  Launch launch;
  launch.threads = launch.most_threads = kChannelThreads;
  if (lanes > 1) launch.shared_bytes = kRingBytes;
  launch.per_multiprocessor = resident_blocks(gpu, blocks, launch.shared_bytes);
  return launch;
}

Launch launch_of(const Gpu& gpu, const PlanePass& pass, int blocks) {
  Launch launch = launch_of(gpu, pass.lanes, blocks);
  launch.kernel = pass.lanes > 1 ? "planes" : "planes by elements";
  launch.why = pass.lanes > 1 ? "Up to 32 threads have a segment of a plane, read ahead in vectors."
                              : "The same for planes that are not whole vectors of 8 elements.";
  launch.blocks_x = pass.blocks;
  return launch;
}

Launch launch_of(const Gpu& gpu, const ChannelPass& pass, int blocks) {
  Launch launch = launch_of(gpu, pass.lanes, blocks);
  launch.kernel = pass.lanes > 1 ? "rows" : "rows by elements";
  launch.why = pass.lanes > 1 ? "Channels are adjacent: a thread keeps its columns of a sample."
                              : "The same for rows that are not whole vectors of 8 elements.";
  launch.blocks_x = pass.plan.tiles;
  launch.blocks_y = pass.plan.parts;
  return launch;
}

Launch launch_of(const GroupTeamPlan& plan, const GroupLayout& layout) {
  Launch launch{"registers", "A team of threads holds a group, and reads each element once."};
  launch.blocks_x = ceil_div(layout.all_groups(), plan.team.per_block) << plan.team.log_blocks;
  launch.threads = plan.team.block_threads();
  launch.most_threads = rowwise::kRowThreads;
  launch.per_multiprocessor = 2;
  launch.cluster = plan.team.blocks();
  return launch;
}

Launch launch_of(const GroupPartPlan& plan, const GroupLayout& layout) {
  Launch launch{"parts", "No team holds a group: several blocks have a part each."};
  launch.blocks_x = layout.all_groups() * plan.parts;
  launch.threads = launch.most_threads = kGroupPartThreads;
  launch.per_multiprocessor = kGroupPartBlocks;
  return launch;
}

void write_norm(const Gpu& gpu, const Call& call, const char* operands, const GroupLayout& layout) {
  GroupNorm p{};
  p.x = p.y = address();
  p.dtype = call.dtype;
  p.layout = layout;
  const GroupNormPlan plan = cuda::choose(p, gpu.device);
  GroupNormBackward q{};
  q.grad = q.x = address();
  q.grad_x = address();
  q.dtype = call.dtype;
  q.layout = layout;
  const GroupNormBackwardPlan gradients = cuda::choose(q, gpu.device);
  const auto write = [&](const char* op, const Launch& launch) {
    plans::write(gpu, call, op, operands, launch);
  };
  const auto launch_of_parts = [&] {
    if (!plan.of_pixels) return launch_of(*plan.parts, layout);
    Launch launch = launch_of(*plan.parts, pixels_of(layout));
    launch.kernel = "pixels";
    launch.why = "Channels are adjacent, pixels few: several blocks have a group of a pixel.";
    return launch;
  };
  write("group norm forward", plan.teams   ? launch_of(*plan.teams, layout)
                              : plan.parts ? launch_of_parts()
                              : plan.rows  ? launch_of(gpu, *plan.rows, kGroupOutputBlocks)
                                           : launch_of(gpu, *plan.planes, kGroupOutputBlocks));
  write("group norm backward", gradients.teams   ? launch_of(gradients.teams->input, layout)
                               : gradients.parts ? launch_of(gradients.parts->input, layout)
                               : gradients.rows
                                   ? launch_of(gpu, *gradients.rows, kGroupBackwardBlocks)
                                   : launch_of(gpu, *gradients.planes, kGroupBackwardBlocks));
}

void write_group_norm(const Gpu& gpu, int64_t rows, int64_t columns) {
  for (const Call& call : channel_calls(rows, columns)) {
    constexpr int64_t kChannels = 64;
    write_norm(gpu, call, "planes of 64 channels",
               {call.rows, kChannels, kGroups, call.columns, false});
    // Groups that are whole vectors, or have an odd number of elements.
    const int64_t of_group = ceil_div(call.columns, kGroups);
    const bool in_vectors = call.alignment == device::Alignment::vector;
    const int64_t channels =
        (in_vectors ? ceil_div(of_group, int64_t{8}) * 8 : of_group | 1) * kGroups;
    write_norm(gpu, call, "adjacent channels", {16, channels, kGroups, call.rows, true});
    write_norm(gpu, call, "adjacent channels of 7 pixels", {call.rows, channels, kGroups, 7, true});
    write_norm(gpu, call, "channels without a spatial size",
               {call.rows, channels, kGroups, 1, false});
  }
}

const Family kGroupNorm(write_group_norm);

}  // namespace
}  // namespace torchkiln::plans
