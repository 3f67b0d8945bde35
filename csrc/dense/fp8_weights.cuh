// Packed FP8 weights (dsv4_jax/formats/weights/fp8.py makes them): tiles of 64 rows x 128 columns of K, 8,192 bytes of
// e4m3 codes, the tiles of 64 rows one after the other along K. A scale, ue8m0, counts for 128 rows x 128 columns.
//
// A thread of the warpgroup decodes exactly the words that it multiplies (wgmma, A from registers): per 16 columns two
// words, eight codes. Their bits lie where a mask, or a shift and a mask, brings sign and magnitude of two codes into
// the fields of two bf16. What comes out is exact: code times scale is a bf16 number.
#pragma once

#include "common/hopper.cuh"
#include "common/numbers.cuh"

namespace dsv4 {

constexpr int kDenseRows = kBlockRows;
constexpr int kDenseColumns = 128;    // of K
constexpr int kDenseScaleRows = 128;  // rows, and columns, of a scale
constexpr int kDenseTileBytes = kDenseRows * kDenseColumns;

// Sign and magnitude of an e4m3 code in the fields of a bf16: its value times 2^-120, subnormals too.
constexpr uint32_t kCodeFields = 0x87F087F0u;
constexpr int kFieldsExponent = 120;
// Of the third and of the fourth pair of codes, the bits that lie in the first word.
constexpr uint32_t kThirdInFirst = 0x080F080Fu, kFourthInFirst = 0x70007000u;
constexpr int kThirdShift = 4, kFourthShift = 4, kWordsShift = 8;

// 2^120 times a scale in both halves.
__device__ __forceinline__ uint32_t code_factor(uint32_t scale) {
  const uint32_t bits = (scale + kFieldsExponent) << kBf16Mantissa;
  return bits | bits << 16;
}

// mask ? a : b, bit by bit.
template <uint32_t kMask>
__device__ __forceinline__ uint32_t either(uint32_t a, uint32_t b) {
  uint32_t x;
  asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(x) : "r"(kMask), "r"(a), "r"(b));
  return x;
}

__device__ __forceinline__ uint32_t code_pair(uint32_t fields, __nv_bfloat162 factor) {
  const uint32_t raw = fields & kCodeFields;
  const __nv_bfloat162 y = __hmul2(reinterpret_cast<const __nv_bfloat162&>(raw), factor);
  return reinterpret_cast<const uint32_t&>(y);
}

// A product's fragment: register 2 c + h has columns 8 c + 2 (lane % 4) + {0, 1} of row lane / 4 + 8 h of the
// warp's 16.
__device__ __forceinline__ void decode_codes(uint32_t first, uint32_t second, __nv_bfloat162 factor, uint32_t* a) {
  const uint32_t turned = __funnelshift_r(second, second, kWordsShift);
  const uint32_t third = either<kThirdInFirst>(first, turned), fourth = either<kFourthInFirst>(first, turned);
  a[0] = code_pair(first, factor);
  a[1] = code_pair(second, factor);
  a[2] = code_pair(third << kThirdShift, factor);
  a[3] = code_pair(__funnelshift_r(fourth, fourth, kFourthShift), factor);
}

}  // namespace dsv4
