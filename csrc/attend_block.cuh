// What the parts of attend (attend_kernel.cuh) share: sizes, arguments, the layout of shared memory.
#pragma once

#include "hopper.cuh"

namespace dsv4 {

constexpr int kTile = 64;    // keys of a tile
constexpr int kHeads = 64;   // heads of a block
constexpr int kDim = 512;    // 448 NoPE + 64 RoPE
constexpr int kNope = 448;
constexpr int kRope = 64;
constexpr int kScales = 8;   // scale bytes of a row
constexpr int kThreads = 512;
constexpr int kProducerWarps = 8;
constexpr int kRowsPerWarp = kTile / kProducerWarps;
constexpr int kWeightsThere = 1, kWeightsFree = 2, kQueriesThere = 3;  // hardware barriers of the consumers
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kInf = __builtin_huge_valf();

struct Rows {
  const uint8_t* nope;   // [rows, 448] e4m3
  const uint16_t* rope;  // [rows, 64] bf16
  const uint8_t* scale;  // [rows, 8] ue8m0, one per 64 NoPE dims
  int rows;
};

struct AttendArgs {
  const __nv_bfloat16* queries;  // [T, H, 512]
  const float* sink;             // [H]
  Rows window, entries;
  const int32_t* window_ids;      // [T, W]
  const uint8_t* window_visible;  // [T, W]
  const int32_t* entry_ids;       // [T, K]
  const int32_t* entry_count;     // [T]
  void* out;                      // [T, H, 512] float32, or bfloat16 if `bf16_out`
  float* lse;                     // [T, H]
  int tokens, heads, window_keys, entry_keys;
  float scale_log2;     // softmax scale * log2(e)
  const float* cosine;  // [T, 32]: the last 64 dims of the output turn back by these angles; null: they do not
  const float* sine;    // [T, 32]
  int bf16_out;
};

struct Shared {
  alignas(1024) uint8_t queries[8 * kBlockBytes];  // after the last tile: the block's __half [64][512] sums
  alignas(1024) uint8_t keys[2][8 * kBlockBytes];
  alignas(1024) uint8_t weights[kBlockBytes];  // P, bf16
  uint8_t codes[kProducerWarps][3][2][32][16];    // rows on their way: [warp][slot][groups 0-3 or 4-6][lane]
  float keep[kHeads];                             // factor by which a tile shrinks the sums before it
  float2 stats[kHeads];                           // (top, total) of this block's run
  float sink[kHeads];
  uint8_t unit[kHeads][2];                        // of the sums: exponent of what 256 columns of a row are counted in
  alignas(8) uint8_t visible[2][kProducerWarps];  // eight keys a byte
  uint64_t full[2], empty[2];
  int rank, token, head;  // of this block: for the merge, so that they take no register before
};
static_assert(sizeof(Shared) <= 227 * 1024, "more shared memory than a block can have");

// Accumulator of a 64 x N product: this lane holds, of rows r and r + 8 (r = 16 * warp + lane / 4), columns
// 8 j + 2 (lane % 4) + {0, 1} as d[4 j + {0, 1}] and d[4 j + {2, 3}].
using Sums = float[2][64];  // of 64 rows x 256 columns: two accumulators of 128 columns

__device__ __forceinline__ uint32_t pack(float lo, float hi) {
  const __nv_bfloat162 x = __floats2bfloat162_rn(lo, hi);
  return reinterpret_cast<const uint32_t&>(x);
}

}  // namespace dsv4
