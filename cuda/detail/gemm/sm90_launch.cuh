#pragma once

// The launch of a product with the roles of sm90_roles.cuh.

#include "detail/gemm/sm90_roles.cuh"

namespace torchkiln::gemm::sm90 {

/// Sets the parameters that all epilogues share. `half`: as in Parameters.
template <class T>
Status make_parameters(const Matmul& p, int64_t half, Parameters& parameters) {
  const Operand a = describe_a(p);
  const Operand b = describe_b(p);
  const auto box = [](const Operand& operand) {
    return operand.major == Major::k ? kPanelWidth : kTileDepth;
  };
  Status status = make_tensor_map<T>(parameters.a, a.shape, box(a));
  if (status.ok()) status = make_tensor_map<T>(parameters.b, b.shape, box(b));
  if (!status.ok()) return status;
  const int64_t tile_rows = ceil_div(p.m, kTileRows);
  const int64_t tile_columns = ceil_div(p.n, kTileColumns);
  const int64_t tiles = tile_rows * tile_columns * p.batch;
  if (tiles > INT32_MAX / 2) return {"more tiles than a 32-bit number counts"};
  parameters.bias = p.bias;
  parameters.residual = p.residual;
  parameters.bias_is_float = p.bias_dtype == Dtype::float32;
  parameters.keeps_preactivation = p.preactivation != nullptr;
  parameters.repeats_a = p.a.batch_stride == 0;
  parameters.repeats_b = p.b.batch_stride == 0;
  parameters.activation = p.activation;
  parameters.scale = static_cast<float>(p.scale);
  parameters.m = static_cast<int>(p.m);
  parameters.n = static_cast<int>(p.n);
  parameters.half = static_cast<int>(half);
  parameters.depth_steps = static_cast<int>(ceil_div(p.k, kTileDepth));
  parameters.tile_rows = static_cast<int>(tile_rows);
  parameters.tile_columns = static_cast<int>(tile_columns);
  parameters.tiles = static_cast<int>(tiles);
  return {};
}

/// The grid of persistent blocks.
template <class T>
Grid grid_of(const Matmul& p, int multiprocessors) {
  static_assert(sizeof(Shared<T>) == kSharedBytes && kSharedBytes <= 227 * 1024);
  const Blocks blocks = blocks_of(p, multiprocessors);
  return {dim3(static_cast<unsigned>(blocks.count)), dim3(kThreads), 1, kSharedBytes};
}

}  // namespace torchkiln::gemm::sm90
