// What the parts of attend over bf16 rows (attend/bf16_kernel.cuh) share.
#pragma once

#include "attend/combine.cuh"
#include "attend/consumers.cuh"
#include "common/bulk_copy.cuh"

namespace dsv4 {

constexpr int kMaxSplits = kMaxCluster;  // of a token
constexpr int kRowsStages = 3;           // tiles, or a token's queries, in shared memory
constexpr int kHeldSteps = 24;           // of the queries' products, whose part of the queries is in registers
constexpr int kHeldBlocks = kHeldSteps * kMmaDepth / kBlockColumns;
// Four warpgroups: two sum values, one weighs keys, one copies rows.
constexpr int kSumThreads = 2 * kWarpgroup, kRowsThreads = kSumThreads + 2 * kWarpgroup;
constexpr int kSumWarps = kSumThreads / kLanes, kWarpgroupWarps = kWarpgroup / kLanes;
constexpr int kSumRegisters = 160, kWeighRegisters = 168, kCopyRegisters = 24;  // a thread
constexpr int kCopyRows = kTile / kWarpgroupWarps;                              // of a tile, by a warp
static_assert(kSumThreads * kSumRegisters + kWarpgroup * (kWeighRegisters + kCopyRegisters) <= 65536,
              "an SM's registers");

// Hardware barriers; 0 is __syncthreads.
enum AttendRowsBarrier : int { kStatsReady = 1, kStatsFree, kSharesReady, kHeldQueries, kTileRead };  // and the next

// Sums of a split, as halves.
constexpr int kSplitBytes = kHeads * kDim * sizeof(__half);
constexpr uint32_t kWarpBlockBytes = kWarpRows * kRowBytes;  // of a warp's rows in a block of 64 columns
constexpr int kRowsInFlight = 4;                             // of a warp, where a token's output is made

struct AttendRowsArgs {
  AttendArgs attend;  // `nope` of its Rows is [rows, 512] bf16, the others are not there
  uint4* sums;    // [blocks][splits - 1][kHeads][kLanes] twice, a half each: of the splits of a token before its last
  float* scales;  // [heads * 4, pitch] if the output is e4m3 (dense/round_rows.cuh), else null
  int pitch;
};

// What the copy engine reads, in boxes of 64 columns and 16 rows.
struct RowsMaps {
  CUtensorMap queries;          // its axes: columns, heads, tokens
  CUtensorMap window, entries;  // columns, rows
};

struct RowsShared {
  alignas(1024) uint8_t keys[kRowsStages][kKeyBlocks * kBlockBytes];
  alignas(1024) uint8_t queries[(kKeyBlocks - kHeldBlocks) * kBlockBytes];  // those that are not in registers
  alignas(1024) uint8_t weights[kBlockBytes];                               // P, bf16
  float rescale[kHeads];                // factor by which a tile shrinks the sums before it
  float2 stats[kMaxSplits][kHeads];     // (row max, row sum) of a token's splits
  float2 share[kMaxSplits][kHeads];     // by which their sums enter the output: columns below 256, the others
  uint8_t unit[kMaxSplits][kHeads][2];  // of the sums: exponent of what 256 columns of a row are counted in
  alignas(8) uint8_t visible[kRowsStages][kTile / 8];  // eight keys a byte
  uint64_t full[kRowsStages], empty[kRowsStages], weighed, summed;
};
static_assert(sizeof(RowsShared) <= kSharedLimit, "more shared memory than a block can have");

// A token and 64 of its heads, which a block serves at a time, and the splits its tiles are cut into.
struct RowsUnit {
  int token, head, count, tiles, runs;

  __device__ __forceinline__ int first_tile(int run) const { return run * tiles / runs; }
};

struct RowsWork {
  int units, head_blocks, window_tiles, splits;
  Cut cut;

  __device__ __forceinline__ RowsUnit unit(const AttendArgs& args, int i) const {
    RowsUnit u;
    u.token = i / head_blocks, u.head = i % head_blocks * kHeads;
    u.count = args.entry_keys == 0 ? 0 : min(max(__ldg(args.entry_count + u.token), 0), args.entry_keys);
    // At least one, of hidden keys if there are none: what scores a token starts with its first tile.
    u.tiles = max(window_tiles + (u.count + kTile - 1) / kTile, 1);
    u.runs = min(cut.runs(u.tiles), splits);
    return u;
  }
};

// The next place of the ring of tiles, and the parity its barriers are waited with.
struct Ring {
  int index = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance() {
    if (++index == kRowsStages) index = 0, phase ^= 1;
  }
};

}  // namespace dsv4
