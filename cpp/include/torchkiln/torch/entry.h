#pragma once

// The functions that define<Op>() registers, made from the functions of the op: Entry<Op,
// Op::kernel>.

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>

#include <tuple>
#include <type_traits>
#include <utility>

#include "torchkiln/torch/autograd.h"
#include "torchkiln/torch/c_function.h"
#include "torchkiln/torch/call.h"
#include "torchkiln/torch/promotion.h"

namespace torchkiln {

/// Casts to the autocast dtype of a device.
class Autocast {
 public:
  explicit Autocast(at::DeviceType device)
      : device_(device), dtype_(at::autocast::get_autocast_dtype(device)) {}

  /// Casts float32 and half precision tensors of that device; returns others unchanged.
  at::Tensor operator()(const at::Tensor& tensor) const {
    return at::autocast::cached_cast(dtype_, tensor, device_);
  }
  MaybeTensor operator()(const MaybeTensor& tensor) const {
    return tensor.has_value() ? MaybeTensor((*this)(*tensor)) : std::nullopt;
  }

  at::DeviceType device() const { return device_; }

 private:
  at::DeviceType device_;
  at::ScalarType dtype_;
};

namespace detail {

template <class Op>
using RecordedOf = decltype(Op::recorded);
template <class Op>
using BackwardOf = typename Op::BackwardOp;
template <class Op>
using CompositeOf = decltype(Op::composite);
template <class Op>
using BatchedOf = decltype(Op::batched);
template <class Op>
using AutocastOf = decltype(Op::autocast);
template <class Op>
using RewrittenOf = decltype(Op::rewritten);
template <class Op>
using RandomOf = std::enable_if_t<Op::kRandom>;
template <class Op>
using FlexibleLayoutOf = std::enable_if_t<Op::kFlexibleLayout>;
template <class Op>
using TakesNumbersOf = std::enable_if_t<Op::kTakesNumbers>;
template <class Op>
using NameOf = decltype(Op::kName);

/// The name of an op in errors: its kName, if users call a function of another name. Otherwise its
/// name without the leading underscore of a helper.
template <class Op>
const char* name_in_errors() {
  if constexpr (kHas<NameOf, Op>) {
    return Op::kName;
  } else {
    const char* const name = name_of_op<Op>();
    return name + (name[0] == '_' ? 1 : 0);
  }
}

/// Converts arguments from their types in the schema to those of the op's functions.
template <class Op>
struct FromSchema {
  template <class T, class V>
  decltype(auto) to(V&& value) const {
    if constexpr (kIsConverted<T>) {
      return InSchema<std::decay_t<T>>::read(name_in_errors<Op>(), value);
    } else {
      return std::forward<V>(value);
    }
  }
};

/// A list of gradients, made from a tensor, a tuple or a list.
inline variable_list as_list(at::Tensor gradient) { return {std::move(gradient)}; }
inline variable_list as_list(variable_list gradients) { return gradients; }
template <class... Tensors>
variable_list as_list(std::tuple<Tensors...> gradients) {
  return std::apply([](auto&... each) { return variable_list{std::move(each)...}; }, gradients);
}

/// Calls body() with a reference to each tensor, optional or not, among values and options.
template <class Body, class T>
void change_tensors(const Body& body, T& value) {
  if constexpr (kIsTensor<T>) body(value);
  if constexpr (kIsOptions<T>)
    std::apply([&](auto&... fields) { (change_tensors(body, fields), ...); }, T::fields(value));
}

template <class... Values>
constexpr size_t count_tensors(std::tuple<Values...>*) {
  return (size_t{kIsTensor<Values>} + ... + 0);
}

/// Records an op that has a BackwardOp, with all its tensors saved.
template <class Op, class... Args>
auto record_all(const Below& below, const Args&... args) {
  constexpr size_t kTensors = count_tensors(static_cast<Flat<Args...>*>(nullptr));
  using Values = std::tuple<std::decay_t<Args>...>;
  Kept<kTensors> kept;
  size_t count = 0;
  for_each_tensor([&](const at::Tensor& tensor) { kept[count++] = tensor; }, args...);
  // The arguments, with `tensors` in place of their tensors.
  const auto with = [](Values values, const Kept<kTensors>& tensors) {
    size_t next = 0;
    const auto put = [&](auto& value) {
      if constexpr (std::is_same_v<std::decay_t<decltype(value)>, at::Tensor>) {
        value = tensors[next++];
      } else {
        value = maybe(tensors[next++]);
      }
    };
    std::apply([&](auto&... each) { (change_tensors(put, each), ...); }, values);
    return values;
  };
  Values values = with(Values(args...), Kept<kTensors>{});
  const auto gradients = [=](const Incoming& in, const Kept<kTensors>& tensors) {
    if (in.needs_composite()) {
      return composite_gradients(in, tensors, [&](const Kept<kTensors>& inputs) {
        return std::apply(Op::composite, with(values, inputs));
      });
    }
    return std::apply(
        [&](const auto&... each) {
          return as_list(call_below<typename Op::BackwardOp>(in[0], each...));
        },
        with(values, tensors));
  };
  return std::apply(
      [&](const auto&... tensors) {
        return record(name_in_errors<Op>(), {tensors...}, below.call<Op>(args...), kept, gradients);
      },
      kept);
}

/// Values are the types of the schema: Args, with option structs replaced by their fields.
template <class Op, auto function, class Type, class Values>
struct EntryOf;

template <class Op, auto function, class R, class... Args, class... Values>
struct EntryOf<Op, function, R (*)(Args...), std::tuple<Values...>> {
  static constexpr bool kIsInPlace = std::is_reference_v<R>;

