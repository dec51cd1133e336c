#pragma once

// The kernels of the backward: sums of parts of the channels, and the gradient of x.

#include "factors.cuh"

namespace torchkiln::cuda {

/// The backward of rows of adjacent channels, and of planes of adjacent elements.
Status batch_norm_backward_rows(const BatchNormBackward& p, Allocate allocate, CUstream_st* stream);
Status batch_norm_backward_planes(const BatchNormBackward& p, Allocate allocate,
                                  CUstream_st* stream);

/// Adds the sums of `parts` parts of each channel, [parts, 2, channels]: the gradients of weight
/// and bias, and [2, channels] coefficients of grad_x.
Status add_channel_sums(const BatchNormBackward& p, const void* partial, int64_t parts,
                        void* coefficients, CUstream_st* stream);

namespace {

// Blocks per SM: 2 x 256 threads x 4 items x 2 loads x 16 B = 64 KiB in flight.
constexpr int kBackwardBlocks = 2;

template <class Access, class Act>
inline constexpr int kItems = kInFlight < Access,
                     Act::kReadsResidual ? 3 : 4 > ;

/// Operands of g, the gradient of the argument of the activation.
template <class Access>
struct GradientItem {
  using T = typename Access::T;
  Vec<T, Access::kLanes> grad, x, residual;
  unsigned signs;
};

/// Loads the elements at `at`; `grad` is the incoming gradient, or g itself.
template <class Access, class Act>
__device__ __forceinline__ GradientItem<Access> load_gradient(const BatchNormBackward& p,
                                                              const typename Access::T* grad,
                                                              bool is_g, int64_t at) {
  using T = typename Access::T;
  constexpr int kLanes = Access::kLanes;
  GradientItem<Access> item{};
  item.grad = load_vector<kLanes>(grad + at);
  item.x = load_vector<kLanes>(static_cast<const T*>(p.x) + at);
  if (is_g) return item;
  if (Act::kReadsResidual && p.residual != nullptr)
    item.residual = load_vector<kLanes>(static_cast<const T*>(p.residual) + at);
  if (p.signs != nullptr) item.signs = p.signs[at / 8] >> (at % 8);
  return item;
}

/// Computes g and x - mean of an item.
template <class Access, class Act>
__device__ __forceinline__ void gradient_of(const BatchNormBackward& p,
                                            const ChannelFactors<Access>& factors, const Act& act,
                                            const GradientItem<Access>& item, bool is_g,
                                            typename Access::C (&g)[Access::kLanes],
                                            typename Access::C (&from_mean)[Access::kLanes]) {
  using C = typename Access::C;
  constexpr int kLanes = Access::kLanes;
  widen(item.grad, g);
  if (!is_g) {
    if (p.signs != nullptr) {
#pragma unroll
      for (int i = 0; i < kLanes; ++i)
        if (((item.signs >> i) & 1u) == 0) g[i] = C(0);
    } else {
      C z[kLanes];
      factors.normalize(item.x, z);
      if (Act::kReadsResidual && p.residual != nullptr) add_vector(item.residual, z);
      act.differentiate(g, z);
    }
  }
  widen(item.x, from_mean);
#pragma unroll
  for (int i = 0; i < kLanes; ++i) from_mean[i] -= factors.mean[factors.of(i)];
}

template <class Access, class Act>
__global__ void __launch_bounds__(kChannelThreads, kBackwardBlocks)
    part_sums(BatchNormBackward p, ChannelPlan plan, Act act, typename Access::C* partial) {
  using T = typename Access::T;
  using C = typename Access::C;
  constexpr int kLanes = Access::kLanes;
  constexpr int kChannels = Access::kColumns ? kLanes : 1;
  wait_for_previous_kernel();
  const ChannelCursor<Access, kItems<Access, Act>> cursor(plan);
  ChannelFactors<Access> factors{};
  if (cursor.is_inside()) factors.load(p, cursor.channel());
  C sums[2][kLanes] = {};
  cursor.template each<false>(
      [&](int64_t at) {
        return load_gradient<Access, Act>(p, static_cast<const T*>(p.grad), false, at);
      },
      [&](const GradientItem<Access>& item, int64_t at) {
        C g[kLanes], from_mean[kLanes];
        gradient_of(p, factors, act, item, false, g, from_mean);
        if (p.grad_residual != nullptr) store(static_cast<T*>(p.grad_residual) + at, g);
#pragma unroll
        for (int i = 0; i < kLanes; ++i) {
          sums[0][i] += g[i];
          sums[1][i] = fma(g[i], from_mean[i], sums[1][i]);
        }
      });
  if (partial == nullptr) return;
  C merged[2][kChannels] = {};
#pragma unroll
  for (int i = 0; i < kLanes; ++i) {
    merged[0][factors.of(i)] += sums[0][i];
    merged[1][factors.of(i)] += sums[1][i];
  }
  __shared__ C shared[2 * kChannels * kChannelThreads];
  merge_threads<Access>(
      plan,
      [&] {
#pragma unroll
        for (int i = 0; i < 2 * kChannels; ++i)
          shared[i * kChannelThreads + threadIdx.x] = merged[i / kChannels][i % kChannels];
      },
      [&](int other) {
#pragma unroll
        for (int i = 0; i < 2 * kChannels; ++i)
          merged[i / kChannels][i % kChannels] += shared[i * kChannelThreads + other];
      });
  if (!cursor.is_inside() || !has_merged<Access>(plan)) return;
  C* const to = partial + int64_t{blockIdx.y} * 2 * p.layout.channels + cursor.channel();
#pragma unroll
  for (int i = 0; i < kChannels; ++i) {
    to[i] = merged[0][i];
    to[p.layout.channels + i] = merged[1][i];
  }
}

/// grad_x = scale * (g - slope * (x - mean) - level) in training, else scale * g. `grad` is the
/// incoming gradient, or g itself.
template <class Access, class Act>
__global__ void __launch_bounds__(kChannelThreads, kBackwardBlocks)
    input_gradients(BatchNormBackward p, ChannelPlan plan, Act act, const typename Access::T* grad,
                    bool is_g, const typename Access::C* coefficients) {
  using T = typename Access::T;
  using C = typename Access::C;
  constexpr int kLanes = Access::kLanes;
  constexpr int kChannels = Access::kColumns ? kLanes : 1;
  wait_for_previous_kernel();
  const ChannelCursor<Access, kItems<Access, Act>> cursor(plan);
  if (!cursor.is_inside()) return;
  ChannelFactors<Access> factors;
  factors.load(p, cursor.channel());
  C slope[kChannels] = {}, level[kChannels] = {};
  if (p.training) {
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      slope[i] = coefficients[cursor.channel() + i];
      level[i] = coefficients[cursor.channel() + i + p.layout.channels];
    }
  }
  cursor.template each<true>(
      [&](int64_t at) { return load_gradient<Access, Act>(p, grad, is_g, at); },
      [&](const GradientItem<Access>& item, int64_t at) {
        C g[kLanes], from_mean[kLanes];
        gradient_of(p, factors, act, item, is_g, g, from_mean);
#pragma unroll
        for (int i = 0; i < kLanes; ++i) {
          const int c = factors.of(i);
          if (p.training) g[i] = fma(-slope[c], from_mean[i], g[i]) - level[c];
          g[i] *= factors.scale[c];
        }
        store(static_cast<T*>(p.grad_x) + at, g);
      });
}

template <bool kColumns>
Status launch_backward(const BatchNormBackward& p, Allocate allocate, CUstream_st* stream) {
  const auto tensors = {p.grad, p.x, p.residual, static_cast<const void*>(p.grad_x),
                        static_cast<const void*>(p.grad_residual)};
  return with_channel_access<kColumns>(p.dtype, p.layout, tensors, [&](auto access) {
    using Access = decltype(access);
    using T = typename Access::T;
    using C = typename Access::C;
    return with_channel_activation<Access>(p.activation, [&](auto act) {
      using Act = decltype(act);
      const ChannelPlan plan =
          make_channel_plan<Access>(p.layout, kItems<Access, Act>, kBackwardBlocks);
      Grid grid;
      const Status fits = grid_of(plan, grid);
      if (!fits.ok()) return fits;
      const auto channels = static_cast<size_t>(p.layout.channels);
      C* partial = nullptr;
      C* coefficients = nullptr;
      Status status;
      if (p.needs_sums()) {
        partial =
            static_cast<C*>(allocate(static_cast<size_t>(plan.parts) * 2 * channels * sizeof(C)));
        coefficients = static_cast<C*>(allocate(2 * channels * sizeof(C)));
      }
      if (p.needs_sums() || p.grad_residual != nullptr) {
        status = launch_overlapped(part_sums<Access, Act>, grid, stream, p, plan, act, partial);
        if (!status.ok()) return status;
      }
      if (p.needs_sums()) {
        status = add_channel_sums(p, partial, plan.parts, coefficients, stream);
        if (!status.ok()) return status;
      }
      if (p.grad_x == nullptr) return status;
      const bool is_g = p.grad_residual != nullptr && p.residual_gradient_is_exact();
      const T* const grad = static_cast<const T*>(is_g ? p.grad_residual : p.grad);
      return launch_overlapped(input_gradients<Access, Act>, grid, stream, p, plan, act, grad, is_g,
                               static_cast<const C*>(coefficients));
    });
  });
}

}  // namespace
}  // namespace torchkiln::cuda
