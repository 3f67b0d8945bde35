// The last steps of a query (dsv4_jax/ops/queries.py), one warp a row: RMSNorm without weight, RoPE on the last 64 dims, for
// the indexer also a Hadamard rotation and the FP4 round trip; rounded to bf16.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace dsv4 {

constexpr int kQueryThreads = 256;
constexpr int kRopeDim = 64;

struct QueryArgs {
  const float* queries;    // [tokens, heads * dim], tokens `stride` apart
  const float* cosine;     // [tokens, 32]
  const float* sine;       // [tokens, 32]
  __nv_bfloat16* out;      // [rows, dim]
  int rows, heads;         // rows = tokens * heads
  int stride;
  float eps;               // of the norm; negative: no norm
  int hadamard, round_fp4;
};

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(~0u, x, d);
  return x;
}

// x @ H_128 / sqrt(128) of a row of 128, four dims a lane: stages of distance 1, 2, 4, ..., 64.
__device__ __forceinline__ void hadamard_128(float (&x)[4], int lane) {
  const float a = x[0] + x[1], b = x[0] - x[1], c = x[2] + x[3], d = x[2] - x[3];
  x[0] = a + c, x[1] = b + d, x[2] = a - c, x[3] = b - d;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float other = __shfl_xor_sync(~0u, x[i], distance);
      x[i] = (lane & distance) != 0 ? other - x[i] : x[i] + other;
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] *= 0.088388346f;
}

// What FP4 storage would make of the 32 dims that eight lanes hold (dsv4_jax/formats/index_fp4.py).
__device__ __forceinline__ void round_trip_fp4(float (&x)[4]) {
  constexpr float kTiny = 0x1p-126f, kMost = 3.402823466e38f;
  float amax = 6 * kTiny;
  bool nan = false;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (fabsf(x[i]) < kTiny) x[i] = copysignf(0.f, x[i]);
    nan |= x[i] != x[i];  // and then the scale does not matter
    amax = fmaxf(amax, fminf(fabsf(x[i]), kMost));
  }
  int any = nan;
#pragma unroll
  for (int d = 1; d < 8; d *= 2) {
    amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, d));
    any |= __shfl_xor_sync(~0u, any, d);
  }
  // k = ceil(log2(amax / 6)): 6 is 1.5 * 2^2.
  const uint32_t bits = __float_as_uint(amax);
  const int k = static_cast<int>(bits >> 23) - 129 + ((bits & 0x7FFFFF) > 0x400000);
  const float scale = __uint_as_float(static_cast<uint32_t>(k + 127) << 23);
  const float inverse = __uint_as_float(static_cast<uint32_t>(127 - k) << 23);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float m = fabsf(x[i]) * inverse;
    const float v = m < 2 ? rintf(2 * m) * 0.5f : m < 4 ? rintf(m) : fminf(2 * rintf(0.5f * m), 6.f);
    x[i] = any != 0 ? __uint_as_float(0x7FC00000) : copysignf(v, x[i]) * scale;
  }
}

template <int kDim>
__global__ void __launch_bounds__(kQueryThreads) query_kernel(const __grid_constant__ QueryArgs args) {
  constexpr int kQuads = kDim / 128;  // a lane holds dims 128 i + 4 lane + {0, 1, 2, 3}
  const int lane = threadIdx.x & 31;
  const unsigned index = blockIdx.x * (kQueryThreads / 32) + (threadIdx.x >> 5), heads = args.heads;
  if (index >= static_cast<unsigned>(args.rows)) return;
  const int64_t row = index, token = index / heads;
  const float* queries = args.queries + token * args.stride + (index % heads) * kDim;
  float x[kQuads][4];
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const float4 v = __ldg(reinterpret_cast<const float4*>(queries + 128 * i) + lane);
    x[i][0] = v.x, x[i][1] = v.y, x[i][2] = v.z, x[i][3] = v.w;
  }
  // The angles of the last 64 dims, as adjacent pairs: asked for by all lanes, beside the row.
  const int64_t at = token * (kRopeDim / 2) + 2 * max(lane - 16, 0);
  const float2 c = __ldg(reinterpret_cast<const float2*>(args.cosine + at));
  const float2 s = __ldg(reinterpret_cast<const float2*>(args.sine + at));
  if (args.eps >= 0) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sum += x[i][j] * x[i][j];
    }
    const float factor = rsqrtf(warp_sum(sum) * (1.f / kDim) + args.eps);
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) x[i][j] *= factor;
    }
  }
  if (lane >= 16) {
    float(&y)[4] = x[kQuads - 1];
    const float a = y[0] * c.x - y[1] * s.x, b = y[0] * s.x + y[1] * c.x;
    const float d = y[2] * c.y - y[3] * s.y, e = y[2] * s.y + y[3] * c.y;
    y[0] = a, y[1] = b, y[2] = d, y[3] = e;
  }
  if constexpr (kDim == 128) {
    if (args.hadamard) hadamard_128(x[0], lane);
    if (args.round_fp4) round_trip_fp4(x[0]);
  }
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const __nv_bfloat162 lo = __floats2bfloat162_rn(x[i][0], x[i][1]), hi = __floats2bfloat162_rn(x[i][2], x[i][3]);
    const uint2 out = {reinterpret_cast<const uint32_t&>(lo), reinterpret_cast<const uint32_t&>(hi)};
    reinterpret_cast<uint2*>(args.out + row * kDim + 128 * i)[lane] = out;
  }
}

}  // namespace dsv4
