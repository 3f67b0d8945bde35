// append as an XLA FFI handler: epilogue, quantisation and store of fp8 KV rows, one launch, in place. Only enqueues:
// fit for a command buffer. Wrapper, argument meaning and fallbacks: dsv4_jax/cuda/append.py.
#include <cuda_runtime.h>

#include "rows/operands.h"

namespace dsv4 {

struct AppendArgs {
  const void* values;      // [T, 512] float32 or bf16, rows `stride` apart
  const int32_t* row_ids;  // [T]; null: row t
  EpilogueArgs epilogue;
  RowPool pool;
  int stride;
  bool bf16;
};

namespace {

namespace ffi = xla::ffi;

constexpr int kThreads = kDim / kOwn;

// One block a row, four channels a thread: its four warps sum the norm together and share nothing else. Without the
// epilogue the row is stored as it is.
template <bool kEpilogue>
__global__ void __launch_bounds__(kThreads) append_kernel(const __grid_constant__ AppendArgs args) {
  const int token = blockIdx.x, thread = threadIdx.x;
  // All loads at once, and no way out for a row that is not stored: so that none waits for another. No constant ones:
  // see `load_epilogue`.
  const int64_t own = static_cast<int64_t>(token) * args.stride + kOwn * thread;
  const Float4 v = args.bf16 ? load4(static_cast<const __nv_bfloat16*>(args.values) + own)
                             : load4(static_cast<const float*>(args.values) + own);
  const int row = args.row_ids == nullptr ? token : args.row_ids[token];
  if constexpr (kEpilogue) {
    __shared__ alignas(16) float shared[kDim];
    const Epilogue epilogue = load_epilogue<kDim>(args.epilogue, token, thread);
    emit_row<kDim>(args.epilogue, epilogue, args.pool, v, row, shared, thread);
  } else {
    store_row<kDim>(args.pool, v, row, thread);
  }
}

cudaError_t launch(const AppendArgs& args, int64_t tokens, bool epilogue, cudaStream_t stream) {
  if (tokens == 0) return cudaSuccess;
  const auto kernel = epilogue ? append_kernel<true> : append_kernel<false>;
  kernel<<<static_cast<unsigned>(tokens), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

ffi::Error append(cudaStream_t stream, ffi::RemainingArgs arguments, ffi::RemainingRets returned, int32_t start,
                  float eps, bool epilogue, bool scatter) {
  Operands operands(arguments);
  AppendArgs args = {};
  args.values = operands.columns(start, kDim, &args.stride, &args.bf16);
  const int64_t tokens = operands.rows();
  if (epilogue) {
    read_epilogue(operands, args.epilogue, kDim, tokens);
    args.epilogue.eps = eps;
  }
  if (scatter) {
    args.row_ids = operands.ids(tokens);
    args.pool = read_pool(operands, static_cast<int>(Format::kFp8));
  } else {
    Results results(returned);
    args.pool.codes = results.next<uint8_t>(ffi::U8, kNope, tokens);
    args.pool.rope = results.next<uint16_t>(ffi::U16, kRope, tokens);
    args.pool.scale = results.next<uint8_t>(ffi::U8, kScales, tokens);
    args.pool.rows = tokens;
    if (!results.good()) return refusal("append", results.problem());
  }
  if (!operands.good()) return refusal("append", operands.problem());
  return launched("append", launch(args, tokens, epilogue, stream));
}

}  // namespace

DSV4_HANDLER(append, dsv4_append, append,
             on_stream()
                 .RemainingArgs()
                 .RemainingRets()
                 .Attr<int32_t>("start")
                 .Attr<float>("eps")
                 .Attr<bool>("epilogue")
                 .Attr<bool>("scatter"));

}  // namespace dsv4
