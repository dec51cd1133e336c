#pragma once

#include <cstdint>

#include "torchkiln/version.h"

/// Exports a symbol, for packages with operators of their own.
#define TORCHKILN_VISIBLE __attribute__((visibility("default")))

/// Exports a function of torchkiln. Its symbol contains the minor version, because its structs may
/// change with that. A program that was compiled for another minor version fails to link or to
/// start.
#define TORCHKILN_EXPORT __attribute__((visibility("default"), abi_tag(TORCHKILN_ABI)))

/// Prefix of error messages. A package with operators of its own defines its own name.
#ifndef TORCHKILN_PACKAGE
#define TORCHKILN_PACKAGE "torchkiln"
#endif

namespace torchkiln {

enum class StatusCode : int32_t {
  ok,
  unsupported,    // no kernel for these arguments or for this device
  out_of_memory,  // the CUDA runtime had too little memory
  launch_failed,  // another error of the CUDA runtime or the driver
};

/// The result of a launcher. Launchers never throw, because code without torch calls them, too.
struct [[nodiscard]] Status {
  /// Null if the call succeeded, else a string with static lifetime.
  const char* error = nullptr;
  /// An error without a code was reported by torchkiln itself: the call is not supported.
  StatusCode code = error == nullptr ? StatusCode::ok : StatusCode::unsupported;

  bool ok() const { return error == nullptr; }
};

}  // namespace torchkiln
