#pragma once

// A call on a packed projection: its checks, and the arguments of the kernels.

#include "rope/angles.h"
#include "torchkiln/torch/launch.h"

namespace torchkiln {

/// The norm of heads is a string in the schemas of ops.
template <>
struct InSchema<QkvNorm> {
  using Type = c10::string_view;
  static QkvNorm read(const char* op, c10::string_view name) {
    if (name == "head") return QkvNorm::head;
    if (name == "all") return QkvNorm::all;
    TORCH_CHECK_VALUE(name == "none", "torchkiln.", op, ": norm: got '", name,
                      "', expected one of head, all, none");
    return QkvNorm::none;
  }
  static c10::string_view write(QkvNorm norm) {
    return norm == QkvNorm::head ? "head" : norm == QkvNorm::all ? "all" : "none";
  }
};

}  // namespace torchkiln

namespace torchkiln::rope_ops {

/// Fewest elements per CPU thread.
constexpr int64_t kProjectionGrain = 1 << 13;

struct QkvCall {
  const char* op = "qkv_norm_rope";
  Borrowed<Tensor> qkv;
  Angles angles;
  Borrowed<MaybeTensor> q_weight;
  Borrowed<MaybeTensor> k_weight;
  int64_t heads;
  int64_t kv_heads;
  double eps;
  QkvNorm norm;
  double offset;

  TORCHKILN_FIELDS(self.qkv, self.angles.cos, self.angles.sin, self.q_weight, self.k_weight,
                   self.heads, self.kv_heads, self.eps, self.norm, self.offset,
                   self.angles.interleaved, self.angles.positions, self.angles.rotary_dim);

