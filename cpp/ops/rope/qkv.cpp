// The op qkv_norm_rope and its derivatives: queries, keys and values of a packed projection, with
// norms and a rotation. qkv.h has the checks and the arguments of the kernels, cache.cpp the form
// that writes into a cache, rope.cpp the rotation alone.

#include "rope/qkv.h"
#include "torchkiln/torch/empty.h"
#include "torchkiln/torch/ops.h"

namespace torchkiln::rope_ops {
namespace {

using Three = std::tuple<Tensor, Tensor, Tensor>;

Three checked_outputs(const QkvCall& call) {
  check(call);
  return {heads_output(call, call.heads), heads_output(call, call.kv_heads),
          heads_output(call, call.kv_heads)};
}

Three run(const QkvCall& call) {
  auto [q, k, v] = checked_outputs(call);
  if (q.numel() > 0) run_into(call, {q, k, v}, rows_of(std::nullopt, call.qkv->size(-2)));
  return {q, k, v};
}

/// The op with torch's own ops.
Three composite_of(const QkvCall& call) {
  check(call);
  const Tensor rows = call.qkv->unflatten_symint(
      -1, c10::SymDimVector{SymInt(call.heads + 2 * call.kv_heads), call.head_dim()});
  const at::ScalarType compute = compute_dtype(call.qkv->scalar_type());
  const auto factors = composite_angles(call.rotated(), call.angles, -2);
  const bool is_across = call.normalizes_across();
  constexpr int64_t kDims[] = {-1, -2};
  const at::IntArrayRef dims(kDims, is_across ? 2 : 1);
  const auto turned = [&](int64_t first, int64_t count, const MaybeTensor& weight) {
    Tensor x = rows.narrow(-2, first, count).to(compute);
    if (call.normalizes()) x = x * ((x * x).mean(dims, /*keepdim=*/true) + call.eps).rsqrt();
    if (weight) {
      const Tensor factor = weight->to(compute) + call.offset;
      x = x * factor.reshape_symint({SymInt(is_across ? count : 1), call.head_dim()});
    }
    return composite_rotation(x, call.rotated(), call.angles, factors)
        .to(call.qkv->scalar_type())
        .transpose(-2, -3);
  };
  return {turned(0, call.heads, call.q_weight), turned(call.heads, call.kv_heads, call.k_weight),
          rows.narrow(-2, call.heads + call.kv_heads, call.kv_heads).transpose(-2, -3).clone()};
}

/// The gradients of qkv, q_weight and k_weight.
struct QkvBackward {
  using Wanted = std::array<bool, 2>;
  struct Arguments : QkvCall {
    Borrowed<MaybeTensor> grads[3];
    Wanted wanted;

    void complete() { op = kName; }

    template <class Self>
    static auto fields(Self& self) {
      return std::tuple_cat(std::tie(self.grads[0], self.grads[1], self.grads[2]),
                            QkvCall::fields(self), std::tie(self.wanted));
    }
  };
  static constexpr bool kFlexibleLayout = true;
  static constexpr const char* kSchema =
      "torchkiln::_qkv_norm_rope_backward(Tensor? grad_q, Tensor? grad_k, Tensor? grad_v, "
      "Tensor qkv, Tensor cos, Tensor sin, Tensor? q_weight, Tensor? k_weight, int num_heads, "
      "int num_kv_heads, float eps, str norm, float offset, bool interleaved, Tensor? positions, "
      "int? rotary_dim, bool[2] wanted) -> (Tensor, Tensor, Tensor)";
  static constexpr const char* kName = "qkv_norm_rope_backward";

  static Three meta(const Arguments& call) {
    check(call);
    const auto [q, k, v] = checked_outputs(call);
    const auto check_one = [](const char* name, const MaybeTensor& grad, const Tensor& output) {
      if (grad) check_like(kName, name, *grad, "the output", output);
    };
    check_one("grad_q", call.grads[0], q);
    check_one("grad_k", call.grads[1], k);
    check_one("grad_v", call.grads[2], v);
    const auto weight = [&](size_t i, const MaybeTensor& of) {
      return call.wanted[i] && of ? empty_contiguous(*of) : no_output(call.qkv);
    };
    return {empty_contiguous(call.qkv), weight(0, call.q_weight), weight(1, call.k_weight)};
  }

