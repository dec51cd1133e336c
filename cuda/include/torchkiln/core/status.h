#pragma once

#define TORCHKILN_EXPORT __attribute__((visibility("default")))

/// What messages begin with; a package with operators of its own defines its name.
#ifndef TORCHKILN_PACKAGE
#define TORCHKILN_PACKAGE "torchkiln"
#endif

namespace torchkiln {

/// What a launcher returns. Launchers never throw: they are called from code without torch, too.
struct [[nodiscard]] Status {
  /// Null when the call succeeded, else a string with static lifetime.
  const char* error = nullptr;

  bool ok() const { return error == nullptr; }
};

}  // namespace torchkiln
