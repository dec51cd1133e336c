#pragma once

// The state {seed, offset} of a dropout mask, and the op that draws it.

#include <ATen/CPUGeneratorImpl.h>

#include <mutex>

#include "torchkiln/kernels/dropout.h"
#include "torchkiln/torch/checks.h"
#include "torchkiln/torch/launch.h"
#include "torchkiln/torch/op.h"
#include "torchkiln/torch/torch_cuda.h"

namespace torchkiln::dropout_ops {

using at::Tensor;

/// The parameters of the kernels for a drop probability p < 1.
inline Dropout dropout_of(double p) { return {RandomState{}, last_word(1 - p), 1 / (1 - p)}; }

/// Takes a state from torch's generator of the device. Each output element has its own Philox
/// subsequence, so a call advances the generator by only 4 words.
inline RandomState next_state(const Tensor& where) {
#ifdef TORCHKILN_WITH_CUDA
  if (where.is_cuda()) return torch_cuda().next_random(where.device());
#else
  (void)where;
#endif
  auto* generator = at::get_generator_or_default<at::CPUGeneratorImpl>(
      std::nullopt, at::detail::getDefaultCPUGenerator());
  const std::lock_guard<std::mutex> lock(generator->mutex_);
  RandomState state;
  state.seed = generator->random64();
  return state;
}

/// Draws {seed, offset}; all ops with the same state generate the same mask. The state is on the
/// device, because each replay of a CUDA graph must draw its own. Traced graphs contain this op, so
/// that they can save its result and compute the other op again.
struct State {
  static constexpr bool kFlexibleLayout = true;
  static constexpr const char* kSchema = "torchkiln::_dropout_state(Tensor x) -> Tensor";
  static constexpr const char* kName = "dropout_state";
  static constexpr bool kRandom = true;

  static Tensor meta(const Tensor& x) { return at::empty({2}, x.options().dtype(at::kLong)); }

  static Tensor kernel(const Tensor& x) {
    check_tensor(kName, "x", x);
    Tensor state = meta(x);
    RandomState random = next_state(x);
    random.record = state.data_ptr<int64_t>();
    launch(
        kName, x, 1, 1, [&](auto stream) { return cuda::record_random(random, stream); },
        [&](int64_t, int64_t) {
          random.write_record();
          return Status{};
        });
    return state;
  }

  /// Under vmap the state is unused: the op that takes it draws random numbers by vmap's rules.
  static Tensor composite(const Tensor& x) { return at::zeros({2}, x.options().dtype(at::kLong)); }
};

/// Checks a state. A tensor without memory may have the states of several shards: see
/// torchkiln.distributed.
inline void check_state(const char* op, const Tensor& state) {
  const c10::SymInt numel = state.is_meta() ? state.sym_size(-1) : state.sym_numel();
  TORCH_CHECK(state.scalar_type() == at::kLong && state.is_contiguous() && numel == 2, "torchkiln.",
              op, ": state: got ", dtype_name(state.scalar_type()), " ", state.sym_sizes(),
              ", expected int64 [2], {seed, offset} from _dropout_state");
}

/// The parameters for the mask of a state, for p < 1.
inline Dropout dropout_of(double p, const Tensor& state) {
  Dropout dropout = dropout_of(p);
  dropout.random.seed_from = state.const_data_ptr<int64_t>();
  dropout.random.offset_from = state.const_data_ptr<int64_t>() + 1;
  return dropout;
}

}  // namespace torchkiln::dropout_ops
