#include "torchkiln/kernels/gated_norm.h"

#include <cmath>
#include <initializer_list>
#include <vector>

#include "detail/short_rows.h"
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

/// Computes a group of grad_x and grad_gate. Sets `sums`, the gradient of the group's weight, if it
/// is wanted, or adds to them.
template <class T>
void write_gradients(const GatedNormBackward& p, int64_t token, int64_t group,
                     GroupBuffers<Compute<T>>& buffers, double* sums, bool adds) {
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
      value[i] = silu.value;
      factor[i] = silu.slope;
    }
    // A loop of its own: g++ does not vectorise the exponential together with these terms.
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) {
      const C passed = gate_first ? grad[i] : grad[i] * value[i];
      n[i] = (gate_first ? x[i] * value[i] : x[i]) * rstd;
      gradient[i] = passed * weights[i];
      factor[i] *= gate_first ? x[i] : grad[i] * n[i] * weights[i];
      terms[i] = passed * n[i];
    }
    product += sum_of_products(gradient, n, count);
    if (sums == nullptr) return;
    if (adds) {
      for (int64_t i = 0; i < count; ++i) sums[begin + i] += static_cast<double>(terms[i]);
    } else {
      for (int64_t i = 0; i < count; ++i) sums[begin + i] = static_cast<double>(terms[i]);
    }
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

/// Whether groups are short and, in all tensors, lie one after another.
template <class Problem>
bool has_short_rows(const Problem& p, std::initializer_list<int64_t> strides) {
  bool adjacent = p.columns <= kShortGroup;
  for (const int64_t stride : strides)
    adjacent = adjacent && (p.groups == 1 || stride == p.groups * p.columns);
  return adjacent;
}

/// Reads weight + weight_offset for the rows of a tile.
template <class Problem, class C>
void read_weight_tile(const Problem& p, const ShortRows& rows, int64_t group, C* weight) {
  rows.read_parameters<C>(weight, p.weight, p.weight_dtype, group, 1);
  const C offset = p.weight == nullptr ? C(0) : static_cast<C>(p.weight_offset);
  for (int64_t i = 0; i < rows.elements(); ++i) weight[i] += offset;
}

/// Reads the rows of a tile from a tensor with this stride between tokens.
template <class T>
void read_tile(const ShortRows& rows, Compute<T>* tile, const void* from, int64_t stride,
               int64_t first, int64_t count) {
  const int64_t row_stride = rows.groups == 1 ? stride : rows.columns;
  rows.read(tile, static_cast<const T*>(from) + first * row_stride, row_stride, count);
}

template <class T>
void write_short(const GatedNorm& p, int64_t begin, int64_t end) {
  using C = Compute<T>;
  const ShortRows rows(p.columns, p.groups, p.columns);
  const int64_t width = rows.width, elements = rows.elements();
  const bool gate_first = p.gate_first;
  const double eps = p.eps;
  Tile<C> weight, x, gate;
  int64_t known = -1;
  const auto tile = [&](int64_t first, int64_t count, int64_t group) {
    if (group != known) read_weight_tile<GatedNorm, C>(p, rows, group, weight);
    known = group;
    read_tile<T>(rows, x, p.x, p.x_stride, first, count);
    read_tile<T>(rows, gate, p.gate, p.gate_stride, first, count);
#pragma GCC ivdep
    for (int64_t i = 0; i < elements; ++i)
      gate.at[i] = x.at[i] * Silu::value<ExactMath>(gate.at[i]);
    double squares[kMostTileRows] = {};
    const C* const normalized = gate_first ? gate.at : x.at;
    for (int64_t at = 0; at < elements; at += width) {
#pragma GCC ivdep
      for (int64_t k = 0; k < width; ++k) {
        const auto each = static_cast<double>(normalized[at + k]);
        squares[k] += each * each;
      }
    }
    C rstd[kMostTileRows];
#pragma GCC ivdep
    for (int64_t k = 0; k < width; ++k)
      rstd[k] = static_cast<C>(1 / std::sqrt(squares[k] / static_cast<double>(p.columns) + eps));
    if (p.rstd != nullptr) std::copy_n(rstd, count, static_cast<C*>(p.rstd) + first);
    for (int64_t at = 0; at < elements; at += width) {
#pragma GCC ivdep
      for (int64_t k = 0; k < width; ++k)
        gate.at[at + k] = gate.at[at + k] * rstd[k] * weight.at[at + k];
    }
    rows.write(static_cast<T*>(p.y) + first * p.columns, gate, count);
  };
  rows.for_each_tile(begin, end, 0, p.groups, tile, [](int64_t) {});
}

