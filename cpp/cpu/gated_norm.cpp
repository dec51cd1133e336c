#include "torchkiln/kernels/gated_norm.h"

#include <cmath>
#include <vector>

#include "detail/simd_row.h"
#include "torchkiln/core/activations.h"
#include "torchkiln/cpu/isa.h"

namespace torchkiln::cpu {
namespace TORCHKILN_ISA {
namespace {

// Maximum number of elements per run. They are converted and computed together, in buffers that
// stay in the L1 cache.
constexpr int64_t kRun = 512;

/// Calls body(begin, count) for the runs of the columns of a group.
template <class Body>
void for_each_run(int64_t columns, const Body& body) {
  for (int64_t begin = 0; begin < columns; begin += kRun)
    body(begin, std::min(kRun, columns - begin));
}

/// Reads weight + weight_offset for a run of the columns; ones if there is no weight.
template <class Problem, class C>
void read_weights(const Problem& p, int64_t begin, int64_t count, C* weights) {
  if (p.weight == nullptr) {
    std::fill_n(weights, count, C(1));
    return;
  }
  const C* const own = read_run(weights, p.weight, begin, 1, count, p.weight_dtype);
  const C offset = static_cast<C>(p.weight_offset);
  for (int64_t i = 0; i < count; ++i) weights[i] = own[i] + offset;
}

/// The sum of a[i] * b[i].
template <class C>
double sum_of_products(const C* a, const C* b, int64_t count) {
  double total[1];
  sum_lanes<C>(total, count, [&](int64_t i, auto span, auto& sums) {
    sums[0] += load_lanes(a + i, span) * load_lanes(b + i, span);
  });
  return total[0];
}

/// Computes a group of y. `products` has room for x * silu(gate) of all columns of the group.
template <class T>
void write_group(const GatedNorm& p, int64_t token, int64_t group, Compute<T>* products) {
  using C = Compute<T>;
  const bool gate_first = p.gate_first;
  const int64_t first = group * p.columns;
  const int64_t elements = p.groups * p.columns;
  double squares = 0;
  for_each_run(p.columns, [&](int64_t begin, int64_t count) {
    C x_buffer[kRun], gate_buffer[kRun];
    const int64_t at = first + begin;
    const C* const x = read_run(x_buffer, p.x, token * p.x_stride + at, 1, count, p.dtype);
    const C* const gate =
        read_run(gate_buffer, p.gate, token * p.gate_stride + at, 1, count, p.dtype);
    C* const to = products + begin;
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) to[i] = x[i] * Silu::value<ExactMath>(gate[i]);
    const C* const normalized = gate_first ? to : x;
    squares += sum_of_products(normalized, normalized, count);
  });
  const C rstd = static_cast<C>(1 / std::sqrt(squares / static_cast<double>(p.columns) + p.eps));
  if (p.rstd != nullptr) static_cast<C*>(p.rstd)[token * p.groups + group] = rstd;
  for_each_run(p.columns, [&](int64_t begin, int64_t count) {
    C weights[kRun];
    read_weights(p, first + begin, count, weights);
    for (int64_t i = 0; i < count; ++i) weights[i] *= products[begin + i] * rstd;
    narrow_run(static_cast<T*>(p.y) + token * elements + first + begin, weights, count);
  });
}

/// Values of a group's columns that the second pass reuses.
template <class C>
struct GroupBuffers {
  std::vector<C> n;         // normalized elements
  std::vector<C> gradient;  // with respect to n
  std::vector<C> value;     // silu(gate)
  std::vector<C> factor;    // factor of the gradient of the gate

  explicit GroupBuffers(int64_t columns)
      : n(static_cast<size_t>(columns)), gradient(n), value(n), factor(n) {}
};

/// Computes a group of grad_x and grad_gate. Adds to `sums`, the gradient of the group's weight, if
/// it is wanted.
template <class T>
void write_gradients(const GatedNormBackward& p, int64_t token, int64_t group,
                     GroupBuffers<Compute<T>>& buffers, double* sums) {
  using C = Compute<T>;
  const bool gate_first = p.gate_first;
  const int64_t first = group * p.columns;
  const int64_t elements = p.groups * p.columns;
  const C rstd = static_cast<const C*>(p.rstd)[token * p.groups + group];
  double product = 0;
  for_each_run(p.columns, [&](int64_t begin, int64_t count) {
    C grad_buffer[kRun], x_buffer[kRun], gate_buffer[kRun], weights[kRun], terms[kRun];
    const int64_t at = first + begin;
    const C* const grad =
        read_run(grad_buffer, p.grad, token * p.grad_stride + at, 1, count, p.dtype);
    const C* const x = read_run(x_buffer, p.x, token * p.x_stride + at, 1, count, p.dtype);
    const C* const gate =
        read_run(gate_buffer, p.gate, token * p.gate_stride + at, 1, count, p.dtype);
    read_weights(p, at, count, weights);
    C* const n = buffers.n.data() + begin;
    C* const gradient = buffers.gradient.data() + begin;
    C* const value = buffers.value.data() + begin;
    C* const factor = buffers.factor.data() + begin;
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) {
      const Slope<C> silu = silu_and_slope<ExactMath>(gate[i]);
      const C passed = gate_first ? grad[i] : grad[i] * silu.value;
      n[i] = (gate_first ? x[i] * silu.value : x[i]) * rstd;
      gradient[i] = passed * weights[i];
      value[i] = silu.value;
      factor[i] = (gate_first ? x[i] : grad[i] * n[i] * weights[i]) * silu.slope;
      terms[i] = passed * n[i];
    }
    product += sum_of_products(gradient, n, count);
    if (sums == nullptr) return;
    for (int64_t i = 0; i < count; ++i) sums[begin + i] += static_cast<double>(terms[i]);
  });
  const C mean = static_cast<C>(product / static_cast<double>(p.columns));
  for_each_run(p.columns, [&](int64_t begin, int64_t count) {
    const C* const n = buffers.n.data() + begin;
    const C* const gradient = buffers.gradient.data() + begin;
    const C* const value = buffers.value.data() + begin;
    const C* const factor = buffers.factor.data() + begin;
    C grad_x[kRun], grad_gate[kRun];
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) {
      const C projected = (gradient[i] - n[i] * mean) * rstd;
      grad_x[i] = gate_first ? projected * value[i] : projected;
      grad_gate[i] = gate_first ? projected * factor[i] : factor[i];
    }
    const int64_t to = token * elements + first + begin;
    if (p.grad_x != nullptr) narrow_run(static_cast<T*>(p.grad_x) + to, grad_x, count);
    if (p.grad_gate != nullptr) narrow_run(static_cast<T*>(p.grad_gate) + to, grad_gate, count);
  });
}

