#include "backward.cuh"
#include "total.cuh"

namespace torchkiln::cuda {
namespace {

template <class C>
__global__ void __launch_bounds__(kTotalThreads)
    add_sums(BatchNormBackward p, const C* partial, int64_t parts, int64_t columns) {
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
  if (p.coefficients == nullptr) return;
  C* const coefficients = static_cast<C*>(p.coefficients);
  const double count =
      p.count == nullptr ? static_cast<double>(p.layout.outer) * static_cast<double>(p.layout.inner)
                         : *p.count;
  const double slope = product * rstd / count;
  coefficients[channel] = static_cast<C>(slope);
  coefficients[channels + channel] = static_cast<C>(sum / count - slope * low);
}

}  // namespace

Status add_channel_sums(const BatchNormBackward& p, const void* partial, int64_t parts,
                        int64_t columns, CUstream_st* stream) {
  Grid grid;
  grid.blocks = dim3(static_cast<unsigned>(ceil_div(p.layout.channels, kChannelsOfTotal)));
  grid.threads = kTotalThreads;
  const auto launch = [&](auto tag) {
    using C = typename decltype(tag)::type;
    return launch_overlapped(add_sums<C>, grid, stream, p, static_cast<const C*>(partial), parts,
                             columns);
  };
  return p.dtype == Dtype::float64 ? launch(TypeTag<double>{}) : launch(TypeTag<float>{});
}

Status batch_norm_backward_sums(const BatchNormBackward& p, Allocate allocate,
                                CUstream_st* stream) {
  return p.layout.inner == 1 || folds_planes(p.layout) ? sums_of_rows(p, allocate, stream)
                                                       : sums_of_planes(p, allocate, stream);
}

Status batch_norm_backward_input(const BatchNormBackward& p, CUstream_st* stream) {
  return p.layout.inner == 1 || folds_planes(p.layout) ? input_gradients_of_rows(p, stream)
                                                       : input_gradients_of_planes(p, stream);
}

Status batch_norm_backward(const BatchNormBackward& arguments, Allocate allocate,
                           CUstream_st* stream) {
  BatchNormBackward p = arguments;
  if (p.training && p.grad_x != nullptr) {
    const size_t each = p.dtype == Dtype::float64 ? sizeof(double) : sizeof(float);
    p.coefficients = allocate(2 * static_cast<size_t>(p.layout.channels) * each);
  }
  const Status status = batch_norm_backward_sums(p, allocate, stream);
  return status.ok() && p.grad_x != nullptr ? batch_norm_backward_input(p, stream) : status;
}

}  // namespace torchkiln::cuda
