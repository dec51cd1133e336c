// TMA and wgmma of compute capability 9.0: one thread requests whole tiles, two groups of 128
// threads multiply them straight from shared memory.
// m is a multiple of 128, n of 256, k of 64.
#include "detail/gemm/wgmma.cuh"
#include "torchkiln/device/vec.cuh"

using namespace torchkiln;
namespace wgmma = gemm::wgmma;

constexpr int kRows = 128, kColumns = 256, kDepth = 64, kStages = 4, kGroup = 128;
constexpr int kStageBytes = (kRows + kColumns) * kDepth * sizeof(__nv_bfloat16);

// The description of a matrix that the driver encodes: 128 bytes that only TMA reads.
struct alignas(64) TensorMap {
  char opaque[128];
};

struct Shared {
  __nv_bfloat16 a[kStages][kRows * kDepth];
  __nv_bfloat16 b[kStages][kColumns * kDepth];
  uint64_t full[kStages];   // completes when the bytes of a stage have arrived
  uint64_t empty[kStages];  // completes when both groups have read the stage
};

__device__ uint32_t address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

__device__ void init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address(barrier)), "r"(arrivals)
               : "memory");
}

__device__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(address(barrier)) : "memory");
}

// Arrives, and adds bytes that the copies of this phase have to deliver.
__device__ void expect(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(address(barrier)),
               "r"(bytes)
               : "memory");
}

// Waits until the phase of this parity is complete.
__device__ void wait(uint64_t* barrier, int parity) {
  asm volatile(
      "{.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra again;}" ::"r"(address(barrier)),
      "r"(parity)
      : "memory");
}

// Requests 64 elements of k of the rows from `row` on; the rows that arrive are swizzled.
__device__ void copy(__nv_bfloat16* to, const TensorMap& map, int depth, int row, uint64_t* full) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3}], [%4];" ::"r"(address(to)),
      "l"(&map), "r"(depth), "r"(row), "r"(address(full))
      : "memory");
}

__device__ void produce(Shared& shared, const TensorMap& a, const TensorMap& b, int steps) {
  for (int step = 0; step < steps; ++step) {
    const int stage = step % kStages, round = step / kStages;
    wait(&shared.empty[stage], (round + 1) % 2);  // returns at once in the first round
    expect(&shared.full[stage], kStageBytes);
    copy(shared.a[stage], a, step * kDepth, blockIdx.y * kRows, &shared.full[stage]);
    copy(shared.b[stage], b, step * kDepth, blockIdx.x * kColumns, &shared.full[stage]);
  }
}

__device__ __forceinline__ void consume(Shared& shared, float (&sums)[wgmma::kSums], int group,
                                        int steps) {
  constexpr auto kMajor = gemm::Major::k;
  for (int step = 0; step < steps; ++step) {
    const int stage = step % kStages, round = step / kStages;
    wait(&shared.full[stage], round % 2);
    const uint64_t from_a =
        wgmma::descriptor<kMajor>(shared.a[stage] + group * wgmma::kRows * kDepth, 0);
    const uint64_t from_b = wgmma::descriptor<kMajor>(shared.b[stage], 0);
    wgmma::fence();
#pragma unroll
    for (int i = 0; i < kDepth / wgmma::kDepth; ++i) {
      wgmma::multiply<__nv_bfloat16, kMajor, kMajor>(sums, from_a + i * wgmma::kNextStep<kMajor>,
                                                     from_b + i * wgmma::kNextStep<kMajor>,
                                                     step + i > 0);
    }
    wgmma::commit();
    wgmma::wait<1>();  // the products of the previous stage are done, these are in flight
    if (step > 0 && threadIdx.x % kGroup == 0) arrive(&shared.empty[(step - 1) % kStages]);
  }
  wgmma::wait_all(sums);
}

// Divides the block into roles, and calls write(row, column, x, y) for each two neighbours of c.
template <class Write>
__device__ __forceinline__ void run(const TensorMap& a, const TensorMap& b, int steps,
                                    const Write& write) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      init(&shared.full[stage], 1);
      init(&shared.empty[stage], 2);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  const int group = threadIdx.x / kGroup;
  if (group < 2) {
    float sums[wgmma::kSums];
    consume(shared, sums, group, steps);
    const int warp = threadIdx.x % kGroup / 32, lane = threadIdx.x % 32;
    const int row = blockIdx.y * kRows + group * wgmma::kRows + warp * 16 + lane / 4;
    const int column = blockIdx.x * kColumns + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < wgmma::kSums / 4; ++i) {
      write(row, column + i * 8, sums[4 * i], sums[4 * i + 1]);
      write(row + 8, column + i * 8, sums[4 * i + 2], sums[4 * i + 3]);
    }
  } else if (threadIdx.x % kGroup == 0) {
    produce(shared, a, b, steps);
  }
#endif
}

__global__ void __launch_bounds__(3 * kGroup)
    product(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
            __nv_bfloat16* c, int n, int k) {
  run(a, b, k / kDepth, [&](int row, int column, float x, float y) {
    const float both[2] = {x, y};
    device::store<2>(c + int64_t{row} * n + column, both);
  });
}