/// The split of the tokens into chunks. The workspace has the weight sums of each chunk.
struct Chunks {
  int64_t count;
  int64_t tokens;  // per chunk

  explicit Chunks(const GatedNormBackward& p) {
    constexpr int64_t kElements = 1 << 15;  // take longer than the start of a thread
    constexpr int64_t kMost = 64;
    // At least 32 tokens per chunk, because with fewer, reading partial sums takes as long as the
    // tokens. Up to 8 chunks may be shorter, because for few long tokens several threads matter
    // more.
    const int64_t most = std::max(p.tokens / 32, std::min<int64_t>(p.tokens, 8));
    count = std::clamp<int64_t>(p.tokens * p.groups * p.columns / kElements, 1,
                                std::clamp<int64_t>(most, 1, kMost));
    tokens = (p.tokens + count - 1) / count;
  }
};

double* sums_of(const GatedNormBackward& p, int64_t chunk) {
  return static_cast<double*>(p.workspace) + chunk * p.groups * p.columns;
}

}  // namespace

Status gated_norm(const GatedNorm& p, int64_t begin, int64_t end) {
  return dispatch_floating(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    std::vector<Compute<T>> products(static_cast<size_t>(p.columns));
    for (int64_t token = begin; token < end; ++token)
      for (int64_t group = 0; group < p.groups; ++group)
        write_group<T>(p, token, group, products.data());
    return Status{};
  });
}

Status gated_norm_backward(const GatedNormBackward& p, int64_t begin, int64_t end) {
  return dispatch_floating(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Chunks chunks(p);
    GroupBuffers<Compute<T>> buffers(p.columns);
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      double* const sums = p.grad_weight == nullptr ? nullptr : sums_of(p, chunk);
      if (sums != nullptr) std::fill_n(sums, p.groups * p.columns, 0.0);
      const int64_t last = std::min((chunk + 1) * chunks.tokens, p.tokens);
      for (int64_t token = chunk * chunks.tokens; token < last; ++token) {
        for (int64_t group = 0; group < p.groups; ++group) {
          double* const own = sums == nullptr ? nullptr : sums + group * p.columns;
          write_gradients<T>(p, token, group, buffers, own);
        }
      }
    }
    return Status{};
  });
}

Status gated_norm_backward_finish(const GatedNormBackward& p, int64_t begin, int64_t end) {
  const Chunks chunks(p);
  return dispatch_floating(p.weight_dtype, [&](auto tag) {
    using W = typename decltype(tag)::type;
    for (int64_t i = begin; i < end; ++i) {
      double sum = 0;
      for (int64_t chunk = 0; chunk < chunks.count; ++chunk) sum += sums_of(p, chunk)[i];
      narrow(static_cast<W*>(p.grad_weight) + i, sum);
    }
    return Status{};
  });
}

}  // namespace TORCHKILN_ISA

TORCHKILN_CPU_ENTRY(gated_norm, (const GatedNorm& p, int64_t begin, int64_t end), (p, begin, end))
TORCHKILN_CPU_ENTRY(gated_norm_backward, (const GatedNormBackward& p, int64_t begin, int64_t end),
                    (p, begin, end))
TORCHKILN_CPU_ENTRY(gated_norm_backward_finish,
                    (const GatedNormBackward& p, int64_t begin, int64_t end), (p, begin, end))

#ifdef TORCHKILN_CPU_ENTRIES

Split split(const GatedNormBackward& p) {
  const TORCHKILN_ISA::Chunks chunks(p);
  const int64_t elements = p.grad_weight == nullptr ? 0 : p.groups * p.columns;
  return {chunks.count, static_cast<size_t>(chunks.count * elements) * sizeof(double), elements};
}

#endif

}  // namespace torchkiln::cpu
