#pragma once

// Calls of ops from C++: through the dispatcher, or the kernel directly if no mode, subclass or
// transform is in between.

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include "torchkiln/torch/autograd.h"
#include "torchkiln/torch/options.h"

namespace torchkiln {

/// A registered op. Signature is the C++ signature of its schema.
template <class Signature>
auto find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

/// The name of an op without its namespace.
template <class Op>
const char* name_of_op() {
  static const std::string name = [] {
    const std::string_view schema = Op::kSchema;
    const size_t begin = schema.find("::") + 2;
    return std::string(schema.substr(begin, schema.find('(') - begin));
  }();
  return name.c_str();
}

/// The name of an op with its namespace.
template <class Op>
std::string full_name_of_op() {
  const std::string_view schema = Op::kSchema;
  return std::string(schema.substr(0, schema.find('(')));
}

namespace detail {

/// An argument, converted to its type in the op's schema.
template <class V>
decltype(auto) write(V&& value) {
  if constexpr (kIsConverted<V>) {
    return InSchema<std::decay_t<V>>::write(value);
  } else {
    return std::forward<V>(value);
  }
}

template <class Function>
struct Signature;
template <class R, class... Args>
struct Signature<R (*)(Args...)> {
  template <class Values>
  struct Typed;
  template <class... Values>
  struct Typed<std::tuple<Values...>> {
    using Type = R(Values...);
  };
  using Schema = typename Typed<Flat<Args...>>::Type;

  /// References to the arguments of the schema.
  template <class... Values>
  static auto flat(Values&&... values) {
    if constexpr (sizeof...(Values) == sizeof...(Args)) {
      return std::tuple_cat(flat_of<Args>(std::forward<Values>(values))...);
    } else {
      return std::tuple_cat(flat_of<Values>(std::forward<Values>(values))...);
    }
  }
  template <class Function, class... Values>
  static decltype(auto) call(const Function& function, Values&&... values) {
    if constexpr (sizeof...(Values) == sizeof...(Args)) {
      return function(as_parameter<Args>(std::forward<Values>(values))...);
    } else {
      const auto all = flat(std::forward<Values>(values)...);
      return Parameters<Args...>::apply(function, all, AsGiven{});
    }
  }
};
template <class Op>
using SignatureOf = Signature<std::decay_t<decltype(Op::kernel)>>;

/// Calls an op through the dispatcher with the arguments of its schema.
template <class Op, class... Values>
decltype(auto) call_flat(Values&&... values) {
  static const auto handle =
      find_op<typename SignatureOf<Op>::Schema>(full_name_of_op<Op>().c_str());
  return handle.call(write(std::forward<Values>(values))...);
}

/// Calls body(tensor) for each tensor among the values and in options; an omitted tensor is passed
/// as undefined. Tensors are not copied, because a second reference to a tensor that Python owns
/// takes the GIL (0.1 us).
template <class Body, class... Values>
void for_each_tensor(const Body& body, const Values&... values) {
  static const at::Tensor undefined;
  const auto visit = [&](const auto& value) {
    using T = std::decay_t<decltype(value)>;
    if constexpr (kIsTensor<Lent<T>>) {
      const Lent<T>& tensor = value;
      if constexpr (std::is_same_v<Lent<T>, at::Tensor>) body(tensor);
      if constexpr (std::is_same_v<Lent<T>, MaybeTensor>) body(tensor ? *tensor : undefined);
    }
    if constexpr (kIsOptions<T>) {
      std::apply([&](const auto&... fields) { for_each_tensor(body, fields...); },
                 T::fields(value));
    }
  };
  (visit(values), ...);
}

/// Whether the next function after autograd and autocast is a CPU or CUDA kernel: no tracing, no
/// tensor subclass, no vmap, no mode. The kernel may then be called directly.
inline bool is_plain(c10::DispatchKeySet keys) {
  const c10::DispatchKeySet below =
      keys - c10::autograd_dispatch_keyset_with_ADInplaceOrView - c10::autocast_dispatch_keyset;
  const c10::DispatchKey next = below.highestPriorityTypeId();
  return next == c10::DispatchKey::CPU || next == c10::DispatchKey::CUDA;
}

/// The dispatch keys of a call with these values, without BackendSelect, which all threads include
/// but for which no op has a kernel.
template <class... Values>
c10::DispatchKeySet keys_of(const Values&... values) {
  const c10::impl::LocalDispatchKeySet local = c10::impl::tls_local_dispatch_key_set();
  c10::DispatchKeySet keys = local.included_;
  for_each_tensor([&](const at::Tensor& tensor) { keys = keys | tensor.key_set(); }, values...);
  return keys - local.excluded_ - c10::DispatchKeySet(c10::DispatchKey::BackendSelect);
}

}  // namespace detail

/// Calls an op through the dispatcher. The arguments are those of Op::kernel or those of the
/// schema. In the first case, options may be any struct with the fields of the parameter. In the
/// second case, one option struct may stand for several arguments.
template <class Op, class... Args>
decltype(auto) call(Args&&... args) {
  return std::apply(
      [](auto&&... values) -> decltype(auto) {
        return detail::call_flat<Op>(std::forward<decltype(values)>(values)...);
      },
      detail::SignatureOf<Op>::flat(std::forward<Args>(args)...));
}

/// Calls ops below autograd: the kernel directly if is_plain(), otherwise through the dispatcher.
class Below {
 public:
  explicit Below(c10::DispatchKeySet keys) : plain_(detail::is_plain(keys)) {}

  /// Whether call() runs a kernel without the dispatcher.
  bool is_plain() const { return plain_; }

  template <class Op, class... Args>
  decltype(auto) call(Args&&... args) const {
    const at::AutoDispatchBelowADInplaceOrView below;
    if (plain_) return detail::SignatureOf<Op>::call(Op::kernel, std::forward<Args>(args)...);
    return torchkiln::call<Op>(std::forward<Args>(args)...);
  }

 private:
  bool plain_;
};

/// Calls an op below autograd from a backward function.
template <class Op, class... Args>
decltype(auto) call_below(const Args&... args) {
  return Below(detail::keys_of(args...)).call<Op>(args...);
}

/// Calls Op::composite() with arguments as for call().
template <class Op, class... Args>
decltype(auto) call_composite(const Args&... args) {
  return detail::SignatureOf<Op>::call(Op::composite, args...);
}

}  // namespace torchkiln
