// append as an XLA FFI handler: epilogue, quantisation and store of fp8 KV rows, one launch, in place. Only enqueues:
// fit for a command buffer. Wrapper, argument meaning and fallbacks: dsv4_jax/cuda/append.py.
#include <cuda_runtime.h>

#include <string>

#include "common/built_for.h"
#include "common/operands.h"
#include "rows/emit.cuh"

namespace dsv4 {

struct AppendArgs {
  const float* values;     // [T, 512], rows `stride` apart
  const int32_t* row_ids;  // [T]; null: row t
  EpilogueArgs epilogue;
  RowPool pool;
  int stride;
};

}  // namespace dsv4

namespace {

namespace ffi = xla::ffi;
using dsv4::AppendArgs;

constexpr int kThreads = dsv4::kDim / dsv4::kOwn;

// One block a row, four channels a thread: its four warps sum the norm together and share nothing else. Without the
// epilogue the row is stored as it is.
template <bool kEpilogue>
__global__ void __launch_bounds__(kThreads) append_kernel(const __grid_constant__ AppendArgs args) {
  const int token = blockIdx.x, thread = threadIdx.x;
  // All loads at once, and no way out for a row that is not stored: so that none waits for another. No constant ones:
  // see `load_epilogue`.
  const dsv4::Float4 v = dsv4::load4(args.values + static_cast<int64_t>(token) * args.stride + dsv4::kOwn * thread);
  const int row = args.row_ids == nullptr ? token : args.row_ids[token];
  if constexpr (kEpilogue) {
    __shared__ alignas(16) float shared[dsv4::kDim];
    const dsv4::Epilogue epilogue = dsv4::load_epilogue<dsv4::kDim>(args.epilogue, token, thread);
    dsv4::emit_row<dsv4::kDim>(args.epilogue, epilogue, args.pool, v, row, shared, thread);
  } else {
    dsv4::store_row<dsv4::kDim>(args.pool, v, row, thread);
  }
}

cudaError_t launch(const AppendArgs& args, int64_t tokens, bool epilogue, cudaStream_t stream) {
  if (tokens == 0) return cudaSuccess;
  const auto kernel = epilogue ? append_kernel<true> : append_kernel<false>;
  kernel<<<static_cast<unsigned>(tokens), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

ffi::Error append(cudaStream_t stream, ffi::RemainingArgs arguments, ffi::RemainingRets results, int32_t start,
                  float eps, bool epilogue, bool scatter) {
  dsv4::Operands operands(arguments);
  AppendArgs args = {};
  args.values = operands.columns(start, dsv4::kDim, &args.stride);
  const int64_t tokens = operands.rows();
  if (epilogue) {
    dsv4::read_epilogue(operands, args.epilogue, dsv4::kDim, tokens);
    args.epilogue.eps = eps;
  }
  if (scatter) {
    args.row_ids = operands.ids(tokens);
    args.pool = dsv4::read_pool(operands, static_cast<int>(dsv4::Format::kFp8));
  } else {
    auto nope = results.get<ffi::AnyBuffer>(0), rope = results.get<ffi::AnyBuffer>(1),
         scale = results.get<ffi::AnyBuffer>(2);
    if (!nope.has_value() || !rope.has_value() || !scale.has_value()) {
      return ffi::Error::InvalidArgument("append: needs three results");
    }
    const auto bytes = [](auto& result) { return static_cast<int64_t>((*result)->size_bytes()); };
    if (bytes(nope) != dsv4::kNope * tokens || bytes(rope) != 2 * dsv4::kRope * tokens ||
        bytes(scale) != dsv4::kScales * tokens) {
      return ffi::Error::InvalidArgument("append: the results must be fp8 rows of 448 + 64 dims, as many as values");
    }
    args.pool.codes = static_cast<uint8_t*>((*nope)->untyped_data());
    args.pool.rope = static_cast<uint16_t*>((*rope)->untyped_data());
    args.pool.scale = (*scale)->untyped_data();
    args.pool.rows = tokens;
  }
  if (!operands.good()) return ffi::Error::InvalidArgument("append: " + operands.problem());
  const cudaError_t error = launch(args, tokens, epilogue, stream);
  if (error != cudaSuccess) return ffi::Error::Internal(std::string("append: ") + cudaGetErrorString(error));
  return ffi::Error::Success();
}

}  // namespace

DSV4_BUILT_FOR(append);
DSV4_ARGS_SIZE(append, dsv4::AppendArgs)

XLA_FFI_DEFINE_HANDLER_SYMBOL(Dsv4Append, append,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int32_t>("start")
                                  .Attr<float>("eps")
                                  .Attr<bool>("epilogue")
                                  .Attr<bool>("scatter"),
                              {ffi::Traits::kCmdBufferCompatible});

// The launch alone, for timing without XLA. Returns a cudaError_t.
extern "C" int dsv4_append_launch(const dsv4::AppendArgs* args, int tokens, int epilogue, cudaStream_t stream) {
  return static_cast<int>(launch(*args, tokens, epilogue != 0, stream));
}
