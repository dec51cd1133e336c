#include "torchkiln/kernels/softmax.h"

#include <algorithm>

#include "elementwise.h"
#include "exponentials.h"
#include "isa.h"

namespace torchkiln::cpu {
namespace TORCHKILN_ISA {
namespace {

// Neighbouring rows are computed side by side, one a lane, where so many lie along the innermost
// dimension, or where rows are so short that one alone would not fill the wide instructions.
constexpr int64_t kFewestLanes = 16;
constexpr int64_t kShort = 31;
constexpr int64_t kLanes = 256;
// Elements of each lane that are summed in the compute type.
constexpr int64_t kBlockRows = 32;

/// The elements of a row that take part: those of the first `visible` where `mask`, if there is
/// one, is true.
struct Part {
  int64_t visible;
  const bool* mask;
};

/// Walks over the rows and tells the part of each.
class Parts {
 public:
  Parts(const RowMask& mask, int64_t length, int64_t row)
      : mask_(mask), length_(length), cursor_(mask.rows, row), row_(row) {}

  Part next() {
    Part part{length_, nullptr};
    if (mask_.causal) part.visible = std::min(length_, row_ % mask_.queries + 1);
    if (mask_.data != nullptr) {
      const bool* data = mask_.data + cursor_.offset[0];
      if (mask_.stride == 1) {
        part.mask = data;
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

/// A piece of a row of x as it counts: scaled, and -infinity where an element takes no part.
template <class T>
const Compute<T>* read_piece(Compute<T>* buffer, const T* x, int64_t stride, Compute<T> scale,
                             const Part& part, int64_t at, int64_t count) {
  using C = Compute<T>;
  const C* values = read_run(buffer, x, at * stride, stride, count, DtypeOf<T>::value);
  if (part.mask != nullptr) {
    const bool* mask = part.mask + at;
    for (int64_t i = 0; i < count; ++i) buffer[i] = mask[i] ? values[i] * scale : -kInfinity<C>;
  } else if (scale != C(1)) {
    for (int64_t i = 0; i < count; ++i) buffer[i] = values[i] * scale;
  } else {
    return values;
  }
  return buffer;
}

/// to[i * stride] = value for begin <= i < end
template <class T>
void fill(T* to, int64_t stride, int64_t begin, int64_t end, Compute<T> value) {
  T rounded;
  narrow_run(&rounded, &value, 1);
  for (int64_t i = begin; i < end; ++i) to[i * stride] = rounded;
}

template <class T>
void softmax_row(const Softmax& p, const Part& part, const T* x, T* y) {
  using C = Compute<T>;
  const C scale = static_cast<C>(p.scale);
  C buffer[kPiece];
  const auto piece = [&](int64_t at, int64_t count) {
    return read_piece(buffer, x, p.stride, scale, part, at, count);
  };
  ExponentialSum<C> sum;
  for (int64_t at = 0; at < part.visible; at += kPiece) {
    const int64_t count = std::min(kPiece, part.visible - at);
    sum.add(piece(at, count), count);
  }
  const C shift = sum.shift();
  const C factor = static_cast<C>(1.0 / sum.sum());
  const C logarithm = static_cast<C>(log_of(sum.sum()));
  C results[kPiece];
  for (int64_t at = 0; at < part.visible; at += kPiece) {
    const int64_t count = std::min(kPiece, part.visible - at);
    const C* values = piece(at, count);
    T* to = y + at * p.inner;
    if (p.log) {
      store_results(to, p.inner, count, results,
                    [=](int64_t i) { return (values[i] - shift) - logarithm; });
    } else {
      store_results(to, p.inner, count, results,
                    [=](int64_t i) { return ExactMath::exp(values[i] - shift) * factor; });
    }
  }
  // NaN where the sum is.
  fill(y, p.inner, part.visible, p.length, p.log ? -kInfinity<C> - logarithm : factor * C(0));
}

template <class T>
void softmax_backward_row(const SoftmaxBackward& p, const Part& part, const T* grad, const T* y,
                          T* grad_x) {
  using C = Compute<T>;
  const C scale = static_cast<C>(p.scale);
  C grad_buffer[kPiece], y_buffer[kPiece], results[kPiece];
  const auto grads = [&](int64_t at, int64_t count) {
    return read_run(grad_buffer, grad, at * p.stride, p.stride, count, DtypeOf<T>::value);
  };
  const auto outputs = [&](int64_t at, int64_t count) {
    return read_run(y_buffer, y, at * p.inner, p.inner, count, DtypeOf<T>::value);
  };
  double total = 0;
  const int64_t summed = p.log ? p.length : part.visible;
  for (int64_t at = 0; at < summed; at += kPiece) {
    const int64_t count = std::min(kPiece, summed - at);
    const C* g = grads(at, count);
    if (!p.log) {
      const C* out = outputs(at, count);
      for (int64_t i = 0; i < count; ++i) results[i] = g[i] * out[i];
    }
    total += piece_sum(p.log ? g : results, count);
  }
  const C sum = static_cast<C>(total);
  for (int64_t at = 0; at < part.visible; at += kPiece) {
    const int64_t count = std::min(kPiece, part.visible - at);
    const C* g = grads(at, count);
    const C* out = outputs(at, count);
    T* to = grad_x + at * p.inner;
    const auto store = [&](const auto& gradient) {
      if (part.mask == nullptr) return store_results(to, p.inner, count, results, gradient);
      const bool* mask = part.mask + at;
      store_results(to, p.inner, count, results,
                    [=](int64_t i) { return mask[i] ? gradient(i) : C(0); });
    };
    if (p.log) {
      store([=](int64_t i) { return (g[i] - ExactMath::exp(out[i]) * sum) * scale; });
    } else {
      store([=](int64_t i) { return (g[i] - sum) * out[i] * scale; });
    }
  }
  fill(grad_x, p.inner, part.visible, p.length, C(0));
}

/// Rows side by side: element r of lane i lies at r * stride + i * lane_stride.
template <class T>
struct Lanes {
  T* data;
  int64_t stride;
  int64_t lane_stride;

  template <class C>
  const C* read(C* buffer, int64_t r, int64_t count) const {
    return read_run(buffer, data, r * stride, lane_stride, count,
                    DtypeOf<std::remove_const_t<T>>::value);
  }
  template <class C, class Result>
  void store(int64_t r, int64_t count, C* buffer, const Result& result) const {
    store_results(data + r * stride, lane_stride, count, buffer, result);
  }
};

/// The same as a row, for each lane.
template <class T>
void softmax_lanes(const Softmax& p, const Lanes<const T>& x, const Lanes<T>& y, int64_t count) {
  using C = Compute<T>;
  const C scale = static_cast<C>(p.scale);
  const auto read = [&](C* buffer, int64_t r) {
    const C* values = x.read(buffer, r, count);
    if (scale == C(1)) return values;
    for (int64_t i = 0; i < count; ++i) buffer[i] = values[i] * scale;
    return static_cast<const C*>(buffer);
  };
  C buffer[kLanes], top[kLanes], shift[kLanes], block[kLanes];
  double sum[kLanes];
  std::fill_n(top, count, -kInfinity<C>);
  std::fill_n(shift, count, C(0));
  std::fill_n(sum, count, 0.0);
  for (int64_t first = 0; first < p.length; first += kBlockRows) {
    const int64_t last = std::min(first + kBlockRows, p.length);
    for (int64_t r = first; r < last; ++r) {
      const C* values = read(buffer, r);
#pragma GCC ivdep
      for (int64_t i = 0; i < count; ++i) top[i] = values[i] > top[i] ? values[i] : top[i];
    }
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) {
      const C next = top[i] > -kInfinity<C> ? top[i] : C(0);
      // Where all was -infinity, the sum is 0 and the shift may grow by anything.
      const double step = static_cast<double>(shift[i]) - static_cast<double>(next);
      sum[i] *= ExactMath::exp(step < 0 ? step : 0.0);
      shift[i] = next;
    }
    std::fill_n(block, count, C(0));
    for (int64_t r = first; r < last; ++r) {
      const C* values = read(buffer, r);
#pragma GCC ivdep
      for (int64_t i = 0; i < count; ++i) block[i] += ExactMath::exp(values[i] - shift[i]);
    }
    for (int64_t i = 0; i < count; ++i) sum[i] += static_cast<double>(block[i]);
  }
  C last_step[kLanes];
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  for (int64_t i = 0; i < count; ++i) sum[i] = top[i] > -kInfinity<C> ? sum[i] : kNan;
  if (p.log) {
    for (int64_t i = 0; i < count; ++i) last_step[i] = static_cast<C>(log_of(sum[i]));
  } else {
    for (int64_t i = 0; i < count; ++i) last_step[i] = static_cast<C>(1.0 / sum[i]);
  }
  C* const results = block;
  for (int64_t r = 0; r < p.length; ++r) {
    const C* values = read(buffer, r);
    if (p.log) {
      y.store(r, count, results, [&](int64_t i) { return (values[i] - shift[i]) - last_step[i]; });
    } else {
      y.store(r, count, results,
              [&](int64_t i) { return ExactMath::exp(values[i] - shift[i]) * last_step[i]; });
    }
  }
}

template <class T>
void softmax_backward_lanes(const SoftmaxBackward& p, const Lanes<const T>& grad,
                            const Lanes<const T>& y, const Lanes<T>& grad_x, int64_t count) {
  using C = Compute<T>;
  const C scale = static_cast<C>(p.scale);
  C grad_buffer[kLanes], y_buffer[kLanes], block[kLanes], total[kLanes];
  double sum[kLanes];
  std::fill_n(sum, count, 0.0);
  for (int64_t first = 0; first < p.length; first += kBlockRows) {
    const int64_t last = std::min(first + kBlockRows, p.length);
    std::fill_n(block, count, C(0));
    for (int64_t r = first; r < last; ++r) {
      const C* g = grad.read(grad_buffer, r, count);
      const C* out = p.log ? g : y.read(y_buffer, r, count);
      if (p.log) {
#pragma GCC ivdep
        for (int64_t i = 0; i < count; ++i) block[i] += g[i];
      } else {
#pragma GCC ivdep
        for (int64_t i = 0; i < count; ++i) block[i] += g[i] * out[i];
      }
    }
    for (int64_t i = 0; i < count; ++i) sum[i] += static_cast<double>(block[i]);
  }
  for (int64_t i = 0; i < count; ++i) total[i] = static_cast<C>(sum[i]);
  C* const results = block;
  for (int64_t r = 0; r < p.length; ++r) {
    const C* g = grad.read(grad_buffer, r, count);
    const C* out = y.read(y_buffer, r, count);
    if (p.log) {
      grad_x.store(r, count, results,
                   [&](int64_t i) { return (g[i] - ExactMath::exp(out[i]) * total[i]) * scale; });
    } else {
      grad_x.store(r, count, results,
                   [&](int64_t i) { return (g[i] - total[i]) * out[i] * scale; });
    }
  }
}

/// Calls row(x_offset, y_offset, part) for each of the rows begin <= row < end or, for as many as
/// lie side by side, lanes(x_offset, x_lane_stride, y_offset, y_lane_stride, count). What is called
/// x here is the operand with strides, y those that are contiguous.
template <class Arguments, class Row, class Side>
void for_rows(const Arguments& p, int64_t begin, int64_t end, const Row& row, const Side& lanes) {
  const bool is_short = p.inner == 1 && p.length <= kShort && p.outer >= kFewestLanes;
  const bool has_lanes = (is_short || p.inner >= kFewestLanes) && !p.mask.any();
  Parts parts(p.mask, p.length, begin);
  for (int64_t at = begin; at < end;) {
    const int64_t inner = at % p.inner;
    const int64_t outer = at / p.inner;
    const int64_t x_offset = outer * p.outer_stride + inner * p.inner_stride;
    const int64_t y_offset = outer * p.length * p.inner + inner;
    if (!has_lanes) {
      row(x_offset, y_offset, parts.next());
      ++at;
      continue;
    }
    const int64_t count = std::min({kLanes, end - at, is_short ? end - at : p.inner - inner});
    lanes(x_offset, is_short ? p.outer_stride : p.inner_stride, y_offset, is_short ? p.length : 1,
          count);
    at += count;
  }
}

}  // namespace

Status softmax(const Softmax& p, int64_t begin, int64_t end) {
  return dispatch_floating(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* x = static_cast<const T*>(p.x);
    T* y = static_cast<T*>(p.y);
    for_rows(
        p, begin, end,
        [&](int64_t x_offset, int64_t y_offset, const Part& part) {
          softmax_row(p, part, x + x_offset, y + y_offset);
        },
        [&](int64_t x_offset, int64_t x_lane, int64_t y_offset, int64_t y_lane, int64_t count) {
          const Lanes<const T> from{x + x_offset, p.stride, x_lane};
          const Lanes<T> to{y + y_offset, p.inner, y_lane};
          softmax_lanes(p, from, to, count);
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
    for_rows(
        p, begin, end,
        [&](int64_t grad_offset, int64_t y_offset, const Part& part) {
          softmax_backward_row(p, part, grad + grad_offset, y + y_offset, grad_x + y_offset);
        },
        [&](int64_t grad_offset, int64_t grad_lane, int64_t y_offset, int64_t y_lane,
            int64_t count) {
          const Lanes<const T> grads{grad + grad_offset, p.stride, grad_lane};
          const Lanes<const T> outputs{y + y_offset, p.inner, y_lane};
          const Lanes<T> to{grad_x + y_offset, p.inner, y_lane};
          softmax_backward_lanes(p, grads, outputs, to, count);
        });
    return Status{};
  });
}

}  // namespace TORCHKILN_ISA

#ifdef TORCHKILN_BASELINE

TORCHKILN_DECLARE_VARIANTS(softmax)
TORCHKILN_DECLARE_VARIANTS(softmax_backward)

Status softmax(const Softmax& p, int64_t begin, int64_t end) {
  return TORCHKILN_BEST_VARIANT(softmax)(p, begin, end);
}

Status softmax_backward(const SoftmaxBackward& p, int64_t begin, int64_t end) {
  return TORCHKILN_BEST_VARIANT(softmax_backward)(p, begin, end);
}

#endif

}  // namespace torchkiln::cpu
