#include "torchkiln/kernels/rope.h"

#include "detail/maybe_copy.h"
#include "torchkiln/torch/checks.h"
#include "torchkiln/torch/elementwise.h"
#include "torchkiln/torch/empty.h"
#include "torchkiln/torch/launch.h"
#include "torchkiln/torch/op.h"
#include "torchkiln/torch/ops.h"

namespace torchkiln::rope_ops {
namespace {

using at::Tensor;
using c10::SymInt;
using Two = std::tuple<Tensor, Tensor>;
constexpr const char* kName = "rope";

/// Fewest elements per CPU thread.
constexpr int64_t kGrain = 1 << 14;

/// The arguments of a call.
struct Call {
  const Tensor& q;
  const MaybeTensor& k;
  const Tensor& cos;
  const Tensor& sin;
  bool interleaved;
  const MaybeTensor& positions;
  std::optional<int64_t> partial;
  int64_t heads_dim;
  bool inverse;

  /// The dimension of the heads, counted from the end: -3 or -2. That of the tokens is the other.
  int64_t heads_at() const { return heads_dim < 0 ? heads_dim : heads_dim - q.dim(); }
  int64_t tokens_at() const { return -5 - heads_at(); }
  SymInt tokens() const { return q.sym_size(tokens_at()); }
  bool has_batch() const { return q.dim() == 4; }
  /// Elements of a head that are rotated.
  SymInt rotary() const { return partial ? SymInt(*partial) : q.sym_size(-1); }
  /// Whether cos and sin have each factor twice.
  bool factors_are_doubled() const { return rotary() != 0 && cos.sym_size(-1) == rotary(); }
};

void check_heads(const Call& call) {
  check_tensors(kName, {{"q", call.q}, {"cos", call.cos}, {"sin", call.sin}});
  if (call.k) check_tensors(kName, {{"q", call.q}, {"k", *call.k}});
  if (call.positions) check_tensors(kName, {{"q", call.q}, {"positions", *call.positions}});
  check_dtype(kName, "q", call.q);
  check_rank(kName, "q", call.q, 3, 4, "3 or 4 dimensions, the last of which is that of a head");
  TORCH_CHECK_VALUE(call.heads_at() == -3 || call.heads_at() == -2, "torchkiln.", kName,
                    ": heads_dim: got ", call.heads_dim,
                    ", expected -3 for [..., heads, tokens, head_dim] or -2 for [..., tokens, "
                    "heads, head_dim]");
  if (!call.k) return;
  check_same_dtype(kName, "k", *call.k, "q", call.q);
  c10::SymDimVector shape(call.q.sym_sizes());
  if (call.k->dim() == call.q.dim())
    shape[static_cast<size_t>(call.q.dim() + call.heads_at())] = call.k->sym_size(call.heads_at());
  TORCH_CHECK(call.k->sym_sizes().equals(shape), "torchkiln.", kName, ": k: got shape ",
              call.k->sym_sizes(), ", expected ", call.q.sym_sizes(),
              ", the shape of q, with any number of heads in dimension ",
              call.q.dim() + call.heads_at());
}

void check_rotary(const Call& call) {
  const SymInt& size = call.q.sym_size(-1);
  if (!call.partial) {
    TORCH_CHECK(size % 2 == 0, "torchkiln.", kName, ": q: got heads of ", size,
                " elements, expected an even number; partial= rotates a part of each head");
    return;
  }
  TORCH_CHECK_VALUE(*call.partial >= 2 && *call.partial % 2 == 0 && size >= *call.partial,
                    "torchkiln.", kName, ": partial: got ", *call.partial,
                    ", expected an even number from 2 to ", size, ", the elements of a head");
}

/// Whether a tensor is [tokens, ...] or [batch or 1, tokens, ...], with `more` further dimensions.
bool has_tokens(const Call& call, const Tensor& tensor, int64_t more) {
  const int64_t leading = tensor.dim() - more;
  if (leading == 2 && call.has_batch()) {
    return (tensor.sym_size(0) == 1 || tensor.sym_size(0) == call.q.sym_size(0)) &&
           tensor.sym_size(1) == call.tokens();
  }
  return leading == 1 && tensor.sym_size(0) == call.tokens();
}

void check_factors(const Call& call) {
  check_parameter_dtype(kName, "cos", call.cos.scalar_type(), "q", call.q.scalar_type());
  const SymInt pairs = call.rotary() / 2;
  const bool fits =
      call.positions ? call.cos.dim() == 2 : call.cos.dim() >= 2 && has_tokens(call, call.cos, 1);
  const std::string rows = call.positions ? "rows" : c10::str(call.tokens());
  const std::string batches =
      call.positions || !call.has_batch()
          ? ""
          : c10::str(" or [", call.q.sym_size(0), ", ", call.tokens(), ", ", pairs, "]");
  TORCH_CHECK(fits && (call.cos.sym_size(-1) == pairs || call.cos.sym_size(-1) == call.rotary()),
              "torchkiln.", kName, ": cos: got shape ", call.cos.sym_sizes(), ", expected [", rows,
              ", ", pairs, "]", batches, ", a factor for each pair of ",
              call.positions ? "each position" : "each token", ", or each factor twice");
  check_same_dtype(kName, "sin", call.sin, "cos", call.cos);
  check_same_shape(kName, "sin", call.sin, "cos", call.cos);
}

void check_positions(const Call& call) {
  if (!call.positions) return;
  const at::ScalarType dtype = call.positions->scalar_type();
  TORCH_CHECK(dtype == at::kLong || dtype == at::kInt, "torchkiln.", kName,
              ": positions: got dtype ", dtype_name(dtype), ", expected int64 or int32");
  TORCH_CHECK(
      has_tokens(call, *call.positions, 0), "torchkiln.", kName, ": positions: got shape ",
      call.positions->sym_sizes(), ", expected [", call.tokens(), "]",
      call.has_batch() ? c10::str(" or [", call.q.sym_size(0), ", ", call.tokens(), "]") : "",
      ", a row of cos and sin for each token");
}

void check(const Call& call) {
  check_heads(call);
  check_rotary(call);
  check_factors(call);
  check_positions(call);
}

/// An output without gaps, with heads and tokens in the order that they have in x's memory.
Tensor output_like(const Tensor& x, const Call& call) {
  const int64_t rank = x.dim(), heads = call.heads_at(), tokens = call.tokens_at();
  const int64_t outer = x.sym_stride(tokens) >= x.sym_stride(heads) ? tokens : heads;
  c10::SymDimVector strides(static_cast<size_t>(rank), 1);
  SymInt next = x.sym_size(-1);
  for (const int64_t d : {heads + tokens - outer, outer}) {
    strides[static_cast<size_t>(rank + d)] = next;
    next = next * x.sym_size(d);
  }
  if (call.has_batch()) strides[0] = next;
  return at::empty_strided_symint(x.sym_sizes(), strides, x.options());
}

Two checked_outputs(const Call& call) {
  check(call);
  return {output_like(call.q, call), call.k ? output_like(*call.k, call) : no_output(call.q)};
}

/// The tensor with adjacent elements in the last dimension.
MaybeCopy with_adjacent_elements(const char* name, const Tensor& tensor) {
  if (tensor.size(-1) <= 1 || tensor.stride(-1) == 1) return MaybeCopy::borrowed(tensor);
  trace::note("copied: the elements of ", name, " are not adjacent, strides ", tensor.strides());
  return MaybeCopy::owned(tensor.contiguous());
}

/// Sets {batch, tokens, heads} strides.
void set_strides(int64_t (&to)[3], const Tensor& tensor, const Call& call) {
  to[0] = call.has_batch() ? tensor.stride(0) : 0;
  to[1] = tensor.stride(call.tokens_at());
  to[2] = tensor.stride(call.heads_at());
}

RopeHeads heads_of(const Tensor& x, const Tensor& y, const Call& call) {
  RopeHeads heads{};
  heads.x = x.const_data_ptr();
  heads.y = y.data_ptr();
  heads.heads = x.size(call.heads_at());
  set_strides(heads.x_stride, x, call);
  set_strides(heads.y_stride, y, call);
  return heads;
}

RopeFactors factors_of(const Tensor& factors) {
  const bool has_batch = factors.dim() == 3 && factors.size(0) != 1;
  return {factors.const_data_ptr(), has_batch ? factors.stride(0) : 0, factors.stride(-2)};
}

Rope arguments_of(const Call& call, const Tensor& cos, const Tensor& sin) {
  Rope arguments{};
  arguments.cos = factors_of(cos);
  arguments.sin = factors_of(sin);
  arguments.factor_step = call.factors_are_doubled() && call.interleaved ? 2 : 1;
  if (call.positions) {
    const Tensor& positions = *call.positions;
    arguments.positions = positions.const_data_ptr();
    arguments.are_64_bit = positions.scalar_type() == at::kLong;
    arguments.position_stride[0] =
        positions.dim() == 2 && positions.size(0) != 1 ? positions.stride(0) : 0;
    arguments.position_stride[1] = positions.stride(-1);
    arguments.table_rows = cos.size(0);
  }
  arguments.dtype = dtype_of(call.q);
  arguments.factor_dtype = dtype_of(cos);
  arguments.interleaved = call.interleaved;
  arguments.inverse = call.inverse;
  arguments.batch = call.has_batch() ? call.q.size(0) : 1;
  arguments.tokens = call.q.size(call.tokens_at());
  arguments.head_dim = call.q.size(-1);
  arguments.rotary = call.partial.value_or(call.q.size(-1));
  return arguments;
}

Two run(const Call& call) {
  auto [q_out, k_out] = checked_outputs(call);
  if (q_out.numel() == 0 && k_out.numel() == 0) return {q_out, k_out};
  const MaybeCopy q = with_adjacent_elements("q", call.q);
  const MaybeCopy k = with_adjacent_elements("k", call.k ? *call.k : call.q);
  const MaybeCopy cos = with_adjacent_elements("cos", call.cos);
  const MaybeCopy sin = with_adjacent_elements("sin", call.sin);
  Rope arguments = arguments_of(call, *cos, *sin);
  arguments.tensors[0] = heads_of(*q, q_out, call);
  if (call.k) arguments.tensors[1] = heads_of(*k, k_out, call);
  const int64_t all_tokens = arguments.batch * arguments.tokens;
  TORCH_CHECK(all_tokens < int64_t{1} << 31, "torchkiln.", kName, ": q: got ", all_tokens,
              " tokens, expected fewer than 2^31; split the batch");
  const int64_t elements = (q_out.numel() + k_out.numel()) / all_tokens;
  launch(
      kName, q_out, all_tokens, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, elements)),
      [&](auto stream) { return cuda::rope(arguments, stream); },
      [&](int64_t begin, int64_t end) { return cpu::rope(arguments, begin, end); });
  return {q_out, k_out};
}

