#pragma once

// Conversion of Python objects to the argument types of C++ functions. Errors name the op, the
// argument, the type that was passed and the type that was expected, as in checks.h.

#include <ATen/ScalarOps.h>
#include <ATen/core/Tensor.h>
#include <c10/util/MaybeOwned.h>
#include <c10/util/OptionalArrayRef.h>
#include <c10/util/SmallVector.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/utils/python_symnode.h>

#include <optional>
#include <string_view>

#include "torchkiln/core/status.h"

namespace torchkiln {

/// A tensor, or a number wrapped as a tensor, as torch wraps it: such a number does not take part
/// in dtype promotion. Tensors are borrowed, because a second reference to a tensor that Python
/// owns takes the GIL (0.1 us).
struct TensorOrNumber {
  c10::MaybeOwned<at::Tensor> tensor;
};

namespace bind_detail {

/// An argument of a call. `op` and `name` are for error messages.
struct Argument {
  const char* op;
  const char* name;
  PyObject* value;
};

[[noreturn]] inline void refuse(const Argument& argument, const char* expected) {
  TORCH_CHECK_TYPE(false, TORCHKILN_PACKAGE ".", argument.op, ": ", argument.name, ": got ",
                   Py_TYPE(argument.value)->tp_name, ", expected ", expected);
}

/// Throws the error that an argument's own __index__ or __float__ raised.
inline void raise_python_error() {
  if (PyErr_Occurred() != nullptr) throw python_error();
}

inline const at::Tensor& read_tensor(const Argument& argument) {
  if (!THPVariable_Check(argument.value)) refuse(argument, "a torch.Tensor");
  return THPVariable_Unpack(argument.value);
}

/// Whether an argument is an integer. A tensor is not: its conversion to a number would silently
/// drop the gradient.
inline bool is_integer(PyObject* value) {
  return PyLong_CheckExact(value) ||
         (PyIndex_Check(value) && !PyBool_Check(value) && !THPVariable_Check(value));
}

/// Reads an integer. Beyond 64 bits it is clamped to 64 bits; the op's range check then rejects it.
inline int64_t read_integer(const Argument& argument, const char* expected = "an int") {
  if (!is_integer(argument.value)) refuse(argument, expected);
  const int64_t value = PyNumber_AsSsize_t(argument.value, nullptr);
  if (value == -1) raise_python_error();
  return value;
}

inline double read_number(const Argument& argument, const char* expected = "a number") {
  const PyNumberMethods* methods = Py_TYPE(argument.value)->tp_as_number;
  const bool is_number = methods != nullptr &&
                         (methods->nb_float != nullptr || methods->nb_index != nullptr) &&
                         !THPVariable_Check(argument.value);
  if (!is_number) refuse(argument, expected);
  const double value = PyFloat_AsDouble(argument.value);
  if (value == -1.0) raise_python_error();
  return value;
}

/// Reads a tensor or a number, which may be a NumPy scalar. NumPy's arrays have numeric methods,
/// too, but are sequences and therefore rejected.
inline TensorOrNumber read_tensor_or_number(const Argument& argument) {
  PyObject* const value = argument.value;
  const auto wrapped = [](auto number) -> TensorOrNumber {
    return {c10::MaybeOwned<at::Tensor>::owned(at::native::wrapped_scalar_tensor(number))};
  };
  // Floats are tested before tensor subclasses, because the test for those is slow.
  if (!THPVariable_CheckExact(value) && PyFloat_Check(value))
    return wrapped(PyFloat_AS_DOUBLE(value));
  if (THPVariable_Check(value))
    return {c10::MaybeOwned<at::Tensor>::borrowed(THPVariable_Unpack(value))};
  if (PyBool_Check(value)) return wrapped(value == Py_True);
  if (PyLong_Check(value)) {
    const int64_t number = PyLong_AsLongLong(value);
    if (number == -1) raise_python_error();
    return wrapped(number);
  }
  if (PySequence_Check(value)) refuse(argument, "a torch.Tensor or a number");
  if (is_integer(value)) return wrapped(read_integer(argument));
  return wrapped(read_number(argument, "a torch.Tensor or a number"));
}

inline bool read_flag(const Argument& argument) {
  if (!PyBool_Check(argument.value)) refuse(argument, "a bool");
  return argument.value == Py_True;
}

inline std::string_view read_word(const Argument& argument) {
  if (!PyUnicode_Check(argument.value)) refuse(argument, "a str");
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(argument.value, &size);
  if (text == nullptr) throw python_error();
  return {text, static_cast<size_t>(size)};
}

inline at::ScalarType read_dtype(const Argument& argument) {
  if (!THPDtype_Check(argument.value)) refuse(argument, "a torch.dtype or None");
  return reinterpret_cast<THPDtype*>(argument.value)->scalar_type;
}

/// Calls body(Argument) for each item of a tuple or list, or once for a single value.
template <class Body>
void for_each_item(const Argument& argument, const Body& body) {
  if (!PyTuple_Check(argument.value) && !PyList_Check(argument.value)) return body(argument);
  // A list is copied, because an __index__ or another thread may change it.
  const auto items = PyList_Check(argument.value)
                         ? py::reinterpret_steal<py::tuple>(PyList_AsTuple(argument.value))
                         : py::reinterpret_borrow<py::tuple>(argument.value);
  if (!items) throw python_error();
  for (const py::handle item : items) body(Argument{argument.op, argument.name, item.ptr()});
}

struct Dims {
  std::optional<c10::SmallVector<int64_t, 8>> values;
  operator at::OptionalIntArrayRef() const {
    return values ? at::OptionalIntArrayRef(*values) : std::nullopt;
  }
};

inline Dims read_dims(const Argument& argument) {
  if (argument.value == Py_None) return {};
  Dims dims;
  dims.values.emplace();
  for_each_item(argument, [&](const Argument& item) {
    dims.values->push_back(read_integer(item, "an int, a tuple of ints or None"));
  });
  return dims;
}

struct Sizes {
  c10::SmallVector<c10::SymInt, 4> values;
  operator c10::SymIntArrayRef() const { return values; }
};

/// An optional list of sizes. It has no conversion to a plain list: an assignment to an
/// OptionalSymIntArrayRef would prefer that one.
struct MaybeSizes {
  std::optional<Sizes> sizes;
  operator at::OptionalSymIntArrayRef() const {
    return sizes ? at::OptionalSymIntArrayRef(sizes->values) : std::nullopt;
  }
};

inline Sizes read_sizes(const Argument& argument) {
  Sizes sizes;
  for_each_item(argument, [&](const Argument& item) {
    if (torch::is_symint(item.value)) {
      sizes.values.push_back(py::cast<c10::SymInt>(py::handle(item.value)));
    } else {
      sizes.values.emplace_back(read_integer(item, "an int or a sequence of ints"));
    }
  });
  return sizes;
}

/// Read<T>::from(argument) converts to the C++ type T, or to a type that converts to T.
template <class T>
struct Read;
template <>
struct Read<at::Tensor> {
  static const at::Tensor& from(const Argument& argument) { return read_tensor(argument); }
};
template <>
struct Read<TensorOrNumber> {
  static TensorOrNumber from(const Argument& argument) { return read_tensor_or_number(argument); }
};
template <>
struct Read<double> {
  static double from(const Argument& argument) { return read_number(argument); }
};
template <>
struct Read<int64_t> {
  static int64_t from(const Argument& argument) { return read_integer(argument); }
};
template <>
struct Read<bool> {
  static bool from(const Argument& argument) { return read_flag(argument); }
};
template <>
struct Read<std::string_view> {
  static std::string_view from(const Argument& argument) { return read_word(argument); }
};
template <>
struct Read<at::ScalarType> {
  static at::ScalarType from(const Argument& argument) { return read_dtype(argument); }
};
template <>
struct Read<at::OptionalIntArrayRef> {
  static Dims from(const Argument& argument) { return read_dims(argument); }
};
template <>
struct Read<c10::SymIntArrayRef> {
  static Sizes from(const Argument& argument) { return read_sizes(argument); }
};
template <>
struct Read<at::OptionalSymIntArrayRef> {
  static MaybeSizes from(const Argument& argument) {
    if (argument.value == Py_None) return {};
    return {read_sizes(argument)};
  }
};
template <class T>
struct Read<std::optional<T>> {
  static std::optional<T> from(const Argument& argument) {
    if (argument.value == Py_None) return std::nullopt;
    return Read<T>::from(argument);
  }
};

}  // namespace bind_detail
}  // namespace torchkiln
