// Convolutions with filters of one element, and the moments of their results for a batch norm, in
// one pass over x (_pixel_conv). If no kernel supports the arguments, torch's convolution and a
// pass for the moments compute both.

#include "torchkiln/kernels/convolution.h"

#include "torchkiln/torch/elementwise.h"
#include "torchkiln/torch/empty.h"
#include "torchkiln/torch/op.h"

namespace torchkiln::convolution_ops {
namespace {

using at::Tensor;
using Two = std::tuple<Tensor, Tensor>;

constexpr const char* kName = "pixel_conv";

Status nothing(int64_t, int64_t) { return {}; }

PixelConvolution arguments_of(const Tensor& rows, const void* weight, int64_t out) {
  PixelConvolution arguments{};
  arguments.x = rows.const_data_ptr();
  arguments.weight = weight;
  arguments.dtype = dtype_of(rows);
  arguments.in = rows.size(-1);
  arguments.pixels = rows.numel() / std::max<int64_t>(arguments.in, 1);
  arguments.out = out;
  return arguments;
}

/// torch's convolution of x.
Tensor convolved(const Tensor& x, const Tensor& weight) {
  const std::vector<int64_t> ones(static_cast<size_t>(x.dim() - 2), 1), zeros(ones.size(), 0);
  return at::convolution(x, weight, {}, ones, zeros, ones, /*transposed=*/false, zeros, 1);
}

/// The moments of the channels of y, in the form of one process of BatchNormMerge.
Tensor moments_of(const Tensor& y) {
  const Tensor wide = y.detach().movedim(1, 0).flatten(1).to(at::kDouble);
  const Tensor mean = wide.mean(1);
  const Tensor from = wide - mean.unsqueeze(1);
  return at::cat({mean, (from * from).sum(1),
                  at::full({1}, static_cast<double>(wide.size(1)), mean.options())});
}

/// Computes the convolution, with adjacent channels, and the moments of its results, [2 * channels
/// + 1].
struct PixelConv {
  static constexpr const char* kSchema =
      "torchkiln::_pixel_conv(Tensor x, Tensor weight) -> (Tensor, Tensor)";

  static Two meta(const Tensor& x, const Tensor& weight) {
    check_tensors(kName, {{"x", x}, {"weight", weight}});
    check_dtype(kName, "x", x);
    check_rank(kName, "x", x, 3, INT64_MAX, "[batch, channels, ...]");
    check_same_dtype(kName, "weight", weight, "x", x);
    const c10::SymInt out = weight.dim() > 0 ? weight.sym_size(0) : c10::SymInt(0);
    c10::SymDimVector filter(static_cast<size_t>(x.dim()), 1);
    filter[0] = out;
    filter[1] = x.sym_size(1);
    TORCH_CHECK_VALUE(weight.sym_sizes() == c10::SymIntArrayRef(filter), "torchkiln.", kName,
                      ": weight: got shape ", weight.sym_sizes(), ", expected ",
                      c10::SymIntArrayRef(filter),
                      ", filters of one element for each channel of x");
    c10::SymDimVector pixels(x.sym_sizes());
    pixels.erase(pixels.begin() + 1);
    pixels.push_back(out);
    return {at::empty_symint(pixels, x.options()).movedim(-1, 1),
            empty_of({2 * out + 1}, x.options().dtype(at::kDouble))};
  }

  static Two kernel(const Tensor& x, const Tensor& weight) {
    auto [y, moments] = meta(x, weight);
    if (y.numel() == 0) return {y, moments.zero_()};
    const Tensor rows = x.movedim(1, -1).contiguous(), filters = weight.contiguous();
    PixelConvolution arguments = arguments_of(rows, filters.const_data_ptr(), y.size(1));
    arguments.y = y.data_ptr();
    arguments.moments = moments.data_ptr<double>();
    bool taken = false;
    const auto run = [&](Allocate allocate, auto stream) {
      taken = cuda::takes(arguments);
      return taken ? cuda::pixel_convolution(arguments, allocate, stream) : Status{};
    };
    launch_allocating(kName, x, 0, 1, run, nothing);
    if (!taken) {
      y.copy_(convolved(x, weight));
      moments.copy_(moments_of(y));
    }
    return {y, moments};
  }

  static Two composite(const Tensor& x, const Tensor& weight) {
    meta(x, weight);  // for its checks
    const Tensor y = convolved(x, weight);
    return {y, moments_of(y)};
  }

  static Two recorded(const Below& below, const Tensor& x, const Tensor& weight) {
    auto [y, moments] = below.call<PixelConv>(x, weight);
    const auto gradients = [](const Incoming& in, const Kept<2>& kept) {
      const auto& [x, weight] = kept;
      const std::vector<int64_t> ones(static_cast<size_t>(x.dim() - 2), 1), zeros(ones.size(), 0);
      auto [grad_x, grad_weight, grad_bias] = at::convolution_backward(
          in[0], x, weight, at::OptionalIntArrayRef(), ones, zeros, ones, /*transposed=*/false,
          zeros, 1, {in.wants(0), in.wants(1), false});
      return variable_list{grad_x, grad_weight};
    };
    return {record(kName, {x, weight}, y, keep(x, weight), gradients), moments};
  }
};

/// Whether pixel_conv() of x and `out` filters is faster, as measured, than torch's convolution and
/// a pass for the moments.
bool gains(const Tensor& x, int64_t out) {
  if (!x.is_cuda() || x.dim() < 3 || !x.movedim(1, -1).is_contiguous() || x.numel() == 0 ||
      (x.scalar_type() != at::kHalf && x.scalar_type() != at::kBFloat16))
    return false;
  bool found = false;
  const PixelConvolution arguments = arguments_of(x.movedim(1, -1), nullptr, out);
  const auto ask = [&](auto) {
    found = cuda::gains(arguments);
    return Status{};
  };
  launch(kName, x, 0, 1, ask, nothing);
  return found;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchkiln, m) {
  define<PixelConv>(m);
  m.def("torchkiln::_pixel_conv_gains(Tensor x, int out) -> bool");
  m.impl("_pixel_conv_gains", c10::DispatchKey::CompositeExplicitAutograd, &gains);
}

}  // namespace torchkiln::convolution_ops
