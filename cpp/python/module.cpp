// The Python module: an entry for each op, called by src/torchkiln/ops.

#include <pybind11/stl.h>

#include <string>
#include <type_traits>

#include "torchkiln/core/activations.h"
#include "torchkiln/torch/bind.h"
#include "torchkiln/torch/c_function.h"
#include "torchkiln/torch/ops.h"
#include "torchkiln/torch/second_gradient.h"
#include "trace.h"
#include "watch.h"

namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

/// Numbers become tensors here, once, so that every dispatch key sees the same operands.
Tensor add(const torchkiln::TensorOrNumber& a, const torchkiln::TensorOrNumber& b) {
  return torchkiln::add(*a.tensor, *b.tensor);
}

Tensor muladd(const torchkiln::TensorOrNumber& a, const torchkiln::TensorOrNumber& b,
              const torchkiln::TensorOrNumber& c) {
  return torchkiln::muladd(*a.tensor, *b.tensor, *c.tensor);
}

template <class Act>
Tensor activation(const Tensor& x) {
  return torchkiln::activation(x, Act::kName);
}

template <class Act>
Tensor activation_in_place(const Tensor& x) {
  Tensor changed = x;
  return torchkiln::activation_(changed, Act::kName);
}

py::object two_uses(py::handle x) {
  using torchkiln::bind_detail::wrap;
  return py::reinterpret_steal<py::object>(wrap(torchkiln::two_uses(THPVariable_Unpack(x.ptr()))));
}

void bind_activations(const torchkiln::Binder& ops) {
  torchkiln::for_each_activation(
      [&](auto tag) {
        using Act = typename decltype(tag)::type;
        if constexpr (!std::is_same_v<Act, torchkiln::None>)
          ops.bind<&activation<Act>>(Act::kName, {"x"});
      },
      torchkiln::Activations{});
  ops.bind<&activation_in_place<torchkiln::Square>>("square_", {"x"});
  ops.bind<&activation_in_place<torchkiln::Relu>>("relu_", {"x"});
  ops.bind<&activation_in_place<torchkiln::Silu>>("silu_", {"x"});
  ops.bind<&activation_in_place<torchkiln::Sigmoid>>("sigmoid_", {"x"});
  ops.bind<&activation_in_place<torchkiln::Tanh>>("tanh_", {"x"});
}

Tensor cross_entropy(const Tensor& logits, const Tensor& target, const MaybeTensor& weight,
                     int64_t ignore_index, std::string_view reduction, double label_smoothing,
                     double z_loss, std::optional<at::ScalarType> dtype, bool check_target,
                     bool inplace_backward, std::optional<double> softcap) {
  return torchkiln::cross_entropy(logits, target,
                                  {weight, ignore_index, reduction, label_smoothing, z_loss, dtype,
                                   check_target, inplace_backward, softcap});
}

Tensor linear_cross_entropy(const Tensor& x, const Tensor& weight, const Tensor& target,
                            const MaybeTensor& bias, const MaybeTensor& class_weight,
                            int64_t ignore_index, std::string_view reduction,
                            double label_smoothing, double z_loss,
                            std::optional<at::ScalarType> dtype, bool check_target,
                            std::optional<double> softcap, double temperature) {
  return torchkiln::linear_cross_entropy(x, weight, target, bias,
                                         {class_weight, ignore_index, reduction, label_smoothing,
                                          z_loss, dtype, check_target, softcap, temperature});
}

Tensor bn_act(const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias,
              const MaybeTensor& running_mean, const MaybeTensor& running_var,
              const MaybeTensor& residual, std::string_view act, bool training, double momentum,
              double eps) {
  return torchkiln::bn_act(x, weight, bias, running_mean, running_var,
                           {residual, act, training, momentum, eps});
}

/// Running statistics are moved by an op of its own.
const char* name_of_bn_act(PyObject* const* given) {
  constexpr size_t kRunningMean = 3, kTraining = 7;
  const bool moves = given[kTraining] == Py_True && given[kRunningMean] != Py_None;
  return moves ? "bn_act_update" : "bn_act";
}

Tensor gated_rms_norm(const Tensor& x, const Tensor& gate, c10::SymIntArrayRef normalized_shape,
                      const MaybeTensor& weight, std::optional<double> eps, bool gate_first,
                      int64_t groups, double offset) {
  return torchkiln::gated_rms_norm(x, gate, normalized_shape, weight, eps,
                                   {gate_first, groups, offset});
}

std::tuple<Tensor, Tensor> rope(const Tensor& q, const MaybeTensor& k, const Tensor& cos,
                                const Tensor& sin, bool interleaved, const MaybeTensor& positions,
                                std::optional<int64_t> partial, int64_t heads_dim, bool inverse) {
  return torchkiln::rope(q, k, cos, sin, {interleaved, positions, partial, heads_dim, inverse});
}

