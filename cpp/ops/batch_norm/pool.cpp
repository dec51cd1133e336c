// Batch norm in training, an activation and a max pool of adjacent channels, without a tensor
// between them.

#include "batch_norm/operands.h"
#include "torchkiln/torch/checks.h"

namespace torchkiln::batch_norm_ops {
namespace {

using Pair = std::array<int64_t, 2>;

constexpr const char* kPool = "bn_act_pool";
constexpr const char* kPoolBackward = "bn_act_pool_backward";

/// Kernel size, stride and padding.
struct Pool {
  Pair kernel;
  Pair stride;
  Pair padding;
};

Pair pair_of(const char* name, at::IntArrayRef values, int64_t least) {
  constexpr int64_t kMost = 1 << 30;
  const auto fits = [&](int64_t value) { return value >= least && value <= kMost; };
  TORCH_CHECK_VALUE(values.size() == 2 && fits(values[0]) && fits(values[1]), "torchkiln.", kPool,
                    ": ", name, ": got ", values, ", expected two numbers from ", least, " to ",
                    kMost);
  return {values[0], values[1]};
}

Pool pool_of(at::IntArrayRef kernel, at::IntArrayRef stride, at::IntArrayRef padding) {
  const Pool pool{pair_of("kernel", kernel, 1), pair_of("stride", stride, 1),
                  pair_of("padding", padding, 0)};
  for (size_t d = 0; d < 2; ++d) {
    TORCH_CHECK_VALUE(2 * pool.padding[d] <= pool.kernel[d], "torchkiln.", kPool, ": padding: got ",
                      padding, ", expected at most half of the kernel, ", kernel);
  }
  return pool;
}

/// The shape behind the pool.
c10::SymDimVector pooled_shape(const Tensor& x, const Pool& pool) {
  check_rank(kPool, "x", x, 4, 4, "[batch, channels, height, width]");
  c10::SymDimVector shape(x.sym_sizes());
  for (size_t d = 0; d < 2; ++d) {
    const c10::SymInt room = x.sym_size(static_cast<int64_t>(d) + 2) + 2 * pool.padding[d];
    TORCH_CHECK_VALUE(room >= pool.kernel[d], "torchkiln.", kPool, ": x: got shape ", x.sym_sizes(),
                      ", expected pixels for a window of ", pool.kernel[0], " x ", pool.kernel[1]);
    shape[d + 2] = (room - pool.kernel[d]) / pool.stride[d] + 1;
  }
  return shape;
}

PoolWindows windows_of(const Tensor& x, const Pool& pool) {
  PoolWindows windows{x.size(0), x.size(2), x.size(3), 0, 0, {}, {}, {}};
  const c10::SymDimVector pooled = pooled_shape(x, pool);
  windows.pooled_height = pooled[2].expect_int();
  windows.pooled_width = pooled[3].expect_int();
  for (size_t d = 0; d < 2; ++d) {
    windows.kernel[d] = static_cast<int>(pool.kernel[d]);
    windows.stride[d] = static_cast<int>(pool.stride[d]);
    windows.padding[d] = static_cast<int>(pool.padding[d]);
  }
  return windows;
}

/// An uninitialised tensor with adjacent channels.
Tensor empty_last(c10::SymIntArrayRef shape, const at::TensorOptions& options) {
  return at::empty_symint(shape, options.memory_format(at::MemoryFormat::ChannelsLast));
}

/// Rejects what the kernels do not take; callers use batch norm and torch's pool for it.
void check_takes(const Tensor& x, const Pool& pool) {
  const bool fits =
      x.is_cuda() && x.numel() > 0 && channels_are_last(x) &&
      cuda::takes(dtype_of(x), layout_of(x, /*channels_last=*/true), windows_of(x, pool));
  TORCH_CHECK_NOT_IMPLEMENTED(fits, "torchkiln.", kPool, ": x: got ", dtype_name(x.scalar_type()),
                              " ", x.sizes(), " on ", x.device(),
                              ", expected float32 or half precision in channels_last on a GPU, ",
                              "with a multiple of 8 channels");
}

/// The tensor in channels_last and with whole vectors, as the kernels read it.
Tensor in_vectors(const char* name, const Tensor& tensor) {
  const Tensor dense = *in_layout(name, tensor, /*channels_last=*/true);
  return reinterpret_cast<uintptr_t>(dense.const_data_ptr()) % 16 == 0 ? dense : dense.clone();
}

Call pool_call(const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias,
               const MaybeTensor& running_mean, const MaybeTensor& running_var, Activation act,
               double momentum, double eps) {
  static const MaybeTensor none;
  return {x,
          weight,
          bias,
          running_mean,
          running_var,
          none,
          act,
          /*training=*/true,
          momentum,
          eps,
          /*updates=*/true,
          kPool};
}

Status nothing(int64_t, int64_t) { return {}; }

/// {y, statistics, places}: the pixel of each window where y is largest.
struct PoolForward {
  static constexpr const char* kSchema =
      "torchkiln::bn_act_pool_forward(Tensor x, Tensor? weight, Tensor? bias, "
      "Tensor(a!)? running_mean, Tensor(b!)? running_var, str act, float momentum, float eps, "
      "int[] kernel, int[] stride, int[] padding) -> (Tensor, Tensor, Tensor)";

