// Norms whose result is written in E4M3 in the same pass, with the same bits as quantize() of the
// norm in its own dtype. Another tensor stands for the result in autograd and receives its
// gradient. Backward is that of the norm: the rounding to E4M3 is ignored.

#include "norm/norm.h"
#include "quantize/quantize.h"

namespace torchkiln::norm_ops {
namespace {

using quantize_ops::Four;
using Five = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

/// Uninitialised outputs: data and scale; the tensor that stands for y; and the results of
/// outputs(): x + residual, and the statistics of each row.
Five quantized_outputs(const Call& call, bool wants_stats) {
  auto [y, sum, stats] = outputs(call, wants_stats);
  const Tensor& like = call.wider();
  return std::tuple_cat(
      quantize_ops::empty_quantized(like.sym_sizes(), like),
      Three{quantize_ops::stand_in(like.sym_sizes(), like.options()), sum, stats});
}

Five run_quantized(const Call& call, bool wants_stats) {
  Five out = quantized_outputs(call, wants_stats);
  const auto& [data, scale, source, sum, stats] = out;
  run_into(call, {Tensor(), sum, stats}, {data, scale});
  return out;
}

/// The outputs with the indices I.
template <size_t... I>
auto some_of(const Five& out) {
  return std::tuple{std::get<I>(out)...};
}

/// The arguments of an op that quantises.
template <class Arguments_>
struct Quantizing : Arguments_ {
  void complete() {
    if constexpr (detail::kHas<detail::CompleteOf, Arguments_>) Arguments_::complete();
    this->quantized = true;
  }
};

/// The forward op that also returns the statistics: {data, scale, source, stats}.
struct QuantizedForward {
  using Arguments = Quantizing<Forward::Arguments>;
  static constexpr bool kFlexibleLayout = true;
  static constexpr const char* kSchema =
      "torchkiln::_norm_fp8_forward(Tensor x, SymInt[] normalized_shape, Tensor? weight, "
      "Tensor? bias, float eps, float offset, str round, bool centered) -> "
      "(Tensor, Tensor, Tensor, Tensor)";
  static Four meta(const Arguments& call) {
    return some_of<0, 1, 2, 4>(quantized_outputs(call, true));
  }
  static Four kernel(const Arguments& call) {
    return some_of<0, 1, 2, 4>(run_quantized(call, true));
  }
};

/// The forward op of x + residual: {data, scale, source, sum, stats}.
struct QuantizedAddForward {
  using Arguments = Quantizing<AddForward::Arguments>;
  static constexpr bool kFlexibleLayout = true;
  static constexpr const char* kSchema =
      "torchkiln::_add_norm_fp8_forward(Tensor x, Tensor residual, SymInt[] normalized_shape, "
      "Tensor? weight, Tensor? bias, float eps, float offset, str round, bool centered) -> "
      "(Tensor, Tensor, Tensor, Tensor, Tensor)";
  static Five meta(const Arguments& call) { return quantized_outputs(call, true); }
  static Five kernel(const Arguments& call) { return run_quantized(call, true); }
};

/// An op without a residual: {data, scale, the tensor that stands for y}.
template <class Kind>
struct QuantizedNorm {
  static constexpr bool kFlexibleLayout = true;

  struct Plain : Kind {
    template <class Self>
    static auto fields(Self& self) {
      return std::tuple_cat(std::tie(self.x), Kind::fields(self));
    }
  };
  using Arguments = Quantizing<Plain>;
  static Three meta(const Arguments& call) {
    return some_of<0, 1, 2>(quantized_outputs(call, false));
  }
  static Three kernel(const Arguments& call) {
    return some_of<0, 1, 2>(run_quantized(call, false));
  }
  static Three composite(const Arguments& call) { quantize_ops::refuse_transform(call.op()); }
  static Three recorded(const Below& below, const Arguments& call) {
    const auto [data, scale, source, stats] = below.call<QuantizedForward>(call);
    return {data, scale, std::get<0>(record_norm(call, source, Tensor(), stats))};
  }
};

/// An op with a residual: {data, scale, the tensor that stands for y, x + residual}.
template <class Kind>
struct QuantizedAddNorm {
  static constexpr bool kFlexibleLayout = true;
  static constexpr std::array<size_t, 2> kPromotedBy{0, 1};
  static constexpr std::array<size_t, 2> kReadsMixed{0, 1};

  struct Plain : Kind {
    template <class Self>
    static auto fields(Self& self) {
      return std::tuple_cat(std::tie(self.x, self.residual), Kind::fields(self));
    }
  };
  using Arguments = Quantizing<Plain>;
  static Four meta(const Arguments& call) {
    return some_of<0, 1, 2, 3>(quantized_outputs(call, false));
  }
  static Four kernel(const Arguments& call) {
    return some_of<0, 1, 2, 3>(run_quantized(call, false));
  }
  static Four composite(const Arguments& call) { quantize_ops::refuse_transform(call.op()); }
  static Four recorded(const Below& below, const Arguments& call) {
    const auto [data, scale, source, sum, stats] = below.call<QuantizedAddForward>(call);
    return std::tuple_cat(Two{data, scale}, record_norm(call, source, sum, stats));
  }
};

struct LayerNormFp8 : QuantizedNorm<LayerNormCall> {
  static constexpr const char* kSchema =
      "torchkiln::layer_norm_fp8(Tensor x, SymInt[1] normalized_shape, Tensor? weight=None, "
      "Tensor? bias=None, float eps=1e-05, *, float offset=0.0, str round=\"once\") -> "
      "(Tensor, Tensor, Tensor)";
};

struct RmsNormFp8 : QuantizedNorm<RmsNormCall> {
  static constexpr const char* kSchema =
      "torchkiln::rms_norm_fp8(Tensor x, SymInt[1] normalized_shape, Tensor? weight=None, "
      "float? eps=None, *, float offset=0.0, str round=\"once\") -> (Tensor, Tensor, Tensor)";
};

struct AddLayerNormFp8 : QuantizedAddNorm<LayerNormCall> {
  static constexpr const char* kSchema =
      "torchkiln::add_layer_norm_fp8(Tensor x, Tensor residual, SymInt[1] normalized_shape, "
      "Tensor? weight=None, Tensor? bias=None, float eps=1e-05, *, float offset=0.0, "
      "str round=\"once\") -> (Tensor, Tensor, Tensor, Tensor)";
};

struct AddRmsNormFp8 : QuantizedAddNorm<RmsNormCall> {
  static constexpr const char* kSchema =
      "torchkiln::add_rms_norm_fp8(Tensor x, Tensor residual, SymInt[1] normalized_shape, "
      "Tensor? weight=None, float? eps=None, *, float offset=0.0, str round=\"once\") -> "
      "(Tensor, Tensor, Tensor, Tensor)";
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchkiln, m) {
  define<QuantizedForward, QuantizedAddForward, LayerNormFp8, RmsNormFp8, AddLayerNormFp8,
         AddRmsNormFp8>(m);
}

}  // namespace torchkiln::norm_ops
