// Queries and bf16 rows from memory to shared memory, for attend/bf16_kernel.cuh.
#pragma once

#include "attend/bf16_block.cuh"

namespace dsv4 {

constexpr int kRowsAtOnce = kLanes / kSwizzle;  // that a warp copies

// One of four warps: rows [16 warp, 16 warp + 16) of every tile; lane l knows the id of row l % 16.
struct RowsCopier {
  const AttendArgs& args;
  const RowsMaps& maps;
  int window_tiles, warp, lane;

  // The row id of this lane's key in a tile, -1 if it is none; an id past the pool reads its last row.
  __device__ __forceinline__ int load_id(const RowsUnit& u, int tile) const {
    const int place = warp * kCopyRows + within<kCopyRows>(lane);
    if (tile < window_tiles) {
      const int key = tile * kTile + place;
      if (key >= args.window_keys) return -1;
      const int64_t at = static_cast<int64_t>(u.token) * args.window_keys + key;
      const int id = __ldg(args.window_ids + at);
      return __ldg(args.window_visible + at) != 0 ? min(max(id, 0), args.window.rows - 1) : -1;
    }
    const int key = (tile - window_tiles) * kTile + place;
    if (key >= u.count) return -1;
    const int id = __ldg(args.entry_ids + static_cast<int64_t>(u.token) * args.entry_keys + key);
    return min(max(id, 0), args.entries.rows - 1);
  }

  // Starts the copies of four rows: eight lanes a row, 128 bytes at a time, which is a block's part of it.
  __device__ __forceinline__ void copy_four(uint32_t to, int row, const uint8_t* pool, int64_t at, bool exists) const {
    constexpr int kBytes = kDim * sizeof(__nv_bfloat16);
    const int chunk = within<kSwizzle>(lane);
    const uint8_t* from = pool + (exists ? at : 0) * kBytes + chunk * kChunkBytes;
    to += row * kRowBytes + swizzled(chunk, row);
#pragma unroll
    for (int block = 0; block < kKeyBlocks; ++block) {
      copy_async(to + block * kBlockBytes, from + block * kRowBytes, exists);
    }
  }

  // Whether the warp's rows of a tile lie one after the other, as windows and HCA's entries do.
  __device__ __forceinline__ bool in_order(int id) const {
    const int first = __shfl_sync(kAllLanes, id, 0);
    return first >= 0 && __all_sync(kAllLanes, id == first + within<kCopyRows>(lane));
  }

  // Calls `copy(to, column)` for the warp's rows of each block of a place.
  template <typename Copy>
  __device__ __forceinline__ void boxes(uint32_t place, const Copy& copy) const {
#pragma unroll
    for (int block = 0; block < kKeyBlocks; ++block) {
      copy(place + block * kBlockBytes + warp * kWarpBlockBytes, block * kBlockColumns);
    }
  }

  __device__ __forceinline__ void copy_rows(uint32_t to, int tile, int id) const {
    const uint8_t* pool = (tile < window_tiles ? args.window : args.entries).nope;
#pragma unroll
    for (int i = 0; i < kCopyRows; i += kRowsAtOnce) {
      const int own = i + over<kSwizzle>(lane), one = __shfl_sync(kAllLanes, id, own);
      copy_four(to, warp * kCopyRows + own, pool, one, one >= 0);
    }
  }

  // By one lane, with the copy engine: rows in order, and queries.
  __device__ __forceinline__ void copy_run(uint32_t place, int tile, int first, uint32_t full) const {
    const CUtensorMap& map = tile < window_tiles ? maps.window : maps.entries;
    boxes(place, [&](uint32_t to, int column) { copy_box(to, map, column, first, full); });
  }
  __device__ __forceinline__ void copy_queries(uint32_t place, const RowsUnit& u, uint32_t full) const {
    const int head = u.head + warp * kCopyRows;
    boxes(place, [&](uint32_t to, int column) { copy_box(to, maps.queries, column, head, u.token, full); });
  }
};

// Arrives at a barrier once the thread's copies are there.
__device__ __forceinline__ void copies_arrive(uint32_t bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}

// The tiles of all the block's tokens, each token's queries before them, through one ring. What waits for a place puts
// a fence before it reads it with the matrix units.
__device__ __forceinline__ void copy_all(const RowsCopier& c, const RowsWork& work, RowsShared& s) {
  Ring place;
  for (int i = blockIdx.x; i < work.units; i += gridDim.x) {
    const RowsUnit u = work.unit(c.args, i);
    int id = c.load_id(u, 0);
    for (int tile = -1; tile < u.tiles; ++tile) {  // the queries first
      const bool queries = tile < 0;
      const int next_id = queries ? id : tile + 1 < u.tiles ? c.load_id(u, tile + 1) : -1;
      const uint32_t seen = __ballot_sync(kAllLanes, id >= 0);
      const bool engine = queries || c.in_order(id);
      barrier_wait(shared_address(&s.empty[place.index]), place.phase ^ 1);
      const uint32_t full = shared_address(&s.full[place.index]), to = shared_address(s.keys[place.index]);
      if (!engine) c.copy_rows(to, tile, id);
      copies_arrive(full);
      if (c.lane == 0) {
        reinterpret_cast<uint16_t*>(s.visible[place.index])[c.warp] = static_cast<uint16_t>(seen);
        barrier_expect(full, engine ? kKeyBlocks * kWarpBlockBytes : 0);
        if (queries) {
          c.copy_queries(to, u, full);
        } else if (engine) {
          c.copy_run(to, tile, id, full);
        }
      }
      __syncwarp();
      place.advance();
      id = next_id;
    }
  }
  copy_wait<0>();
}

}  // namespace dsv4
