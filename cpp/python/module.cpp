// The eager fast path: a Python call straight into the C++ dispatcher, half the host time of
// torch.ops.

#include <ATen/ScalarOps.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/utils/python_symnode.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "torchkiln/core/activations.h"
#include "torchkiln/torch/ops.h"
#include "trace.h"

namespace py = pybind11;

namespace {

[[noreturn]] void refuse(py::handle argument, const char* op, const char* name,
                         const char* expected) {
  throw py::type_error(std::string("torchkiln.") + op + ": " + name + ": got " +
                       Py_TYPE(argument.ptr())->tp_name + ", expected " + expected);
}

const at::Tensor& tensor(py::handle argument, const char* op, const char* name) {
  if (!THPVariable_Check(argument.ptr())) refuse(argument, op, name, "a torch.Tensor");
  return THPVariable_Unpack(argument.ptr());
}

std::optional<at::Tensor> maybe_tensor(py::handle argument, const char* op, const char* name) {
  if (argument.is_none()) return std::nullopt;
  return tensor(argument, op, name);
}

/// A tensor is no number here: its gradient would be lost without a word.
double number(py::handle argument, const char* op, const char* name) {
  const bool is_tensor = THPVariable_Check(argument.ptr());
  const double value = is_tensor ? 0.0 : PyFloat_AsDouble(argument.ptr());
  if (is_tensor || PyErr_Occurred()) {
    PyErr_Clear();
    refuse(argument, op, name, "a number");
  }
  return value;
}

/// What is beyond 64 bits is out of every range, too: the nearest end of it.
int64_t integer(py::handle argument, const char* op, const char* name) {
  const bool is_number = PyIndex_Check(argument.ptr()) && !PyBool_Check(argument.ptr()) &&
                         !THPVariable_Check(argument.ptr());
  if (!is_number) refuse(argument, op, name, "an int");
  return PyNumber_AsSsize_t(argument.ptr(), nullptr);
}

/// A tensor, or a number as torch wraps it: it takes no part in the promotion of dtypes.
at::Tensor tensor_or_number(py::handle argument, const char* op, const char* name) {
  if (THPVariable_Check(argument.ptr())) return THPVariable_Unpack(argument.ptr());
  if (PyBool_Check(argument.ptr()))
    return at::native::wrapped_scalar_tensor(argument.ptr() == Py_True);
  if (PyLong_Check(argument.ptr())) {
    const int64_t value = PyLong_AsLongLong(argument.ptr());
    if (value == -1 && PyErr_Occurred()) throw py::error_already_set();
    return at::native::wrapped_scalar_tensor(value);
  }
  if (!PyFloat_Check(argument.ptr())) refuse(argument, op, name, "a torch.Tensor or a number");
  return at::native::wrapped_scalar_tensor(PyFloat_AsDouble(argument.ptr()));
}

bool flag(py::handle argument, const char* op, const char* name) {
  if (!PyBool_Check(argument.ptr())) refuse(argument, op, name, "a bool");
  return argument.ptr() == Py_True;
}

std::string_view word(py::handle argument, const char* op, const char* name) {
  Py_ssize_t size = 0;
  const char* text =
      PyUnicode_Check(argument.ptr()) ? PyUnicode_AsUTF8AndSize(argument.ptr(), &size) : nullptr;
  if (text == nullptr) refuse(argument, op, name, "a str");
  return {text, static_cast<size_t>(size)};
}

std::optional<at::ScalarType> dtype_or_none(py::handle argument, const char* op, const char* name) {
  if (argument.is_none()) return std::nullopt;
  if (!THPDtype_Check(argument.ptr())) refuse(argument, op, name, "a torch.dtype or None");
  return reinterpret_cast<THPDtype*>(argument.ptr())->scalar_type;
}

/// An int, several, or none at all.
std::optional<std::vector<int64_t>> dims_or_none(py::handle argument, const char* op,
                                                 const char* name) {
  constexpr const char* kExpected = "an int, a tuple of ints or None";
  if (argument.is_none()) return std::nullopt;
  std::vector<int64_t> dims;
  const auto append = [&](py::handle item) {
    const bool is_number =
        PyIndex_Check(item.ptr()) && !PyBool_Check(item.ptr()) && !THPVariable_Check(item.ptr());
    if (!is_number) refuse(item, op, name, kExpected);
    // What is beyond 64 bits is out of every range, too.
    dims.push_back(PyNumber_AsSsize_t(item.ptr(), nullptr));
  };
  if (PyTuple_Check(argument.ptr()) || PyList_Check(argument.ptr())) {
    for (const py::handle item : argument) append(item);
  } else {
    append(argument);
  }
  return dims;
}

std::optional<double> number_or_none(py::handle argument, const char* op, const char* name) {
  if (argument.is_none()) return std::nullopt;
  return number(argument, op, name);
}

/// An int or several.
c10::SmallVector<c10::SymInt, 4> sizes(py::handle argument, const char* op, const char* name) {
  c10::SmallVector<c10::SymInt, 4> found;
  const auto append = [&](py::handle item) {
    if (PyLong_CheckExact(item.ptr())) {
      found.emplace_back(PyLong_AsLongLong(item.ptr()));
    } else if (torch::is_symint(item)) {
      found.push_back(py::cast<c10::SymInt>(item));
    } else if (PyIndex_Check(item.ptr()) && !PyBool_Check(item.ptr()) &&
               !THPVariable_Check(item.ptr())) {
      found.emplace_back(PyNumber_AsSsize_t(item.ptr(), nullptr));
    } else {
      refuse(item, op, name, "an int or a sequence of ints");
    }
    if (PyErr_Occurred()) throw py::error_already_set();
  };
  if (PyTuple_Check(argument.ptr()) || PyList_Check(argument.ptr())) {
    for (const py::handle item : argument) append(item);
  } else {
    append(argument);
  }
  return found;
}

py::object wrap(at::Tensor&& result) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(result)));
}

