#pragma once

// The columns of a slab that a thread computes. Vectors lie at 16-byte boundaries of memory, from
// which a row and its results have the same offset. The first and the last vector of a row may have
// elements of neighbouring rows, which are cleared in shared memory and not written:
//
//   memory    |   16 B    |   16 B    |   16 B    |
//   row               h h  v v v v v v  t t
//   vectors    - - - - h h  v v v v v v  t t - - - -

#include "slab_ring.cuh"

namespace torchkiln::cuda::norm_slabs {
namespace {

template <class T, int kLanes, int kTensors, class Merge, int kValues>
class SlabColumns : public SlabRing<T, kLanes, kTensors, Merge, kValues> {
  using Ring = SlabRing<T, kLanes, kTensors, Merge, kValues>;

 public:
  using Ring::Ring;

 protected:
  using Ring::columns_;
  using Ring::plan_;
  using Ring::slab_in;
  using typename Ring::Cursor;
  static constexpr int kItems = kSlabBytes / static_cast<int>(sizeof(T)) / kLanes;

  /// Sets the columns of the rows of a run.
  __device__ __forceinline__ void begin_run(int run) {
    first_column_ = Ring::first_column(Ring::first_row(run));
    width_ = min(plan_.columns, columns_ - first_column_);
  }

  /// The column of the first lane of item k.
  __device__ __forceinline__ int column(int k) const { return first_column_ + place(k); }
  __device__ __forceinline__ bool has(int k, int lane) const {
    if (place(k) >= width_) return false;
    return kLanes == 1 || (column(k) + lane >= 0 && column(k) + lane < columns_);
  }
  /// Calls body(k) for the items that the thread has. In most slabs only the last item can be
  /// missing.
  template <class Body>
  __device__ __forceinline__ void for_own(const Body& body) const {
    if (width_ >= (kItems - 1) * kSlabThreads * kLanes) {
#pragma unroll
      for (int k = 0; k < kItems - 1; ++k) body(k);
      if (place(kItems - 1) < width_) body(kItems - 1);
    } else {
#pragma unroll
      for (int k = 0; k < kItems - 1; ++k)
        if (place(k) < width_) body(k);
    }
  }

  /// Sets elements in the vectors of a slab that lie outside of the row to 0. The calling thread
  /// then loads these vectors.
  __device__ __forceinline__ void clear_outside(const Cursor& at) const {
    if constexpr (kLanes == 1) return;
    bool clears = false;
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      if (place(k) >= width_ || is_whole(k)) continue;
      clears = true;
      for (int l = 0; l < kLanes; ++l) {
        if (has(k, l)) continue;
#pragma unroll
        for (int tensor = 0; tensor < kTensors; ++tensor)
          const_cast<T*>(slab_in(tensor, at))[place(k) + l] = convert<T>(0.0f);
      }
    }
    // Orders these stores before the next bulk copy into the stage.
    if (clears) ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared);
  }

  /// Loads item k of a slab from its stage.
  __device__ __forceinline__ void load(const T* slab, int k, float (&values)[kLanes]) const {
    widen(load_vector<kLanes>(slab + place(k)), values);
  }

  /// Sets the lanes of item k that are outside of the row to `outside`.
  __device__ __forceinline__ void set_outside(int k, float (&values)[kLanes], float outside) const {
    if (is_whole(k)) return;
#pragma unroll
    for (int l = 0; l < kLanes; ++l)
      if (!has(k, l)) values[l] = outside;
  }

  /// Stores item k of a row.
  __device__ __forceinline__ void save(T* row, int k, const float (&values)[kLanes]) const {
    T* const to = row + column(k);
    if (is_whole(k)) return store(to, values);
#pragma unroll
    for (int l = 0; l < kLanes; ++l)
      if (has(k, l)) to[l] = convert<T>(values[l]);
  }

  /// Loads a parameter of each column, and adds `offset`.
  __device__ __forceinline__ void load_parameters(const void* parameters, Dtype dtype, float offset,
                                                  float (&values)[kItems][kLanes]) const {
    with_parameter_type<T>(dtype, [&](auto tag) {
      const auto* const from = static_cast<const typename decltype(tag)::type*>(parameters);
#pragma unroll
      for (int k = 0; k < kItems; ++k) {
#pragma unroll
        for (int l = 0; l < kLanes; ++l)
          if (has(k, l)) values[k][l] = convert<float>(__ldg(from + column(k) + l)) + offset;
      }
    });
  }

 private:
  static __device__ __forceinline__ int place(int k) {
    return (k * kSlabThreads + static_cast<int>(threadIdx.x)) * kLanes;
  }
  /// Whether all lanes of item k are in the row.
  __device__ __forceinline__ bool is_whole(int k) const {
    return kLanes == 1 || (column(k) >= 0 && column(k) + kLanes <= columns_);
  }

  int first_column_;
  int width_;  // columns of the slab
};

}  // namespace
}  // namespace torchkiln::cuda::norm_slabs