/// The factors of each pair in the compute dtype, which broadcast to the pairs of q.
Tensor composite_factors(const Tensor& given, const Call& call) {
  const SymInt pairs = call.rotary() / 2;
  Tensor factors = given.to(compute_dtype(call.q.scalar_type()));
  if (call.factors_are_doubled()) {
    factors = call.interleaved ? factors.slice(-1, 0, std::nullopt, 2)
                               : factors.narrow_symint(-1, 0, pairs);
  }
  if (call.positions) {
    const SymInt rows = factors.sym_size(0);
    const Tensor positions = call.positions->to(at::kLong);
    c10::SymDimVector shape(positions.sym_sizes());
    shape.push_back(pairs);
    const Tensor known = positions.ge(0).logical_and(positions.lt(rows)).unsqueeze(-1);
    const Tensor found = factors.index_select(
        0,
        positions.clamp(0).minimum(at::scalar_tensor(rows - 1, positions.options())).reshape({-1}));
    factors = found.reshape_symint(shape).masked_fill(known.logical_not(),
                                                      std::numeric_limits<double>::quiet_NaN());
  }
  return factors.unsqueeze(call.heads_at());
}

Tensor composite_rotation(const Tensor& x, const Tensor& cos, const Tensor& sin, const Call& call) {
  const SymInt pairs = call.rotary() / 2;
  const Tensor turned = x.narrow_symint(-1, 0, call.rotary()).to(cos.scalar_type());
  Tensor a, b;
  if (call.interleaved) {
    a = turned.slice(-1, 0, std::nullopt, 2);
    b = turned.slice(-1, 1, std::nullopt, 2);
  } else {
    a = turned.narrow_symint(-1, 0, pairs);
    b = turned.narrow_symint(-1, pairs, pairs);
  }
  const Tensor first = (a * cos - b * sin).to(x.scalar_type());
  const Tensor second = (b * cos + a * sin).to(x.scalar_type());
  const Tensor rotated =
      call.interleaved ? at::stack({first, second}, -1).flatten(-2) : at::cat({first, second}, -1);
  if (!call.partial) return rotated;
  return at::cat({rotated, x.narrow_symint(-1, call.rotary(), x.sym_size(-1) - call.rotary())}, -1);
}