py::object wrap(std::tuple<at::Tensor, at::Tensor>&& results) {
  return py::make_tuple(wrap(std::move(std::get<0>(results))),
                        wrap(std::move(std::get<1>(results))));
}

/// Runs an op without the interpreter's lock, and turns torch's errors into Python's.
template <class Op>
py::object call(const Op& op) {
  HANDLE_TH_ERRORS
  decltype(op()) result;
  {
    const py::gil_scoped_release unlocked;
    result = op();
  }
  return wrap(std::move(result));
  END_HANDLE_TH_ERRORS_PYBIND
}

py::object add(py::handle a, py::handle b) {
  const at::Tensor& left = tensor(a, "add", "a");
  const at::Tensor& right = tensor(b, "add", "b");
  return call([&] { return torchkiln::add(left, right); });
}

py::object muladd(py::handle a, py::handle b, py::handle c) {
  const at::Tensor left = tensor_or_number(a, "muladd", "a");
  const at::Tensor right = tensor_or_number(b, "muladd", "b");
  const at::Tensor shift = tensor_or_number(c, "muladd", "c");
  return call([&] { return torchkiln::muladd(left, right, shift); });
}

py::object bias_act(py::handle x, py::handle bias, py::handle scale, py::handle act) {
  const at::Tensor& input = tensor(x, "bias_act", "x");
  const at::Tensor& shift = tensor(bias, "bias_act", "bias");
  const double factor = number(scale, "bias_act", "scale");
  const std::string_view name = word(act, "bias_act", "act");
  return call([&] { return torchkiln::bias_act(input, shift, factor, name); });
}

py::object matmul(py::handle a, py::handle b) {
  const at::Tensor& left = tensor(a, "matmul", "a");
  const at::Tensor& right = tensor(b, "matmul", "b");
  return call([&] { return torchkiln::matmul(left, right); });
}

