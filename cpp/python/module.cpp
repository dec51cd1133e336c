// The eager fast path: a Python call straight into the C++ dispatcher, half the host time of
// torch.ops.

#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <string>

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

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.def("add", &add, py::arg("a"), py::arg("b"));
  module.def("scale_bias_relu", &scale_bias_relu, py::arg("x"), py::arg("bias"), py::arg("scale"));
}