  static Three kernel(const Arguments& call) {
    auto [grad_qkv, grad_q_weight, grad_k_weight] = meta(call);
    const Tensor& qkv = call.qkv;
    if (qkv.numel() == 0) return {grad_qkv, grad_q_weight.zero_(), grad_k_weight.zero_()};
    count_tokens(call.rotated());
    const QkvTensors tensors(call);
    QkvNormRopeBackward arguments{};
    arguments.forward = arguments_of(call, tensors);
    Tensor adjacent[3];
    for (size_t i = 0; i < 3; ++i) {
      if (!call.grads[i]) continue;
      adjacent[i] = *with_adjacent_elements("a gradient", *call.grads[i]);
      arguments.grad[i] = adjacent[i].const_data_ptr();
      set_strides(arguments.grad_stride[i], adjacent[i]);
    }
    arguments.grad_qkv = grad_qkv.data_ptr();
    if (grad_q_weight.numel() > 0) arguments.grad_weight[0] = grad_q_weight.data_ptr();
    if (grad_k_weight.numel() > 0) arguments.grad_weight[1] = grad_k_weight.data_ptr();
    launch_split(
        kName, qkv, arguments, kProjectionGrain, cpu::split,
        [&](Allocate allocate, auto stream) {
          return cuda::qkv_norm_rope_backward(arguments, allocate, stream);
        },
        cpu::qkv_norm_rope_backward, cpu::qkv_norm_rope_backward_finish);
    return {grad_qkv, grad_q_weight, grad_k_weight};
  }
};

/// Saves its arguments only. Backward computes the norms again from qkv, which it reads anyway.
struct Qkv {
  static constexpr bool kFlexibleLayout = true;
  static constexpr const char* kSchema =
      "torchkiln::qkv_norm_rope(Tensor qkv, Tensor cos, Tensor sin, Tensor? q_weight, "
      "Tensor? k_weight, int num_heads, int num_kv_heads, *, float eps=1e-6, str norm='head', "
      "float offset=0.0, bool interleaved=False, Tensor? positions=None, int? rotary_dim=None) -> "
      "(Tensor, Tensor, Tensor)";
  static constexpr const char* kName = "qkv_norm_rope";

  static Three meta(const QkvCall& call) { return checked_outputs(call); }
  static Three kernel(const QkvCall& call) { return run(call); }
  static Three composite(const QkvCall& call) { return composite_of(call); }

  static Three recorded(const Below& below, const QkvCall& call) {
    const Tensor first = tensor_or_undefined(call.q_weight);
    const Tensor second = tensor_or_undefined(call.k_weight);
    return record(kName, {*call.qkv, *call.angles.cos, *call.angles.sin, first, second},
                  below.call<Qkv>(call),
                  keep(*call.qkv, *call.angles.cos, *call.angles.sin, first, second,
                       tensor_or_undefined(call.angles.positions)),
                  [numbers = call](const Incoming& in, const Kept<6>& kept) {
                    return gradients(in, kept, numbers);
                  });
  }

  /// Takes the tensors from `kept`, because those that `call` borrows may have been freed.
  static variable_list gradients(const Incoming& in, const Kept<6>& kept, QkvCall call) {
    const MaybeTensor positions = maybe(kept[5]);
    MaybeTensor q_weight, k_weight;
    const auto put = [&](const auto& tensors) {
      q_weight = maybe(tensors[3]);
      k_weight = maybe(tensors[4]);
      call.qkv = tensors[0];
      call.angles.cos = tensors[1];
      call.angles.sin = tensors[2];
      call.q_weight = q_weight;
      call.k_weight = k_weight;
      call.angles.positions = positions;
    };
    const bool is_composite = in.needs_composite();
    std::array<bool, 5> others;
    for (size_t i = 0; i < 5; ++i) others[i] = in.wants(i) && (is_composite || i == 1 || i == 2);
    variable_list found(5);
    if (is_composite || others[1] || others[2]) {
      found = composite_gradients(in, std::array{kept[0], kept[1], kept[2], kept[3], kept[4]},
                                  others, [&](const std::array<Tensor, 5>& inputs) {
                                    put(inputs);
                                    return composite(call);
                                  });
    }
    if (is_composite || !(in.wants(0) || in.wants(3) || in.wants(4))) return found;
    const QkvBackward::Wanted wanted{in.wants(3), in.wants(4)};
    put(kept);
    auto [grad_qkv, grad_q_weight, grad_k_weight] =
        call_below<QkvBackward>(maybe(in[0]), maybe(in[1]), maybe(in[2]), call, wanted);
    if (in.wants(0)) found[0] = grad_qkv;
    if (wanted[0]) found[3] = grad_q_weight;
    if (wanted[1]) found[4] = grad_k_weight;
    return found;
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchkiln, m) { define<QkvBackward, Qkv>(m); }

}  // namespace torchkiln::rope_ops

namespace torchkiln {

std::tuple<at::Tensor, at::Tensor, at::Tensor> qkv_norm_rope(
    const at::Tensor& qkv, const at::Tensor& cos, const at::Tensor& sin,
    const std::optional<at::Tensor>& q_weight, const std::optional<at::Tensor>& k_weight,
    int64_t heads, int64_t kv_heads, const QkvNormRopeOptions& options) {
  return call<rope_ops::Qkv>(qkv, cos, sin, q_weight, k_weight, heads, kv_heads, options);
}

}  // namespace torchkiln
