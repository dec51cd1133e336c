// Gradients for groups that several blocks share. The first kernel sums over the samples for weight
// and bias, and sums the tiles of each group. The second kernel adds the sums of the tiles of a
// group and writes grad_x.

#include "parts.cuh"
#include "samples.cuh"

namespace torchkiln::cuda {
namespace {

/// Writes grad_x. `of_groups`: the sums per tile that sample_sums() writes.
template <class T, int kLanes, class Act>
__global__ void __launch_bounds__(kGroupPartThreads, kGroupPartBlocks)
    part_input_gradients(GroupNormBackward p, PartRows rows, Act act, const Compute<T>* of_groups,
                         int tiles) {
  using C = Compute<T>;
  using Vector = Vec<T, kLanes>;
  constexpr int kCount = kVectorsInFlight<Vector, Act>;
  wait_for_previous_kernel();
  const GroupPart<T, kLanes> part(rows, p.layout);
  const int64_t all = p.layout.all_groups(), count = p.layout.count();
  const C* const statistics = static_cast<const C*>(p.statistics) + part.group();
  const C mean = statistics[0], low = statistics[all], rstd = statistics[2 * all];
  double sums[2] = {};
#pragma unroll 4
  for (int tile = static_cast<int>(threadIdx.x); tile < tiles; tile += kGroupPartThreads) {
    const auto each = load_vector<2>(of_groups + 2 * (part.group() * tiles + tile));
    sums[0] += static_cast<double>(each.lane[0]);
    sums[1] += static_cast<double>(each.lane[1]);
  }
  reduce_block(sums);
  const double inverse_std = static_cast<double>(rstd), shift_of_mean = static_cast<double>(low);
  const double of_slope = (sums[1] - shift_of_mean * sums[0]) * inverse_std * inverse_std *
                          inverse_std / static_cast<double>(count);
  const C slope = static_cast<C>(of_slope);
  const C level =
      static_cast<C>(sums[0] * inverse_std / static_cast<double>(count) - of_slope * shift_of_mean);
  const T* const x = static_cast<const T*>(p.x) + part.group() * count;
  const T* const grad = static_cast<const T*>(p.grad) + part.group() * count;
  T* const grad_x = static_cast<T*>(p.grad_x) + part.group() * count;
  Vector items[kCount], grads[kCount];
  part.template each<kCount>(
      [&](int k, int64_t at) {
        items[k] = load_vector<kLanes>(x + at);
        grads[k] = load_vector<kLanes>(grad + at);
      },
      [&](int k, int64_t at) {
        C g[kLanes], from_mean[kLanes], weight[kLanes], bias[kLanes], scale[kLanes];
        part.parameters(p, at, weight, bias);
        differentiate(act, mean, low, rstd, items[k], grads[k], weight, bias, g, from_mean, scale);
#pragma unroll
        for (int i = 0; i < kLanes; ++i) g[i] = fma(-slope, from_mean[i], g[i] * scale[i]) - level;
        store(grad_x + at, g);
      });
}

}  // namespace

Status group_norm_backward_by_parts(const GroupNormBackward& p, const GroupPartsPlan& plan,
                                    Allocate allocate, CUstream_st* stream) {
  return with_group_parts(
      p, plan.input, [&](auto tag, auto lanes, auto act, const Grid& grid) -> Status {
        using T = typename decltype(tag)::type;
        using C = Compute<T>;
        constexpr int kLanes = decltype(lanes)::value;
        const int64_t tiles = plan.parameters.tiles_of_span;
        const auto sums = static_cast<size_t>(2 * p.layout.all_groups() * tiles);
        auto* const of_groups = static_cast<C*>(allocate(sums * sizeof(C)));
        const Status status = launch_sample_sums<T, kLanes, true>(p, plan.parameters, act, allocate,
                                                                  stream, of_groups);
        if (!status.ok() || p.grad_x == nullptr) return status;
        return launch_overlapped(part_input_gradients<T, kLanes, decltype(act)>, grid, stream, p,
                                 part_rows(p, plan.input), act, static_cast<const C*>(of_groups),
                                 static_cast<int>(tiles));
      });
}

}  // namespace torchkiln::cuda
