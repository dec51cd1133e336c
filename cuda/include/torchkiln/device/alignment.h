#pragma once

// Alignment rules for access in 16-byte vectors. Every launcher that chooses between vectors and
// single elements calls these functions.

#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "torchkiln/core/dtype.h"
#include "torchkiln/device/device.h"

namespace torchkiln::device {

/// Whether an address is a multiple of `bytes`; true for null.
TORCHKILN_HOST_DEVICE inline bool aligned(const void* pointer, size_t bytes = kVectorBytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

/// Elements per 16-byte vector.
constexpr int vector_lanes(Dtype dtype) { return kVectorBytes / static_cast<int>(size_of(dtype)); }

/// Whether all of these lengths and strides, in elements, are multiples of `lanes`.
inline bool in_steps_of(int64_t lanes, std::initializer_list<int64_t> lengths_and_strides) {
  for (const int64_t elements : lengths_and_strides)
    if (elements % lanes != 0) return false;
  return true;
}

/// Whether rows consist of whole vectors of `lanes` elements: the first row begins at a 16-byte
/// boundary, and all lengths and strides, in elements, are multiples of `lanes`. The caller checks
/// that the elements of a row are adjacent, and passes 0 for the stride of a dimension of size 1.
inline bool rows_in_vectors(const void* data, int64_t lanes,
                            std::initializer_list<int64_t> lengths_and_strides) {
  return in_steps_of(lanes, lengths_and_strides) && aligned(data);
}

/// Elements of the widest vectors that divide all rows: at most 16 bytes, aligned to their own
/// size.
inline int widest_lanes(const void* data, Dtype dtype,
                        std::initializer_list<int64_t> lengths_and_strides) {
  int lanes = vector_lanes(dtype);
  while (lanes > 1 && !(in_steps_of(lanes, lengths_and_strides) &&
                        aligned(data, static_cast<size_t>(lanes) * size_of(dtype)))) {
    lanes /= 2;
  }
  return lanes;
}

/// The rows of one tensor.
struct TensorRows {
  const void* data;  // null: there is no such tensor
  int64_t stride;
};

/// The access that the rows of all tensors of a call allow.
///   vector         every row begins and ends at a 16-byte boundary
///   shared_offset  row i has the same offset from a boundary in every tensor
///   scalar         none of these: element by element
enum class Alignment { vector, shared_offset, scalar };

/// The alignment of rows with a shared offset. For 8-byte types, with two lanes per vector, it is
/// scalar, which saves an instantiation.
inline Alignment alignment_with_offset(Dtype dtype) {
  return size_of(dtype) == 8 ? Alignment::scalar : Alignment::shared_offset;
}

/// The alignment of `rows` rows of `columns` adjacent elements in each of the tensors.
template <int N>
Alignment alignment_of(const TensorRows (&tensors)[N], Dtype dtype, int64_t rows, int64_t columns) {
  const auto size = static_cast<uint64_t>(size_of(dtype));
  const auto offset_in_vector = [size](int64_t elements) {
    return static_cast<uint64_t>(elements) * size % kVectorBytes;
  };
  bool in_vectors = offset_in_vector(columns) == 0;
  const TensorRows* first = nullptr;
  for (const TensorRows& tensor : tensors) {
    if (tensor.data == nullptr) continue;
    if (first == nullptr) first = &tensor;
    const uint64_t step = rows == 1 ? 0 : offset_in_vector(tensor.stride);
    const uint64_t first_step = rows == 1 ? 0 : offset_in_vector(first->stride);
    const uintptr_t begin = reinterpret_cast<uintptr_t>(tensor.data) % kVectorBytes;
    const uintptr_t first_begin = reinterpret_cast<uintptr_t>(first->data) % kVectorBytes;
    if (begin != first_begin || step != first_step) return Alignment::scalar;
    if (begin != 0 || step != 0) in_vectors = false;
  }
  return in_vectors ? Alignment::vector : alignment_with_offset(dtype);
}

}  // namespace torchkiln::device
