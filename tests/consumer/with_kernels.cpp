// torchkiln::kernels: plain pointers, no torch, no CUDA toolkit.

#include <cstdio>
#include <vector>

#include "torchkiln/kernels/bias_act.h"
#include "torchkiln/version.h"

int main() {
  constexpr int64_t kRows = 5, kColumns = 3;
  std::vector<float> x(kRows * kColumns), bias{-2.0f, 0.25f, 1.0f}, out(x.size(), -1.0f);
  for (size_t i = 0; i < x.size(); ++i) x[i] = 0.5f * static_cast<float>(i) - 3.0f;

  using torchkiln::Dtype;
  torchkiln::Dimension<2> dimensions[] = {{kColumns, {1}, {1, 1}},
                                          {kRows, {kColumns}, {kColumns, 0}}};
  torchkiln::BiasAct arguments{};
  arguments.elements = {
      {out.data()}, Dtype::float32, {x.data(), bias.data()}, {Dtype::float32, Dtype::float32}, {}};
  arguments.activation = torchkiln::kActivation<torchkiln::Relu>;
  arguments.scale = 2.0;
  if (!torchkiln::make_layout(dimensions, 2, arguments.elements.layout)) return 1;

  // Two ranges, as two threads would take them.
  for (const int64_t begin : {int64_t{0}, int64_t{7}}) {
    const int64_t end = begin == 0 ? 7 : kRows * kColumns;
    const torchkiln::Status status = torchkiln::cpu::bias_act(arguments, begin, end);
    if (status.code != torchkiln::StatusCode::ok) {
      std::fprintf(stderr, "with_kernels: %s\n", status.error);
      return 1;
    }
  }
  for (size_t i = 0; i < x.size(); ++i) {
    const float sum = x[i] * 2.0f + bias[i % kColumns];
    const float expected = sum > 0.0f ? sum : 0.0f;
    if (out[i] != expected) {
      std::fprintf(stderr, "with_kernels: out[%zu] is %g, expected %g\n", i, out[i], expected);
      return 1;
    }
  }
  // An activation that the library lacks.
  arguments.activation = static_cast<torchkiln::Activation>(1000);
  const torchkiln::Status refused = torchkiln::cpu::bias_act(arguments, 0, 1);
  if (refused.ok() || refused.code != torchkiln::StatusCode::unsupported) {
    std::fprintf(stderr, "with_kernels: an unknown activation was not refused\n");
    return 1;
  }
  std::printf("with_kernels: torchkiln %s, %zu values right\n", TORCHKILN_VERSION, out.size());
}
