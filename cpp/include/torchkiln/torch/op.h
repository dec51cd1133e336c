#pragma once

// An op is a struct with its schema and a function for each purpose; define<Op>() registers it for
// the dispatcher's keys. An op on tensors and numbers:
//
//     struct Scale {
//       static constexpr const char* kSchema = "mine::scale(Tensor x, float factor=2.0) -> Tensor";
//       static Tensor meta(const Tensor& x, double factor);       // checks; uninitialised output
//       static Tensor kernel(const Tensor& x, double factor);     // checks and computes
//       static Tensor composite(const Tensor& x, double factor);  // computes with torch's ops
//       using BackwardOp = ScaleBackward;
//     };
//     TORCH_LIBRARY_FRAGMENT(mine, m) { define<ScaleBackward>(m), define<Scale>(m); }
//
// meta() is for Meta tensors and symbolic sizes. kernel() is registered for every device, so that
// its checks, not a missing entry, reject sparse tensors and other devices. composite() is for
// vmap, torch.func, forward mode and second derivatives.
//
// BackwardOp is an op that takes the incoming gradient, then the same arguments, and returns one
// gradient per tensor: "mine::scale_backward(Tensor grad, Tensor x, float factor) -> Tensor". All
// tensor arguments are saved for it. An op that saves others defines recorded() instead:
//
//       static Tensor recorded(const Below& below, const Tensor& x, double factor);
//
// It computes the op by below.call<Op>(...) and ends with record(), see autograd.h. Optional
// members:
//
//       static Tensor batched(...);                         // for vmap instead of composite()
//       static Tensor autocast(const Autocast& cast, ...);  // calls the op with cast(x), ...
//       static constexpr bool kRandom = true;               // the op draws random numbers
//       static constexpr bool kFlexibleLayout = true;
//           // compilers may choose the strides of all arguments; the strides of the results must
//           // not depend on them, nor may the meaning of other values, such as packed bits
//       static constexpr bool kTakesNumbers = true;         // tensors may be wrapped numbers
//       static constexpr std::array<size_t, 2> kPromotedBy{0, 1};
//           // if these arguments have two floating dtypes, all tensors are cast to the wider one
//       static constexpr std::array<size_t, 2> kReadsMixed{0, 1};
//           // except these, if the dtypes are float32 and half precision: the kernels read both
//       static std::optional<Tensor> rewritten(...);        // the result, if other ops compute it
//       static constexpr const char* kName = "scale";       // in errors, for an op such as
//                                                           // scale_out
//
// A parameter may be an option struct, which stands for several arguments of the schema: see
// options.h.

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <array>
#include <utility>
#include <vector>

#include "torchkiln/torch/autograd.h"
#include "torchkiln/torch/call.h"
#include "torchkiln/torch/checks.h"
#include "torchkiln/torch/entry.h"
#include "torchkiln/torch/note.h"

namespace torchkiln {

/// Registers an op in a library: TORCH_LIBRARY_FRAGMENT(mine, m) { define<Scale>(m); }
template <class Op>
void define(torch::Library& m) {
  using Key = c10::DispatchKey;
  std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  if (detail::kHas<detail::RandomOf, Op>) tags.push_back(at::Tag::nondeterministic_seeded);
  if (detail::kHas<detail::FlexibleLayoutOf, Op>) tags.push_back(at::Tag::flexible_layout);
  m.def(Op::kSchema, std::as_const(tags));
  const auto implement = [&](Key key, auto function) {
    m.impl(name_of_op<Op>(), torch::dispatch(key, function));
  };
  using Kernel = detail::Entry<Op, Op::kernel>;
  implement(Key::CompositeExplicitAutograd, TORCH_FN(Kernel::call));
  if constexpr (Kernel::kHasCFunction)
    add_c_function(full_name_of_op<Op>().c_str(), Kernel::c_function());
  using Meta = detail::Entry<Op, Op::meta>;
  implement(Key::Meta, TORCH_FN(Meta::call));
  if constexpr (detail::kHas<detail::RecordedOf, Op> || detail::kHas<detail::BackwardOf, Op>)
    implement(Key::Autograd, TORCH_FN(Kernel::autograd));
  if constexpr (Kernel::kIsInPlace) implement(Key::ADInplaceOrView, TORCH_FN(Kernel::in_place));
  if constexpr (detail::kHas<detail::BatchedOf, Op>) {
    using Batched = detail::Entry<Op, Op::batched>;
    implement(Key::FuncTorchBatched, TORCH_FN(Batched::call));
  } else if constexpr (detail::kHas<detail::CompositeOf, Op>) {
    using Composite = detail::Entry<Op, Op::composite>;
    implement(Key::FuncTorchBatched, TORCH_FN(Composite::call));
  }
  if constexpr (detail::kHas<detail::AutocastOf, Op>) {
    implement(Key::AutocastCPU, TORCH_FN(Kernel::template autocast<at::kCPU>));
    implement(Key::AutocastCUDA, TORCH_FN(Kernel::template autocast<at::kCUDA>));
  }
}

template <class First, class Second, class... More>
void define(torch::Library& m) {
  define<First>(m);
  define<Second, More...>(m);
}

}  // namespace torchkiln
