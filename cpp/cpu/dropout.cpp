#include "torchkiln/kernels/dropout.h"

#include "torchkiln/cpu/elementwise.h"
#include "torchkiln/cpu/isa.h"

namespace torchkiln::cpu {
namespace TORCHKILN_ISA {
namespace {

/// Draws the mask of `count` elements, at most kRun, from index `at` on: factor[i] = kept ? scale :
/// 0.
template <class C>
void draw_run(C* factor, const Dropout& dropout, int64_t at, int64_t count) {
  const RandomState random = dropout.random.resolved();
  const C scale = static_cast<C>(dropout.scale);
  const int64_t first = at / 8;
  const int64_t groups = (at + count - 1) / 8 - first + 1;
  C all[kRun + 16];
  for (int64_t g = 0; g < groups; ++g) {
    const Draw drawn = draw(random.seed, random.offset, static_cast<uint64_t>(first + g));
    for (int i = 0; i < 8; ++i) all[g * 8 + i] = bernoulli(drawn, i, dropout.last) ? scale : C(0);
  }
  std::copy_n(all + at % 8, count, factor);
}

/// x * factor, but 0 for a dropped element even if x is not finite.
template <class C>
TORCHKILN_FUNCTION C dropped(C x, C factor) {
  return factor == C(0) ? C(0) : x * factor;
}

struct Scale {
  template <class C>
  TORCHKILN_FUNCTION C operator()(C factor, C grad) const {
    return dropped(grad, factor);
  }
};
struct ScaleAndAdd {
  template <class C>
  TORCHKILN_FUNCTION C operator()(C factor, C x, C residual) const {
    return dropped(x, factor) + residual;
  }
};
struct ShiftScaleAndAdd {
  template <class C>
  TORCHKILN_FUNCTION C operator()(C factor, C x, C bias, C residual) const {
    return dropped(x + bias, factor) + residual;
  }
};

/// elementwise() with the random factors as an additional first input.
template <class Functor, int Inputs>
Status run(const Functor& functor, const Elementwise<Inputs>& arguments, const Dropout& dropout,
           int64_t begin, int64_t end) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    if (begin == 0 && dropout.random.record != nullptr) dropout.random.resolved().write_record();
    Cursor<Inputs, 1> cursor(arguments.layout, begin);
    InputRun<C> inputs[Inputs];
    C factors[kRun];
    C results[kRun];
    for (int64_t at = begin; at < end;) {
      const Layout<Inputs>& layout = arguments.layout;
      const int64_t count = cursor.run_length(layout, end - at, kRun);
      const C* in[Inputs + 1];
      draw_run(factors, dropout, at, count);
      in[0] = factors;
      for (int k = 0; k < Inputs; ++k)
        in[k + 1] =
            inputs[k].read(arguments.in[k], cursor.offset[k], cursor.rows(layout, layout.stride[k]),
                           count, arguments.in_dtype[k]);
      C* const to[1] = {results};
      apply(functor, to, in, count, std::make_index_sequence<Inputs + 1>{});
      narrow_run(static_cast<T*>(arguments.out[0]) + at, results, count);
      cursor.advance(layout, count);
      at += count;
    }
    return Status{};
  });
}

}  // namespace

Status dropout_add(const Elementwise<2>& arguments, const Dropout& dropout, int64_t begin,
                   int64_t end) {
  return run(ScaleAndAdd{}, arguments, dropout, begin, end);
}

Status bias_dropout_add(const Elementwise<3>& arguments, const Dropout& dropout, int64_t begin,
                        int64_t end) {
  return run(ShiftScaleAndAdd{}, arguments, dropout, begin, end);
}

Status dropout_backward(const Elementwise<1>& arguments, const Dropout& dropout, int64_t begin,
                        int64_t end) {
  return run(Scale{}, arguments, dropout, begin, end);
}

}  // namespace TORCHKILN_ISA

TORCHKILN_CPU_ENTRY(dropout_add,
                    (const Elementwise<2>& arguments, const Dropout& dropout, int64_t begin,
                     int64_t end),
                    (arguments, dropout, begin, end))
TORCHKILN_CPU_ENTRY(bias_dropout_add,
                    (const Elementwise<3>& arguments, const Dropout& dropout, int64_t begin,
                     int64_t end),
                    (arguments, dropout, begin, end))
TORCHKILN_CPU_ENTRY(dropout_backward,
                    (const Elementwise<1>& arguments, const Dropout& dropout, int64_t begin,
                     int64_t end),
                    (arguments, dropout, begin, end))

}  // namespace torchkiln::cpu
