// A projection whose keys and values are written into a cache, for inference: no gradients.

#include "rope/qkv.h"
#include "torchkiln/torch/written.h"

namespace torchkiln::rope_ops {
namespace {

constexpr const char* kCacheName = "qkv_norm_rope";

/// `positions` are places in the cache and, if cos and sin are tables and not factors of each
/// token, their rows.
QkvCall call_of(const Tensor& qkv, const Tensor& cos, const Tensor& sin,
                const MaybeTensor& q_weight, const MaybeTensor& k_weight, int64_t heads,
                int64_t kv_heads, double eps, c10::string_view norm, double offset,
                bool interleaved, const MaybeTensor& positions, std::optional<int64_t> partial) {
  static const MaybeTensor none;
  const MaybeTensor& rows = cos.defined() && cos.dim() == 3 ? none : positions;
  return {kCacheName, qkv,      {cos, sin, interleaved, rows, partial, /*inverse=*/false},
          q_weight,   k_weight, heads,
          kv_heads,   eps,      norm,
          offset};
}

/// Checks keys or values of a cache.
void check_cache(const QkvCall& call, const char* name, const Tensor& cache) {
  const Heads heads = call.rotated();
  check_tensors(kCacheName, {{"qkv", call.qkv}, {name, cache}});
  check_same_dtype(kCacheName, name, cache, "qkv", call.qkv);
  const bool fits = cache.dim() == call.qkv.dim() + 1 &&
                    (!heads.batch || cache.sym_size(0) == *heads.batch) &&
                    cache.sym_size(-3) == call.kv_heads && cache.sym_size(-1) == heads.head_dim;
  TORCH_CHECK(fits, "torchkiln.", kCacheName, ": ", name, ": got shape ", cache.sym_sizes(),
              ", expected [", heads.batch ? c10::str(*heads.batch, ", ") : "", call.kv_heads,
              ", length, ", heads.head_dim, "]");
  TORCH_CHECK(cache.sym_size(-1) <= 1 || cache.sym_stride(-1) == 1, "torchkiln.", kCacheName, ": ",
              name, ": got strides ", cache.sym_strides(),
              ", expected 1 in the last dimension: adjacent elements of a head");
}

struct QkvIntoCache {
  static constexpr const char* kSchema =
      "torchkiln::qkv_norm_rope_cache(Tensor qkv, Tensor cos, Tensor sin, Tensor? q_weight, "
      "Tensor? k_weight, int heads, int kv_heads, float eps, str norm, float offset, "
      "bool interleaved, Tensor? positions, int? partial, Tensor(a!) keys, Tensor(b!) values) -> "
      "Tensor";

  static Tensor meta(const Tensor& qkv, const Tensor& cos, const Tensor& sin,
                     const MaybeTensor& q_weight, const MaybeTensor& k_weight, int64_t heads,
                     int64_t kv_heads, double eps, c10::string_view norm, double offset,
                     bool interleaved, const MaybeTensor& positions, std::optional<int64_t> partial,
                     const Tensor& keys, const Tensor& values) {
    const QkvCall call = call_of(qkv, cos, sin, q_weight, k_weight, heads, kv_heads, eps, norm,
                                 offset, interleaved, positions, partial);
    check(call);
    check_cache(call, "keys", keys);
    check_cache(call, "values", values);
    check_same_shape(kCacheName, "values", values, "keys", keys);
    if (positions) {
      check_tensors(kCacheName, {{"qkv", qkv}, {"positions", *positions}});
      check_positions(call.rotated(), positions, "a place in the cache");
    } else {
      TORCH_CHECK(keys.sym_size(-2) >= qkv.sym_size(-2), "torchkiln.", kCacheName,
                  ": keys: got a length of ", keys.sym_size(-2), ", expected at least ",
                  qkv.sym_size(-2), ", the number of tokens");
    }
    return heads_output(call, heads);
  }

  static Tensor kernel(const Tensor& qkv, const Tensor& cos, const Tensor& sin,
                       const MaybeTensor& q_weight, const MaybeTensor& k_weight, int64_t heads,
                       int64_t kv_heads, double eps, c10::string_view norm, double offset,
                       bool interleaved, const MaybeTensor& positions,
                       std::optional<int64_t> partial, const Tensor& keys, const Tensor& values) {
    const Tensor q = meta(qkv, cos, sin, q_weight, k_weight, heads, kv_heads, eps, norm, offset,
                          interleaved, positions, partial, keys, values);
    at::assert_no_overlap(keys, values);
    for (const Tensor& cache : {keys, values}) {
      at::assert_no_internal_overlap(cache);
      at::assert_no_overlap(cache, qkv);
    }
    if (q.numel() > 0) {
      run_into(call_of(qkv, cos, sin, q_weight, k_weight, heads, kv_heads, eps, norm, offset,
                       interleaved, positions, partial),
               {q, keys, values}, rows_of(positions, keys.size(-2)));
    }
    mark_written(keys);
    mark_written(values);
    return q;
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchkiln, m) { define<QkvIntoCache>(m); }

}  // namespace torchkiln::rope_ops
