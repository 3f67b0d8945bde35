// The last steps of queries as an XLA FFI handler. One launch, only enqueues: fit for a command buffer.
// Wrapper, argument meaning and fallbacks: dsv4_jax/cuda/queries.py.
#include <cuda_runtime.h>

#include <cstdint>
#include "attend/queries_kernel.cuh"
#include "common/handler.h"

namespace dsv4 {
namespace {

namespace ffi = xla::ffi;

using Angles = ffi::Buffer<ffi::F32, 2>;
using Queries = ffi::Buffer<ffi::BF16, 3>;

constexpr int kManyRows = 1 << 14;  // from which on a warp takes several short ones

template <int kWidth, int kRows, typename Projected>
cudaError_t launch_with(const QueryArgs& args, cudaStream_t stream) {
  constexpr unsigned kEach = kQueryWarps * kRows;
  const unsigned blocks = (static_cast<unsigned>(args.rows) + kEach - 1) / kEach;
  return start(query_kernel<kWidth, kRows, Projected>, {dim3(blocks), kQueryThreads}, follows, stream, args);
}

template <typename Projected>
cudaError_t launch(const QueryArgs& args, int width, cudaStream_t stream) {
  if (width == kDim) return launch_with<kDim, 1, Projected>(args, stream);
  const bool many = args.rows >= kManyRows && args.heads % kQueryRows == 0;
  return many ? launch_with<kIndexDim, kQueryRows, Projected>(args, stream)
              : launch_with<kIndexDim, 1, Projected>(args, stream);
}

ffi::Error finish_queries(cudaStream_t stream, ffi::AnyBuffer matrix, Angles cosine, Angles sine,
                          ffi::Result<Queries> out, int32_t start, float eps, bool hadamard, bool round_fp4) {
  const auto q = out->dimensions();
  const int64_t columns = matrix.dimensions().size() == 2 ? matrix.dimensions()[1] : 0;
  const bool rounded = matrix.element_type() == ffi::BF16;
  const int step = rounded ? 8 : 4;  // columns of 16 bytes
  if (const ffi::Error error =
          check("finish_queries",
                {{"queries", matrix, {q[0], kAny}, kVectors, {ffi::F32, ffi::BF16}},
                 {"cosine", cosine, {q[0], kRopePairs}},
                 {"sine", sine, {q[0], kRopePairs}},
                 {"out", *out, {kAny, kAny, kAny}}},
                {{q[2] == kDim || q[2] == kIndexDim, "rows must have 512 or 128 dims"},
                 {start >= 0 && start + q[1] * q[2] <= columns && start % step == 0 && columns % step == 0,
                  "queries has not as many columns as heads, in steps of 16 bytes"},
                 {q[0] * q[1] <= INT32_MAX, "2^31 rows or more"}});
      error.failure())
    return error;
  QueryArgs args = {};
  args.queries = matrix.untyped_data();
  args.start = start;
  args.stride = static_cast<int>(columns);
  args.cosine = cosine.typed_data();
  args.sine = sine.typed_data();
  args.out = reinterpret_cast<__nv_bfloat16*>(out->untyped_data());
  args.rows = static_cast<int>(q[0] * q[1]);
  args.heads = static_cast<int>(q[1]);
  args.eps = eps;
  args.hadamard = hadamard;
  args.round_fp4 = round_fp4;
  if (args.rows == 0) return ffi::Error::Success();
  const int width = static_cast<int>(q[2]);
  return launched("finish_queries",
                  rounded ? launch<__nv_bfloat16>(args, width, stream) : launch<float>(args, width, stream));
}

}  // namespace

DSV4_HANDLER(queries, dsv4_finish_queries, finish_queries,
             on_stream()
                 .Arg<ffi::AnyBuffer>()
                 .Arg<Angles>()
                 .Arg<Angles>()
                 .Ret<Queries>()
                 .Attr<int32_t>("start")
                 .Attr<float>("eps")
                 .Attr<bool>("hadamard")
                 .Attr<bool>("round_fp4"));

}  // namespace dsv4
