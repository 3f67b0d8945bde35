// Keys of index_scores on their way from shared memory to the tensor cores, decoded to bf16 or e4m3 fragments; shapes.
//
// A thread holds a quarter q of a key as 32-bit words. Product i takes four dims of every quarter: columns
// 16 i + 2 q + {0, 1} are one pair of its dims, columns 16 i + 8 + 2 q + {0, 1} another. FP8 product i takes eight:
// columns 32 i + 4 q and on are four of its dims, columns 32 i + 16 + 4 q and on the next four.
#pragma once

#include "common/bulk_copy.cuh"
#include "common/numbers.cuh"
#include "common/widths.h"
#include "index/scores_fp8.cuh"

namespace dsv4 {

constexpr int kScoreTile = kBlockRows;    // keys of a tile
constexpr int kScoreHeads = kIndexHeads;  // fewer are padded with zero weights
// How a block is made up: warpgroups that multiply, and one of warps that copy keys, each for one of the others.
// Registers change hands by warpgroups: at the start, of the copying warps, of the others.
template <int kWarpgroups, int kBlocksOfSm>
struct ScoreShape {
  static constexpr int kGroups = kWarpgroups, kBlocks = kBlocksOfSm;
  static constexpr int kWarps = kGroups * kWarpgroup / kLanes, kThreads = kGroups * kWarpgroup;  // that multiply
  static constexpr int kAllThreads = kThreads + kWarpgroup;
  static constexpr int kLaneRegisters = 512, kUnit = 8;  // of a lane in all warps of an SM's quarter
  static constexpr int kStartRegisters = kLaneRegisters / kBlocks / (kGroups + 1) / kUnit * kUnit;
  static constexpr int kCopyRegisters = 32;
  static constexpr int kRegisters = ((kGroups + 1) * kStartRegisters - kCopyRegisters) / kGroups / kUnit * kUnit;
};
using NarrowShape = ScoreShape<2, 2>;             // starts sooner
using WideShape = ScoreShape<4, 1>;               // shares queries and keys among more warps
constexpr int kGroupKeys = kWarpRows;             // keys of a warp's part of a tile; never cross a block of the table
constexpr int kSteps = 4;                         // products of a half of the dims, or of all of them in FP8
constexpr int kQuarterBytes = kFp4Bytes / kQuad;  // codes of an FP4 key that a thread has
using Fragments = Fragment[kSteps];

struct ScoreArgs {
  const uint8_t* codes;          // [rows, 64] e2m1 pairs or [rows, 128] e4m3
  const void* scale;             // [rows, 4] ue8m0 or [rows] float32
  const __nv_bfloat16* queries;  // [T, H, 128]
  const float* weights;          // [T, H], tokens `weight_stride` apart
  const int32_t* table;          // [T, X] block ids
  const int32_t* count;          // [T] visible keys
  float* scores;                 // [T, S], S = X * rows_per_block
  int tokens, heads, columns, base, rows_per_block;
  int run_tiles;  // tiles of a block of threads; 0: the launch chooses
  int weight_stride;
  float weight_scale;  // the weights are multiplied by it
  int blocks;          // from `base` to the end of the pool
};

constexpr int kScaleBytes = 4;       // of a key: four ue8m0 or one float32
constexpr int kScaleAlignment = 4;   // of row numbers: scales are copied in units of 16 bytes
constexpr int kPairs = 4;            // of eight codes
constexpr uint32_t kFp4Shift = 126;  // the bits of a code, in the fields of a wider number, are its value times 2^-126
constexpr uint32_t kMaxField = 2 * kBias;  // of the exponent of a finite number

// Eight e2m1 codes -> four pairs of bf16 (codes i and i + 4). A code's bits, moved into the bf16 fields, are its value
// times 2^-126 (subnormals too); `factor` undoes that and applies the scale.
__device__ __forceinline__ void decode_fp4(uint32_t x, __nv_bfloat162 factor, uint32_t (&out)[kPairs]) {
  constexpr uint32_t kSign = 0x80008000u, kRest = 0x01C001C0u;
  const uint32_t raw[4] = {(x << 12 & kSign) | (x << 6 & kRest), (x << 8 & kSign) | (x << 2 & kRest),
                           (x << 4 & kSign) | (x >> 2 & kRest), (x & kSign) | (x >> 6 & kRest)};
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const __nv_bfloat162 y = __hmul2(reinterpret_cast<const __nv_bfloat162&>(raw[i]), factor);
    out[i] = reinterpret_cast<const uint32_t&>(y);
  }
}

