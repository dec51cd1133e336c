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
  if (q.numel() > 0) run_into(call, {q, k, v}, rows_of(std::nullopt, call.qkv.size(-2)));
  return {q, k, v};
}

/// The op with torch's own ops.
Three composite_of(const QkvCall& call) {
  check(call);
  const Tensor rows = call.qkv.unflatten_symint(
      -1, c10::SymDimVector{SymInt(call.heads + 2 * call.kv_heads), call.head_dim()});
  const at::ScalarType compute = compute_dtype(call.qkv.scalar_type());
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
        .to(call.qkv.scalar_type())
        .transpose(-2, -3);
  };
  return {turned(0, call.heads, call.q_weight), turned(call.heads, call.kv_heads, call.k_weight),
          rows.narrow(-2, call.heads + call.kv_heads, call.kv_heads).transpose(-2, -3).clone()};
}

/// The gradients of qkv, q_weight and k_weight.
struct QkvBackward {
  using Wanted = std::array<bool, 2>;
  static constexpr const char* kSchema =
      "torchkiln::qkv_norm_rope_backward(Tensor? grad_q, Tensor? grad_k, Tensor? grad_v, "
      "Tensor qkv, Tensor cos, Tensor sin, Tensor? q_weight, Tensor? k_weight, int heads, "
      "int kv_heads, float eps, str norm, float offset, bool interleaved, Tensor? positions, "
      "int? partial, bool[2] wanted) -> (Tensor, Tensor, Tensor)";
  static constexpr const char* kName = "qkv_norm_rope_backward";

  static Three outputs(const QkvCall& call, const std::array<MaybeTensor, 3>& grads,
                       Wanted wanted) {
    check(call);
    constexpr const char* kNames[3] = {"grad_q", "grad_k", "grad_v"};
    const auto [q, k, v] = checked_outputs(call);
    const Tensor* const like[3] = {&q, &k, &v};
    for (size_t i = 0; i < 3; ++i)
      if (grads[i]) check_like(kName, kNames[i], *grads[i], "the output", *like[i]);
    const auto weight = [&](size_t i, const MaybeTensor& of) {
      return wanted[i] && of ? empty_contiguous(*of) : no_output(call.qkv);
    };
    return {empty_contiguous(call.qkv), weight(0, call.q_weight), weight(1, call.k_weight)};
  }

  static Three meta(const MaybeTensor& grad_q, const MaybeTensor& grad_k, const MaybeTensor& grad_v,
                    const Tensor& qkv, const Tensor& cos, const Tensor& sin,
                    const MaybeTensor& q_weight, const MaybeTensor& k_weight, int64_t heads,
                    int64_t kv_heads, double eps, c10::string_view norm, double offset,
                    bool interleaved, const MaybeTensor& positions, std::optional<int64_t> partial,
                    Wanted wanted) {
    return outputs({kName,
                    qkv,
                    {cos, sin, interleaved, positions, partial, /*inverse=*/false},
                    q_weight,
                    k_weight,
                    heads,
                    kv_heads,
                    eps,
                    norm,
                    offset},
                   {grad_q, grad_k, grad_v}, wanted);
  }

  static Three kernel(const MaybeTensor& grad_q, const MaybeTensor& grad_k,
                      const MaybeTensor& grad_v, const Tensor& qkv, const Tensor& cos,
                      const Tensor& sin, const MaybeTensor& q_weight, const MaybeTensor& k_weight,
                      int64_t heads, int64_t kv_heads, double eps, c10::string_view norm,
                      double offset, bool interleaved, const MaybeTensor& positions,
                      std::optional<int64_t> partial, Wanted wanted) {
    const QkvCall call{
        kName,    qkv,      {cos, sin, interleaved, positions, partial, /*inverse=*/false},
        q_weight, k_weight, heads,
        kv_heads, eps,      norm,
        offset};
    const std::array<MaybeTensor, 3> grads{grad_q, grad_k, grad_v};
    auto [grad_qkv, grad_q_weight, grad_k_weight] = outputs(call, grads, wanted);
    if (qkv.numel() == 0) return {grad_qkv, grad_q_weight.zero_(), grad_k_weight.zero_()};
    count_tokens(call.rotated());
    const QkvTensors tensors(call);
    QkvNormRopeBackward arguments{};
    arguments.forward = arguments_of(call, tensors);
    Tensor adjacent[3];
    for (size_t i = 0; i < 3; ++i) {
      if (!grads[i]) continue;
      adjacent[i] = *with_adjacent_elements("a gradient", *grads[i]);
      arguments.grad[i] = adjacent[i].const_data_ptr();
      set_strides(arguments.grad_stride[i], adjacent[i]);
    }
    arguments.grad_qkv = grad_qkv.data_ptr();
    if (grad_q_weight.numel() > 0) arguments.grad_weight[0] = grad_q_weight.data_ptr();
    if (grad_k_weight.numel() > 0) arguments.grad_weight[1] = grad_k_weight.data_ptr();
    launch_split(
        kName, qkv, arguments, kProjectionGrain, [&] { return cpu::split(arguments); },
        [&](Allocate allocate, auto stream) {
          return cuda::qkv_norm_rope_backward(arguments, allocate, stream);
        },
        [&](int64_t begin, int64_t end) {
          return cpu::qkv_norm_rope_backward(arguments, begin, end);
        },
        [&](int64_t begin, int64_t end) {
          return cpu::qkv_norm_rope_backward_finish(arguments, begin, end);
        });
    return {grad_qkv, grad_q_weight, grad_k_weight};
  }
};

