#include "ops/matmul/choose.h"

#include "plans.h"

namespace torchkiln::plans {
namespace {

using namespace cuda;

constexpr int64_t kResults = 4096;  // columns of the product

Launch launch_of(const Blocks& blocks) {
  Launch launch;
  launch.blocks_x = blocks.count;
  launch.threads = launch.most_threads = blocks.threads;
  launch.shared_bytes = blocks.shared_bytes;
  return launch;
}

Launch launch_of(const MatmulPlan& plan, Dtype dtype) {
  Launch launch;
  if (plan.kernel != MatmulKernel::library) launch = launch_of(plan.blocks);
  if (plan.kernel == MatmulKernel::simt)  // two tiles of each operand
    launch.shared_bytes = 4 * gemm::simt::panel_bytes(size_of(dtype) == 8 ? 8 : 4);
  launch.kernel = name_of(plan.kernel);
  launch.why = plan.why();
  return launch;
}

Launch launch_of(const std::optional<Blocks>& blocks, const char* why) {
  if (!blocks) return {"two kernels", "Too few products to hide the gate, or no tiles for sm90."};
  Launch launch = launch_of(*blocks);
  launch.kernel = "sm90";
  launch.why = why;
  return launch;
}

/// A product [rows, columns] x [columns, results]. `transposed`: the columns of the second operand
/// are contiguous, as in the weight of a layer.
Matmul product(const Call& call, int64_t results, bool transposed) {
  Matmul p{};
  p.a = {address(), call.columns, 1, 0};
  p.b = {address(), transposed ? 1 : results, transposed ? call.columns : 1, 0};
  p.out = address();
  p.dtype = p.bias_dtype = call.dtype;
  p.activation = kActivation<None>;
  p.scale = 1;
  p.batch = 1;
  p.m = call.rows;
  p.n = results;
  p.k = call.columns;
  return p;
}

void write_products(const Gpu& gpu, int64_t rows, int64_t columns) {
  struct Epilogue {
    const char* name;
    Activation activation;
    bool has_residual;
  };
  constexpr Epilogue kEpilogues[] = {{"no epilogue", kActivation<None>, false},
                                     {"a residual", kActivation<None>, true},
                                     {"relu", kActivation<Relu>, false},
                                     {"gelu", kActivation<Gelu>, false}};
  for (const Call& call : calls(rows, columns)) {
    if (call.alignment == Alignment::scalar && size_of(call.dtype) != 8) continue;
    for (const bool has_library : {true, false}) {
      for (const Epilogue& epilogue : kEpilogues) {
        Matmul p = product(call, kResults, /*transposed=*/true);
        p.activation = epilogue.activation;
        p.residual = epilogue.has_residual ? address() : nullptr;
        write(gpu, call, has_library ? "product beside cuBLAS" : "product without cuBLAS",
              epilogue.name, launch_of(cuda::choose(p, has_library, gpu.device), call.dtype));
      }
    }
    Matmul gated = product(call, 2 * kResults, /*transposed=*/true);
    gated.activation = kActivation<Silu>;
    write(gpu, call, "product and gate", "gated_mlp",
          launch_of(choose_gate(gated, gpu.device), "Gate and up of a column are in one tile."));
    GateGradient gradient{product(call, kResults, /*transposed=*/false), address(), address()};
    gradient.product.activation = kActivation<Silu>;
    write(gpu, call, "gradient through a gate", "gated_mlp",
          launch_of(choose_gate(gradient, gpu.device),
                    "The gradient of the gate's output is not written."));
  }
}

const Family kMatmul(write_products);

}  // namespace
}  // namespace torchkiln::plans
