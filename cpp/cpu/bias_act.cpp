#include "torchkiln/kernels/bias_act.h"

#include <algorithm>

#include "elementwise.h"
#include "isa.h"
#include "torchkiln/functors.h"

namespace torchkiln::cpu {
namespace TORCHKILN_ISA {
namespace {

// A strip of this many columns is summed over this many rows before it is added to the chunk's
// sums: the strip stays in the first-level cache, and the rounding error grows with rows / 64 + 64
// instead of with the rows.
constexpr int64_t kStripColumns = 1024;
constexpr int64_t kStripRows = 64;

/// One run of one row: grad_x, and the column sums when they are wanted.
template <class C>
void run_backward(C* grad_x, C* sum, const C* grad, const C* output, C scale, int64_t count) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    const C passed = Relu::gradient(grad[i], output[i]);
    grad_x[i] = passed * scale;
    sum[i] += passed;
  }
}

/// Rows first_row <= row < last_row of the strip that begins at `column`.
template <class T>
void strip_backward(const ScaleBiasReluBackward& p, int64_t first_row, int64_t last_row,
                    int64_t column, int64_t width, Compute<T>* sum) {
  using C = Compute<T>;
  C grad_buffer[kRun];
  C output_buffer[kRun];
  C result_buffer[kRun];
  const C scale = static_cast<C>(p.scale);
  for (int64_t row = first_row; row < last_row; ++row) {
    for (int64_t done = 0; done < width; done += kRun) {
      const int64_t count = std::min(kRun, width - done);
      const int64_t at = row * p.columns + column + done;
      const int64_t grad_at = row * p.grad_row_stride + (column + done) * p.grad_column_stride;
      const C* grad = read_run(grad_buffer, p.grad, grad_at, p.grad_column_stride, count, p.dtype);
      const C* output = read_run(output_buffer, p.output, at, 1, count, p.dtype);
      T* grad_x = p.grad_x == nullptr ? nullptr : static_cast<T*>(p.grad_x) + at;
      if constexpr (std::is_same_v<T, C>) {
        run_backward(grad_x == nullptr ? result_buffer : grad_x, sum + done, grad, output, scale,
                     count);
      } else {
        run_backward(result_buffer, sum + done, grad, output, scale, count);
        if (grad_x != nullptr) narrow_run(grad_x, result_buffer, count);
      }
    }
  }
}

template <class T>
void chunk_backward(const ScaleBiasReluBackward& p, int64_t chunk, int64_t rows_per_chunk) {
  using C = Compute<T>;
  const int64_t first = chunk * rows_per_chunk;
  const int64_t last = std::min(first + rows_per_chunk, p.rows);
  C* chunk_sum =
      p.grad_bias == nullptr ? nullptr : static_cast<C*>(p.workspace) + chunk * p.columns;
  if (chunk_sum != nullptr) std::fill_n(chunk_sum, p.columns, C(0));
  C sum[kStripColumns];
  for (int64_t row = first; row < last; row += kStripRows) {
    for (int64_t column = 0; column < p.columns; column += kStripColumns) {
      const int64_t width = std::min(kStripColumns, p.columns - column);
      std::fill_n(sum, width, C(0));
      strip_backward<T>(p, row, std::min(row + kStripRows, last), column, width, sum);
      for (int64_t i = 0; chunk_sum != nullptr && i < width; ++i) chunk_sum[column + i] += sum[i];
    }
  }
}

template <class T>
void store_sums(const Compute<T>* sums, void* grad_bias, int64_t column, int64_t count) {
  narrow_run(static_cast<T*>(grad_bias) + column, sums, count);
}

}  // namespace

Status scale_bias_relu(const Elementwise<2>& arguments, double scale, int64_t begin, int64_t end) {
  return dispatch<float, double, Half, BFloat16>(arguments.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return elementwise<T>(ScaleBias<Relu, Compute<T>>{static_cast<Compute<T>>(scale)}, arguments,
                          begin, end);
  });
}

Status scale_bias_relu_backward(const ScaleBiasReluBackward& p, int64_t begin, int64_t end) {
  const int64_t chunks = cpu::chunk_count(p);
  const int64_t rows_per_chunk = (p.rows + chunks - 1) / chunks;
  return dispatch<float, double, Half, BFloat16>(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for (int64_t chunk = begin; chunk < end; ++chunk) chunk_backward<T>(p, chunk, rows_per_chunk);
    return Status{};
  });
}

Status scale_bias_relu_backward_finish(const ScaleBiasReluBackward& p, int64_t begin, int64_t end) {
  const int64_t chunks = cpu::chunk_count(p);
  return dispatch<float, double, Half, BFloat16>(p.bias_dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    C sum[kRun];
    for (int64_t column = begin; column < end; column += kRun) {
      const int64_t count = std::min(kRun, end - column);
      std::fill_n(sum, count, C(0));
      for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        const C* partial = static_cast<const C*>(p.workspace) + chunk * p.columns + column;
        for (int64_t i = 0; i < count; ++i) sum[i] += partial[i];
      }
      store_sums<T>(sum, p.grad_bias, column, count);
    }
    return Status{};
  });
}

}  // namespace TORCHKILN_ISA

#ifdef TORCHKILN_BASELINE

TORCHKILN_DECLARE_VARIANTS(scale_bias_relu)
TORCHKILN_DECLARE_VARIANTS(scale_bias_relu_backward)
TORCHKILN_DECLARE_VARIANTS(scale_bias_relu_backward_finish)

Status scale_bias_relu(const Elementwise<2>& arguments, double scale, int64_t begin, int64_t end) {
  return TORCHKILN_BEST_VARIANT(scale_bias_relu)(arguments, scale, begin, end);
}

int64_t chunk_count(const ScaleBiasReluBackward& p) {
  constexpr int64_t kChunkElements = 1 << 15;  // enough to outweigh the hand-over to a thread
  constexpr int64_t kMostChunks = 64;
  return std::clamp<int64_t>(p.rows * p.columns / kChunkElements, 1,
                             std::clamp<int64_t>(p.rows, 1, kMostChunks));
}

size_t workspace_bytes(const ScaleBiasReluBackward& p) {
  if (p.grad_bias == nullptr) return 0;
  const size_t size_of_sum = p.dtype == Dtype::float64 ? sizeof(double) : sizeof(float);
  return static_cast<size_t>(chunk_count(p) * p.columns) * size_of_sum;
}

Status scale_bias_relu_backward(const ScaleBiasReluBackward& p, int64_t begin, int64_t end) {
  return TORCHKILN_BEST_VARIANT(scale_bias_relu_backward)(p, begin, end);
}

Status scale_bias_relu_backward_finish(const ScaleBiasReluBackward& p, int64_t begin, int64_t end) {
  return TORCHKILN_BEST_VARIANT(scale_bias_relu_backward_finish)(p, begin, end);
}

#endif

}  // namespace torchkiln::cpu