std::tuple<Tensor, Tensor, Tensor> qkv_norm_rope(
    const Tensor& qkv, const Tensor& cos, const Tensor& sin, const MaybeTensor& q_weight,
    const MaybeTensor& k_weight, int64_t heads, int64_t kv_heads, double eps, std::string_view norm,
    double offset, bool interleaved, const MaybeTensor& positions, std::optional<int64_t> partial) {
  return torchkiln::qkv_norm_rope(qkv, cos, sin, q_weight, k_weight, heads, kv_heads,
                                  {eps, norm, offset, interleaved, positions, partial});
}

Tensor spmm_csr(const Tensor& values, const Tensor& b, const Tensor& crow, const Tensor& col,
                at::OptionalSymIntArrayRef shape, const MaybeTensor& transpose, bool check) {
  return torchkiln::spmm(values, b, crow, col, {shape, transpose, check});
}

}  // namespace

// Threads may call without a GIL: the tables that Binder fills are only read after the import.
PYBIND11_MODULE(_C, module, py::mod_gil_not_used()) {
  const torchkiln::Binder ops(module);
  ops.bind<&add>("add", {"a", "b"});
  ops.bind<&muladd>("muladd", {"a", "b", "c"});
  bind_activations(ops);
  ops.bind<&torchkiln::bias_act>("bias_act", {"x", "bias", "scale", "act"});
  ops.bind<&torchkiln::swiglu>("swiglu", {"gate", "up"});
  ops.bind<&torchkiln::geglu>("geglu", {"gate", "up"});
  ops.bind<&torchkiln::geglu_tanh>("geglu_tanh", {"gate", "up"});
  ops.bind<&torchkiln::dropout_add>("dropout_add", {"x", "residual", "p", "training"});
  ops.bind<&torchkiln::bias_dropout_add>("bias_dropout_add",
                                         {"x", "bias", "residual", "p", "training"});
  ops.bind<&torchkiln::sum>("sum", {"x", "dim", "keepdim", "dtype"});
  ops.bind<&torchkiln::mean>("mean", {"x", "dim", "keepdim", "dtype"});
  ops.bind<&torchkiln::softmax>("softmax", {"x", "dim", "scale", "mask", "causal", "dtype"});
  ops.bind<&torchkiln::log_softmax>("log_softmax",
                                    {"x", "dim", "scale", "mask", "causal", "dtype"});
  ops.bind<&torchkiln::layer_norm>(
      "layer_norm", {"x", "normalized_shape", "weight", "bias", "eps", "offset", "round"});
  ops.bind<&torchkiln::rms_norm>("rms_norm",
                                 {"x", "normalized_shape", "weight", "eps", "offset", "round"});
  ops.bind<&torchkiln::add_layer_norm>(
      "add_layer_norm",
      {"x", "residual", "normalized_shape", "weight", "bias", "eps", "offset", "round"});
  ops.bind<&torchkiln::add_rms_norm>(
      "add_rms_norm", {"x", "residual", "normalized_shape", "weight", "eps", "offset", "round"});
  ops.bind<&gated_rms_norm>("gated_rms_norm", {"x", "gate", "normalized_shape", "weight", "eps",
                                               "gate_first", "groups", "offset"});
  ops.bind<&bn_act>("bn_act",
                    {"x", "weight", "bias", "running_mean", "running_var", "residual", "act",
                     "training", "momentum", "eps"},
                    nullptr, &name_of_bn_act);
  ops.bind<&torchkiln::group_norm>("group_norm",
                                   {"x", "num_groups", "weight", "bias", "eps", "act"});
  ops.bind<&rope>("rope", {"q", "k", "cos", "sin", "interleaved", "positions", "partial",
                           "heads_dim", "inverse"});
  ops.bind<&qkv_norm_rope>("qkv_norm_rope",
                           {"qkv", "cos", "sin", "q_weight", "k_weight", "heads", "kv_heads", "eps",
                            "norm", "offset", "interleaved", "positions", "partial"});
  ops.bind<&cross_entropy>("cross_entropy", {"logits", "target", "weight", "ignore_index",
                                             "reduction", "label_smoothing", "z_loss", "dtype",
                                             "check_target", "inplace_backward", "softcap"});
  ops.bind<&linear_cross_entropy>(
      "linear_cross_entropy",
      {"x", "weight", "target", "bias", "class_weight", "ignore_index", "reduction",
       "label_smoothing", "z_loss", "dtype", "check_target", "softcap", "temperature"});
  ops.bind<&torchkiln::matmul>("matmul", {"a", "b"});
  ops.bind<&torchkiln::linear>("linear", {"x", "weight", "bias", "act", "scale", "residual"});
  ops.bind<&torchkiln::mlp>(
      "mlp", {"x", "up_weight", "down_weight", "up_bias", "down_bias", "act", "save"});
  ops.bind<&torchkiln::gated_mlp>("gated_mlp", {"x", "gate_up_weight", "down_weight",
                                                "gate_up_bias", "down_bias", "act", "save"});
  ops.bind<&spmm_csr>("spmm_csr", {"values", "b", "crow", "col", "shape", "transpose", "check"},
                      "spmm");
  module.def("two_uses", &two_uses);
  bind_trace(module);
  bind_watch(module);
  module.def("ops_with_c_function", &torchkiln::ops_with_c_function);
}
