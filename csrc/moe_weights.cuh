// Packed FP4 expert weights (dsv4_jax/cuda/expert_weights.py makes them): tiles of 64 rows x 128 columns of K, 4,096 bytes
// of codes and 256 of scales, the tiles of 64 rows one after the other along K.
//
// A thread of the warpgroup decodes exactly the words that it multiplies (wgmma, A from registers): per 32 columns two
// words, 16 codes, and two scales. The bits of the codes lie where a rotation brings sign and magnitude of two codes at
// once into the fields of two bf16: three pairs in each word, and two in the bits that both words have left.
// What comes out is exact: code times scale is a bf16 number.
#pragma once

#include "hopper.cuh"

namespace dsv4 {

constexpr int kWeightRows = 64;
constexpr int kWeightColumns = 128;  // of K
constexpr int kCodeBytes = kWeightRows * kWeightColumns / 2;
constexpr int kTileBytes = kCodeBytes + kWeightRows * kWeightColumns / 32;

// Sign and magnitude of a code in the fields of a bf16: its value times 2^-126, subnormals too.
constexpr uint32_t kPairBits = 0x81C081C0u;
constexpr uint32_t kLeftBits = 0x60306030u;  // of the first word that belong to the two last pairs

__device__ __forceinline__ uint32_t weight_pair(uint32_t word, int rotation, uint32_t factor) {
  const uint32_t raw = (rotation == 0 ? word : __funnelshift_r(word, word, rotation)) & kPairBits;
  const __nv_bfloat162 y =
      __hmul2(reinterpret_cast<const __nv_bfloat162&>(raw), reinterpret_cast<const __nv_bfloat162&>(factor));
  return reinterpret_cast<const uint32_t&>(y);
}

// Two products' fragments: register 2 c + h of product s has columns 16 s + 8 c + 2 (lane % 4) + {0, 1} of row
// lane / 4 + 8 h of the warp's 16. `scales`: a byte per h of each group, exponent
// fields of 2^126 times the scale.
template <int kGroup>
__device__ __forceinline__ void decode_weights(uint32_t w0, uint32_t w1, uint32_t scales, uint32_t* a) {
  const uint32_t low = __byte_perm(scales, 0, 0x4440 + 2 * kGroup) * 0x00800080u;
  const uint32_t high = __byte_perm(scales, 0, 0x4441 + 2 * kGroup) * 0x00800080u;
  uint32_t rest;  // kLeftBits ? w0 : w1
  asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(rest) : "r"(kLeftBits), "r"(w0), "r"(w1));
  a[0] = weight_pair(w0, 0, low);
  a[1] = weight_pair(w0, 4, high);
  a[2] = weight_pair(w0, 10, low);
  a[3] = weight_pair(rest, 8, high);
  a[4] = weight_pair(w1, 2, low);
  a[5] = weight_pair(w1, 6, high);
  a[6] = weight_pair(w1, 12, low);
  a[7] = weight_pair(rest, 14, high);
}

}  // namespace dsv4
