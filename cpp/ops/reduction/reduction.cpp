// sum and mean over any dimensions. Dimensions that can be read as one dimension are merged; sums
// over several remaining dimensions are computed in steps (steps.h). A result that overflowed on
// the CPU is computed again in float64. torch's own ops compute results for integers and bools.

#include <atomic>
#include <cfenv>
#include <limits>

#include "reduction/steps.h"
#include "torchkiln/torch/checks.h"
#include "torchkiln/torch/empty.h"
#include "torchkiln/torch/launch.h"
#include "torchkiln/torch/op.h"
#include "torchkiln/torch/ops.h"

namespace torchkiln::reduction_ops {
namespace {

using at::OptionalIntArrayRef;
using at::Tensor;
using OptionalDtype = std::optional<at::ScalarType>;

/// Whether sum() supports the dtype: a supported floating dtype, integers or bools.
bool is_summable(at::ScalarType dtype) {
  return is_supported_dtype(dtype) || at::isIntegralType(dtype, /*includeBool=*/true);
}

/// Whether torch's op computes the result: our kernels support neither integers nor bools.
bool is_for_torch(const Tensor& x, OptionalDtype dtype) {
  return !is_supported_dtype(x.scalar_type()) || (dtype && !is_supported_dtype(*dtype));
}

/// The dtype of a result: int64 for integers and bools, as in torch.
at::ScalarType result_dtype(const Tensor& x, OptionalDtype dtype) {
  return dtype.value_or(is_supported_dtype(x.scalar_type()) ? x.scalar_type() : at::kLong);
}

/// The arguments of both ops.
struct Call {
  Borrowed<Tensor> x;
  OptionalIntArrayRef dim;
  bool keepdim;
  OptionalDtype dtype;

  TORCHKILN_FIELDS(self.x, self.dim, self.keepdim, self.dtype);
};

struct Sum {
  static constexpr const char* kSchema =
      "torchkiln::sum(Tensor x, int[1]? dim=None, bool keepdim=False, *, ScalarType? dtype=None) "
      "-> Tensor";
  static constexpr bool kDivides = false;
  static constexpr double kOfNothing = 0;

  static void check_dtypes(const Tensor& x, OptionalDtype dtype) {
    constexpr const char* kExpected = ", an integer dtype or bool";
    TORCH_CHECK(is_summable(x.scalar_type()), "torchkiln.sum: x: got dtype ",
                dtype_name(x.scalar_type()), ", expected ", kSupportedDtypes, kExpected);
    TORCH_CHECK(!dtype || is_summable(*dtype), "torchkiln.sum: dtype: got ",
                dtype_name(dtype.value_or(at::kFloat)), ", expected ", kSupportedDtypes, kExpected);
  }
  static Tensor by_torch(const Call& call) {
    return at::sum(call.x, call.dim, call.keepdim, call.dtype);
  }
};

struct Mean {
  static constexpr const char* kSchema =
      "torchkiln::mean(Tensor x, int[1]? dim=None, bool keepdim=False, *, ScalarType? dtype=None) "
      "-> Tensor";
  static constexpr bool kDivides = true;
  static constexpr double kOfNothing = std::numeric_limits<double>::quiet_NaN();

  /// Checks dtypes: as in torch, the mean of integers requires a dtype.
  static void check_dtypes(const Tensor& x, OptionalDtype dtype) {
    const at::ScalarType given = x.scalar_type();
    TORCH_CHECK(is_supported_dtype(given) || (is_summable(given) && dtype),
                "torchkiln.mean: x: got dtype ", dtype_name(given), ", expected ", kSupportedDtypes,
                is_summable(given) ? "; pass dtype=torch.float32 to average integers" : "");
    TORCH_CHECK(!dtype || is_supported_dtype(*dtype), "torchkiln.mean: dtype: got ",
                dtype_name(dtype.value_or(at::kFloat)), ", expected ", kSupportedDtypes);
  }

  static Tensor by_torch(const Call& call) {
    return at::mean(call.x, call.dim, call.keepdim, call.dtype);
  }
};

/// Whether each dimension of x is reduced: the given ones, or all if none is given.
Mask reduced_dims(const char* op, const Tensor& x, OptionalIntArrayRef dim) {
  const int64_t rank = x.dim();
  const bool all = !dim.has_value() || dim->empty();
  Mask mask(rank, all);
  if (all) return mask;
  const int64_t range = std::max<int64_t>(rank, 1);  // a 0-dimensional tensor accepts 0 and -1
  Mask named(range, false);
  for (const int64_t d : *dim) {
    const int64_t at = check_dim(op, "x", x, d);
    TORCH_CHECK(!named[at], "torchkiln.", op, ": dim: got dimension ", at, " twice in ", *dim,
                ", expected each once");
    named[at] = true;
  }
  return rank > 0 ? named : mask;
}

/// Whether a floating point operation of a reduction on the CPU overflowed, or made a NaN of
/// infinities, on any thread. The processor sets the flags, so the loops take no more time.
class OverflowFlag {
 public:
  /// Runs a part of the work on the current thread, and reads its flags.
  template <class Body>
  Status watch(const Body& body) {
    if (std::fetestexcept(kFlags) != 0) std::feclearexcept(kFlags);
    const Status status = body();
    if (std::fetestexcept(kFlags) != 0) is_set_ = true;
    return status;
  }
  bool is_set() const { return is_set_; }

