// The kernels of the sparse products: checks, outputs, launches, and the check of a pattern.
// spmm.h describes the ops; spmm.cpp has their derivatives.

#include "spmm/spmm.h"

#include <climits>

#include "spmm/csr_arguments.h"
#include "torchkiln/torch/checks.h"
#include "torchkiln/torch/elementwise.h"
#include "torchkiln/torch/empty.h"
#include "torchkiln/torch/launch.h"

namespace torchkiln::spmm_ops {
namespace {

constexpr const char* kTransposed = "spmm_transposed";
constexpr const char* kSampled = "spmm_sampled";
constexpr const char* kTranspose = "csr_transpose";

/// Fewest multiplications per CPU thread. With fewer, starting a thread takes longer than its work.
constexpr int64_t kGrain = 1 << 14;

void check_indices(const char* op, const Tensor& crow, const Tensor& col) {
  const auto check_one = [&](const char* name, const Tensor& tensor) {
    const at::ScalarType dtype = tensor.scalar_type();
    TORCH_CHECK(dtype == at::kInt || dtype == at::kLong, "torchkiln.", op, ": ", name,
                ": got dtype ", dtype_name(dtype), ", expected int32 or int64");
  };
  check_one("crow", crow);
  check_one("col", col);
  check_same_dtype(op, "col", col, "crow", crow);
  check_rank(op, "crow", crow, 1, 2, "[rows + 1] or [batch, rows + 1]");
  TORCH_CHECK(crow.sym_size(-1) >= 1, "torchkiln.", op, ": crow: got shape ", crow.sym_sizes(),
              ", expected at least one element, the end of the last row");
  check_rank(op, "col", col, crow.dim(), crow.dim(),
             crow.dim() == 1 ? "[entries], as crow has no batch"
                             : "[batch, entries], as crow has a batch");
}

/// Checks batch sizes. Returns the batch size; nullopt if no tensor has a batch dimension.
std::optional<SymInt> check_batch(const char* op, Operands vectors, Operands matrices) {
  std::optional<SymInt> batch;
  const char* first = nullptr;
  const auto visit = [&](const Operand& operand, int64_t rank) {
    if (operand.tensor.dim() == rank) return;
    const SymInt size = operand.tensor.sym_size(0);
    TORCH_CHECK(!batch || *batch == size, "torchkiln.", op, ": ", operand.name, ": got a batch of ",
                size, " in shape ", operand.tensor.sym_sizes(), ", expected ", *batch, ", that of ",
                first, ", or no batch");
    if (!batch) first = operand.name;
    batch = size;
  };
  for (const Operand& operand : vectors) visit(operand, 1);
  for (const Operand& operand : matrices) visit(operand, 2);
  return batch;
}

Tensor empty_result(const at::TensorOptions& options, const std::optional<SymInt>& batch,
                    std::initializer_list<SymInt> sizes) {
  c10::SymDimVector shape;
  if (batch) shape.push_back(*batch);
  for (const SymInt& size : sizes) shape.push_back(size);
  return empty_of(shape, options);
}

/// The number of columns of the matrix, from its packed transposed pattern.
SymInt columns_of(const Tensor& transpose, const Tensor& col) {
  return transpose.sym_size(-1) - 1 - 2 * col.sym_size(-1);
}

void check_transpose(const char* op, const Tensor& crow, const Tensor& col,
                     const Tensor& transpose) {
  check_tensors(op, {{"crow", crow}, {"transpose", transpose}});
  TORCH_CHECK(transpose.scalar_type() == at::kInt && transpose.dim() == crow.dim() &&
                  columns_of(transpose, col) >= 0 &&
                  (crow.dim() == 1 || transpose.sym_size(0) == crow.sym_size(0)),
              "torchkiln.", op, ": transpose: got ", dtype_name(transpose.scalar_type()), " ",
              transpose.sym_sizes(),
              ", expected the result of torchkiln.csr_transpose() for this pattern");
}

void check_columns(const char* op, const Tensor& transpose, const Tensor& col,
                   const SymInt& columns) {
  TORCH_CHECK(columns_of(transpose, col) == columns, "torchkiln.", op,
              ": transpose: got the transpose of a pattern with ", columns_of(transpose, col),
              " columns, expected ", columns);
}

void check_product(const char* op, const Tensor& crow, const Tensor& col, const Tensor& values,
                   const char* dense_name, const Tensor& dense) {
  check_tensors(op, {{"crow", crow}, {"col", col}, {"values", values}, {dense_name, dense}});
  check_indices(op, crow, col);
  check_dtype(op, "values", values);
  check_same_dtype(op, dense_name, dense, "values", values);
  check_rank(op, "values", values, 1, 2, "[entries] or [batch, entries]");
  check_size(op, "values", values, -1, col.sym_size(-1), "the number of entries in col");
  check_rank(op, dense_name, dense, 2, 3, "a matrix or a batch of matrices");
}

// ---- the products ----

int64_t row_grain(const CsrPattern& pattern, int64_t width) {
  const int64_t mean = pattern.entries / std::max<int64_t>(pattern.rows, 1) + 1;
  return std::max<int64_t>(kGrain / (mean * std::max<int64_t>(width, 1)), 1);
}

/// Whether a kernel reads a dense matrix with contiguous columns in place. On a CPU only if it
/// reads few of its rows: a copy in squares uses every cache line once.
template <class Arguments>
bool is_read_in_place(const Arguments& arguments, const Tensor& dense) {
  constexpr int64_t kFew = 4;  // rows for each row that is read
  return reads_columns(arguments) &&
         (dense.is_cuda() ||
          kFew * arguments.pattern.entries * arguments.batch <= arguments.pattern.columns);
}

/// out = the sparse matrices times b; order[e] is the index of entry e's value.
void multiply(const char* op, const CsrArguments& pattern, const Tensor& values,
              const Tensor& order, const Tensor& b, const Tensor& out) {
  if (out.numel() == 0) return;
  if (pattern.arguments.entries == 0) {
    out.zero_();
    return;
  }
  const MaybeCopy weights = adjacent(values);
  Spmm arguments{};
  arguments.pattern = pattern.arguments;
  arguments.values = weights->const_data_ptr();
  arguments.order = order.defined() ? order.const_data_ptr<int32_t>() : nullptr;
  arguments.dense = dense_rows(b);
  arguments.out = out.data_ptr();
  arguments.dtype = dtype_of(out);
  arguments.batch = out.dim() == 3 ? out.size(0) : 1;
  arguments.column_stride = b.size(-1) > 1 ? b.stride(-1) : 1;
  const bool in_place = is_read_in_place(arguments, b);
  const MaybeCopy dense = in_place ? MaybeCopy::borrowed(b) : adjacent_columns(b);
  if (!in_place) {
    arguments.dense = dense_rows(*dense);
    arguments.column_stride = 1;
  }
  arguments.width = out.size(-1);
  arguments.values_batch_stride = batch_stride(*weights, 1);
  arguments.order_batch_stride = order.defined() ? batch_stride(order, 1) : 0;
  launch_allocating(
      op, out, arguments.batch * arguments.pattern.rows,
      row_grain(arguments.pattern, arguments.width),
      [&](Allocate allocate, auto stream) { return cuda::spmm(arguments, allocate, stream); },
      [&](int64_t begin, int64_t end) { return cpu::spmm(arguments, begin, end); });
}

/// out = the transpose of a matrix with few columns, times x.
void multiply_columns(const CsrArguments& pattern, const Tensor& values, const Tensor& x,
                      const Tensor& out) {
  if (out.numel() == 0) return;
  const MaybeCopy weights = adjacent(values), rows = adjacent_columns(x);
  SpmmColumns arguments{};
  arguments.pattern = pattern.arguments;
  arguments.values = weights->const_data_ptr();
  arguments.x = dense_rows(*rows);
  arguments.out = out.data_ptr();
  arguments.dtype = dtype_of(out);
  arguments.width = out.size(-1);
  launch_split(
      kTransposed, out, arguments, std::max<int64_t>(1, kGrain / arguments.width), cpu::split,
      [&](Allocate allocate, auto stream) {
        return cuda::spmm_columns(arguments, allocate, stream);
      },
      cpu::spmm_columns, cpu::spmm_columns_finish);
}

int32_t faults_of(const Tensor& crow, const Tensor& col, int64_t columns) {
  const CsrArguments pattern(crow, col, columns);
  const Tensor faults = at::zeros({1}, crow.options().dtype(at::kInt));
  CsrCheck arguments{};
  arguments.pattern = pattern.arguments;
  arguments.batch = pattern.matrices();
  arguments.faults = faults.data_ptr<int32_t>();
  launch(
      kSpmm, crow, arguments.batch, INT_MAX,  // one thread: all write to one place
      [&](auto stream) { return cuda::csr_check(arguments, stream); },
      [&](int64_t begin, int64_t end) { return cpu::csr_check(arguments, begin, end); });
  return faults.item<int32_t>();
}

}  // namespace

bool reads_no_transpose(const Tensor& crow, const Tensor& col, const Tensor& values,
                        const Tensor& x, const SymInt& columns) {
  if (crow.dim() != 1 || values.dim() != 1 || x.dim() != 2) return false;
  const std::optional<int64_t> begins = crow.sym_size(0).maybe_as_int();
  const std::optional<int64_t> entries = col.sym_size(0).maybe_as_int();
  const std::optional<int64_t> number = columns.maybe_as_int();
  const std::optional<int64_t> width = x.sym_size(1).maybe_as_int();
  if (!begins || !entries || !number || !width) return false;
  return x.is_cuda() ? has_few_columns(*begins - 1, *number, *entries)
                     : has_small_product(*number, *width, *entries);
}

void check_pattern(const Tensor& crow, const Tensor& col, int64_t columns) {
  const int64_t entries = col.size(-1);
  const int32_t faults = faults_of(crow, col, columns);
  const auto has = [&](CsrFault fault) { return (faults & static_cast<int32_t>(fault)) != 0; };
  TORCH_CHECK_VALUE(!has(CsrFault::begin), "torchkiln.", kSpmm,
                    ": crow: got a first element other than 0, expected 0");
  TORCH_CHECK_VALUE(!has(CsrFault::end), "torchkiln.", kSpmm,
                    ": crow: got a last element other than ", entries, ", expected ", entries,
                    ", the number of entries in col");
  TORCH_CHECK_VALUE(!has(CsrFault::order), "torchkiln.", kSpmm,
                    ": crow: got an element smaller than the one before, expected ascending "
                    "elements");
  TORCH_CHECK_VALUE(!has(CsrFault::column), "torchkiln.", kSpmm,
                    ": col: got an element outside of the columns, expected all from 0 to ",
                    columns - 1);
  if (!has(CsrFault::unsorted)) return;
  const Tensor packed = TransposeOp::kernel(crow, col, columns);
  const Tensor begins = packed.narrow(-1, 0, columns + 1);
  const Tensor rows = packed.narrow(-1, columns + 1, entries);
  TORCH_CHECK_VALUE(faults_of(begins, rows, crow.size(-1) - 1) == 0, "torchkiln.", kSpmm,
                    ": col: got a column twice in a row, expected each once");
}

Tensor CsrOp::meta(const Arguments& call) {
  const Tensor &values = call.values, &b = call.b, &crow = call.crow, &col = call.col;
  const auto& shape = call.shape;
  const MaybeTensor& transpose = call.transpose;
  check_product(kSpmm, crow, col, values, "b", b);
  if (shape.has_value()) {
    TORCH_CHECK(shape->size() == 2, "torchkiln.", kSpmm, ": shape: got ", *shape,
                ", expected [rows, columns]");
    check_size(kSpmm, "crow", crow, -1, (*shape)[0] + 1, "one more than the rows of the shape");
    check_size(kSpmm, "b", b, -2, (*shape)[1], "the columns of the sparse matrix");
  }
  const auto batch =
      check_batch(kSpmm, {{"crow", crow}, {"col", col}, {"values", values}}, {{"b", b}});
  if (transpose.has_value()) {
    check_transpose(kSpmm, crow, col, *transpose);
    check_columns(kSpmm, *transpose, col, b.sym_size(-2));
  }
  return empty_result(b.options(), batch, {crow.sym_size(-1) - 1, b.sym_size(-1)});
}

Tensor TransposedOp::meta(const Arguments& call) {
  const Tensor &crow = call.crow, &col = call.col, &values = call.values, &x = call.x;
  const MaybeTensor& transpose = call.transpose;
  check_product(kTransposed, crow, col, values, "x", x);
  if (transpose.has_value()) {
    check_transpose(kTransposed, crow, col, *transpose);
    check_columns(kTransposed, *transpose, col, call.columns);
  }
  check_size(kTransposed, "x", x, -2, crow.sym_size(-1) - 1, "the rows of the sparse matrix");
  const auto batch =
      check_batch(kTransposed, {{"crow", crow}, {"col", col}, {"values", values}}, {{"x", x}});
  return empty_result(x.options(), batch, {call.columns, x.sym_size(-1)});
}

Tensor SampledOp::meta(const Arguments& call) {
  const Tensor &crow = call.crow, &col = call.col, &left = call.left, &right = call.right;
  check_tensors(kSampled, {{"crow", crow}, {"col", col}, {"left", left}, {"right", right}});
  check_indices(kSampled, crow, col);
  check_dtype(kSampled, "left", left);
  check_same_dtype(kSampled, "right", right, "left", left);
  check_rank(kSampled, "left", left, 2, 3, "a matrix or a batch of matrices");
  check_rank(kSampled, "right", right, 2, 3, "a matrix or a batch of matrices");
  check_size(kSampled, "left", left, -2, crow.sym_size(-1) - 1, "the rows of the sparse matrix");
  check_size(kSampled, "right", right, -1, left.sym_size(-1), "the width of left");
  const auto batch =
      check_batch(kSampled, {{"crow", crow}, {"col", col}}, {{"left", left}, {"right", right}});
  return empty_result(left.options(), call.summed ? std::nullopt : batch, {col.sym_size(-1)});
}

Tensor CsrOp::kernel(const Arguments& call) {
  Tensor out = meta(call);
  const int64_t columns = call.b->size(-2);
  if (call.check) check_pattern(call.crow, call.col, columns);
  multiply(kSpmm, CsrArguments(call.crow, call.col, columns), call.values, Tensor(), call.b, out);
  return out;
}

Tensor TransposedOp::kernel(const Arguments& call) {
  Tensor out = meta(call);
  const Tensor &crow = call.crow, &col = call.col;
  if (reads_no_transpose(crow, col, call.values, call.x, call.columns)) {
    multiply_columns(CsrArguments(crow, col, out.size(-2)), call.values, call.x, out);
    return out;
  }
  const MaybeCopy packed = call.transpose
                               ? adjacent(*call.transpose)
                               : MaybeCopy::owned(TransposeOp::kernel(crow, col, call.columns));
  const int64_t columns = out.size(-2);
  const int64_t entries = col.size(-1);
  const auto part = [&](int64_t begin, int64_t size) { return packed->narrow(-1, begin, size); };
  const Tensor begins = part(0, columns + 1), rows = part(columns + 1, entries);
  const CsrArguments pattern(begins, rows, call.x->size(-2));
  multiply(kTransposed, pattern, call.values, part(columns + 1 + entries, entries), call.x, out);
  return out;
}

Tensor SampledOp::kernel(const Arguments& call) {
  const Tensor &left = call.left, &right = call.right;
  if (call.summed && call.crow->dim() == 2) {
    // The products stay in the compute dtype until they are summed.
    const at::ScalarType wide = compute_dtype(left.scalar_type());
    const Tensor wide_left = left.to(wide), wide_right = right.to(wide);
    Arguments terms = call;
    terms.left = wide_left;
    terms.right = wide_right;
    terms.summed = false;
    return kernel(terms).sum(0).to(left.scalar_type());
  }
  Tensor out = meta(call);
  if (out.numel() == 0) return out;
  const CsrArguments pattern(call.crow, call.col, right.size(-2));
  const MaybeCopy rows = adjacent_columns(left);
  SampledProduct arguments{};
  arguments.pattern = pattern.arguments;
  arguments.left = dense_rows(*rows);
  arguments.right = dense_rows(right);
  arguments.column_stride = right.size(-1) > 1 ? right.stride(-1) : 1;
  arguments.out = out.data_ptr();
  arguments.dtype = dtype_of(out);
  arguments.batch = left.dim() == 3    ? left.size(0)
                    : right.dim() == 3 ? right.size(0)
                                       : pattern.matrices();
  arguments.width = left.size(-1);
  arguments.summed = call.summed;
  const bool in_place = is_read_in_place(arguments, right);
  const MaybeCopy columns = in_place ? MaybeCopy::borrowed(right) : adjacent_columns(right);
  if (!in_place) {
    arguments.right = dense_rows(*columns);
    arguments.column_stride = 1;
  }
  const int64_t matrices = call.summed ? 1 : arguments.batch;
  const int64_t width = arguments.width * (call.summed ? arguments.batch : 1);
  launch(
      kSampled, out, matrices * arguments.pattern.rows, row_grain(arguments.pattern, width),
      [&](auto stream) { return cuda::sampled_product(arguments, stream); },
      [&](int64_t begin, int64_t end) { return cpu::sampled_product(arguments, begin, end); });
  return out;
}

Tensor TransposeOp::meta(const Tensor& crow, const Tensor& col, SymInt columns) {
  check_tensors(kTranspose, {{"crow", crow}, {"col", col}});
  check_indices(kTranspose, crow, col);
  const auto batch = check_batch(kTranspose, {{"crow", crow}, {"col", col}}, {});
  TORCH_CHECK_VALUE(columns >= 0, "torchkiln.", kTranspose, ": columns: got ", columns,
                    ", expected 0 or more");
  return empty_result(crow.options().dtype(at::kInt), batch, {columns + 1 + 2 * col.sym_size(-1)});
}

Tensor TransposeOp::kernel(const Tensor& crow, const Tensor& col, SymInt columns) {
  Tensor out = meta(crow, col, columns);
  const CsrArguments pattern(crow, col, columns.expect_int());
  CsrTranspose arguments{};
  arguments.pattern = pattern.arguments;
  arguments.batch = pattern.matrices();
  arguments.out = out.data_ptr<int32_t>();
  launch_allocating(
      kTranspose, out, arguments.batch, 1,
      [&](Allocate allocate, auto stream) {
        return cuda::csr_transpose(arguments, allocate, stream);
      },
      [&](int64_t begin, int64_t end) { return cpu::csr_transpose(arguments, begin, end); });
  return out;
}

}  // namespace torchkiln::spmm_ops
