#pragma once

// Gradients of a linear layer from losses per row, a chunk of rows or a chunk of classes at a time.
// Chunks of rows add up the gradient of the weight, chunks of classes that of x; both sums have the
// compute dtype. With fewer rows than classes the sum of x takes less memory, and less time to read
// and write: 256 MiB in place of 2 GiB for 16384 rows, 131072 classes and 4096 features. Chunks of
// classes need the log-sum-exp of whole rows, which forward has saved.

#include <optional>

#include "cross_entropy/linear_chunks.h"

namespace torchkiln {

/// Classes per chunk of logits that take `bytes` each; nullopt if chunks of `rows_of_chunk` rows
/// are better. The products of a chunk have whole tiles.
inline std::optional<int64_t> classes_per_chunk(const LogitLayer& layer, const Wanted& wanted,
                                                int64_t rows_of_chunk, int64_t bytes) {
  constexpr int64_t kLeast = 2048, kMost = 16384, kTile = 256;
  const int64_t rows = layer.x.size(0), classes = layer.weight.size(0);
  if (!wanted[1] || rows <= rows_of_chunk || rows >= classes) return std::nullopt;
  const int64_t size = size_of_chunk(classes, rows * bytes, kLeast, kMost);
  return std::min((size + kTile - 1) / kTile * kTile, classes);
}

/// The layer with some of its classes.
inline LogitLayer part_of(const LogitLayer& layer, const Classes& classes) {
  LogitLayer part = layer;
  part.weight = classes.of(layer.weight);
  if (layer.bias) part.bias = classes.of(*layer.bias);
  return part;
}

/// The options for some of all classes.
inline LossOptions part_of(const LossOptions& options, const Classes& classes, int64_t all) {
  LossOptions part = options;
  part.first_class = classes.begin;
  part.all_classes = all;
  if (options.weight) part.weight = classes.of(*options.weight);
  return part;
}

/// Calls body(logits, rows, classes) for each chunk of `size` classes, with all rows: it returns
/// the gradient of the logits. Returns the gradient of the weight.
template <class Body>
at::Tensor for_each_chunk_of_classes(const char* op, const LogitLayer& layer, const Wanted& wanted,
                                     const at::Tensor& grad_x, const at::Tensor& grad_bias,
                                     int64_t size, const Body& body) {
  const at::Tensor &x = layer.x, &weight = layer.weight;
  const Rows rows{0, x.size(0)};
  const auto wide = x.options().dtype(compute_dtype(x.scalar_type()));
  at::Tensor of_x, sum_of_x;
  if (wanted[0]) {
    of_x = as_matrix(grad_x);
    sum_of_x = of_x.scalar_type() == wide.dtype() ? of_x : at::empty(of_x.sizes(), wide);
  }
  const at::Tensor of_weight =
      at::empty(weight.sizes(), x.options().dtype(weight_gradient_dtype(x.scalar_type())));
  for_each_chunk("classes", weight.size(0), size, [&](const Classes& chunk) {
    ChunkLogits logits(op, part_of(layer, chunk), rows.count);
    const at::Tensor of_logits = body(logits, rows, chunk);
    if (wanted[0]) add_product(sum_of_x, of_logits, logits.layer().weight, chunk.begin == 0);
    const at::Tensor of_classes = logits.own(of_logits), part = chunk.of(of_weight);
    if (has_exact_gradient(part)) {
      add_product(part, of_classes.t(), x, /*is_first=*/true);
    } else {
      const at::Tensor product = at::empty(part.sizes(), wide);
      add_product(product, of_classes.t(), x, /*is_first=*/true);
      part.copy_(product);
    }
    if (wanted[2]) chunk.of(grad_bias).copy_(sum_of_rows(of_classes, grad_bias.scalar_type()));
  });
  if (wanted[0] && !sum_of_x.is_same(of_x)) of_x.copy_(sum_of_x);
  return of_weight;
}

/// A body for chunks of all classes, which adds the gradients of a chunk of rows.
template <class Body>
auto of_row_chunks(const LogitLayer& layer, const Body& body) {
  return [&, all = Classes{0, layer.weight.size(0)}](
             ChunkLogits& logits, const LayerGradients& gradients, const Rows& chunk) {
    gradients.add(logits.layer(), chunk, body(logits, chunk, all));
  };
}

/// Calls body(logits, rows, classes) for chunks of rows with all classes, or for chunks of classes
/// with all rows: it returns the gradient of the logits. Returns the gradient of the weight, if it
/// is wanted.
template <class Body>
at::Tensor for_each_part_of_logits(const char* op, const LogitLayer& layer, const Wanted& wanted,
                                   const at::Tensor& grad_x, const at::Tensor& grad_bias,
                                   const Body& body) {
  const int64_t rows_of_chunk = rows_per_chunk(layer, /*may_be_whole=*/false);
  const auto size = classes_per_chunk(layer, wanted, rows_of_chunk, bytes_of_logit(layer));
  return size ? for_each_chunk_of_classes(op, layer, wanted, grad_x, grad_bias, *size, body)
              : for_each_chunk_of_logits(op, layer, wanted, grad_x, grad_bias,
                                         of_row_chunks(layer, body));
}

}  // namespace torchkiln
