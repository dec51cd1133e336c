#pragma once

// Planes of adjacent elements, one for each channel of each sample. A plane is cut into segments.
// Up to 32 threads share a segment, and proceed to every step-th segment after it. Vectors of the
// next segments are in flight while the factors of a plane are read.

#include "factors.cuh"

namespace torchkiln::cuda {
namespace {

inline Status grid_of(const PlanePass& pass, Grid& grid) {
  if (pass.plan.segments > 1 && pass.plan.rows() > INT32_MAX)
    return {"too many planes for one launch"};
  grid.blocks = dim3(static_cast<unsigned>(pass.blocks));
  grid.threads = kChannelThreads;
  return {};
}

/// Walks over the vectors of a thread. With kBackwards it begins with the vectors that the previous
/// kernel read last, because the L2 cache still holds them.
template <class Access, bool kBackwards>
class PlaneWalk {
 public:
  __device__ __forceinline__ explicit PlaneWalk(const PlanePlan& plan)
      : plan_(plan),
        place_in_segment_(static_cast<int>(threadIdx.x) % plan.threads * Access::kLanes),
        index_(int64_t{blockIdx.x} * plan.rows_of_block() +
               static_cast<int>(threadIdx.x) / plan.threads),
        step_(int64_t{gridDim.x} * plan.rows_of_block()) {
    enter();
  }

  /// Segments that each thread of the block visits, including segments beyond the last one.
  __device__ __forceinline__ int64_t count() const {
    const int64_t first = int64_t{blockIdx.x} * plan_.rows_of_block();
    return first < plan_.rows() ? (plan_.rows() - first + step_ - 1) / step_ : 0;
  }
  /// Whether the segment exists.
  __device__ __forceinline__ bool is_inside() const { return index_ < plan_.rows(); }
  __device__ __forceinline__ int64_t row() const {
    return kBackwards ? plan_.rows() - 1 - index_ : index_;
  }
  __device__ __forceinline__ int64_t plane() const { return plane_; }
  /// The index of the first element of vector `item` of the segment; -1 beyond the end.
  __device__ __forceinline__ int64_t at(int item) const {
    const int64_t place = place_ + int64_t{item} * plan_.threads * Access::kLanes;
    return place < end_ ? base_ + place : -1;
  }
  /// Goes to the next segment.
  __device__ __forceinline__ void next() {
    index_ += step_;
    enter();
  }

 private:
  __device__ __forceinline__ void enter() {
    end_ = 0;
    place_ = 0;
    if (!is_inside()) return;
    const int64_t row = this->row();
    int64_t begin = 0;
    plane_ = row;
    if (plan_.segments > 1) {
      const auto place = static_cast<uint32_t>(row);
      const uint32_t plane = plan_.divisor.quotient(place);
      plane_ = plane;
      begin = int64_t{place - plane * plan_.divisor.divisor()} * plan_.segment;
    }
    end_ = min(begin + plan_.segment, plan_.inner);
    place_ = begin + place_in_segment_;
    base_ = plane_ * plan_.inner;
  }

  const PlanePlan& plan_;
  int place_in_segment_;
  int64_t index_;
  int64_t step_;
  int64_t plane_ = 0;
  int64_t base_ = 0;
  int64_t place_ = 0;  // first element, within the plane
  int64_t end_ = 0;
};

/// Reads the vectors of a thread through a ring of stages in shared memory, several vectors ahead
/// of their use. Each thread reads only its own copies, so no barrier is needed.
template <bool kBackwards, class Streams>
class PlaneReader {
 public:
  using Access = typename Streams::Access;
  using Item = typename Streams::Item;

  __device__ __forceinline__ PlaneReader(const PlanePlan& plan, const Streams& streams)
      : plan_(plan), streams_(streams), walk_(plan), ahead_(plan) {
    if constexpr (Streams::kAhead) {
#pragma unroll
      for (int k = 0; k < kStages; ++k) start(k);
    }
  }

  /// For each segment, calls begin(plane), use(item, index of the first element) for each vector,
  /// and end(row) in all threads; row is -1 beyond the last segment.
  template <class Begin, class Use, class End>
  __device__ __forceinline__ void each(const Begin& begin, const Use& use, const End& end) {
    int stage = 0;
    for (int64_t left = walk_.count(); left > 0; --left) {
      if (walk_.is_inside()) begin(walk_.plane());
      if constexpr (Streams::kAhead) {
        for (int i = 0; i < plan_.items; ++i) {
          const int64_t at = walk_.at(i);
          __pipeline_wait_prior(kStages - 1);
          const Item item = streams_.finish(stage, at);
          start(stage);
          if (++stage == kStages) stage = 0;
          if (at >= 0) use(item, at);
        }
      } else {
        Item items[PlanePlan::kMaxItems];
#pragma unroll
        for (int i = 0; i < PlanePlan::kMaxItems; ++i)
          if (i < plan_.items && walk_.at(i) >= 0) items[i] = streams_.load(walk_.at(i));
#pragma unroll
        for (int i = 0; i < PlanePlan::kMaxItems; ++i)
          if (i < plan_.items && walk_.at(i) >= 0) use(items[i], walk_.at(i));
      }
      end(walk_.is_inside() ? walk_.row() : -1);
      walk_.next();
    }
  }

 private:
  static constexpr int kStages = Streams::kStages;

  __device__ __forceinline__ void start(int stage) {
    const int64_t at = ahead_.at(item_);
    if (at >= 0) streams_.start(stage, at);
    __pipeline_commit();
    if (++item_ < plan_.items) return;
    item_ = 0;
    ahead_.next();
  }

  const PlanePlan& plan_;
  const Streams& streams_;
  PlaneWalk<Access, kBackwards> walk_;
  PlaneWalk<Access, kBackwards> ahead_;
  int item_ = 0;
};

/// The sample and the channel of a plane.
struct PlaneOf {
  int64_t sample;
  int64_t channels[1];

  __device__ __forceinline__ PlaneOf(const GroupLayout& layout, int64_t plane)
      : sample(plane <= INT32_MAX
                   ? static_cast<uint32_t>(plane) / static_cast<uint32_t>(layout.channels)
                   : plane / layout.channels),
        channels{plane - sample * layout.channels} {}
};

/// Calls body(access, activation, grid).
template <class Problem, class Body>
Status with_planes(const Problem& p, const PlanePass& pass, const Body& body) {
  Grid grid;
  const Status fits = grid_of(pass, grid);
  if (!fits.ok()) return fits;
  return with_channel_access<false>(p.dtype, pass.lanes, [&](auto access) {
    return with_group_activation<decltype(access)>(
        p.activation, [&](auto act) { return body(access, act, grid); });
  });
}

}  // namespace
}  // namespace torchkiln::cuda
