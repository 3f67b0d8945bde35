// FP8 products for index_scores: half the tensor-core time and shared memory of bf16, and keys cheaper to decode.
//
// Queries that were rounded to FP4 (QAT) are e4m3 numbers times a power of two per head: FP4 spans 2^-1 .. 6, so e4m3
// (2^-9 .. 448) holds groups whose scales differ by up to 2^14. The same holds for FP4 keys: shifted so that the
// largest of a key's four group scales maps 6 to 384, its values are e4m3 and the power of two that is left multiplies
// the score, for relu(c x) = c relu(x) where c > 0. A group 2^15 or more below the largest counts as zero; it is worth
// less than the products lose. FP8 keys are e4m3 as they are, and their scale multiplies the score.
//
// What the products lose: the matrix units of Hopper align the products of a step (32 dims) and the sum so far to the
// largest of them and cut them off about 13 bits below its leading bit. Nothing is lost where group scales are equal
// and the sum stays below 2^13 quarters of the product of the scales, the case next to always; otherwise the relative
// error of a dot product is of order 2^-13.
#pragma once

#include <cuda_fp8.h>

#include "common/hopper.cuh"
#include "common/numbers.cuh"

namespace dsv4 {

constexpr int kShifts = 16;          // entries of the table; the last is zero
constexpr uint32_t kShiftBytes = 8;  // of an entry: the e4m3 codes of the eight FP4 magnitudes

// Code of FP4 magnitude `magnitude` (a code, 0..7) times 2^(6 - shift): exact up to shift 14.
__device__ __forceinline__ uint8_t shifted_code(int magnitude, int shift) {
  constexpr float kUndo = 0x1p126f;
  constexpr int kFp4Room = 6;  // 6 becomes 384
  // The bits of the FP4 code, moved into the fields of a float, are its value times 2^-126.
  const float value = __uint_as_float(magnitude << (kFloatMantissa - 1)) * kUndo * power_of_two(kFp4Room - shift);
  return shift < kShifts - 1 ? __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3) : 0;
}

// Four of the eight bytes low, high by the low nibbles of `select`, which must be below 8. (__byte_perm sees to that by
// itself, with an instruction.)
__device__ __forceinline__ uint32_t pick_bytes(uint32_t low, uint32_t high, uint32_t select) {
#ifdef __CUDA_ARCH__
  uint32_t y;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(low), "r"(high), "r"(select));
  return y;
#else
  return __byte_perm(low, high, select);
#endif
}

// Eight FP4 codes as e4m3, in order: the magnitudes by way of an entry of the table, then the signs.
__device__ __forceinline__ uint2 decode_fp4_e4m3(uint32_t x, uint2 entry) {
  constexpr uint32_t kSigns = 0x80808080u, kMagnitudes = 0x77777777u;
  constexpr uint32_t kLowNibbles = 0x1504,
                     kHighNibbles = 0x3726;  // bytes whose sign bits are those of four codes, in order
  constexpr int kHalfBits = 16;
  const uint32_t magnitude = x & kMagnitudes, up = x << 4;
  return {pick_bytes(entry.x, entry.y, magnitude) | (__byte_perm(x, up, kLowNibbles) & kSigns),
          pick_bytes(entry.x, entry.y, magnitude >> kHalfBits) | (__byte_perm(x, up, kHighNibbles) & kSigns)};
}

// Largest exponent field and mantissa among eight bf16, low and high halves apart.
__device__ __forceinline__ uint32_t max_magnitudes(uint4 x) {
  constexpr uint32_t kRest = 0x7FFF7FFFu;
  return __vmaxu2(__vmaxu2(x.x & kRest, x.y & kRest), __vmaxu2(x.z & kRest, x.w & kRest));
}

// Field of the exponent of the power of two that brings bf16 numbers, the largest of which has exponent field `most`,
// to at most 2^9; 0 if they are too large, too small or not finite. Then factor and inverse are ordinary numbers.
__device__ __forceinline__ uint32_t query_factor_field(uint32_t most) {
  constexpr int kRange = 60, kE4m3Exponent = 8;
  if (most == 0) return kBias;  // zeros, or too small to count
  return most >= kBias - kRange && most <= kBias + kRange ? 2 * kBias + kE4m3Exponent - most : 0;
}

// Eight bf16 times `factor`, a power of two, as e4m3 in order. `lost` gets a bit set if one had to be rounded; a number
// 2^-33 of the largest may become zero without.
__device__ __forceinline__ uint2 to_e4m3(uint4 x, float factor, uint32_t& lost) {
  constexpr int kPairs = 4;
  constexpr uint32_t kHigh = 0xFFFF0000u;
  constexpr int kHalfBits = 16;
  const uint32_t words[kPairs] = {x.x, x.y, x.z, x.w};
  uint32_t codes[kPairs];
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const float2 pair = {__uint_as_float(words[i] << kHalfBits) * factor, __uint_as_float(words[i] & kHigh) * factor};
    codes[i] = __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3);
    const __half2_raw back = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes[i]), __NV_E4M3);
    const __half2 want = __floats2half2_rn(pair.x, pair.y);
    lost |= reinterpret_cast<const uint32_t&>(back) ^ reinterpret_cast<const uint32_t&>(want);
  }
  return {codes[0] | codes[1] << kHalfBits, codes[2] | codes[3] << kHalfBits};
}

}  // namespace dsv4
