// Products of half precision on compute capability 9.0. Compiled for 90a alone.
//
// A block has a tile of 128 by 256 results at a time, and its four warpgroups have three roles:
//
//   producer         one thread copies panels of A and B into a ring of stages
//   two multipliers  multiply 64 by 64 of A with 64 by 256 of B, stage by stage; 64 by 256 sums
//   stay
//                    in registers. Then sum * scale + bias goes to shared memory, rounded
//   finisher         applies the activation to it, adds the residual and stores it
//
//                 k ->                            n ->
//               +-----+-----+--        +------------------------+
//   multiplier  | 64  |     |       k  | B  64 x 256  (a stage) |
//        1, 2   +-----+ ... +--     |  +------------------------+      +------------------------+
//               | 64  |     |       v  | ...                    |  ->  | sums, twice 64 x 256   |
//               +-----+-----+--        +------------------------+      +------------------------+
//                 A 128 x 64
//
// Nobody waits for the whole block: while one tile is finished, the next one is multiplied, and the
// stages of the one after that are fetched. The blocks stay until no tile is left.
//
// Pairs of blocks that share what they copy (a cluster and multicast) were measured, too: no faster
// on an H200, whose second-level cache keeps up with the copies.

#include "torchkiln/matmul_kernels.h"

#include <algorithm>
#include <utility>

#include "torchkiln/launch.cuh"
#include "torchkiln/pipeline.cuh"
#include "torchkiln/tensor_map.cuh"
#include "torchkiln/vec.cuh"
#include "torchkiln/wgmma.cuh"

