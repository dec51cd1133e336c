#pragma once

// The C function of an op. A model that AOTInductor has compiled calls it directly; without one,
// the model fills a list of boxed values and calls the dispatcher. define<Op>() registers one for
// every op that takes and returns these types:
//
//     in the schema        parameters
//     Tensor               AtenTensorHandle
//     float, str           double, const char*
//     int, SymInt          int64_t
//     bool, ScalarType     int32_t
//     T?                   const T*, null for None
//     int[], SymInt[]      const int64_t*, int64_t length
//     int[]?, SymInt[]?    const int64_t* const*, int64_t length
//
// After the arguments, an AtenTensorHandle* for each result: the caller deletes the tensor. The
// handle is null for an undefined result, and for an op without results. Errors are thrown.

#include <ATen/ATen.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "torchkiln/core/status.h"

/// The C function of the op with this schema, in torch's notation. Throws an error if no such op is
/// loaded or if its schema differs.
extern "C" TORCHKILN_VISIBLE void* torchkiln_c_function_v1(const char* schema);

namespace torchkiln {

/// Registers `function` for torchkiln_c_function_v1() as the function of an op, whose name includes
/// its namespace.
TORCHKILN_EXPORT void add_c_function(const char* op, void* function);

TORCHKILN_EXPORT std::vector<std::string> ops_with_c_function();

namespace detail {

/// The form in which C passes an argument of type T: Types are its parameters in C, and read()
/// makes a T of them.
template <class T>
struct InC {
  using Types = void;  // C cannot pass a T: the op gets no C function
};

/// An argument that is passed by value.
template <class T, class C>
struct ValueInC {
  using Types = std::tuple<C>;
  static T read(C value) { return static_cast<T>(value); }
};
template <>
struct InC<double> : ValueInC<double, double> {};
template <>
struct InC<int64_t> : ValueInC<int64_t, int64_t> {};
template <>
struct InC<c10::SymInt> : ValueInC<c10::SymInt, int64_t> {};
template <>
struct InC<bool> : ValueInC<bool, int32_t> {};
template <>
struct InC<at::ScalarType> : ValueInC<at::ScalarType, int32_t> {};
template <>
struct InC<c10::string_view> : ValueInC<c10::string_view, const char*> {};

template <>
struct InC<at::Tensor> {
  using Types = std::tuple<AtenTensorHandle>;
  static at::Tensor& read(AtenTensorHandle handle) {
    return *reinterpret_cast<at::Tensor*>(handle);
  }
};

template <class T>
struct InC<std::optional<T>> {
  using C = std::tuple_element_t<0, typename InC<T>::Types>;
  using Types = std::tuple<const C*>;
  static std::optional<T> read(const C* value) {
    return value == nullptr ? std::nullopt : std::optional<T>(InC<T>::read(*value));
  }
};

template <>
struct InC<c10::SymIntArrayRef> {
  using Types = std::tuple<const int64_t*, int64_t>;
  static c10::SymIntArrayRef read(const int64_t* begin, int64_t length) {
    return c10::fromIntArrayRefSlow({begin, static_cast<size_t>(length)});
  }
};

/// A list that may be left out: a pointer and a length in C.
template <class T, class List>
struct MaybeListInC {
  using Types = std::tuple<const int64_t* const*, int64_t>;
  static T read(const int64_t* const* begin, int64_t length) {
    if (begin == nullptr) return std::nullopt;
    const c10::IntArrayRef list(*begin, static_cast<size_t>(length));
    if constexpr (std::is_same_v<List, c10::SymIntArrayRef>) {
      return c10::fromIntArrayRefSlow(list);
    } else {
      return list;
    }
  }
};
template <>
struct InC<at::OptionalIntArrayRef> : MaybeListInC<at::OptionalIntArrayRef, c10::IntArrayRef> {};
template <>
struct InC<at::OptionalSymIntArrayRef>
    : MaybeListInC<at::OptionalSymIntArrayRef, c10::SymIntArrayRef> {};

template <class T>
constexpr bool kIsInC = !std::is_void_v<typename InC<std::decay_t<T>>::Types>;

/// The form in which C receives the results of an op.
template <class R>
struct OutC {
  static constexpr bool kKnown = false;
};
template <class... Tensors>
struct OutC<std::tuple<Tensors...>> {
  static constexpr bool kKnown = (std::is_same_v<Tensors, at::Tensor> && ...);
  using Types = std::tuple<std::conditional_t<true, AtenTensorHandle*, Tensors>...>;
};
template <>
struct OutC<at::Tensor> : OutC<std::tuple<at::Tensor>> {};
template <>
struct OutC<void> : OutC<std::tuple<at::Tensor>> {};

/// CFunction<R, Args...>::With<call>::function() calls call(args...), whose type is R(Args...).
template <class R, class... Args>
struct CFunction {
  using In = decltype(std::tuple_cat(std::declval<typename InC<std::decay_t<Args>>::Types>()...));
  using Out = typename OutC<R>::Types;

  /// The index of the first C parameter of argument `index`.
  static constexpr size_t first_of(size_t index) {
    const size_t counts[] = {std::tuple_size_v<typename InC<std::decay_t<Args>>::Types>..., 0};
    size_t first = 0;
    for (size_t i = 0; i < index; ++i) first += counts[i];
    return first;
  }

  template <size_t index, class T, size_t... I>
  static decltype(auto) read(const In& in, std::index_sequence<I...>) {
    return InC<T>::read(std::get<first_of(index) + I>(in)...);
  }
  template <size_t index>
  static decltype(auto) argument(const In& in) {
    using T = std::decay_t<std::tuple_element_t<index, std::tuple<Args...>>>;
    return read<index, T>(in,
                          std::make_index_sequence<std::tuple_size_v<typename InC<T>::Types>>{});
  }

  static void put(at::Tensor tensor, AtenTensorHandle* out) {
    if (out == nullptr) return;
    *out = reinterpret_cast<AtenTensorHandle>(new at::Tensor(std::move(tensor)));
  }

  template <auto call, class InTypes = In, class OutTypes = Out>
  struct With;
  template <auto call, class... Ins, class... Outs>
  struct With<call, std::tuple<Ins...>, std::tuple<Outs...>> {
    template <size_t... I>
    static R called(const In& in, std::index_sequence<I...>) {
      return call(argument<I>(in)...);
    }
    static AOTITorchError function(Ins... ins, Outs... outs) {
      const In in{ins...};
      constexpr auto kArguments = std::index_sequence_for<Args...>{};
      if constexpr (std::is_void_v<R>) {
        called(in, kArguments);
      } else if constexpr (std::is_same_v<R, at::Tensor>) {
        (put(called(in, kArguments), outs), ...);
      } else {
        std::apply([&](auto&&... results) { (put(std::move(results), outs), ...); },
                   called(in, kArguments));
      }
      return AOTI_TORCH_SUCCESS;
    }
  };
};

}  // namespace detail

}  // namespace torchkiln
