#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace torchkiln {

/// A registered op, of the signature that its schema says.
template <class Signature>
auto find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

/// Whether a functorch transform (grad, jvp, vmap ...) is being run, or an input carries a tangent
/// of forward-mode differentiation. A C++ autograd::Function serves neither: the op then takes its
/// decomposition into torch's ops.
template <class... Tensors>
bool is_transformed(const Tensors&... tensors) {
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerBackMode) ||
         (tensors._fw_grad(/*level=*/0).defined() || ...);
}

/// Whether the call is to be recorded for backward. What is no tensor goes on to the op's checks.
template <class... Tensors>
bool needs_gradient(const Tensors&... tensors) {
  return at::GradMode::is_enabled() && (tensors.defined() && ...) &&
         (tensors.requires_grad() || ...);
}

}  // namespace torchkiln
