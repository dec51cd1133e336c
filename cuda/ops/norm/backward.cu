// Gradients of layer norm and RMS norm. choose.h picks the first of five plans that applies;
// thresholds.h has its numbers, backward_plans.h the plans. Bytes are those of a row;
// docs/choosing.md has every case and GPU:
//
//   plan, file              rows and bytes        why, measured on an H100
//   few rows                aligned, to 2,048     The tensors stay in L2: both are read twice, and
//   backward_few_rows.cu    rows of 32 KiB and    no second kernel adds partial sums. Other rows
//                           16 MiB per tensor;    are read element by element.
//                           others, to 2^20
//                           elements
//   bulk                    9.0, aligned, 1 to    Bulk copies of rows ahead: 11 to 31 % less time
//   backward_bulk.cu        16 KiB, RMS norm 32   than streamed, 4,096 and 8,192 columns bfloat16.
//   slabs                   9.0, long rows, and   All blocks share a row. Layer norm in bfloat16,
//   backward_slabs.cu       unaligned ones above  2671 x 50257: 314 us, streamed 569 us;
//                           3 to 40 KiB           67 x 1000003: 176 us, split 701 us.
//   stream                  one offset in all     A block or cluster copies rows ahead and keeps
//   backward_by_dtype.cuh   tensors, to 16 KiB    the sums of its columns. On 9.0 it takes the rows
//                           before 9.0            that the plans above leave.
//   split                   all other rows        Two reads, the second from L2: float64, long
//   backward_split.cu                             rows before 9.0, rows without a shared offset.
//
// All plans except "few rows" share the formula of backward_common.cuh, and backward_finish.cuh
// adds their partial sums.

#include "launch.cuh"
#include "torchkiln/device/launch.cuh"
#include "torchkiln/device/vec.cuh"

namespace torchkiln::cuda {
namespace norm_gradients {
namespace {

Status launch(const NormBackward& p, const StreamPlan& plan, Allocate allocate,
              CUstream_st* stream) {
  return dispatch_floating(p.dtype, [&](auto tag) {
    return NormBackwardByDtype<typename decltype(tag)::type>::launch(p, plan, allocate, stream);
  });
}

Status launch_chosen(const NormBackward& p, Allocate allocate, CUstream_st* stream) {
  const GradientPlan plan = choose(p, alignment_of_rows(p), current_device());
  return std::visit([&](const auto& chosen) { return launch(p, chosen, allocate, stream); }, plan);
}

}  // namespace
}  // namespace norm_gradients

Status norm_backward(const NormBackward& p, Allocate allocate, CUstream_st* stream) {
  if (p.rows == 0 || p.columns == 0) return {};
  if (p.columns > kMaxColumns) return {kTooLong};
  return norm_gradients::launch_chosen(p, allocate, stream);
}

}  // namespace torchkiln::cuda