py::object linear(py::handle x, py::handle weight, py::handle bias, py::handle act,
                  py::handle scale, py::handle residual) {
  constexpr const char* kOp = "linear";
  const at::Tensor& input = tensor(x, kOp, "x");
  const at::Tensor& matrix = tensor(weight, kOp, "weight");
  const std::optional<at::Tensor> shift = maybe_tensor(bias, kOp, "bias");
  const std::string_view name = word(act, kOp, "act");
  const double factor = number(scale, kOp, "scale");
  const std::optional<at::Tensor> more = maybe_tensor(residual, kOp, "residual");
  return call([&] { return torchkiln::linear(input, matrix, shift, name, factor, more); });
}

py::object dropout_add(py::handle x, py::handle residual, py::handle p, py::handle training) {
  const at::Tensor& input = tensor(x, "dropout_add", "x");
  const at::Tensor& other = tensor(residual, "dropout_add", "residual");
  const double probability = number(p, "dropout_add", "p");
  const bool random = flag(training, "dropout_add", "training");
  return call([&] { return torchkiln::dropout_add(input, other, probability, random); });
}

py::object bias_dropout_add(py::handle x, py::handle bias, py::handle residual, py::handle p,
                            py::handle training) {
  const at::Tensor& input = tensor(x, "bias_dropout_add", "x");
  const at::Tensor& shift = tensor(bias, "bias_dropout_add", "bias");
  const at::Tensor& other = tensor(residual, "bias_dropout_add", "residual");
  const double probability = number(p, "bias_dropout_add", "p");
  const bool random = flag(training, "bias_dropout_add", "training");
  return call(
      [&] { return torchkiln::bias_dropout_add(input, shift, other, probability, random); });
}

py::object layer_norm(py::handle x, py::handle normalized_shape, py::handle weight, py::handle bias,
                      py::handle eps) {
  constexpr const char* kOp = "layer_norm";
  const at::Tensor& input = tensor(x, kOp, "x");
  const auto shape = sizes(normalized_shape, kOp, "normalized_shape");
  const std::optional<at::Tensor> factor = maybe_tensor(weight, kOp, "weight");
  const std::optional<at::Tensor> shift = maybe_tensor(bias, kOp, "bias");
  const double least = number(eps, kOp, "eps");
  return call([&] { return torchkiln::layer_norm(input, shape, factor, shift, least); });
}

py::object rms_norm(py::handle x, py::handle normalized_shape, py::handle weight, py::handle eps,
                    py::handle offset) {
  constexpr const char* kOp = "rms_norm";
  const at::Tensor& input = tensor(x, kOp, "x");
  const auto shape = sizes(normalized_shape, kOp, "normalized_shape");
  const std::optional<at::Tensor> factor = maybe_tensor(weight, kOp, "weight");
  const std::optional<double> least = number_or_none(eps, kOp, "eps");
  const double added = number(offset, kOp, "offset");
  return call([&] { return torchkiln::rms_norm(input, shape, factor, least, added); });
}

py::object add_layer_norm(py::handle x, py::handle residual, py::handle normalized_shape,
                          py::handle weight, py::handle bias, py::handle eps) {
  constexpr const char* kOp = "add_layer_norm";
  const at::Tensor& input = tensor(x, kOp, "x");
  const at::Tensor& other = tensor(residual, kOp, "residual");
  const auto shape = sizes(normalized_shape, kOp, "normalized_shape");
  const std::optional<at::Tensor> factor = maybe_tensor(weight, kOp, "weight");
  const std::optional<at::Tensor> shift = maybe_tensor(bias, kOp, "bias");
  const double least = number(eps, kOp, "eps");
  return call([&] { return torchkiln::add_layer_norm(input, other, shape, factor, shift, least); });
}

py::object add_rms_norm(py::handle x, py::handle residual, py::handle normalized_shape,
                        py::handle weight, py::handle eps, py::handle offset) {
  constexpr const char* kOp = "add_rms_norm";
  const at::Tensor& input = tensor(x, kOp, "x");
  const at::Tensor& other = tensor(residual, kOp, "residual");
  const auto shape = sizes(normalized_shape, kOp, "normalized_shape");
  const std::optional<at::Tensor> factor = maybe_tensor(weight, kOp, "weight");
  const std::optional<double> least = number_or_none(eps, kOp, "eps");
  const double added = number(offset, kOp, "offset");
  return call([&] { return torchkiln::add_rms_norm(input, other, shape, factor, least, added); });
}

