#pragma once

#include <cstdint>

#include "torchkiln/core/dtype.h"

namespace torchkiln {

/// Dimensions that are left after neighbours were merged. Eight that cannot be merged do not occur
/// in practice; the tensor layer copies such an operand.
inline constexpr int kMaxRank = 8;

/// The iteration space of an elementwise op, in the order in which its first output lies in memory:
/// dimension 0 is the innermost one, and where that output is dense, element i of the space is
/// out[i]. Strides count elements; an input's 0 repeats an element (broadcasting).
template <int Inputs, int Outputs = 1>
struct Layout {
  int rank = 0;
  int64_t numel = 1;
  int64_t size[kMaxRank] = {};
  int64_t stride[Inputs][kMaxRank] = {};
  int64_t out_stride[Outputs][kMaxRank] = {};

  /// Whether input k is read in the very order of the space, without gaps.
  bool linear(int k) const { return runs_evenly(stride[k]); }
  /// Whether output k is written so.
  bool out_linear(int k) const { return runs_evenly(out_stride[k]); }

 private:
  bool runs_evenly(const int64_t (&strides)[kMaxRank]) const {
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

/// Orders the dimensions as the first output lies in memory, drops those of size 1 and merges
/// neighbours through which every operand runs evenly. False when more than kMaxRank dimensions are
/// left.
template <int Inputs, int Outputs>
bool make_layout(Dimension<Inputs, Outputs>* dims, int rank, Layout<Inputs, Outputs>& layout) {
  // By insertion: there are few dimensions, and they mostly come in order.
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

/// Everything an elementwise kernel needs to know. All outputs have the dtype that is computed for;
/// each input may have a dtype of its own.
template <int Inputs, int Outputs = 1>
struct Elementwise {
  void* out[Outputs];
  Dtype dtype;
  const void* in[Inputs];
  Dtype in_dtype[Inputs];
  Layout<Inputs, Outputs> layout;
  bool overlaps = true;  // begins beside the kernel before it, as launch_overlapped() says
};

}  // namespace torchkiln
