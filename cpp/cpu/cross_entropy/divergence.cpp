// The divergence of two distributions per row, and its gradient with respect to the logits of one.
// The loops over classes have no branches, so that the compiler vectorises them.

#include <algorithm>

#include "detail/simd_exp.h"
#include "torchkiln/cpu/isa.h"
#include "torchkiln/kernels/cross_entropy.h"

namespace torchkiln::cpu {
namespace TORCHKILN_ISA {
namespace {

template <class C>
C number(const void* numbers, int64_t row) {
  return static_cast<const C*>(numbers)[row];
}

struct DivergenceMath : ExactMath {
  template <class C>
  TORCHKILN_FUNCTION static C log1p(C x) {
    const double wide = static_cast<double>(x), sum = 1.0 + wide;
    if constexpr (sizeof(C) < sizeof(double)) return static_cast<C>(log_of<C>(sum));
    return static_cast<C>(log_of<C>(sum) + (wide - (sum - 1.0)) / sum);
  }
};

/// The log-probabilities of a row.
template <class C>
struct LogRow {
  const C* logits;
  C scale, log_sum_exp, correction;

  LogRow(const DistributionRows& rows, double scale_, int64_t row)
      : logits(static_cast<const C*>(rows.logits) + row * rows.row_stride),
        scale(static_cast<C>(scale_)),
        log_sum_exp(number<C>(rows.log_sum_exp, row)),
        correction(std::log1p(number<C>(rows.mass, row) - C(1))) {}

  /// The logits of a piece of the row, multiplied by the scale. A separate loop, so that the
  /// product is rounded before a subtraction: a fused multiply-subtract would return its rounding
  /// error.
  void scaled(int64_t at, int64_t count, C* to) const {
    for (int64_t i = 0; i < count; ++i) to[i] = logits[at + i] * scale;
  }
  C of(C scaled) const { return (scaled - log_sum_exp) + correction; }
};

template <class C, DivergenceKind kKind>
void rows_of(const Divergence& p, int64_t begin, int64_t end) {
  const C beta = static_cast<C>(p.beta);
  C z[kPiece], u[kPiece], terms_p[kPiece], terms_q[kPiece];
  for (int64_t row = begin; row < end; ++row) {
    const LogRow<C> student(p.student, p.scale, row), teacher(p.teacher, p.scale, row);
    double of_p = 0, of_q = 0;
    for (int64_t at = 0; at < p.classes; at += kPiece) {
      const int64_t count = std::min(kPiece, p.classes - at);
      student.scaled(at, count, z);
      teacher.scaled(at, count, u);
      for (int64_t i = 0; i < count; ++i) {
        C own = 0, other = 0;
        add_divergence<DivergenceMath>(kKind, beta, student.of(z[i]), teacher.of(u[i]), own, other);
        terms_p[i] = own;
        terms_q[i] = other;
      }
      of_p += piece_sum(terms_p, count);
      of_q += piece_sum(terms_q, count);
    }
    static_cast<C*>(p.of_student)[row] = static_cast<C>(of_p);
    static_cast<C*>(p.of_teacher)[row] = static_cast<C>(of_q);
    static_cast<C*>(p.divergence)[row] = static_cast<C>(of_p + of_q);
  }
}

template <class T, DivergenceKind kKind>
void gradients_of(const Divergence& p, int64_t begin, int64_t end) {
  using C = Compute<T>;
  const C beta = static_cast<C>(p.beta), scale = static_cast<C>(p.scale);
  C z[kPiece], u[kPiece], results[kPiece];
  for (int64_t row = begin; row < end; ++row) {
    const LogRow<C> student(p.student, p.scale, row), teacher(p.teacher, p.scale, row);
    const C of_p = number<C>(p.of_student, row);
    const C factor = p.grad == nullptr ? scale : scale * number<C>(p.grad, row);
    T* const to = static_cast<T*>(p.grad_logits) + row * p.grad_logits_row_stride;
    for (int64_t at = 0; at < p.classes; at += kPiece) {
      const int64_t count = std::min(kPiece, p.classes - at);
      student.scaled(at, count, z);
      teacher.scaled(at, count, u);
      store_run(to + at, /*stride=*/1, count, results, [&](int64_t i) {
        return factor * divergence_slope<DivergenceMath>(kKind, beta, student.of(z[i]),
                                                         teacher.of(u[i]), of_p);
      });
    }
  }
}

}  // namespace

Status divergence(const Divergence& p, int64_t begin, int64_t end) {
  return with_kind(p.kind, [&](auto kind) {
    p.dtype == Dtype::float64 ? rows_of<double, kind()>(p, begin, end)
                              : rows_of<float, kind()>(p, begin, end);
    return Status{};
  });
}

Status divergence_gradient(const Divergence& p, int64_t begin, int64_t end) {
  return with_kind(p.kind, [&](auto kind) {
    return dispatch_floating(p.grad_logits_dtype, [&](auto tag) {
      gradients_of<typename decltype(tag)::type, kind()>(p, begin, end);
      return Status{};
    });
  });
}

}  // namespace TORCHKILN_ISA

TORCHKILN_CPU_ENTRY(divergence, (const Divergence& p, int64_t begin, int64_t end), (p, begin, end))
TORCHKILN_CPU_ENTRY(divergence_gradient, (const Divergence& p, int64_t begin, int64_t end),
                    (p, begin, end))

}  // namespace torchkiln::cpu
