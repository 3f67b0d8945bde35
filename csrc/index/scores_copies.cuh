// What a block of index_scores keeps in shared memory, and the warps that copy keys to it.
#pragma once

#include <cstddef>

#include "index/scores_keys.cuh"

namespace dsv4 {

template <typename Key>
constexpr int kSlotBytes = kScoreTile * (Key::kRow + kScaleBytes);

template <typename Key, int kTokens, typename BlockShape>
struct ScoreShared {
  using Shape = BlockShape;
  static constexpr int kSlots = Shape::kGroups * Key::kStages;    // tiles on their way or here
  static constexpr int kQueryBlocks = kTokens > 2 ? kTokens : 2;  // in e4m3 one a token, in bf16 two

  alignas(kGroupBytes) uint8_t queries[kQueryBlocks * kBlockBytes];
  alignas(kRowBytes) uint8_t keys[kSlots][kSlotBytes<Key>];  // codes, then scales
  uint64_t full[kSlots], empty[kSlots];
  alignas(kShiftBytes) uint8_t table[kShifts * kShiftBytes];
  float factors[kTokens * kScoreHeads];
  alignas(kChunkBytes) float weights[kTokens * kScoreHeads];  // half of them, times what a one of the products is worth
};

// An address that the compiler keeps instead of making it anew.
__device__ __forceinline__ uint32_t kept_address(const void* p) {
  uint32_t address = shared_address(p);
  asm volatile("" : "+r"(address));
  return address;
}

// Keys that are copied together: they lie in one block of the table.
__device__ __forceinline__ int copied_keys(int per_block) {
  return per_block % kScoreTile == 0 ? kScoreTile : per_block % (2 * kGroupKeys) == 0 ? 2 * kGroupKeys : kGroupKeys;
}

// A copying warp: the tiles of warpgroup `group`. `turn`: of how many the block has had before. A lane has a unit of
// 16, 32 or 64 keys.
template <typename Key, typename Shared>
__device__ __forceinline__ void copy_run(const ScoreArgs& args, Shared& s, int token, int tiles, int turn, int group,
                                         int lane) {
  constexpr int kGroups = Shared::Shape::kGroups;
  const int first = blockIdx.x * args.run_tiles * kScoreTile;
  const int per_block = args.rows_per_block;
  const int unit = copied_keys(per_block);
  const int units = kScoreTile / unit, batch = kLanes / units;  // of a tile, and tiles that the lanes have
  const int own = lane / units, part = (lane - own * units) * unit;
  const int32_t* table = args.table + static_cast<int64_t>(token) * args.columns;
  const uint32_t shared = kept_address(&s);
  int offset;
  const auto id_of = [&](int tile) {  // keys past the end of the table repeat the last unit
    const int key = min(first + tile * kScoreTile + part, args.columns * per_block - unit);
    const int column = key / per_block;
    offset = key - column * per_block;
    return __ldg(table + column);
  };
  int id = id_of(group + own * kGroups);
  uint32_t row = 0;
#pragma unroll 1
  for (int tile = group, i = 0; tile < tiles; tile += kGroups) {
    if (i == 0) {  // of a block that does not exist: the nearest, as in the reference
      row = args.base + min(max(id, 0), args.blocks - 1) * per_block + offset;
      id = id_of(tile + (batch + own) * kGroups);
    }
    const Stage slot = stage_of<Shared::kSlots>(turn + tile);
    const uint32_t bars = shared + slot.index * sizeof(uint64_t);
    barrier_wait(bars + offsetof(Shared, empty), slot.phase ^ 1);
    if (own == i) {
      const uint32_t to = shared + offsetof(Shared, keys) + slot.index * kSlotBytes<Key>;
      const uint32_t barrier = bars + offsetof(Shared, full);
      const auto* scales = static_cast<const uint8_t*>(args.scale) + uint64_t{row} * kScaleBytes;
      barrier_expect(barrier, unit * (Key::kRow + kScaleBytes));
      copy_bulk(to + part * Key::kRow, args.codes + uint64_t{row} * Key::kRow, unit * Key::kRow, barrier);
      copy_bulk(to + kScoreTile * Key::kRow + part * kScaleBytes, scales, unit * kScaleBytes, barrier);
    }
    __syncwarp();
    i = i + 1 < batch ? i + 1 : 0;
  }
}

}  // namespace dsv4
