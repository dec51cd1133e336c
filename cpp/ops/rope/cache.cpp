// qkv_norm_rope that writes keys and values to a cache, for inference: no gradients. The checks of
// the cache are here; qkv.h has the other checks and launches the kernel.

#include "rope/qkv.h"
#include "torchkiln/torch/written.h"

namespace torchkiln::rope_ops {
namespace {

constexpr const char* kCacheName = "qkv_norm_rope";

/// Checks keys or values of a cache.
void check_cache(const QkvCall& call, const char* name, const Tensor& cache) {
  const Heads heads = call.rotated();
  check_tensors(kCacheName, {{"qkv", call.qkv}, {name, cache}});
  check_same_dtype(kCacheName, name, cache, "qkv", call.qkv);
  const bool fits = cache.dim() == call.qkv->dim() + 1 &&
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
      "torchkiln::_qkv_norm_rope_cache(Tensor qkv, Tensor cos, Tensor sin, Tensor? q_weight, "
      "Tensor? k_weight, int num_heads, int num_kv_heads, float eps, str norm, float offset, "
      "bool interleaved, Tensor? positions, int? rotary_dim, Tensor(a!) keys, Tensor(b!) values) "
      "-> Tensor";

  static constexpr const char* kName = kCacheName;

  struct Arguments : QkvCall {
    Borrowed<Tensor> keys, values;
    Borrowed<MaybeTensor> places;  // the row of each token in the cache: its position

    /// If cos and sin are tables instead of factors per token, positions also select the rows of
    /// these tables.
    void complete() {
      places = angles.positions;
      if (angles.cos->defined() && angles.cos->dim() == 3)
        angles.positions = Borrowed<MaybeTensor>();
    }

    template <class Self>
    static auto fields(Self& self) {
      return std::tuple_cat(QkvCall::fields(self), std::tie(self.keys, self.values));
    }
  };

  static Tensor meta(const Arguments& call) {
    check(call);
    const Tensor &qkv = call.qkv, &keys = call.keys;
    check_cache(call, "keys", keys);
    check_cache(call, "values", call.values);
    check_same_shape(kCacheName, "values", call.values, "keys", keys);
    if (call.places) {
      check_tensors(kCacheName, {{"qkv", qkv}, {"positions", *call.places}});
      check_positions(call.rotated(), call.places, "a place in the cache");
    } else {
      TORCH_CHECK(keys.sym_size(-2) >= qkv.sym_size(-2), "torchkiln.", kCacheName,
                  ": keys: got a length of ", keys.sym_size(-2), ", expected at least ",
                  qkv.sym_size(-2), ", the number of tokens");
    }
    return heads_output(call, call.heads);
  }

  static Tensor kernel(const Arguments& call) {
    const Tensor q = meta(call);
    const Tensor &keys = call.keys, &values = call.values;
    at::assert_no_overlap(keys, values);
    for (const Tensor& cache : {keys, values}) {
      at::assert_no_internal_overlap(cache);
      at::assert_no_overlap(cache, call.qkv);
    }
    if (q.numel() > 0) run_into(call, {q, keys, values}, rows_of(call.places, keys.size(-2)));
    mark_written(keys);
    mark_written(values);
    return q;
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchkiln, m) { define<QkvIntoCache>(m); }

}  // namespace torchkiln::rope_ops
