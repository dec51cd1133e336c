#pragma once

// The terms of one class in the divergence of two distributions. They are computed from the
// logarithms of both probabilities: p of a student, q of a teacher.

#include <type_traits>

#include "torchkiln/core/scalar_math.h"

namespace torchkiln {

/// The divergence of p, a student's distribution, and q, a teacher's, as a sum over the classes:
///   forward  sum of q * log(q / p)
///   reverse  sum of p * log(p / q)
///   js       sum of beta * q * log(q / m) + (1 - beta) * p * log(p / m), m = beta q + (1 - beta) p
enum class DivergenceKind { forward, reverse, js };

/// Calls body with `kind` as a compile-time constant.
template <class Body>
auto with_kind(DivergenceKind kind, const Body& body) {
  using Kind = DivergenceKind;
  switch (kind) {
    case Kind::forward:
      return body(std::integral_constant<Kind, Kind::forward>{});
    case Kind::reverse:
      return body(std::integral_constant<Kind, Kind::reverse>{});
    default:
      return body(std::integral_constant<Kind, Kind::js>{});
  }
}

/// own * log(own / m) with m = own + share * (other - own). The rounding error of other - own
/// cancels in the sum of both distributions' terms, because their first derivatives do.
template <class Math, class C>
TORCHKILN_FUNCTION C term_of_mixture(C own, C other, C share) {
  constexpr C kLeast = C(1e-30);  // below it the term is 0; its quotient might overflow
  const C term = -own * Math::log1p(share * ((other - own) / own));
  return own < kLeast ? C(0) : term;
}

/// factor * (log_factor - log_other) for factor = exp(log_factor). 0 if the factor is 0, even if
/// the other logarithm is infinite, too.
template <class C>
TORCHKILN_FUNCTION C term_of_logarithms(C factor, C log_factor, C log_other) {
  return factor == C(0) ? C(0) : factor * (log_factor - log_other);
}

/// Adds the terms of a class to two sums, one of terms with the factor p and one of terms with the
/// factor q. The divergence is the sum of both. Math has exp() and log1p().
template <class Math, class C>
TORCHKILN_FUNCTION void add_divergence(DivergenceKind kind, C beta, C log_p, C log_q, C& of_p,
                                       C& of_q) {
  if (kind == DivergenceKind::forward) {
    of_q += term_of_logarithms(Math::exp(log_q), log_q, log_p);
  } else if (kind == DivergenceKind::reverse) {
    of_p += term_of_logarithms(Math::exp(log_p), log_p, log_q);
  } else {
    const C p = Math::exp(log_p), q = Math::exp(log_q);
    of_p += (C(1) - beta) * term_of_mixture<Math>(p, q, beta);
    of_q += beta * term_of_mixture<Math>(q, p, C(1) - beta);
  }
}

/// The derivative with respect to the student's logit, where log_p is the logit minus the
/// log-sum-exp. `of_p`: the sum over the row of the terms with the factor p.
template <class Math, class C>
TORCHKILN_FUNCTION C divergence_slope(DivergenceKind kind, C beta, C log_p, C log_q, C of_p) {
  const C p = Math::exp(log_p);
  if (kind == DivergenceKind::forward) return p - Math::exp(log_q);
  if (kind == DivergenceKind::reverse) return term_of_logarithms(p, log_p, log_q) - p * of_p;
  return (C(1) - beta) * term_of_mixture<Math>(p, Math::exp(log_q), beta) - p * of_p;
}

}  // namespace torchkiln
