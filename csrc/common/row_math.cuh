// The maths of a row that threads hold four channels each: sums, RoPE, Hadamard, the scale of a group, its codes.
//
// Every product and sum is rounded on its own and sums follow the reference's trees (dsv4_jax/ops/numerics.py), so that
// the bytes do not depend on the kernel or the chunking and equal the reference's but for the last bit of rsqrt, cos
// and sin.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "common/lanes.cuh"
#include "common/numbers.cuh"
#include "common/widths.h"

namespace dsv4 {

constexpr int kOwn = 4;  // channels of a thread

template <int kCount>
struct Floats {
  float x[kCount];
};
using Float4 = Floats<kOwn>;

__device__ __forceinline__ Float4 load4(const float* p) {
  const float4 v = *reinterpret_cast<const float4*>(p);
  return {{v.x, v.y, v.z, v.w}};
}
__device__ __forceinline__ Float4 of_bf16(uint2 v) {
  return {{lower_bf16(v.x), upper_bf16(v.x), lower_bf16(v.y), upper_bf16(v.y)}};
}
__device__ __forceinline__ Float4 load4(const __nv_bfloat16* p) { return of_bf16(*reinterpret_cast<const uint2*>(p)); }
// For what no thread of the launch writes.
__device__ __forceinline__ Float4 load4_constant(const float* p) {
  const float4 v = __ldg(reinterpret_cast<const float4*>(p));
  return {{v.x, v.y, v.z, v.w}};
}
template <int kCount>
__device__ __forceinline__ Floats<kCount> load_floats(const float* p) {
  if constexpr (kCount == kOwn) return load4(p);
  static_assert(kCount == kOwn || kCount == 1, "four or one");
  return {*p};
}
template <int kCount>
__device__ __forceinline__ Floats<kCount> load_constants(const float* p) {
  if constexpr (kCount == kOwn) return load4_constant(p);
  static_assert(kCount == kOwn || kCount == 1, "four or one");
  return {__ldg(p)};
}
// Brings a line near without a register for it.
__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L1 [%0];" ::"l"(p)); }
__device__ __forceinline__ void store4(float* p, const Float4& v) {
  const auto& [a, b, c, d] = v.x;
  *reinterpret_cast<float4*>(p) = make_float4(a, b, c, d);
}
template <int kCount>
__device__ __forceinline__ void store_floats(float* p, const Floats<kCount>& v) {
  if constexpr (kCount == kOwn) {
    store4(p, v);
  } else {
    *p = v.x[0];
  }
}
template <int kCount>
__device__ __forceinline__ void fill(Floats<kCount>& v, float x) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) v.x[i] = x;
}

template <int kCount>
__device__ __forceinline__ void add(Floats<kCount>& v, const Floats<kCount>& x) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) v.x[i] = __fadd_rn(v.x[i], x.x[i]);
}

// e^x for x <= 0, step by step as `exp` there.
__device__ __forceinline__ float exact_exp(float x) {
  constexpr float kRound = 0x1.8p23f;  // a sum with it has the nearest integer as its low bits
  constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f, kLeast = -87.f;
  constexpr int kTermCount = 7;
  constexpr float kFirst = 1.f / 5040, kTerms[kTermCount] = {1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, 0.5f, 1.f, 1.f};
  const float sum = __fadd_rn(__fmul_rn(x, kLog2e), kRound);  // no clamp at -88 as there: what is below is replaced
  const float n = __fsub_rn(sum, kRound);
  float r = __fsub_rn(x, __fmul_rn(n, kLn2High));
  r = __fsub_rn(r, __fmul_rn(n, kLn2Low));
  float s = kFirst;
#pragma unroll
  for (int i = 0; i < kTermCount; ++i) s = __fadd_rn(__fmul_rn(s, r), kTerms[i]);
  s = __fmul_rn(s, of_exponent_field(__float_as_uint(sum) + kBias));
  return x < kLeast ? 0.f : s;
}

