// Products of half precision with a gate on compute capability 9.0, compiled for 90a only. The
// finishers of gate_kernel apply the gate, the finishers of gate_gradient_kernel differentiate it.

#include "detail/gemm/sm90_launch.cuh"
#include "detail/gemm/sm90_strip.cuh"
#include "detail/gemm/variants.h"
#include "torchkiln/core/functors.h"

namespace torchkiln::gemm::sm90 {
namespace {

/// Calls begin(tile) for each tile. Calls body(tile, multiplier, first strip) for each multiplier
/// once its sums are in shared memory, and releases the sums afterwards. The first strip of a
/// finisher differs between multipliers, so that finishers have equal numbers of strips.
template <class T, class Begin, class Body>
__device__ __forceinline__ void for_each_sums(const Parameters& p, Shared<T>& shared, int finisher,
                                              int lane, const Begin& begin, const Body& body) {
  uint32_t parity = 0;
  for (int index = blockIdx.x; index < p.tiles; index += gridDim.x, parity ^= 1) {
    const Tile tile = tile_at(p, index);
    begin(tile);
#pragma unroll 1
    for (int multiplier = 0; multiplier < kMultipliers; ++multiplier) {
      wait_for_phase(&shared.sums_full[multiplier], parity);
      body(tile, multiplier, (finisher + multiplier) % kFinishers);
      wait_until_read<0>();
      __syncwarp();
      if (lane == 0) ::cuda::ptx::mbarrier_arrive(&shared.sums_empty[multiplier]);
    }
  }
}

/// Writes act(gate) * up for a strip of gates and the strip of ups beside it.
template <class T>
__device__ __forceinline__ void write_gated(const Parameters& p, T* hidden, const Strip<T>& gates,
                                            const Strip<T>& ups) {
  constexpr int kLanes = Strip<T>::kLanes;
  constexpr int kItems = Strip<T>::kItems;
  float values[kItems][kLanes], factors[kItems][kLanes];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    widen(load_vector<kLanes>(gates.item(i)), values[i]);
    widen(load_vector<kLanes>(ups.item(i)), factors[i]);
  }
  with_activation(
      p.activation,
      [&](auto tag) {
        using Act = typename decltype(tag)::type;
#pragma unroll
        for (int i = 0; i < kItems * kLanes; ++i) {
          float& value = values[i / kLanes][i % kLanes];
          value = Gated<Act, FastMath>{}(value, factors[i / kLanes][i % kLanes]);
        }
      },
      Gates{});
  const int column = gates.first_column + gates.column();
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int row = gates.first_row + gates.row(i);
    if (row < p.m) device::store(hidden + int64_t{row} * p.half + column, values[i]);
  }
}

/// hidden [m, p.half] = act(gate) * up, where gate and up are the halves of the product. A tile has
/// 128 columns of each half.
template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    gate_kernel(const __grid_constant__ Parameters p, T* hidden) {
  run_roles<T, Major::k, Major::k>(p, [&](Shared<T>& shared, int finisher, int lane) {
    for_each_sums(
        p, shared, finisher, lane, [](const Tile&) {},
        [&](const Tile& tile, int multiplier, int first) {
          const auto strip = [&](int i) { return strip_at(shared, tile, multiplier, i, lane); };
          if (p.keeps_preactivation) {
#pragma unroll 1
            for (int i = first; i < kStripsOfMultiplier; i += kFinishers)
              strip(i).store_box_to(p.preactivation);
            close_stores();
          }
#pragma unroll 1
          for (int i = first; i < kStripsOfMultiplier / 2; i += kFinishers)
            write_gated(p, hidden, strip(i), strip(i + kStripsOfMultiplier / 2));
        });
  });
}

/// Tensors of the hidden layer, contiguous: gate and up [m, 2 n], their gradients [m, 2 n], which
/// may overwrite them, and act(gate) * up [m, n].
template <class T>
struct GateTensors {
  const T* gate_up;
  T* grad_gate_up;
  T* hidden;
};

