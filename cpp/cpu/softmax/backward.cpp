#include "softmax/batch.h"
#include "softmax/rows.h"

namespace torchkiln::cpu {
namespace TORCHKILN_ISA {
namespace {

/// Sets to[i * stride] to 0 if mask[i] is 0. With stride 1 it stores every element.
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
  const auto add = [&](const auto* g, const auto* out, int64_t, int64_t count) {
    double sum[1];
    sum_lanes<C>(sum, count, [&](int64_t i, auto lanes, Lanes<C>* terms) {
      const Lanes<C> term = load_lanes(g + i, lanes);
      terms[0] += p.log ? term : term * load_lanes(out + i, lanes);
    });
    total += sum[0];
  };
  const int64_t summed = p.log ? p.length : range.visible;
  const bool is_run = p.stride == 1 && p.inner == 1;
  is_run ? add(grad, y, 0, summed) : for_pieces(summed, add);
  const C sum = static_cast<C>(total);
  // In registers, float16 is converted in less time than in buffers.
  if (std::is_same_v<T, Half> && is_run && !p.log && range.mask == nullptr) {
    for_lanes<C>(0, range.visible, [&](int64_t i, auto lanes) {
      const Lanes<C> g = load_lanes(grad + i, lanes), out = load_lanes(y + i, lanes);
      store_lanes(grad_x + i, (g - sum) * out * scale, lanes);
    });
    return fill(grad_x, 1, range.visible, p.length, C(0));
  }
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

}  // namespace

Status softmax_backward(const SoftmaxBackward& p, int64_t begin, int64_t end) {
  return dispatch_floating(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* grad = static_cast<const T*>(p.grad);
    const T* y = static_cast<const T*>(p.y);
    T* grad_x = static_cast<T*>(p.grad_x);
    if (has_batches(p)) {
      softmax_backward_batches(p, grad, y, grad_x, begin, end);
      return Status{};
    }
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

TORCHKILN_CPU_ENTRY(softmax_backward, (const SoftmaxBackward& p, int64_t begin, int64_t end),
                    (p, begin, end))

}  // namespace torchkiln::cpu