constexpr uint32_t kFirstTwo = 0x1800, kLastTwo = 0x3A22;
// Two e4m3 codes as bf16; `kSelect` picks the bytes: any, code 0, the sign of code 0 eight times, code 1.
template <uint32_t kSelect>
__device__ __forceinline__ uint32_t decode_fp8(uint32_t x) {
  constexpr uint32_t kFields = 0x87F087F0u;  // sign, and code in the exponent and mantissa
  uint32_t y;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(y) : "r"(x), "n"(kSelect));
  y = static_cast<uint32_t>(static_cast<int32_t>(y) >> 4) & kFields;
  const uint32_t bits = 0x7B807B80u;  // 2^120, twice
  const __nv_bfloat162 z =
      __hmul2(reinterpret_cast<const __nv_bfloat162&>(y), reinterpret_cast<const __nv_bfloat162&>(bits));
  return reinterpret_cast<const uint32_t&>(z);
}

__device__ __forceinline__ uint32_t load_shared_byte(uint32_t address) {
  uint32_t x;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}

// The low (half 0) or high halves of two words, side by side.
__device__ __forceinline__ uint32_t halves(uint32_t low, uint32_t high, int half) {
  return __byte_perm(low, high, half == 0 ? 0x5410 : 0x7632);
}

// A thread's share of two keys, `row` and `row + 8`: a quarter of the dims each. Part p of a quarter of a query, 8
// dims, goes to products 2 p and 2 p + 1; `query_chunk` says which 8 dims, `query_pairs` in what order.
struct Fp4Key {
  // Dims 32 q + 8 p and on: the key's word p, whose codes i and i + 4 decode as a pair.
  static __device__ __forceinline__ int query_chunk(int quarter, int part) { return 4 * quarter + part; }
  static __device__ __forceinline__ uint4 query_pairs(uint4 x) {
    return {halves(x.x, x.z, 0), halves(x.x, x.z, 1), halves(x.y, x.w, 0), halves(x.y, x.w, 1)};
  }

  static constexpr int kRow = kFp4Bytes, kStages = 8;  // tiles of a warpgroup on their way or in shared memory
  static constexpr bool kTable = true;                 // decoding takes one

  uint4 codes[2];
  uint32_t scale[2];  // ue8m0 of this quarter

  // Of the warp's 16 keys of the tile at `from`.
  __device__ __forceinline__ void fetch(uint32_t from, int warp, int lane) {
    const uint32_t own = from + warp * kGroupKeys * kRow + lane * kQuarterBytes;
    const uint32_t scales = from + kScoreTile * kRow + warp * kGroupKeys * kScaleBytes + lane;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      codes[i] = load_shared(own + kLowerRow * kRow * i);
      scale[i] = load_shared_byte(scales + kLowerRow * kScaleBytes * i);
    }
  }

  // Fragments of the four products of one half.
  template <int kHalf>
  __device__ __forceinline__ void decode(Fragments& a) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // 2^126 times the scale, up to 2^127; 0 for the scale 0 of a row never written.
      const uint32_t exponent = scale[i] == 0 ? 0 : min(scale[i] + kFp4Shift, kMaxField);
      const uint32_t factor = exponent << kBf16Mantissa | exponent << kFloatMantissa;
      const uint32_t words[2] = {kHalf == 0 ? codes[i].x : codes[i].z, kHalf == 0 ? codes[i].y : codes[i].w};
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        uint32_t pairs[kPairs];
        decode_fp4(words[w], reinterpret_cast<const __nv_bfloat162&>(factor), pairs);
#pragma unroll
        for (int p = 0; p < kPairs; ++p) a[2 * w + (p >> 1)][2 * (p & 1) + i] = pairs[p];
      }
    }
    if (__any_sync(kAllLanes, max(scale[0], scale[1]) > kMaxField - kFp4Shift)) large_scales(a);
  }

  // Scales above 2, and the NaN scale: a second exact factor.
  __device__ __forceinline__ void large_scales(Fragments& a) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t bits = scale[i] == kUe8m0NaN ? kBf16NaN : (max(scale[i], kMaxField - kFp4Shift) - 1) << kBf16Mantissa;
      bits |= bits << 16;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          uint32_t& x = a[s][2 * j + i];
          const __nv_bfloat162 y =
              __hmul2(reinterpret_cast<const __nv_bfloat162&>(x), reinterpret_cast<const __nv_bfloat162&>(bits));
          x = reinterpret_cast<const uint32_t&>(y);
        }
      }
    }
  }

  // Factor left to apply to the score of key `row + 8 i`.
  __device__ __forceinline__ float rest(int) const { return 1.f; }

  static constexpr float kE4m3Unit = 0x1p-6f;  // what an e4m3 one is worth under the largest group scale 1

  // Fragments of the four FP8 products. `most`: the larger group scale of key i, in half i, of the four quarters.
  __device__ __forceinline__ void decode_e4m3(Fragments& a, uint32_t table, uint32_t most) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t shift = min((i == 0 ? most & 0xFFFF : most >> 16) - scale[i], kShifts - 1u);
      const uint2 entry = load_shared2(table + kShiftBytes * shift);
      const uint32_t words[4] = {codes[i].x, codes[i].y, codes[i].z, codes[i].w};
