// append as an XLA FFI handler: finish, quantise and store fp8 KV rows, one launch, in place. Only enqueues: fit for a
// command buffer. Wrapper, argument meaning and fallbacks: dsv4_jax/cuda/append.py.
#include <cuda_runtime.h>

#include <string>

#include "built_for.h"
#include "emit_row.cuh"
#include "operands.h"

namespace dsv4 {

struct AppendArgs {
  const float* values;     // [T, 512], rows `stride` apart
  const int32_t* row_ids;  // [T]; null: row t
  FinishArgs finish;
  RowPool pool;
  int stride;
};

}  // namespace dsv4

namespace {

namespace ffi = xla::ffi;
using dsv4::AppendArgs;

constexpr int kThreads = 128;

// One block a row, raw or finished.
template <bool kRaw>
__global__ void __launch_bounds__(kThreads) append_kernel(const __grid_constant__ AppendArgs args) {
  const int token = blockIdx.x, thread = threadIdx.x;
  // All loads at once, and no way out for a row that is not stored: so that none waits for another. No constant ones: see
  // `load_finish`.
  const dsv4::Float4 v = dsv4::load4(args.values + static_cast<int64_t>(token) * args.stride + 4 * thread);
  const int row = args.row_ids == nullptr ? token : args.row_ids[token];
  if constexpr (kRaw) {
    __shared__ alignas(16) float shared[512];
    const dsv4::Finish finish = dsv4::load_finish<512>(args.finish, token, thread);
    dsv4::emit_row<512>(args.finish, finish, args.pool, v, row, shared, thread);
  } else {
    dsv4::store_row<512>(args.pool, v, row, thread);
  }
}

cudaError_t launch(const AppendArgs& args, int64_t tokens, bool raw, cudaStream_t stream) {
  if (tokens == 0) return cudaSuccess;
  const auto kernel = raw ? append_kernel<true> : append_kernel<false>;
  kernel<<<static_cast<unsigned>(tokens), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

ffi::Error append(cudaStream_t stream, ffi::RemainingArgs arguments, ffi::RemainingRets results, int32_t start,
                  float eps, bool finish, bool scatter) {
  dsv4::Operands operands(arguments);
  AppendArgs args = {};
  args.values = operands.columns(start, 512, &args.stride);
  const int64_t tokens = operands.rows();
  if (finish) {
    args.finish.norm = operands.next<float>(ffi::F32, 512);
    args.finish.cosine = operands.next<float>(ffi::F32, 32, tokens);
    args.finish.sine = operands.next<float>(ffi::F32, 32, tokens);
    args.finish.eps = eps;
  }
  if (scatter) {
    args.row_ids = operands.ids(tokens);
    args.pool = dsv4::read_pool(operands, static_cast<int>(dsv4::Format::kFp8));
  } else {
    auto nope = results.get<ffi::AnyBuffer>(0), rope = results.get<ffi::AnyBuffer>(1), scale = results.get<ffi::AnyBuffer>(2);
    if (!nope.has_value() || !rope.has_value() || !scale.has_value()) return ffi::Error::InvalidArgument("append: needs three results");
    const auto bytes = [](auto& result) { return static_cast<int64_t>((*result)->size_bytes()); };
    if (bytes(nope) != 448 * tokens || bytes(rope) != 128 * tokens || bytes(scale) != 8 * tokens) {
      return ffi::Error::InvalidArgument("append: the results must be fp8 rows of 448 + 64 dims, as many as values");
    }
    args.pool.codes = static_cast<uint8_t*>((*nope)->untyped_data());
    args.pool.rope = static_cast<uint16_t*>((*rope)->untyped_data());
    args.pool.scale = (*scale)->untyped_data();
    args.pool.rows = tokens;
  }
  if (!operands.good()) return ffi::Error::InvalidArgument("append: " + operands.problem());
  const cudaError_t error = launch(args, tokens, finish, stream);
  if (error != cudaSuccess) return ffi::Error::Internal(std::string("append: ") + cudaGetErrorString(error));
  return ffi::Error::Success();
}

}  // namespace

DSV4_BUILT_FOR(append);

XLA_FFI_DEFINE_HANDLER_SYMBOL(Dsv4Append, append,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int32_t>("start")
                                  .Attr<float>("eps")
                                  .Attr<bool>("finish")
                                  .Attr<bool>("scatter"),
                              {ffi::Traits::kCmdBufferCompatible});

// The launch alone, for timing without XLA. Returns a cudaError_t.
extern "C" int dsv4_append_launch(const dsv4::AppendArgs* args, int tokens, int raw, cudaStream_t stream) {
  return static_cast<int>(launch(*args, tokens, raw != 0, stream));
}