using GatedOp = at::Tensor (*)(const at::Tensor&, const std::optional<at::Tensor>&);

void define_gated(py::module_& module, const char* name, GatedOp op) {
  module.def(
      name,
      [name, op](py::handle gate, py::handle up) {
        const at::Tensor& first = tensor(gate, name, "gate");
        const std::optional<at::Tensor> second = maybe_tensor(up, name, "up");
        return call([&] { return op(first, second); });
      },
      py::arg("gate"), py::arg("up"));
}

/// Activations that are functions of their own: all but none.
void define_activations(py::module_& module) {
  torchkiln::for_each_activation(
      [&](auto tag) {
        using Act = typename decltype(tag)::type;
        if constexpr (!std::is_same_v<Act, torchkiln::None>) {
          module.def(
              Act::kName,
              [](py::handle x) {
                const at::Tensor& input = tensor(x, Act::kName, "x");
                return call([&] { return torchkiln::activation(input, Act::kName); });
              },
              py::arg("x"));
        }
      },
      torchkiln::Activations{});
  for (const char* name : {"square", "relu", "silu", "sigmoid", "tanh"}) {
    const std::string op = std::string(name) + "_";
    module.def(
        op.c_str(),
        [name, op](py::handle x) {
          at::Tensor input = tensor(x, op.c_str(), "x");
          return call([&] { return torchkiln::activation_(input, name); });
        },
        py::arg("x"));
  }
}

using Reduce = at::Tensor (*)(const at::Tensor&, at::OptionalIntArrayRef, bool,
                              std::optional<at::ScalarType>);

template <Reduce reduce>
void define_reduction(py::module_& module, const char* op) {
  const auto entry = [op](py::handle x, py::handle dim, py::handle keepdim, py::handle dtype) {
    const at::Tensor& input = tensor(x, op, "x");
    const std::optional<std::vector<int64_t>> dims = dims_or_none(dim, op, "dim");
    const bool keeps = flag(keepdim, op, "keepdim");
    const std::optional<at::ScalarType> out_dtype = dtype_or_none(dtype, op, "dtype");
    at::OptionalIntArrayRef over;
    if (dims) over = at::IntArrayRef(*dims);
    return call([&] { return reduce(input, over, keeps, out_dtype); });
  };
  module.def(op, entry, py::arg("x"), py::arg("dim"), py::arg("keepdim"), py::arg("dtype"));
}

using SoftmaxOp = at::Tensor (*)(const at::Tensor&, int64_t, double,
                                 const std::optional<at::Tensor>&, bool);

void define_softmax(py::module_& module, const char* op, SoftmaxOp softmax) {
  module.def(
      op,
      [op, softmax](py::handle x, py::handle dim, py::handle scale, py::handle mask,
                    py::handle causal) {
        const at::Tensor& input = tensor(x, op, "x");
        const int64_t over = integer(dim, op, "dim");
        const double factor = number(scale, op, "scale");
        const std::optional<at::Tensor> kept = maybe_tensor(mask, op, "mask");
        const bool is_causal = flag(causal, op, "causal");
        return call([&] { return softmax(input, over, factor, kept, is_causal); });
      },
      py::arg("x"), py::arg("dim"), py::arg("scale"), py::arg("mask"), py::arg("causal"));
}

py::object cross_entropy(py::handle logits, py::handle target, py::handle weight,
                         py::handle ignore_index, py::handle reduction, py::handle label_smoothing,
                         py::handle z_loss, py::handle dtype, py::handle check_target,
                         py::handle inplace_backward) {
  constexpr const char* kOp = "cross_entropy";
  const at::Tensor& input = tensor(logits, kOp, "logits");
  const at::Tensor& other = tensor(target, kOp, "target");
  torchkiln::CrossEntropyOptions options;
  options.weight = maybe_tensor(weight, kOp, "weight");
  options.ignore_index = integer(ignore_index, kOp, "ignore_index");
  options.reduction = word(reduction, kOp, "reduction");
  options.label_smoothing = number(label_smoothing, kOp, "label_smoothing");
  options.z_loss = number(z_loss, kOp, "z_loss");
  options.dtype = dtype_or_none(dtype, kOp, "dtype");
  options.check_target = flag(check_target, kOp, "check_target");
  options.inplace_backward = flag(inplace_backward, kOp, "inplace_backward");
  return call([&] { return torchkiln::cross_entropy(input, other, options); });
}

