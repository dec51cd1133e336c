// The gradients of qkv_norm_rope with one norm over all heads of a token. A block processes every
// gridDim.x-th token, or a part of it. It keeps its sums for the weights in shared memory. They are
// in global memory if they are larger than 48 KiB, or if blocks have parts of tokens.

#include "ops/rope/qkv_across.cuh"
#include "ops/rope/qkv_weight_sums.cuh"

namespace torchkiln::cuda {
namespace {

struct QkvAcrossBackward {
  QkvAcrossPlan across;
  QkvBackwardPlan backward;
  bool sums_in_shared;
};

/// Loads and widens a piece of a gradient; zeros if `head` is null.
template <class T, class C, int kLanes>
__device__ __forceinline__ void load_gradient(const T* head, const Piece& piece, C (&a)[kLanes],
                                              C (&b)[kLanes]) {
  if (head != nullptr) return load_piece(head, piece, a, b);
#pragma unroll
  for (int i = 0; i < kLanes; ++i) a[i] = b[i] = C(0);
}

/// For one piece: x, the incoming gradient after the inverse rotation, and the weight.
template <class C, int kLanes>
struct PieceGradient {
  C x_a[kLanes], x_b[kLanes], grad_a[kLanes], grad_b[kLanes];
  Factors<C, kLanes> factors;

  template <class T>
  __device__ __forceinline__ PieceGradient(const QkvPlan& plan, const RowPiece& at, const T* row,
                                           const T* grad, uint32_t batch, int64_t factor_row) {
    const QkvNormRope& p = plan.p;
    load_piece(row + at.begin(p), at.piece, x_a, x_b);
    load_gradient(grad, at.piece, grad_a, grad_b);
    if (at.piece.is_rotated) {
      factors.template load_angles<T>(plan, at.piece, batch, factor_row);
      negate(factors.sin);
      rotate(p.angles.interleaved, grad_a, grad_b, factors.cos, factors.sin);
    }
    factors.template load_weights<T>(plan, at.piece, at.kind, at.head * p.head_dim);
  }
};

template <int kLanes, class C>
__device__ __forceinline__ void add_to(C* sums, const C (&terms)[kLanes]) {
  Vec<C, kLanes> vector = load_vector<kLanes>(sums);
#pragma unroll
  for (int i = 0; i < kLanes; ++i) vector.lane[i] += terms[i];
  *reinterpret_cast<Vec<C, kLanes>*>(sums) = vector;
}

template <class T, int kLanes>
__global__ void __launch_bounds__(kQkvThreads, 2)
    qkv_norm_across_rope_gradients(const QkvAcrossBackward arguments,
                                   const BlockSums<4, Compute<T>> block_totals) {
  using C = Compute<T>;
  extern __shared__ __align__(kVectorBytes) unsigned char shared[];
  wait_for_previous_kernel();
  const QkvBackwardPlan& backward = arguments.backward;
  const QkvAcrossPlan& across = arguments.across;
  const QkvNormRope& p = across.plan.p;
  // The sums of a piece, in the row of sums of this block. Each thread adds only to the sums of its
  // own pieces, so no barrier is needed.
  const auto row_sums = [&](const RowPiece& at) -> C* {
    C* const sums = static_cast<C*>(backward.sums[at.kind]);
    if (sums == nullptr) return nullptr;
    return sums + blockIdx.x * across.sizes[at.kind] + at.head * p.head_dim;
  };
  const auto block_sums = [&](const RowPiece& at) -> C* {
    C* const sums = row_sums(at);
    if (sums == nullptr || !arguments.sums_in_shared) return sums;
    return reinterpret_cast<C*>(shared) + at.begin(p);
  };
  constexpr C kZeros[kLanes] = {};
  for (uint32_t i = first_piece(); !block_totals.is_first && i < across.normalized;
       i += piece_step()) {
    const RowPiece at(across, i, kLanes);
    if (C* const sums = block_sums(at)) store_piece(sums, at.piece, kZeros, kZeros);
  }

  for (uint32_t index = blockIdx.x; index < across.plan.all_tokens; index += gridDim.x) {
    const uint32_t batch = across.plan.tokens.quotient(index);
    const uint32_t token = index - batch * across.plan.tokens.divisor();
    const int64_t factor_row = row_of(p.angles.rows, batch, token);
    const T* const row =
        static_cast<const T*>(p.qkv) + batch * p.qkv_stride[0] + token * p.qkv_stride[1];
    T* const to =
        static_cast<T*>(backward.grad_qkv) + index * (p.heads + 2 * p.kv_heads) * p.head_dim;
    const auto grad_of = [&](const RowPiece& at) -> const T* {
      const T* const grad = static_cast<const T*>(backward.grad[at.kind]);
      const int64_t (&stride)[3] = backward.grad_stride[at.kind];
      if (grad == nullptr) return nullptr;
      return grad + batch * stride[0] + token * stride[1] + at.head * stride[2];
    };
    // For queries and for keys: the sum of squares of x, and the sum of x times the gradient of the
    // normalized x.
    C totals[4] = {};
    if (block_totals.is_second()) block_totals.add_to(totals);
    const uint32_t counted = block_totals.is_second() ? 0 : across.normalized;
    for (uint32_t i = first_piece(); i < counted; i += piece_step()) {
      const RowPiece at(across, i, kLanes);
      const PieceGradient<C, kLanes> g(across.plan, at, row, grad_of(at), batch, factor_row);
      C square = C(0), product = C(0);
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        square += g.x_a[lane] * g.x_a[lane] + g.x_b[lane] * g.x_b[lane];
        product += g.x_a[lane] * g.grad_a[lane] * g.factors.weight_a[lane] +
                   g.x_b[lane] * g.grad_b[lane] * g.factors.weight_b[lane];
      }
      const bool is_query = at.kind == kQueries;
      totals[0] += is_query ? square : C(0);
      totals[1] += is_query ? C(0) : square;
      totals[2] += is_query ? product : C(0);
      totals[3] += is_query ? C(0) : product;
    }
    reduce_block(totals);
    if (block_totals.is_first) return block_totals.write(totals);
    C rstds[2], pulls[2];
#pragma unroll
    for (int kind = 0; kind < 2; ++kind) {
      const C inverse_size = C(1) / static_cast<C>(across.sizes[kind]);
      const C rstd = rstd_of(totals[kind], inverse_size, p);
      rstds[kind] = rstd;
      pulls[kind] = totals[2 + kind] * rstd * rstd * inverse_size;
    }
    for (uint32_t i = first_piece(); i < across.all; i += piece_step()) {
      const RowPiece at(across, i, kLanes);
      if (at.kind == kValues) {
        C a[kLanes], b[kLanes];
        load_gradient(grad_of(at), at.piece, a, b);
        store_piece(to + at.begin(p), at.piece, a, b);
        continue;
      }
      PieceGradient<C, kLanes> g(across.plan, at, row, grad_of(at), batch, factor_row);
      const C rstd = at.kind == kQueries ? rstds[0] : rstds[1];
      const C pull = at.kind == kQueries ? pulls[0] : pulls[1];
      C terms_a[kLanes], terms_b[kLanes];
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        terms_a[lane] = g.grad_a[lane] * (g.x_a[lane] * rstd);
        terms_b[lane] = g.grad_b[lane] * (g.x_b[lane] * rstd);
        g.grad_a[lane] = rstd * (g.grad_a[lane] * g.factors.weight_a[lane] - g.x_a[lane] * pull);
        g.grad_b[lane] = rstd * (g.grad_b[lane] * g.factors.weight_b[lane] - g.x_b[lane] * pull);
      }
      if (C* const sums = block_sums(at)) {
        add_to<kLanes>(sums + at.piece.first, terms_a);
        if (at.piece.has_second) add_to<kLanes>(sums + at.piece.second, terms_b);
      }
      store_piece(to + at.begin(p), at.piece, g.grad_a, g.grad_b);
    }
  }
  if (!arguments.sums_in_shared) return;
  for (uint32_t i = first_piece(); i < across.normalized; i += piece_step()) {
    const RowPiece at(across, i, kLanes);
    C* const sums = row_sums(at);
    if (sums == nullptr) continue;
    const auto copy = [&](int64_t lane) {
      *reinterpret_cast<Vec<C, kLanes>*>(sums + lane) = load_vector<kLanes>(block_sums(at) + lane);
    };
    copy(at.piece.first);
    if (at.piece.has_second) copy(at.piece.second);
  }
}

