#pragma once

// The kernels of the backward: partial sums of each channel, and the gradient of x.

#include "factors.cuh"
#include "sums.cuh"

namespace torchkiln::cuda {

/// The backward in two steps, sums_of_*() and then grad_x from the coefficients. *_rows: adjacent
/// channels; *_planes: adjacent elements of a channel.
Status sums_of_rows(const BatchNormBackward& p, const ChannelPass& pass, Allocate allocate,
                    CUstream_st* stream);
Status sums_of_planes(const BatchNormBackward& p, const ChannelPass& pass, Allocate allocate,
                      CUstream_st* stream);
Status input_gradients_of_rows(const BatchNormBackward& p, const ChannelPass& pass,
                               CUstream_st* stream);
Status input_gradients_of_planes(const BatchNormBackward& p, const ChannelPass& pass,
                                 CUstream_st* stream);

/// Launches one cooperative kernel for both passes (backward_resident.cu).
Status launch_resident(const BatchNormBackward& p, const ChannelPass& pass, Allocate allocate,
                       CUstream_st* stream);

/// Adds the sums of `parts` parts of each channel: the gradients of weight and bias, and the
/// coefficients. `partial` is [parts, 2, columns] with one or more columns for each channel.
Status add_channel_sums(const BatchNormBackward& p, const void* partial, int64_t parts,
                        int64_t columns, CUstream_st* stream);

namespace {

template <class Access>
inline constexpr int kBackwardBlocksOf =
    backward_blocks(sizeof(typename Access::T), Access::kLanes);

/// Relu whose incoming gradient is the sum of two tensors. The kernel reads its derivative from the
/// sign bits.
template <class Math>
struct ReluOfSum : FixedActivation<Relu, Math> {
  static constexpr bool kAdds = true;
};
template <class Act, class = void>
constexpr bool kAddsSecond = false;
template <class Act>
constexpr bool kAddsSecond<Act, std::void_t<decltype(Act::kAdds)>> = true;

/// The tensors from which a kernel computes g, the gradient of the activation's argument: the
/// incoming gradient (or g itself), x, and a third one, which is the residual if the derivative
/// needs it, or the second incoming gradient.
template <class Access, class Act>
using GradientStreams = ChannelStreams<Access, Act::kReadsResidual || kAddsSecond<Act> ? 3 : 2,
                                       true, typename Access::C, typename Access::C>;

template <class Access, class Act>
__device__ __forceinline__ GradientStreams<Access, Act> gradient_streams(
    const BatchNormBackward& p, const typename Access::T* grad, bool is_g) {
  using T = typename Access::T;
  GradientStreams<Access, Act> streams{};
  streams.from[0] = grad;
  streams.from[1] = static_cast<const T*>(p.x);
  if (is_g) return streams;
  if constexpr (Act::kReadsResidual) streams.from[2] = static_cast<const T*>(p.residual);
  if constexpr (kAddsSecond<Act>) streams.from[2] = static_cast<const T*>(p.second);
  streams.signs = p.signs;
  streams.sign_bytes = p.layout.outer * p.layout.channels * p.layout.inner / 8;
  return streams;
}

/// Computes g and x - mean of an item.
template <class Access, class Act, class Item>
__device__ __forceinline__ void gradient_of(const BatchNormBackward& p,
                                            const ChannelFactors<Access>& factors, const Act& act,
                                            const Item& item, bool is_g,
                                            typename Access::C (&g)[Access::kLanes],
                                            typename Access::C (&from_mean)[Access::kLanes]) {
  using C = typename Access::C;
  constexpr int kLanes = Access::kLanes;
  widen(item.of[0], g);
  if constexpr (kAddsSecond<Act>) {
    add_vector(item.of[2], g);
#pragma unroll
    for (int i = 0; i < kLanes; ++i) g[i] = convert<C>(convert<typename Access::T>(g[i]));
  }
  if (!is_g) {
    if (p.signs != nullptr) {
#pragma unroll
      for (int i = 0; i < kLanes; ++i)
        if (((item.signs >> i) & 1u) == 0) g[i] = C(0);
    } else {
      C z[kLanes];
      factors.normalize(item.of[1], z);
      if constexpr (Act::kReadsResidual) {
        if (p.residual != nullptr) add_vector(item.of[2], z);
      }
      act.differentiate(g, z);
    }
  }
  widen(item.of[1], from_mean);
#pragma unroll
  for (int i = 0; i < kLanes; ++i) from_mean[i] -= factors.mean[factors.of(i)];
}

/// Computes g of an item, stores it as grad_residual if that is wanted, and adds g and g * (x -
/// mean) to `sums`.
template <class Access, class Act, class Item>
__device__ __forceinline__ void add_gradients(const BatchNormBackward& p,
                                              const ChannelFactors<Access>& factors, const Act& act,
                                              const Item& item, int64_t at,
                                              typename Access::C (&g)[Access::kLanes],
                                              typename Access::C (&sums)[2][Access::kLanes]) {
  using T = typename Access::T;
  constexpr int kLanes = Access::kLanes;
  typename Access::C from_mean[kLanes];
  // Without an activation g is the incoming gradient.
  gradient_of(p, factors, act, item, p.activation == kActivation<None>, g, from_mean);
  if (p.grad_residual != nullptr) store(static_cast<T*>(p.grad_residual) + at, g);
#pragma unroll
  for (int i = 0; i < kLanes; ++i) {
    sums[0][i] += g[i];
    sums[1][i] = fma(g[i], from_mean[i], sums[1][i]);
  }
}

/// Whether part_sums() also writes grad_x. It can in eval mode, where grad_x does not depend on the
/// sums.
inline bool sums_write_input_gradients(const BatchNormBackward& p) {
  return !p.training && (p.needs_sums() || p.grad_residual != nullptr);
}

/// Adds g and g * (x - mean) over the part of a block. Calls use(column or channel, sums) once for
/// each column or channel of the block.
template <class Access, class Act, class Use>
__device__ __forceinline__ void add_sums_of_block(const BatchNormBackward& p,
                                                  const ChannelPlan& plan, const Act& act,
                                                  const Use& use) {
  using T = typename Access::T;
  using C = typename Access::C;
  constexpr int kLanes = Access::kLanes;
  const ChannelCursor<Access> cursor(plan);
  const auto streams = gradient_streams<Access, Act>(p, static_cast<const T*>(p.grad), false);
  ChannelReader<false, GradientStreams<Access, Act>> reader(cursor, streams);
  ChannelFactors<Access> factors{};
  int64_t channels[factors.kChannels];
  cursor.channels(channels);
  if (cursor.is_inside()) factors.load(p, channels);
  C sums[2][kLanes] = {};
  reader.each([&](const auto& item, int64_t at) {
    C g[kLanes];
    add_gradients(p, factors, act, item, at, g, sums);
    if (p.training || p.grad_x == nullptr) return;
#pragma unroll
    for (int i = 0; i < kLanes; ++i) g[i] *= factors.scale[factors.of(i)];
    store(static_cast<T*>(p.grad_x) + at, g);
  });
  if (p.needs_sums()) add_threads<Access>(plan, sums, use);
}

/// Calls finish_sums() with the sums of a block.
template <class C>
__device__ __forceinline__ void finish_block(const BatchNormBackward& p, int64_t channel,
                                             const C (&total)[2]) {
  const double totals[] = {static_cast<double>(total[0]), static_cast<double>(total[1])};
  finish_sums<C>(p, channel, totals);
}

/// Sums g and g * (x - mean) over the part of each block, to `partial` [parts, 2, columns].
/// `partial` is null if a block has whole channels: it then computes their gradients and
/// coefficients, too.
template <class Access, class Act>
__global__ void __launch_bounds__(kChannelThreads, kBackwardBlocksOf<Access>)
    part_sums(BatchNormBackward p, ChannelPlan plan, Act act, typename Access::C* partial) {
  using C = typename Access::C;
  wait_for_previous_kernel();
  C* const to = partial + int64_t{blockIdx.y} * 2 * plan.columns;
  add_sums_of_block<Access>(p, plan, act, [&](int64_t column, const C(&total)[2]) {
    if (partial == nullptr) return finish_block<C>(p, column, total);
    to[column] = total[0];
    to[plan.columns + column] = total[1];
  });
}

/// grad_x = scale * (g - slope * (x - mean) - level) in training, else scale * g. `grad` is the
/// incoming gradient, or g itself.
template <class Access, class Act>
__device__ __forceinline__ void write_input_gradients(const BatchNormBackward& p,
                                                      const ChannelPlan& plan, const Act& act,
                                                      const typename Access::T* grad, bool is_g,
                                                      const typename Access::C* coefficients) {
  using T = typename Access::T;
  using C = typename Access::C;
  constexpr int kLanes = Access::kLanes;
  constexpr int kChannels = Access::kColumns ? kLanes : 1;
  const ChannelCursor<Access> cursor(plan);
  if (!cursor.is_inside()) return;
  const auto streams = gradient_streams<Access, Act>(p, grad, is_g);
  ChannelReader<true, GradientStreams<Access, Act>> reader(cursor, streams);
  ChannelFactors<Access> factors;
  int64_t channels[kChannels];
  cursor.channels(channels);
  factors.load(p, channels);
  C slope[kChannels] = {}, level[kChannels] = {};
  if (p.training) {
    read_each<C>(coefficients, channels, slope);
    read_each<C>(coefficients + p.layout.channels, channels, level);
  }
  reader.each([&](const auto& item, int64_t at) {
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

template <class Access, class Act>
__global__ void __launch_bounds__(kChannelThreads, kBackwardBlocksOf<Access>)
    input_gradients(BatchNormBackward p, ChannelPlan plan, Act act, const typename Access::T* grad,
                    bool is_g, const typename Access::C* coefficients) {
  wait_for_previous_kernel();
  write_input_gradients<Access>(p, plan, act, grad, is_g, coefficients);
}

/// Runs both passes in one kernel. It needs no grid barrier, because each block has whole channels.
template <class Access, class Act>
__global__ void __launch_bounds__(kChannelThreads, kBackwardBlocks)
    gradients_of_whole_channels(BatchNormBackward p, ChannelPlan plan, Act act) {
  using C = typename Access::C;
  wait_for_previous_kernel();
  add_sums_of_block<Access>(p, plan, act, [&](int64_t channel, const C(&total)[2]) {
    finish_block<C>(p, channel, total);
  });
  __syncthreads();
  write_input_gradients<Access>(p, plan, act, static_cast<const typename Access::T*>(p.grad),
                                p.activation == kActivation<None>,
                                static_cast<const C*>(p.coefficients));
}

/// Calls body(access, activation, grid). kMayAdd: whether the kernel can add a second incoming
/// gradient.
template <bool kColumns, bool kMayAdd, class Body>
Status with_backward_pass(const BatchNormBackward& p, const ChannelPass& pass, const Body& body) {
  Grid grid;
  const Status fits = grid_of(pass.plan, grid);
  if (!fits.ok()) return fits;
  return with_channel_access<kColumns>(p.dtype, pass.lanes, [&](auto access) {
    using Access = decltype(access);
    const auto with = [&](auto act) {
      grid.shared_bytes = GradientStreams<Access, decltype(act)>::kSharedBytes;
      return body(access, act, grid);
    };
    if constexpr (kMayAdd) {
      if (p.second != nullptr) return with(ReluOfSum<MathFor<typename Access::T>>{});
    }
    return with_channel_activation<Access>(p.activation, with);
  });
}

template <bool kColumns>
Status launch_sums(const BatchNormBackward& p, const ChannelPass& pass, Allocate allocate,
                   CUstream_st* stream) {
  if (!p.needs_sums() && p.grad_residual == nullptr) return {};
  const ChannelPlan& plan = pass.plan;
  return with_backward_pass<kColumns, /*kMayAdd=*/true>(
      p, pass, [&](auto access, auto act, const Grid& grid) {
        using Access = decltype(access);
        using C = typename Access::C;
        C* partial = nullptr;
        if (p.needs_sums() && !finishes_sums(p, plan, current_device())) {
          const auto sums = static_cast<size_t>(plan.parts * plan.columns) * 2;
          partial = static_cast<C*>(allocate(sums * sizeof(C)));
        }
        const Status status = launch_overlapped(part_sums<Access, decltype(act)>, grid, stream, p,
                                                plan, act, partial);
        if (!status.ok() || partial == nullptr) return status;
        return add_channel_sums(p, partial, plan.parts, plan.columns, stream);
      });
}

template <bool kColumns>
Status launch_input_gradients(const BatchNormBackward& p, const ChannelPass& pass,
                              CUstream_st* stream) {
  return with_backward_pass<kColumns, /*kMayAdd=*/false>(
      p, pass, [&](auto access, auto act, const Grid& grid) {
        using Access = decltype(access);
        using T = typename Access::T;
        if (pass.whole)
          return launch_overlapped(gradients_of_whole_channels<Access, decltype(act)>, grid, stream,
                                   p, pass.plan, act);
        const bool has_g = p.grad_residual != nullptr && p.residual_gradient_is_exact();
        const bool is_g = has_g || p.activation == kActivation<None>;
        const T* const grad = static_cast<const T*>(has_g ? p.grad_residual : p.grad);
        return launch_overlapped(input_gradients<Access, decltype(act)>, grid, stream, p, pass.plan,
                                 act, grad, is_g,
                                 static_cast<const typename Access::C*>(p.coefficients));
      });
}

}  // namespace
}  // namespace torchkiln::cuda
