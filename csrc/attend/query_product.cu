// Queries of a long chunk as an XLA FFI handler and as a plain C call. One launch, only enqueued: fit for a command
// buffer. Wrapper and argument meaning: dsv4_jax/cuda/query_product.py.
#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "attend/query_product_kernel.cuh"
#include "common/alignment.h"
#include "common/built_for.h"
#include "common/device.h"
#include "common/tensor_map.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

// `width`: of a head, 512 or 128.
cudaError_t launch(const dsv4::QueryProductArgs& args, int width, cudaStream_t stream) {
  if (args.tokens == 0 || args.heads == 0) return cudaSuccess;
  // Longer than the ring: a block could else be a tile ahead of the other, whose sums it has not read yet.
  if (args.columns % dsv4::kBlockColumns != 0 || args.columns < dsv4::kLeastColumns) return cudaErrorInvalidValue;
  constexpr int kRows = dsv4::kProductRows, kCluster = dsv4::kProductCluster;
  const int64_t all_columns = static_cast<int64_t>(args.heads) * width;
  if (all_columns % dsv4::kDim != 0) return cudaErrorInvalidValue;
  CUtensorMap x, weights, out;
  cudaError_t error = dsv4::map_matrices(args.x, 2, 1, args.tokens, args.columns, kRows / kCluster, &x);
  if (error == cudaSuccess)
    error = dsv4::map_matrices(args.weights, 2, 1, all_columns, args.columns, dsv4::kProductColumns, &weights);
  if (error == cudaSuccess) error = dsv4::map_matrices(args.out, 2, 1, args.tokens, all_columns, dsv4::kWarpRows, &out);
  if (error != cudaSuccess) return error;
  const int of_tokens = (args.tokens + kRows - 1) / kRows;
  const dsv4::ProductTiles all = {of_tokens, static_cast<int>(of_tokens * (all_columns / dsv4::kDim))};
  const int clusters = std::min(dsv4::multiprocessors() / kCluster, all.tiles);
  const dsv4::Launch how = {dim3(clusters * kCluster), dsv4::kProductThreads, sizeof(dsv4::ProductShared), kCluster};
  if (width == dsv4::kDim) {
    return dsv4::start(dsv4::query_product_kernel<dsv4::kDim>, how, dsv4::follows, stream, args, x, weights, out, all);
  }
  return dsv4::start(dsv4::query_product_kernel<dsv4::kIndexDim>, how, dsv4::follows, stream, args, x, weights, out,
                     all);
}

using Matrix = ffi::Buffer<ffi::BF16, 2>;
using Angles = ffi::Buffer<ffi::F32, 2>;
using Out = ffi::Buffer<ffi::BF16, 3>;

ffi::Error query_product(cudaStream_t stream, Matrix x, Matrix weights, Angles cosine, Angles sine,
                         ffi::Result<Out> out, float eps, bool hadamard, bool round_fp4) {
  const auto wrong = [](const char* what) {
    return ffi::Error::InvalidArgument(std::string("query_product: ") + what);
  };
  const auto rows = x.dimensions(), matrix = weights.dimensions(), q = out->dimensions();
  for (const auto& angles : {cosine, sine}) {
    if (angles.dimensions()[0] != q[0] || angles.dimensions()[1] != dsv4::kRopePairs) {
      return wrong("cosine and sine must be [tokens, 32]");
    }
  }
  if ((q[2] != dsv4::kDim && q[2] != dsv4::kIndexDim) || q[1] * q[2] % dsv4::kDim != 0) {
    return wrong("it takes heads of 512 dims, or of 128 by fours");
  }
  if (rows[0] != q[0] || matrix[0] != q[1] * q[2] || matrix[1] != rows[1]) {
    return wrong("shapes of x, weights and queries disagree");
  }
  if (rows[1] % dsv4::kBlockColumns != 0 || rows[1] < dsv4::kLeastColumns) return wrong("columns not in 64s, or few");
  if (q[0] > INT32_MAX || q[1] > INT32_MAX || q[0] * q[1] > INT32_MAX) return wrong("2^31 rows or more");
  dsv4::QueryProductArgs args = {};
  args.x = reinterpret_cast<const __nv_bfloat16*>(x.untyped_data());
  args.weights = reinterpret_cast<const __nv_bfloat16*>(weights.untyped_data());
  args.cosine = cosine.typed_data();
  args.sine = sine.typed_data();
  args.out = reinterpret_cast<__nv_bfloat16*>(out->untyped_data());
  args.tokens = static_cast<int>(q[0]);
  args.heads = static_cast<int>(q[1]);
  args.columns = static_cast<int>(rows[1]);
  args.eps = eps;
  args.hadamard = hadamard;
  args.round_fp4 = round_fp4;
  if (const std::string problem =
          dsv4::misaligned("query_product", {{"x", args.x}, {"weights", args.weights}, {"out", args.out}});
      !problem.empty())
    return ffi::Error::InvalidArgument(problem);
  const cudaError_t error = launch(args, static_cast<int>(q[2]), stream);
  if (error != cudaSuccess) return ffi::Error::Internal(std::string("query_product: ") + cudaGetErrorString(error));
  return ffi::Error::Success();
}

}  // namespace

DSV4_BUILT_FOR(query_product);
DSV4_ARGS_SIZE(query_product, dsv4::QueryProductArgs)

XLA_FFI_DEFINE_HANDLER_SYMBOL(Dsv4QueryProduct, query_product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<Matrix>()
                                  .Arg<Matrix>()
                                  .Arg<Angles>()
                                  .Arg<Angles>()
                                  .Ret<Out>()
                                  .Attr<float>("eps")
                                  .Attr<bool>("hadamard")
                                  .Attr<bool>("round_fp4"),
                              {ffi::Traits::kCmdBufferCompatible});

// The launch alone, for timing without XLA. Returns a cudaError_t.
extern "C" int dsv4_query_product_launch(const dsv4::QueryProductArgs* args, int width, cudaStream_t stream) {
  return static_cast<int>(launch(*args, width, stream));
}