py::object spmm_csr(py::handle values, py::handle b, py::handle crow, py::handle col,
                    py::handle shape, py::handle transpose, py::handle check) {
  constexpr const char* kOp = "spmm";
  const at::Tensor& entries = tensor(values, kOp, "values");
  const at::Tensor& dense = tensor(b, kOp, "b");
  const at::Tensor& rows = tensor(crow, kOp, "crow");
  const at::Tensor& columns = tensor(col, kOp, "col");
  torchkiln::SpmmOptions options;
  c10::SmallVector<c10::SymInt, 4> given;
  if (!shape.is_none()) {
    given = sizes(shape, kOp, "shape");
    options.shape = c10::SymIntArrayRef(given);
  }
  options.transpose = maybe_tensor(transpose, kOp, "transpose");
  options.check = flag(check, kOp, "check");
  return call([&] { return torchkiln::spmm(entries, dense, rows, columns, options); });
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.def("add", &add, py::arg("a"), py::arg("b"));
  module.def("muladd", &muladd, py::arg("a"), py::arg("b"), py::arg("c"));
  module.def("bias_act", &bias_act, py::arg("x"), py::arg("bias"), py::arg("scale"),
             py::arg("act"));
  module.def("matmul", &matmul, py::arg("a"), py::arg("b"));
  module.def("linear", &linear, py::arg("x"), py::arg("weight"), py::arg("bias"), py::arg("act"),
             py::arg("scale"), py::arg("residual"));
  module.def("dropout_add", &dropout_add, py::arg("x"), py::arg("residual"), py::arg("p"),
             py::arg("training"));
  module.def("bias_dropout_add", &bias_dropout_add, py::arg("x"), py::arg("bias"),
             py::arg("residual"), py::arg("p"), py::arg("training"));
  module.def("layer_norm", &layer_norm, py::arg("x"), py::arg("normalized_shape"),
             py::arg("weight"), py::arg("bias"), py::arg("eps"));
  module.def("rms_norm", &rms_norm, py::arg("x"), py::arg("normalized_shape"), py::arg("weight"),
             py::arg("eps"), py::arg("offset"));
  module.def("add_layer_norm", &add_layer_norm, py::arg("x"), py::arg("residual"),
             py::arg("normalized_shape"), py::arg("weight"), py::arg("bias"), py::arg("eps"));
  module.def("add_rms_norm", &add_rms_norm, py::arg("x"), py::arg("residual"),
             py::arg("normalized_shape"), py::arg("weight"), py::arg("eps"), py::arg("offset"));
  define_activations(module);
  define_gated(module, "swiglu", &torchkiln::swiglu);
  define_gated(module, "geglu", &torchkiln::geglu);
  define_gated(module, "geglu_tanh", &torchkiln::geglu_tanh);
  define_reduction<torchkiln::sum>(module, "sum");
  define_reduction<torchkiln::mean>(module, "mean");
  define_softmax(module, "softmax", &torchkiln::softmax);
  define_softmax(module, "log_softmax", &torchkiln::log_softmax);
  module.def("cross_entropy", &cross_entropy, py::arg("logits"), py::arg("target"),
             py::arg("weight"), py::arg("ignore_index"), py::arg("reduction"),
             py::arg("label_smoothing"), py::arg("z_loss"), py::arg("dtype"),
             py::arg("check_target"), py::arg("inplace_backward"));
  define_explain(module);
  module.def("spmm_csr", &spmm_csr, py::arg("values"), py::arg("b"), py::arg("crow"),
             py::arg("col"), py::arg("shape"), py::arg("transpose"), py::arg("check"));
}
