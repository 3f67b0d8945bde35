// Packed FP4 expert weights (dsv4_jax/formats/weights/fp4.py makes them): tiles of 64 rows x 128 columns of K, 4,096
// bytes of codes and 256 of scales, the tiles of 64 rows one after the other along K.
//
// A thread of the warpgroup decodes exactly the words that it multiplies (wgmma, A from registers): per 32 columns two
// words, 16 codes, and two scales. The bits of the codes lie where a rotation brings sign and magnitude of two codes at
// once into the fields of two bf16: three pairs in each word, and two in the bits that both words have left.
// What comes out is exact: code times scale is a bf16 number.
#pragma once

#include "common/hopper.cuh"

namespace dsv4 {

constexpr int kWeightRows = kBlockRows;
constexpr int kWeightGroup = 32;     // columns of a scale
constexpr int kWeightColumns = 128;  // of K
constexpr int kCodeBytes = kWeightRows * kWeightColumns / 2;
constexpr int kTileBytes = kCodeBytes + kWeightRows * kWeightColumns / kWeightGroup;

// Sign and magnitude of a code in the fields of a bf16: its value times 2^-126, subnormals too.
constexpr uint32_t kPairBits = 0x81C081C0u;
constexpr uint32_t kLeftBits = 0x60306030u;  // of the first word that belong to the two last pairs

// Two codes times one of the two factors, bf16, of `factors`.
template <int kRotation, int kFactor>
__device__ __forceinline__ uint32_t weight_pair(uint32_t word, __nv_bfloat162 factors) {
  const uint32_t raw = (kRotation == 0 ? word : __funnelshift_r(word, word, kRotation)) & kPairBits;
  const __nv_bfloat162 y = __hmul2(reinterpret_cast<const __nv_bfloat162&>(raw),
                                   kFactor == 0 ? __low2bfloat162(factors) : __high2bfloat162(factors));
  return reinterpret_cast<const uint32_t&>(y);
}

// 2^126 times the scales of group `kGroup` of 32 columns, of the thread's rows lane / 4 and + 8.
template <int kGroup>
__device__ __forceinline__ __nv_bfloat162 weight_factors(uint32_t scales) {
  constexpr int kNextGroup = 8;  // a rotation
  constexpr uint32_t kExponentFields = 0x7F807F80;
  const uint32_t fields = (kGroup == 0 ? scales : __funnelshift_r(scales, scales, kNextGroup)) & kExponentFields;
  return reinterpret_cast<const __nv_bfloat162&>(fields);
}

constexpr int kTwoFragments = 2 * kFragment;
// Two products' fragments: register 2 c + h of product s has columns 16 s + 8 c + 2 (lane % 4) + {0, 1} of row
// lane / 4 + 8 h of the warp's 16.
__device__ __forceinline__ void decode_weights(uint32_t w0, uint32_t w1, __nv_bfloat162 factors,
                                               uint32_t (&a)[kTwoFragments]) {
  uint32_t rest;  // kLeftBits ? w0 : w1
  asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(rest) : "r"(kLeftBits), "r"(w0), "r"(w1));
  a[0] = weight_pair<0, 0>(w0, factors);
  a[1] = weight_pair<4, 1>(w0, factors);
  a[2] = weight_pair<10, 0>(w0, factors);
  a[3] = weight_pair<8, 1>(rest, factors);
  a[4] = weight_pair<2, 0>(w1, factors);
  a[5] = weight_pair<6, 1>(w1, factors);
  a[6] = weight_pair<12, 0>(w1, factors);
  a[7] = weight_pair<14, 1>(rest, factors);
}

}  // namespace dsv4
