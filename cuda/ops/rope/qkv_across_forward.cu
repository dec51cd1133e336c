// qkv_norm_rope with one norm over all heads of queries and one over all heads of keys. A block
// processes a token, or a part of it, and reads its queries and keys twice. qkv_across.cuh has the
// functions that backward uses, too.

#include "ops/rope/qkv_across.cuh"

namespace torchkiln::cuda {
namespace {

template <class T, int kLanes>
__global__ void __launch_bounds__(kQkvThreads)
    qkv_norm_across_rope_tokens(const QkvAcrossPlan across,
                                const BlockSums<2, Compute<T>> block_sums) {
  using C = Compute<T>;
  wait_for_previous_kernel();
  const QkvPlan& plan = across.plan;
  const QkvNormRope& p = plan.p;
  const uint32_t batch = plan.tokens.quotient(blockIdx.x);
  const uint32_t token = blockIdx.x - batch * plan.tokens.divisor();
  const T* const row =
      static_cast<const T*>(p.qkv) + batch * p.qkv_stride[0] + token * p.qkv_stride[1];
  C scale[2] = {};
  if (block_sums.is_second()) block_sums.add_to(scale);
  const uint32_t squares = block_sums.is_second() ? 0 : across.normalized;
  for (uint32_t i = first_piece(); i < squares; i += piece_step()) {
    const RowPiece at(across, i, kLanes);
    C a[kLanes], b[kLanes], sum = C(0);
    load_piece(row + at.begin(p), at.piece, a, b);
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) sum += a[lane] * a[lane] + b[lane] * b[lane];
    scale[0] += at.kind == kQueries ? sum : C(0);
    scale[1] += at.kind == kQueries ? C(0) : sum;
  }
  reduce_block(scale);
  if (block_sums.is_first) return block_sums.write(scale);
#pragma unroll
  for (int kind = 0; kind < 2; ++kind)
    scale[kind] = rstd_of(scale[kind], C(1) / static_cast<C>(across.sizes[kind]), p);
  const int64_t factor_row = row_of(p.angles.rows, batch, token);
  const int64_t place = row_of(p.places, batch, token);
  for (uint32_t i = first_piece(); i < across.all; i += piece_step()) {
    const RowPiece at(across, i, kLanes);
    if (at.kind != kQueries && place < 0) return;
    C a[kLanes], b[kLanes];
    load_piece(row + at.begin(p), at.piece, a, b);
    if (at.kind != kValues) {
      Factors<C, kLanes> factors;
      factors.template load_weights<T>(plan, at.piece, at.kind, at.head * p.head_dim);
      const C rstd = at.kind == kQueries ? scale[0] : scale[1];
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        a[lane] *= rstd * factors.weight_a[lane];
        b[lane] *= rstd * factors.weight_b[lane];
      }
      if (at.piece.is_rotated) {
        factors.template load_angles<T>(plan, at.piece, batch, factor_row);
        rotate(p.angles.interleaved, a, b, factors.cos, factors.sin);
      }
    }
    const int64_t (&stride)[3] = p.out_stride[at.kind];
    T* const to = static_cast<T*>(p.out[at.kind]) + batch * stride[0] +
                  (at.kind == kQueries ? token : place) * stride[1] + at.head * stride[2];
    store_piece(to, at.piece, a, b);
  }
}

template <class T, int kLanes>
Status launch(const QkvAcrossChoice& choice, Allocate allocate, CUstream_st* stream) {
  return launch_across<2, Compute<T>>(choice, allocate, [&](const Grid& grid, const auto& sums) {
    return launch_overlapped(qkv_norm_across_rope_tokens<T, kLanes>, grid, stream, choice.plan,
                             sums);
  });
}

}  // namespace

Status qkv_norm_across_rope(const QkvNormRope& arguments, Allocate allocate, CUstream_st* stream) {
  const QkvAcrossChoice choice = choose_across(arguments);
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return choice.lanes == 1 ? launch<T, 1>(choice, allocate, stream)
                             : launch<T, kVectorLanes<T>>(choice, allocate, stream);
  });
}

}  // namespace torchkiln::cuda
