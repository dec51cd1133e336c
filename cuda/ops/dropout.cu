#include "torchkiln/kernels/dropout.h"

#include "detail/reduce/columns.cuh"
#include "torchkiln/device/elementwise.cuh"

namespace torchkiln::cuda {

using namespace device;
using namespace reduce;
namespace {

/// Whether each of N adjacent elements is kept. The index of the first, `at`, is a multiple of N.
template <int N>
struct Mask {
  Draw drawn;
  int first;
  uint32_t last;

  __device__ __forceinline__ Mask(const Dropout& dropout, const RandomState& random, int64_t at)
      : drawn(draw(random.seed, random.offset, static_cast<uint64_t>(at) / 8)),
        first(static_cast<int>(at % 8)),
        last(dropout.last) {
    if constexpr (N < 8) {
      // Moves the words of these elements to the front: a variable index would move the array to
      // local memory.
#pragma unroll
      for (int w = 0; w < (N + 1) / 2; ++w) {
#pragma unroll
        for (int from = w + 1; from < 4; ++from)
          if (from == first / 2 + w) drawn.word[w] = drawn.word[from];
      }
      first %= 2;
    }
  }

  __device__ __forceinline__ bool kept(int i) const {
    return N > 1        ? bernoulli(drawn, i, last)
           : first == 0 ? bernoulli(drawn, 0, last)
                        : bernoulli(drawn, 1, last);
  }
};

/// The body of (kept ? x * scale : 0) + residual, with (x + bias) instead of x if there are three
/// inputs.
template <class C>
struct DropoutAdd {
  Dropout dropout;
  C scale;

  template <bool Full, class Packet, int N, size_t... K>
  __device__ __forceinline__ void run(const Packet& packet, int64_t at, int64_t, C (&results)[1][N],
                                      std::index_sequence<K...>) const {
    constexpr int kInputs = sizeof...(K);
    const RandomState random = dropout.random.resolved();
    if (at == 0 && random.record != nullptr) random.write_record();
    const Mask<N> mask(dropout, random, at);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      C x = packet.template get<0>(i);
      if constexpr (kInputs == 3) x += packet.template get<1>(i);
      x = mask.kept(i) ? x * scale : C(0);
      if constexpr (kInputs > 1) x += packet.template get<kInputs - 1>(i);
      results[0][i] = x;
    }
  }
};

/// Column body: one pass over grad writes grad_x and sums the bias gradient.
template <class T, int Lanes>
struct GradientBody {
  using C = Compute<T>;
  static constexpr int kLanes = Lanes;
  // Philox takes much arithmetic: more threads, with fewer rows in flight per thread.
  static constexpr int kRowsInFlight = Lanes > 1 ? 2 : 4;
  static constexpr int kBlocks = 3;
  using Item = Vec<T, Lanes>;

  DropoutBackward problem;
  C scale;
  RandomState random;

  __device__ __forceinline__ void begin(int64_t, bool, C (&)[Lanes]) {
    random = problem.dropout.random.resolved();
  }

  __device__ __forceinline__ Item load(int64_t row, int64_t column) const {
    return load_vector<Lanes>(static_cast<const T*>(problem.grad) + row * problem.grad_row_stride +
                              column * problem.grad_column_stride);
  }

  __device__ __forceinline__ void consume(const Item& item, int64_t row, int64_t column,
                                          C (&sum)[Lanes]) const {
    const int64_t at = row * problem.columns + column;
    const Mask<Lanes> mask(problem.dropout, random, at);
    C masked[Lanes];
#pragma unroll
    for (int i = 0; i < Lanes; ++i) {
      masked[i] = mask.kept(i) ? convert<C>(item.lane[i]) * scale : C(0);
      sum[i] += masked[i];
    }
    if (problem.grad_x != nullptr) store(static_cast<T*>(problem.grad_x) + at, masked);
  }
};

bool uses_vectors(const DropoutBackward& p) {
  const int lanes = vector_lanes(p.dtype);
  return p.grad_column_stride == 1 &&
         rows_in_vectors(p.grad, lanes, {p.columns, p.grad_row_stride}) && aligned(p.grad_x);
}

template <class T, int Lanes>
Status launch_gradients(const DropoutBackward& p, Allocate allocate, CUstream_st* stream) {
  using Body = GradientBody<T, Lanes>;
  const Body body{p, static_cast<Compute<T>>(p.dropout.scale), {}};
  const columns::Plan plan = columns::make_plan(p.rows, p.columns, Lanes, Body::kBlocks);
  return columns::launch<Body::kBlocks>(body, plan, allocate, p.grad_bias, p.bias_dtype, stream);
}

__global__ void record_state(const RandomState random) {
  wait_for_previous_kernel();
  random.resolved().write_record();
}

template <class T, class... In, class Arguments>
Status run(const Arguments& arguments, const Dropout& dropout, CUstream_st* stream) {
  const DropoutAdd<Compute<T>> body{dropout, static_cast<Compute<T>>(dropout.scale)};
  return elementwise::launch_bodies<T, In...>(body, body, arguments, stream);
}

}  // namespace

Status record_random(const RandomState& random, CUstream_st* stream) {
  return launch_overlapped(record_state, Grid{dim3(1), dim3(1)}, stream, random);
}

Status dropout_add(const Elementwise<2>& arguments, const Dropout& dropout, CUstream_st* stream) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return run<T, T, T>(arguments, dropout, stream);
  });
}

Status bias_dropout_add(const Elementwise<3>& arguments, const Dropout& dropout,
                        CUstream_st* stream) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return with_parameter_type<T>(arguments.in_dtype[1], [&](auto bias) {
      return run<T, T, typename decltype(bias)::type, T>(arguments, dropout, stream);
    });
  });
}

Status dropout_backward(const Elementwise<1>& arguments, const Dropout& dropout,
                        CUstream_st* stream) {
  return dispatch_floating(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return run<T, T>(arguments, dropout, stream);
  });
}

Status bias_dropout_backward(const DropoutBackward& p, Allocate allocate, CUstream_st* stream) {
  if (p.columns == 0) return {};
  return dispatch_floating(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return uses_vectors(p) ? launch_gradients<T, kVectorLanes<T>>(p, allocate, stream)
                           : launch_gradients<T, 1>(p, allocate, stream);
  });
}

}  // namespace torchkiln::cuda
