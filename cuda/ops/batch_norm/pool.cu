// Batch norm, activation and max pool in one kernel each way: neither y before the pool nor its
// gradient is stored.

#include "backward.cuh"
#include "choose_pool.h"
#include "forward.cuh"
#include "windows.cuh"

namespace torchkiln::cuda {
namespace {

template <class Windows>
constexpr int kPoolBlocks = pool_blocks(Windows::Axis::kWidth);

/// The largest value of a window so far, for each lane.
template <class Access>
struct Peak {
  using T = typename Access::T;
  using C = typename Access::C;
  static constexpr int kLanes = Access::kLanes;
  C value[kLanes];
  unsigned place[kLanes];

  __device__ __forceinline__ void take(const C (&z)[kLanes], unsigned at, bool is_first) {
    Vec<T, kLanes> rounded;
#pragma unroll
    for (int i = 0; i < kLanes; ++i) rounded.lane[i] = convert<T>(z[i]);
    C next[kLanes];
    widen(rounded, next);
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      const bool takes = is_first || next[i] > value[i] || next[i] != next[i];
      value[i] = takes ? next[i] : value[i];
      place[i] = takes ? at : place[i];
    }
  }
};

template <class Access, class Windows, class Act>
__global__ void __launch_bounds__(kChannelThreads, kPoolBlocks<Windows>)
    pooled_outputs(BatchNormPool p, ChannelPlan plan, Windows windows, Act act) {
  using T = typename Access::T;
  using C = typename Access::C;
  constexpr int kLanes = Access::kLanes;
  wait_for_previous_kernel();
  const ChannelCursor<Access> cursor(plan);
  if (!cursor.is_inside()) return;
  ChannelFactors<Access> factors;
  int64_t channels[kLanes];
  cursor.channels(channels);
  factors.load(p.norm, channels);
  const T* const x = static_cast<const T*>(p.norm.x) + cursor.column();
  // Walks backwards, because the L2 cache still holds the pixels that the kernel of the moments
  // read last.
  for (int64_t i = cursor.first_row(); i < plan.rows; i += cursor.row_step()) {
    const int64_t window = plan.rows - 1 - i;
    const auto place = windows.place(static_cast<uint32_t>(window));
    const int row = windows.rows.begin(place.row), column = windows.columns.begin(place.column);
    const T* const image = x + place.image * windows.pixels() * plan.columns;
    Peak<Access> peak{};
    bool is_first = true;
#pragma unroll
    for (int r = 0; r < windows.rows.kernel(); ++r) {
#pragma unroll
      for (int c = 0; c < windows.columns.kernel(); ++c) {
        if (!windows.rows.has(row + r) || !windows.columns.has(column + c)) continue;
        const int64_t pixel = int64_t{row + r} * windows.columns.size + column + c;
        C z[kLanes];
        factors.normalize(load_constant<kLanes>(image + pixel * plan.columns), z);
        act.apply(z);
        peak.take(z, static_cast<unsigned>(r * windows.columns.kernel() + c), is_first);
        is_first = false;
      }
    }
    const int64_t at = window * plan.columns + cursor.column();
    store(static_cast<T*>(p.norm.y) + at, peak.value);
    Vec<uint8_t, kLanes> places;
#pragma unroll
    for (int k = 0; k < kLanes; ++k) places.lane[k] = static_cast<uint8_t>(peak.place[k]);
    *reinterpret_cast<Vec<uint8_t, kLanes>*>(p.places + at) = places;
  }
}

/// part_sums() over windows. In each window only the pixel of the maximum has a gradient; each lane
/// has its own maximum.
template <class Access, class Windows, class Act>
__global__ void __launch_bounds__(kChannelThreads, kPoolBackwardBlocks)
    pooled_sums(BatchNormPoolBackward p, ChannelPlan plan, Windows windows, Act act,
                typename Access::C* partial) {
  using T = typename Access::T;
  using C = typename Access::C;
  constexpr int kLanes = Access::kLanes;
  wait_for_previous_kernel();
  const ChannelCursor<Access> cursor(plan);
  ChannelFactors<Access> factors{};
  int64_t channels[kLanes];
  cursor.channels(channels);
  if (cursor.is_inside()) factors.load(p.norm, channels);
  const T* const x = static_cast<const T*>(p.norm.x) + cursor.column();
  C sums[2][kLanes] = {};
  for (int64_t window = cursor.first_row(); cursor.is_inside() && window < plan.rows;
       window += cursor.row_step()) {
    const int64_t at = window * plan.columns + cursor.column();
    const auto places = *reinterpret_cast<const Vec<uint8_t, kLanes>*>(p.places + at);
    C g[kLanes];
    widen(load_constant<kLanes>(static_cast<const T*>(p.norm.grad) + at), g);
    const auto place = windows.place(static_cast<uint32_t>(window));
    const int row = windows.rows.begin(place.row), column = windows.columns.begin(place.column);
    const T* const image = x + place.image * windows.pixels() * plan.columns;
    Vec<T, kLanes> peaks;
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      const int r = places.lane[i] / windows.columns.kernel();
      const int c = places.lane[i] - r * windows.columns.kernel();
      const int64_t pixel = int64_t{row + r} * windows.columns.size + column + c;
      peaks.lane[i] = load_constant<1>(image + pixel * plan.columns + i).lane[0];
    }
    C z[kLanes], from_mean[kLanes];
    factors.normalize(peaks, z);
    act.differentiate(g, z);
    widen(peaks, from_mean);
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      sums[0][i] += g[i];
      sums[1][i] = fma(g[i], from_mean[i] - factors.mean[i], sums[1][i]);
    }
  }
  C* const to = partial + int64_t{blockIdx.y} * 2 * plan.columns;
  add_threads<Access>(plan, sums, [&](int64_t column, const C(&total)[2]) {
    to[column] = total[0];
    to[plan.columns + column] = total[1];
  });
}

