#include "forward_one_pass.cuh"
#include "forward_streamed.cuh"

namespace torchkiln::cuda {

using namespace device;
using namespace rowwise;
namespace {

template <class Tile, class W>
Status launch_one_pass(const Norm& p, const TeamShape& team, CUstream_st* stream) {
  Grid grid;
  const Status status = make_grid(team, p.rows, grid);
  if (!status.ok()) return status;
  return p.centered ? launch_overlapped(norm_rows<Tile, W, true>, grid, stream, p, team)
                    : launch_overlapped(norm_rows<Tile, W, false>, grid, stream, p, team);
}

template <class T>
Status run(const Norm& p, Alignment alignment, CUstream_st* stream) {
  const bool lacks_parameters = p.weight == nullptr || (p.centered && p.bias == nullptr);
  const auto in_registers = [&](auto tag, const TeamShape& team) {
    using Tile = typename decltype(tag)::type;
    if (lacks_parameters) return launch_one_pass<Tile, void>(p, team, stream);
    return with_parameter_type<T>(p.weight_dtype, [&](auto parameter) {
      return launch_one_pass<Tile, typename decltype(parameter)::type>(p, team, stream);
    });
  };
  const auto streamed = [&](auto tag, const TeamShape& team) {
    using Access = typename decltype(tag)::type;
    Grid grid;
    const Status status = make_grid(team, p.rows, grid);
    if (!status.ok()) return status;
    return launch_overlapped(norm_streamed_rows<Access>, grid, stream, p, team);
  };
  return with_tile<T>(alignment, p.columns, 1, kRowThreads, in_registers, streamed);
}

}  // namespace

Status norm(const Norm& p, CUstream_st* stream) {
  if (p.rows == 0 || p.columns == 0) return {};
  if (p.columns > kMaxColumns) return {kTooLong};
  const TensorRows tensors[] = {{p.x, p.x_row_stride},
                                {p.residual, p.residual_row_stride},
                                {p.sum, p.columns},
                                {p.y, p.columns}};
  Alignment alignment = alignment_of(tensors, p.dtype, p.rows, p.columns);
  if (!aligned(p.weight) || !aligned(p.bias)) alignment = Alignment::scalar;
  return dispatch_floating(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return run<T>(p, alignment, stream);
  });
}

}  // namespace torchkiln::cuda
