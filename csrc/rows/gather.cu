// gather as an XLA FFI handler. One launch, only enqueues. Wrapper and argument meaning:
// dsv4_jax/cuda/gather.py.
#include <cuda_runtime.h>

#include "common/handler.h"
#include "rows/gather_kernel.cuh"

namespace dsv4 {
namespace {

namespace ffi = xla::ffi;

cudaError_t launch(const GatherArgs& args, cudaStream_t stream) {
  constexpr int kRows = kGatherThreads / kLanes;  // of a block
  const int64_t blocks = (args.rows + kRows - 1) / kRows;
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  const auto kernel = args.float_out ? gather_kernel<float> : gather_kernel<__nv_bfloat16>;
  kernel<<<static_cast<unsigned>(blocks), kGatherThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

using Ids = ffi::Buffer<ffi::S32, 1>;
using Codes = ffi::Buffer<ffi::U8, 2>;
using Rope = ffi::Buffer<ffi::U16, 2>;

ffi::Error gather(cudaStream_t stream, Ids ids, Codes codes, Rope rope, Codes scale, ffi::Result<ffi::AnyBuffer> out) {
  const int64_t rows = ids.element_count(), pool_rows = codes.dimensions()[0];
  const GatherArgs args = {codes.typed_data(),  rope.typed_data(),
                           scale.typed_data(),  ids.typed_data(),
                           out->untyped_data(), rows,
                           pool_rows,           out->element_type() == ffi::F32};
  if (const ffi::Error error = check("gather",
                                     {{"codes", codes, {pool_rows, kNope}},
                                      {"rope", rope, {pool_rows, kRope}},
                                      {"scale", scale, {pool_rows, kScales}},
                                      {"out", *out, {rows, kDim}, kVectors, {ffi::F32, ffi::BF16}}},
                                     {{pool_rows > 0, "the pool has no rows"}});
      error.failure())
    return error;
  return launched("gather", launch(args, stream));
}

}  // namespace

DSV4_HANDLER(gather, dsv4_gather, gather,
             on_stream().Arg<Ids>().Arg<Codes>().Arg<Rope>().Arg<Codes>().Ret<ffi::AnyBuffer>());

}  // namespace dsv4