#pragma unroll
      for (int w = 0; w < kSteps; ++w) {
        const uint2 y = decode_fp4_e4m3(words[w], entry);
        a[w][i] = y.x;
        a[w][2 + i] = y.y;
      }
    }
  }

  __device__ __forceinline__ uint32_t largest_scales() const {
    uint32_t most = scale[0] | scale[1] << 16;
    most = __vmaxu2(most, __shfl_xor_sync(kAllLanes, most, 1));
    return __vmaxu2(most, __shfl_xor_sync(kAllLanes, most, 2));
  }

  // Factor of the score of key `row + 8 i`: 0 for a row never written, NaN if a group's scale is.
  __device__ __forceinline__ float rest_e4m3(int i, uint32_t most) const {
    const uint32_t code = most >> (16 * i) & 0xFFFF;
    return __uint_as_float(code == kUe8m0NaN ? kFloatNaN : code << kFloatMantissa);
  }
};

struct Fp8Key {
  static constexpr float kE4m3Unit = 1.f;

  // Dims 64 (p / 2) + 16 q + 8 (p % 2) and on: two words of the key, neighbours pair up.
  static __device__ __forceinline__ int query_chunk(int quarter, int part) {
    return 8 * (part >> 1) + 2 * quarter + (part & 1);
  }
  static __device__ __forceinline__ uint4 query_pairs(uint4 x) { return x; }

  static constexpr int kRow = kIndexDim, kStages = 4;
  static constexpr bool kTable = false;

  uint4 codes[2][2];
  float scale[2];

  __device__ __forceinline__ void fetch(uint32_t from, int warp, int lane) {
    const int row = warp * kGroupKeys + quad_of(lane);
    const uint32_t own = from + row * kRow + kChunkBytes * quad_lane(lane);
    const uint32_t scales = from + kScoreTile * kRow + row * kScaleBytes;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      codes[i][0] = load_shared(own + kLowerRow * kRow * i);
      codes[i][1] = load_shared(own + kLowerRow * kRow * i + kRow / 2);
      scale[i] = __uint_as_float(load_shared1(scales + kLowerRow * kScaleBytes * i));
    }
  }

  template <int kHalf>
  __device__ __forceinline__ void decode(Fragments& a) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 x = codes[i][kHalf];
      const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int w = 0; w < kSteps; ++w) {
        a[w][i] = decode_fp8<kFirstTwo>(words[w]);
        a[w][2 + i] = decode_fp8<kLastTwo>(words[w]);
      }
    }
  }

  // Fragments of the four FP8 products: the codes themselves. A NaN among them makes the sum NaN.
  __device__ __forceinline__ void decode_e4m3(Fragments& a, uint32_t, uint32_t) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 x = codes[i][half];
        a[2 * half][i] = x.x, a[2 * half][2 + i] = x.y;
        a[2 * half + 1][i] = x.z, a[2 * half + 1][2 + i] = x.w;
      }
    }
  }
  __device__ __forceinline__ uint32_t largest_scales() const { return 0; }
  __device__ __forceinline__ float rest_e4m3(int i, uint32_t) const { return i == 0 ? scale[0] : scale[1]; }

  static constexpr uint32_t kMagnitudes = 0x7F7F7F7F, kOnePerByte = 0x01010101;

  // A NaN code makes its key's score NaN.
  __device__ __forceinline__ float rest(int i) const {
    uint32_t nan[2] = {};  // of the two keys
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 x = codes[j][half];
        const auto carry = [](uint32_t w) { return (w & kMagnitudes) + kOnePerByte; };
        nan[j] |= carry(x.x) | carry(x.y) | carry(x.z) | carry(x.w);
      }
    }
    uint32_t any = (i == 0 ? nan[0] : nan[1]) | __shfl_xor_sync(kAllLanes, i == 0 ? nan[1] : nan[0], 1);
    any |= __shfl_xor_sync(kAllLanes, any, 2);
    return (any & ~kMagnitudes) != 0 ? __uint_as_float(kFloatNaN) : i == 0 ? scale[0] : scale[1];
  }
};

}  // namespace dsv4
