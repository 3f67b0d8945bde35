// The last steps of queries as an XLA FFI handler. One launch, only enqueues: fit for a command buffer.
// Wrapper, argument meaning and fallbacks: dsv4_jax/cuda/queries.py.
#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "attend/queries_kernel.cuh"
#include "common/alignment.h"
#include "common/built_for.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

using Queries = ffi::Buffer<ffi::F32, 2>;
using Angles = ffi::Buffer<ffi::F32, 2>;
using Out = ffi::Buffer<ffi::BF16, 3>;

constexpr int kManyRows = 1 << 14;  // from which on a warp takes several short ones

template <int kWidth, int kRows>
cudaError_t launch_with(const dsv4::QueryArgs& args, cudaStream_t stream) {
  constexpr unsigned kEach = dsv4::kQueryWarps * kRows;
  const unsigned blocks = (static_cast<unsigned>(args.rows) + kEach - 1) / kEach;
  return dsv4::start(dsv4::query_kernel<kWidth, kRows>, {dim3(blocks), dsv4::kQueryThreads}, dsv4::follows, stream,
                     args);
}

cudaError_t launch(const dsv4::QueryArgs& args, int width, cudaStream_t stream) {
  if (width == dsv4::kDim) return launch_with<dsv4::kDim, 1>(args, stream);
  const bool many = args.rows >= kManyRows && args.heads % dsv4::kQueryRows == 0;
  return many ? launch_with<dsv4::kIndexDim, dsv4::kQueryRows>(args, stream)
              : launch_with<dsv4::kIndexDim, 1>(args, stream);
}

ffi::Error finish_queries(cudaStream_t stream, Queries queries, Angles cosine, Angles sine, ffi::Result<Out> out,
                          int32_t start, float eps, bool hadamard, bool round_fp4) {
  const auto matrix = queries.dimensions(), q = out->dimensions();
  for (const auto& angles : {cosine, sine}) {
    if (angles.dimensions()[0] != q[0] || angles.dimensions()[1] != dsv4::kRopePairs) {
      return ffi::Error::InvalidArgument("finish_queries: cosine and sine must be [tokens, 32]");
    }
  }
  if (q[2] != dsv4::kDim && q[2] != dsv4::kIndexDim)
    return ffi::Error::InvalidArgument("finish_queries: rows must have 512 or 128 dims");
  if (matrix[0] != q[0] || start < 0 || start + q[1] * q[2] > matrix[1] || start % 4 != 0 || matrix[1] % 4 != 0) {
    return ffi::Error::InvalidArgument("finish_queries: not as many columns as heads, or not in steps of 16 bytes");
  }
  if (q[0] * q[1] > INT32_MAX) return ffi::Error::InvalidArgument("finish_queries: more than 2^31 rows");
  dsv4::QueryArgs args = {};
  args.queries = queries.typed_data() + start;
  args.stride = static_cast<int>(matrix[1]);
  args.cosine = cosine.typed_data();
  args.sine = sine.typed_data();
  args.out = reinterpret_cast<__nv_bfloat16*>(out->untyped_data());
  args.rows = static_cast<int>(q[0] * q[1]);
  args.heads = static_cast<int>(q[1]);
  args.eps = eps;
  args.hadamard = hadamard;
  args.round_fp4 = round_fp4;
  if (args.rows == 0) return ffi::Error::Success();
  if (const std::string problem = dsv4::misaligned(
          "finish_queries",
          {{"queries", args.queries}, {"cosine", args.cosine}, {"sine", args.sine}, {"out", args.out}});
      !problem.empty())
    return ffi::Error::InvalidArgument(problem);
  const cudaError_t error = launch(args, static_cast<int>(q[2]), stream);
  if (error != cudaSuccess) return ffi::Error::Internal(std::string("finish_queries: ") + cudaGetErrorString(error));
  return ffi::Error::Success();
}

}  // namespace

DSV4_BUILT_FOR(queries);
DSV4_ARGS_SIZE(queries, dsv4::QueryArgs)

XLA_FFI_DEFINE_HANDLER_SYMBOL(Dsv4FinishQueries, finish_queries,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<Queries>()
                                  .Arg<Angles>()
                                  .Arg<Angles>()
                                  .Ret<Out>()
                                  .Attr<int32_t>("start")
                                  .Attr<float>("eps")
                                  .Attr<bool>("hadamard")
                                  .Attr<bool>("round_fp4"),
                              {ffi::Traits::kCmdBufferCompatible});

// The launch alone, for timing without XLA. Returns a cudaError_t.
extern "C" int dsv4_queries_launch(const dsv4::QueryArgs* args, int width, cudaStream_t stream) {
  return static_cast<int>(launch(*args, width, stream));
}
