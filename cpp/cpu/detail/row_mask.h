#pragma once

// The mask of softmax, row by row.

#include <algorithm>

#include "torchkiln/cpu/elementwise.h"
#include "torchkiln/kernels/softmax.h"

namespace torchkiln::cpu::TORCHKILN_ISA {

/// The elements of a row that are not masked: the first `visible` elements, except where `mask` is
/// 0. The mask is read as bytes, because g++ does not vectorise loops over bool.
struct ActiveRange {
  int64_t visible;
  const uint8_t* mask;
};

/// Iterates over the rows.
class ActiveRangeIterator {
 public:
  ActiveRangeIterator(const RowMask& mask, int64_t length, int64_t row)
      : mask_(mask), length_(length), cursor_(mask.rows, row), row_(row) {}

  ActiveRange next() {
    ActiveRange range{length_, nullptr};
    if (mask_.causal) range.visible = std::min(length_, row_ % mask_.queries + 1);
    if (mask_.data != nullptr) {
      const bool* data = mask_.data + cursor_.offset[0];
      if (mask_.stride == 1) {
        range.mask = reinterpret_cast<const uint8_t*>(data);
      } else if (!*data) {
        range.visible = 0;
      }
      cursor_.advance(mask_.rows, 1);
    }
    ++row_;
    return range;
  }

 private:
  const RowMask& mask_;
  int64_t length_;
  Cursor<1, 1> cursor_;
  int64_t row_;
};

}  // namespace torchkiln::cpu::TORCHKILN_ISA