/// The factors of a thread's channels for the gradient of x.
template <class Access>
struct GradientFactors : ChannelFactors<Access> {
  using T = typename Access::T;
  using C = typename Access::C;
  static constexpr int kLanes = Access::kLanes;
  C slope[kLanes];
  C level[kLanes];

  __device__ __forceinline__ void load(const BatchNormBackward& p,
                                       const int64_t (&channels)[kLanes]) {
    ChannelFactors<Access>::load(p, channels);
    const C* const coefficients = static_cast<const C*>(p.coefficients);
    read_each<C>(coefficients, channels, slope);
    read_each<C>(coefficients + p.layout.channels, channels, level);
  }

  /// Turns the gradient of the activation's result into that of x, and stores it.
  template <class Act>
  __device__ __forceinline__ void finish(const Act& act, const Vec<T, kLanes>& x, C (&g)[kLanes],
                                         T* to) const {
    C z[kLanes], from_mean[kLanes];
    this->normalize(x, z);
    act.differentiate(g, z);
    widen(x, from_mean);
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      g[i] = fma(-slope[i], from_mean[i] - this->mean[i], g[i]) - level[i];
      g[i] *= this->scale[i];
    }
    store(to, g);
  }
};

/// The gradient of a window, and the pixel of its maximum in each lane.
template <class Access>
struct WindowGradient {
  using C = typename Access::C;
  static constexpr int kLanes = Access::kLanes;
  Vec<typename Access::T, kLanes> grad;
  Vec<uint8_t, kLanes> places;

  __device__ __forceinline__ void load(const BatchNormPoolBackward& p, int64_t at) {
    grad = load_constant<kLanes>(static_cast<const typename Access::T*>(p.norm.grad) + at);
    places = *reinterpret_cast<const Vec<uint8_t, kLanes>*>(p.places + at);
  }
  __device__ __forceinline__ void add_to(C (&g)[kLanes], int place) const {
    C incoming[kLanes];
    widen(grad, incoming);
#pragma unroll
    for (int i = 0; i < kLanes; ++i)
      if (places.lane[i] == place) g[i] += incoming[i];
  }
};

