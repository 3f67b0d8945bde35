// What the parts of attend for few tokens (attend/wide_kernel.cuh) share: sizes, the layout of shared memory, messages.
#pragma once

#include "attend/block.cuh"

namespace dsv4 {

constexpr int kWideThreads = 4 * kWarpgroup, kWideWarps = kWideThreads / kLanes;
constexpr int kMaxUnits = 65535;               // tokens x blocks of heads: of a grid's last two dimensions
constexpr int kStepKeys = kMmaDepth;           // keys of a step: of one product with the values
constexpr int kTileSteps = kTile / kStepKeys;  // of a tile
constexpr int kOwnSteps = 5;                   // that a block scores in a round, at most: of two tiles
constexpr int kOwnKeys = kOwnSteps * kStepKeys;
constexpr int kOwnBlockBytes = kOwnKeys * kRowBytes;       // of 64 columns of them
constexpr int kScoreCells = kOwnKeys / kCellColumns;       // of a lane's logits
constexpr int kStepCells = kStepKeys / kCellColumns;       // those of a step
constexpr int kQuads = kWarpgroup / kQuad;                 // of a warpgroup: each has rows r and r + 8
constexpr int kSliceCells = kBlockColumns / kCellColumns;  // of a lane's sums of a slice of 64 columns
constexpr int kSliceWords = 2 * kSliceCells;               // as halves, two to a word: of row r, then of r + 8
constexpr int kSliceVectors = kSliceWords / 4;
constexpr int kHalfSlices = kHalf / kBlockColumns;  // of the columns that share a unit

// Hardware barriers; 0 is __syncthreads.
enum WideBarrier : int { kKeysReady = 1, kValuesReady, kTopsRead, kRescalesReady };

// A cluster of eight blocks: `kBlocks` share a split, its keys and then its columns.
template <int kBlocks>
struct WideShared {
  static constexpr int kSplits = kMaxCluster / kBlocks;           // of a cluster
  static constexpr int kSlices = kDim / kBlockColumns / kBlocks;  // of columns, of a block: a warpgroup each
  static constexpr int kTiles = kBlocks == 4 ? 5 : 9;             // of a round
  static constexpr int kSteps = kTiles * kTileSteps, kKeys = kTiles * kTile;
  static_assert(kSteps <= kOwnSteps * kBlocks, "every step has a block");

  // In place of the keys once all blocks of the split have scored theirs.
  struct Weighed {
    uint4 weights[kSteps][kWarpgroup];  // P, bf16: of a step, as fragments
    uint4 chain[kWarpgroup];            // (total, total, sum, sum) of rows r and r + 8, from the block before
    float rescale[kTiles][kHeads];      // factor by which a tile shrinks the sums before it
    float2 most[kHalfSlices][kQuads];   // of the sums of a slice: of rows r and r + 8
  };
  // In place of the queries once all blocks of the cluster have scored all their keys.
  struct Summed {
    uint4 words[kSplits][kSliceVectors][kWarpgroup];  // of the other splits
    uint32_t units[kSplits][kWarpgroup];              // two bytes: exponents of rows r and r + 8
    float4 stats[kSplits][kQuads];                    // (row max, row sum) of rows r and r + 8
  };
  union {
    alignas(1024) uint8_t queries[kKeyBlocks * kBlockBytes];
    Summed summed;
  };
  union {
    alignas(1024) uint8_t keys[kKeyBlocks][kOwnBlockBytes];
    Weighed weighed;
  };
  alignas(1024) uint8_t values[kSlices][kKeys * kRowBytes];
  float4 tops[kBlocks][kQuads];     // of a block's first tile and the next: row r's two, then row r + 8's
  int ids[kOwnKeys];                // row ids of its keys, -1: none
  alignas(16) uint16_t visible[8];  // of a step: sixteen keys
  // Messages of the blocks have come.
  uint64_t tops_in, weights_in, chain_in, most_in, stats_in, words_in;
};
static_assert(sizeof(WideShared<4>) <= kSharedLimit && sizeof(WideShared<8>) <= kSharedLimit, "too much shared memory");

// The steps of a round that a block scores.
template <int kBlocks>
struct WideRound {
  int first, tiles;  // the token's

  // Round i of so many of a split.
  static __device__ __forceinline__ WideRound of(Split x, int i, int rounds) {
    const int tiles = x.last - x.first, first = i * tiles / rounds;
    return {x.first + first, (i + 1) * tiles / rounds - first};
  }
  __device__ __forceinline__ int first_step(int block) const { return block * tiles * kTileSteps / kBlocks; }
  __device__ __forceinline__ int first_tile(int block) const { return over<kTileSteps>(first_step(block)); }
};

// A barrier of the cluster in two: shared memory written before the first is seen by all blocks after the second.
__device__ __forceinline__ void arrive_in_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait_for_cluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Waits for messages of other blocks.
__device__ __forceinline__ void messages_wait(uint64_t& barrier, uint32_t parity) {
  asm volatile(
      "{.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;}" ::"r"(shared_address(&barrier)),
      "r"(parity)
      : "memory");
}

// Stores 16, 8 or 4 bytes in the shared memory of block `rank`, where `to` is here, and counts them at its `barrier`.
__device__ __forceinline__ void send(int rank, const void* to, uint4 x, const uint64_t& barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                   peer_address(shared_address(to), rank)),
               "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(peer_address(shared_address(&barrier), rank))
               : "memory");
}
__device__ __forceinline__ void send(int rank, const void* to, float2 x, const uint64_t& barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(
                   peer_address(shared_address(to), rank)),
               "r"(__float_as_uint(x.x)), "r"(__float_as_uint(x.y)), "r"(peer_address(shared_address(&barrier), rank))
               : "memory");
}
__device__ __forceinline__ void send(int rank, const void* to, uint32_t x, const uint64_t& barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
                   peer_address(shared_address(to), rank)),
               "r"(x), "r"(peer_address(shared_address(&barrier), rank))
               : "memory");
}
__device__ __forceinline__ uint4 as_words(float a, float b, float c, float d) {
  return {__float_as_uint(a), __float_as_uint(b), __float_as_uint(c), __float_as_uint(d)};
}

}  // namespace dsv4
