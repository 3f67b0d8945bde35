// The clamped SwiGLU of rows as an XLA FFI handler: one launch, only enqueues. Wrapper and arguments:
// dsv4_jax/cuda/swiglu.py.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "common/handler.h"
#include "common/overlap.cuh"

namespace dsv4 {

constexpr int kSwigluThreads = 128, kSwigluOwn = 4;  // columns of a thread, one load of gates and one of ups

struct SwigluArgs {
  const float* gate;   // [rows, width], rows `gate_stride` apart
  const float* up;     // [rows, width], rows `up_stride` apart
  __nv_bfloat16* out;  // [rows, width]
  int width, gate_stride, up_stride;
  float limit;
};

// silu(gate) * up, the gate clamped above and up on both sides; NaN stays.
__device__ __forceinline__ float clamped_swiglu(float gate, float up, float limit) {
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up < -limit ? -limit : up;
  return __fdividef(gate, 1.f + __expf(-gate)) * up;
}

__global__ void __launch_bounds__(kSwigluThreads) swiglu_kernel(const __grid_constant__ SwigluArgs args) {
  let_next_start();
  wait_for_previous();
  const int column = (blockIdx.y * kSwigluThreads + threadIdx.x) * kSwigluOwn;
  if (column >= args.width) return;
  const size_t row = blockIdx.x;
  const auto gate = *reinterpret_cast<const float4*>(args.gate + row * args.gate_stride + column);
  const auto up = *reinterpret_cast<const float4*>(args.up + row * args.up_stride + column);
  const __nv_bfloat162 low = __floats2bfloat162_rn(clamped_swiglu(gate.x, up.x, args.limit),
                                                   clamped_swiglu(gate.y, up.y, args.limit)),
                       high = __floats2bfloat162_rn(clamped_swiglu(gate.z, up.z, args.limit),
                                                    clamped_swiglu(gate.w, up.w, args.limit));
  *reinterpret_cast<uint2*>(args.out + row * args.width + column) = {reinterpret_cast<const uint32_t&>(low),
                                                                     reinterpret_cast<const uint32_t&>(high)};
}

namespace {

namespace ffi = xla::ffi;

using Matrix = ffi::Buffer<ffi::F32, 2>;
using Rounded = ffi::Buffer<ffi::BF16, 2>;

constexpr int64_t kMaxWidth = 65535 * kSwigluThreads * kSwigluOwn;

ffi::Error swiglu(cudaStream_t stream, Matrix gate, Matrix up, ffi::Result<Rounded> out, int32_t gate_start,
                  int32_t up_start, float limit) {
  const int64_t rows = out->dimensions()[0], width = out->dimensions()[1];
  const auto fits = [&](const Matrix& of, int64_t start) {
    const int64_t stride = of.dimensions()[1];
    return start >= 0 && start + width <= stride && stride <= INT32_MAX && start % kSwigluOwn == 0 &&
           stride % kSwigluOwn == 0;
  };
  if (const ffi::Error error =
          check("swiglu", {{"gate", gate, {rows, kAny}}, {"up", up, {rows, kAny}}, {"out", *out, {rows, width}}},
                {{fits(gate, gate_start), "gate has not these columns, in fours"},
                 {fits(up, up_start), "up has not these columns, in fours"},
                 {width % kSwigluOwn == 0 && width <= kMaxWidth && rows <= INT32_MAX,
                  "up to 2^31 rows of up to 33553920 columns in fours"}});
      error.failure())
    return error;
  if (rows == 0 || width == 0) return ffi::Error::Success();
  const SwigluArgs args = {gate.typed_data() + gate_start,
                           up.typed_data() + up_start,
                           reinterpret_cast<__nv_bfloat16*>(out->untyped_data()),
                           static_cast<int>(width),
                           static_cast<int>(gate.dimensions()[1]),
                           static_cast<int>(up.dimensions()[1]),
                           limit};
  return launched("swiglu", start_rows(swiglu_kernel, rows, width, kSwigluThreads, kSwigluOwn, stream, args));
}

}  // namespace

DSV4_HANDLER(swiglu, dsv4_swiglu, swiglu,
             on_stream()
                 .Arg<Matrix>()
                 .Arg<Matrix>()
                 .Ret<Rounded>()
                 .Attr<int32_t>("gate_start")
                 .Attr<int32_t>("up_start")
                 .Attr<float>("limit"));

}  // namespace dsv4
