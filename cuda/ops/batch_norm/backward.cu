#include "backward.cuh"

namespace torchkiln::cuda {
namespace {

constexpr int kAddThreads = 1024;

template <class C>
__global__ void __launch_bounds__(kAddThreads)
    add_sums(BatchNormBackward p, const C* partial, int64_t parts, C* coefficients) {
  constexpr int kWarps = kAddThreads / kWarpLanes;
  const int lane = threadIdx.x % kWarpLanes, warp = threadIdx.x / kWarpLanes;
  const int64_t channels = p.layout.channels;
  const int64_t channel = int64_t{blockIdx.x} * kWarpLanes + lane;
  __shared__ double shared[2][kWarps][kWarpLanes];
  double sum = 0, product = 0;
  wait_for_previous_kernel();
  if (channel < channels) {
#pragma unroll 4
    for (int64_t part = warp; part < parts; part += kWarps) {
      sum += static_cast<double>(partial[2 * part * channels + channel]);
      product += static_cast<double>(partial[(2 * part + 1) * channels + channel]);
    }
  }
  shared[0][warp][lane] = sum;
  shared[1][warp][lane] = product;
  __syncthreads();
  if (warp > 0 || channel >= channels) return;
#pragma unroll
  for (int w = 1; w < kWarps; ++w) {
    sum += shared[0][w][lane];
    product += shared[1][w][lane];
  }
  const C* const statistics = static_cast<const C*>(p.statistics) + channel;
  const auto low = static_cast<double>(statistics[channels]);
  const auto rstd = static_cast<double>(statistics[2 * channels]);
  product = (product - low * sum) * rstd;
  if (p.grad_weight != nullptr)
    reduce::Result{p.grad_weight, p.parameter_dtype, 1}.store(channel, product);
  if (p.grad_bias != nullptr) reduce::Result{p.grad_bias, p.parameter_dtype, 1}.store(channel, sum);
  const auto count = static_cast<double>(p.layout.outer) * static_cast<double>(p.layout.inner);
  const double slope = product * rstd / count;
  coefficients[channel] = static_cast<C>(slope);
  coefficients[channels + channel] = static_cast<C>(sum / count - slope * low);
}

}  // namespace

Status add_channel_sums(const BatchNormBackward& p, const void* partial, int64_t parts,
                        void* coefficients, CUstream_st* stream) {
  Grid grid;
  grid.blocks = dim3(static_cast<unsigned>(ceil_div(p.layout.channels, kWarpLanes)));
  grid.threads = kAddThreads;
  const auto launch = [&](auto tag) {
    using C = typename decltype(tag)::type;
    return launch_overlapped(add_sums<C>, grid, stream, p, static_cast<const C*>(partial), parts,
                             static_cast<C*>(coefficients));
  };
  return p.dtype == Dtype::float64 ? launch(TypeTag<double>{}) : launch(TypeTag<float>{});
}

Status batch_norm_backward(const BatchNormBackward& p, Allocate allocate, CUstream_st* stream) {
  return p.layout.inner == 1 ? batch_norm_backward_rows(p, allocate, stream)
                             : batch_norm_backward_planes(p, allocate, stream);
}

}  // namespace torchkiln::cuda