  bool normalizes() const { return norm != QkvNorm::none; }
  bool normalizes_across() const { return norm == QkvNorm::all; }
  SymInt head_dim() const { return qkv->sym_size(-1) / (heads + 2 * kv_heads); }
  Heads rotated() const {
    return {op,
            "qkv",
            qkv,
            qkv->dim() == 3 ? std::optional(qkv->sym_size(0)) : std::nullopt,
            qkv->sym_size(-2),
            head_dim()};
  }
  at::ScalarType weight_dtype() const {
    return q_weight   ? q_weight->scalar_type()
           : k_weight ? k_weight->scalar_type()
                      : qkv->scalar_type();
  }
};

inline void check_heads(const QkvCall& call) {
  for (const auto& [name, count, least] :
       {std::tuple("num_heads", call.heads, 1), std::tuple("num_kv_heads", call.kv_heads, 1)}) {
    TORCH_CHECK_VALUE(count >= least, "torchkiln.", call.op, ": ", name, ": got ", count,
                      ", expected a number of at least ", least);
  }
  const int64_t all = call.heads + 2 * call.kv_heads;
  TORCH_CHECK(call.qkv->sym_size(-1) % all == 0, "torchkiln.", call.op, ": qkv: got ",
              call.qkv->sym_size(-1), " elements per token, expected a multiple of ", all,
              ", num_heads + 2 * num_kv_heads");
  TORCH_CHECK(call.head_dim() <= kMostHeadElements, "torchkiln.", call.op, ": qkv: got heads of ",
              call.head_dim(), " elements, expected at most ", kMostHeadElements);
}

inline void check_weights(const QkvCall& call) {
  for (const auto& [name, weight, count] :
       {std::tuple<const char*, const MaybeTensor&, int64_t>("q_weight", call.q_weight, call.heads),
        {"k_weight", call.k_weight, call.kv_heads}}) {
    if (!weight) continue;
    TORCH_CHECK_VALUE(call.normalizes(), "torchkiln.", call.op, ": ", name,
                      ": got a tensor beside norm='none', expected None");
    check_parameter_dtype(call.op, name, weight->scalar_type(), "qkv", call.qkv->scalar_type());
    if (call.normalizes_across()) {
      check_vector(call.op, name, *weight, call.head_dim() * count, "the elements of all heads");
    } else {
      check_vector(call.op, name, *weight, call.head_dim(), "the elements of a head");
    }
  }
  if (call.q_weight && call.k_weight)
    check_same_dtype(call.op, "k_weight", *call.k_weight, "q_weight", *call.q_weight);
}

inline void check(const QkvCall& call) {
  const auto on_device = [&](const char* name, const MaybeTensor& tensor) {
    if (tensor) check_tensors(call.op, {{"qkv", call.qkv}, {name, *tensor}});
  };
  check_tensors(call.op, {{"qkv", call.qkv}, {"cos", call.angles.cos}, {"sin", call.angles.sin}});
  on_device("q_weight", call.q_weight);
  on_device("k_weight", call.k_weight);
  on_device("positions", call.angles.positions);
  check_dtype(call.op, "qkv", call.qkv);
  check_rank(call.op, "qkv", call.qkv, 2, 3, "[tokens, elements] or [batch, tokens, elements]");
  TORCH_CHECK_VALUE(call.eps >= 0, "torchkiln.", call.op, ": eps: got ", call.eps,
                    ", expected a number of at least 0");
  check_heads(call);
  check_weights(call);
  check_angles(call.rotated(), call.angles);
}

/// [..., heads, tokens, head_dim], with the heads of a token adjacent in memory.
inline Tensor heads_output(const QkvCall& call, int64_t heads) {
  const SymInt tokens = call.qkv->sym_size(-2), size = call.head_dim();
  const SymInt row = size * heads;
  if (call.qkv->dim() == 2) {
    return at::empty_strided_symint({SymInt(heads), tokens, size}, {size, row, SymInt(1)},
                                    call.qkv->options());
  }
  return at::empty_strided_symint({call.qkv->sym_size(0), SymInt(heads), tokens, size},
                                  {tokens * row, size, row, SymInt(1)}, call.qkv->options());
}

/// Sets the strides of batch, tokens and heads of a tensor [..., heads, tokens, head_dim].
inline void set_strides(int64_t (&to)[3], const Tensor& tensor) {
  to[0] = tensor.dim() == 4 ? tensor.stride(0) : 0;
  to[1] = tensor.stride(-2);
  to[2] = tensor.stride(-3);
}

/// The tensors, with adjacent elements, to which the arguments of a kernel point.
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

inline QkvNormRope arguments_of(const QkvCall& call, const QkvTensors& tensors) {
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
  arguments.norm = call.norm;
  arguments.eps = call.eps;
  arguments.weight_offset = call.offset;
  arguments.batch = qkv.dim() == 3 ? qkv.size(0) : 1;
  arguments.tokens = qkv.size(-2);
  arguments.heads = call.heads;
  arguments.kv_heads = call.kv_heads;
  arguments.head_dim = call.head_dim().expect_int();
  return arguments;
}

/// Writes queries, keys and values to tensors [..., heads, tokens, head_dim] in which the elements
/// of a head are adjacent.
inline void run_into(const QkvCall& call, const std::array<Tensor, 3>& out,
                     const TokenRows& places) {
  const int64_t tokens = count_tokens(call.rotated());
  const QkvTensors tensors(call);
  QkvNormRope arguments = arguments_of(call, tensors);
  for (size_t i = 0; i < 3; ++i) {
    arguments.out[i] = out[i].data_ptr();
    set_strides(arguments.out_stride[i], out[i]);
  }
  arguments.places = places;
  launch_allocating(
      call.op, out[0], tokens, std::max<int64_t>(1, kProjectionGrain / call.qkv->size(-1)),
      [&](Allocate allocate, auto stream) {
        return cuda::qkv_norm_rope(arguments, allocate, stream);
      },
      [&](int64_t begin, int64_t end) { return cpu::qkv_norm_rope(arguments, begin, end); });
}

}  // namespace torchkiln::rope_ops
