#include "torchkiln/kernels/bias_act.h"

#include <algorithm>

#include "detail/bitmask.h"
#include "detail/simd.h"
#include "torchkiln/cpu/elementwise.h"
#include "torchkiln/cpu/isa.h"

namespace torchkiln::cpu {
namespace TORCHKILN_ISA {

template <class Act, class Math, class C>
inline constexpr bool kInRegisters<BiasActivated<Act, Math, C>> = false;

namespace {

// Column sums are computed in strips of 1024 columns by 16 rows. Sums of a strip have the compute
// type. If a chunk has more rows, the sums of its strips, and of blocks of 256 rows, are added in
// double. All running sums stay in the L1 cache. The rounding error in float is that of 16
// additions for any number of rows; in double it grows with rows / 256 + 32. Short rows are folded:
// a strip computes several of them as one, whose sums are added in double.
constexpr int64_t kStripColumns = 1024;
constexpr int64_t kStripRows = 16;
constexpr int64_t kBlockRows = 256;

/// The gradient of the activation's argument, computed from the saved tensor.
template <class Act, class C>
struct Gradient {
  C scale;

  static constexpr bool kFromInput = Act::kSaved == Saved::input || Act::kSaved == Saved::output;

  TORCHKILN_FUNCTION C operator()(C grad, C saved, C bias) const {
    if constexpr (kFromInput) {
      return gradient_from_input<Act, ExactMath>(grad, saved * scale + bias);
    } else {
      return Act::template gradient<ExactMath>(grad, saved);
    }
  }
};

/// Computes grad_x for a run of a row, and adds to the column sums.
template <class Act, class C>
void run_backward(C* grad_x, C* sum, const C* grad, const C* saved, const C* bias,
                  const Gradient<Act, C>& gradient, int64_t count) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    const C passed = gradient(grad[i], saved[i], bias[i]);
    grad_x[i] = passed * gradient.scale;
    sum[i] += passed;
  }
}

/// Processes the rows first_row <= row < last_row of the strip that begins at `column`. `fold`
/// whole rows are computed as one; `sum` then has the sums of that one.
template <class T, class Act>
void strip_backward(const BiasActBackward& p, int64_t first_row, int64_t last_row, int64_t fold,
                    int64_t column, int64_t width, Compute<T>* sum) {
  using C = Compute<T>;
  C grad_buffer[kRun];
  C saved_buffer[kRun] = {};
  C bias_buffer[kRun] = {};
  C result_buffer[kRun];
  const Gradient<Act, C> gradient{static_cast<C>(p.scale)};
  for (int64_t done = 0; done < width; done += kRun) {
    const int64_t columns = std::min(kRun, width - done);
    const int64_t first = column + done;
    const C* bias = bias_buffer;
    if (gradient.kFromInput && p.bias != nullptr)
      bias = read_rows<kRun>(bias_buffer, p.bias, first * p.bias_stride,
                             {0, columns, p.bias_stride, 0}, columns * fold, p.bias_dtype);
    for (int64_t row = first_row; row < last_row; row += fold) {
      const int64_t count = columns * std::min(fold, last_row - row);
      const int64_t at = row * p.columns + first;
      const auto read = [&](C* buffer, const void* from, int64_t row_stride, int64_t stride) {
        return read_rows<kRun>(buffer, from, row * row_stride + first * stride,
                               {0, columns, stride, row_stride}, count, p.dtype);
      };
      const C* grad = read(grad_buffer, p.grad, p.grad_row_stride, p.grad_column_stride);
      const C* saved = saved_buffer;
      if constexpr (Act::kSaved == Saved::sign) {
        unpack_signs(saved_buffer, static_cast<const uint8_t*>(p.saved), at, count);
      } else if constexpr (gradient.kFromInput) {
        saved = read(saved_buffer, p.saved, p.saved_row_stride, p.saved_column_stride);
      }
      T* grad_x = p.grad_x == nullptr ? nullptr : static_cast<T*>(p.grad_x) + at;
      if constexpr (std::is_same_v<T, C>) {
        run_backward(grad_x == nullptr ? result_buffer : grad_x, sum + done, grad, saved, bias,
                     gradient, count);
      } else {
        run_backward(result_buffer, sum + done, grad, saved, bias, gradient, count);
        if (grad_x != nullptr) narrow_run(grad_x, result_buffer, count);
      }
    }
  }
}

/// The split into tasks: chunks of rows, of which each has parts of the columns. The workspace has
/// the column sums of each chunk: in double, or in the compute type if the chunk is one strip high.
/// A chunk has at least the rows of a strip, because with fewer, writing and reading its sums takes
/// as long as its rows.
struct ChunkPlan {
  int64_t chunks;
  int64_t rows_per_chunk;
  int64_t parts;
  int64_t columns_per_part;
  int64_t fold;  // rows that are computed as one
  bool has_blocks;