template <class T, class Windows>
constexpr bool kInBlocks = computes_in_blocks(Windows::Axis::kWidth, sizeof(T));

template <class Access, class Windows, class Act>
__global__ void __launch_bounds__(kChannelThreads, kPoolBackwardBlocks)
    pooled_input_gradients(BatchNormPoolBackward p, ChannelPlan plan, Windows windows, Act act) {
  using T = typename Access::T;
  using C = typename Access::C;
  constexpr int kLanes = Access::kLanes;
  wait_for_previous_kernel();
  const ChannelCursor<Access> cursor(plan);
  if (!cursor.is_inside()) return;
  GradientFactors<Access> factors;
  int64_t channels[kLanes];
  cursor.channels(channels);
  factors.load(p.norm, channels);
  const T* const x = static_cast<const T*>(p.norm.x) + cursor.column();
  T* const grad_x = static_cast<T*>(p.norm.grad_x) + cursor.column();
  for (int64_t i = cursor.first_row(); i < plan.rows; i += cursor.row_step()) {
    const auto place = windows.place(static_cast<uint32_t>(i));
    const int64_t pixels = place.image * windows.pixels();
    const auto window_at = [&](int row, int column) {
      return (place.image * windows.pooled() + int64_t{row} * windows.columns.pooled + column) *
                 plan.columns +
             cursor.column();
    };
    if constexpr (kInBlocks<T, Windows>) {
      constexpr int kWidth = Windows::Axis::kWidth, kStep = Windows::Axis::kStep;
      constexpr int kShared = (kWidth + kStep - 1) / kStep;  // most windows of one pixel, per axis
      WindowGradient<Access> window[kShared][kShared];
      const int row = windows.rows.begin(place.row), column = windows.columns.begin(place.column);
      const auto at = [&](int r, int c) {
        return (pixels + int64_t{row + r} * windows.columns.size + column + c) * plan.columns;
      };
#pragma unroll
      for (int r = 0; r < kShared; ++r)
#pragma unroll
        for (int c = 0; c < kShared; ++c) {
          fill(window[r][c].grad, convert<T>(C(0)));
          fill(window[r][c].places, uint8_t{0});
          if (windows.rows.has_window(place.row - r) &&
              windows.columns.has_window(place.column - c))
            window[r][c].load(p, window_at(place.row - r, place.column - c));
        }
#pragma unroll
      for (int r = 0; r < kStep; ++r) {
        if (!windows.rows.has(row + r)) continue;
        Vec<T, kLanes> of[kStep];
#pragma unroll
        for (int c = 0; c < kStep; ++c)
          if (windows.columns.has(column + c)) of[c] = load_constant<kLanes>(x + at(r, c));
#pragma unroll
        for (int c = 0; c < kStep; ++c) {
          if (!windows.columns.has(column + c)) continue;
          C g[kLanes] = {};
#pragma unroll
          for (int a = 0; r + a * kStep < kWidth; ++a)
#pragma unroll
            for (int b = 0; c + b * kStep < kWidth; ++b)
              window[a][b].add_to(g, (r + a * kStep) * kWidth + c + b * kStep);
          factors.finish(act, of[c], g, grad_x + at(r, c));
        }
      }
    } else {
      C g[kLanes] = {};
      windows.rows.each_window(place.row, [&](int row, int r) {
        windows.columns.each_window(place.column, [&](int column, int c) {
          WindowGradient<Access> window;
          window.load(p, window_at(row, column));
          window.add_to(g, r * windows.columns.kernel() + c);
        });
      });
      const int64_t at =
          (pixels + int64_t{place.row} * windows.columns.size + place.column) * plan.columns;
      factors.finish(act, load_constant<kLanes>(x + at), g, grad_x + at);
    }
  }
}

