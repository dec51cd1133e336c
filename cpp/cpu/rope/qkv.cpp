#include <algorithm>
#include <cmath>

#include "rope/angles.h"
#include "torchkiln/cpu/half.h"
#include "torchkiln/cpu/isa.h"
#include "torchkiln/kernels/rope.h"

namespace torchkiln::cpu {
namespace TORCHKILN_ISA {
namespace {

// Tokens per chunk of the backward, for each of which there is a row of sums.
constexpr int64_t kChunkTokens = 64;
constexpr int64_t kMostChunks = 64;

int64_t tokens_per_chunk(const QkvNormRope& p) {
  const int64_t all = p.batch * p.tokens;
  return std::max(kChunkTokens, (all + kMostChunks - 1) / kMostChunks);
}

/// The factors of a token in the compute type.
template <class C>
struct Factors {
  C cos[kMostHeadElements / 2];
  C sin[kMostHeadElements / 2];

  Factors(const RopeAngles& angles, int64_t batch, int64_t token, C sign) {
    const int64_t row = row_of(angles.rows, batch, token);
    for (int64_t pair = 0; pair < angles.rotary / 2; pair += kPairs) {
      const int64_t count = std::min(kPairs, angles.rotary / 2 - pair);
      read_factors(angles, angles.cos, batch, row, pair, count, C(1), cos + pair);
      read_factors(angles, angles.sin, batch, row, pair, count, sign, sin + pair);
    }
  }

  /// Rotates a head.
  void rotate(const RopeAngles& angles, C* head) const {
    const int64_t step = angles.interleaved ? 2 : 1;
    C* const second = angles.interleaved ? head + 1 : head + angles.rotary / 2;
    for (int64_t i = 0; i < angles.rotary / 2; ++i) {
      const C a = head[i * step], b = second[i * step];
      head[i * step] = a * cos[i] - b * sin[i];
      second[i * step] = b * cos[i] + a * sin[i];
    }
  }
};

/// Weights of queries and keys in the compute type, with the offset; ones without a weight.
template <class C>
struct Weights {
  C rows[2][kMostHeadElements];

  explicit Weights(const QkvNormRope& p) {
    for (int kind = 0; kind < 2; ++kind) {
      std::fill_n(rows[kind], p.head_dim, C(1));
      if (p.weight[kind] == nullptr) continue;
      C buffer[kMostHeadElements];
      const C* run = read_run(buffer, p.weight[kind], 0, 1, p.head_dim, p.weight_dtype);
      for (int64_t i = 0; i < p.head_dim; ++i)
        rows[kind][i] = run[i] + static_cast<C>(p.weight_offset);
    }
  }
};

int64_t heads_of(const QkvNormRope& p, int kind) { return kind == 0 ? p.heads : p.kv_heads; }

/// The position of the first head of a kind in a packed row.
int64_t first_of(const QkvNormRope& p, int kind) {
  return kind == 0 ? 0 : p.heads + (kind - 1) * p.kv_heads;
}

/// The sum of term(i) for i < count, in parallel sums, which are vectors and lose few digits.
template <class C, class Term>
C sum_of(int64_t count, const Term& term) {
  constexpr int64_t kSums = 16;
  C sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums <= count; i += kSums)
    for (int64_t lane = 0; lane < kSums; ++lane) sums[lane] += term(i + lane);
  for (int64_t lane = 0; i < count; ++i, ++lane) sums[lane] += term(i);
  for (int64_t half = kSums / 2; half > 0; half /= 2)
    for (int64_t lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
  return sums[0];
}

template <class C>
C rstd_of(const QkvNormRope& p, const C* x) {
  const C sum = sum_of<C>(p.head_dim, [&](int64_t i) { return x[i] * x[i]; });
  return C(1) / std::sqrt(sum / static_cast<C>(p.head_dim) + static_cast<C>(p.eps));
}

template <class T>
void forward_token(const QkvNormRope& p, const Weights<Compute<T>>& weights, int64_t index) {
  using C = Compute<T>;
  const int64_t batch = index / p.tokens, token = index % p.tokens;
  const Factors<C> factors(p.angles, batch, token, C(1));
  const T* const row =
      static_cast<const T*>(p.qkv) + batch * p.qkv_stride[0] + token * p.qkv_stride[1];
  for (int kind = 0; kind < 3; ++kind) {
    const int64_t place = kind == 0 ? token : row_of(p.places, batch, token);
    if (place < 0) continue;
    const int64_t (&stride)[3] = p.out_stride[kind];
    const T* const from = row + first_of(p, kind) * p.head_dim;
    T* const to = static_cast<T*>(p.out[kind]) + batch * stride[0] + place * stride[1];
    for (int64_t h = 0; h < heads_of(p, kind); ++h) {
      if (kind == 2) {
        std::copy_n(from + h * p.head_dim, p.head_dim, to + h * stride[2]);
        continue;
      }
      C head[kMostHeadElements];
      widen_run(head, from + h * p.head_dim, 1, p.head_dim);
      const C scale = p.normalizes ? rstd_of(p, head) : C(1);
      for (int64_t i = 0; i < p.head_dim; ++i) head[i] *= scale * weights.rows[kind][i];
      factors.rotate(p.angles, head);
      narrow_run(to + h * stride[2], head, p.head_dim);
    }
  }
}

/// Adds to `sums` the terms of the gradient of the weight from one head. `grad` is the gradient of
/// the head's result and becomes that of the head.
template <class C>
void head_gradient(const QkvNormRope& p, const Factors<C>& back, const C* weight, const C* x,
                   C* grad, C* sums) {
  back.rotate(p.angles, grad);
  if (!p.normalizes) {
    for (int64_t i = 0; i < p.head_dim; ++i) grad[i] *= weight[i];
    return;
  }
  const C rstd = rstd_of(p, x);
  const C product = sum_of<C>(p.head_dim, [&](int64_t i) { return x[i] * grad[i] * weight[i]; });
  const C pull = product * rstd * rstd / static_cast<C>(p.head_dim);
  for (int64_t i = 0; i < p.head_dim; ++i) {
    sums[i] += grad[i] * (x[i] * rstd);
    grad[i] = rstd * (grad[i] * weight[i] - x[i] * pull);
  }
}

template <class T>
void backward_token(const QkvNormRopeBackward& arguments, const Weights<Compute<T>>& weights,
                    int64_t index, Compute<T>* sums) {
  using C = Compute<T>;
  const QkvNormRope& p = arguments.forward;
  const int64_t batch = index / p.tokens, token = index % p.tokens;
  const Factors<C> back(p.angles, batch, token, C(-1));
  const T* const row =
      static_cast<const T*>(p.qkv) + batch * p.qkv_stride[0] + token * p.qkv_stride[1];
  T* const out =
      static_cast<T*>(arguments.grad_qkv) + index * (p.heads + 2 * p.kv_heads) * p.head_dim;
  for (int kind = 0; kind < 3; ++kind) {
    const int64_t (&stride)[3] = arguments.grad_stride[kind];
    for (int64_t h = 0; h < heads_of(p, kind); ++h) {
      const int64_t at = (first_of(p, kind) + h) * p.head_dim;
      C grad[kMostHeadElements], x[kMostHeadElements];
      std::fill_n(grad, p.head_dim, C(0));
      if (arguments.grad[kind] != nullptr) {
        widen_run(grad,
                  static_cast<const T*>(arguments.grad[kind]) + batch * stride[0] +
                      token * stride[1] + h * stride[2],
                  1, p.head_dim);
      }
      if (kind < 2) {
        widen_run(x, row + at, 1, p.head_dim);
        head_gradient(p, back, weights.rows[kind], x, grad, sums + kind * p.head_dim);
      }
      narrow_run(out + at, grad, p.head_dim);
    }
  }
}

}  // namespace

Status qkv_norm_rope(const QkvNormRope& arguments, int64_t begin, int64_t end) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Weights<Compute<T>> weights(arguments);
    for (int64_t i = begin; i < end; ++i) forward_token<T>(arguments, weights, i);
    return Status{};
  });
}

