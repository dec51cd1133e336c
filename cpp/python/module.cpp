// The eager fast path: a Python call straight into the C++ dispatcher, half the host time of
// torch.ops.

#include <pybind11/pybind11.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <optional>
#include <string>
#include <vector>

#include "torchkiln/ops.h"

namespace py = pybind11;

namespace {

const at::Tensor& tensor(py::handle argument, const char* op, const char* name) {
  if (!THPVariable_Check(argument.ptr())) {
    throw py::type_error(std::string("torchkiln.") + op + ": " + name + ": got " +
                         Py_TYPE(argument.ptr())->tp_name + ", expected a torch.Tensor");
  }
  return THPVariable_Unpack(argument.ptr());
}

/// A tensor is no number here: its gradient would be lost without a word.
double number(py::handle argument, const char* op, const char* name) {
  const bool is_tensor = THPVariable_Check(argument.ptr());
  const double value = is_tensor ? 0.0 : PyFloat_AsDouble(argument.ptr());
  if (is_tensor || PyErr_Occurred()) {
    PyErr_Clear();
    throw py::type_error(std::string("torchkiln.") + op + ": " + name + ": got " +
                         Py_TYPE(argument.ptr())->tp_name + ", expected a number");
  }
  return value;
}

[[noreturn]] void refuse(py::handle argument, const char* op, const char* name,
                         const char* expected) {
  throw py::type_error(std::string("torchkiln.") + op + ": " + name + ": got " +
                       Py_TYPE(argument.ptr())->tp_name + ", expected " + expected);
}

bool flag(py::handle argument, const char* op, const char* name) {
  if (!PyBool_Check(argument.ptr())) refuse(argument, op, name, "a bool");
  return argument.ptr() == Py_True;
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

/// Runs an op without the interpreter's lock, and turns torch's errors into Python's.
template <class Op>
py::object call(const Op& op) {
  HANDLE_TH_ERRORS
  at::Tensor result;
  {
    const py::gil_scoped_release unlocked;
    result = op();
  }
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(result)));
  END_HANDLE_TH_ERRORS_PYBIND
}

py::object add(py::handle a, py::handle b) {
  const at::Tensor& left = tensor(a, "add", "a");
  const at::Tensor& right = tensor(b, "add", "b");
  return call([&] { return torchkiln::add(left, right); });
}

py::object scale_bias_relu(py::handle x, py::handle bias, py::handle scale) {
  const at::Tensor& input = tensor(x, "scale_bias_relu", "x");
  const at::Tensor& shift = tensor(bias, "scale_bias_relu", "bias");
  const double factor = number(scale, "scale_bias_relu", "scale");
  return call([&] { return torchkiln::scale_bias_relu(input, shift, factor); });
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

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.def("add", &add, py::arg("a"), py::arg("b"));
  module.def("scale_bias_relu", &scale_bias_relu, py::arg("x"), py::arg("bias"), py::arg("scale"));
  define_reduction<torchkiln::sum>(module, "sum");
  define_reduction<torchkiln::mean>(module, "mean");
}