/// Saves its arguments: the backward computes the norms again from qkv, which it reads anyway.
struct Qkv {
  static constexpr const char* kSchema =
      "torchkiln::qkv_norm_rope(Tensor qkv, Tensor cos, Tensor sin, Tensor? q_weight, "
      "Tensor? k_weight, int heads, int kv_heads, *, float eps=1e-6, str norm='head', "
      "float offset=0.0, bool interleaved=False, Tensor? positions=None, int? partial=None) -> "
      "(Tensor, Tensor, Tensor)";
  static constexpr const char* kName = "qkv_norm_rope";

  static Three meta(const Tensor& qkv, const Tensor& cos, const Tensor& sin,
                    const MaybeTensor& q_weight, const MaybeTensor& k_weight, int64_t heads,
                    int64_t kv_heads, double eps, c10::string_view norm, double offset,
                    bool interleaved, const MaybeTensor& positions,
                    std::optional<int64_t> partial) {
    return checked_outputs({kName,
                            qkv,
                            {cos, sin, interleaved, positions, partial, /*inverse=*/false},
                            q_weight,
                            k_weight,
                            heads,
                            kv_heads,
                            eps,
                            norm,
                            offset});
  }

  static Three kernel(const Tensor& qkv, const Tensor& cos, const Tensor& sin,
                      const MaybeTensor& q_weight, const MaybeTensor& k_weight, int64_t heads,
                      int64_t kv_heads, double eps, c10::string_view norm, double offset,
                      bool interleaved, const MaybeTensor& positions,
                      std::optional<int64_t> partial) {
    return run({kName,
                qkv,
                {cos, sin, interleaved, positions, partial, /*inverse=*/false},
                q_weight,
                k_weight,
                heads,
                kv_heads,
                eps,
                norm,
                offset});
  }

  static Three composite(const Tensor& qkv, const Tensor& cos, const Tensor& sin,
                         const MaybeTensor& q_weight, const MaybeTensor& k_weight, int64_t heads,
                         int64_t kv_heads, double eps, c10::string_view norm, double offset,
                         bool interleaved, const MaybeTensor& positions,
                         std::optional<int64_t> partial) {
    return composite_of({kName,
                         qkv,
                         {cos, sin, interleaved, positions, partial, /*inverse=*/false},
                         q_weight,
                         k_weight,
                         heads,
                         kv_heads,
                         eps,
                         norm,
                         offset});
  }

  static Three recorded(const Below& below, const Tensor& qkv, const Tensor& cos, const Tensor& sin,
                        const MaybeTensor& q_weight, const MaybeTensor& k_weight, int64_t heads,
                        int64_t kv_heads, double eps, c10::string_view norm, double offset,
                        bool interleaved, const MaybeTensor& positions,
                        std::optional<int64_t> partial) {
    const Tensor first = tensor_or_undefined(q_weight), second = tensor_or_undefined(k_weight);
    return record(kName, {qkv, cos, sin, first, second},
                  below.call<Qkv>(qkv, cos, sin, q_weight, k_weight, heads, kv_heads, eps, norm,
                                  offset, interleaved, positions, partial),
                  keep(qkv, cos, sin, first, second, tensor_or_undefined(positions)),
                  [heads, kv_heads, eps, norm = std::string(norm), offset, interleaved, partial](
                      const Incoming& in, const Kept<6>& kept) {
                    const MaybeTensor positions = maybe(kept[5]);
                    const bool is_composite = in.needs_composite();
                    std::array<bool, 5> others;
                    for (size_t i = 0; i < 5; ++i)
                      others[i] = in.wants(i) && (is_composite || i == 1 || i == 2);
                    variable_list gradients(5);
                    if (is_composite || others[1] || others[2]) {
                      gradients = composite_gradients(
                          in, std::array{kept[0], kept[1], kept[2], kept[3], kept[4]}, others,
                          [&](const std::array<Tensor, 5>& inputs) {
                            return composite(inputs[0], inputs[1], inputs[2], maybe(inputs[3]),
                                             maybe(inputs[4]), heads, kv_heads, eps, norm, offset,
                                             interleaved, positions, partial);
                          });
                    }
                    if (is_composite || !(in.wants(0) || in.wants(3) || in.wants(4)))
                      return gradients;
                    const QkvBackward::Wanted wanted{in.wants(3), in.wants(4)};
                    auto [grad_qkv, grad_q_weight, grad_k_weight] = call_below<QkvBackward>(
                        maybe(in[0]), maybe(in[1]), maybe(in[2]), kept[0], kept[1], kept[2],
                        maybe(kept[3]), maybe(kept[4]), heads, kv_heads, eps,
                        c10::string_view(norm), offset, interleaved, positions, partial, wanted);
                    if (in.wants(0)) gradients[0] = grad_qkv;
                    if (wanted[0]) gradients[3] = grad_q_weight;
                    if (wanted[1]) gradients[4] = grad_k_weight;
                    return gradients;
                  });
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchkiln, m) { define<QkvBackward, Qkv>(m); }

}  // namespace torchkiln::rope_ops

namespace torchkiln {

std::tuple<at::Tensor, at::Tensor, at::Tensor> qkv_norm_rope(
    const at::Tensor& qkv, const at::Tensor& cos, const at::Tensor& sin,
    const std::optional<at::Tensor>& q_weight, const std::optional<at::Tensor>& k_weight,
    int64_t heads, int64_t kv_heads, const QkvNormRopeOptions& o) {
  return call<rope_ops::Qkv>(qkv, cos, sin, q_weight, k_weight, heads, kv_heads, o.eps, o.norm,
                             o.offset, o.interleaved, o.positions, o.partial);
}

}  // namespace torchkiln
