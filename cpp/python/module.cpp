// The Python module: an entry for each op, called by src/torchkiln/ops.

#include <pybind11/stl.h>

#include <string>
#include <type_traits>
#include <vector>

#include "torchkiln/core/activations.h"
#include "torchkiln/torch/bind.h"
#include "torchkiln/torch/c_function.h"
#include "torchkiln/torch/call.h"
#include "torchkiln/torch/ops.h"
#include "torchkiln/torch/second_gradient.h"
#include "trace.h"
#include "watch.h"

namespace {

using at::Tensor;

/// Numbers are converted to tensors here, once, so that every dispatch key receives the same
/// operands.
Tensor add(const torchkiln::TensorOrNumber& a, const torchkiln::TensorOrNumber& b) {
  return torchkiln::add(*a.tensor, *b.tensor);
}

Tensor muladd(const torchkiln::TensorOrNumber& a, const torchkiln::TensorOrNumber& b,
              const torchkiln::TensorOrNumber& c) {
  return torchkiln::muladd(*a.tensor, *b.tensor, *c.tensor);
}

template <class Signature, class Act>
const auto& op_of(const char* suffix) {
  static const auto op =
      torchkiln::find_op<Signature>((std::string("torchkiln::") + Act::kName + suffix).c_str());
  return op;
}

template <class Act>
Tensor activation(const Tensor& x) {
  return op_of<Tensor(const Tensor&), Act>("").call(x);
}

template <class Act>
Tensor activation_in_place(const Tensor& x) {
  Tensor changed = x;
  return op_of<Tensor&(Tensor&), Act>("_").call(changed);
}

py::object two_uses(py::handle x) {
  using torchkiln::bind_detail::wrap;
  return py::reinterpret_steal<py::object>(wrap(torchkiln::two_uses(THPVariable_Unpack(x.ptr()))));
}

/// The names of the activations in the order of Activations; the first one is "none".
std::vector<std::string> activations() {
  std::vector<std::string> names;
  torchkiln::for_each_activation([&](auto tag) { names.emplace_back(decltype(tag)::type::kName); },
                                 torchkiln::Activations{});
  return names;
}

void bind_activations(const torchkiln::Binder& ops) {
  torchkiln::for_each_activation(
      [&](auto tag) {
        using Act = typename decltype(tag)::type;
        if constexpr (!std::is_same_v<Act, torchkiln::None>) ops.bind<&activation<Act>>(Act::kName);
      },
      torchkiln::Activations{});
  ops.bind<&activation_in_place<torchkiln::Square>>("square_");
  ops.bind<&activation_in_place<torchkiln::Relu>>("relu_");
  ops.bind<&activation_in_place<torchkiln::Silu>>("silu_");
  ops.bind<&activation_in_place<torchkiln::Sigmoid>>("sigmoid_");
  ops.bind<&activation_in_place<torchkiln::Tanh>>("tanh_");
}

/// bn_act over the processes of a group, which is given by its name. SyncBatchNormAct calls it.
Tensor sync_bn_act(const Tensor& x, const std::optional<Tensor>& weight,
                   const std::optional<Tensor>& bias, const std::optional<Tensor>& running_mean,
                   const std::optional<Tensor>& running_var, const std::optional<Tensor>& residual,
                   const std::optional<Tensor>& batches, const std::optional<Tensor>& moments,
                   std::string_view act, double momentum, double eps, std::string_view group) {
  static const auto op = torchkiln::find_op<decltype(sync_bn_act)>("torchkiln::_sync_bn_act");
  return op.call(x, weight, bias, running_mean, running_var, residual, batches, moments, act,
                 momentum, eps, group);
}

/// The name of the op for a call of bn_act: a separate op updates the running statistics.
const char* name_of_bn_act(PyObject* const* given) {
  constexpr size_t kRunningMean = 3, kTraining = 7;
  const bool moves = given[kTraining] == Py_True && given[kRunningMean] != Py_None;
  return moves ? "_bn_act_update" : "bn_act";
}

/// Replaces the second result of rope by None if there is no k, because a schema cannot return
/// None.
PyObject* without_missing_k(PyObject* results, PyObject* const* given) {
  constexpr size_t kK = 1;
  if (given[kK] != Py_None || !PyTuple_Check(results)) return results;
  const auto found = py::reinterpret_steal<py::tuple>(results);
  return py::make_tuple(found[0], py::none()).release().ptr();
}

/// Returns only the log-probability if the argument `entropy`, at index `at`, is false.
template <size_t at>
PyObject* without_entropy(PyObject* results, PyObject* const* given) {
  if (given[at] == Py_True || !PyTuple_Check(results)) return results;
  const auto found = py::reinterpret_steal<py::tuple>(results);
  return py::object(found[0]).release().ptr();
}

}  // namespace

