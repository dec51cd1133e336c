// The op rope: the rotation of queries and keys. It is linear in both, so that its gradient is the
// rotation by the negative angles. angles.h has cos, sin and the options of the rotation; qkv.cpp
// rotates a packed projection, cache_mask.cpp has the mask of a cache.

#include "rope/angles.h"
#include "torchkiln/torch/empty.h"
#include "torchkiln/torch/launch.h"
#include "torchkiln/torch/ops.h"

namespace torchkiln::rope_ops {
namespace {

using Two = std::tuple<Tensor, Tensor>;
constexpr const char* kName = "rope";

/// Fewest elements per CPU thread.
constexpr int64_t kGrain = 1 << 14;

/// The arguments of a call.
struct Call {
  Borrowed<Tensor> q;
  Borrowed<MaybeTensor> k;
  Angles angles;
  int64_t heads_dim;

  TORCHKILN_FIELDS(self.q, self.k, self.angles.cos, self.angles.sin, self.angles.interleaved,
                   self.angles.positions, self.angles.rotary_dim, self.heads_dim,
                   self.angles.inverse);

  /// The dimensions of the heads and of the tokens, counted from the end: one is -3, the other -2.
  int64_t heads_at() const { return heads_dim < 0 ? heads_dim : heads_dim - q->dim(); }
  int64_t tokens_at() const { return -5 - heads_at(); }