  static Three meta(const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias,
                    const MaybeTensor& running_mean, const MaybeTensor& running_var, Activation act,
                    double momentum, double eps, at::IntArrayRef kernel, at::IntArrayRef stride,
                    at::IntArrayRef padding) {
    check_all(pool_call(x, weight, bias, running_mean, running_var, act, momentum, eps));
    const c10::SymDimVector shape = pooled_shape(x, pool_of(kernel, stride, padding));
    const at::TensorOptions options = x.options();
    return {empty_last(shape, options),
            empty_of({3, x.sym_size(1)}, options.dtype(compute_dtype(x.scalar_type()))),
            empty_last(shape, options.dtype(at::kByte))};
  }

  static Three kernel(const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias,
                      const MaybeTensor& running_mean, const MaybeTensor& running_var,
                      Activation act, double momentum, double eps, at::IntArrayRef kernel,
                      at::IntArrayRef stride, at::IntArrayRef padding) {
    Three made = meta(x, weight, bias, running_mean, running_var, act, momentum, eps, kernel,
                      stride, padding);
    const auto& [y, statistics, places] = made;
    const Pool pool = pool_of(kernel, stride, padding);
    check_takes(x, pool);
    const Tensor pixels = in_vectors("x", x);
    const Operands operands(pixels, weight, bias, {});
    BatchNormPool arguments{};
    operands.fill(arguments.norm);
    arguments.norm.y = y.data_ptr();
    arguments.norm.statistics = statistics.data_ptr();
    arguments.norm.running_mean = running(running_mean);
    arguments.norm.running_var = running(running_var);
    arguments.norm.running_dtype = dtype_of(running_mean ? *running_mean : x);
    arguments.norm.activation = act;
    arguments.norm.training = true;
    arguments.norm.momentum = momentum;
    arguments.norm.eps = eps;
    arguments.windows = windows_of(x, pool);
    arguments.places = places.data_ptr<uint8_t>();
    launch_allocating(
        kPool, x, 0, 1,
        [&](Allocate allocate, auto stream) {
          return cuda::batch_norm_pool(arguments, allocate, stream);
        },
        nothing);
    count_change(running_mean);
    count_change(running_var);
    return made;
  }
};

/// The wanted gradients of x, weight and bias.
struct PoolBackward {
  using Wanted = std::array<bool, 3>;
  static constexpr const char* kSchema =
      "torchkiln::bn_act_pool_backward(Tensor grad, Tensor x, Tensor statistics, Tensor places, "
      "Tensor? weight, Tensor? bias, str act, int[] kernel, int[] stride, int[] padding, "
      "bool[3] wanted) -> (Tensor, Tensor, Tensor)";

  static Three meta(const Tensor& grad, const Tensor& x, const Tensor& statistics,
                    const Tensor& places, const MaybeTensor& weight, const MaybeTensor& bias,
                    Activation, at::IntArrayRef kernel, at::IntArrayRef stride,
                    at::IntArrayRef padding, Wanted wanted) {
    const MaybeTensor none;
    const c10::SymDimVector shape = pooled_shape(x, pool_of(kernel, stride, padding));
    for (const auto& [name, tensor] : {std::pair{"grad", grad}, std::pair{"places", places}}) {
      check_same_device(kPoolBackward, name, tensor, "x", x);
      TORCH_CHECK_VALUE(tensor.sym_sizes() == c10::SymIntArrayRef(shape), "torchkiln.",
                        kPoolBackward, ": ", name, ": got shape ", tensor.sym_sizes(),
                        ", expected ", c10::SymIntArrayRef(shape));
    }
    check_same_dtype(kPoolBackward, "grad", grad, "x", x);
    check_backward(kPoolBackward, {x, x, statistics, weight, bias, none, none});
    auto [grad_x, grad_weight, grad_bias, unused] = empty_gradients(
        {x, x, statistics, weight, bias, none, none}, {wanted[0], wanted[1], wanted[2], false});
    return {grad_x, grad_weight, grad_bias};
  }

