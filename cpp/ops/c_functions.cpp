// The registry of C functions of ops, by the name of the op, for models that AOTInductor compiled.
// define() in torchkiln/torch/op.h adds a function for each op whose argument types exist in C.

#include "torchkiln/torch/c_function.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <map>
#include <mutex>
#include <string>

namespace torchkiln {
namespace {

/// C functions by the name of their op. A library adds its own while it is loaded.
class CFunctions {
 public:
  void add(const char* op, void* function) {
    const std::lock_guard<std::mutex> lock(mutex_);
    functions_[op] = function;
  }

  /// The function of an op; null if no such op is loaded.
  void* find(const std::string& op) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = functions_.find(op);
    return found == functions_.end() ? nullptr : found->second;
  }

  std::vector<std::string> names() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::string> all;
    for (const auto& [name, function] : functions_) all.push_back(name);
    return all;
  }

 private:
  mutable std::mutex mutex_;
  std::map<std::string, void*> functions_;
};

CFunctions& c_functions() {
  static CFunctions all;
  return all;
}

}  // namespace

void add_c_function(const char* op, void* function) { c_functions().add(op, function); }

std::vector<std::string> ops_with_c_function() { return c_functions().names(); }

}  // namespace torchkiln

void* torchkiln_c_function_v1(const char* schema) {
  const std::string name = std::string(schema).substr(0, std::string_view(schema).find('('));
  void* const function = torchkiln::c_functions().find(name);
  TORCH_CHECK(function != nullptr, "torchkiln: found no op ", name,
              ", which this model calls: load the library that has it before the model");
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "");
  const std::string here = toString(op.schema());
  TORCH_CHECK(here == schema, "torchkiln: this model was compiled for\n  ", schema,
              "\nbut the op that is loaded is\n  ", here,
              "\nCompile the model again with this version, or load the other one");
  return function;
}
