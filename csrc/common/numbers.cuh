// The bits of numbers: float32, bfloat16, e4m3, e2m1, ue8m0.
#pragma once

#include <cstdint>

namespace dsv4 {

constexpr int kBias = 127;                             // of the exponents of float32, bfloat16 and ue8m0
constexpr int kFloatMantissa = 23, kBf16Mantissa = 7;  // bits
constexpr uint32_t kMantissaMask = (1u << kFloatMantissa) - 1;
constexpr int kE4m3Bits = 8, kE2m1Bits = 4;
constexpr uint32_t kFloatNaN = 0x7FC00000, kBf16NaN = 0x7FC0, kE4m3NaN = 0x7F, kUe8m0NaN = 0xFF;
constexpr float kInf = __builtin_huge_valf();
constexpr float kMaxFloat = 3.402823466e38f, kLeastNormal = 0x1p-126f;
constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// The power of two whose exponent field is `field`.
__device__ __forceinline__ float of_exponent_field(uint32_t field) { return __uint_as_float(field << kFloatMantissa); }
__device__ __forceinline__ float power_of_two(int k) { return of_exponent_field(static_cast<uint32_t>(k + kBias)); }

// The two bfloat16 numbers of a word.
__device__ __forceinline__ float lower_bf16(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float upper_bf16(uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000u); }

// Larger for larger numbers; NaN is the largest. Zero is no number's.
__device__ __forceinline__ uint32_t in_order(float x) {
  if (x != x) return ~0u;
  const uint32_t bits = __float_as_uint(x + 0.f);  // one zero
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float number_at(uint32_t order) {
  return __uint_as_float(order >> 31 ? order & 0x7FFFFFFFu : ~order);
}

// Numbers below the normal ones become zeros of their sign, as on the matrix units.
__device__ __forceinline__ void flush_subnormal(float& x) {
  if (fabsf(x) < kLeastNormal) x = copysignf(0.f, x);
}

// The greatest number of a stored format, by its fields as a float32.
struct Limit {
  int exponent;
  uint32_t mantissa;
};
constexpr Limit kE4m3Limit = {kBias + 8, 0x600000};  // 448 = 1.75 * 2^8
constexpr Limit kE2m1Limit = {kBias + 2, 0x400000};  // 6 = 1.5 * 2^2

// ceil(log2(amax / limit)): the scale with which nothing is above the limit.
__device__ __forceinline__ int scale_exponent(float amax, Limit limit) {
  const uint32_t bits = __float_as_uint(amax);
  return static_cast<int>(bits >> kFloatMantissa) - limit.exponent + ((bits & kMantissaMask) > limit.mantissa);
}

// Codes 0 to 7 of e2m1 stand for 0, .5, 1, 1.5, 2, 3, 4, 6; 8 is the sign. Halfway goes to the even code.
constexpr float kE2m1Max = 6;
constexpr uint32_t kE2m1Sign = 8;
// Magnitude of x * factor, subnormal x as zero, beside the binade in which its steps are counted: steps are of 2^(e -
// 1) for 2^e <= m, but no smaller ones than 0.5.
struct E2m1Steps {
  float m;
  uint32_t binade;  // the bits of 2^e
};
__device__ __forceinline__ E2m1Steps e2m1_steps(float x, float factor) {
  constexpr uint32_t kOne = kBias << kFloatMantissa;
  float m;
  asm("mul.ftz.f32 %0, %1, %2;" : "=f"(m) : "f"(fabsf(x)), "f"(factor));
  m = fminf(m, kE2m1Max);
  return {m, max(__float_as_uint(m) & ~kMantissaMask, kOne)};
}
// A number so large that a sum of it and m is rounded to a step; the sum's last bits count them.
__device__ __forceinline__ float rounds_to_steps(uint32_t binade) {
  return __uint_as_float(binade + (22 << kFloatMantissa) + 0x400000);
}
// The code of x * factor; of NaN 0. Masked, not chosen: a choice becomes a branch, and codes then wait for one another.
__device__ __forceinline__ uint32_t e2m1_code(float x, float factor) {
  constexpr uint32_t kCount = 7, kOne = kBias << kFloatMantissa, kCode = 15;
  const auto [m, binade] = e2m1_steps(x, factor);
  const uint32_t count = __float_as_uint(__fadd_rn(m, rounds_to_steps(binade))) & kCount;
  const uint32_t before = (binade - kOne) >> (kFloatMantissa - 1);  // two codes a binade from 2 on
  return ((count + before) | (__float_as_uint(x) >> 28 & kE2m1Sign)) & (x == x ? kCode : 0u);
}
// What the code of x / scale stands for times the scale, its inverse given. x is not NaN.
__device__ __forceinline__ float round_e2m1(float x, float scale, float inverse) {
  const auto [m, binade] = e2m1_steps(x, inverse);
  const float steps = rounds_to_steps(binade);
  return copysignf(__fsub_rn(__fadd_rn(m, steps), steps), x) * scale;
}

// The greater one; NaN if either is (fmaxf would drop it).
__device__ __forceinline__ float max_nan(float a, float b) {
  float x;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));
  return x;
}

}  // namespace dsv4
