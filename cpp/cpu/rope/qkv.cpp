#include <algorithm>
#include <cmath>
#include <vector>

#include "rope/angles.h"
#include "torchkiln/cpu/half.h"
#include "torchkiln/cpu/isa.h"
#include "torchkiln/kernels/rope.h"

namespace torchkiln::cpu {
namespace TORCHKILN_ISA {
namespace {

// Fewest tokens per chunk of backward, and most chunks. The workspace has a row of sums per chunk.
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

/// The weights of queries and keys in the compute type, including the offset; ones if there is no
/// weight.
template <class C>
struct Weights {
  std::vector<C> rows[2];

  explicit Weights(const QkvNormRope& p) {
    for (int kind = 0; kind < 2; ++kind) {
      const int64_t size = p.norm_size(kind);
      rows[kind].assign(static_cast<size_t>(size), C(1));
      if (p.weight[kind] == nullptr) continue;
      C* const row = rows[kind].data();
      const C* run = read_run(row, p.weight[kind], 0, 1, size, p.weight_dtype);
      for (int64_t i = 0; i < size; ++i) row[i] = run[i] + static_cast<C>(p.weight_offset);
    }
  }
};

int64_t heads_of(const QkvNormRope& p, int kind) { return kind == 0 ? p.heads : p.kv_heads; }

/// The index of a kind's first head in a packed row.
int64_t first_of(const QkvNormRope& p, int kind) {
  return kind == 0 ? 0 : p.heads + (kind - 1) * p.kv_heads;
}

/// The sum of term(i) for i < count, in 16 running sums, so that the compiler vectorises it and few
/// digits are lost.
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
C rstd_of(const QkvNormRope& p, const C* x, int64_t size) {
  const C sum = sum_of<C>(size, [&](int64_t i) { return x[i] * x[i]; });
  return C(1) / std::sqrt(sum / static_cast<C>(size) + static_cast<C>(p.eps));
}

/// Elements that are normalized together, and their gradients, in the compute type.
template <class C>
struct Buffers {
  std::vector<C> x, grad;

  explicit Buffers(const QkvNormRope& p)
      : x(static_cast<size_t>(std::max(p.norm_size(0), p.norm_size(1)))), grad(x.size()) {}
};

/// Calls body(head, size) for each set of `size` elements that are normalized together; `head` is
/// the first head of the set.
template <class Body>
void for_each_norm(const QkvNormRope& p, int kind, const Body& body) {
  const int64_t size = p.norm_size(kind);
  for (int64_t h = 0; h < heads_of(p, kind); h += size / p.head_dim) body(h, size);
}

template <class T>
void forward_token(const QkvNormRope& p, const Weights<Compute<T>>& weights, int64_t index,
                   Buffers<Compute<T>>& buffers) {
  using C = Compute<T>;
  const int64_t batch = index / p.tokens, token = index % p.tokens;
  const Factors<C> factors(p.angles, batch, token, C(1));
  const T* const row =
      static_cast<const T*>(p.qkv) + batch * p.qkv_stride[0] + token * p.qkv_stride[1];
  C* const x = buffers.x.data();
  for (int kind = 0; kind < 3; ++kind) {
    const int64_t place = kind == 0 ? token : row_of(p.places, batch, token);
    if (place < 0) continue;
    const int64_t (&stride)[3] = p.out_stride[kind];
    const T* const from = row + first_of(p, kind) * p.head_dim;
    T* const to = static_cast<T*>(p.out[kind]) + batch * stride[0] + place * stride[1];
    if (kind == 2) {
      for (int64_t h = 0; h < p.kv_heads; ++h)
        std::copy_n(from + h * p.head_dim, p.head_dim, to + h * stride[2]);
      continue;
    }
    for_each_norm(p, kind, [&](int64_t first, int64_t size) {
      widen_run(x, from + first * p.head_dim, 1, size);
      const C scale = p.norm == QkvNorm::none ? C(1) : rstd_of(p, x, size);
      const C* const weight = weights.rows[kind].data();
      for (int64_t i = 0; i < size; ++i) x[i] *= scale * weight[i];
      for (int64_t at = 0; at < size; at += p.head_dim) {
        factors.rotate(p.angles, x + at);
        narrow_run(to + (first + at / p.head_dim) * stride[2], x + at, p.head_dim);
      }
    });
  }
}

/// Adds the terms of the gradient of the weight to `sums`. `grad` must be the gradient of the
/// weighted elements; it is overwritten by the gradient of x.
template <class C>
void norm_gradient(const QkvNormRope& p, int64_t size, const C* weight, const C* x, C* grad,
                   C* sums) {
  if (p.norm == QkvNorm::none) {
    for (int64_t i = 0; i < size; ++i) grad[i] *= weight[i];
    return;
  }
  const C rstd = rstd_of(p, x, size);
  const C product = sum_of<C>(size, [&](int64_t i) { return x[i] * grad[i] * weight[i]; });
  const C pull = product * rstd * rstd / static_cast<C>(size);
  for (int64_t i = 0; i < size; ++i) {
    sums[i] += grad[i] * (x[i] * rstd);
    grad[i] = rstd * (grad[i] * weight[i] - x[i] * pull);
  }
}

template <class T>
void backward_token(const QkvNormRopeBackward& arguments, const Weights<Compute<T>>& weights,
                    int64_t index, Buffers<Compute<T>>& buffers, Compute<T>* sums) {
  using C = Compute<T>;
  const QkvNormRope& p = arguments.forward;
  const int64_t batch = index / p.tokens, token = index % p.tokens;
  const Factors<C> back(p.angles, batch, token, C(-1));
  const T* const row =
      static_cast<const T*>(p.qkv) + batch * p.qkv_stride[0] + token * p.qkv_stride[1];
  T* const out =
      static_cast<T*>(arguments.grad_qkv) + index * (p.heads + 2 * p.kv_heads) * p.head_dim;
  C *const x = buffers.x.data(), *const grad = buffers.grad.data();
  for (int kind = 0; kind < 3; ++kind) {
    const int64_t (&stride)[3] = arguments.grad_stride[kind];
    const T* const from = static_cast<const T*>(arguments.grad[kind]);
    for_each_norm(p, kind, [&](int64_t first, int64_t size) {
      std::fill_n(grad, size, C(0));
      for (int64_t at = 0; from != nullptr && at < size; at += p.head_dim) {
        const int64_t head = first + at / p.head_dim;
        widen_run(grad + at, from + batch * stride[0] + token * stride[1] + head * stride[2], 1,
                  p.head_dim);
        if (kind < 2) back.rotate(p.angles, grad + at);
      }
      const int64_t packed = (first_of(p, kind) + first) * p.head_dim;
      if (kind < 2) {
        widen_run(x, row + packed, 1, size);
        norm_gradient(p, size, weights.rows[kind].data(), x, grad, sums + kind * p.norm_size(0));
      }
      narrow_run(out + packed, grad, size);
    });
  }
}

}  // namespace

Status qkv_norm_rope(const QkvNormRope& arguments, int64_t begin, int64_t end) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Weights<Compute<T>> weights(arguments);
    Buffers<Compute<T>> buffers(arguments);
    for (int64_t i = begin; i < end; ++i) forward_token<T>(arguments, weights, i, buffers);
    return Status{};
  });
}