/// Writes the gradients of gate and up for a strip of the gradient of act(gate) * up.
template <class T>
__device__ __forceinline__ void write_gradients(const Parameters& p, const GateTensors<T>& tensors,
                                                const Strip<T>& strip) {
  constexpr int kLanes = Strip<T>::kLanes;
  constexpr int kItems = Strip<T>::kItems;
  const int column = strip.first_column + strip.column();
  if (column >= p.n) return;
  Vec<T, kLanes> gates[kItems], ups[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int64_t row = strip.first_row + strip.row(i);
    if (row >= p.m) continue;
    const T* const from = tensors.gate_up + row * 2 * p.n + column;
    gates[i] = load_vector<kLanes>(from);
    ups[i] = load_vector<kLanes>(from + p.n);
  }
  with_activation(
      p.activation,
      [&](auto tag) {
        using Act = typename decltype(tag)::type;
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          const int64_t row = strip.first_row + strip.row(i);
          if (row >= p.m) continue;
          float grad[kLanes], gate[kLanes], up[kLanes];
          widen(load_vector<kLanes>(strip.item(i)), grad);
          widen(gates[i], gate);
          widen(ups[i], up);
#pragma unroll
          for (int lane = 0; lane < kLanes; ++lane) {
            const Triple<float> found =
                GatedGradientAndValue<Act, FastMath>{}(grad[lane], gate[lane], up[lane]);
            gate[lane] = found.first;
            up[lane] = found.second;
            grad[lane] = found.third;
          }
          T* const to = tensors.grad_gate_up + row * 2 * p.n + column;
          device::store(to, gate);
          device::store(to + p.n, up);
          device::store(tensors.hidden + row * p.n + column, grad);
        }
      },
      Gates{});
}

/// Writes the gradients of gate and up. The product is the gradient of act(gate) * up, and is not
/// stored.
template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    gate_gradient_kernel(const __grid_constant__ Parameters p, GateTensors<T> tensors) {
  run_roles<T, Major::k, Major::outer>(p, [&](Shared<T>& shared, int finisher, int lane) {
    for_each_sums(
        p, shared, finisher, lane,
        [&](const Tile& tile) {
#pragma unroll
          for (int half = 0; half < 2; ++half)
            prefetch_tile(tensors.gate_up + half * p.n, p.m, p.n, 2 * p.n, tile,
                          finisher * kWarpLanes + lane);
        },
        [&](const Tile& tile, int multiplier, int first) {
#pragma unroll 1
          for (int i = first; i < kStripsOfMultiplier; i += kFinishers)
            write_gradients(p, tensors, strip_at(shared, tile, multiplier, i, lane));
        });
  });
}

template <class T>
Status gate_of(const Matmul& p, int multiprocessors, cudaStream_t stream) {
  Parameters parameters{};
  Status status = make_parameters<T>(p, /*half=*/p.n / 2, parameters);
  if (status.ok() && p.preactivation != nullptr)
    status = make_tensor_map<T>(parameters.preactivation, describe_result(p, p.preactivation),
                                kStripRows);
  if (!status.ok()) return status;
  return launch_kernel(gate_kernel<T>, grid_of<T>(p, multiprocessors), /*overlaps=*/true, stream,
                       parameters, static_cast<T*>(p.out));
}

template <class T>
Status gate_gradient_of(const GateGradient& p, int multiprocessors, cudaStream_t stream) {
  Parameters parameters{};
  const Status status = make_parameters<T>(p.product, /*half=*/0, parameters);
  if (!status.ok()) return status;
  const GateTensors<T> tensors{static_cast<const T*>(p.gate_up), static_cast<T*>(p.grad_gate_up),
                               static_cast<T*>(p.product.out)};
  return launch_kernel(gate_gradient_kernel<T>, grid_of<T>(p.product, multiprocessors),
                       /*overlaps=*/true, stream, parameters, tensors);
}

}  // namespace

Status matmul_gate(const Matmul& p, int multiprocessors, cudaStream_t stream) {
  if (p.dtype == Dtype::float16) return gate_of<__half>(p, multiprocessors, stream);
  return gate_of<__nv_bfloat16>(p, multiprocessors, stream);
}

Status matmul_gate(const GateGradient& p, int multiprocessors, cudaStream_t stream) {
  if (p.product.dtype == Dtype::float16)
    return gate_gradient_of<__half>(p, multiprocessors, stream);
  return gate_gradient_of<__nv_bfloat16>(p, multiprocessors, stream);
}

}  // namespace torchkiln::gemm::sm90