 private:
  static constexpr int kFlags = FE_OVERFLOW | FE_INVALID;
  std::atomic<bool> is_set_ = false;
};

void run(const char* op, Reduction arguments, const Tensor& where, OverflowFlag& overflow) {
  constexpr int64_t kGrain = 1 << 12;  // outputs per CPU thread, at least
  launch_split(
      op, where, arguments, kGrain, cpu::split,
      [&](Allocate allocate, auto stream) { return cuda::reduce(arguments, allocate, stream); },
      [&](const Reduction& p, int64_t begin, int64_t end) {
        return overflow.watch([&] { return cpu::reduce(p, begin, end); });
      },
      [&](const Reduction& p, int64_t begin, int64_t end) {
        return overflow.watch([&] { return cpu::reduce_finish(p, begin, end); });
      });
}

/// Writes the sum of x divided by `divisor` to `out`. Returns whether some partial sum may have
/// overflowed; on a GPU false, because the host would have to wait for it.
bool reduce_into(const char* op, const Tensor& x, const Mask& mask, const Tensor& out,
                 double divisor) {
  OverflowFlag overflow;
  reduce_in_steps(x, mask, out, [&](Reduction step, bool is_last) {
    step.divisor = is_last ? divisor : 1;
    run(op, step, x, overflow);
  });
  return overflow.is_set();
}

/// Computes again, in float64, the elements of `out` that are infinite or NaN. The terms are scaled
/// so that no sum of finite numbers overflows.
void reduce_widely(const char* op, const Tensor& x, const Mask& mask, const Tensor& out,
                   double divisor) {
  constexpr double kScale = 0x1p-64;  // the sum of 2^64 float64 numbers is then finite
  const double scale = x.scalar_type() == at::kDouble ? kScale : 1;
  const Tensor wide = at::empty_like(out, out.options().dtype(at::kDouble));
  reduce_into(op, scale == 1 ? x : x * scale, mask, wide, divisor);
  out.copy_(at::where(at::isfinite(out), out.to(at::kDouble), wide / scale));
}

template <class Kind>
struct Reduce : Kind {
  static const char* name() { return name_of_op<Kind>(); }

  static Mask check(const Call& call) {
    check_tensor(name(), "x", call.x);
    Kind::check_dtypes(call.x, call.dtype);
    return reduced_dims(name(), call.x, call.dim);
  }

  static Tensor meta(const Call& call) {
    const Tensor& x = call.x;
    const Mask mask = check(call);
    c10::SymDimVector shape;
    for (int64_t d = 0; d < x.dim(); ++d) {
      if (!mask[d]) shape.push_back(x.sym_size(d));
      if (mask[d] && call.keepdim) shape.push_back(1);
    }
    return empty_of(shape, x.options().dtype(result_dtype(x, call.dtype)));
  }

  static Tensor kernel(const Call& call) {
    const Tensor& x = call.x;
    Tensor out = meta(call);
    if (out.numel() == 0) return out;
    if (is_for_torch(x, call.dtype)) return Kind::by_torch(call).contiguous();
    if (x.numel() == 0) return out.fill_(Kind::kOfNothing);
    if (x.numel() == out.numel()) {
      out.view(x.sizes()).copy_(x);
      return out;
    }
    const double divisor = Kind::kDivides ? static_cast<double>(x.numel() / out.numel()) : 1;
    const Mask mask = reduced_dims(name(), x, call.dim);
    if (reduce_into(name(), x, mask, out, divisor)) reduce_widely(name(), x, mask, out, divisor);
    return out;
  }

  static Tensor composite(const Call& call) {
    check(call);
    return Kind::by_torch(call);
  }

  static Tensor recorded(const Below& below, const Call& call) {
    const Tensor& x = call.x;
    const Tensor out = below.call<Reduce>(call);
    if (!at::isFloatingType(out.scalar_type())) return out;  // integers have no gradient
    const Mask mask = reduced_dims(name(), x, call.dim);
    c10::SmallVector<int64_t, 8> removed;
    c10::SymInt count = 1;
    for (int64_t d = 0; d < x.dim(); ++d) {
      if (!mask[d]) continue;
      if (!call.keepdim) removed.push_back(d);
      if (Kind::kDivides) count = count * x.sym_size(d);
    }
    const c10::SymDimVector sizes(x.sym_sizes());
    const at::ScalarType x_dtype = x.scalar_type();
    // Divides and casts the incoming gradient while it is small, then expands it without a copy.
    return record(name(), {x}, out, keep(),
                  [sizes, removed, count, x_dtype](const Incoming& in, const Kept<0>&) {
                    Tensor grad = in[0];
                    if (Kind::kDivides) grad = grad / at::Scalar(count);
                    grad = grad.to(x_dtype);
                    for (const int64_t d : removed) grad = grad.unsqueeze(d);
                    return variable_list{grad.expand_symint(sizes)};
                  });
  }
};

struct SumOp : Reduce<Sum> {
  /// Under autocast on CUDA the sum of half precision is float32 unless a dtype is given, as in
  /// torch.
  static Tensor autocast(const Autocast& cast, const Call& call) {
    check_tensor(name(), "x", call.x);
    Call given = call;
    const bool is_half_on_cuda = call.x->is_cuda() && is_half(call.x->scalar_type());
    if (cast.device() == at::kCUDA && is_half_on_cuda && !call.dtype) given.dtype = at::kFloat;
    return torchkiln::call<SumOp>(given);
  }
};
using MeanOp = Reduce<Mean>;

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchkiln, m) { define<SumOp, MeanOp>(m); }

}  // namespace torchkiln::reduction_ops

namespace torchkiln {

at::Tensor sum(const at::Tensor& x, at::OptionalIntArrayRef dim, bool keepdim,
               std::optional<at::ScalarType> dtype) {
  return call<reduction_ops::SumOp>(x, dim, keepdim, dtype);
}

at::Tensor mean(const at::Tensor& x, at::OptionalIntArrayRef dim, bool keepdim,
                std::optional<at::ScalarType> dtype) {
  return call<reduction_ops::MeanOp>(x, dim, keepdim, dtype);
}

}  // namespace torchkiln
