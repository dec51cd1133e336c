#include "rope/angles.h"
#include "torchkiln/torch/empty.h"
#include "torchkiln/torch/launch.h"
#include "torchkiln/torch/ops.h"

namespace torchkiln::rope_ops {
namespace {

using Three = std::tuple<Tensor, Tensor, Tensor>;

/// Fewest elements per CPU thread.
constexpr int64_t kProjectionGrain = 1 << 13;

struct QkvCall {
  const char* op;
  const Tensor& qkv;
  Angles angles;
  const MaybeTensor& q_weight;
  const MaybeTensor& k_weight;
  int64_t heads;
  int64_t kv_heads;
  double eps;
  c10::string_view norm;
  double offset;

  bool normalizes() const { return norm == "head"; }
  SymInt head_dim() const { return qkv.sym_size(-1) / (heads + 2 * kv_heads); }
  Heads rotated() const {
    return {op,
            "qkv",
            qkv,
            qkv.dim() == 3 ? std::optional(qkv.sym_size(0)) : std::nullopt,
            qkv.sym_size(-2),
            head_dim()};
  }
  at::ScalarType weight_dtype() const {
    return q_weight   ? q_weight->scalar_type()
           : k_weight ? k_weight->scalar_type()
                      : qkv.scalar_type();
  }
};

void check_heads(const QkvCall& call) {
  for (const auto& [name, count, least] :
       {std::tuple("heads", call.heads, 1), std::tuple("kv_heads", call.kv_heads, 1)}) {
    TORCH_CHECK_VALUE(count >= least, "torchkiln.", call.op, ": ", name, ": got ", count,
                      ", expected a number of at least ", least);
  }
  const int64_t all = call.heads + 2 * call.kv_heads;
  TORCH_CHECK(call.qkv.sym_size(-1) % all == 0, "torchkiln.", call.op, ": qkv: got ",
              call.qkv.sym_size(-1), " elements per token, expected a multiple of ", all,
              ", heads + 2 * kv_heads");
  TORCH_CHECK(call.head_dim() <= kMostHeadElements, "torchkiln.", call.op, ": qkv: got heads of ",
              call.head_dim(), " elements, expected at most ", kMostHeadElements);
}

void check_weights(const QkvCall& call) {
  for (const auto& [name, weight] :
       {std::pair<const char*, const MaybeTensor&>("q_weight", call.q_weight),
        {"k_weight", call.k_weight}}) {
    if (!weight) continue;
    TORCH_CHECK_VALUE(call.normalizes(), "torchkiln.", call.op, ": ", name,
                      ": got a tensor beside norm='none', expected None");
    check_parameter_dtype(call.op, name, weight->scalar_type(), "qkv", call.qkv.scalar_type());
    check_vector(call.op, name, *weight, call.head_dim(), "the elements of a head");
  }
  if (call.q_weight && call.k_weight)
    check_same_dtype(call.op, "k_weight", *call.k_weight, "q_weight", *call.q_weight);
}

void check(const QkvCall& call) {
  const auto on_device = [&](const char* name, const MaybeTensor& tensor) {
    if (tensor) check_tensors(call.op, {{"qkv", call.qkv}, {name, *tensor}});
  };
  check_tensors(call.op, {{"qkv", call.qkv}, {"cos", call.angles.cos}, {"sin", call.angles.sin}});
  on_device("q_weight", call.q_weight);
  on_device("k_weight", call.k_weight);
  on_device("positions", call.angles.positions);
  check_dtype(call.op, "qkv", call.qkv);
  check_rank(call.op, "qkv", call.qkv, 2, 3, "[tokens, elements] or [batch, tokens, elements]");
  TORCH_CHECK_VALUE(call.norm == "head" || call.norm == "none", "torchkiln.", call.op,
                    ": norm: got '", call.norm, "', expected one of head, none");
  TORCH_CHECK_VALUE(call.eps >= 0, "torchkiln.", call.op, ": eps: got ", call.eps,
                    ", expected a number of at least 0");
  check_heads(call);
  check_weights(call);
  check_angles(call.rotated(), call.angles);
}

/// [..., heads, tokens, head_dim], with the heads of a token adjacent in memory.
Tensor heads_output(const QkvCall& call, int64_t heads) {
  const SymInt tokens = call.qkv.sym_size(-2), size = call.head_dim();
  const SymInt row = size * heads;
  if (call.qkv.dim() == 2) {
    return at::empty_strided_symint({SymInt(heads), tokens, size}, {size, row, SymInt(1)},
                                    call.qkv.options());
  }
  return at::empty_strided_symint({call.qkv.sym_size(0), SymInt(heads), tokens, size},
                                  {tokens * row, size, row, SymInt(1)}, call.qkv.options());
}

Three checked_outputs(const QkvCall& call) {
  check(call);
  return {heads_output(call, call.heads), heads_output(call, call.kv_heads),
          heads_output(call, call.kv_heads)};
}

/// Contiguous tensors that the arguments of a kernel point to.
struct QkvTensors {
  MaybeCopy qkv, cos, sin;
  Tensor weights[2];

