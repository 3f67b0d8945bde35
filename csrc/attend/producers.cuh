// The producers of attend (attend/kernel.cuh): rows from the pools to bf16 tiles in shared memory.
#pragma once

#include <cuda_fp16.h>

#include "attend/block.cuh"

namespace dsv4 {

// Two e4m3 codes (in the low half, or the high one) times their scale as bf16: by way of half and float, conversions
// that are exact and keep NaN.
template <bool kHigh>
__device__ __forceinline__ uint32_t decode(uint32_t codes, __nv_bfloat162 scale) {
  uint32_t halves;
  if constexpr (kHigh) {
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, high;}" : "=r"(halves) : "r"(codes));
  } else {
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, low;}" : "=r"(halves) : "r"(codes));
  }
  const float2 x = __half22float2(reinterpret_cast<const __half2&>(halves));
  const __nv_bfloat162 y = __hmul2(__floats2bfloat162_rn(x.x, x.y), scale);
  return reinterpret_cast<const uint32_t&>(y);
}

// Sixteen codes with one scale, as two 16-byte chunks at `address` and its swizzle partner.
__device__ __forceinline__ void store_codes(uint32_t address, uint4 x, __nv_bfloat162 scale) {
  store_shared(address, {decode<false>(x.x, scale), decode<true>(x.x, scale), decode<false>(x.y, scale),
                         decode<true>(x.y, scale)});
  store_shared(address ^ kChunkBytes, {decode<false>(x.z, scale), decode<true>(x.z, scale), decode<false>(x.w, scale),
                                       decode<true>(x.w, scale)});
}

// The scale 2^(code - 127) in byte `group` of a word of ue8m0 codes, in both halves.
__device__ __forceinline__ __nv_bfloat162 scale_of(uint32_t codes, int group) {
  constexpr uint32_t kZeroBelow = 0x0404;  // in both halves a zero byte below the one picked
  const uint32_t bits = __byte_perm(codes, 0, kZeroBelow | group << 4 | group << 12) >> 1;
  return reinterpret_cast<const __nv_bfloat162&>(bits);
}

// A warp copies two rows at once: a lane 16 codes of one of the first four groups and, below kUpperLanes, of another.
constexpr int kUpperGroups = 4, kUpperLanes = (kNope / kScaleGroup - kUpperGroups) * kSwizzle;
constexpr uint32_t kUpperSlot = kLanes * kChunkBytes, kSlotBytes = 2 * kUpperSlot;
constexpr uint32_t kOnes = 0x7F7F7F7F;  // four scales of one
__device__ __forceinline__ int pair_row(int lane) { return over<kQuad>(lane) & 1; }

// One producer warp: rows [8 warp, 8 warp + 8) of every tile; lane l knows the id and scales of row l % 8.
struct Producer {
  const AttendArgs& args;
  int token, count, window_tiles, warp, lane;

  __device__ __forceinline__ const Rows& rows(int tile) const {
    return tile < window_tiles ? args.window : args.entries;
  }

  // Of this lane's key in a tile.
  __device__ __forceinline__ int place() const { return warp * kRowsPerWarp + within<kRowsPerWarp>(lane); }

  // The id of this lane's key as stored and whether it is seen. Loads only, and without a look at the count: `row_of`
  // judges them later.
  __device__ __forceinline__ int2 load_key(int tile) const {
    if (tile < window_tiles) {
      const int key = tile * kTile + place();
      if (key >= args.window_keys) return {0, 0};
      const int64_t at = static_cast<int64_t>(token) * args.window_keys + key;
      return {__ldg(args.window_ids + at), __ldg(args.window_visible + at)};
    }
    const int key = (tile - window_tiles) * kTile + place();
    if (key >= args.entry_keys) return {0, 0};
    return {__ldg(args.entry_ids + static_cast<int64_t>(token) * args.entry_keys + key), 1};
  }

  // Row id of a key, -1 if it is none; an id past the pool reads its last row, as in the reference.
  __device__ __forceinline__ int row_of(int tile, int2 key) const {
    const bool counted = (tile - window_tiles) * kTile + place() < count;
    return key.y != 0 && counted ? min(max(key.x, 0), rows(tile).rows - 1) : -1;
  }

  __device__ __forceinline__ uint2 load_scale(int tile, int id) const {
    if (id < 0) return {kOnes, kOnes};
    return __ldg(reinterpret_cast<const uint2*>(rows(tile).scale + static_cast<int64_t>(id) * kScales));
  }