Status qkv_norm_rope_backward(const QkvNormRopeBackward& arguments, int64_t begin, int64_t end) {
  return dispatch_floating(arguments.forward.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    const QkvNormRope& p = arguments.forward;
    const Weights<C> weights(p);
    Buffers<C> buffers(p);
    const int64_t count = tokens_per_chunk(p), row = p.norm_size(0) + p.norm_size(1);
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      C* const sums = static_cast<C*>(arguments.workspace) + chunk * row;
      std::fill_n(sums, row, C(0));
      const int64_t last = std::min(p.batch * p.tokens, (chunk + 1) * count);
      for (int64_t i = chunk * count; i < last; ++i)
        backward_token<T>(arguments, weights, i, buffers, sums);
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
    const int64_t queries = p.norm_size(0), row = queries + p.norm_size(1);
    return dispatch_floating(p.weight_dtype, [&](auto weight_tag) {
      using W = typename decltype(weight_tag)::type;
      if constexpr (std::is_same_v<Compute<W>, C>) {
        for (int64_t i = begin; i < end; ++i) {
          const int kind = i < queries ? 0 : 1;
          void* const to = arguments.grad_weight[kind];
          if (to == nullptr) continue;
          C sum = C(0);
          for (int64_t chunk = 0; chunk < chunks; ++chunk)
            sum += static_cast<const C*>(arguments.workspace)[chunk * row + i];
          narrow_run(static_cast<W*>(to) + i - kind * queries, &sum, 1);
        }
        return Status{};
      }
      return Status{"weight dtype not supported by this kernel"};
    });
  });
}

}  // namespace TORCHKILN_ISA

#ifdef TORCHKILN_CPU_ENTRIES
Split split(const QkvNormRopeBackward& arguments) {
  const QkvNormRope& p = arguments.forward;
  const int64_t count = TORCHKILN_ISA::tokens_per_chunk(p);
  const int64_t chunks = (p.batch * p.tokens + count - 1) / count;
  const size_t element = p.dtype == Dtype::float64 ? sizeof(double) : sizeof(float);
  const bool wants = arguments.grad_weight[0] != nullptr || arguments.grad_weight[1] != nullptr;
  const int64_t row = p.norm_size(0) + p.norm_size(1);
  return {chunks, static_cast<size_t>(chunks * row) * element, wants ? row : 0};
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
