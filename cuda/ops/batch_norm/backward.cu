// The gradients of batch norm: partial sums of each channel, their total (in this file), grad_x.
//
//   plan       kernels                                     when
//   resident   one cooperative kernel for both passes,     training on 9.0, adjacent channels in
//              backward_resident.cu                        vectors; with grad_residual up to 2^24
//                                                          elements
//   rows       sums, total, grad_x: backward_rows.cu       adjacent channels, and small planes that
//                                                          fold to rows of all channels
//   planes     sums, total, grad_x: backward_planes.cu     channels of adjacent elements
//   whole      one kernel for both passes: the files of    training, channels that one block reads
//              rows and planes                             alone, few elements each in rows
//
// In eval mode the kernel of the sums writes grad_x. backward.cuh has the kernels of rows and
// planes, total.cuh and sums.cuh the total.

#include "backward.cuh"
#include "sums.cuh"
#include "total.cuh"

namespace torchkiln::cuda {
namespace {

template <class C, int kThreads>
__global__ void __launch_bounds__(kChannelTotalThreads)
    add_sums(BatchNormBackward p, const C* partial, int64_t parts, int64_t columns) {
  wait_for_previous_kernel();
  const int64_t channels = p.layout.channels;
  const ChannelParts<kThreads> own(parts, 2 * columns, columns, channels);
  const int64_t channel = own.channel();
  const bool inside = channel < channels;
  double sums[2] = {};
  if (inside) {
    struct Part {
      C sum, product;
    };
    own.template each<Part>([&](int64_t at) { return Part{partial[at], partial[at + columns]}; },
                            [&](const Part& each) {
                              sums[0] += static_cast<double>(each.sum);
                              sums[1] += static_cast<double>(each.product);
                            });
  }
  if (!add_total(own, sums) || !inside) return;
  finish_sums<C>(p, channel, sums);
}

Status sums_of(const BatchNormBackward& p, const ChannelPass& pass, Allocate allocate,
               CUstream_st* stream) {
  return pass.in_rows ? sums_of_rows(p, pass, allocate, stream)
                      : sums_of_planes(p, pass, allocate, stream);
}

Status input_gradients_of(const BatchNormBackward& p, const ChannelPass& pass,
                          CUstream_st* stream) {
  return pass.in_rows ? input_gradients_of_rows(p, pass, stream)
                      : input_gradients_of_planes(p, pass, stream);
}

}  // namespace

Status add_channel_sums(const BatchNormBackward& p, const void* partial, int64_t parts,
                        int64_t columns, CUstream_st* stream) {
  const int64_t terms = parts * (columns / p.layout.channels);
  return with_threads_of_total(p.layout.channels, terms, [&](auto threads, const Grid& grid) {
    const auto launch = [&](auto tag) {
      using C = typename decltype(tag)::type;
      return launch_overlapped(add_sums<C, decltype(threads)::value>, grid, stream, p,
                               static_cast<const C*>(partial), parts, columns);
    };
    return p.dtype == Dtype::float64 ? launch(TypeTag<double>{}) : launch(TypeTag<float>{});
  });
}

Status batch_norm_backward_sums(const BatchNormBackward& p, Allocate allocate,
                                CUstream_st* stream) {
  return sums_of(p, choose_passes(p, current_device()), allocate, stream);
}

Status batch_norm_backward_input(const BatchNormBackward& p, CUstream_st* stream) {
  return input_gradients_of(p, choose_passes(p, current_device()), stream);
}

Status batch_norm_backward(const BatchNormBackward& arguments, Allocate allocate,
                           CUstream_st* stream) {
  BatchNormBackward p = arguments;
  if (p.training && p.grad_x != nullptr) {
    const size_t each = p.dtype == Dtype::float64 ? sizeof(double) : sizeof(float);
    p.coefficients = allocate(2 * static_cast<size_t>(p.layout.channels) * each);
  }
  const BatchNormBackwardPlan plan = choose(p, current_device());
  if (plan.resident) return launch_resident(p, *plan.resident, allocate, stream);
  if (plan.passes.whole) return input_gradients_of(p, plan.passes, stream);
  const Status status = sums_of(p, plan.passes, allocate, stream);
  if (!status.ok() || p.grad_x == nullptr || sums_write_input_gradients(p)) return status;
  return input_gradients_of(p, plan.passes, stream);
}

}  // namespace torchkiln::cuda
