#pragma once

#include <cstdint>

#include "torchkiln/dtype.h"

namespace torchkiln {

/// Dimensions that are left after neighbours were merged. Eight that cannot be merged do not occur
/// in practice; the tensor layer copies such an operand.
inline constexpr int kMaxRank = 8;

/// The iteration space of an elementwise op, in the order in which its dense output lies in memory:
/// dimension 0 is the innermost one, and element i of the output is out[i]. Strides count elements;
/// 0 repeats an element (broadcasting).
template <int Arity>
struct Layout {
  int rank = 0;
  int64_t numel = 1;
  int64_t size[kMaxRank] = {};
  int64_t stride[Arity][kMaxRank] = {};

  /// Whether operand k is read in the very order of the output.
  bool linear(int k) const {
    int64_t run = 1;
    for (int d = 0; d < rank; ++d) {
      if (size[d] != 1 && stride[k][d] != run) return false;
      run *= size[d];
    }
    return true;
  }
};

/// One dimension of an iteration space before merging.
template <int Arity>
struct Dimension {
  int64_t size;
  int64_t out_stride;
  int64_t stride[Arity];
};

/// Orders the dimensions as the output lies in memory, drops those of size 1 and merges neighbours
/// through which every operand runs evenly. False when more than kMaxRank dimensions are left.
template <int Arity>
bool make_layout(Dimension<Arity>* dims, int rank, Layout<Arity>& layout) {
  // By insertion: there are few dimensions, and they mostly come in order.
  for (int d = 1; d < rank; ++d) {
    const Dimension<Arity> moved = dims[d];
    int to = d;
    for (; to > 0 && dims[to - 1].out_stride > moved.out_stride; --to) dims[to] = dims[to - 1];
    dims[to] = moved;
  }
  layout = {};
  for (int d = 0; d < rank; ++d) {
    const Dimension<Arity>& dim = dims[d];
    layout.numel *= dim.size;
    if (dim.size == 1) continue;
    bool merges = layout.rank > 0;
    for (int k = 0; merges && k < Arity; ++k) {
      const int inner = layout.rank - 1;
      merges = dim.stride[k] == layout.stride[k][inner] * layout.size[inner];
    }
    if (merges) {
      layout.size[layout.rank - 1] *= dim.size;
      continue;
    }
    if (layout.rank == kMaxRank) return false;
    layout.size[layout.rank] = dim.size;
    for (int k = 0; k < Arity; ++k) layout.stride[k][layout.rank] = dim.stride[k];
    ++layout.rank;
  }
  return true;
}

/// Everything an elementwise kernel needs to know. The output is dense and has the dtype that is
/// computed for; each input may have a dtype of its own.
template <int Arity>
struct Elementwise {
  void* out;
  Dtype dtype;
  const void* in[Arity];
  Dtype in_dtype[Arity];
  Layout<Arity> layout;
};

}  // namespace torchkiln
