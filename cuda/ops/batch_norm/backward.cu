#include "backward.cuh"
#include "total.cuh"

namespace torchkiln::cuda {
namespace {

template <class C>
__global__ void __launch_bounds__(kTotalThreads)
    add_sums(BatchNormBackward p, const C* partial, int64_t parts, int64_t columns,
             C* coefficients) {
  wait_for_previous_kernel();
  const int64_t channels = p.layout.channels;
  const ChannelParts own(parts, 2 * columns, columns, channels);
  const int64_t channel = own.channel();
  const bool inside = channel < channels;
  double sums[2] = {}, low = 0, rstd = 0;
  if (inside) {
    const C* const statistics = static_cast<const C*>(p.statistics) + channel;
    low = static_cast<double>(statistics[channels]);
    rstd = static_cast<double>(statistics[2 * channels]);
    struct Part {
      C sum, product;
    };
    own.each<Part>([&](int64_t at) { return Part{partial[at], partial[at + columns]}; },
                   [&](const Part& each) {
                     sums[0] += static_cast<double>(each.sum);
                     sums[1] += static_cast<double>(each.product);
                   });
  }
  if (!add_total(own, sums) || !inside) return;
  const double sum = sums[0];
  const double product = (sums[1] - low * sum) * rstd;
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
                        int64_t columns, void* coefficients, CUstream_st* stream) {
  Grid grid;
  grid.blocks = dim3(static_cast<unsigned>(ceil_div(p.layout.channels, kChannelsOfTotal)));
  grid.threads = kTotalThreads;
  const auto launch = [&](auto tag) {
    using C = typename decltype(tag)::type;
    return launch_overlapped(add_sums<C>, grid, stream, p, static_cast<const C*>(partial), parts,
                             columns, static_cast<C*>(coefficients));
  };
  return p.dtype == Dtype::float64 ? launch(TypeTag<double>{}) : launch(TypeTag<float>{});
}

Status batch_norm_backward(const BatchNormBackward& p, Allocate allocate, CUstream_st* stream) {
  return p.layout.inner == 1 || folds_planes(p.layout)
             ? batch_norm_backward_rows(p, allocate, stream)
             : batch_norm_backward_planes(p, allocate, stream);
}

}  // namespace torchkiln::cuda
