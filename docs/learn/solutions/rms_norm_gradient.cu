// The gradient of x of an RMS norm. Both sums of a row, of x^2 and of grad * weight * x, take one
// exchange, because the second one does not need the first.
#include "../norm/row.cuh"

using namespace torchkiln::device;

template <class T, int kVectors>
__global__ void __launch_bounds__(kThreads)
    rms_norm_gradient(const T* grad, const T* x, const T* weight, T* grad_x, int columns,
                      float eps) {
  constexpr int kLanes = kVectorLanes<T>;
  const int64_t first = int64_t{blockIdx.x} * columns;
  const Row<T, kVectors> row(x + first, columns), grads(grad + first, columns);
  float sums[2] = {};
  row.for_each([&](int v, const auto& values) {
    float g[kLanes], scale[kLanes];
    widen(grads.held[v], g);
    widen(load_vector<kLanes>(weight + row.at(v)), scale);
    for (int i = 0; i < kLanes; ++i) {
      sums[0] += values[i] * values[i];
      sums[1] += g[i] * scale[i] * values[i];
    }
  });
  reduce_block(sums);
  const float rstd = rsqrtf(sums[0] / columns + eps);
  const float along = rstd * rstd * sums[1] / columns;
  row.for_each([&](int v, auto& values) {
    float g[kLanes], scale[kLanes];
    widen(grads.held[v], g);
    widen(load_vector<kLanes>(weight + row.at(v)), scale);
    for (int i = 0; i < kLanes; ++i) values[i] = rstd * (g[i] * scale[i] - values[i] * along);
    store<kLanes>(grad_x + first + row.at(v), values);
  });
}
