#pragma once

// Binds C++ functions of ops to Python. A call takes positional arguments, checks their types and
// calls the dispatcher, in half the host time of torch.ops.
//
//     PYBIND11_MODULE(_C, module) {
//       const torchkiln::Binder ops(module);
//       ops.bind<&mine::scale>("scale");  // Tensor scale(const Tensor& x, double factor)
//     }
//
// Parameters are the arguments of the schema, in its order; an option struct stands for its fields
// (options.h). A call with an object that has a __torch_function__, or under a torch-function mode,
// goes through torch.ops.<package>.<op>.default.

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <array>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "torchkiln/core/status.h"
#include "torchkiln/torch/arguments.h"
#include "torchkiln/torch/options.h"

namespace torchkiln {

namespace bind_detail {

inline PyObject* wrap(at::Tensor&& result) { return THPVariable_Wrap(std::move(result)); }

template <class... Tensors>
PyObject* wrap(std::tuple<Tensors...>&& results) {
  return std::apply(
      [](auto&... each) {
        return py::make_tuple(py::reinterpret_steal<py::object>(wrap(std::move(each)))...)
            .release()
            .ptr();
      },
      results);
}

/// Whether objects of this class are plain values without a __torch_function__.
inline bool is_plain_type(PyTypeObject* type) {
  return THPVariable_CheckTypeExact(type) || type == Py_TYPE(Py_None) || type == &PyFloat_Type ||
         type == &PyBool_Type || type == &PyLong_Type || type == &PyUnicode_Type ||
         type == &PyTuple_Type || type == &PyList_Type;
}

/// Whether the class of this argument has a __torch_function__, which must be called. Tensor
/// subclasses, torch.fx.Proxy and other classes may have one.
inline bool is_overridden(PyObject* argument) {
  PyTypeObject* const type = Py_TYPE(argument);
  if (is_plain_type(type)) return false;
  static PyObject* const name = PyUnicode_InternFromString("__torch_function__");
  // Looks the attribute up without creating an AttributeError. The result is borrowed and must not
  // be read: without a GIL another thread may free it.
  return _PyType_Lookup(type, name) != nullptr;
}

/// Converts an argument to a form that torch.ops accepts: if the schema has a tensor or a list, a
/// number becomes one.
inline py::object as_schema(const Argument& argument, const c10::Type& type) {
  const auto value = py::reinterpret_borrow<py::object>(argument.value);
  if (is_overridden(argument.value)) return value;
  if (type.kind() == c10::TypeKind::TensorType && PyNumber_Check(argument.value) &&
      !THPVariable_Check(argument.value))
    return py::reinterpret_steal<py::object>(
        wrap(at::Tensor(*read_tensor_or_number(argument).tensor)));
  if (type.kind() == c10::TypeKind::ListType &&
      (is_integer(argument.value) || torch::is_symint(argument.value)))
    return py::make_tuple(value);
  return value;
}

inline const c10::FunctionSchema& schema_of(const char* name) {
  const std::string qualified = std::string(TORCHKILN_PACKAGE "::") + name;
  return c10::Dispatcher::singleton().findSchemaOrThrow(qualified.c_str(), "").schema();
}

/// Calls torch.ops, which dispatches to __torch_function__ and to modes.
inline PyObject* call_by_schema(const char* name, PyObject* const* given) {
  py::list positional;
  py::dict named;
  for (const c10::Argument& argument : schema_of(name).arguments()) {
    const py::object value = as_schema({name, argument.name().c_str(), *given++}, *argument.type());
    if (argument.kwarg_only()) {
      named[argument.name().c_str()] = value;
    } else {
      positional.append(value);
    }
  }
  const py::object ops = py::module_::import("torch").attr("ops").attr(TORCHKILN_PACKAGE);
  return ops.attr(name).attr("default")(*positional, **named).release().ptr();
}

/// Returns the name of the op to call; `given` has the arguments in the order of the schema.
using NameOf = const char*(PyObject* const* given);

/// Converts the results of the op to the value that the call returns. Takes over the reference to
/// `results`.
using Finish = PyObject*(PyObject* results, PyObject* const* given);

template <class Function>
struct Called;
template <class R, class... Args>
struct Called<R (*)(Args...)> {
  using Values = detail::Flat<Args...>;

