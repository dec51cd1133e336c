#pragma once

#include <cstdint>

#include "torchkiln/core/dtype.h"

namespace torchkiln {

/// Maximum number of dimensions after merging. The tensor layer copies operands with more
/// dimensions that cannot be merged; in practice there are none.
inline constexpr int kMaxRank = 8;

/// The iteration space of an elementwise op, ordered by the memory layout of its first output:
/// dimension 0 is the innermost one. If the first output is dense, element i of the space is
/// out[i]. Strides count elements; an input stride of 0 repeats an element (broadcasting).
template <int Inputs, int Outputs = 1>
struct Layout {
  int rank = 0;
  int64_t numel = 1;
  int64_t size[kMaxRank] = {};
  int64_t stride[Inputs][kMaxRank] = {};
  int64_t out_stride[Outputs][kMaxRank] = {};

  /// Whether element i of the space is element i of input k, so that no index computation is
  /// needed.
  bool linear(int k) const { return is_linear(stride[k]); }
  /// Whether element i of the space is element i of output k.
  bool out_linear(int k) const { return is_linear(out_stride[k]); }

 private:
  bool is_linear(const int64_t (&strides)[kMaxRank]) const {
    int64_t run = 1;
    for (int d = 0; d < rank; ++d) {
      if (size[d] != 1 && strides[d] != run) return false;
      run *= size[d];
    }
    return true;
  }
};

/// One dimension of an iteration space before merging.
template <int Inputs, int Outputs = 1>
struct Dimension {
  int64_t size;
  int64_t out_stride[Outputs];
  int64_t stride[Inputs];
};

/// Sorts the dimensions by the strides of the first output, drops dimensions of size 1, and merges
/// two adjacent dimensions if every operand is contiguous across them. Returns false if more than
/// kMaxRank dimensions are left.
template <int Inputs, int Outputs>
bool make_layout(Dimension<Inputs, Outputs>* dims, int rank, Layout<Inputs, Outputs>& layout) {
  // Insertion sort: there are few dimensions, and most are sorted already.
  for (int d = 1; d < rank; ++d) {
    const Dimension<Inputs, Outputs> moved = dims[d];
    int to = d;
    for (; to > 0 && dims[to - 1].out_stride[0] > moved.out_stride[0]; --to)
      dims[to] = dims[to - 1];
    dims[to] = moved;
  }
  layout = {};
  for (int d = 0; d < rank; ++d) {
    const Dimension<Inputs, Outputs>& dim = dims[d];
    layout.numel *= dim.size;
    if (dim.size == 1) continue;
    const int inner = layout.rank - 1;
    bool merges = layout.rank > 0;
    for (int k = 0; merges && k < Inputs; ++k)
      merges = dim.stride[k] == layout.stride[k][inner] * layout.size[inner];
    for (int k = 0; merges && k < Outputs; ++k)
      merges = dim.out_stride[k] == layout.out_stride[k][inner] * layout.size[inner];
    if (merges) {
      layout.size[inner] *= dim.size;
      continue;
    }
    if (layout.rank == kMaxRank) return false;
    layout.size[layout.rank] = dim.size;
    for (int k = 0; k < Inputs; ++k) layout.stride[k][layout.rank] = dim.stride[k];
    for (int k = 0; k < Outputs; ++k) layout.out_stride[k][layout.rank] = dim.out_stride[k];
    ++layout.rank;
  }
  return true;
}

/// The arguments of an elementwise kernel. All outputs have the dtype `dtype`; each input may have
/// a dtype of its own.
template <int Inputs, int Outputs = 1>
struct Elementwise {
  void* out[Outputs];
  Dtype dtype;
  const void* in[Inputs];
  Dtype in_dtype[Inputs];
  Layout<Inputs, Outputs> layout;
};

}  // namespace torchkiln
