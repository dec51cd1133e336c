#pragma once

// Gradients of a linear layer from losses per row, a chunk of rows or a chunk of classes at a time.
// Over chunks of rows the gradient of the weight is summed, over chunks of classes the gradient of
// x. Both sums have the compute dtype. With fewer rows than classes, the sum for x takes less
// memory, and less time to read and write: 256 MiB in place of 2 GiB for 16384 rows, 131072 classes
// and 4096 features. Chunks of classes need the log-sum-exp of whole rows, which forward has saved.

#include <optional>

#include "cross_entropy/linear_chunks.h"

namespace torchkiln {

/// Classes per chunk of logits that take `bytes` each; nullopt if chunks of `rows_of_chunk` rows
/// are better. A multiple of the tile size of products.
inline std::optional<int64_t> classes_per_chunk(const LogitLayer& layer, const Wanted& wanted,
                                                int64_t rows_of_chunk, int64_t bytes) {
  constexpr int64_t kLeast = 2048, kMost = 16384, kTile = 256;
  const int64_t rows = layer.x.size(0), classes = layer.weight.size(0);
  if (!wanted[1] || rows <= rows_of_chunk || rows >= classes) return std::nullopt;
  const int64_t size = size_of_chunk(classes, rows * bytes, kLeast, kMost);
  return std::min((size + kTile - 1) / kTile * kTile, classes);
}

/// The layer reduced to some of its classes.
inline LogitLayer part_of(const LogitLayer& layer, const Classes& classes) {
  LogitLayer part = layer;
  part.weight = classes.of(layer.weight);
  if (layer.bias) part.bias = classes.of(*layer.bias);
  return part;
}

/// The options for `classes`, which are some of `all` classes.
inline LossOptions part_of(const LossOptions& options, const Classes& classes, int64_t all) {
  LossOptions part = options;
  part.first_class = classes.begin;
  part.all_classes = all;
  if (options.weight) part.weight = classes.of(*options.weight);
  return part;
}

/// The gradients of a layer, from the gradients of its logits, a chunk of classes at a time with
/// all rows. The gradient of x is a sum over the chunks. The gradients of weight and bias have
/// separate elements for each chunk, which add() writes once.
class ClassGradients {
 public:
  ClassGradients(const LogitLayer& layer, const Wanted& wanted, const at::Tensor& grad_x,
                 const at::Tensor& grad_bias)
      : x_(layer.x), bias_(wanted[2] ? grad_bias : at::Tensor()) {
    wide_ = x_.options().dtype(compute_dtype(x_.scalar_type()));
    weight_ = at::empty(layer.weight.sizes(),
                        x_.options().dtype(weight_gradient_dtype(x_.scalar_type())));
    if (!wanted[0]) return;
    of_x_ = as_matrix(grad_x);
    sum_of_x_ = of_x_.scalar_type() == wide_.dtype() ? of_x_ : at::empty(of_x_.sizes(), wide_);
  }
  const at::Tensor& weight() const { return weight_; }

  void add(const ChunkLogits& logits, const at::Tensor& of_logits, const Classes& chunk) {
    if (of_x_.defined()) add_product(sum_of_x_, of_logits, logits.layer().weight, is_first_);
    is_first_ = false;
    const at::Tensor of_classes = logits.own(of_logits), part = chunk.of(weight_);
    if (part.is_cpu() || has_exact_gradient(part)) {
      add_product(part, of_classes.t(), x_, /*is_first=*/true);
    } else {
      const at::Tensor product = at::empty(part.sizes(), wide_);
      add_product(product, of_classes.t(), x_, /*is_first=*/true);
      part.copy_(product);
    }
    if (bias_.defined()) chunk.of(bias_).copy_(sum_of_rows(of_classes, bias_.scalar_type()));
  }
  /// Rounds the gradient of x from its sum, and returns the gradient of the weight.
  at::Tensor finish() {
    if (of_x_.defined() && !sum_of_x_.is_same(of_x_)) of_x_.copy_(sum_of_x_);
    return weight_;
  }

 private:
  at::Tensor x_, bias_, weight_, of_x_, sum_of_x_;
  at::TensorOptions wide_;
  bool is_first_ = true;
};

/// Calls body(logits, rows, classes) for each chunk of `size` classes with all rows. The body
/// returns the gradient of the logits. Returns the gradient of the weight.
template <class Body>
at::Tensor for_each_chunk_of_classes(const char* op, const LogitLayer& layer, const Wanted& wanted,
                                     const at::Tensor& grad_x, const at::Tensor& grad_bias,
                                     int64_t size, const Body& body) {
  const Rows rows{0, layer.x.size(0)};
  ClassGradients gradients(layer, wanted, grad_x, grad_bias);
  for_each_chunk("classes", layer.weight.size(0), size, [&](const Classes& chunk) {
    ChunkLogits logits(op, part_of(layer, chunk), rows.count);
    gradients.add(logits, body(logits, rows, chunk), chunk);
  });
  return gradients.finish();
}

/// A body for for_each_part_of_logits() that receives chunks of rows with all classes, and adds the
/// gradients of each chunk.
template <class Body>
auto of_row_chunks(const LogitLayer& layer, const Body& body) {
  return [&, all = Classes{0, layer.weight.size(0)}](
             ChunkLogits& logits, const LayerGradients& gradients, const Rows& chunk) {
    gradients.add(logits.layer(), chunk, body(logits, chunk, all));
  };
}

/// Calls body(logits, rows, classes) for chunks of rows with all classes, or for chunks of classes
/// with all rows. The body returns the gradient of the logits. Returns the gradient of the weight,
/// if it is wanted.
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
