// Queries of a long chunk as an XLA FFI handler. One launch, only enqueued: fit for a command
// buffer. Wrapper and argument meaning: dsv4_jax/cuda/query_product.py.
#include <cuda_runtime.h>

#include <algorithm>
#include "attend/query_product_kernel.cuh"
#include "common/device.h"
#include "common/handler.h"
#include "common/tensor_map.h"

namespace dsv4 {
namespace {

namespace ffi = xla::ffi;

// `width`: of a head, 512 or 128.
cudaError_t launch(const QueryProductArgs& args, int width, cudaStream_t stream) {
  constexpr int kRows = kProductRows, kCluster = kProductCluster;
  const int64_t all_columns = static_cast<int64_t>(args.heads) * width;
  CUtensorMap x, weights, out;
  cudaError_t error = map_matrices(args.x, 2, 1, args.tokens, args.columns, kRows / kCluster, &x);
  if (error == cudaSuccess)
    error = map_matrices(args.weights, 2, 1, all_columns, args.columns, kProductColumns, &weights);
  if (error == cudaSuccess) error = map_matrices(args.out, 2, 1, args.tokens, all_columns, kWarpRows, &out);
  if (error != cudaSuccess) return error;
  const int of_tokens = (args.tokens + kRows - 1) / kRows;
  const ProductTiles all = {of_tokens, static_cast<int>(of_tokens * (all_columns / kDim))};
  const int clusters = std::min(multiprocessors() / kCluster, all.tiles);
  const Launch how = {dim3(clusters * kCluster), kProductThreads, sizeof(ProductShared), kCluster};
  if (width == kDim) {
    return start(query_product_kernel<kDim>, how, follows, stream, args, x, weights, out, all);
  }
  return start(query_product_kernel<kIndexDim>, how, follows, stream, args, x, weights, out, all);
}

using Matrix = ffi::Buffer<ffi::BF16, 2>;
using Angles = ffi::Buffer<ffi::F32, 2>;
using Queries = ffi::Buffer<ffi::BF16, 3>;

ffi::Error query_product(cudaStream_t stream, Matrix x, Matrix weights, Angles cosine, Angles sine,
                         ffi::Result<Queries> out, float eps, bool hadamard, bool round_fp4) {
  const auto q = out->dimensions();
  const int64_t columns = x.dimensions()[1];
  if (const ffi::Error error = check(
          "query_product",
          {{"x", x, {q[0], columns}},
           {"weights", weights, {q[1] * q[2], columns}},
           {"cosine", cosine, {q[0], kRopePairs}, kElements},
           {"sine", sine, {q[0], kRopePairs}, kElements},
           {"out", *out, {kAny, kAny, kAny}}},
          {{(q[2] == kDim || q[2] == kIndexDim) && q[1] * q[2] % kDim == 0, "heads of 512 dims, or of 128 by fours"},
           // Longer than the ring: a block could else be a tile ahead of the other, whose sums it has not read yet.
           {columns % kBlockColumns == 0 && columns >= kLeastColumns, "columns not in 64s, or few"},
           {q[0] <= INT32_MAX && q[1] <= INT32_MAX && q[0] * q[1] <= INT32_MAX, "2^31 rows or more"}});
      error.failure())
    return error;
  if (q[0] == 0 || q[1] == 0) return ffi::Error::Success();
  QueryProductArgs args = {};
  args.x = reinterpret_cast<const __nv_bfloat16*>(x.untyped_data());
  args.weights = reinterpret_cast<const __nv_bfloat16*>(weights.untyped_data());
  args.cosine = cosine.typed_data();
  args.sine = sine.typed_data();
  args.out = reinterpret_cast<__nv_bfloat16*>(out->untyped_data());
  args.tokens = static_cast<int>(q[0]);
  args.heads = static_cast<int>(q[1]);
  args.columns = static_cast<int>(columns);
  args.eps = eps;
  args.hadamard = hadamard;
  args.round_fp4 = round_fp4;
  return launched("query_product", launch(args, static_cast<int>(q[2]), stream));
}

}  // namespace

DSV4_HANDLER(query_product, dsv4_query_product, query_product,
             on_stream()
                 .Arg<Matrix>()
                 .Arg<Matrix>()
                 .Arg<Angles>()
                 .Arg<Angles>()
                 .Ret<Queries>()
                 .Attr<float>("eps")
                 .Attr<bool>("hadamard")
                 .Attr<bool>("round_fp4"));

}  // namespace dsv4
