#pragma once

// Groups that several blocks share: forward_parts.cu, backward_parts.cu. A group is adjacent in
// memory; each block processes one part of it.

#include "factors.cuh"
#include "launch.cuh"
#include "teams.cuh"

namespace torchkiln::cuda {
namespace {

/// The parts of the groups of a tensor.
struct PartRows {
  GroupPartPlan plan;
  Divisor inner;   // elements of a channel
  Divisor groups;  // groups per sample
  Divisor parts;   // parts per group
  Divisor pixels;  // consecutive samples that share their statistics
  int64_t all;     // groups with statistics
  bool adjacent;   // the parameters of a vector can be read as a vector, too
};

template <class Problem>
PartRows part_rows(const Problem& p, const GroupPartPlan& plan, int64_t pixels = 1) {
  return {plan,
          Divisor(static_cast<uint32_t>(p.layout.inner)),
          Divisor(static_cast<uint32_t>(p.layout.groups)),
          Divisor(static_cast<uint32_t>(plan.parts)),
          Divisor(static_cast<uint32_t>(pixels)),
          p.layout.all_groups() / pixels,
          p.layout.inner == 1 && aligned(p.weight) && aligned(p.bias)};
}

/// The part of the calling block.
template <class T, int kLanes>
class GroupPart {
 public:
  using C = Compute<T>;

  __device__ __forceinline__ GroupPart(const PartRows& rows, const GroupLayout& layout)
      : rows_(rows), group_(rows.parts.quotient(blockIdx.x)) {
    const auto group = static_cast<uint32_t>(group_);
    const int64_t begin = int64_t{blockIdx.x - group * rows.parts.divisor()} * rows.plan.length;
    begin_ = begin + static_cast<int>(threadIdx.x) * kLanes;
    end_ = min(begin + rows.plan.length, layout.count());
    const uint32_t sample = rows.groups.quotient(group);
    const uint32_t of_sample = group - sample * rows.groups.divisor();
    first_channel_ = static_cast<int64_t>(of_sample) * layout.channels_per_group();
    statistics_ = rows.pixels.quotient(sample) * rows.groups.divisor() + of_sample;
  }

  /// The index of the group among the groups of all samples.
  __device__ __forceinline__ int64_t group() const { return group_; }
  /// The index of its statistics.
  __device__ __forceinline__ uint32_t statistics() const { return statistics_; }

  /// Until the part ends, calls load(k, at) for up to kCount vectors of the thread, then use(k, at)
  /// for the same vectors. `at`: elements from the beginning of the group.
  template <int kCount, class Load, class Use>
  __device__ __forceinline__ void each(const Load& load, const Use& use) const {
    constexpr int kStep = kGroupPartThreads * kLanes;
    for (int64_t from = begin_; from < end_; from += kCount * kStep) {
#pragma unroll
      for (int k = 0; k < kCount; ++k)
        if (from + k * kStep < end_) load(k, from + k * kStep);
#pragma unroll
      for (int k = 0; k < kCount; ++k)
        if (from + k * kStep < end_) use(k, from + k * kStep);
    }
  }

  /// Loads weight and bias for the vector at `at`; 1 and 0 if the norm has none.
  template <class Problem>
  __device__ __forceinline__ void parameters(const Problem& p, int64_t at, C (&weight)[kLanes],
                                             C (&bias)[kLanes]) const {
    int64_t channels[kLanes];
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      channels[i] = first_channel_ + rows_.inner.quotient(static_cast<uint32_t>(at + i));
      weight[i] = C(1), bias[i] = C(0);
    }
    with_parameter_type<T>(p.parameter_dtype, [&](auto tag) {
      using P = typename decltype(tag)::type;
      const auto read = [&](const void* from, C(&to)[kLanes]) {
        if (from == nullptr) return;
        if (rows_.adjacent) {
          widen(load_vector<kLanes>(static_cast<const P*>(from) + channels[0]), to);
        } else {
          read_each<P>(from, channels, to);
        }
      };
      read(p.weight, weight);
      read(p.bias, bias);
    });
  }

 private:
  const PartRows& rows_;
  int64_t group_;
  int64_t begin_;
  int64_t end_;
  int64_t first_channel_;
  uint32_t statistics_;
};

/// Calls body(TypeTag<T>, lanes as a type, activation, grid).
template <class Problem, class Body>
Status with_group_parts(const Problem& p, const GroupPartPlan& plan, const Body& body) {
  const int64_t blocks = p.layout.all_groups() * plan.parts;
  if (blocks > kMaxGridX) return {"too many groups for one launch"};
  const Grid grid{dim3(static_cast<unsigned>(blocks)), kGroupPartThreads};
  return dispatch_floating(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return with_team_activation<T>(p.activation, [&](auto act) {
      constexpr int kVector = kVectorLanes<T>;
      if (plan.lanes == kVector)
        return body(tag, std::integral_constant<int, kVector>{}, act, grid);
      if constexpr (kVector > 4) {
        if (plan.lanes == 4) return body(tag, std::integral_constant<int, 4>{}, act, grid);
      }
      return body(tag, std::integral_constant<int, 1>{}, act, grid);
    });
  });
}

}  // namespace
}  // namespace torchkiln::cuda
