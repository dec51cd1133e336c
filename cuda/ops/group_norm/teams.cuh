#pragma once

// Groups whose elements are adjacent in memory are the rows of this file. A team of threads holds a
// row in registers: forward_teams.cu, backward_teams.cu. Each element is read once.
//
//   group     | channel 0: inner elements | channel 1 | ... |
//   column      0 ... inner - 1             inner ...         count - 1

#include "detail/rowwise/tile.cuh"
#include "factors.cuh"
#include "launch.cuh"

namespace torchkiln::cuda {
namespace {

using namespace rowwise;

/// The groups of a tensor as rows.
struct GroupRows {
  TeamShape team;
  Divisor inner;   // elements of a channel
  Divisor groups;  // groups per sample
};

/// Weight and bias of the vectors of a group.
template <class Tile>
class GroupParameters {
 public:
  using T = typename Tile::T;
  using C = Compute<T>;
  static constexpr int kLanes = Tile::kLanes;

  /// `row`: the index of the group among the groups of all samples.
  template <class Problem>
  __device__ __forceinline__ GroupParameters(const Problem& p, const GroupRows& rows, int64_t row)
      : weight_(p.weight), bias_(p.bias), dtype_(p.parameter_dtype), inner_(rows.inner) {
    const auto group = static_cast<uint32_t>(row);
    const uint32_t sample = rows.groups.quotient(group);
    first_ = static_cast<int64_t>(group - sample * rows.groups.divisor()) *
             p.layout.channels_per_group();
  }

  /// Loads weight and bias for item k; 1 and 0 if the norm has none.
  __device__ __forceinline__ void load(const Tile& tile, int k, C (&weight)[kLanes],
                                       C (&bias)[kLanes]) const {
#pragma unroll
    for (int i = 0; i < kLanes; ++i) weight[i] = C(1), bias[i] = C(0);
    if (weight_ != nullptr) load(weight_, tile, k, weight);
    if (bias_ != nullptr) load(bias_, tile, k, bias);
  }

 private:
  __device__ __forceinline__ void load(const void* from, const Tile& tile, int k,
                                       C (&to)[kLanes]) const {
    if (inner_.divisor() == 1) {  // the parameters of a vector are adjacent, too
      if (dtype_ == DtypeOf<T>::value) {
        tile.load_parameters(k, static_cast<const T*>(from) + first_, to);
      } else {
        tile.load_parameters(k, static_cast<const float*>(from) + first_, to);
      }
    } else {
      const int column = tile.has_any(k) ? tile.column(k) : 0;
      if (inner_.divisor() % kLanes == 0) {  // all lanes have one channel
        const uint32_t channel = inner_.quotient(static_cast<uint32_t>(column));
        const C value = read_parameter<C>(from, first_ + channel, dtype_);
#pragma unroll
        for (int i = 0; i < kLanes; ++i) to[i] = value;
        return;
      }
      int64_t channels[kLanes];
#pragma unroll
      for (int i = 0; i < kLanes; ++i)
        channels[i] = first_ + inner_.quotient(static_cast<uint32_t>(column + i));
      read_parameters(from, channels, dtype_, to);
    }
  }

  const void* weight_;
  const void* bias_;
  Dtype dtype_;
  const Divisor& inner_;
  int64_t first_;  // first channel of the group
};

/// The factors of the lanes of a vector: the argument of the activation is
/// (x - mean) * scale + shift, as in ChannelFactors.
template <class C, int N>
__device__ __forceinline__ void set_factors(C low, C rstd, const C (&weight)[N], C (&scale)[N],
                                            C (&shift)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    scale[i] = rstd * weight[i];
    // If the weight is infinite, its product with `low` (perhaps 0) must not make the result NaN.
    if (scale[i] - scale[i] == C(0)) shift[i] -= low * scale[i];
  }
}

/// Computes x - mean, its scale, and the gradient g of the activation's argument from vectors of x
/// and grad.
template <class Vector, class Act, class C, int N>
__device__ __forceinline__ void differentiate(const Act& act, C mean, C low, C rstd,
                                              const Vector& x, const Vector& grad,
                                              const C (&weight)[N], const C (&bias)[N], C (&g)[N],
                                              C (&from_mean)[N], C (&scale)[N]) {
  C z[N], shift[N];
#pragma unroll
  for (int i = 0; i < N; ++i) shift[i] = bias[i];
  set_factors(low, rstd, weight, scale, shift);
  widen(x, from_mean);
  widen(grad, g);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    from_mean[i] -= mean;
    z[i] = fma(from_mean[i], scale[i], shift[i]);
  }
  act.differentiate(g, z);
}

/// Vectors of a tensor that a thread loads before it uses the first one: 32 bytes, or 16 bytes if
/// the activation is selected at run time, because the code of all activations is repeated per
/// vector.
template <class Vector, class Act>
inline constexpr int kVectorsInFlight =
    Act::kIsFixed ? std::clamp(32 / static_cast<int>(sizeof(Vector)), 2, 8)
                  : std::clamp(16 / static_cast<int>(sizeof(Vector)), 1, 4);

/// Calls body(k) for each item of a tile. If the activation is selected at run time, body is
/// compiled once instead of once per item; the items are then in local memory.
template <class Act, int kItems, class Body>
__device__ __forceinline__ void for_each_item(const Body& body) {
  if constexpr (Act::kIsFixed) {
#pragma unroll
    for (int k = 0; k < kItems; ++k) body(k);
  } else {
#pragma unroll 1
    for (int k = 0; k < kItems; ++k) body(k);
  }
}

/// Calls body(activation): none and silu are compiled into the kernels, others are selected at run
/// time.
template <class T, class Body>
Status with_team_activation(Activation activation, const Body& body) {
  using Math = MathFor<T>;
  if (activation == kActivation<None>) return body(FixedActivation<None, Math>{});
  if (activation == kActivation<Silu>) return body(FixedActivation<Silu, Math>{});
  return body(SelectedActivation<Math>{activation});
}

/// Calls body(TypeTag<Tile>, activation, rows).
template <class Problem, class Body>
Status with_group_rows(const Problem& p, const GroupTeamPlan& plan, const Body& body) {
  const GroupRows rows{plan.team, Divisor(static_cast<uint32_t>(p.layout.inner)),
                       Divisor(static_cast<uint32_t>(p.layout.groups))};
  return dispatch_floating(p.dtype, [&](auto dtype) {
    using T = typename decltype(dtype)::type;
    return with_team_activation<T>(p.activation, [&](auto act) {
      using Vectors = RowVectors<T, kVectorLanes<T>, true>;
      using Elements = RowVectors<T, 1, true>;
      return plan.in_vectors ? body(TypeTag<RowTile<Vectors, kFewItems>>{}, act, rows)
                             : body(TypeTag<RowTile<Elements, kFewItems>>{}, act, rows);
    });
  });
}

}  // namespace
}  // namespace torchkiln::cuda