namespace torchkiln::cuda::hopper {
namespace {

using wgmma::Major;

constexpr int kTileRows = 128;
constexpr int kTileColumns = wgmma::kColumns;
constexpr int kTileDepth = 64;
constexpr int kStages = 3;

constexpr int kWarp = 32;
constexpr int kWarpgroup = 4 * kWarp;
constexpr int kMultipliers = kTileRows / wgmma::kRows;
constexpr int kFinishers = 3;  // warps
constexpr int kThreads = (1 + kMultipliers) * kWarpgroup;
// Of 168 each at the start: 504 for the three warpgroups.
constexpr int kOtherRegisters = 104;
constexpr int kMultiplierRegisters = 200;

// What is fetched at once: 128 rows of A or columns of B, 64 deep. Where k is not adjacent, it
// takes two boxes.
constexpr int kPanelWidth = 128;
constexpr int kPanel = kPanelWidth * kTileDepth;
constexpr int kBox = kTileDepth * kTileDepth;
constexpr int kPanelsOfB = kTileColumns / kPanelWidth;
constexpr uint32_t kStageBytes = (1 + kPanelsOfB) * kPanel * 2;

// The sums of a multiplier in shared memory: slices of 64 by 64, of which 16 rows are finished and
// stored at once.
constexpr int kSliceColumns = 64;
constexpr int kSlice = wgmma::kRows * kSliceColumns;
constexpr int kSlices = kTileColumns / kSliceColumns;
constexpr int kStripRows = 16;

// Blocks at work together have tiles of a nearly square part of the result, whose rows and
// columns the second-level cache holds.
constexpr int kGroupRows = 8;

template <class T>
struct alignas(1024) Shared {
  T a[kStages][kPanel];
  T b[kStages][kPanelsOfB * kPanel];
  T sums[kMultipliers][kSlices][kSlice];  // on the way to the finisher, swizzled
  float bias[kMultipliers][2][kTileColumns];
  StageBarriers<kStages> stages;
  uint64_t sums_full[kMultipliers];
  uint64_t sums_empty[kMultipliers];
};

struct Parameters {
  CUtensorMap a;
  CUtensorMap b;
  CUtensorMap out;
  CUtensorMap preactivation;
  const void* bias;
  const void* residual;
  bool bias_is_float;
  bool keeps_preactivation;
  bool repeats_a;  // over the batch
  bool repeats_b;
  Activation activation;
  float scale;
  int m;
  int n;
  int depth_steps;
  int tile_rows;
  int tile_columns;
  int tiles;  // all in all
};

/// Until all threads of this multiplier have come.
__device__ __forceinline__ void meet(int multiplier) {
  asm volatile("bar.sync %0, %1;" ::"r"(1 + multiplier), "n"(kWarpgroup) : "memory");
}

/// Where a block's tile begins.
struct Tile {
  int row;
  int column;
  int batch;
};

__device__ __forceinline__ Tile tile_at(const Parameters& p, int index) {
  const int of_batch = p.tile_rows * p.tile_columns;
  const int batch = index / of_batch;
  index -= batch * of_batch;
  const int of_group = kGroupRows * p.tile_columns;
  const int group = index / of_group;
  index -= group * of_group;
  const int height = min(kGroupRows, p.tile_rows - group * kGroupRows);
  const int column = index / height;
  const int row = group * kGroupRows + (index - column * height);
  return {row * kTileRows, column * kTileColumns, batch};
}

/// Copies kPanelWidth of an operand, from `outer` on, and kTileDepth of k.
template <Major kMajor, class T>
__device__ __forceinline__ void copy_panel(T* to, const CUtensorMap& map, int outer, int depth,
                                           int batch, uint64_t* full) {
  if constexpr (kMajor == Major::k) {
    copy_box(to, map, depth, outer, batch, full);
  } else {
#pragma unroll
    for (int box = 0; box < kPanel / kBox; ++box)
      copy_box(to + box * kBox, map, outer + box * kTileDepth, depth, batch, full);
  }
}

template <class T, Major kMajorA, Major kMajorB>
__device__ __forceinline__ void produce(const Parameters& p, Shared<T>& shared) {
  StageRing<kStages> ring(shared.stages);
  StagePlace<kStages> place;
  for (int index = blockIdx.x; index < p.tiles; index += gridDim.x) {
    const Tile tile = tile_at(p, index);
    const int batch_a = p.repeats_a ? 0 : tile.batch;
    const int batch_b = p.repeats_b ? 0 : tile.batch;
    for (int step = 0; step < p.depth_steps; ++step, place.advance()) {
      const int depth = step * kTileDepth;
      uint64_t* full = ring.claim(place, kStageBytes);
      copy_panel<kMajorA>(shared.a[place.stage], p.a, tile.row, depth, batch_a, full);
#pragma unroll
      for (int panel = 0; panel < kPanelsOfB; ++panel) {
        copy_panel<kMajorB>(shared.b[place.stage] + panel * kPanel, p.b,
                            tile.column + panel * kPanelWidth, depth, batch_b, full);
      }
    }
  }
}

/// Of the columns 2 t and 2 t + 1, for thread t of a warpgroup.
template <class T>
__device__ __forceinline__ float2 load_bias(const Parameters& p, int column, int thread) {
  float values[2] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int at = column + thread * 2 + i;
    if (p.bias == nullptr || at >= p.n) continue;
    values[i] = p.bias_is_float ? static_cast<const float*>(p.bias)[at]
                                : convert<float>(static_cast<const T*>(p.bias)[at]);
  }
  return {values[0], values[1]};
}

/// Hands sum * scale + bias over, rounded.
template <class T>
__device__ __forceinline__ void hand_over(T (&to)[kSlices][kSlice], const float* bias, float scale,
                                          int thread, const float (&sums)[wgmma::kSums]) {
  const int lane = thread % 32;
  const int row = thread / 32 * 16 + lane % 16;
  // Four blocks of 8 by 8 at a time: upper and lower, left and right.
  constexpr int kAtOnce = 16;
#pragma unroll
  for (int column = 0; column < kTileColumns; column += kAtOnce) {
    uint32_t blocks[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 more =
          *reinterpret_cast<const float2*>(bias + column + i / 2 * 8 + lane % 4 * 2);
      const int sum = column / 2 + i * 2;
      const Vec<T, 2> pair{convert<T>(sums[sum] * scale + more.x),
                           convert<T>(sums[sum + 1] * scale + more.y)};
      blocks[i] = *reinterpret_cast<const uint32_t*>(&pair);
    }
    const int chunk = column % kSliceColumns / 8 + lane / 16;
    wgmma::store_blocks(reinterpret_cast<char*>(to[column / kSliceColumns]) + swizzled(row, chunk),
                        blocks);
  }
}

template <class T, Major kMajorA, Major kMajorB>
__device__ __forceinline__ void multiply(const Parameters& p, Shared<T>& shared, int multiplier) {
  StageRing<kStages> ring(shared.stages);
  StagePlace<kStages> place;
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  float sums[wgmma::kSums];
  uint32_t turn = 0;
  for (int index = blockIdx.x; index < p.tiles; index += gridDim.x) {
    const Tile tile = tile_at(p, index);
    const float2 bias = load_bias<T>(p, tile.column, thread);  // needed after the products
    int last_stage = 0;
    for (int step = 0; step < p.depth_steps; ++step, place.advance()) {
      ring.wait_full(place);
      // Either way of lying, a multiplier's 64 rows of A are one box.
      const uint64_t a = wgmma::describe<kMajorA>(shared.a[place.stage] + multiplier * kBox, 0);
      const uint64_t b = wgmma::describe<kMajorB>(shared.b[place.stage], kBox * sizeof(T));
      wgmma::fence();
#pragma unroll
      for (int i = 0; i < kTileDepth / wgmma::kDepth; ++i) {
        wgmma::multiply<T, kMajorA, kMajorB>(sums, a + i * wgmma::kNextStep<kMajorA>,
                                             b + i * wgmma::kNextStep<kMajorB>, step + i > 0);
      }
      wgmma::commit();
      // These are under way, those of the stage before are done.
      wgmma::wait<1>();
      if (step > 0 && thread == 0) ring.release(last_stage);
      last_stage = place.stage;
    }
    // Written while the last products run. The one of two tiles ago has been read: since then, all
    // have met.
    float* const own_bias = shared.bias[multiplier][turn];
    *reinterpret_cast<float2*>(own_bias + thread * 2) = bias;
    meet(multiplier);
    wgmma::finish(sums);
    if (thread == 0) ring.release(last_stage);
    wait_for_phase(&shared.sums_empty[multiplier], turn ^ 1);
    hand_over(shared.sums[multiplier], own_bias, p.scale, thread, sums);
    fence_before_copy();
    ::cuda::ptx::mbarrier_arrive(&shared.sums_full[multiplier]);
    turn ^= 1;
  }
}

/// What a warp of the finishers takes at once: 16 rows of a slice, of which a lane has 16 bytes of
/// every fourth.
template <class T>
struct Strip {
  static constexpr int kLanes = kVectorLanes<T>;
  static constexpr int kChunks = kSliceColumns / kLanes;  // of a row
  static constexpr int kRowsApart = kWarp / kChunks;
  static constexpr int kItems = kStripRows / kRowsApart;

