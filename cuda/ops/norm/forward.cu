// Layer norm and RMS norm of rows. choose.h picks one of three plans; thresholds.h has its numbers.
// Bytes of a row, on GPUs of 9.0 and later with many rows; docs/choosing.md has every case:
//
//   plan, file              bytes                 why, measured on an H100
//   one pass                to 64 KiB in a block, A team holds the row in registers: each element
//   forward_by_dtype.cuh    512 KiB in a cluster  is read once, weight and bias once per row.
//   slabs                   above 64 to 256 KiB;  Weight and bias are read once. Layer norm of
//   forward_slabs.cu        above 32 to 128 with  1335 x 50257 float32: 210 us, in one pass 459.
//                           an offset; scalar: 7  8192 x 16384 bfloat16 whose offsets differ: 225
//                           (half), 16 (float32)  us, in one pass 590. RMS norm in half: scalar
//                           only.
//   parts                   longer rows; before   No team holds the row: two reads, the second
//   forward_split.cu        9.0 above 64 KiB      from L2, by all SMs.
//
// The slabs of forward and backward share slab_plan.h, slab_ring.cuh and slab_columns.cuh; slabs
// and parts share forward_moments.cuh.
//
// Rows of whole vectors in one pass are also quantised; of other rows, y is written and read again.

#include "launch.cuh"
#include "torchkiln/device/launch.cuh"
#include "torchkiln/device/vec.cuh"

namespace torchkiln::cuda {
namespace {

template <class Plan>  // OnePassPlan or QuantizedPlan
Status launch(const Norm& p, const Plan& plan, Allocate, CUstream_st* stream) {
  return dispatch_floating(p.dtype, [&](auto tag) {
    return NormForwardByDtype<typename decltype(tag)::type>::launch(p, plan, stream);
  });
}

/// Writes y to temporary memory, then quantises it with a second kernel.
Status launch_and_quantize(const Norm& p, Allocate allocate, CUstream_st* stream) {
  Norm plain = p;
  plain.data = nullptr;
  plain.scale = nullptr;
  plain.y = allocate(static_cast<size_t>(p.rows * p.columns) * size_of(p.dtype));
  const Status status = norm(plain, allocate, stream);
  if (!status.ok()) return status;
  Quantize result{};
  result.x = plain.y;
  result.dtype = p.dtype;
  result.rows = p.rows;
  result.columns = result.stride = p.columns;
  result.data = p.data;
  result.scale = p.scale;
  result.scale_stride = p.rows;
  return quantize(result, stream);
}

}  // namespace

Status norm(const Norm& p, Allocate allocate, CUstream_st* stream) {
  if (p.rows == 0 || p.columns == 0) return {};
  if (p.columns > kMaxColumns) return {kTooLong};
  if (p.data != nullptr) {
    const auto quantized = plan_quantized(p, current_device());
    return quantized ? launch(p, *quantized, allocate, stream)
                     : launch_and_quantize(p, allocate, stream);
  }
  const NormPlan plan = choose(p, alignment_of_rows(p), current_device());
  return std::visit([&](const auto& chosen) { return launch(p, chosen, allocate, stream); }, plan);
}

}  // namespace torchkiln::cuda
