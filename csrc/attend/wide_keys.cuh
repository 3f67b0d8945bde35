// Rows of the pools for attend for few tokens (attend/wide_kernel.cuh): to shared memory as they are stored, there
// turned into bf16 in place.
#pragma once

#include "attend/producers.cuh"
#include "attend/wide_block.cuh"

namespace dsv4 {

constexpr int kNopeGroups = kNope / kScaleGroup;
constexpr int kGroupRows = kSwizzle;  // rows that a warp copies at once: a lane 16 codes of row lane / 4

// A token's keys by tile and place.
struct WideKeys {
  const AttendArgs& args;
  int token, count, window_tiles;

  __device__ __forceinline__ const Rows& rows(int tile) const {
    return tile < window_tiles ? args.window : args.entries;
  }
  // The id of a key as stored and whether it is seen, without a look at the count.
  __device__ __forceinline__ int2 load(int tile, int place) const {
    if (tile < window_tiles) {
      const int key = tile * kTile + place;
      if (key >= args.window_keys) return {0, 0};
      const int64_t at = static_cast<int64_t>(token) * args.window_keys + key;
      return {__ldg(args.window_ids + at), __ldg(args.window_visible + at)};
    }
    const int key = (tile - window_tiles) * kTile + place;
    if (key >= args.entry_keys) return {0, 0};
    return {__ldg(args.entry_ids + static_cast<int64_t>(token) * args.entry_keys + key), 1};
  }
  // Row id of a key, -1 if it is none; an id past the pool reads its last row, as in the reference.
  __device__ __forceinline__ int row_of(int tile, int place, int2 key) const {
    const bool counted = (tile - window_tiles) * kTile + place < count;
    return key.y != 0 && counted ? min(max(key.x, 0), rows(tile).rows - 1) : -1;
  }
};

// Where a lane's sixteen codes of eight rows wait, and the first half of them as bf16 goes.
__device__ __forceinline__ uint32_t code_place(int lane) {
  const int row = quad_of(lane);
  return row * kRowBytes + swizzled(2 * quad_lane(lane), row);
}

// Starts the copy of a lane's codes of a group of 64 dims of its row, which is in `tile`; gives their scale.
__device__ __forceinline__ uint32_t copy_group(const Rows& rows, uint32_t to, int id, int group, int lane) {
  const int64_t row = max(id, 0);
  copy_async(to + code_place(lane), rows.nope + row * kNope + group * kScaleGroup + quad_lane(lane) * kChunkBytes,
             id >= 0);
  return id >= 0 ? __ldg(rows.scale + row * kScales + group) : kBias;
}
// Of eight rows' RoPE dims: a lane two chunks of its row.
__device__ __forceinline__ void copy_rope_rows(const Rows& rows, uint32_t to, int id, int lane) {
  const int row = quad_of(lane);
  const uint16_t* from = rows.rope + static_cast<int64_t>(max(id, 0)) * kRope;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int chunk = quad_lane(lane) + kQuad * i;
    copy_async(to + row * kRowBytes + swizzled(chunk, row), from + chunk * kChunkColumns, id >= 0);
  }
}
// Codes that a lane copied become bf16 where they lie.
__device__ __forceinline__ void convert_group(uint32_t at, uint32_t scale, int lane) {
  const uint32_t place = at + code_place(lane);
  store_codes(place, load_shared(place), scale_of(scale, 0));
}

}  // namespace dsv4