  T* at;       // its first row; as many elements of shared memory follow as it has
  Tile place;  // of its first element among the results
  int lane;

  __device__ __forceinline__ int row(int i) const { return i * kRowsApart + lane / kChunks; }
  __device__ __forceinline__ int column() const { return lane % kChunks * kLanes; }
  __device__ __forceinline__ T* item(int i) const {
    // kStripRows are a multiple of the swizzle's eight.
    return reinterpret_cast<T*>(reinterpret_cast<char*>(at) + swizzled(row(i), lane % kChunks));
  }
};

/// sums = activation(sums) + residual, in place.
template <class T>
__device__ __forceinline__ void finish_strip(const Parameters& p, const Strip<T>& strip) {
  constexpr int kLanes = Strip<T>::kLanes;
  constexpr int kItems = Strip<T>::kItems;
  Vec<T, kLanes> residual[kItems] = {};
  if (p.residual != nullptr) {
    const int row = strip.place.row + strip.row(0);
    const int column = strip.place.column + strip.column();
    const T* from =
        static_cast<const T*>(p.residual) + (int64_t{strip.place.batch} * p.m + row) * p.n + column;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int down = i * Strip<T>::kRowsApart;
      if (row + down < p.m && column < p.n)
        residual[i] = load_constant<kLanes>(from + int64_t{down} * p.n);
    }
  }
  float values[kItems][kLanes];
#pragma unroll
  for (int i = 0; i < kItems; ++i) widen(load_vector<kLanes>(strip.item(i)), values[i]);
  with_activation(
      p.activation,
      [&](auto tag) {
        using Act = typename decltype(tag)::type;
#pragma unroll
        for (int i = 0; i < kItems * kLanes; ++i) {
          float& value = values[i / kLanes][i % kLanes];
          value = Act::template value<FastMath>(value);
        }
      },
      Activations{});
  if (p.residual != nullptr) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      float more[kLanes];
      widen(residual[i], more);
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) values[i][lane] += more[lane];
    }
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) torchkiln::store(strip.item(i), values[i]);
}

