#pragma once

// Checks of inplace_backward: whether the gradient may overwrite the logits, and whether the logits
// are unchanged since forward.

#include <ATen/ATen.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include "cross_entropy/options.h"
#include "detail/rows_view.h"

namespace torchkiln::cross_entropy_ops {

inline constexpr const char* kName = "cross_entropy";

/// Whether a tensor's memory may be written directly. A trace, a transform or a tensor subclass
/// would not see such a write.
inline bool is_plain(const at::Tensor& tensor) {
  using Key = c10::DispatchKey;
  constexpr c10::DispatchKeySet kWrapped{Key::Python, Key::Functionalize, Key::Batched,
                                         Key::FuncTorchBatched, Key::FuncTorchGradWrapper};
  return (tensor.is_cpu() || tensor.is_cuda()) && !tensor.key_set().has_any(kWrapped) &&
         !c10::impl::TorchDispatchModeTLS::any_modes_set();
}

/// Rejects logits that share the memory of a leaf, as torch's in-place operations do.
inline void check_is_no_leaf(const at::Tensor& logits) {
  const bool is_view = logits.is_view() && logits._base().requires_grad();
  TORCH_CHECK(
      !logits.is_leaf() && !(is_view && logits._base().is_leaf()), "torchkiln.", kName,
      ": inplace_backward: got logits that are a leaf, or a view of a leaf, that requires a "
      "gradient, expected the result of an operation: the gradient would overwrite the "
      "leaf; leave inplace_backward out");
}

inline void check_overwritable(const at::Tensor& logits) {
  if (!is_plain(logits)) return;
  if (logits.requires_grad()) check_is_no_leaf(logits);
  if (logits.numel() == 0) return;
  const at::Tensor last = classes_last(logits);
  const auto rows = rows_without_copy(last);
  TORCH_CHECK(rows && ((*rows)->size(0) == 1 || (*rows)->stride(0) >= (*rows)->size(1)),
              "torchkiln.", kName, ": inplace_backward: got logits of shape ", logits.sizes(),
              " and strides ", logits.strides(),
              ", expected rows of adjacent classes that do not overlap, for the gradient to be "
              "written over them; call .contiguous() first, or leave inplace_backward out");
}

/// A weak reference to the memory of the logits, and the version of the logits in forward. Autograd
/// compares the versions of the tensors that it saves, except if a hook packs and unpacks them, as
/// torch.autograd.graph.save_on_cpu does. The unpacked tensor may then still be the logits.
class Version {
 public:
  explicit Version(const at::Tensor& logits)
      : storage_(logits.storage().getWeakStorageImpl()),
        counter_(logits.unsafeGetTensorImpl()->version_counter()),
        saved_(counter_.current_version()) {}

  void check(const at::Tensor& unpacked) const {
    TORCH_CHECK(!is_of(unpacked) || counter_.current_version() == saved_, "torchkiln.", kName,
                ": inplace_backward: got logits that have been modified by an inplace operation, "
                "expected the values of the forward: an earlier backward may have written the "
                "gradient over them; compute the loss again, or leave inplace_backward out");
  }
  void increment(const at::Tensor& written) {
    if (is_of(written)) counter_.bump();
  }

 private:
  bool is_of(const at::Tensor& tensor) const {
    return storage_._unsafe_get_target() == tensor.storage().unsafeGetStorageImpl();
  }

  c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
  c10::VariableVersion counter_;
  uint32_t saved_;
};

}  // namespace torchkiln::cross_entropy_ops
