#pragma once

#define TORCHKILN_EXPORT __attribute__((visibility("default")))

/// Prefix of error messages. A package with operators of its own defines its own name.
#ifndef TORCHKILN_PACKAGE
#define TORCHKILN_PACKAGE "torchkiln"
#endif

namespace torchkiln {

/// The result of a launcher. Launchers never throw, because code without torch calls them, too.
struct [[nodiscard]] Status {
  /// Null if the call succeeded, else a string with static lifetime.
  const char* error = nullptr;

  bool ok() const { return error == nullptr; }
};

}  // namespace torchkiln
