// Numbers of a row as e4m3 with a power-of-two scale for every 128 columns (dsv4_jax/formats/activations.py says
// which), by any threads that share a scale; or by sixteen of them, of which each takes eight columns.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "common/lanes.cuh"
#include "common/numbers.cuh"

namespace dsv4 {

constexpr int kRoundOwn = 8, kRoundGroup = 128;  // columns of a thread; of a scale
constexpr int kRoundSharers = kRoundGroup / kRoundOwn;
constexpr float kRoundFloor = 1e-4f;  // the least amax

// The greater of two pairs of bf16, each by itself. NaN is less than any number.
__device__ __forceinline__ uint32_t greater_pair(uint32_t a, uint32_t b) {
  uint32_t x;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(x) : "r"(a), "r"(b));
  return x;
}

// The greatest magnitudes so far, with those of another pair.
__device__ __forceinline__ uint32_t greater_magnitudes(uint32_t most, uint32_t pair) {
  constexpr uint32_t kMagnitudes = 0x7FFF7FFF;
  return greater_pair(most, pair & kMagnitudes);
}

// The exponent of a scale, from the greatest magnitudes of even and of odd numbers that share it.
__device__ __forceinline__ int round_exponent(uint32_t most) {
  constexpr float kMostBf16 = 0x1.FEp127f;  // as which infinity counts
  const float amax = fmaxf(lower_bf16(most), upper_bf16(most));
  return scale_exponent(fminf(fmaxf(amax, kRoundFloor), kMostBf16), kE4m3Limit);
}

// Two codes of bf16 times `factor`, a power of two; of NaN those of NaN.
__device__ __forceinline__ uint32_t e4m3_pair(uint32_t pair, float factor) {
  const float2 x = make_float2(lower_bf16(pair) * factor, upper_bf16(pair) * factor);
  uint32_t codes = __nv_cvt_float2_to_fp8x2(x, __NV_SATFINITE, __NV_E4M3);
  if (x.x != x.x) codes = (codes & 0xFF00u) | kE4m3NaN;
  if (x.y != x.y) codes = (codes & 0x00FFu) | kE4m3NaN << kE4m3Bits;
  return codes;
}

// A thread's eight columns as codes; returns the exponent of their scale. The sixteen threads that share it, half a
// warp, come here together.
__device__ __forceinline__ int round_eight(uint4 words, uint2& codes) {
  const uint32_t sharers = ((1u << kRoundSharers) - 1) << (threadIdx.x & kRoundSharers);
  const uint32_t pairs[kRoundOwn / 2] = {words.x, words.y, words.z, words.w};
  uint32_t most = 0;
#pragma unroll
  for (uint32_t pair : pairs) most = greater_magnitudes(most, pair);
#pragma unroll
  for (int d = kRoundSharers / 2; d > 0; d /= 2) most = greater_pair(most, __shfl_xor_sync(sharers, most, d));
  const int exponent = round_exponent(most);
  const float factor = power_of_two(-exponent);
  codes.x = e4m3_pair(pairs[0], factor) | e4m3_pair(pairs[1], factor) << 16;
  codes.y = e4m3_pair(pairs[2], factor) | e4m3_pair(pairs[3], factor) << 16;
  return exponent;
}

}  // namespace dsv4
