// Statistics from the moments of x, and the outputs from given statistics, for sync_bn_act and
// bn_act_from_moments.

#include "batch_norm/operands.h"
#include "torchkiln/torch/checks.h"

namespace torchkiln::batch_norm_ops {

void check_moments(const char* name, const Tensor& moments, const Tensor& x) {
  check_same_device(name, "moments", moments, "x", x);
  const c10::SymInt each = 2 * x.sym_size(1) + 1;
  TORCH_CHECK(moments.scalar_type() == at::kDouble && moments.is_contiguous() &&
                  moments.dim() == 2 && moments.sym_size(1) == each,
              "torchkiln.", name, ": moments: got ", dtype_name(moments.scalar_type()), " ",
              moments.sym_sizes(), ", expected float64 [processes, ", each, "]");
}

void merge_moments(const Call& call, const Tensor& moments, const MaybeTensor& batches,
                   const Tensor& statistics, const Tensor& count) {
  const Tensor& x = call.x;
  BatchNormMerge arguments{};
  arguments.moments = moments.const_data_ptr<double>();
  arguments.processes = moments.size(0);
  arguments.channels = x.size(1);
  arguments.running_mean = running(call.running_mean);
  arguments.running_var = running(call.running_var);
  arguments.batches = batches ? batches->const_data_ptr<int64_t>() : nullptr;
  arguments.statistics = statistics.data_ptr();
  arguments.count = count.data_ptr<double>();
  arguments.dtype = dtype_of(x);
  arguments.running_dtype = dtype_of(call.running_mean ? *call.running_mean : x);
  arguments.momentum = call.momentum;
  arguments.eps = call.eps;
  launch(
      call.name, x, arguments.channels, kGrain,
      [&](auto stream) { return cuda::batch_norm_merge(arguments, stream); },
      [&](int64_t begin, int64_t end) { return cpu::batch_norm_merge(arguments, begin, end); });
  count_change(call.running_mean);
  count_change(call.running_var);
}

void normalize(const Call& call, const Tensor& statistics, const Tensor& y, const Tensor& signs) {
  const Operands operands(call.x, call.weight, call.bias, call.residual);
  BatchNorm arguments{};
  operands.fill(arguments);
  arguments.y = y.data_ptr();
  arguments.signs = static_cast<uint8_t*>(output(signs));
  arguments.statistics = const_cast<void*>(statistics.const_data_ptr());
  arguments.activation = call.act;
  arguments.training = true;
  launch_elements(
      call.name, call.x, [&](auto stream) { return cuda::batch_norm_outputs(arguments, stream); },
      [&](int64_t begin, int64_t end) { return cpu::batch_norm(arguments, begin, end); });
}

}  // namespace torchkiln::batch_norm_ops