template <class T, int kLanes>
Status launch(const QkvNormRopeBackward& arguments, const QkvAcrossChoice& choice,
              Allocate allocate, CUstream_st* stream) {
  const WeightSums sums = make_weight_sums<T>(arguments, choice.blocks, choice.blocks, allocate);
  const QkvAcrossBackward across{choice.plan, make_backward_plan(choice.plan.plan, arguments, sums),
                                 choice.shared_bytes > 0};
  const Status status =
      launch_across<4, Compute<T>>(choice, allocate, [&](const Grid& grid, const auto& totals) {
        return launch_overlapped(qkv_norm_across_rope_gradients<T, kLanes>, grid, stream, across,
                                 totals);
      });
  return status.ok() ? finish_weight_sums<T>(sums, arguments.forward.weight_dtype, stream) : status;
}

}  // namespace

Status qkv_norm_across_rope_backward(const QkvNormRopeBackward& arguments, Allocate allocate,
                                     CUstream_st* stream) {
  const QkvAcrossChoice choice = choose_across(arguments, current_device());
  return dispatch_floating(arguments.forward.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return choice.lanes == 1 ? launch<T, 1>(arguments, choice, allocate, stream)
                             : launch<T, kVectorLanes<T>>(arguments, choice, allocate, stream);
  });
}

}  // namespace torchkiln::cuda
