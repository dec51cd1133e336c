// Detects changes of tensors. A copy of parameters that is kept from call to call, such as a batch
// norm folded into a convolution, is compared with its parameters in each call. In Python the check
// would take 2 us.

#include "watch.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

#include <optional>
#include <vector>

#include "torchkiln/torch/written.h"

namespace py = pybind11;

namespace {

/// A tensor, and its state when the copy was made. A weak reference to the storage prevents its
/// address from being reused. A weak reference to the tensor itself would make
/// torch.utils.swap_tensors fail.
struct Source {
  explicit Source(const at::Tensor& from)
      : tensor(from.unsafeGetTensorImpl()),
        storage(from.storage().unsafeGetStorageImpl()),
        storage_reference(from.storage().getWeakStorageImpl()),
        data(from.const_data_ptr()),
        dtype(from.scalar_type()),
        sizes(from.sizes().vec()),
        strides(from.strides().vec()),
        version(from._version()),
        silent_changes(torchkiln::silent_changes(from)) {}

  bool is(const at::Tensor& now) const {
    return now.unsafeGetTensorImpl() == tensor && now.has_storage() &&
           now.storage().unsafeGetStorageImpl() == storage && now._version() == version &&
           torchkiln::silent_changes(now) == silent_changes && now.const_data_ptr() == data &&
           now.scalar_type() == dtype && now.sizes() == sizes && now.strides() == strides;
  }

  const c10::TensorImpl* tensor;
  const c10::StorageImpl* storage;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage_reference;
  const void* data;
  at::ScalarType dtype;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  int64_t version;
  uint32_t silent_changes;
};

class Watch {
 public:
  explicit Watch(const py::tuple& tensors) {
    for (const py::handle tensor : tensors) {
      if (tensor.is_none()) {
        sources_.emplace_back(std::nullopt);
      } else {
        sources_.emplace_back(THPVariable_Unpack(tensor.ptr()));
      }
    }
  }

  /// Whether these are the same tensors in the same memory, without a change that torch or a batch
  /// norm counts.
  bool is_current(const py::tuple& tensors) const {
    if (tensors.size() != sources_.size()) return false;
    for (size_t i = 0; i < sources_.size(); i++) {
      PyObject* const tensor = PyTuple_GET_ITEM(tensors.ptr(), i);
      const std::optional<Source>& source = sources_[i];
      if (tensor == Py_None ? source.has_value()
                            : !source || !THPVariable_CheckExact(tensor) ||
                                  !source->is(THPVariable_Unpack(tensor)))
        return false;
    }
    return true;
  }

 private:
  std::vector<std::optional<Source>> sources_;
};

/// Whether a call with these tensors records gradients. Objects that are not tensors are ignored.
bool needs_gradient(const py::tuple& tensors) {
  if (!at::GradMode::is_enabled()) return false;
  for (const py::handle each : tensors)
    if (THPVariable_Check(each.ptr()) && THPVariable_Unpack(each.ptr()).requires_grad())
      return true;
  return false;
}

}  // namespace

void bind_watch(py::module_& module) {
  py::class_<Watch>(module, "Watch")
      .def(py::init<const py::tuple&>())
      .def("is_current", &Watch::is_current);
  module.def("needs_gradient", &needs_gradient);
}