  static Three kernel(const Tensor& grad, const Tensor& x, const Tensor& statistics,
                      const Tensor& places, const MaybeTensor& weight, const MaybeTensor& bias,
                      Activation act, at::IntArrayRef kernel, at::IntArrayRef stride,
                      at::IntArrayRef padding, Wanted wanted) {
    // Hooks of autograd may have saved x and places in another layout.
    const Tensor pixels = in_vectors("x", x), at = in_vectors("places", places);
    const Tensor dense = in_vectors("grad", grad);
    Three found =
        meta(grad, pixels, statistics, at, weight, bias, act, kernel, stride, padding, wanted);
    const auto& [grad_x, grad_weight, grad_bias] = found;
    const Pool pool = pool_of(kernel, stride, padding);
    check_takes(pixels, pool);
    const MaybeTensor none;
    const Operands operands(pixels, weight, bias, {});
    BatchNormPoolBackward arguments{};
    arguments.norm =
        arguments_of({dense, pixels, statistics, weight, bias, none, none}, operands, dense, act);
    arguments.norm.grad_x = output(grad_x);
    arguments.norm.grad_weight = output(grad_weight);
    arguments.norm.grad_bias = output(grad_bias);
    arguments.windows = windows_of(pixels, pool);
    arguments.places = at.const_data_ptr<uint8_t>();
    launch_allocating(
        kPoolBackward, x, 0, 1,
        [&](Allocate allocate, auto stream) {
          return cuda::batch_norm_pool_backward(arguments, allocate, stream);
        },
        nothing);
    return found;
  }
};

struct PoolOp {
  static constexpr const char* kSchema =
      "torchkiln::bn_act_pool(Tensor x, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, "
      "Tensor(b!)? running_var, str act, float momentum, float eps, int[] kernel, int[] stride, "
      "int[] padding) -> Tensor";

  static Tensor meta(const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias,
                     const MaybeTensor& running_mean, const MaybeTensor& running_var,
                     Activation act, double momentum, double eps, at::IntArrayRef kernel,
                     at::IntArrayRef stride, at::IntArrayRef padding) {
    return std::get<0>(PoolForward::meta(x, weight, bias, running_mean, running_var, act, momentum,
                                         eps, kernel, stride, padding));
  }

  static Tensor kernel(const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias,
                       const MaybeTensor& running_mean, const MaybeTensor& running_var,
                       Activation act, double momentum, double eps, at::IntArrayRef kernel,
                       at::IntArrayRef stride, at::IntArrayRef padding) {
    return std::get<0>(PoolForward::kernel(x, weight, bias, running_mean, running_var, act,
                                           momentum, eps, kernel, stride, padding));
  }

  static Tensor composite(const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias,
                          const MaybeTensor& running_mean, const MaybeTensor& running_var,
                          Activation act, double momentum, double eps, at::IntArrayRef kernel,
                          at::IntArrayRef stride, at::IntArrayRef padding) {
    const Tensor y =
        composite_of(pool_call(x, weight, bias, running_mean, running_var, act, momentum, eps));
    return at::max_pool2d(y, kernel, stride, padding);
  }

  static Tensor recorded(const Below& below, const Tensor& x, const MaybeTensor& weight,
                         const MaybeTensor& bias, const MaybeTensor& running_mean,
                         const MaybeTensor& running_var, Activation act, double momentum,
                         double eps, at::IntArrayRef kernel, at::IntArrayRef stride,
                         at::IntArrayRef padding) {
    auto [y, statistics, places] = below.call<PoolForward>(
        x, weight, bias, running_mean, running_var, act, momentum, eps, kernel, stride, padding);
    const Tensor w = tensor_or_undefined(weight), b = tensor_or_undefined(bias);
    return record(kPool, {x, w, b}, y, keep(x, statistics, places, w, b),
                  [act, eps, pool = pool_of(kernel, stride, padding)](const Incoming& in,
                                                                      const Kept<5>& kept) {
                    return gradients(in, kept, act, eps, pool);
                  });
  }

  static variable_list gradients(const Incoming& in, const Kept<5>& kept, Activation act,
                                 double eps, const Pool& pool) {
    const auto& [x, statistics, places, weight, bias] = kept;
    if (in.needs_composite()) {
      return composite_gradients(
          in, std::array{x, weight, bias}, [&](const std::array<Tensor, 3>& inputs) {
            const MaybeTensor none;
            return composite(inputs[0], maybe(inputs[1]), maybe(inputs[2]), none, none, act,
                             /*momentum=*/0, eps, pool.kernel, pool.stride, pool.padding);
          });
    }
    const PoolBackward::Wanted wanted{in.wants(0), in.wants(1), in.wants(2)};
    auto [grad_x, grad_weight, grad_bias] = call_below<PoolBackward>(
        in[0], x, statistics, places, maybe(weight), maybe(bias), act, at::IntArrayRef(pool.kernel),
        at::IntArrayRef(pool.stride), at::IntArrayRef(pool.padding), wanted);
    return {wanted[0] ? grad_x : Tensor(), wanted[1] ? grad_weight : Tensor(),
            wanted[2] ? grad_bias : Tensor()};
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchkiln, m) { define<PoolForward, PoolBackward, PoolOp>(m); }

}  // namespace torchkiln::batch_norm_ops