/// Computes grad_x and grad_gate of the tokens begin <= token < end, whose groups are short.
template <class T>
void write_short_gradients(const GatedNormBackward& p, int64_t begin, int64_t end, double* sums) {
  using C = Compute<T>;
  const ShortRows rows(p.columns, p.groups, p.columns);
  const int64_t width = rows.width, elements = rows.elements();
  const bool gate_first = p.gate_first;
  Tile<C> weight, grad, x, gate, n, value, terms;
  C rstd[kMostTileRows] = {};
  int64_t known = -1;
  const auto tile = [&](int64_t first, int64_t count, int64_t group) {
    if (group != known) read_weight_tile<GatedNormBackward, C>(p, rows, group, weight);
    known = group;
    rows.read_rows(rstd, static_cast<const C*>(p.rstd) + first, count);
    read_tile<T>(rows, grad, p.grad, p.grad_stride, first, count);
    read_tile<T>(rows, x, p.x, p.x_stride, first, count);
    read_tile<T>(rows, gate, p.gate, p.gate_stride, first, count);
#pragma GCC ivdep
    for (int64_t i = 0; i < elements; ++i) {
      const Slope<C> silu = silu_and_slope<ExactMath>(gate.at[i]);
      value.at[i] = silu.value;
      gate.at[i] = silu.slope;
    }
    C product[kMostTileRows] = {};
    for (int64_t at = 0; at < elements; at += width) {
#pragma GCC ivdep
      for (int64_t k = 0; k < width; ++k) {
        const int64_t i = at + k;
        const C passed = gate_first ? grad.at[i] : grad.at[i] * value.at[i];
        const C normalized = (gate_first ? x.at[i] * value.at[i] : x.at[i]) * rstd[k];
        const C gradient = passed * weight.at[i];
        gate.at[i] *= gate_first ? x.at[i] : grad.at[i] * normalized * weight.at[i];
        n.at[i] = normalized;
        grad.at[i] = gradient;
        terms.at[i] += passed * normalized;
        product[k] += gradient * normalized;
      }
    }
    const C share = 1 / static_cast<C>(p.columns);
    for (int64_t at = 0; at < elements; at += width) {
#pragma GCC ivdep
      for (int64_t k = 0; k < width; ++k) {
        const int64_t i = at + k;
        const C projected = (grad.at[i] - n.at[i] * (product[k] * share)) * rstd[k];
        grad.at[i] = gate_first ? projected * value.at[i] : projected;
        gate.at[i] *= gate_first ? projected : C(1);
      }
    }
    if (p.grad_x != nullptr) rows.write(static_cast<T*>(p.grad_x) + first * p.columns, grad, count);
    if (p.grad_gate != nullptr)
      rows.write(static_cast<T*>(p.grad_gate) + first * p.columns, gate, count);
  };
  rows.for_each_tile(begin, end, 0, p.groups, tile, [&](int64_t group) {
    if (sums != nullptr) rows.add_parameters<C>(sums, terms, group);
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
    if (has_short_rows(p, {p.x_stride, p.gate_stride})) {
      write_short<T>(p, begin, end);
      return Status{};
    }
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
    const bool is_short = has_short_rows(p, {p.grad_stride, p.x_stride, p.gate_stride});
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      double* const sums = p.grad_weight == nullptr ? nullptr : sums_of(p, chunk);
      // The only token of a chunk sets its sums.
      const bool adds = is_short || chunks.tokens > 1;
      if (sums != nullptr && adds) std::fill_n(sums, p.groups * p.columns, 0.0);
      const int64_t last = std::min((chunk + 1) * chunks.tokens, p.tokens);
      if (is_short) {
        write_short_gradients<T>(p, chunk * chunks.tokens, last, sums);
        continue;
      }
      for (int64_t token = chunk * chunks.tokens; token < last; ++token) {
        for (int64_t group = 0; group < p.groups; ++group) {
          double* const own = sums == nullptr ? nullptr : sums + group * p.columns;
          write_gradients<T>(p, token, group, buffers, own, adds);
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
    double sum[kRun];
    for (int64_t at = begin; at < end; at += kRun) {
      const int64_t count = std::min(kRun, end - at);
      std::fill_n(sum, count, 0.0);
      for (int64_t chunk = 0; chunk < chunks.count; ++chunk) {
        const double* const from = sums_of(p, chunk) + at;
        for (int64_t i = 0; i < count; ++i) sum[i] += from[i];
      }
      narrow_sums(static_cast<W*>(p.grad_weight) + at, sum, count);
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
