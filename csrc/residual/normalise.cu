// RMSNorm of rows as an XLA FFI handler: one launch, only enqueues. Wrapper and arguments: dsv4_jax/cuda/normalise.py.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "common/handler.h"
#include "common/lanes.cuh"
#include "common/numbers.cuh"
#include "common/overlap.cuh"

namespace dsv4 {

constexpr int kNormThreads = 256, kNormWarps = kNormThreads / kLanes, kNormOwn = 4;  // columns of a load
constexpr int kNormLoads = 8, kNormMax = kNormThreads * kNormOwn * kNormLoads;       // columns of a row, at most

struct NormArgs {
  const void* x;        // [rows, width] float32 or bf16, rows `stride` apart
  const float* weight;  // [width]
  __nv_bfloat16* out;   // [rows, width]
  int width, stride;
  float eps;
};

__device__ __forceinline__ float4 four_of(const float* x) { return *reinterpret_cast<const float4*>(x); }
__device__ __forceinline__ float4 four_of(const __nv_bfloat16* x) {
  const uint2 v = *reinterpret_cast<const uint2*>(x);
  return make_float4(lower_bf16(v.x), upper_bf16(v.x), lower_bf16(v.y), upper_bf16(v.y));
}

// A block a row. A thread keeps its columns, four a load.
template <int kLoads, typename Number>
__global__ void __launch_bounds__(kNormThreads) normalise_kernel(const __grid_constant__ NormArgs args) {
  __shared__ float sums[kNormWarps];
  const int thread = threadIdx.x, steps = args.width / kNormOwn;
  const auto* weight = reinterpret_cast<const float4*>(args.weight);
  const auto* row = static_cast<const Number*>(args.x) + static_cast<size_t>(blockIdx.x) * args.stride;
  let_next_start();
  float4 w[kLoads], x[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int at = i * kNormThreads + thread;
    w[i] = at < steps ? __ldg(weight + at) : float4{};
  }
  wait_for_previous();
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int at = i * kNormThreads + thread;
    x[i] = at < steps ? four_of(row + kNormOwn * at) : float4{};
    sum += x[i].x * x[i].x + x[i].y * x[i].y + x[i].z * x[i].z + x[i].w * x[i].w;
  }
  sum = lanes_sum<kLanes>(sum);
  if (lane_of(thread) == 0) sums[warp_of(thread)] = sum;
  __syncthreads();
  sum = 0;
#pragma unroll
  for (int warp = 0; warp < kNormWarps; ++warp) sum += sums[warp];
  const float factor = rsqrtf(sum / static_cast<float>(args.width) + args.eps);
  auto* out = reinterpret_cast<uint2*>(args.out + static_cast<size_t>(blockIdx.x) * args.width);
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int at = i * kNormThreads + thread;
    if (at >= steps) continue;
    const __nv_bfloat162 low = __floats2bfloat162_rn(x[i].x * factor * w[i].x, x[i].y * factor * w[i].y),
                         high = __floats2bfloat162_rn(x[i].z * factor * w[i].z, x[i].w * factor * w[i].w);
    out[at] = {reinterpret_cast<const uint32_t&>(low), reinterpret_cast<const uint32_t&>(high)};
  }
}

namespace {

namespace ffi = xla::ffi;

using Matrix = ffi::AnyBuffer;
using Vector = ffi::Buffer<ffi::F32, 1>;
using Rounded = ffi::Buffer<ffi::BF16, 2>;

template <typename Number, int kLoads = 1>
cudaError_t launch(const NormArgs& args, int64_t rows, cudaStream_t stream) {
  if constexpr (kLoads < kNormLoads) {
    if (args.width > kLoads * kNormThreads * kNormOwn) return launch<Number, 2 * kLoads>(args, rows, stream);
  }
  return start(normalise_kernel<kLoads, Number>, {dim3(static_cast<unsigned>(rows)), kNormThreads}, follows, stream,
               args);
}

ffi::Error normalise(cudaStream_t stream, Matrix x, Vector weight, ffi::Result<Rounded> out, int32_t start, float eps) {
  const int64_t rows = out->dimensions()[0], width = weight.dimensions()[0];
  ffi::Error error = check("normalise",
                           {{"x", x, {rows, kAny}, kVectors, {ffi::F32, ffi::BF16}},
                            {"weight", weight, {width}},
                            {"out", *out, {rows, width}}},
                           {{width % kNormOwn == 0 && width <= kNormMax, "up to 8192 columns in fours"}});
  if (error.failure()) return error;
  const bool bf16 = x.element_type() == ffi::BF16;
  const int64_t stride = x.dimensions()[1], size = bf16 ? sizeof(__nv_bfloat16) : sizeof(float);
  const int64_t step = kAlignment / size;
  error = check("normalise", {},
                {{start >= 0 && start % step == 0 && stride % step == 0 && start + width <= stride,
                  "x has not these columns, in whole 16 bytes"},
                 {stride <= INT32_MAX && rows <= INT32_MAX, "2^31 rows or columns"}});
  if (error.failure() || rows == 0 || width == 0) return error;
  const NormArgs args = {static_cast<const uint8_t*>(x.untyped_data()) + start * size,
                         weight.typed_data(),
                         reinterpret_cast<__nv_bfloat16*>(out->untyped_data()),
                         static_cast<int>(width),
                         static_cast<int>(stride),
                         eps};
  return launched("normalise", bf16 ? launch<__nv_bfloat16>(args, rows, stream) : launch<float>(args, rows, stream));
}

}  // namespace

DSV4_HANDLER(normalise, dsv4_normalise, normalise,
             on_stream().Arg<Matrix>().Arg<Vector>().Ret<Rounded>().Attr<int32_t>("start").Attr<float>("eps"));

}  // namespace dsv4