  /// Calls the function with values that were read from Python.
  template <auto function, class Read>
  static std::decay_t<R> call(const Read& values) {
    const auto run = [](auto&&... args) -> R { return function(args...); };
    return detail::Parameters<Args...>::apply(run, values, detail::AsGiven{});
  }
};

template <auto op>
struct Entry {
  using Function = Called<decltype(+op)>;
  using Values = typename Function::Values;
  static constexpr size_t kCount = std::tuple_size_v<Values>;

  template <size_t i>
  using ReadAt = Read<std::decay_t<std::tuple_element_t<i, Values>>>;

  static inline NameOf* name_of;
  static inline Finish* finish;
  static inline const char* name;
  static inline const char* public_name;
  static inline std::array<std::string, kCount> names;
  static inline std::string doc;
  static inline PyMethodDef method;

  template <size_t... I>
  static PyObject* run(std::index_sequence<I...>, PyObject* const* given) {
    if (at::impl::torch_function_mode_enabled() || (is_overridden(given[I]) || ...))
      return call_by_schema(name_of == nullptr ? name : name_of(given), given);
    // Braces guarantee evaluation in order, so that the error names the first bad argument.
    const std::tuple<decltype(ReadAt<I>::from({}))...> values{
        ReadAt<I>::from({public_name, names[I].c_str(), given[I]})...};
    const auto unlocked = [&] {
      const py::gil_scoped_release release;
      return Function::template call<op>(values);
    };
    return wrap(unlocked());
  }

  static PyObject* call(PyObject*, PyObject* const* given, Py_ssize_t given_count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(given_count == Py_ssize_t{kCount}, TORCHKILN_PACKAGE ".", public_name,
                     ": got ", given_count, " arguments, expected ", kCount, ": ", doc);
    PyObject* const results = run(std::make_index_sequence<kCount>(), given);
    return finish == nullptr ? results : finish(results, given);
    END_HANDLE_TH_ERRORS
  }
};

}  // namespace bind_detail

class __attribute__((visibility("hidden"))) Binder {
 public:
  explicit Binder(py::module_& module) : module_(module) {}

  /// Binds a C++ function under the name of its op, whose schema names the arguments. Bind each
  /// function once. `public_name`: in error messages, the function that users call, if its name is
  /// not that of the op. `name_of` selects one of several ops with the same arguments; `finish`
  /// changes the results.
  template <auto op>
  void bind(const char* name, const char* public_name = nullptr,
            bind_detail::NameOf* name_of = nullptr, bind_detail::Finish* finish = nullptr) const {
    using Entry = bind_detail::Entry<op>;
    Entry::name = name;
    Entry::name_of = name_of;
    Entry::finish = finish;
    Entry::public_name = public_name == nullptr ? name : public_name;
    const auto& arguments = bind_detail::schema_of(name).arguments();
    TORCH_CHECK(arguments.size() == Entry::kCount, "Binder: ", name, ": got a function of ",
                Entry::kCount, " arguments, expected ", arguments.size(), ", those of the schema");
    Entry::doc = std::string(name) + "(";
    for (size_t i = 0; i < Entry::kCount; ++i) {
      Entry::names[i] = arguments[i].name();
      Entry::doc += (i == 0 ? "" : ", ") + Entry::names[i];
    }
    Entry::doc += ")";
    const auto call = reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&Entry::call));
    Entry::method = {name, call, METH_FASTCALL, Entry::doc.c_str()};
    module_.attr(name) = py::reinterpret_steal<py::object>(
        PyCFunction_NewEx(&Entry::method, nullptr, module_.attr("__name__").ptr()));
  }

 private:
  py::module_& module_;
};

}  // namespace torchkiln
