// The clamped SwiGLU of rows as an XLA FFI handler: one launch, only enqueues. Wrapper and arguments:
// dsv4_jax/cuda/swiglu.py.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "common/handler.h"
#include "common/numbers.cuh"
#include "common/overlap.cuh"

namespace dsv4 {

constexpr int kSwigluThreads = 128;
template <typename Number>
constexpr int kSwigluOwn = kAlignment / sizeof(Number);  // columns of a thread: one load of gates and one of ups

template <typename Number>
struct SwigluArgs {
  const Number* gate;  // [rows, width], rows `gate_stride` apart
  const Number* up;    // [rows, width], rows `up_stride` apart
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

// Two columns from what is loaded at a time, the first of them at `i`.
__device__ __forceinline__ float2 swiglu_pair(const uint32_t (&words)[4], int i, float) {
  return make_float2(__uint_as_float(words[i]), __uint_as_float(words[i + 1]));
}
__device__ __forceinline__ float2 swiglu_pair(const uint32_t (&words)[4], int i, __nv_bfloat16) {
  return make_float2(lower_bf16(words[i / 2]), upper_bf16(words[i / 2]));
}

template <typename Number>
__global__ void __launch_bounds__(kSwigluThreads) swiglu_kernel(const __grid_constant__ SwigluArgs<Number> args) {
  constexpr int kOwn = kSwigluOwn<Number>;
  let_next_start();
  wait_for_previous();
  const int column = (blockIdx.y * kSwigluThreads + threadIdx.x) * kOwn;
  if (column >= args.width) return;
  const size_t row = blockIdx.x;
  const auto gates = *reinterpret_cast<const uint4*>(args.gate + row * args.gate_stride + column);
  const auto ups = *reinterpret_cast<const uint4*>(args.up + row * args.up_stride + column);
  const uint32_t gate_words[] = {gates.x, gates.y, gates.z, gates.w}, up_words[] = {ups.x, ups.y, ups.z, ups.w};
  struct alignas(kOwn * sizeof(__nv_bfloat16)) {
    __nv_bfloat162 pairs[kOwn / 2];
  } out;
#pragma unroll
  for (int i = 0; i < kOwn; i += 2) {
    const float2 gate = swiglu_pair(gate_words, i, Number{}), up = swiglu_pair(up_words, i, Number{});
    out.pairs[i / 2] =
        __floats2bfloat162_rn(clamped_swiglu(gate.x, up.x, args.limit), clamped_swiglu(gate.y, up.y, args.limit));
  }
  *reinterpret_cast<decltype(out)*>(args.out + row * args.width + column) = out;
}

namespace {

namespace ffi = xla::ffi;

using Matrix = ffi::AnyBuffer;  // float32 or bf16
using Rounded = ffi::Buffer<ffi::BF16, 2>;

constexpr int64_t kMaxColumnBlocks = 65535;

template <typename Number>
ffi::Error swiglu_of(cudaStream_t stream, const Matrix& gate, const Matrix& up, Rounded& out, int32_t gate_start,
                     int32_t up_start, float limit) {
  constexpr int64_t kOwn = kSwigluOwn<Number>;
  const int64_t rows = out.dimensions()[0], width = out.dimensions()[1];
  const auto fits = [&](const Matrix& of, int64_t start) {
    const int64_t stride = of.dimensions()[1];
    return start >= 0 && start + width <= stride && stride <= INT32_MAX && start % kOwn == 0 && stride % kOwn == 0;
  };
  if (const ffi::Error error =
          check("swiglu", {},
                {{fits(gate, gate_start), "gate has not these columns, in whole 16 bytes"},
                 {fits(up, up_start), "up has not these columns, in whole 16 bytes"},
                 {width % kOwn == 0 && width <= kMaxColumnBlocks * kSwigluThreads * kOwn && rows <= INT32_MAX,
                  "up to 2^31 rows of up to 33553920 columns in whole 16 bytes"}});
      error.failure())
    return error;
  if (rows == 0 || width == 0) return ffi::Error::Success();
  const SwigluArgs<Number> args = {static_cast<const Number*>(gate.untyped_data()) + gate_start,
                                   static_cast<const Number*>(up.untyped_data()) + up_start,
                                   reinterpret_cast<__nv_bfloat16*>(out.untyped_data()),
                                   static_cast<int>(width),
                                   static_cast<int>(gate.dimensions()[1]),
                                   static_cast<int>(up.dimensions()[1]),
                                   limit};
  return launched("swiglu", start_rows(swiglu_kernel<Number>, rows, width, kSwigluThreads, kOwn, stream, args));
}

ffi::Error swiglu(cudaStream_t stream, Matrix gate, Matrix up, ffi::Result<Rounded> out, int32_t gate_start,
                  int32_t up_start, float limit) {
  const int64_t rows = out->dimensions()[0], width = out->dimensions()[1];
  if (const ffi::Error error = check("swiglu", {{"gate", gate, {rows, kAny}, kVectors, {ffi::F32, ffi::BF16}},
                                                {"up", up, {rows, kAny}, kVectors, {gate.element_type()}},
                                                {"out", *out, {rows, width}}});
      error.failure())
    return error;
  const auto of = gate.element_type() == ffi::BF16 ? swiglu_of<__nv_bfloat16> : swiglu_of<float>;
  return of(stream, gate, up, *out, gate_start, up_start, limit);
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
