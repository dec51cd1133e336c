#include "torchkiln/kernels/softmax.h"

#include <algorithm>
#include <memory>
#include <new>

#include "detail/simd_exp.h"
#include "detail/simd_row.h"
#include "detail/softmax_strided.h"
#include "torchkiln/cpu/elementwise.h"
#include "torchkiln/cpu/isa.h"

namespace torchkiln::cpu {
namespace TORCHKILN_ISA {
namespace {

// Neighbouring rows are computed side by side, as columns, where so many lie along the innermost
// dimension, or where rows are so short that one alone would not fill the wide instructions.
constexpr int64_t kFewestColumns = 16;
constexpr int64_t kFewestNeighbours = 8;
constexpr int64_t kShort = 16;
// So many neighbours along the innermost dimension are enough alone.
constexpr int64_t kManyNeighbours = 64;
// Pieces of a row whose exponentials are kept; of more they are computed twice.
constexpr int64_t kMostPieces = 1024;

/// The elements of a row that take part: those of the first `visible` where `mask`, if there is
/// one, is not 0. It is read as bytes: no wide instructions come out of loops over bool.
struct RowPart {
  int64_t visible;
  const uint8_t* mask;
};

/// Walks over the rows and tells the part of each.
class RowParts {
 public:
  RowParts(const RowMask& mask, int64_t length, int64_t row)
      : mask_(mask), length_(length), cursor_(mask.rows, row), row_(row) {}

  RowPart next() {
    RowPart part{length_, nullptr};
    if (mask_.causal) part.visible = std::min(length_, row_ % mask_.queries + 1);
    if (mask_.data != nullptr) {
      const bool* data = mask_.data + cursor_.offset[0];
      if (mask_.stride == 1) {
        part.mask = reinterpret_cast<const uint8_t*>(data);
      } else if (!*data) {
        part.visible = 0;
      }
      cursor_.advance(mask_.rows, 1);
    }
    ++row_;
    return part;
  }

