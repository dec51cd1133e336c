#include "torchkiln/kernels/softmax.h"

#include <algorithm>
#include <memory>
#include <new>

#include "detail/row_mask.h"
#include "detail/simd_exp.h"
#include "detail/simd_row.h"
#include "detail/softmax_strided.h"
#include "torchkiln/cpu/isa.h"

namespace torchkiln::cpu {
namespace TORCHKILN_ISA {
namespace {

// Adjacent rows are computed side by side, as columns, if enough of them lie along the innermost
// dimension, or if rows are too short to fill the registers.
constexpr int64_t kMinColumns = 16;
constexpr int64_t kMinNeighbours = 8;
constexpr int64_t kShort = 16;
// From this many rows along the innermost dimension on, a strip does not leave that dimension.
constexpr int64_t kManyNeighbours = 64;
// Pieces of a row whose exponentials are kept; for longer rows they are computed twice.
constexpr int64_t kMaxPieces = 1024;

/// Selects a value. Both are computed, because g++ does not vectorise a loop with a branch.
template <class C>
TORCHKILN_FUNCTION C where(bool condition, C yes, C no) {
  return condition ? yes : no;
}

/// Calls body(values) with a piece of a row of x: scaled, and -infinity for elements that take no
/// part.
template <class T, class Body>
void with_piece(Compute<T>* buffer, const T* x, int64_t stride, Compute<T> scale,
                const ActiveRange& range, int64_t at, int64_t count, const Body& body) {
  using C = Compute<T>;
  const bool is_unchanged = range.mask == nullptr && scale == C(1) && stride == 1;
  const C* values = buffer;
  if constexpr (std::is_same_v<T, BFloat16>) {
    if (is_unchanged) return body(x + at);
  } else if constexpr (std::is_same_v<T, C>) {
    if (is_unchanged) values = x + at;
  }
  if (values == buffer) widen_run(buffer, x + at * stride, stride, count);
  if (range.mask != nullptr) {
    const uint8_t* mask = range.mask + at;
    for (int64_t i = 0; i < count; ++i)
      buffer[i] = where<C>(mask[i] != 0, buffer[i] * scale, -kInfinity<C>);
  } else if (scale != C(1)) {
    for (int64_t i = 0; i < count; ++i) buffer[i] *= scale;
  }
  body(values);
}

/// Sets to[i * stride] = value for begin <= i < end.
template <class T>
void fill(T* to, int64_t stride, int64_t begin, int64_t end, Compute<T> value) {
  T rounded;
  narrow_run(&rounded, &value, 1);
  for (int64_t i = begin; i < end; ++i) to[i * stride] = rounded;
}

/// Sets to[i * stride] = 0 where mask[i] is 0. Adjacent elements are all written, as in where().
template <class T>
void clear_masked(T* to, int64_t stride, int64_t count, const uint8_t* mask) {
  if (stride != 1) {
    for (int64_t i = 0; i < count; ++i) {
      if (mask[i] == 0) to[i * stride] = T{};
    }
  } else if constexpr (std::is_same_v<T, Compute<T>>) {
    for (int64_t i = 0; i < count; ++i) to[i] = where<T>(mask[i] != 0, to[i], T(0));
  } else {
    for (int64_t i = 0; i < count; ++i)
      to[i].bits = where<uint16_t>(mask[i] != 0, to[i].bits, uint16_t{0});
  }
}

/// Whether the results of a row have room for its exponentials.
template <class T, class Arguments>
bool fits_in_results(const Arguments& p) {
  return std::is_same_v<T, Compute<T>> && p.inner == 1;
}

/// `power_buffer` holds the exponentials if the results cannot; may be null.
template <class T>
void softmax_row(const Softmax& p, const ActiveRange& range, const T* x, T* y,
                 Compute<T>* power_buffer) {
  using C = Compute<T>;
  const C scale = static_cast<C>(p.scale);
  C buffer[kPiece], scratch[kPiece];
  // Exponentials are kept relative to the shift of their piece.
  C shifts[kMaxPieces];
  C* kept = power_buffer;
  if constexpr (std::is_same_v<T, C>) {
    if (fits_in_results<T>(p)) kept = y;
  }
  if (p.log || range.visible > kMaxPieces * kPiece) kept = nullptr;
  const auto for_pieces = [&](const auto& body) {
    for (int64_t at = 0; at < range.visible; at += kPiece) {
      const int64_t count = std::min(kPiece, range.visible - at);
      with_piece(buffer, x, p.stride, scale, range, at, count,
                 [&](const auto* values) { body(values, at, count); });
    }
  };
  ExponentialSum<C> sum;
  for_pieces([&](const auto* values, int64_t at, int64_t count) {
    sum.add(values, count, kept == nullptr ? scratch : kept + at);
    if (kept != nullptr) shifts[at / kPiece] = sum.shift();
  });
  const C shift = sum.shift();
  const C factor = static_cast<C>(1.0 / sum.sum());
  const C logarithm = p.log ? static_cast<C>(log_of<C>(sum.sum())) : C(0);
  if (p.log) {
    for_pieces([&](const auto* values, int64_t at, int64_t count) {
      store_run(y + at * p.inner, p.inner, count, scratch,
                [=](int64_t i) { return (widen(values[i]) - shift) - logarithm; });
    });
  } else if (kept == nullptr) {
    for_pieces([&](const auto* values, int64_t at, int64_t count) {
      store_run(y + at * p.inner, p.inner, count, scratch, [=](int64_t i) {
        return ExactMath::exp_or_zero(widen(values[i]) - shift) * factor;
      });
    });
  } else {
    for (int64_t at = 0; at < range.visible; at += kPiece) {
      C by = factor;
      if (shifts[at / kPiece] != shift) {
        // The piece's shift exceeds the final one only if the piece has nothing above -infinity.
        const double step = static_cast<double>(shifts[at / kPiece]) - static_cast<double>(shift);
        by = static_cast<C>(ExactMath::exp(step < 0 ? step : 0.0) / sum.sum());
      }
      const C* powers = kept + at;
      store_run(y + at * p.inner, p.inner, std::min(kPiece, range.visible - at), buffer,
                [=](int64_t i) { return powers[i] * by; });
    }
  }
  // NaN if the sum is NaN.
  fill(y, p.inner, range.visible, p.length, p.log ? -kInfinity<C> - logarithm : factor * C(0));
}

template <class T>
void softmax_backward_row(const SoftmaxBackward& p, const ActiveRange& range, const T* grad,
                          const T* y, T* grad_x) {
  using C = Compute<T>;
  const C scale = static_cast<C>(p.scale);
  C grad_buffer[kPiece], y_buffer[kPiece], results[kPiece];
  const auto for_pieces = [&](int64_t end, const auto& body) {
    for (int64_t at = 0; at < end; at += kPiece) {
      const int64_t count = std::min(kPiece, end - at);
      with_runs(grad_buffer, grad + at * p.stride, p.stride, y_buffer, y + at * p.inner, p.inner,
                count, [&](const auto* g, const auto* out) { body(g, out, at, count); });
    }
  };
  double total = 0;
  for_pieces(p.log ? p.length : range.visible,
             [&](const auto* g, const auto* out, int64_t, int64_t count) {
               double sum[1];
               sum_lanes<C>(sum, count, [&](int64_t i, auto lanes, Lanes<C>* terms) {
                 const Lanes<C> term = load_lanes(g + i, lanes);
                 terms[0] += p.log ? term : term * load_lanes(out + i, lanes);
               });
               total += sum[0];
             });
  const C sum = static_cast<C>(total);
  for_pieces(range.visible, [&](const auto* g, const auto* out, int64_t at, int64_t count) {
    T* to = grad_x + at * p.inner;
    if (p.log) {
      store_run(to, p.inner, count, results, [=](int64_t i) {
        return (widen(g[i]) - ExactMath::exp_or_zero(widen(out[i])) * sum) * scale;
      });
    } else {
      store_run(to, p.inner, count, results,
                [=](int64_t i) { return (widen(g[i]) - sum) * widen(out[i]) * scale; });
    }
    if (range.mask != nullptr) clear_masked(to, p.inner, count, range.mask + at);
  });
  fill(grad_x, p.inner, range.visible, p.length, C(0));
}

/// Calls row(x_offset, y_offset, range) for each of the rows begin <= row < end, or columns(row,
/// count) for groups of rows that are computed as columns.
template <class Arguments, class RowBody, class ColumnBody>
void for_rows(const Arguments& p, int64_t begin, int64_t end, const RowBody& row,
              const ColumnBody& columns) {
  const bool has_columns = !p.mask.any() && p.outer * p.inner >= kMinColumns &&
                           (p.inner >= kMinNeighbours || p.length <= kShort);
  if (has_columns) {
    for (int64_t at = begin; at < end;) {
      const int64_t limit = p.inner < kManyNeighbours ? kColumns : p.inner - at % p.inner;
      const int64_t count = std::min({kColumns, end - at, limit});
      columns(at, count);
      at += count;
    }
    return;
  }
  ActiveRangeIterator ranges(p.mask, p.length, begin);
  // The indices are counted up, because divisions would take as long as a short row.
  int64_t inner = begin % p.inner;
  int64_t outer = begin / p.inner;
  for (int64_t at = begin; at < end; ++at) {
    row(outer * p.outer_stride + inner * p.inner_stride, outer * p.length * p.inner + inner,
        ranges.next());
    if (++inner < p.inner) continue;
    inner = 0;
    ++outer;
  }
}

/// The rows as columns, for the operand with strides and for contiguous operands.
template <class T, class Arguments>
Columns<T> columns_of(const Arguments& p, T* data) {
  // If inner is 1, all rows are one group.
  if (p.inner == 1) return {data, p.stride, p.outer_stride, 0, p.outer};
  return {data, p.stride, p.inner_stride, p.outer_stride, p.inner};
}
template <class T, class Arguments>
Columns<T> contiguous_columns_of(const Arguments& p, T* data) {
  if (p.inner == 1) return {data, 1, p.length, 0, p.outer};
  return {data, p.inner, 1, p.length * p.inner, p.inner};
}

}  // namespace

Status softmax(const Softmax& p, int64_t begin, int64_t end) {
  return dispatch_floating(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* x = static_cast<const T*>(p.x);
    T* y = static_cast<T*>(p.y);
    const Columns<const T> x_columns = columns_of(p, x);
    const Columns<T> y_columns = contiguous_columns_of(p, y);
    std::unique_ptr<Compute<T>[]> power_buffer;
    if (!p.log && !fits_in_results<T>(p))
      power_buffer.reset(new (std::nothrow) Compute<T>[std::min(kMaxPieces * kPiece, p.length)]);
    for_rows(
        p, begin, end,
        [&](int64_t x_offset, int64_t y_offset, const ActiveRange& range) {
          softmax_row(p, range, x + x_offset, y + y_offset, power_buffer.get());
        },
        [&](int64_t row, int64_t count) {
          softmax_columns<T>(p, {x_columns, row, count}, {y_columns, row, count}, count);
        });
    return Status{};
  });
}

Status softmax_backward(const SoftmaxBackward& p, int64_t begin, int64_t end) {
  return dispatch_floating(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* grad = static_cast<const T*>(p.grad);
    const T* y = static_cast<const T*>(p.y);
    T* grad_x = static_cast<T*>(p.grad_x);
    const Columns<const T> grad_columns = columns_of(p, grad);
    const Columns<const T> y_columns = contiguous_columns_of(p, y);
    const Columns<T> grad_x_columns = contiguous_columns_of(p, grad_x);
    for_rows(
        p, begin, end,
        [&](int64_t grad_offset, int64_t y_offset, const ActiveRange& range) {
          softmax_backward_row(p, range, grad + grad_offset, y + y_offset, grad_x + y_offset);
        },
        [&](int64_t row, int64_t count) {
          softmax_backward_columns<T>(p, {grad_columns, row, count}, {y_columns, row, count},
                                      {grad_x_columns, row, count}, count);
        });
    return Status{};
  });
}

}  // namespace TORCHKILN_ISA

TORCHKILN_CPU_ENTRY(softmax, (const Softmax& p, int64_t begin, int64_t end), (p, begin, end))
TORCHKILN_CPU_ENTRY(softmax_backward, (const SoftmaxBackward& p, int64_t begin, int64_t end),
                    (p, begin, end))

}  // namespace torchkiln::cpu
