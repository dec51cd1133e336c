// The divergence of two distributions per row, and its gradient with respect to the logits of one.
// Terms are computed and added in double, which costs little beside the product that made the
// logits.

#include <algorithm>

#include "detail/simd_exp.h"
#include "torchkiln/cpu/isa.h"
#include "torchkiln/kernels/cross_entropy.h"

namespace torchkiln::cpu {
namespace TORCHKILN_ISA {
namespace {

template <class C>
double number(const void* numbers, int64_t row) {
  return static_cast<double>(static_cast<const C*>(numbers)[row]);
}

/// The logarithms of the probabilities of a row.
template <class C>
struct LogRow {
  const C* logits;
  double scale, log_sum_exp;

  LogRow(const DistributionRows& rows, double scale_, int64_t row)
      : logits(static_cast<const C*>(rows.logits) + row * rows.row_stride),
        scale(scale_),
        log_sum_exp(number<C>(rows.log_sum_exp, row) -
                    std::log1p(number<C>(rows.mass, row) - 1.0)) {}

  double at(int64_t column) const {
    return static_cast<double>(logits[column]) * scale - log_sum_exp;
  }
};

template <class C>
void rows_of(const Divergence& p, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const LogRow<C> student(p.student, p.scale, row), teacher(p.teacher, p.scale, row);
    double of_p = 0, of_q = 0;
    for (int64_t c = 0; c < p.classes; ++c)
      add_divergence<ExactMath>(p.kind, p.beta, student.at(c), teacher.at(c), of_p, of_q);
    static_cast<C*>(p.of_student)[row] = static_cast<C>(of_p);
    static_cast<C*>(p.of_teacher)[row] = static_cast<C>(of_q);
    static_cast<C*>(p.divergence)[row] = static_cast<C>(of_p + of_q);
  }
}

template <class T>
void gradients_of(const Divergence& p, int64_t begin, int64_t end) {
  using C = Compute<T>;
  C results[kPiece];
  for (int64_t row = begin; row < end; ++row) {
    const LogRow<C> student(p.student, p.scale, row), teacher(p.teacher, p.scale, row);
    const double of_p = number<C>(p.of_student, row);
    T* const to = static_cast<T*>(p.grad_logits) + row * p.grad_logits_row_stride;
    for (int64_t at = 0; at < p.classes; at += kPiece) {
      store_run(to + at, /*stride=*/1, std::min(kPiece, p.classes - at), results, [&](int64_t i) {
        return static_cast<C>(p.scale * divergence_slope<ExactMath>(p.kind, p.beta,
                                                                    student.at(at + i),
                                                                    teacher.at(at + i), of_p));
      });
    }
  }
}

}  // namespace

Status divergence(const Divergence& p, int64_t begin, int64_t end) {
  p.dtype == Dtype::float64 ? rows_of<double>(p, begin, end) : rows_of<float>(p, begin, end);
  return {};
}

Status divergence_gradient(const Divergence& p, int64_t begin, int64_t end) {
  return dispatch_floating(p.grad_logits_dtype, [&](auto tag) {
    gradients_of<typename decltype(tag)::type>(p, begin, end);
    return Status{};
  });
}

}  // namespace TORCHKILN_ISA

TORCHKILN_CPU_ENTRY(divergence, (const Divergence& p, int64_t begin, int64_t end), (p, begin, end))
TORCHKILN_CPU_ENTRY(divergence_gradient, (const Divergence& p, int64_t begin, int64_t end),
                    (p, begin, end))

}  // namespace torchkiln::cpu