  explicit ChunkPlan(const BiasActBackward& p) {
    constexpr int64_t kTaskElements = 1 << 15;  // take longer than the start of a thread
    constexpr int64_t kMaxTasks = 64;
    const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
    const int64_t tasks = std::clamp<int64_t>(p.rows * p.columns / kTaskElements, 1, kMaxTasks);
    chunks = std::clamp<int64_t>(ceil_div(p.rows, kStripRows), 1, tasks);
    rows_per_chunk = ceil_div(p.rows, chunks);
    const int64_t strips = std::max<int64_t>(ceil_div(p.columns, kStripColumns), 1);
    columns_per_part = ceil_div(strips, std::min(strips, tasks / chunks)) * kStripColumns;
    parts = std::max<int64_t>(ceil_div(p.columns, columns_per_part), 1);
    fold = p.columns <= kShortRow ? kRun / p.columns : 1;
    has_blocks = rows_per_chunk > strip_rows();
  }

  int64_t tasks() const { return chunks * parts; }
  int64_t strip_rows() const { return kStripRows * fold; }
  int64_t block_rows() const { return kBlockRows * fold; }

  /// The column sums of a chunk, from a column on; null if no bias gradient is wanted.
  template <class Sum>
  Sum* sums(const BiasActBackward& p, int64_t chunk, int64_t column) const {
    if (p.grad_bias == nullptr) return nullptr;
    return static_cast<Sum*>(p.workspace) + chunk * p.columns + column;
  }
};

template <class T, class Act>
void task_backward(const BiasActBackward& p, const ChunkPlan& plan, int64_t task) {
  using C = Compute<T>;
  const int64_t chunk = task / plan.parts;
  const int64_t left = task % plan.parts * plan.columns_per_part;
  const int64_t right = std::min(left + plan.columns_per_part, p.columns);
  const int64_t first = std::min(chunk * plan.rows_per_chunk, p.rows);
  const int64_t last = std::min(first + plan.rows_per_chunk, p.rows);
  C strip_sum[kStripColumns];
  double block_sum[kStripColumns];
  const auto for_strips = [&](const auto& body) {
    for (int64_t column = left; column < right; column += kStripColumns)
      body(column, std::min(kStripColumns, right - column));
  };
  const auto sum_strip = [&](int64_t row, int64_t end, int64_t column, int64_t width, C* sum) {
    C folded[kRun];
    C* const sums = plan.fold == 1 ? sum : folded;
    std::fill_n(sums, width * plan.fold, C(0));
    strip_backward<T, Act>(p, row, end, plan.fold, column, width, sums);
    for (int64_t i = 0; plan.fold > 1 && i < width; ++i) {
      double all = 0;
      for (int64_t r = 0; r < plan.fold; ++r) all += static_cast<double>(folded[r * width + i]);
      sum[i] = static_cast<C>(all);
    }
  };
  if (!plan.has_blocks) {
    for_strips([&](int64_t column, int64_t width) {
      C* const sum = plan.sums<C>(p, chunk, column);
      sum_strip(first, last, column, width, sum == nullptr ? strip_sum : sum);
    });
    return;
  }
  double* const chunk_sum = plan.sums<double>(p, chunk, 0);
  if (chunk_sum != nullptr) std::fill_n(chunk_sum + left, right - left, 0.0);
  for (int64_t block = first; block < last; block += plan.block_rows()) {
    const int64_t end = std::min(block + plan.block_rows(), last);
    for_strips([&](int64_t column, int64_t width) {
      std::fill_n(block_sum, width, 0.0);
      for (int64_t row = block; row < end; row += plan.strip_rows()) {
        sum_strip(row, std::min(row + plan.strip_rows(), end), column, width, strip_sum);
        for (int64_t i = 0; i < width; ++i) block_sum[i] += static_cast<double>(strip_sum[i]);
      }
      for (int64_t i = 0; chunk_sum != nullptr && i < width; ++i)
        chunk_sum[column + i] += block_sum[i];
    });
  }
}

}  // namespace

