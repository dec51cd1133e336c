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
//       static constexpr bool kTakesNumbers = true;         // tensors may be wrapped numbers
//       static constexpr std::array<size_t, 2> kPromotedBy{0, 1};
//           // if these arguments have two floating dtypes, all tensors are cast to the wider one
//       static constexpr std::array<size_t, 2> kReadsMixed{0, 1};
//           // except these, if the dtypes are float32 and half precision: the kernels read both
//       static std::optional<Tensor> rewritten(...);        // the result, if other calls give it
//       static constexpr const char* kName = "scale";       // in errors, for an op such as
//       scale_out

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <array>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "torchkiln/torch/autograd.h"
#include "torchkiln/torch/c_function.h"
#include "torchkiln/torch/checks.h"
#include "torchkiln/torch/note.h"

namespace torchkiln {

/// A registered op. Signature is the C++ signature of its schema.
template <class Signature>
auto find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

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

/// The type that stands for T in a schema. Specialise it for enums, which schemas have as strings:
///
///     using Type = c10::string_view;
///     static Mode read(const char* op, c10::string_view word);  // rejects unknown words
///     static c10::string_view write(Mode mode);
template <class T>
struct InSchema {
  using Type = void;  // the type itself
};

namespace detail {

template <class T>
constexpr bool kIsConverted = !std::is_void_v<typename InSchema<std::decay_t<T>>::Type>;
template <class T>
using SchemaType = std::conditional_t<kIsConverted<T>, typename InSchema<std::decay_t<T>>::Type, T>;

/// Convert an argument from its schema type to T, and back.
template <class T, class V>
decltype(auto) read(const char* op, V&& value) {
  if constexpr (kIsConverted<T>) {
    return InSchema<std::decay_t<T>>::read(op, value);
  } else {
    return std::forward<V>(value);
  }
}
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
  using Schema = R(SchemaType<Args>...);
};

/// Entry<Op, Op::kernel>::call has the signature that the dispatcher expects.
template <class Op, auto function, class Type = std::decay_t<decltype(function)>>
struct Entry;

template <class T>
constexpr bool kIsTensor =
    std::is_same_v<std::decay_t<T>, at::Tensor> || std::is_same_v<std::decay_t<T>, MaybeTensor>;

/// Calls body(tensor) for each tensor among the values; one that was left out is undefined. Tensors
/// are not copied: a second reference to a tensor that Python owns takes the GIL (0.1 us).
template <class Body, class... Values>
void for_each_tensor(const Body& body, const Values&... values) {
  static const at::Tensor undefined;
  const auto visit = [&](const auto& value) {
    using T = std::decay_t<decltype(value)>;
    if constexpr (std::is_same_v<T, at::Tensor>) body(value);
    if constexpr (std::is_same_v<T, MaybeTensor>) body(value ? *value : undefined);
  };
  (visit(values), ...);
}

/// Whether a CPU or CUDA kernel is next when autograd and autocast are left out: no tracing, no
/// tensor subclass, no vmap, no mode. The kernel may then be called directly.
inline bool is_plain(c10::DispatchKeySet keys) {
  const c10::DispatchKeySet below =
      keys - c10::autograd_dispatch_keyset_with_ADInplaceOrView - c10::autocast_dispatch_keyset;
  const c10::DispatchKey next = below.highestPriorityTypeId();
  return next == c10::DispatchKey::CPU || next == c10::DispatchKey::CUDA;
}

/// The dispatch keys of a call with these values. No op has a kernel for BackendSelect, which all
/// threads include.
template <class... Values>
c10::DispatchKeySet keys_of(const Values&... values) {
  const c10::impl::LocalDispatchKeySet local = c10::impl::tls_local_dispatch_key_set();
  c10::DispatchKeySet keys = local.included_;
  for_each_tensor([&](const at::Tensor& tensor) { keys = keys | tensor.key_set(); }, values...);
  return keys - local.excluded_ - c10::DispatchKeySet(c10::DispatchKey::BackendSelect);
}

}  // namespace detail

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

/// Calls an op through the dispatcher.
template <class Op, class... Args>
decltype(auto) call(Args&&... args) {
  using Schema = typename detail::Signature<std::decay_t<decltype(Op::kernel)>>::Schema;
  static const auto handle = find_op<Schema>(full_name_of_op<Op>().c_str());
  return handle.call(detail::write(std::forward<Args>(args))...);
}

/// Calls ops below autograd: the kernel directly if is_plain(), else through the dispatcher.
class Below {
 public:
  explicit Below(c10::DispatchKeySet keys) : plain_(detail::is_plain(keys)) {}

