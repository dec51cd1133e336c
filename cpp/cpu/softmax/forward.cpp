#include <memory>
#include <new>

#include "softmax/batch.h"
#include "softmax/rows.h"

namespace torchkiln::cpu {
namespace TORCHKILN_ISA {
namespace {

// Maximum number of pieces in a row whose exponentials are kept. In longer rows the exponentials
// are computed twice.
constexpr int64_t kMaxPieces = 1024;

/// Calls body(values) with a piece of a row of x, scaled, with -infinity for masked elements.
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

/// Whether the exponentials of a row can be stored in the memory of its results.
template <class T, class Arguments>
bool fits_in_results(const Arguments& p) {
  return std::is_same_v<T, Compute<T>> && p.inner == 1;
}

/// Computes the softmax of one row. If fits_in_results() is false, `power_buffer` stores the
/// exponentials; if that is null, they are computed twice.
template <class T>
void softmax_row(const Softmax& p, const ActiveRange& range, const T* x, T* y,
                 Compute<T>* power_buffer) {
  using C = Compute<T>;
  const C scale = static_cast<C>(p.scale);
  C buffer[kPiece], scratch[kPiece];
  // The stored exponentials are relative to the shift of their piece.
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
        // A piece has a larger shift than the row only if all its elements are -infinity.
        const double step = static_cast<double>(shifts[at / kPiece]) - static_cast<double>(shift);
        by = static_cast<C>(ExactMath::exp(step < 0 ? step : 0.0) / sum.sum());
      }
      const C* powers = kept + at;
      store_run(y + at * p.inner, p.inner, std::min(kPiece, range.visible - at), buffer,
                [=](int64_t i) { return powers[i] * by; });
    }
  }
  // The elements after the visible ones: 0, or -infinity for the logarithm; NaN if the sum is NaN.
  fill(y, p.inner, range.visible, p.length, p.log ? -kInfinity<C> - logarithm : factor * C(0));
}

}  // namespace

Status softmax(const Softmax& p, int64_t begin, int64_t end) {
  return dispatch_floating(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* x = static_cast<const T*>(p.x);
    T* y = static_cast<T*>(p.y);
    if (has_batches(p)) {
      softmax_batches(p, x, y, begin, end);
      return Status{};
    }
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

}  // namespace TORCHKILN_ISA

TORCHKILN_CPU_ENTRY(softmax, (const Softmax& p, int64_t begin, int64_t end), (p, begin, end))

}  // namespace torchkiln::cpu