// Threads may call without a GIL, because the tables that Binder fills are only read after the
// import.
PYBIND11_MODULE(_C, module, py::mod_gil_not_used()) {
  const torchkiln::Binder ops(module);
  ops.bind<&add>("add");
  ops.bind<&muladd>("muladd");
  module.def("activations", &activations);
  bind_activations(ops);
  ops.bind<&torchkiln::bias_act>("bias_act");
  ops.bind<&torchkiln::swiglu>("swiglu");
  ops.bind<&torchkiln::geglu>("geglu");
  ops.bind<&torchkiln::geglu_tanh>("geglu_tanh");
  ops.bind<&torchkiln::dropout_add>("dropout_add");
  ops.bind<&torchkiln::bias_dropout_add>("bias_dropout_add");
  ops.bind<&torchkiln::sum>("sum");
  ops.bind<&torchkiln::mean>("mean");
  ops.bind<&torchkiln::softmax>("softmax");
  ops.bind<&torchkiln::log_softmax>("log_softmax");
  ops.bind<&torchkiln::layer_norm>("layer_norm");
  ops.bind<&torchkiln::rms_norm>("rms_norm");
  ops.bind<&torchkiln::add_layer_norm>("add_layer_norm");
  ops.bind<&torchkiln::add_rms_norm>("add_rms_norm");
  ops.bind<&torchkiln::gated_rms_norm>("gated_rms_norm");
  ops.bind<&torchkiln::bn_act>("bn_act", nullptr, &name_of_bn_act);
  ops.bind<&sync_bn_act>("_sync_bn_act", "sync_bn_act");
  ops.bind<&torchkiln::group_norm>("group_norm");
  ops.bind<&torchkiln::rope>("rope", nullptr, nullptr, &without_missing_k);
  ops.bind<&torchkiln::qkv_norm_rope>("qkv_norm_rope");
  ops.bind<&torchkiln::cross_entropy>("cross_entropy");
  ops.bind<&torchkiln::linear_cross_entropy>("linear_cross_entropy");
  ops.bind<&torchkiln::logprob>("logprob", nullptr, nullptr, &without_entropy<4>);
  ops.bind<&torchkiln::linear_logprob>("linear_logprob", nullptr, nullptr, &without_entropy<8>);
  ops.bind<&torchkiln::linear_kl>("linear_kl");
  ops.bind<&torchkiln::matmul>("matmul");
  ops.bind<&torchkiln::linear>("linear");
  ops.bind<&torchkiln::mlp>("mlp");
  ops.bind<&torchkiln::gated_mlp>("gated_mlp");
  ops.bind<&torchkiln::spmm>("spmm_csr", "spmm");
  ops.bind<&torchkiln::quantize>("quantize");
  ops.bind<&torchkiln::quantize_both>("quantize_both");
  ops.bind<&torchkiln::quantize_weight>("quantize_weight");
  ops.bind<&torchkiln::transpose_quantized>("transpose_quantized");
  ops.bind<&torchkiln::dequantize>("dequantize");
  ops.bind<&torchkiln::linear_fp8>("linear_fp8");
  module.def("two_uses", &two_uses);
  bind_trace(module);
  bind_watch(module);
  module.def("ops_with_c_function", &torchkiln::ops_with_c_function);
}
