// y = x / sqrt(mean of x^2 + eps) * weight: no mean, so one exchange is enough.
#include "../norm/row.cuh"

using namespace torchkiln::device;

template <class T, int kVectors>
__global__ void __launch_bounds__(kThreads)
    rms_norm(const T* x, const T* weight, T* y, int columns, float eps) {
  const int64_t first = int64_t{blockIdx.x} * columns;
  const Row<T, kVectors> row(x + first, columns);
  float squares = 0;
  row.for_each([&](int, const auto& values) {
    for (const float value : values) squares += value * value;
  });
  const float rstd = rsqrtf(reduce_block(squares) / columns + eps);
  row.for_each([&](int v, auto& values) {
    constexpr int kLanes = Row<T, kVectors>::kLanes;
    float scale[kLanes];
    widen(load_vector<kLanes>(weight + row.at(v)), scale);
    for (int i = 0; i < kLanes; ++i) values[i] *= rstd * scale[i];
    store<kLanes>(y + first + row.at(v), values);
  });
}