Status qkv_norm_rope_backward(const QkvNormRopeBackward& arguments, int64_t begin, int64_t end) {
  return dispatch_floating(arguments.forward.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    const QkvNormRope& p = arguments.forward;
    const Weights<C> weights(p);
    const int64_t count = tokens_per_chunk(p);
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      C* const sums = static_cast<C*>(arguments.workspace) + chunk * 2 * p.head_dim;
      std::fill_n(sums, 2 * p.head_dim, C(0));
      const int64_t last = std::min(p.batch * p.tokens, (chunk + 1) * count);
      for (int64_t i = chunk * count; i < last; ++i) backward_token<T>(arguments, weights, i, sums);
    }
    return Status{};
  });
}

Status qkv_norm_rope_backward_finish(const QkvNormRopeBackward& arguments, int64_t begin,
                                     int64_t end) {
  return dispatch_floating(arguments.forward.dtype, [&](auto tag) {
    using C = Compute<typename decltype(tag)::type>;
    const QkvNormRope& p = arguments.forward;
    const int64_t count = tokens_per_chunk(p);
    const int64_t chunks = (p.batch * p.tokens + count - 1) / count;
    return dispatch_floating(p.weight_dtype, [&](auto weight_tag) {
      using W = typename decltype(weight_tag)::type;
      if constexpr (std::is_same_v<Compute<W>, C>) {
        for (int64_t i = begin; i < end; ++i) {
          void* const to = arguments.grad_weight[i / p.head_dim];
          if (to == nullptr) continue;
          C sum = C(0);
          for (int64_t chunk = 0; chunk < chunks; ++chunk)
            sum += static_cast<const C*>(arguments.workspace)[chunk * 2 * p.head_dim + i];
          narrow_run(static_cast<W*>(to) + i % p.head_dim, &sum, 1);
        }
        return Status{};
      }
      return Status{"weight dtype not supported by this kernel"};
    });
  });
}

}  // namespace TORCHKILN_ISA

#ifdef TORCHKILN_BASELINE
Split split(const QkvNormRopeBackward& arguments) {
  const QkvNormRope& p = arguments.forward;
  const int64_t count = baseline::tokens_per_chunk(p);
  const int64_t chunks = (p.batch * p.tokens + count - 1) / count;
  const size_t element = p.dtype == Dtype::float64 ? sizeof(double) : sizeof(float);
  const bool wants = arguments.grad_weight[0] != nullptr || arguments.grad_weight[1] != nullptr;
  return {chunks, static_cast<size_t>(chunks * 2 * p.head_dim) * element,
          wants ? 2 * p.head_dim : 0};
}
#endif

TORCHKILN_CPU_ENTRY(qkv_norm_rope, (const QkvNormRope& arguments, int64_t begin, int64_t end),
                    (arguments, begin, end))
TORCHKILN_CPU_ENTRY(qkv_norm_rope_backward,
                    (const QkvNormRopeBackward& arguments, int64_t begin, int64_t end),
                    (arguments, begin, end))
TORCHKILN_CPU_ENTRY(qkv_norm_rope_backward_finish,
                    (const QkvNormRopeBackward& arguments, int64_t begin, int64_t end),
                    (arguments, begin, end))

}  // namespace torchkiln::cpu