  // Starts the copy of two rows, 2 pair and 2 pair + 1, into a slot. A lane copies what it will convert: 16 codes of
  // group l / 8 and 16 of group 4 + l / 8 (lanes 24-31: none), of row l / 4 % 2 of the two, quarter l % 4.
  __device__ __forceinline__ void copy_codes(uint32_t slot, int tile, int id, int pair) const {
    const int row = __shfl_sync(kAllLanes, id, pair * 2 + pair_row(lane));
    const uint8_t* p = rows(tile).nope + static_cast<int64_t>(max(row, 0)) * kNope +
                       over<kSwizzle>(lane) * kScaleGroup + quad_lane(lane) * kChunkBytes;
    copy_async(slot, p, row >= 0);
    if (lane < kUpperLanes) copy_async(slot + kUpperSlot, p + kUpperGroups * kScaleGroup, row >= 0);
  }

  // Converts the codes of a slot. A quarter-warp writes eight chunks of two neighbouring rows: with the swizzle, eight
  // different bank groups.
  __device__ __forceinline__ void store_pair(uint32_t keys, uint32_t slot, uint2 scale, int pair) const {
    const int sub = pair * 2 + pair_row(lane), group = over<kSwizzle>(lane);
    const uint32_t low = __shfl_sync(kAllLanes, scale.x, sub), high = __shfl_sync(kAllLanes, scale.y, sub);
    const uint32_t block = keys + group * kBlockBytes + warp * kRowsPerWarp * kRowBytes;
    const uint32_t address = block + sub * kRowBytes + ((quad_lane(lane) * 2 ^ sub) * kChunkBytes);
    const uint4 x = load_shared(slot);
    store_codes(address, x, scale_of(low, group));
    if (lane < kUpperLanes) {
      store_codes(address + kUpperGroups * kBlockBytes, load_shared(slot + kUpperSlot), scale_of(high, group));
    }
  }

  __device__ __forceinline__ void copy_rope(uint32_t keys, int tile, int id) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int sub = i * kQuad + over<kSwizzle>(lane), from = __shfl_sync(kAllLanes, id, sub);
      const uint32_t address = keys + (kKeyBlocks - 1) * kBlockBytes + (warp * kRowsPerWarp + sub) * kRowBytes +
                               swizzled(within<kSwizzle>(lane), sub);
      copy_async(address,
                 rows(tile).rope + static_cast<int64_t>(max(from, 0)) * kRope + within<kSwizzle>(lane) * kChunkColumns,
                 from >= 0);
    }
  }
};

// `key` and `next_key` are those of the tiles `guess` and the one after: loaded before the split was known.
__device__ __forceinline__ void produce(const Producer& p, Shared& s, Split run, int guess, int2 key, int2 next_key) {
  const auto [first, last] = run;
  if (first >= last) return;
  const int2 none = {0, 0};
  if (first != guess) key = p.load_key(first), next_key = p.load_key(first + 1);
  if (first + 1 == last) next_key = none;
  int id = p.row_of(first, key);
  uint2 scale = p.load_scale(first, id);
  const uint32_t slots = shared_address(s.codes[p.warp][0][0][p.lane]);
  p.copy_codes(slots, first, id, 0);
  copy_commit();
  p.copy_codes(slots + kSlotBytes, first, id, 1);
  copy_commit();
  p.copy_codes(slots + 2 * kSlotBytes, first, id, 2);
  copy_commit();
  uint32_t slot = slots;
  int next_id = p.row_of(first + 1, next_key);
  for (int tile = first; tile < last; ++tile) {
    const Stage stage = stage_of<kStages>(tile - first);
    const uint32_t keys = shared_address(s.keys[stage.index]);
    const uint2 next_scale = p.load_scale(tile + 1, next_id);
    key = tile + 2 < last ? p.load_key(tile + 2) : none;
    const uint32_t seen = __ballot_sync(kAllLanes, id >= 0);
    barrier_wait(shared_address(&s.empty[stage.index]), stage.phase ^ 1);
    p.copy_rope(keys, tile, id);  // joins the first group committed below: there before the last pair is converted
    if (p.lane == 0) s.visible[stage.index][p.warp] = static_cast<uint8_t>(seen);
#pragma unroll
    for (int pair = 0; pair < kRowsPerWarp / 2; ++pair) {  // three pairs are on their way while one is converted
      copy_wait<kSlots - 1>();
      p.store_pair(keys, slot, scale, pair);
      if (pair == 0) {
        p.copy_codes(slot, tile, id, kSlots);
      } else {
        p.copy_codes(slot, tile + 1, next_id, pair - 1);
      }
      copy_commit();
      slot = slot == slots + (kSlots - 1) * kSlotBytes ? slots : slot + kSlotBytes;
    }
    fence_for_mma();
    __syncwarp();
    if (p.lane == 0) barrier_arrive(shared_address(&s.full[stage.index]));
    id = next_id;
    scale = next_scale;
    next_id = p.row_of(tile + 2, key);
  }
  copy_wait<0>();
}

}  // namespace dsv4