  explicit QkvTensors(const QkvCall& call)
      : qkv(with_adjacent_elements("qkv", call.qkv)),
        cos(with_adjacent_elements("cos", call.angles.cos)),
        sin(with_adjacent_elements("sin", call.angles.sin)) {
    if (call.q_weight) weights[0] = call.q_weight->contiguous();
    if (call.k_weight) weights[1] = call.k_weight->contiguous();
  }
};

QkvNormRope arguments_of(const QkvCall& call, const QkvTensors& tensors) {
  const Tensor& qkv = *tensors.qkv;
  QkvNormRope arguments{};
  arguments.qkv = qkv.const_data_ptr();
  arguments.qkv_stride[0] = qkv.dim() == 3 ? qkv.stride(0) : 0;
  arguments.qkv_stride[1] = qkv.stride(-2);
  for (int i = 0; i < 2; ++i)
    if (tensors.weights[i].defined()) arguments.weight[i] = tensors.weights[i].const_data_ptr();
  arguments.angles = arguments_of(call.rotated(), call.angles, *tensors.cos, *tensors.sin);
  arguments.dtype = dtype_of(qkv);
  arguments.weight_dtype = dtype_of(call.weight_dtype());
  arguments.normalizes = call.normalizes();
  arguments.eps = call.eps;
  arguments.weight_offset = call.offset;
  arguments.batch = qkv.dim() == 3 ? qkv.size(0) : 1;
  arguments.tokens = qkv.size(-2);
  arguments.heads = call.heads;
  arguments.kv_heads = call.kv_heads;
  arguments.head_dim = call.head_dim().expect_int();
  return arguments;
}

Three run(const QkvCall& call) {
  auto [q, k, v] = checked_outputs(call);
  if (q.numel() == 0) return {q, k, v};
  const int64_t tokens = count_tokens(call.rotated());
  const QkvTensors tensors(call);
  QkvNormRope arguments = arguments_of(call, tensors);
  arguments.out[0] = q.data_ptr();
  arguments.out[1] = k.data_ptr();
  arguments.out[2] = v.data_ptr();
  launch(
      call.op, q, tokens, std::max<int64_t>(1, kProjectionGrain / call.qkv.size(-1)),
      [&](auto stream) { return cuda::qkv_norm_rope(arguments, stream); },
      [&](int64_t begin, int64_t end) { return cpu::qkv_norm_rope(arguments, begin, end); });
  return {q, k, v};
}

/// The op with torch's own ops.
Three composite_of(const QkvCall& call) {
  check(call);
  const Tensor rows = call.qkv.unflatten_symint(
      -1, c10::SymDimVector{SymInt(call.heads + 2 * call.kv_heads), call.head_dim()});
  const at::ScalarType compute = compute_dtype(call.qkv.scalar_type());
  const auto factors = composite_angles(call.rotated(), call.angles, -2);
  const auto turned = [&](int64_t first, int64_t count, const MaybeTensor& weight) {
    Tensor x = rows.narrow(-2, first, count).to(compute);
    if (call.normalizes()) x = x * ((x * x).mean(-1, /*keepdim=*/true) + call.eps).rsqrt();
    if (weight) x = x * (weight->to(compute) + call.offset);
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
      arguments.grad_stride[i][0] = qkv.dim() == 3 ? adjacent[i].stride(0) : 0;
      arguments.grad_stride[i][1] = adjacent[i].stride(-2);
      arguments.grad_stride[i][2] = adjacent[i].stride(-3);
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
