#pragma once

// Option structs: arguments that the functions of an op take as one value. TORCHKILN_FIELDS names
// the fields in the order of the schema, in which each of them is an argument:
//
//     struct ScaleOptions {
//       double factor = 2.0;
//       std::string_view act = "none";
//       TORCHKILN_FIELDS(self.factor, self.act);
//     };
//
// The op may derive its own struct from it. A field of the same name then replaces the public
// field, such as an enum in place of a string (InSchema):
//
//     struct Options : ScaleOptions {
//       Activation act;
//     };
//
// It may have further fields, TORCHKILN_FIELDS of its own for an op with another list of arguments,
// and complete(), which is called once they are set. Tensors that are given in most calls are
// separate parameters, or Borrowed fields.

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

/// A tuple of references to the fields of `self`, an option struct.
#define TORCHKILN_FIELDS(...)      \
  template <class Self>            \
  static auto fields(Self& self) { \
    return std::tie(__VA_ARGS__);  \
  }                                \
  static_assert(true)

namespace torchkiln {

/// The type that stands for T in a schema. Specialise it for enums, which are strings in schemas:
///
///     using Type = c10::string_view;
///     static Mode read(const char* op, c10::string_view word);  // rejects unknown words
///     static c10::string_view write(Mode mode);
template <class T>
struct InSchema {
  using Type = void;  // the type itself
};

/// A field for a Tensor or a std::optional<Tensor> that is not copied, because a second reference
/// to a tensor that Python owns takes the GIL (0.1 us). It is used like these types, and valid
/// during the call.
template <class T>
class Borrowed {
 public:
  Borrowed& operator=(const T& value) {
    value_ = &value;
    return *this;
  }
  Borrowed& operator=(T&&) = delete;

  operator const T&() const { return *value_; }
  const at::Tensor& operator*() const {
    if constexpr (kIsOptional) {
      return **value_;
    } else {
      return *value_;
    }
  }
  const at::Tensor* operator->() const { return &**this; }

  /// Whether an optional tensor was given. For a Tensor: whether the field is an argument of the
  /// op.
  bool has_value() const {
    if constexpr (kIsOptional) {
      return value_->has_value();
    } else {
      return value_ != &kNone;
    }
  }
  explicit operator bool() const { return has_value(); }

 private:
  static constexpr bool kIsOptional = !std::is_same_v<T, at::Tensor>;
  static inline const T kNone{};
  const T* value_ = &kNone;
};

namespace detail {

/// Whether Member<T> is a type.
template <template <class> class Member, class T, class = void>
constexpr bool kHas = false;
template <template <class> class Member, class T>
constexpr bool kHas<Member, T, std::void_t<Member<T>>> = true;

template <class T>
constexpr bool kIsConverted = !std::is_void_v<typename InSchema<std::decay_t<T>>::Type>;
template <class T>
using SchemaType = std::conditional_t<kIsConverted<T>, typename InSchema<std::decay_t<T>>::Type, T>;

/// The fields of an option struct: references, in a tuple.
template <class T>
using FieldsOf = decltype(T::fields(std::declval<T&>()));

template <class T>
constexpr bool kIsOptions = kHas<FieldsOf, std::decay_t<T>>;

/// A type without Borrowed.
template <class T>
struct LentOf {
  using Type = T;
};
template <class T>
struct LentOf<Borrowed<T>> {
  using Type = T;
};
template <class T>
using Lent = typename LentOf<std::decay_t<T>>::Type;

template <class T>
constexpr bool kIsTensor = std::is_same_v<std::decay_t<T>, at::Tensor> ||
                           std::is_same_v<std::decay_t<T>, std::optional<at::Tensor>>;

/// The types of a parameter in the dispatcher's signature: its own type, or the types of its
/// fields. Tensors among the fields are passed by reference.
template <class T, class = void>
struct FlatOf {
  using Type = std::tuple<SchemaType<T>>;
};
template <class T>
struct FlatOf<T, std::enable_if_t<kIsOptions<T>>> {
  template <class Field>
  using Passed = std::conditional_t<kIsTensor<Lent<Field>>, const Lent<Field>&, SchemaType<Field>>;
  template <class... Fields>
  static std::tuple<Passed<Fields>...> flat(std::tuple<Fields&...>);
  using Type = decltype(flat(std::declval<FieldsOf<std::decay_t<T>>>()));
};
template <class... Args>
using Flat = decltype(std::tuple_cat(std::declval<typename FlatOf<Args>::Type>()...));

template <class T>
using CompleteOf = decltype(std::declval<T&>().complete());

/// The index of a parameter's first flat value.
template <class... Args>
constexpr size_t first_of(size_t parameter) {
  const size_t widths[] = {std::tuple_size_v<typename FlatOf<Args>::Type>..., 0};
  size_t first = 0;
  for (size_t i = 0; i < parameter; ++i) first += widths[i];
  return first;
}

/// The parameters of a function, some of which may be option structs.
template <class... Args>
struct Parameters {
  static constexpr size_t kCount = first_of<Args...>(sizeof...(Args));

  template <class T, size_t first, class Values, class Convert, size_t... I>
  static T options(Values& values, const Convert& convert, std::index_sequence<I...>) {
    T made{};
    const auto fields = T::fields(made);
    const auto put = [&](auto& field, auto&& value) {
      using Field = std::decay_t<decltype(field)>;
      field = convert.template to<Field>(std::forward<decltype(value)>(value));
    };
    (put(std::get<I>(fields), std::get<first + I>(values)), ...);
    if constexpr (kHas<CompleteOf, T>) made.complete();
    return made;
  }
  template <class Arg, size_t first, class Values, class Convert>
  static decltype(auto) one(Values& values, const Convert& convert) {
    if constexpr (kIsOptions<Arg>) {
      using T = std::decay_t<Arg>;
      constexpr auto kFields = std::make_index_sequence<std::tuple_size_v<FieldsOf<T>>>{};
      return options<T, first>(values, convert, kFields);
    } else {
      return convert.template to<Arg>(std::get<first>(values));
    }
  }
  template <class Body, class Values, class Convert, size_t... I>
  static decltype(auto) pass(const Body& body, Values& values, const Convert& convert,
                             std::index_sequence<I...>) {
    return body(one<Args, first_of<Args...>(I)>(values, convert)...);
  }

  /// Calls body() with a value for each parameter, made from a tuple of flat values by
  /// convert.to<T>(value).
  template <class Body, class Values, class Convert>
  static decltype(auto) apply(const Body& body, Values& values, const Convert& convert) {
    return pass(body, values, convert, std::index_sequence_for<Args...>{});
  }
};

/// A conversion for apply() that passes values on unchanged.
struct AsGiven {
  template <class T, class V>
  V& to(V& value) const {
    return value;
  }
};

/// A value for a parameter of type P: the value itself, or options of type P with the same fields.
template <class P, class V>
decltype(auto) as_parameter(V&& value) {
  using T = std::decay_t<P>;
  if constexpr (kIsOptions<P> && !std::is_base_of_v<T, std::decay_t<V>>) {
    T made{};
    T::fields(made) = T::fields(value);
    if constexpr (kHas<CompleteOf, T>) made.complete();
    return made;
  } else {
    return std::forward<V>(value);
  }
}

/// References to the flat values of an argument for a parameter of type P.
template <class P, class V>
auto flat_of(V&& value) {
  if constexpr (kIsOptions<P>) {
    return std::decay_t<P>::fields(std::as_const(value));
  } else {
    return std::forward_as_tuple(std::forward<V>(value));
  }
}

}  // namespace detail

}  // namespace torchkiln