  /// Whether call() runs a kernel without the dispatcher.
  bool is_plain() const { return plain_; }

  template <class Op, class... Args>
  decltype(auto) call(Args&&... args) const {
    const at::AutoDispatchBelowADInplaceOrView below;
    if (plain_) return Op::kernel(std::forward<Args>(args)...);
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

namespace detail {

template <class Op, class = void>
constexpr bool kHasRecorded = false;
template <class Op>
constexpr bool kHasRecorded<Op, std::void_t<decltype(Op::recorded)>> = true;
template <class Op, class = void>
constexpr bool kHasBackward = false;
template <class Op>
constexpr bool kHasBackward<Op, std::void_t<typename Op::BackwardOp>> = true;
template <class Op, class = void>
constexpr bool kHasComposite = false;
template <class Op>
constexpr bool kHasComposite<Op, std::void_t<decltype(Op::composite)>> = true;
template <class Op, class = void>
constexpr bool kHasBatched = false;
template <class Op>
constexpr bool kHasBatched<Op, std::void_t<decltype(Op::batched)>> = true;
template <class Op, class = void>
constexpr bool kHasAutocast = false;
template <class Op>
constexpr bool kHasAutocast<Op, std::void_t<decltype(Op::autocast)>> = true;
template <class Function>
constexpr bool kReturnsReference = false;
template <class... Args>
constexpr bool kReturnsReference<at::Tensor& (*)(Args...)> = true;
template <class Op>
constexpr bool kIsInPlace = kReturnsReference<std::decay_t<decltype(Op::kernel)>>;
template <class Op, class = void>
constexpr bool kIsRandom = false;
template <class Op>
constexpr bool kIsRandom<Op, std::void_t<decltype(Op::kRandom)>> = Op::kRandom;

template <class Op, class = void>
constexpr bool kTakesNumbers = false;
template <class Op>
constexpr bool kTakesNumbers<Op, std::void_t<decltype(Op::kTakesNumbers)>> = Op::kTakesNumbers;

template <class Op, class = void>
constexpr bool kPromotes = false;
template <class Op>
constexpr bool kPromotes<Op, std::void_t<decltype(Op::kPromotedBy)>> = true;

template <class Op, class = void>
constexpr bool kHasName = false;
template <class Op>
constexpr bool kHasName<Op, std::void_t<decltype(Op::kName)>> = true;

/// The name of an op in errors: its kName, if users call a function of another name.
template <class Op>
const char* name_in_errors() {
  if constexpr (kHasName<Op>) {
    return Op::kName;
  } else {
    return name_of_op<Op>();
  }
}

template <class Op, class = void>
constexpr bool kHasMixed = false;
template <class Op>
constexpr bool kHasMixed<Op, std::void_t<decltype(Op::kReadsMixed)>> = true;

/// Whether the kernels read argument `index` of the op in half precision beside float32.
template <class Op>
constexpr bool is_read_mixed(size_t index) {
  if constexpr (kHasMixed<Op>) {
    for (const size_t each : Op::kReadsMixed)
      if (each == index) return true;
  }
  return false;
}

template <class Op, class = void>
constexpr bool kIsRewritten = false;
template <class Op>
constexpr bool kIsRewritten<Op, std::void_t<decltype(Op::rewritten)>> = true;

/// How arguments of two floating dtypes are brought together.
struct Promotion {
  at::ScalarType dtype = at::ScalarType::Undefined;
  bool reads_mixed = false;  // the arguments of kReadsMixed keep their dtypes

  template <class Op>
  bool casts(size_t index, at::ScalarType argument) const {
    return is_supported_dtype(argument) && c10::elementSize(argument) < c10::elementSize(dtype) &&
           !(reads_mixed && is_read_mixed<Op>(index));
  }
};

/// The promotion that a call needs, or null if no argument has to be cast. Dtypes that the op's
/// checks reject are left alone.
template <class Op, class... Args>
std::optional<Promotion> promotion_of(const Args&... args) {
  std::array<at::ScalarType, sizeof...(Args)> dtypes;
  size_t count = 0;
  const auto add = [&](const auto& value) {
    dtypes[count] = at::ScalarType::Undefined;
    for_each_tensor(
        [&](const at::Tensor& tensor) {
          if (tensor.defined()) dtypes[count] = tensor.scalar_type();
        },
        value);
    ++count;
  };
  (add(args), ...);
  const at::ScalarType left = dtypes[Op::kPromotedBy[0]], right = dtypes[Op::kPromotedBy[1]];
  if (left == right || !is_supported_dtype(left) || !is_supported_dtype(right)) return std::nullopt;
  const Promotion promotion{at::promote_types(left, right), is_mixed(left, right)};
  for (size_t i = 0; i < sizeof...(Args); ++i)
    if (promotion.casts<Op>(i, dtypes[i])) return promotion;
  return std::nullopt;
}

/// Argument `index` of an op, cast if the promotion asks for it.
template <class Op, class T>
T promoted(size_t index, const T& value, const Promotion& promotion) {
  const auto cast = [&](const at::Tensor& tensor) {
    if (!promotion.casts<Op>(index, tensor.scalar_type())) return tensor;
    trace::note("cast: ", dtype_name(tensor.scalar_type()), " to ", dtype_name(promotion.dtype),
                ", the dtype of another argument");
    return tensor.to(promotion.dtype);
  };
  if constexpr (std::is_same_v<T, at::Tensor>) {
    return value.defined() ? cast(value) : value;
  } else if constexpr (std::is_same_v<T, MaybeTensor>) {
    return value ? MaybeTensor(cast(*value)) : value;
  } else {
    return value;
  }
}

/// A list of gradients from a tensor, a tuple or a list.
inline variable_list as_list(at::Tensor gradient) { return {std::move(gradient)}; }
inline variable_list as_list(variable_list gradients) { return gradients; }
template <class... Tensors>
variable_list as_list(std::tuple<Tensors...> gradients) {
  return std::apply([](auto&... each) { return variable_list{std::move(each)...}; }, gradients);
}

/// Records an op that has a BackwardOp; saves all its tensors.
template <class Op, class... Args>
auto record_all(const Below& below, const Args&... args) {
  constexpr size_t kTensors = (size_t{kIsTensor<Args>} + ... + 0);
  using Values = std::tuple<std::decay_t<Args>...>;
  Kept<kTensors> kept;
  size_t count = 0;
  for_each_tensor([&](const at::Tensor& tensor) { kept[count++] = tensor; }, args...);
  // The arguments, with their tensors replaced by `tensors`.
  const auto with = [](Values values, const Kept<kTensors>& tensors) {
    size_t next = 0;
    const auto put = [&](auto& value) {
      using T = std::decay_t<decltype(value)>;
      if constexpr (std::is_same_v<T, MaybeTensor>) value = maybe(tensors[next++]);
      if constexpr (std::is_same_v<T, at::Tensor>) value = tensors[next++];
    };
    std::apply([&](auto&... each) { (put(each), ...); }, values);
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
        return record(name_of_op<Op>(), {tensors...}, below.call<Op>(args...), kept, gradients);
      },
      kept);
}

template <class Op, auto function, class R, class... Args>
struct Entry<Op, function, R (*)(Args...)> {
  template <class Body, size_t... I>
  static R with_promoted(const Body& body, const Promotion& promotion, std::index_sequence<I...>,
                         const SchemaType<Args>&... args) {
    return body(promoted<Op>(I, args, promotion)...);
  }

  static R call(SchemaType<Args>... args) {
    if constexpr (kPromotes<Op>) {
      if (const auto promotion = promotion_of<Op>(args...)) {
        const auto with = [&](const auto&... all) {
          return function(detail::read<Args>(name_in_errors<Op>(), all)...);
        };
        return with_promoted(with, *promotion, std::index_sequence_for<Args...>{}, args...);
      }
    }
    if constexpr (kIsRewritten<Op>) {
      if (auto result = Op::rewritten(detail::read<Args>(name_in_errors<Op>(), args)...))
        return *std::move(result);
    }
    return function(detail::read<Args>(name_in_errors<Op>(), args)...);
  }

  /// The function for the key Autograd.
  static R autograd(c10::DispatchKeySet keys, SchemaType<Args>... args) {
    if constexpr (kPromotes<Op>) {  // autograd records the casts
      if (const auto promotion = promotion_of<Op>(args...)) {
        const auto with = [](const auto&... all) { return torchkiln::call<Op>(all...); };
        return with_promoted(with, *promotion, std::index_sequence_for<Args...>{}, args...);
      }
    }
    if constexpr (kIsRewritten<Op>) {
      if (auto result = Op::rewritten(detail::read<Args>(name_in_errors<Op>(), args)...))
        return *std::move(result);
    }
    bool transformed = is_transformed(), all_defined = true, any_requires_grad = false;
    const auto look = [&](const auto& value) {
      using T = std::decay_t<decltype(value)>;
      if constexpr (std::is_same_v<T, at::Tensor>) all_defined = all_defined && value.defined();
    };
    (look(args), ...);
    const auto look_into = [&](const at::Tensor& tensor) {
      if (!tensor.defined()) return;
      transformed = transformed || tensor._fw_grad(/*level=*/0).defined();
      any_requires_grad = any_requires_grad || tensor.requires_grad();
    };
    for_each_tensor(look_into, args...);
    if (transformed) return Op::composite(detail::read<Args>(name_in_errors<Op>(), args)...);
    const Below below(keys);
    if constexpr (kTakesNumbers<Op>) {
      // Modes and tensor subclasses receive a wrapped number as a Python number, which the schema
      // does not accept; torch's own ops do.
      bool has_number = false;
      const auto look_for_number = [&](const at::Tensor& tensor) {
        has_number = has_number || tensor.unsafeGetTensorImpl()->is_wrapped_number();
      };
      for_each_tensor(look_for_number, args...);
      if (has_number && !below.is_plain())
        return Op::composite(detail::read<Args>(name_in_errors<Op>(), args)...);
    }
    // An undefined tensor is not recorded: the op's checks reject it.
    if (any_requires_grad && all_defined && at::GradMode::is_enabled()) {
      if constexpr (kHasRecorded<Op>) {
        return Op::recorded(below, detail::read<Args>(name_in_errors<Op>(), args)...);
      } else {
        return record_all<Op>(below, detail::read<Args>(name_in_errors<Op>(), args)...);
      }
    }
    if constexpr (std::is_same_v<R, at::Tensor&>) {
      R changed = below.call<Op>(detail::read<Args>(name_in_errors<Op>(), args)...);
      torch::autograd::increment_version(changed);
      return changed;
    } else {
      return below.call<Op>(detail::read<Args>(name_in_errors<Op>(), args)...);
    }
  }

  /// The function for the key ADInplaceOrView: an in-place op while autograd is off.
  static R in_place(c10::DispatchKeySet keys, SchemaType<Args>... args) {
    R changed = Below(keys).call<Op>(detail::read<Args>(name_in_errors<Op>(), args)...);
    torch::autograd::increment_version(changed);
    return changed;
  }

  static constexpr bool kHasCFunction = OutC<R>::kKnown && (kIsInC<SchemaType<Args>> && ...);

  /// The function that C calls, below autograd.
  static R in_c(SchemaType<Args>... args) {
    const at::AutoDispatchBelowADInplaceOrView below;
    if (is_plain(keys_of(args...))) return call(args...);
    return torchkiln::call<Op>(detail::read<Args>(name_in_errors<Op>(), args)...);
  }

  static void* c_function() {
    using C = typename CFunction<R, SchemaType<Args>...>::template With<in_c>;
    return reinterpret_cast<void*>(C::function);
  }

  /// The function for the keys AutocastCPU and AutocastCUDA.
  template <at::DeviceType device>
  static R autocast(SchemaType<Args>... args) {
    // Excludes the autocast keys of every device, so that the dispatcher does not call this again.
    const c10::impl::ExcludeDispatchKeyGuard outside(c10::autocast_dispatch_keyset);
    return Op::autocast(Autocast(device), detail::read<Args>(name_in_errors<Op>(), args)...);
  }
};

}  // namespace detail

/// Registers an op in a library: TORCH_LIBRARY_FRAGMENT(mine, m) { define<Scale>(m); }
template <class Op>
void define(torch::Library& m) {
  using Key = c10::DispatchKey;
  std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  if (detail::kIsRandom<Op>) tags.push_back(at::Tag::nondeterministic_seeded);
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
  if constexpr (detail::kHasRecorded<Op> || detail::kHasBackward<Op>)
    implement(Key::Autograd, TORCH_FN(Kernel::autograd));
  if constexpr (detail::kIsInPlace<Op>) implement(Key::ADInplaceOrView, TORCH_FN(Kernel::in_place));
  if constexpr (detail::kHasBatched<Op>) {
    using Batched = detail::Entry<Op, Op::batched>;
    implement(Key::FuncTorchBatched, TORCH_FN(Batched::call));
  } else if constexpr (detail::kHasComposite<Op>) {
    using Composite = detail::Entry<Op, Op::composite>;
    implement(Key::FuncTorchBatched, TORCH_FN(Composite::call));
  }
  if constexpr (detail::kHasAutocast<Op>) {
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
