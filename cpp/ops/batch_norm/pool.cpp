// Batch norm in training, an activation and a max pool, for adjacent channels, without storing a
// tensor between them.

#include "batch_norm/operands.h"
#include "torchkiln/torch/checks.h"

namespace torchkiln::batch_norm_ops {
namespace {

using Pair = std::array<int64_t, 2>;

constexpr const char* kPool = "bn_act_pool";
constexpr const char* kPoolBackward = "bn_act_pool_backward";

/// Kernel size, stride and padding after their checks.
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

/// Kernel size, stride and padding as lists, as a call passes them.
struct Window {
  at::IntArrayRef kernel, stride, padding;
};

Pool pool_of(const Window& window) {
  const Pool pool{pair_of("kernel", window.kernel, 1), pair_of("stride", window.stride, 1),
                  pair_of("padding", window.padding, 0)};
  for (size_t d = 0; d < 2; ++d) {
    TORCH_CHECK_VALUE(2 * pool.padding[d] <= pool.kernel[d], "torchkiln.", kPool, ": padding: got ",
                      window.padding, ", expected at most half of the kernel, ", window.kernel);
  }
  return pool;
}

/// The shape of the pooled result.
c10::SymDimVector pooled_shape(const Tensor& x, const Pool& pool) {
  check_rank(kPool, "x", x, 4, 4, "[batch, channels, height, width]");
  c10::SymDimVector shape(x.sym_sizes());
  for (size_t d = 0; d < 2; ++d) {
    const c10::SymInt room = x.sym_size(static_cast<int64_t>(d) + 2) + 2 * pool.padding[d];
    TORCH_CHECK_VALUE(room >= pool.kernel[d], "torchkiln.", kPool, ": x: got shape ", x.sym_sizes(),
                      ", expected an image that holds a window of ", pool.kernel[0], " x ",
                      pool.kernel[1]);
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

/// Rejects calls that the kernels do not support. Callers then use batch norm and torch's pool.
void check_takes(const Tensor& x, const Pool& pool) {
  const bool fits =
      x.is_cuda() && x.numel() > 0 && channels_are_last(x) &&
      cuda::takes(dtype_of(x), layout_of(x, /*channels_last=*/true), windows_of(x, pool));
  TORCH_CHECK_NOT_IMPLEMENTED(fits, "torchkiln.", kPool, ": x: got ", dtype_name(x.scalar_type()),
                              " ", x.sizes(), " on ", x.device(),
                              ", expected float32 or half precision in channels_last on a GPU, ",
                              "with a multiple of 8 channels");
}

/// The tensor in channels_last and aligned to 16 bytes, as the kernels read it.
Tensor in_vectors(const char* name, const Tensor& tensor) {
  const Tensor dense = *in_layout(name, tensor, /*channels_last=*/true);
  return reinterpret_cast<uintptr_t>(dense.const_data_ptr()) % 16 == 0 ? dense : dense.clone();
}

struct PoolCall : Call {
  Window window;

  void complete() {
    training = updates = true;
    name = kPool;
  }

  TORCHKILN_FIELDS(self.x, self.weight, self.bias, self.running_mean, self.running_var, self.act,
                   self.momentum, self.eps, self.window.kernel, self.window.stride,
                   self.window.padding);
};

Status nothing(int64_t, int64_t) { return {}; }

/// Returns {y, statistics, places}. `places`: for each window, the index of its pixel with the
/// largest y.
struct PoolForward {
  static constexpr const char* kSchema =
      "torchkiln::_bn_act_pool_forward(Tensor x, Tensor? weight, Tensor? bias, "
      "Tensor(a!)? running_mean, Tensor(b!)? running_var, str act, float momentum, float eps, "
      "int[] kernel, int[] stride, int[] padding) -> (Tensor, Tensor, Tensor)";

  static Three meta(const PoolCall& call) {
    check_all(call);
    const c10::SymDimVector shape = pooled_shape(call.x, pool_of(call.window));
    const at::TensorOptions options = call.x->options();
    return {empty_last(shape, options),
            empty_of({3, call.x->sym_size(1)}, options.dtype(compute_dtype(call.x->scalar_type()))),
            empty_last(shape, options.dtype(at::kByte))};
  }

  static Three kernel(const PoolCall& call) {
    Three made = meta(call);
    const auto& [y, statistics, places] = made;
    const Tensor& x = call.x;
    const Pool pool = pool_of(call.window);
    check_takes(x, pool);
    const Tensor pixels = in_vectors("x", x);
    const Operands operands(pixels, call.weight, call.bias, {});
    BatchNormPool arguments{};
    operands.fill(arguments.norm);
    arguments.norm.y = y.data_ptr();
    arguments.norm.statistics = statistics.data_ptr();
    arguments.norm.running_mean = running(call.running_mean);
    arguments.norm.running_var = running(call.running_var);
    arguments.norm.running_dtype = dtype_of(call.running_mean ? *call.running_mean : x);
    arguments.norm.activation = call.act;
    arguments.norm.training = true;
    arguments.norm.momentum = call.momentum;
    arguments.norm.eps = call.eps;
    arguments.windows = windows_of(x, pool);
    arguments.places = places.data_ptr<uint8_t>();
    launch_allocating(
        kPool, x, 0, 1,
        [&](Allocate allocate, auto stream) {
          return cuda::batch_norm_pool(arguments, allocate, stream);
        },
        nothing);
    count_change(call.running_mean);
    count_change(call.running_var);
    return made;
  }
};

/// The wanted gradients of x, weight and bias.
struct PoolBackward {
  using Wanted = std::array<bool, 3>;
  struct Arguments : Gradient {
    Borrowed<Tensor> places;
    Window window;
    Wanted wanted;

    TORCHKILN_FIELDS(self.grad, self.x, self.statistics, self.places, self.weight, self.bias,
                     self.act, self.window.kernel, self.window.stride, self.window.padding,
                     self.wanted);
  };
  static constexpr const char* kSchema =
      "torchkiln::_bn_act_pool_backward(Tensor grad, Tensor x, Tensor statistics, Tensor places, "
      "Tensor? weight, Tensor? bias, str act, int[] kernel, int[] stride, int[] padding, "
      "bool[3] wanted) -> (Tensor, Tensor, Tensor)";

  static Three meta(const Arguments& call) {
    const Tensor& x = call.x;
    const c10::SymDimVector shape = pooled_shape(x, pool_of(call.window));
    const auto check_pooled = [&](const char* name, const Tensor& tensor) {
      check_same_device(kPoolBackward, name, tensor, "x", x);
      TORCH_CHECK_VALUE(tensor.sym_sizes() == c10::SymIntArrayRef(shape), "torchkiln.",
                        kPoolBackward, ": ", name, ": got shape ", tensor.sym_sizes(),
                        ", expected ", c10::SymIntArrayRef(shape));
    };
    check_pooled("grad", call.grad);
    check_pooled("places", call.places);
    check_same_dtype(kPoolBackward, "grad", call.grad, "x", x);
    Gradient of_norm = call;  // for batch norm, whose incoming gradient has the shape of x
    of_norm.grad = x;
    check_backward(kPoolBackward, of_norm);
    const auto& wanted = call.wanted;
    auto [grad_x, grad_weight, grad_bias, unused] =
        empty_gradients(of_norm, {wanted[0], wanted[1], wanted[2], false});
    return {grad_x, grad_weight, grad_bias};
  }

  static Three kernel(const Arguments& given) {
    // Hooks of autograd may have saved x and places in another layout.
    const Tensor pixels = in_vectors("x", given.x), at = in_vectors("places", given.places);
    const Tensor dense = in_vectors("grad", given.grad);
    Arguments call = given;
    call.x = pixels;
    call.places = at;
    call.grad = dense;
    Three found = meta(call);
    const auto& [grad_x, grad_weight, grad_bias] = found;
    const Pool pool = pool_of(call.window);
    check_takes(pixels, pool);
    const Operands operands(pixels, call.weight, call.bias, {});
    BatchNormPoolBackward arguments{};
    arguments.norm = arguments_of(call, operands, dense);
    arguments.norm.grad_x = output(grad_x);
    arguments.norm.grad_weight = output(grad_weight);
    arguments.norm.grad_bias = output(grad_bias);
    arguments.windows = windows_of(pixels, pool);
    arguments.places = at.const_data_ptr<uint8_t>();
    launch_allocating(
        kPoolBackward, pixels, 0, 1,
        [&](Allocate allocate, auto stream) {
          return cuda::batch_norm_pool_backward(arguments, allocate, stream);
        },
        nothing);
    return found;
  }
};

struct PoolOp {
  static constexpr const char* kSchema =
      "torchkiln::_bn_act_pool(Tensor x, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, "
      "Tensor(b!)? running_var, str act, float momentum, float eps, int[] kernel, int[] stride, "
      "int[] padding) -> Tensor";

  static Tensor meta(const PoolCall& call) { return std::get<0>(PoolForward::meta(call)); }
  static Tensor kernel(const PoolCall& call) { return std::get<0>(PoolForward::kernel(call)); }
  static Tensor composite(const PoolCall& call) {
    const auto& [kernel, stride, padding] = call.window;
    return at::max_pool2d(composite_of(call), kernel, stride, padding);
  }

  static Tensor recorded(const Below& below, const PoolCall& call) {
    auto [y, statistics, places] = below.call<PoolForward>(call);
    const Tensor w = tensor_or_undefined(call.weight), b = tensor_or_undefined(call.bias);
    return record(kPool, {*call.x, w, b}, y, keep(*call.x, statistics, places, w, b),
                  [act = call.act, eps = call.eps, pool = pool_of(call.window)](
                      const Incoming& in, const Kept<5>& kept) {
                    return gradients(in, kept, act, eps, pool);
                  });
  }

  static variable_list gradients(const Incoming& in, const Kept<5>& kept, Activation act,
                                 double eps, const Pool& pool) {
    const auto& [x, statistics, places, weight, bias] = kept;
    const Window window{pool.kernel, pool.stride, pool.padding};
    if (in.needs_composite()) {
      return composite_gradients(
          in, std::array{x, weight, bias}, [&](const std::array<Tensor, 3>& inputs) {
            const MaybeTensor running;  // none, so that no running statistic is updated again
            return call_composite<PoolOp>(inputs[0], maybe(inputs[1]), maybe(inputs[2]), running,
                                          running, act, /*momentum=*/0.0, eps, window.kernel,
                                          window.stride, window.padding);
          });
    }
    const PoolBackward::Wanted wanted{in.wants(0), in.wants(1), in.wants(2)};
    auto [grad_x, grad_weight, grad_bias] =
        call_below<PoolBackward>(in[0], x, statistics, places, maybe(weight), maybe(bias), act,
                                 window.kernel, window.stride, window.padding, wanted);
    return {grad_x, grad_weight, grad_bias};
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchkiln, m) { define<PoolForward, PoolBackward, PoolOp>(m); }

}  // namespace torchkiln::batch_norm_ops
