// Records the events of a call: the dispatcher's ops, which torch's observers report, and the
// launches and notes that torchkiln reports. A recording is a flat list of events, which Python
// reads.

#include "trace.h"

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <cxxabi.h>
#include <pybind11/stl.h>

#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "torchkiln/core/trace.h"
#include "torchkiln/torch/checks.h"
#include "torchkiln/torch/note.h"

namespace py = pybind11;

namespace {

constexpr const char* kEnter = "enter";
constexpr const char* kLeave = "leave";

struct Seen {
  std::string device;
  std::string dtype;
  const void* memory;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
};

struct Event {
  const char* kind;
  uint64_t thread;
  std::string text;
  std::string detail;
  std::vector<int64_t> figures;
  std::vector<Seen> tensors;
};

void see(const c10::IValue& value, std::vector<Seen>& into) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined() || tensor.layout() != at::kStrided ||
        tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides())
      return;
    into.push_back({tensor.device().str(), torchkiln::dtype_name(tensor.scalar_type()),
                    tensor.has_storage() ? tensor.storage().data() : nullptr, tensor.sizes().vec(),
                    tensor.strides().vec()});
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) see(tensor, into);
  }
}

std::string demangled(const char* name) {
  if (name == nullptr) return {};
  int failed = 0;
  const std::unique_ptr<char, void (*)(void*)> words(
      abi::__cxa_demangle(name, nullptr, nullptr, &failed), std::free);
  return failed == 0 ? words.get() : name;
}

class Recording final : public torchkiln::trace::Listener {
 public:
  void launched(const torchkiln::trace::GpuLaunch& launch) override {
    const auto& [kernel, blocks, threads, cluster, dynamic_shared, static_shared, registers, local,
                 resident, multiprocessors, most_threads] = launch;
    add({"launch",
         thread(),
         demangled(kernel),
         {},
         {blocks[0], blocks[1], blocks[2], threads[0], threads[1], threads[2], cluster,
          dynamic_shared, static_shared, registers, local, resident, multiprocessors, most_threads},
         {}});
  }

  void ran(const char* kernel, const char* instruction_set) override {
    add({"ran", thread(), kernel, instruction_set, {}, {}});
  }

  void noted(const char* words) override { add({"note", thread(), words, {}, {}, {}}); }

  void op(const char* kind, const at::RecordFunction& function) {
    const auto name = function.operator_name();
    Event event{kind, thread(), function.name(), name ? name->overload_name : "", {}, {}};
    const auto see_all = [&](const auto& values) {
      for (const c10::IValue& value : values) see(value, event.tensors);
    };
    if (kind == kEnter) {
      see_all(function.inputs());
    } else {
      see_all(function.outputs());
    }
    add(std::move(event));
  }

  std::vector<Event> take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(events_, {});
  }

 private:
  static uint64_t thread() { return at::RecordFunction::currentThreadId(); }

  void add(Event event) {
    const std::lock_guard<std::mutex> lock(mutex_);
    events_.push_back(std::move(event));
  }

  std::mutex mutex_;
  std::vector<Event> events_;
};

/// The recorder. It is never destroyed, because a thread may be about to call it when a recording
/// ends.
Recording& recording() {
  static auto* one = new Recording;
  return *one;
}

std::unique_ptr<at::ObserverContext> enter(const at::RecordFunction& function) {
  recording().op(kEnter, function);
  return nullptr;
}

void leave(const at::RecordFunction& function, at::ObserverContext*) {
  recording().op(kLeave, function);
}

std::mutex starting;
at::CallbackHandle handle = at::INVALID_CALLBACK_HANDLE;

void start() {
  const std::lock_guard<std::mutex> lock(starting);  // without a GIL, two threads may start at once
  TORCH_CHECK(handle == at::INVALID_CALLBACK_HANDLE,
              "torchkiln.explain: got a call inside another explain(), expected one at a time");
  recording().take();
  handle = at::addThreadLocalCallback(at::RecordFunctionCallback(&enter, &leave)
                                          .needsInputs(true)
                                          .needsOutputs(true)
                                          .scopes({at::RecordScope::FUNCTION}));
  torchkiln::trace::listen(&recording());
}

py::list stop() {
  torchkiln::trace::listen(nullptr);
  if (handle != at::INVALID_CALLBACK_HANDLE) at::removeCallback(handle);
  handle = at::INVALID_CALLBACK_HANDLE;
  py::list found;
  for (const Event& event : recording().take()) {
    py::list tensors;
    for (const Seen& seen : event.tensors)
      tensors.append(
          py::make_tuple(seen.device, seen.dtype, reinterpret_cast<uintptr_t>(seen.memory),
                         py::tuple(py::cast(seen.sizes)), py::tuple(py::cast(seen.strides))));
    found.append(py::make_tuple(event.kind, event.thread, event.text, event.detail,
                                py::tuple(py::cast(event.figures)), tensors));
  }
  return found;
}

}  // namespace

void bind_trace(py::module_& module) {
  module.def("start_recording", &start);
  module.def("stop_recording", &stop);
  module.def("note", &torchkiln::trace::note<const char*>);
}
