// Gates and their gradients with results in E4M3. The gate has the bits of QuantizeOp, its gradient
// the bits of BothOp; both are first rounded to the dtype of the gate. On a GPU neither is written
// in floating point, unless rows are not whole vectors.

#include "detail/rows_view.h"
#include "quantize/quantize.h"
#include "torchkiln/kernels/quantize.h"
#include "torchkiln/torch/elementwise.h"
#include "torchkiln/torch/launch.h"

namespace torchkiln::quantize_ops {
namespace {

const char* name_of_gate(Gate act) {
  return act.act == kActivation<Silu> ? "swiglu_fp8" : "geglu_fp8";
}

/// Runs the kernel if it supports the tensors, and returns whether it did. Outputs are undefined if
/// not wanted. Gate and up, of one dtype, are read as rows.
bool has_run(const char* op, const Tensor& grad, const Tensor& gate, const MaybeTensor& up,
             Gate act, const Two& rows, const Two& transposed) {
#ifdef TORCHKILN_WITH_CUDA
  if (!gate.is_cuda() || (up && up->scalar_type() != gate.scalar_type())) return false;
  const auto [gates, ups] = gated_ops::halves(gate, up);
  const auto& [data, scale] = rows;
  const int64_t columns = gates.size(-1), count = gates.numel() / columns;
  const RowsView gate_rows = view_as_rows(gates, count, columns);
  const RowsView up_rows = view_as_rows(ups, count, columns);
  const RowsView grad_rows = grad.defined() ? view_as_rows(grad, count, columns) : gate_rows;
  QuantizeGated p{};
  if (grad.defined()) p.grad = grad_rows.tensor->const_data_ptr();
  p.gate = gate_rows.tensor->const_data_ptr();
  p.up = up_rows.tensor->const_data_ptr();
  p.grad_stride = grad_rows.stride;
  p.gate_stride = gate_rows.stride;
  p.up_stride = up_rows.stride;
  p.activation = act.act;
  Quantize& to = p.result;
  to.dtype = dtype_of(gate);
  to.rows = count;
  to.columns = data.size(-1);
  to.data = static_cast<uint8_t*>(data.data_ptr());
  to.scale = scale.data_ptr<float>();
  to.scale_stride = count;
  if (const auto& [turned, turned_scale] = transposed; turned.defined()) {
    to.transposed = static_cast<uint8_t*>(turned.data_ptr());
    to.transposed_scale = turned_scale.data_ptr<float>();
    to.transposed_scale_stride = to.columns;
  }
  if (!cuda::takes(p)) return false;
  torch_cuda().on_stream(gate.device(), [&](CUstream_st* stream) {
    check_status(op, cuda::quantize_gated(p, stream));
  });
  return true;
#else
  (void)op, (void)grad, (void)gate, (void)up, (void)act, (void)rows, (void)transposed;
  return false;
#endif
}

/// Checks gate and up. Returns a tensor without memory of its own that stands for the result.
Tensor checked_stand_in(const char* op, const Tensor& gate, const MaybeTensor& up) {
  const auto [shape, options] = gated_ops::checked_result(op, gate, up);
  return stand_in(shape, options);
}

}  // namespace

Three GatedOp::meta(const Tensor& gate, const MaybeTensor& up, Gate act) {
  const char* const op = name_of_gate(act);
  check_source(op, "gate", gate);
  const Tensor plain = checked_stand_in(op, gate, up);
  check_not_0_dim(op, "gate", gate);
  return std::tuple_cat(empty_quantized(plain.sym_sizes(), plain), std::tuple{plain});
}

Three GatedOp::kernel(const Tensor& gate, const MaybeTensor& up, Gate act) {
  const Three out = meta(gate, up, act);
  const auto& [data, scale, source] = out;
  if (data.numel() == 0 ||
      has_run(name_of_gate(act), Tensor(), gate, up, act, {data, scale}, Two()))
    return out;
  return std::tuple_cat(call_below<QuantizeOp>(gated_ops::gated(gate, act, up)),
                        std::tuple{source});
}

Three GatedOp::composite(const Tensor&, const MaybeTensor&, Gate act) {
  refuse_transform(name_of_gate(act));
}

Three GatedOp::recorded(const Below& below, const Tensor& gate, const MaybeTensor& up, Gate act) {
  const Tensor second = tensor_or_undefined(up);
  const auto [data, scale, source] = below.call<GatedOp>(gate, up, act);
  return {data, scale,
          record(name_of_gate(act), {gate, second}, source, keep(gate, second),
                 [act = act.act](const Incoming& in, const Kept<2>& kept) {
                   return gated_ops::gradients(in, kept, act);
                 })};
}

Four GatedGradientOp::meta(const Tensor& grad, const Tensor& packed, Gate act) {
  const char* const op = name_of_gate(act);
  check_source(op, "gate", packed);
  check_like(op, "grad", grad, "the result", checked_stand_in(op, packed, std::nullopt));
  return std::tuple_cat(empty_quantized(packed.sym_sizes(), packed), empty_transposed(packed));
}

Four GatedGradientOp::kernel(const Tensor& grad, const Tensor& packed, Gate act) {
  const Four out = meta(grad, packed, act);
  const auto& [data, scale, transposed, transposed_scale] = out;
  if (data.numel() == 0 || has_run(name_of_gate(act), grad, packed, std::nullopt, act,
                                   {data, scale}, {transposed, transposed_scale}))
    return out;
  const auto [plain, none] =
      call_below<gated_ops::GatedBackward>(grad, packed, MaybeTensor(), act.act);
  return call_below<BothOp>(plain, false);
}

TORCH_LIBRARY_FRAGMENT(torchkiln, m) { define<GatedOp, GatedGradientOp>(m); }

}  // namespace torchkiln::quantize_ops