/// So that nobody waits for the memory when the sums are there.
template <class T>
__device__ __forceinline__ void prefetch_residual(const Parameters& p, const Tile& tile,
                                                  int thread) {
  if (p.residual == nullptr) return;
  constexpr int kLine = 128 / static_cast<int>(sizeof(T));
  constexpr int kLinesOfRow = kTileColumns / kLine;
  for (int line = thread; line < kTileRows * kLinesOfRow; line += kFinishers * kWarp) {
    const int row = tile.row + line / kLinesOfRow;
    const int column = tile.column + line % kLinesOfRow * kLine;
    if (row >= p.m || column >= p.n) continue;
    const T* from =
        static_cast<const T*>(p.residual) + (int64_t{tile.batch} * p.m + row) * p.n + column;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
  }
}

/// One warp: every third strip of each multiplier's sums.
template <class T>
__device__ __forceinline__ void finish(const Parameters& p, Shared<T>& shared, int finisher,
                                       int lane) {
  const bool has_work = p.activation != kActivation<None> || p.residual != nullptr;
  uint32_t turn = 0;
  for (int index = blockIdx.x; index < p.tiles; index += gridDim.x, turn ^= 1) {
    const Tile tile = tile_at(p, index);
    prefetch_residual<T>(p, tile, finisher * kWarp + lane);
#pragma unroll 1
    for (int multiplier = 0; multiplier < kMultipliers; ++multiplier) {
      constexpr int kStripsOfSlice = wgmma::kRows / kStripRows;
      const auto for_each_strip = [&](const auto& body) {
#pragma unroll 1
        for (int i = finisher; i < kSlices * kStripsOfSlice; i += kFinishers) {
          const int slice = i / kStripsOfSlice;
          const int row = i % kStripsOfSlice * kStripRows;
          body(Strip<T>{shared.sums[multiplier][slice] + row * kSliceColumns,
                        {tile.row + multiplier * wgmma::kRows + row,
                         tile.column + slice * kSliceColumns, tile.batch},
                        lane});
        }
      };
      const auto store = [&](const CUtensorMap& map, const Strip<T>& strip) {
        if (lane == 0)
          store_box(map, strip.place.column, strip.place.row, strip.place.batch, strip.at);
      };
      wait_for_phase(&shared.sums_full[multiplier], turn);
      if (p.keeps_preactivation) {
        for_each_strip([&](const Strip<T>& strip) { store(p.preactivation, strip); });
        close_stores();
        wait_until_read<0>();
        __syncwarp();
      }
      for_each_strip([&](const Strip<T>& strip) {
        if (has_work) {
          finish_strip(p, strip);
          fence_before_copy();
          __syncwarp();
        }
        store(p.out, strip);
      });
      close_stores();
      // A multiplier's buffer is given back when the copy engine has read it, which comes to that
      // behind the panels it has been asked for: the first one's while the second's is finished.
      if (multiplier > 0) {
        wait_until_read<1>();
        if (lane == 0) ::cuda::ptx::mbarrier_arrive(&shared.sums_empty[multiplier - 1]);
      }
    }
    wait_until_read<0>();
    if (lane == 0) ::cuda::ptx::mbarrier_arrive(&shared.sums_empty[kMultipliers - 1]);
  }
}

