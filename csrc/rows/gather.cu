// gather as an XLA FFI handler and as a plain C call. One launch, only enqueues. Wrapper and argument meaning:
// dsv4_jax/cuda/gather.py.
#include <cuda_runtime.h>

#include <string>

#include "common/alignment.h"
#include "common/built_for.h"
#include "rows/gather_kernel.cuh"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

cudaError_t launch(const dsv4::GatherArgs& args, cudaStream_t stream) {
  constexpr int kRows = dsv4::kGatherThreads / dsv4::kLanes;  // of a block
  const int64_t blocks = (args.rows + kRows - 1) / kRows;
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  const auto kernel = args.float_out ? dsv4::gather_kernel<float> : dsv4::gather_kernel<__nv_bfloat16>;
  kernel<<<static_cast<unsigned>(blocks), dsv4::kGatherThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

using Ids = ffi::Buffer<ffi::S32, 1>;
using Codes = ffi::Buffer<ffi::U8, 2>;
using Rope = ffi::Buffer<ffi::U16, 2>;

ffi::Error gather(cudaStream_t stream, Ids ids, Codes codes, Rope rope, Codes scale, ffi::Result<ffi::AnyBuffer> out) {
  const auto results = out->dimensions();
  const int64_t rows = ids.dimensions()[0], pool_rows = codes.dimensions()[0];
  const bool floats = out->element_type() == ffi::F32;
  if (codes.dimensions()[1] != dsv4::kNope || rope.dimensions()[1] != dsv4::kRope ||
      scale.dimensions()[1] != dsv4::kScales || rope.dimensions()[0] != pool_rows ||
      scale.dimensions()[0] != pool_rows || pool_rows == 0 || results.size() != 2 || results[0] != rows ||
      results[1] != dsv4::kDim || (!floats && out->element_type() != ffi::BF16)) {
    return ffi::Error::InvalidArgument("gather: shapes or types do not agree");
  }
  const dsv4::GatherArgs args = {codes.typed_data(),  rope.typed_data(),
                                 scale.typed_data(),  ids.typed_data(),
                                 out->untyped_data(), rows,
                                 pool_rows,           floats};
  if (const std::string problem = dsv4::misaligned(
          "gather", {{"codes", args.codes}, {"rope", args.rope}, {"scale", args.scale}, {"out", args.out}});
      !problem.empty())
    return ffi::Error::InvalidArgument(problem);
  const cudaError_t error = launch(args, stream);
  if (error != cudaSuccess) return ffi::Error::Internal(std::string("gather: ") + cudaGetErrorString(error));
  return ffi::Error::Success();
}

}  // namespace

DSV4_BUILT_FOR(gather);
DSV4_ARGS_SIZE(gather, dsv4::GatherArgs)

XLA_FFI_DEFINE_HANDLER_SYMBOL(Dsv4Gather, gather,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<Ids>()
                                  .Arg<Codes>()
                                  .Arg<Rope>()
                                  .Arg<Codes>()
                                  .Ret<ffi::AnyBuffer>(),
                              {ffi::Traits::kCmdBufferCompatible});

// The launch alone, for timing without XLA. Returns a cudaError_t.
extern "C" int dsv4_gather_launch(const dsv4::GatherArgs* args, cudaStream_t stream) {
  return static_cast<int>(launch(*args, stream));
}