Status bias_act(const BiasAct& p, int64_t begin, int64_t end) {
  return dispatch_floating(p.elements.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    Status status{"unknown activation"};
    with_activation(
        p.activation,
        [&](auto act) {
          const BiasActivated<typename decltype(act)::type, ExactMath, C> functor{
              static_cast<C>(p.scale)};
          // Each run's signs are packed while its outputs are in the L1 cache.
          const int64_t step = p.signs == nullptr ? end - begin : kRun * 8;
          for (int64_t at = begin; at < end; at += step) {
            const int64_t stop = std::min(at + step, end);
            status = elementwise<T>(functor, p.elements, at, stop);
            if (p.signs != nullptr)
              pack_signs(p.signs, static_cast<const T*>(p.elements.out[0]), at, stop);
          }
        },
        Activations{});
    return status;
  });
}

Status bias_act_backward(const BiasActBackward& p, int64_t begin, int64_t end) {
  const ChunkPlan plan(p);
  return dispatch_floating(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    with_activation(
        p.activation,
        [&](auto act) {
          for (int64_t task = begin; task < end; ++task)
            task_backward<T, typename decltype(act)::type>(p, plan, task);
        },
        Activations{});
    return Status{};
  });
}

Status bias_act_backward_finish(const BiasActBackward& p, int64_t begin, int64_t end) {
  const ChunkPlan plan(p);
  return dispatch_floating(p.bias_dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    double sum[kRun];
    for (int64_t column = begin; column < end; column += kRun) {
      const int64_t count = std::min(kRun, end - column);
      std::fill_n(sum, count, 0.0);
      const auto add = [&](const auto* partial) {
        for (int64_t i = 0; i < count; ++i) sum[i] += static_cast<double>(partial[i]);
      };
      for (int64_t chunk = 0; chunk < plan.chunks; ++chunk) {
        plan.has_blocks ? add(plan.sums<double>(p, chunk, column))
                        : add(plan.sums<C>(p, chunk, column));
      }
      narrow_sums(static_cast<T*>(p.grad_bias) + column, sum, count);
    }
    return Status{};
  });
}

}  // namespace TORCHKILN_ISA

TORCHKILN_CPU_ENTRY(bias_act, (const BiasAct& p, int64_t begin, int64_t end), (p, begin, end))
TORCHKILN_CPU_ENTRY(bias_act_backward, (const BiasActBackward& p, int64_t begin, int64_t end),
                    (p, begin, end))
TORCHKILN_CPU_ENTRY(bias_act_backward_finish,
                    (const BiasActBackward& p, int64_t begin, int64_t end), (p, begin, end))

#ifdef TORCHKILN_CPU_ENTRIES

Split split(const BiasActBackward& p) {
  const TORCHKILN_ISA::ChunkPlan plan(p);
  if (p.grad_bias == nullptr) return {plan.tasks(), 0, 0};
  const bool in_double = plan.has_blocks || p.dtype == Dtype::float64;
  const auto sums = static_cast<size_t>(plan.chunks * p.columns);
  return {plan.tasks(), sums * (in_double ? sizeof(double) : sizeof(float)), p.columns};
}

#endif

}  // namespace torchkiln::cpu