Two composite_of(const Call& call) {
  check(call);
  const Tensor cos = composite_factors(call.cos, call);
  Tensor sin = composite_factors(call.sin, call);
  if (call.inverse) sin = sin.neg();
  return {
      composite_rotation(call.q, cos, sin, call),
      call.k ? composite_rotation(*call.k, cos, sin, call) : call.q.narrow(0, 0, 0).reshape({0})};
}

/// Linear in q and k; its gradient is the op with the other value of `inverse`.
struct Op {
  static constexpr const char* kSchema =
      "torchkiln::rope(Tensor q, Tensor? k, Tensor cos, Tensor sin, *, bool interleaved=False, "
      "Tensor? positions=None, int? partial=None, int heads_dim=-3, bool inverse=False) -> "
      "(Tensor, Tensor)";

  static Two meta(const Tensor& q, const MaybeTensor& k, const Tensor& cos, const Tensor& sin,
                  bool interleaved, const MaybeTensor& positions, std::optional<int64_t> partial,
                  int64_t heads_dim, bool inverse) {
    return checked_outputs({q, k, cos, sin, interleaved, positions, partial, heads_dim, inverse});
  }

  static Two kernel(const Tensor& q, const MaybeTensor& k, const Tensor& cos, const Tensor& sin,
                    bool interleaved, const MaybeTensor& positions, std::optional<int64_t> partial,
                    int64_t heads_dim, bool inverse) {
    return run({q, k, cos, sin, interleaved, positions, partial, heads_dim, inverse});
  }