template <class T>
__device__ __forceinline__ void open_barriers(Shared<T>& shared) {
  for (int multiplier = 0; multiplier < kMultipliers; ++multiplier) {
    ::cuda::ptx::mbarrier_init(&shared.sums_full[multiplier], kWarpgroup);
    ::cuda::ptx::mbarrier_init(&shared.sums_empty[multiplier], kFinishers);
  }
  StageRing<kStages>(shared.stages).open(kMultipliers);
}

template <class T, Major kMajorA, Major kMajorB>
__global__ void __launch_bounds__(kThreads, 1) matmul_kernel(const __grid_constant__ Parameters p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<T>*>(memory);
  if (threadIdx.x == 0) open_barriers(shared);
  __syncthreads();
  wait_for_previous_kernel();
  const int warpgroup = static_cast<int>(threadIdx.x) / kWarpgroup;
  if (warpgroup < kMultipliers) {
    wgmma::take_registers<kMultiplierRegisters>();
    multiply<T, kMajorA, kMajorB>(p, shared, warpgroup);
  } else {
    wgmma::keep_registers<kOtherRegisters>();
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
    if (thread >= kWarp) {
      finish(p, shared, thread / kWarp - 1, thread % kWarp);
    } else if (thread == 0) {
      produce<T, kMajorA, kMajorB>(p, shared);
    }
    __syncwarp();
  }
}

/// An operand as the copy engine sees it. `outer` and `depth` are its sizes.
struct Operand {
  Major major;
  MapShape shape;
};

Operand describe(const Matrices& from, int64_t outer, int64_t depth, int64_t outer_stride,
                 int64_t depth_stride, int64_t batch) {
  // The stride of a dimension of size 1 says nothing; an adjacent one is the better reading.
  const bool deep = depth_stride == 1 || (depth == 1 && outer_stride != 1);
  const Major major = deep ? Major::k : Major::outer;
  MapShape shape{from.data,
                 deep ? depth : outer,
                 deep ? outer : depth,
                 batch,
                 deep ? outer_stride : depth_stride,
                 from.batch_stride};
  constexpr int64_t kWhole = 8;
  if (shape.outer == 1) shape.outer_stride = (shape.inner + kWhole - 1) / kWhole * kWhole;
  if (from.batch_stride == 0) shape.batch = 1;
  if (shape.batch == 1) shape.batch_stride = shape.outer * shape.outer_stride;
  return {major, shape};
}

Operand describe_a(const Matmul& p) {
  return describe(p.a, p.m, p.k, p.a.row_stride, p.a.column_stride, p.batch);
}
Operand describe_b(const Matmul& p) {
  return describe(p.b, p.n, p.k, p.b.column_stride, p.b.row_stride, p.batch);
}
MapShape describe_result(const Matmul& p, const void* data) {
  return {data, p.n, p.m, p.batch, p.n, p.m * p.n};
}

bool is_adjacent(const Matrices& matrices, int64_t rows, int64_t columns) {
  return matrices.row_stride == 1 || matrices.column_stride == 1 || rows == 1 || columns == 1;
}

