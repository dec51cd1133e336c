#pragma once

#include "torchkiln/core/divergence.h"
#include "torchkiln/core/dtype.h"

struct CUstream_st;

namespace torchkiln {

/// The target of a row of logits: the distribution q over the classes
///   q[c] = weight[c] * ((1 - label_smoothing) * p[c] + label_smoothing / all_classes)
/// A row of a shard holds the classes from first_class on. If the target class is in another shard,
/// p and the target weight are 0.
struct ClassTarget {
  const int64_t* index;       // [rows]; null if probabilities are given
  const void* probabilities;  // [rows, classes]; null if `index` is given
  Dtype probabilities_dtype;  // that of the logits; or one is float32, one half precision
  int64_t probabilities_row_stride;
  const void* weight;    // [classes] of the compute type; null for ones
  int64_t ignore_index;  // rows with this target are ignored
  double label_smoothing;
  int64_t first_class;
  int64_t all_classes;  // classes of all shards; 0 if the logits are not a shard
};

/// For each row, with lse = log(sum of exp(logits)) and w the weight of its target class (0 if the
/// row is ignored, 1 if probabilities are given):
///   loss = sum over the classes of q * (lse - logits) + z_loss * w * lse^2
///   mass = (sum of q + 2 * z_loss * w * lse) * exp(log_sum_exp - lse), 0 if the row is ignored
/// The last factor of mass compensates for the rounding of lse to log_sum_exp, which would show for
/// large logits.
/// With is_logprob, the logits are first multiplied by `scale`, and the result `loss` is -1 times
/// the loss above: the logarithm of the probability of the target class. The target then is an
/// index, without class weights and smoothing, and z_loss is 0.
struct CrossEntropy {
  const void* logits;  // [rows, classes], classes adjacent
  Dtype dtype;
  ClassTarget target;
  double z_loss;
  int64_t rows;
  int64_t classes;
  int64_t row_stride;
  // the results, in the compute type:
  void* loss;           // [rows]
  void* log_sum_exp;    // [rows]
  void* mass;           // [rows]: the factor of exp(logits - log_sum_exp) in the gradient
  void* target_weight;  // [rows]: w
  void* correct;  // [rows]: 1 if no logit exceeds that of the target class, else 0; null if not
                  // wanted
  // [rows] of a shard: the sum of exp(logits - maximum). Null for whole rows. Otherwise `loss`
  // receives the sum of q * (logits - maximum), log_sum_exp the maximum (0 in place of -infinity)
  // and mass the sum of q; z_loss has to be 0, and results of ignored rows are undefined.
  void* sum;
  bool is_logprob = false;
  double scale = 1;  // greater than 0; read only with is_logprob
  // [rows] with is_logprob: -sum of p * log(p) with p = softmax(scale * logits), 0 if the row is
  // ignored; of a shard the sum of exp(z - maximum) * (z - maximum) with z = scale * logits. Null
  // if not wanted.
  void* entropy = nullptr;
};

/// The gradient of the logits, 0 if the row is ignored:
///   grad_logits = grad / divisor * (mass * exp(logits - log_sum_exp) - q)
/// with q of ClassTarget, and mass and log_sum_exp that CrossEntropy has computed for the row. With
/// is_logprob, where z = factor * logits and p = mass * exp(z - log_sum_exp):
///   grad_logits = factor * (grad * (q - p) - grad_entropy * p * (z - log_sum_exp + entropy))
struct CrossEntropyBackward {
  const void* grad;  // [rows] of grad_dtype
  Dtype grad_dtype;
  int64_t grad_stride;  // 0: one number for all rows
  const void* divisor;  // one number of the compute type; null for 1
  const void* logits;   // [rows, classes], classes adjacent
  Dtype dtype;
  ClassTarget target;
  double z_loss;
  int64_t rows;
  int64_t classes;
  int64_t row_stride;
  const void* log_sum_exp;    // from forward
  const void* mass;           // from forward
  const void* target_weight;  // from forward
  // [rows, classes], classes adjacent; may be the logits. With is_logprob and float32 logits in
  // memory of its own it may have half precision.
  void* grad_logits;
  Dtype grad_logits_dtype;
  int64_t grad_logits_row_stride;
  bool is_logprob = false;
  double factor = 1;                   // `scale` of the forward
  const void* entropy = nullptr;       // [rows] from forward; null without grad_entropy
  const void* grad_entropy = nullptr;  // [rows] of the compute type; null for 0
};

/// The arguments with target.all_classes set to `classes` if it was 0.
template <class Arguments>
Arguments with_all_classes(Arguments arguments) {
  if (arguments.target.all_classes == 0) arguments.target.all_classes = arguments.classes;
  return arguments;
}

/// out = sum of the losses, divided by the sum of the target weights if `mean`.
struct LossSum {
  const void* loss;           // [rows] of the compute type
  const void* target_weight;  // [rows] of the compute type
  Dtype dtype;                // dtype of the logits; determines the compute type
  int64_t rows;
  bool mean;
  void* out;  // one number
  Dtype out_dtype;
  void* divisor;  // one number of the compute type: the sum of the weights; null unless `mean`
};

/// The logits of one of a row's two distributions, and the numbers that cross_entropy() with
/// is_logprob has computed for them. log(p) = scale * logits - log_sum_exp + log(mass).
struct DistributionRows {
  const void* logits;  // [rows, classes], classes adjacent
  int64_t row_stride;
  const void* log_sum_exp;  // [rows]
  const void* mass;         // [rows]
};

/// The divergence of the two distributions of each row, and its gradient with respect to the
/// student's logits.
struct Divergence {
  DistributionRows student, teacher;
  Dtype dtype;  // dtype of all tensors except grad_logits: float32 or float64
  int64_t rows;
  int64_t classes;
  double scale;  // greater than 0
  DivergenceKind kind;
  double beta;  // read only for js; greater than 0, less than 1
  // [rows]: the sum of the terms with the factor p, the sum of those with the factor q, and the sum
  // of both
  void* of_student;  // read by the gradient
  void* of_teacher;
  void* divergence;
  // for the gradient:
  const void* grad = nullptr;   // [rows], incoming; null for ones
  void* grad_logits = nullptr;  // [rows, classes], classes adjacent; may be the student's logits
  Dtype grad_logits_dtype{};    // `dtype`, or half precision if that is float32
  int64_t grad_logits_row_stride = 0;
};

namespace cpu {

/// The layout of logits whose classes are not adjacent: class c of row r is at r / group *
/// group_stride + r % group * row_stride + c * class_stride.
struct ClassLayout {
  int64_t class_stride = 1;
  int64_t group = 0;  // rows per group; 0: all rows are one group
  int64_t group_stride = 0;
};

/// Computes the rows begin <= row < end. Returns an error if a target is not a class. `layout` is
/// the default for probabilities, label_smoothing, a partial `sum`, gradients of is_logprob, and
/// gradients that overwrite the logits.
TORCHKILN_EXPORT Status cross_entropy(const CrossEntropy& arguments, const ClassLayout& layout,
                                      int64_t begin, int64_t end);
TORCHKILN_EXPORT Status cross_entropy_backward(const CrossEntropyBackward& arguments,
                                               const ClassLayout& layout, int64_t begin,
                                               int64_t end);
TORCHKILN_EXPORT Status loss_sum(const LossSum& arguments);
TORCHKILN_EXPORT Status divergence(const Divergence& arguments, int64_t begin, int64_t end);
TORCHKILN_EXPORT Status divergence_gradient(const Divergence& arguments, int64_t begin,
                                            int64_t end);

}  // namespace cpu

namespace cuda {

/// Runs on the current device, queued on `stream`. A target that is not a class stops the kernel
/// with a trap, after which the process cannot use the GPU any more, as in torch. If `total` is not
/// null, the losses of all rows are also summed, for few rows by the same kernel.
TORCHKILN_EXPORT Status cross_entropy(const CrossEntropy& arguments, const LossSum* total,
                                      CUstream_st* stream);
TORCHKILN_EXPORT Status cross_entropy_backward(const CrossEntropyBackward& arguments,
                                               CUstream_st* stream);
TORCHKILN_EXPORT Status loss_sum(const LossSum& arguments, CUstream_st* stream);
TORCHKILN_EXPORT Status divergence(const Divergence& arguments, CUstream_st* stream);
TORCHKILN_EXPORT Status divergence_gradient(const Divergence& arguments, CUstream_st* stream);

}  // namespace cuda
}  // namespace torchkiln