// Sum over all channels of a row, the tree that adds the second half to the first until one is left. All threads of the
// row call it and get it. `shared` is [kDim] floats, for KV rows: they have four warps.
template <int kChannels>
__device__ __forceinline__ float row_sum(Float4 v, float* shared, int thread) {
  if constexpr (kChannels == kDim) {
    __syncthreads();
    store4(shared + kOwn * thread, v);
    __syncthreads();
    Float4 warp[kOwn];
#pragma unroll
    for (int w = 0; w < kOwn; ++w) warp[w] = load4(shared + kOwn * (lane_of(thread) + kLanes * w));
    const auto& [a, b, c, d] = warp;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) v.x[i] = __fadd_rn(__fadd_rn(a.x[i], c.x[i]), __fadd_rn(b.x[i], d.x[i]));
  }
#pragma unroll
  for (int d = kLanes / 2; d > 0; d /= 2) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) v.x[i] = __fadd_rn(v.x[i], __shfl_xor_sync(kAllLanes, v.x[i], d));
  }
  const auto& [a, b, c, d] = v.x;
  return __fadd_rn(__fadd_rn(a, c), __fadd_rn(b, d));
}

// RoPE of one pair of dims. Queries, which are rounded to bf16 next, fuse products and sums.
enum class Rounding { kEach, kFused };
template <Rounding kRounding>
__device__ __forceinline__ void turn(float& even, float& odd, float cosine, float sine) {
  if constexpr (kRounding == Rounding::kFused) {
    const float turned = __fmaf_rn(even, cosine, -__fmul_rn(odd, sine));
    odd = __fmaf_rn(even, sine, __fmul_rn(odd, cosine)), even = turned;
  } else {
    const float turned = __fsub_rn(__fmul_rn(even, cosine), __fmul_rn(odd, sine));
    odd = __fadd_rn(__fmul_rn(even, sine), __fmul_rn(odd, cosine)), even = turned;
  }
}
// Back by the same angle.
__device__ __forceinline__ void turn_back(float& even, float& odd, float cosine, float sine) {
  const float turned = __fadd_rn(__fmul_rn(even, cosine), __fmul_rn(odd, sine));
  odd = __fsub_rn(__fmul_rn(odd, cosine), __fmul_rn(even, sine)), even = turned;
}

// x @ H_128 / sqrt(128) of a row of 128 channels by a warp: stages of distance 1, 2, 4, ..., 64.
__device__ __forceinline__ void hadamard(Float4& v, int lane) {
  static_assert(kIndexDim == kOwn * kLanes, "a row is a warp's");
  constexpr float kInverseRoot = 0.088388346f;
  const auto [x, y, z, w] = v.x;
  const float a = x + y, b = x - y, c = z + w, d = z - w;
  v = {{a + c, b + d, a - c, b - d}};
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) {
    const float sign = (lane & distance) != 0 ? -1.f : 1.f;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      v.x[i] = __fmaf_rn(v.x[i], sign, __shfl_xor_sync(kAllLanes, v.x[i], distance));
    }
  }
#pragma unroll
  for (int i = 0; i < kOwn; ++i) v.x[i] *= kInverseRoot;
}

// Largest |x| of the threads that share a scale (NaN ignored, infinity as the largest float), not below `floor`.
template <int kThreads>
__device__ __forceinline__ float group_max(const Float4& v, float floor) {
  float most = floor;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) most = fmaxf(most, v.x[i] != v.x[i] ? 0.f : fminf(fabsf(v.x[i]), kMaxFloat));
#pragma unroll
  for (int d = kThreads / 2; d > 0; d /= 2) most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, d));
  return most;
}

// e4m3 of the four channels times `factor`, a byte each.
__device__ __forceinline__ uint32_t e4m3_codes(const Float4& v, float factor) {
  uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const float x = v.x[i] * factor;
    const uint32_t code = x != x ? kE4m3NaN : __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
    codes |= code << kE4m3Bits * i;
  }
  return codes;
}

// FP4: the threads that share a scale, and its least amax.
constexpr int kFp4Threads = kFp4Group / kOwn;
constexpr float kFp4Floor = kE2m1Max * kLeastNormal;

__device__ __forceinline__ uint16_t bf16_code(float x) {
  const __nv_bfloat16 y = __float2bfloat16_rn(x);
  return x != x ? static_cast<uint16_t>(kBf16NaN) : reinterpret_cast<const uint16_t&>(y);
}
__device__ __forceinline__ uint32_t bf16_pair(float low, float high) {
  const __nv_bfloat162 x = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(x);
}

}  // namespace dsv4