template <class T, Major kMajorA, Major kMajorB>
Status launch(const Parameters& parameters, int multiprocessors, cudaStream_t stream) {
  const auto kernel = matmul_kernel<T, kMajorA, kMajorB>;
  constexpr int kSharedBytes = sizeof(Shared<T>);
  static_assert(kSharedBytes <= 227 * 1024, "more shared memory than a block may have");
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  cudaLaunchAttribute overlapped{};
  overlapped.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlapped.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(std::min(parameters.tiles, multiprocessors)));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = stream;
  config.attrs = &overlapped;
  config.numAttrs = 1;
  if (error == cudaSuccess) error = cudaLaunchKernelEx(&config, kernel, parameters);
  if (error == cudaSuccess) return {};
  (void)cudaGetLastError();
  return {cudaGetErrorString(error)};
}

template <class T>
Status matmul_of(const Matmul& p, int multiprocessors, cudaStream_t stream) {
  const Operand a = describe_a(p);
  const Operand b = describe_b(p);
  Parameters parameters{};
  const auto box = [](const Operand& operand) {
    return operand.major == Major::k ? kPanelWidth : kTileDepth;
  };
  Status status = make_tensor_map<T>(parameters.a, a.shape, box(a));
  if (status.ok()) status = make_tensor_map<T>(parameters.b, b.shape, box(b));
  if (status.ok())
    status = make_tensor_map<T>(parameters.out, describe_result(p, p.out), kStripRows);
  if (status.ok() && p.preactivation != nullptr)
    status = make_tensor_map<T>(parameters.preactivation, describe_result(p, p.preactivation),
                                kStripRows);
  if (!status.ok()) return status;
  const auto pieces = [](int64_t size, int64_t piece) { return (size + piece - 1) / piece; };
  const int64_t tile_rows = pieces(p.m, kTileRows);
  const int64_t tile_columns = pieces(p.n, kTileColumns);
  const int64_t tiles = tile_rows * tile_columns * p.batch;
  if (tiles > INT32_MAX / 2) return {"more tiles than a 32-bit number counts"};
  parameters.bias = p.bias;
  parameters.residual = p.residual;
  parameters.bias_is_float = p.bias_dtype == Dtype::float32;
  parameters.keeps_preactivation = p.preactivation != nullptr;
  parameters.repeats_a = p.a.batch_stride == 0;
  parameters.repeats_b = p.b.batch_stride == 0;
  parameters.activation = p.activation;
  parameters.scale = static_cast<float>(p.scale);
  parameters.m = static_cast<int>(p.m);
  parameters.n = static_cast<int>(p.n);
  parameters.depth_steps = static_cast<int>(pieces(p.k, kTileDepth));
  parameters.tile_rows = static_cast<int>(tile_rows);
  parameters.tile_columns = static_cast<int>(tile_columns);
  parameters.tiles = static_cast<int>(tiles);
  const bool deep_b = b.major == Major::k;
  if (a.major == Major::k) {
    return deep_b ? launch<T, Major::k, Major::k>(parameters, multiprocessors, stream)
                  : launch<T, Major::k, Major::outer>(parameters, multiprocessors, stream);
  }
  return deep_b ? launch<T, Major::outer, Major::k>(parameters, multiprocessors, stream)
                : launch<T, Major::outer, Major::outer>(parameters, multiprocessors, stream);
}

}  // namespace

bool fits(const Matmul& p) {
  constexpr size_t kElement = 2;
  return size_of(p.dtype) == kElement && p.k > 0 && is_adjacent(p.a, p.m, p.k) &&
         is_adjacent(p.b, p.k, p.n) && fits_tensor_map(describe_a(p).shape, kElement) &&
         fits_tensor_map(describe_b(p).shape, kElement) &&
         fits_tensor_map(describe_result(p, p.out), kElement) &&
         (p.preactivation == nullptr ||
          fits_tensor_map(describe_result(p, p.preactivation), kElement)) &&
         aligned(p.residual, sizeof(uint32_t));
}

Status matmul(const Matmul& p, int multiprocessors, cudaStream_t stream) {
  if (p.dtype == Dtype::float16) return matmul_of<__half>(p, multiprocessors, stream);
  return matmul_of<__nv_bfloat16>(p, multiprocessors, stream);
}

}  // namespace torchkiln::cuda::hopper
