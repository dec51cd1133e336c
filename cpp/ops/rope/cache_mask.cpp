// The attention mask for tokens that are decoded with a cache: 0 for keys at or before the token's
// position, -infinity for later ones.

#include "rope/angles.h"
#include "torchkiln/torch/launch.h"

namespace torchkiln::rope_ops {
namespace {

struct CacheMaskOp {
  static constexpr const char* kSchema =
      "torchkiln::_cache_mask(Tensor positions, int length, ScalarType dtype) -> Tensor";
  static constexpr const char* kName = "cache_mask";

  static Tensor meta(const Tensor& positions, int64_t length, at::ScalarType dtype) {
    check_tensors(kName, {{"positions", positions}});
    check_positions_dtype(kName, positions);
    TORCH_CHECK(positions.dim() == 1 || positions.dim() == 2, "torchkiln.", kName,
                ": positions: got shape ", positions.sym_sizes(),
                ", expected [tokens] or [batch, tokens]");
    TORCH_CHECK_VALUE(length >= 0, "torchkiln.", kName, ": length: got ", length,
                      ", expected a number of at least 0");
    TORCH_CHECK(at::isFloatingType(dtype) && c10::elementSize(dtype) > 1, "torchkiln.", kName,
                ": dtype: got ", dtype_name(dtype),
                ", expected float32, float64, float16 or bfloat16");
    c10::SymDimVector sizes(positions.sym_sizes());
    if (sizes.size() == 2) sizes.insert(sizes.begin() + 1, SymInt(1));  // one mask for all heads
    sizes.emplace_back(length);
    return positions.new_empty_symint(sizes, dtype);
  }

  static Tensor kernel(const Tensor& positions, int64_t length, at::ScalarType dtype) {
    const Tensor out = meta(positions, length, dtype);
    if (out.numel() == 0) return out;
    CacheMask arguments{};
    arguments.out = out.data_ptr();
    arguments.dtype = dtype_of(out);
    arguments.places = rows_of(positions, std::numeric_limits<int64_t>::max());
    arguments.batch = positions.dim() == 2 ? positions.size(0) : 1;
    arguments.tokens = positions.size(-1);
    arguments.length = length;
    launch(
        kName, out, arguments.batch * arguments.tokens, 1,
        [&](auto stream) { return cuda::cache_mask(arguments, stream); },
        [&](int64_t begin, int64_t end) { return cpu::cache_mask(arguments, begin, end); });
    return out;
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchkiln, m) { define<CacheMaskOp>(m); }

}  // namespace torchkiln::rope_ops