 private:
  const RowMask& mask_;
  int64_t length_;
  Cursor<1, 1> cursor_;
  int64_t row_;
};

/// Both values are computed: a loop with a condition around one would not become wide instructions.
template <class C>
TORCHKILN_FUNCTION C where(bool condition, C yes, C no) {
  return condition ? yes : no;
}

/// Calls body(values) with a piece of a row of x as it counts: scaled, and -infinity where an
/// element takes no part.
template <class T, class Body>
void with_piece(Compute<T>* buffer, const T* x, int64_t stride, Compute<T> scale,
                const RowPart& part, int64_t at, int64_t count, const Body& body) {
  using C = Compute<T>;
  const bool as_it_is = part.mask == nullptr && scale == C(1) && stride == 1;
  const C* values = buffer;
  if constexpr (std::is_same_v<T, BFloat16>) {
    if (as_it_is) return body(x + at);
  } else if constexpr (std::is_same_v<T, C>) {
    if (as_it_is) values = x + at;
  }
  if (values == buffer) widen_run(buffer, x + at * stride, stride, count);
  if (part.mask != nullptr) {
    const uint8_t* mask = part.mask + at;
    for (int64_t i = 0; i < count; ++i)
      buffer[i] = where<C>(mask[i] != 0, buffer[i] * scale, -kInfinity<C>);
  } else if (scale != C(1)) {
    for (int64_t i = 0; i < count; ++i) buffer[i] *= scale;
  }
  body(values);
}

/// to[i * stride] = value for begin <= i < end
template <class T>
void fill(T* to, int64_t stride, int64_t begin, int64_t end, Compute<T> value) {
  T rounded;
  narrow_run(&rounded, &value, 1);
  for (int64_t i = begin; i < end; ++i) to[i * stride] = rounded;
}

/// to[i * stride] = 0 where mask[i] is. All are written where they are neighbours, as in where().
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

/// Whether the results of a row can hold its exponentials.
template <class T, class Arguments>
bool keeps_in_place(const Arguments& p) {
  return std::is_same_v<T, Compute<T>> && p.inner == 1;
}

/// `beside` is where exponentials are kept that the results cannot hold; null if nowhere.
template <class T>
void softmax_row(const Softmax& p, const RowPart& part, const T* x, T* y, Compute<T>* beside) {
  using C = Compute<T>;
  const C scale = static_cast<C>(p.scale);
  C buffer[kPiece], scratch[kPiece];
  // The exponentials relative to the shift of their piece, where they can be kept.
  C shifts[kMostPieces];
  C* kept = beside;
  if constexpr (std::is_same_v<T, C>) {
    if (keeps_in_place<T>(p)) kept = y;
  }
  if (p.log || part.visible > kMostPieces * kPiece) kept = nullptr;
  const auto for_pieces = [&](const auto& body) {
    for (int64_t at = 0; at < part.visible; at += kPiece) {
      const int64_t count = std::min(kPiece, part.visible - at);
      with_piece(buffer, x, p.stride, scale, part, at, count,
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
    for (int64_t at = 0; at < part.visible; at += kPiece) {
      C by = factor;
      if (shifts[at / kPiece] != shift) {
        // Only of a piece without any value above -infinity is the shift not the smaller one.
        const double step = static_cast<double>(shifts[at / kPiece]) - static_cast<double>(shift);
        by = static_cast<C>(ExactMath::exp(step < 0 ? step : 0.0) / sum.sum());
      }
      const C* powers = kept + at;
      store_run(y + at * p.inner, p.inner, std::min(kPiece, part.visible - at), buffer,
                [=](int64_t i) { return powers[i] * by; });
    }
  }
  // NaN where the sum is.
  fill(y, p.inner, part.visible, p.length, p.log ? -kInfinity<C> - logarithm : factor * C(0));
}

template <class T>
void softmax_backward_row(const SoftmaxBackward& p, const RowPart& part, const T* grad, const T* y,
                          T* grad_x) {
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
  for_pieces(p.log ? p.length : part.visible,
             [&](const auto* g, const auto* out, int64_t, int64_t count) {
               double sum[1];
               sum_lanes<C>(sum, count, [&](int64_t i, auto lanes, Lanes<C>* terms) {
                 const Lanes<C> term = load_lanes(g + i, lanes);
                 terms[0] += p.log ? term : term * load_lanes(out + i, lanes);
               });
               total += sum[0];
             });
  const C sum = static_cast<C>(total);
  for_pieces(part.visible, [&](const auto* g, const auto* out, int64_t at, int64_t count) {
    T* to = grad_x + at * p.inner;
    if (p.log) {
      store_run(to, p.inner, count, results, [=](int64_t i) {
        return (widen(g[i]) - ExactMath::exp_or_zero(widen(out[i])) * sum) * scale;
      });
    } else {
      store_run(to, p.inner, count, results,
                [=](int64_t i) { return (widen(g[i]) - sum) * widen(out[i]) * scale; });
    }
    if (part.mask != nullptr) clear_masked(to, p.inner, count, part.mask + at);
  });
  fill(grad_x, p.inner, part.visible, p.length, C(0));
}

/// Calls row(x_offset, y_offset, part) for each of the rows begin <= row < end or, for as many as
/// are computed as columns, columns(row, count).
template <class Arguments, class Row, class Beside>
void for_rows(const Arguments& p, int64_t begin, int64_t end, const Row& row,
              const Beside& columns) {
  const bool has_columns = !p.mask.any() && p.outer * p.inner >= kFewestColumns &&
                           (p.inner >= kFewestNeighbours || p.length <= kShort);
  if (has_columns) {
    for (int64_t at = begin; at < end;) {
      const int64_t most = p.inner < kManyNeighbours ? kColumns : p.inner - at % p.inner;
      const int64_t count = std::min({kColumns, end - at, most});
      columns(at, count);
      at += count;
    }
    return;
  }
  RowParts parts(p.mask, p.length, begin);
  // Counted on: divisions would take as long as a short row.
  int64_t inner = begin % p.inner;
  int64_t outer = begin / p.inner;
  for (int64_t at = begin; at < end; ++at) {
    row(outer * p.outer_stride + inner * p.inner_stride, outer * p.length * p.inner + inner,
        parts.next());
    if (++inner < p.inner) continue;
    inner = 0;
    ++outer;
  }
}

/// The rows as columns: of the operand that has strides, and of those that are contiguous.
template <class T, class Arguments>
Columns<T> columns_of(const Arguments& p, T* data) {
  // One group of all rows where each has one element in each row of the innermost dimension.
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
    std::unique_ptr<Compute<T>[]> beside;
    if (!p.log && !keeps_in_place<T>(p))
      beside.reset(new (std::nothrow) Compute<T>[std::min(kMostPieces * kPiece, p.length)]);
    for_rows(
        p, begin, end,
        [&](int64_t x_offset, int64_t y_offset, const RowPart& part) {
          softmax_row(p, part, x + x_offset, y + y_offset, beside.get());
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
        [&](int64_t grad_offset, int64_t y_offset, const RowPart& part) {
          softmax_backward_row(p, part, grad + grad_offset, y + y_offset, grad_x + y_offset);
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