/// Calls body(access, windows, activation, grid).
template <class Body>
Status with_pool(const PoolWindows& windows, const PoolPass& pass, Dtype dtype,
                 Activation activation, const Body& body) {
  Grid grid;
  const Status fits = grid_of(pass.plan, grid);
  if (!fits.ok()) return fits;
  return dispatch<float, __half, __nv_bfloat16>(dtype, [&](auto tag) {
    using Access = ChannelAccess<typename decltype(tag)::type, true, kChannelLanes>;
    return with_windows<typename Access::T>(
        pass.fixed_window, activation, [&](auto type, auto act) {
          return body(Access{}, make_grid_of<decltype(type)>(windows, pass.walked), act, grid);
        });
  });
}

Status launch_outputs(const BatchNormPool& p, const PoolPass& pass, CUstream_st* stream) {
  return with_pool(p.windows, pass, p.norm.dtype, p.norm.activation,
                   [&](auto access, const auto& windows, auto act, const Grid& grid) {
                     using Windows = std::decay_t<decltype(windows)>;
                     return launch_overlapped(
                         pooled_outputs<decltype(access), Windows, decltype(act)>, grid, stream, p,
                         pass.plan, windows, act);
                   });
}

Status launch_sums(const BatchNormPoolBackward& p, const PoolPass& pass, Allocate allocate,
                   CUstream_st* stream) {
  const ChannelPlan& plan = pass.plan;
  return with_pool(
      p.windows, pass, p.norm.dtype, p.norm.activation,
      [&](auto access, const auto& windows, auto act, Grid grid) {
        using Access = decltype(access);
        using C = typename Access::C;
        using Windows = std::decay_t<decltype(windows)>;
        grid.shared_bytes = 2 * Access::kLanes * kChannelThreads * static_cast<int>(sizeof(C));
        const auto sums = static_cast<size_t>(plan.parts * plan.columns) * 2;
        C* const partial = static_cast<C*>(allocate(sums * sizeof(C)));
        const Status status = launch_overlapped(pooled_sums<Access, Windows, decltype(act)>, grid,
                                                stream, p, plan, windows, act, partial);
        if (!status.ok()) return status;
        return add_channel_sums(p.norm, partial, plan.parts, plan.columns, stream);
      });
}

Status launch_gradients(const BatchNormPoolBackward& p, const PoolPass& pass, CUstream_st* stream) {
  return with_pool(p.windows, pass, p.norm.dtype, p.norm.activation,
                   [&](auto access, const auto& windows, auto act, const Grid& grid) {
                     using Windows = std::decay_t<decltype(windows)>;
                     return launch_overlapped(
                         pooled_input_gradients<decltype(access), Windows, decltype(act)>, grid,
                         stream, p, pass.plan, windows, act);
                   });
}

}  // namespace

Status batch_norm_pool(const BatchNormPool& p, Allocate allocate, CUstream_st* stream) {
  const Device& device = current_device();
  const Status status = moments_of(p.norm, choose_moments(p.norm, device), allocate, stream);
  return status.ok() ? launch_outputs(p, choose_outputs(p, device), stream) : status;
}

Status batch_norm_pool_backward(const BatchNormPoolBackward& arguments, Allocate allocate,
                                CUstream_st* stream) {
  const Device& device = current_device();
  BatchNormPoolBackward p = arguments;
  p.norm.coefficients = allocate(2 * static_cast<size_t>(p.norm.layout.channels) * sizeof(float));
  const Status status = launch_sums(p, choose_sums(p, device), allocate, stream);
  if (!status.ok() || p.norm.grad_x == nullptr) return status;
  return launch_gradients(p, choose_gradients(p, device), stream);
}

}  // namespace torchkiln::cuda
