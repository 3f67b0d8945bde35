// What the parts of attend (attend/kernel.cuh) share: sizes, arguments, the layout of shared memory.
#pragma once

#include "common/hopper.cuh"
#include "common/numbers.cuh"
#include "common/widths.h"

namespace dsv4 {

constexpr int kTile = kBlockRows;                 // keys of a tile
constexpr int kHeads = kBlockRows;                // heads of a block
constexpr int kKeyBlocks = kDim / kBlockColumns;  // of 64 columns, of a tile
constexpr int kHalf = kDim / 2;                   // columns of the output that a consumer warpgroup sums
constexpr int kStages = 2;                        // tiles in shared memory

constexpr int kConsumerThreads = 2 * kWarpgroup, kProducerThreads = 2 * kWarpgroup;
constexpr int kThreads = kConsumerThreads + kProducerThreads;
constexpr int kConsumerWarps = kConsumerThreads / kLanes, kProducerWarps = kProducerThreads / kLanes;
constexpr int kConsumerRegisters = 192, kProducerRegisters = 64;  // a thread
constexpr int kRowsPerWarp = kTile / kProducerWarps;
constexpr int kSlots = 3;  // pairs of rows that a producer warp has on their way
static_assert(kConsumerThreads * kConsumerRegisters + kProducerThreads * kProducerRegisters <= 65536,
              "an SM's registers");

// Hardware barriers of the consumers; 0 is __syncthreads.
enum AttendBarrier : int { kWeightsReady = 1, kWeightsFree, kQueriesReady };

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
  uint4* sums;  // of splits with clusters of their own (attend/wide_combine.cuh), else unused
};

struct Shared {
  alignas(1024) uint8_t queries[kKeyBlocks * kBlockBytes];  // after the last tile: the block's __half [64][512] sums
  alignas(1024) uint8_t keys[kStages][kKeyBlocks * kBlockBytes];
  alignas(1024) uint8_t weights[kBlockBytes];  // P, bf16
  // Rows on their way: [warp][slot][groups 0-3 or 4-6][lane].
  uint8_t codes[kProducerWarps][kSlots][2][kLanes][kChunkBytes];
  float rescale[kHeads];  // factor by which a tile shrinks the sums before it
  float2 stats[kHeads];   // (row max, row sum) of this block's split
  float sink[kHeads];
  uint8_t unit[kHeads][2];  // of the sums: exponent of what 256 columns of a row are counted in
  alignas(8) uint8_t visible[kStages][kProducerWarps];  // eight keys a byte
  uint64_t full[kStages], empty[kStages];
  int rank, token, head;  // of this block: for the combine, so that they take no register before
};
static_assert(sizeof(Shared) <= kSharedLimit, "more shared memory than a block can have");

// How a token's tiles are cut into splits: of up to `most` tiles, and at least `least` splits or one a tile.
struct Cut {
  int most, least;

  __host__ __device__ constexpr int runs(int tiles) const {
    const int few = tiles < least ? tiles : least, many = (tiles + most - 1) / most;
    const int runs = few < many ? many : few;
    return runs < 1 ? 1 : runs;
  }
};

// A block's tiles [first, last) of its token's keys.
struct Split {
  int first, last;
};

// The sums of 64 rows x 256 columns: two accumulators of 128 columns.
using Sums = Accumulator<2 * kBlockColumns>[2];

__device__ __forceinline__ uint32_t pack(float lo, float hi) {
  const __nv_bfloat162 x = __floats2bfloat162_rn(lo, hi);
  return reinterpret_cast<const uint32_t&>(x);
}

}  // namespace dsv4
