#pragma once

// The target classes of rows.

#include "torchkiln/cpu/half.h"
#include "torchkiln/kernels/cross_entropy.h"

namespace torchkiln::cpu::TORCHKILN_ISA {

inline constexpr Status kOutOfRange{
    "target: a class is out of range; each has to be at least 0 and less than the number of "
    "classes, or ignore_index"};

/// Values of a target index that are not a class. kNoClass: the target is a row of probabilities;
/// kIgnored: the row is ignored; kElsewhere: another shard has the class.
inline constexpr int64_t kNoClass = -1;
inline constexpr int64_t kIgnored = -2;
inline constexpr int64_t kElsewhere = -3;

/// Sets `index` to the target class of a row, counted from the row's first class, or to one of the
/// values above. Returns false if the target is not a class.
inline bool read_target(const ClassTarget& target, int64_t row, int64_t classes, int64_t& index) {
  index = target.index == nullptr ? kNoClass : target.index[row];
  if (target.index == nullptr) return true;
  if (index == target.ignore_index) {
    index = kIgnored;
    return true;
  }
  if (index < 0 || index >= target.all_classes) return false;
  index -= target.first_class;
  if (index < 0 || index >= classes) index = kElsewhere;
  return true;
}

}  // namespace torchkiln::cpu::TORCHKILN_ISA