  /// Calls body() with the arguments in the types of the op's functions.
  template <class Body, class... Given>
  static decltype(auto) pass(const Body& body, Given&... given) {
    std::tuple<Given&...> values(given...);
    return Parameters<Args...>::apply(body, values, FromSchema<Op>{});
  }

  /// Calls body() with promoted arguments if they have two different floating dtypes; nullopt
  /// otherwise.
  template <class Body>
  static std::optional<R> after_promotion(const Body& body, const Values&... values) {
    const auto promotion = promotion_of<Op>(values...);
    if (!promotion) return std::nullopt;
    return with_promoted<Op>(*promotion, body, std::index_sequence_for<Values...>{}, values...);
  }

  static R call(Values... values) {
    const auto run = [](auto&&... args) -> R {
      if constexpr (kHas<RewrittenOf, Op>)
        if (auto result = Op::rewritten(args...)) return *std::move(result);
      return function(args...);
    };
    if constexpr (kHas<PromotedByOf, Op>) {
      const auto with = [&](auto&&... all) -> R { return pass(run, all...); };
      if (auto result = after_promotion(with, values...)) return *std::move(result);
    }
    return pass(run, values...);
  }

  /// The function for the dispatch key Autograd.
  static R autograd(c10::DispatchKeySet keys, Values... values) {
    if constexpr (kHas<PromotedByOf, Op>) {  // autograd records the casts
      const auto with = [](auto&&... all) -> R { return call_flat<Op>(all...); };
      if (auto result = after_promotion(with, values...)) return *std::move(result);
    }
    bool transformed = is_transformed(), all_defined = true, any_requires_grad = false;
    [[maybe_unused]] bool has_number = false;
    const auto look = [&](const auto& value) {
      using T = std::decay_t<decltype(value)>;
      if constexpr (std::is_same_v<T, at::Tensor>) all_defined = all_defined && value.defined();
    };
    (look(values), ...);
    const auto look_into = [&](const at::Tensor& tensor) {
      if (!tensor.defined()) return;
      transformed = transformed || tensor._fw_grad(/*level=*/0).defined();
      any_requires_grad = any_requires_grad || tensor.requires_grad();
      if constexpr (kHas<TakesNumbersOf, Op>)
        has_number = has_number || tensor.unsafeGetTensorImpl()->is_wrapped_number();
    };
    for_each_tensor(look_into, values...);
    const Below below(keys);
    const auto run = [&](auto&&... args) -> R {
      if constexpr (kHas<RewrittenOf, Op>)
        if (auto result = Op::rewritten(args...)) return *std::move(result);
      if (transformed) return Op::composite(args...);
      // The schema does not accept Python numbers, which modes and tensor subclasses receive for
      // wrapped numbers. torch's own ops do.
      if constexpr (kHas<TakesNumbersOf, Op>)
        if (has_number && !below.is_plain()) return Op::composite(args...);
      // A call with an undefined tensor is not recorded, because the op's checks reject it.
      if (any_requires_grad && all_defined && at::GradMode::is_enabled()) {
        if constexpr (kHas<RecordedOf, Op>) {
          return Op::recorded(below, args...);
        } else {
          return record_all<Op>(below, args...);
        }
      }
      if constexpr (kIsInPlace) {
        R changed = below.call<Op>(args...);
        torch::autograd::increment_version(changed);
        return changed;
      } else {
        return below.call<Op>(args...);
      }
    };
    return pass(run, values...);
  }

  /// The function for the dispatch key ADInplaceOrView: calls an in-place op and increments the
  /// version.
  static R in_place(c10::DispatchKeySet keys, Values... values) {
    R changed = pass([&](auto&&... args) -> R { return Below(keys).call<Op>(args...); }, values...);
    torch::autograd::increment_version(changed);
    return changed;
  }

  static constexpr bool kHasCFunction = OutC<R>::kKnown && (kIsInC<Values> && ...);

  /// The function that C calls, below autograd.
  static R in_c(Values... values) {
    const at::AutoDispatchBelowADInplaceOrView below;
    if (is_plain(keys_of(values...))) return call(values...);
    return call_flat<Op>(values...);
  }

  static void* c_function() {
    using C = typename CFunction<R, Values...>::template With<in_c>;
    return reinterpret_cast<void*>(C::function);
  }

  /// The function for the dispatch keys AutocastCPU and AutocastCUDA.
  template <at::DeviceType device>
  static R autocast(Values... values) {
    // Excludes the autocast keys of every device, so that the dispatcher does not call this
    // function again.
    const c10::impl::ExcludeDispatchKeyGuard outside(c10::autocast_dispatch_keyset);
    const Autocast cast(device);
    return pass([&](auto&&... args) -> R { return Op::autocast(cast, args...); }, values...);
  }
};

template <class Type>
struct FlatArguments;
template <class R, class... Args>
struct FlatArguments<R (*)(Args...)> {
  using Type = Flat<Args...>;
};

/// Entry<Op, Op::kernel>::call has the signature that the dispatcher expects.
template <class Op, auto function, class Type = std::decay_t<decltype(function)>>
using Entry = EntryOf<Op, function, Type, typename FlatArguments<Type>::Type>;

}  // namespace detail

}  // namespace torchkiln