  Heads heads() const {
    return {kName,
            "q",
            q,
            q->dim() == 4 ? std::optional(q->sym_size(0)) : std::nullopt,
            q->sym_size(tokens_at()),
            q->sym_size(-1)};
  }
};

void check(const Call& call) {
  const Angles& angles = call.angles;
  check_tensors(kName, {{"q", call.q}, {"cos", angles.cos}, {"sin", angles.sin}});
  if (call.k) check_tensors(kName, {{"q", call.q}, {"k", *call.k}});
  if (angles.positions) check_tensors(kName, {{"q", call.q}, {"positions", *angles.positions}});
  check_dtype(kName, "q", call.q);
  check_rank(kName, "q", call.q, 3, 4, "3 or 4 dimensions, the last of which is that of a head");
  TORCH_CHECK_VALUE(call.heads_at() == -3 || call.heads_at() == -2, "torchkiln.", kName,
                    ": heads_dim: got ", call.heads_dim,
                    ", expected -3 for [..., heads, tokens, head_dim] or -2 for [..., tokens, "
                    "heads, head_dim]");
  if (call.k) {
    const int64_t heads = call.q->dim() + call.heads_at();
    check_same_dtype(kName, "k", *call.k, "q", call.q);
    c10::SymDimVector shape(call.q->sym_sizes());
    if (call.k->dim() == call.q->dim()) shape[static_cast<size_t>(heads)] = call.k->sym_size(heads);
    TORCH_CHECK(call.k->sym_sizes().equals(shape), "torchkiln.", kName, ": k: got shape ",
                call.k->sym_sizes(), ", expected ", call.q->sym_sizes(),
                ", the shape of q, with any number of heads in dimension ", heads);
  }
  check_angles(call.heads(), angles);
}

/// An uninitialised dense output, with heads and tokens in the same memory order as in x.
Tensor output_like(const Tensor& x, const Call& call) {
  const int64_t rank = x.dim(), heads = call.heads_at(), tokens = call.tokens_at();
  const int64_t outer = x.sym_stride(tokens) >= x.sym_stride(heads) ? tokens : heads;
  c10::SymDimVector strides(static_cast<size_t>(rank), 1);
  SymInt next = x.sym_size(-1);
  for (const int64_t d : {heads + tokens - outer, outer}) {
    strides[static_cast<size_t>(rank + d)] = next;
    next = next * x.sym_size(d);
  }
  if (rank == 4) strides[0] = next;
  return at::empty_strided_symint(x.sym_sizes(), strides, x.options());
}

Two checked_outputs(const Call& call) {
  check(call);
  return {output_like(call.q, call), call.k ? output_like(*call.k, call) : no_output(call.q)};
}

/// Sets the strides of batch, tokens and heads.
void set_strides(int64_t (&to)[3], const Tensor& tensor, const Call& call) {
  to[0] = tensor.dim() == 4 ? tensor.stride(0) : 0;
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

Two run(const Call& call) {
  auto [q_out, k_out] = checked_outputs(call);
  if (q_out.numel() == 0 && k_out.numel() == 0) return {q_out, k_out};
  const Heads heads = call.heads();
  const MaybeCopy q = with_adjacent_elements("q", call.q);
  const MaybeCopy k = with_adjacent_elements("k", call.k ? *call.k : call.q);
  const MaybeCopy cos = with_adjacent_elements("cos", call.angles.cos);
  const MaybeCopy sin = with_adjacent_elements("sin", call.angles.sin);
  Rope arguments{};
  arguments.tensors[0] = heads_of(*q, q_out, call);
  if (call.k) arguments.tensors[1] = heads_of(*k, k_out, call);
  arguments.angles = arguments_of(heads, call.angles, *cos, *sin);
  arguments.dtype = dtype_of(call.q);
  arguments.batch = call.q->dim() == 4 ? call.q->size(0) : 1;
  arguments.tokens = call.q->size(call.tokens_at());
  arguments.head_dim = call.q->size(-1);
  const int64_t tokens = count_tokens(heads);
  const int64_t elements = (q_out.numel() + k_out.numel()) / tokens;
  launch(
      kName, q_out, tokens, std::max<int64_t>(1, kGrain / elements),
      [&](auto stream) { return cuda::rope(arguments, stream); },
      [&](int64_t begin, int64_t end) { return cpu::rope(arguments, begin, end); });
  return {q_out, k_out};
}

Two composite_of(const Call& call) {
  check(call);
  const auto factors = composite_angles(call.heads(), call.angles, call.heads_at());
  const auto rotated = [&](const Tensor& x) {
    return composite_rotation(x, call.heads(), call.angles, factors).to(x.scalar_type());
  };
  return {rotated(call.q), call.k ? rotated(*call.k) : call.q->narrow(0, 0, 0).reshape({0})};
}

/// Rotates q and k. It is linear in both, and its gradient is this op with `inverse` negated.
struct Op {
  static constexpr const char* kSchema =
      "torchkiln::rope(Tensor q, Tensor? k, Tensor cos, Tensor sin, *, bool interleaved=False, "
      "Tensor? positions=None, int? rotary_dim=None, int heads_dim=-3, bool inverse=False) -> "
      "(Tensor, Tensor)";

  static Two meta(const Call& call) { return checked_outputs(call); }
  static Two kernel(const Call& call) { return run(call); }
  static Two composite(const Call& call) { return composite_of(call); }

  /// Saves cos, sin and positions. q and k are saved only for gradients of cos and sin, which are
  /// rare and computed with torch's ops.
  static Two recorded(const Below& below, const Call& call) {
    const Tensor &q = call.q, &cos = call.angles.cos, &sin = call.angles.sin;
    const Tensor k = tensor_or_undefined(call.k);
    const bool keeps = cos.requires_grad() || sin.requires_grad();
    return record(kName, {q, k, cos, sin}, below.call<Op>(call),
                  keep(cos, sin, tensor_or_undefined(call.angles.positions), keeps ? q : Tensor(),
                       keeps ? k : Tensor()),
                  [numbers = call](const Incoming& in, const Kept<5>& kept) {
                    return gradients(in, kept, numbers);
                  });
  }

  /// Takes the tensors from `kept`, because those that `call` borrows may have been freed.
  static variable_list gradients(const Incoming& in, const Kept<5>& kept, Call call) {
    const MaybeTensor positions = maybe(kept[2]);
    MaybeTensor k;
    const auto put = [&](const Tensor& first, const Tensor& second, const Tensor& cos,
                         const Tensor& sin) {
      k = maybe(second);
      call.q = first;
      call.k = k;
      call.angles.cos = cos;
      call.angles.sin = sin;
      call.angles.positions = positions;
    };
    variable_list found(4);
    if (in.wants(2) || in.wants(3)) {
      found = composite_gradients(in, std::array{kept[3], kept[4], kept[0], kept[1]},
                                  std::array{false, false, in.wants(2), in.wants(3)},
                                  [&](const auto& inputs) {
                                    put(inputs[0], inputs[1], inputs[2], inputs[3]);
                                    return composite(call);
                                  });
    }
    call.angles.inverse = !call.angles.inverse;
    const auto turned_back = [&](const Tensor& first, const Tensor& second) {
      put(first, second, kept[0], kept[1]);
      return in.needs_composite() ? torchkiln::call<Op>(call) : call_below<Op>(call);
    };
    const bool wants_q = in.wants(0) && in[0].defined();
    const bool wants_k = in.wants(1) && in[1].defined();
    if (wants_q && wants_k) {
      std::tie(found[0], found[1]) = turned_back(in[0], in[1]);
    } else if (wants_q) {
      found[0] = std::get<0>(turned_back(in[0], Tensor()));
    } else if (wants_k) {
      found[1] = std::get<0>(turned_back(in[1], Tensor()));
    }
    return found;
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchkiln, m) { define<Op>(m); }

}  // namespace torchkiln::rope_ops

namespace torchkiln {

std::tuple<at::Tensor, at::Tensor> rope(const at::Tensor& q, const std::optional<at::Tensor>& k,
                                        const at::Tensor& cos, const at::Tensor& sin,
                                        const RopeOptions& options) {
  return call<rope_ops::Op>(q, k, cos, sin, options);
}

}  // namespace torchkiln
