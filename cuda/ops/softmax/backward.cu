#include "rows.cuh"

namespace torchkiln::cuda {
namespace {

template <class Tile, bool kLog, bool kMasked>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks<Tile, 2>)
    softmax_backward_rows(SoftmaxBackward p, TeamShape shape) {
  using T = typename Tile::T;
  using C = Compute<T>;
  using Math = MathFor<T>;
  const bool is_log = kMasked ? p.log : kLog;
  constexpr int kLanes = Tile::kLanes;
  constexpr int kItems = Tile::kItems;
  __shared__ TeamStorage<C, 1> storage;
  wait_for_previous_kernel();
  Team<C, 1> team(shape, storage);
  const int64_t row = team.first_team() + team.index();
  const bool inside = row < p.outer;
  const T* grad = static_cast<const T*>(p.grad) + row * p.outer_stride;
  const Tile tile(grad, inside ? static_cast<int>(p.length) : 0, team.rank(), team.size());
  typename Tile::Item grads[kItems], ys[kItems];
  tile.load(grad, grads);
  tile.load(static_cast<const T*>(p.y) + row * p.length, ys);
  team.init_barriers();
  const C scale = static_cast<C>(p.scale);

  C total[1] = {};
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    C g[kLanes], y[kLanes];
    widen(grads[k], g);
    widen(ys[k], y);
#pragma unroll
    for (int i = 0; i < Tile::lanes(k); ++i) total[0] += is_log ? g[i] : g[i] * y[i];
  }
  team.reduce(total, Sum{});
  const ActiveLanes<kMasked, Tile> active(tile, p.mask, row);
  T* grad_x = static_cast<T*>(p.grad_x) + row * p.length;
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    C g[kLanes], y[kLanes];
    widen(grads[k], g);
    widen(ys[k], y);
#pragma unroll
    for (int i = 0; i < Tile::lanes(k); ++i) {
      g[i] = is_log ? gradient<true>(g[i], y[i], total[0], scale, Math::exp(y[i]))
                    : gradient<false>(g[i], y[i], total[0], scale, C(0));
      if (kMasked && !active.has(k, i)) g[i] = 0;
    }
    tile.save(inside, grad_x, k, g);
  }
}

}  // namespace

Status softmax_backward(const SoftmaxBackward& p, CUstream_st* stream) {
  const TensorRows tensors[] = {{p.grad, p.outer_stride}, {p.y, p.length}, {p.grad_x, p.length}};
  return queue(
      p, tensors, p.mask.any(),
      [](auto tile, auto log, auto masked) {
        return softmax_backward_rows<typename std::decay_t<decltype(tile)>::type, log, masked>;
      },
      [](auto type, auto log) {
        return softmax_backward_columns<typename std::decay_t<decltype(type)>::type, log>;
      },
      stream);
}

}  // namespace torchkiln::cuda