  static Two composite(const Tensor& q, const MaybeTensor& k, const Tensor& cos, const Tensor& sin,
                       bool interleaved, const MaybeTensor& positions,
                       std::optional<int64_t> partial, int64_t heads_dim, bool inverse) {
    return composite_of({q, k, cos, sin, interleaved, positions, partial, heads_dim, inverse});
  }

  /// Saves cos, sin and positions; q and k only for the gradients of cos and sin, which are rare
  /// and computed with torch's ops.
  static Two recorded(const Below& below, const Tensor& q, const MaybeTensor& k, const Tensor& cos,
                      const Tensor& sin, bool interleaved, const MaybeTensor& positions,
                      std::optional<int64_t> partial, int64_t heads_dim, bool inverse) {
    const bool factors_have_gradients = cos.requires_grad() || sin.requires_grad();
    const Tensor undefined = tensor_or_undefined(k);
    const auto turned_back = [=](const Incoming& in, const Tensor& grad, const MaybeTensor& second,
                                 const Kept<5>& kept) {
      const auto& [cos, sin, positions, q, k] = kept;
      return in.needs_composite()
                 ? torchkiln::call<Op>(grad, second, cos, sin, interleaved, maybe(positions),
                                       partial, heads_dim, !inverse)
                 : call_below<Op>(grad, second, cos, sin, interleaved, maybe(positions), partial,
                                  heads_dim, !inverse);
    };
    return record(
        kName, {q, undefined, cos, sin},
        below.call<Op>(q, k, cos, sin, interleaved, positions, partial, heads_dim, inverse),
        keep(cos, sin, tensor_or_undefined(positions), factors_have_gradients ? q : Tensor(),
             factors_have_gradients ? undefined : Tensor()),
        [=](const Incoming& in, const Kept<5>& kept) {
          variable_list gradients(4);
          if (in.wants(2) || in.wants(3)) {
            const auto& [cos, sin, positions, q, k] = kept;
            gradients = composite_gradients(
                in, std::array{q, k, cos, sin}, std::array{false, false, in.wants(2), in.wants(3)},
                [&](const auto& inputs) {
                  return composite(inputs[0], maybe(inputs[1]), inputs[2], inputs[3], interleaved,
                                   maybe(kept[2]), partial, heads_dim, inverse);
                });
          }
          const bool wants_q = in.wants(0) && in[0].defined();
          const bool wants_k = in.wants(1) && in[1].defined();
          if (wants_q && wants_k) {
            std::tie(gradients[0], gradients[1]) = turned_back(in, in[0], in[1], kept);
          } else if (wants_q) {
            gradients[0] = std::get<0>(turned_back(in, in[0], std::nullopt, kept));
          } else if (wants_k) {
            gradients[1] = std::get<0>(turned_back(in, in[1], std::nullopt, kept));
          }
          return gradients;
        });
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchkiln, m) { define<Op>(m); }

}  // namespace torchkiln::rope_ops

namespace torchkiln {

std::tuple<at::Tensor, at::Tensor> rope(const at::Tensor& q, const std::optional<at::Tensor>& k,
                                        const at::Tensor& cos, const at::Tensor& sin,
                                        const RopeOptions& options) {
  return call<rope_ops::Op>(q, k, cos, sin, options.interleaved, options.positions, options.partial,
                            options.heads_dim, options.inverse);
}

}  // namespace torchkiln
