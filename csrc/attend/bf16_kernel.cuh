// attend over bf16 rows: a cache of them, or the rows of a long chunk's requests, decoded once for all of its tokens.
//
// Same sums in the same order as attend/kernel.cuh over the fp8 rows that these were decoded from: the bits are equal.
// A block takes one token and 64 heads after the other, with all their splits:
//
//   warpgroup 3     copies queries and rows to shared memory, up to three tiles ahead, the next token's too
//   warpgroup 2     queries in registers; S = Q K^T of a tile, softmax, P
//   warpgroup 0, 1  O[:, 0:256] and O[:, 256:512] += P K, while the next tile is weighed
//
// The sums of a split that is not the token's last wait in memory, as halves, in the order in which threads hold them.
#pragma once

#include "attend/bf16_block.cuh"
#include "attend/bf16_combine.cuh"
#include "attend/bf16_copies.cuh"
#include "common/overlap.cuh"

namespace dsv4 {

// A warp's 16 rows of a swizzled tile of queries, for the products of one step of K.
__device__ __forceinline__ void load_fragment(Fragment& a, uint32_t queries, int step, int warp, int lane) {
  constexpr int kBlockSteps = kBlockColumns / kMmaDepth;
  const int row = warp * kWarpRows + within<2 * kSwizzle>(lane);
  const int chunk = step % kBlockSteps * 2 + over<2 * kSwizzle>(lane);
  const uint32_t at = queries + step / kBlockSteps * kBlockBytes + row * kRowBytes + swizzled(chunk, row);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(at)
               : "memory");
}

// Starts S = Q K^T of a tile; the first part of the queries in registers.
__device__ __forceinline__ void start_score(Accumulator<kTile>& z, const Fragment (&q)[kHeldSteps], uint32_t queries,
                                            uint32_t keys) {
  constexpr int kBlockSteps = kBlockColumns / kMmaDepth;
  const auto offset = [](int i) {
    return ((i / kBlockSteps) * kBlockBytes + (i % kBlockSteps) * kMmaBytes) >> kDescriptorUnit;
  };
  const uint64_t k = k_major(keys), rest = k_major(queries);
  mma_fence();
#pragma unroll
  for (int i = 0; i < kHeldSteps; ++i) mma_64x64(z, q[i], k + offset(i), i > 0);
#pragma unroll
  for (int i = kHeldSteps; i < kDim / kMmaDepth; ++i) mma_64x64(z, rest + offset(i - kHeldSteps), k + offset(i), 1);
  mma_commit();
}

// Takes a token's queries from a place of the ring: into registers, and what is left to `to`. All of the warpgroup.
__device__ __forceinline__ void hold_queries(Fragment (&q)[kHeldSteps], uint32_t to, uint32_t queries, int warp,
                                             int lane) {
#pragma unroll
  for (int i = 0; i < kHeldSteps; ++i) load_fragment(q[i], queries, i, warp, lane);
  const uint32_t chunk = (warp * kLanes + lane) * kChunkBytes;
#pragma unroll
  for (uint32_t i = 0; i < (kKeyBlocks - kHeldBlocks) * kBlockBytes; i += kWarpgroup * kChunkBytes) {
    store_shared(to + i + chunk, load_shared(queries + kHeldBlocks * kBlockBytes + i + chunk));
  }
  fence_for_mma();
  named_sync(kHeldQueries, kWarpgroup);
}

// Warpgroup 2: the weights of every tile.
struct RowsWeigher {
  RowsShared& s;
  float scale;
  int row, lane;
  Ring place = {};
  uint32_t turn = 0;

  __device__ __forceinline__ void start(Accumulator<kTile>& z, const Fragment (&q)[kHeldSteps]) const {
    barrier_wait(shared_address(&s.full[place.index]), place.phase);
    fence_for_mma();
    start_score(z, q, shared_address(s.queries), shared_address(s.keys[place.index]));
  }

  // The weights of the tile whose scores are on their way. `kMore`: there is another one, whose scores come before
  // this one's values are summed, so that the sums run beside the next softmax.
  template <bool kMore>
  __device__ __forceinline__ void weigh(Accumulator<kTile>& z, const Fragment (&q)[kHeldSteps], Softmax& softmax) {
    mma_wait<0>();
    settle(z);
    float rescale[2];
    update(softmax, z, rescale, *reinterpret_cast<const uint64_t*>(s.visible[place.index]), scale, lane);
    uint32_t p[2][kTileCells];
#pragma unroll
    for (int j = 0; j < kTileCells; ++j) {
      const float* x = z + kCell * j;
      p[0][j] = pack(x[0], x[1]), p[1][j] = pack(x[2], x[3]);
    }
    settle(p[0]), settle(p[1]);
    place.advance();
    if constexpr (kMore) start(z, q);
    barrier_wait(shared_address(&s.summed), turn ^ 1);
    const uint32_t weights = shared_address(s.weights) + row * kRowBytes + quad_lane(lane) * sizeof(uint32_t);
#pragma unroll
    for (int j = 0; j < kTileCells; ++j) {
      store_shared(weights + swizzled(j, row), p[0][j]);
      store_shared(weights + swizzled(j, row) + kLowerRow * kRowBytes, p[1][j]);
    }
    if (quad_lane(lane) == 0) s.rescale[row] = rescale[0], s.rescale[row + kLowerRow] = rescale[1];
    fence_for_mma();
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&s.weighed));
    turn ^= 1;
  }

  __device__ __forceinline__ void store_stats(const Softmax& softmax, int run) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float total = row_total(softmax.total[half]);
      if (quad_lane(lane) == 0) {
        s.stats[run][row + kLowerRow * half] = make_float2(softmax.top[half] * scale, total);
      }
    }
  }
};

__device__ __forceinline__ void weigh_all(const AttendRowsArgs& args, const RowsWork& work, RowsShared& s, int warp,
                                          int lane) {
  RowsWeigher w{s, args.attend.scale_log2, accumulator_row(warp, lane), lane};
  bool any = false;
  for (int i = blockIdx.x; i < work.units; i += gridDim.x) {
    const RowsUnit u = work.unit(args.attend, i);
    Fragment q[kHeldSteps];
    barrier_wait(shared_address(&s.full[w.place.index]), w.place.phase);
    if (any) named_sync(kHeldQueries, kWarpgroup);  // all are past the last products with those before
    hold_queries(q, shared_address(s.queries), shared_address(s.keys[w.place.index]), warp, lane);
    if (lane < kSumWarps / kWarpgroupWarps) barrier_arrive(shared_address(&s.empty[w.place.index]));
    w.place.advance();
    Accumulator<kTile> z;
    Softmax softmax;
    w.start(z, q);
    int run = 0, last = u.first_tile(1);
    for (int tile = 1; tile < u.tiles; ++tile) {
      w.weigh<true>(z, q, softmax);
      if (tile == last) {
        if (run == 0 && any) named_sync(kStatsFree, kSumThreads + kWarpgroup);
        w.store_stats(softmax, run);
        ++run, last = u.first_tile(run + 1);
        softmax = Softmax();
      }
    }
    w.weigh<false>(z, q, softmax);
    if (run == 0 && any) named_sync(kStatsFree, kSumThreads + kWarpgroup);
    w.store_stats(softmax, run);
    named_arrive(kStatsReady, kSumThreads + kWarpgroup);
    any = true;
  }
  if (any) named_sync(kStatsFree, kSumThreads + kWarpgroup);
}

// Warpgroups 0 and 1: the sums of 256 columns each.
template <bool kRounded>
__device__ __forceinline__ void sum_all(const AttendRowsArgs& args, const RowsWork& work, RowsShared& s, int group,
                                        int warp, int thread) {
  const int lane = lane_of(thread), row = accumulator_row(warp, lane);
  const uint64_t p = k_major(shared_address(s.weights));
  Ring place;
  uint32_t turn = 0;
  for (int i = blockIdx.x; i < work.units; i += gridDim.x) {
    const RowsUnit u = work.unit(args.attend, i);
    Sums o;
    place.advance();  // the queries
    int tile = 0;
    for (int run = 0; run < u.runs; ++run) {
      clear(o);
      const int last = u.first_tile(run + 1);
      for (;; ++tile) {
        barrier_wait(shared_address(&s.full[place.index]), place.phase);
        fence_for_mma();
        barrier_wait(shared_address(&s.weighed), turn);
        shrink(o, s.rescale[row], s.rescale[row + kLowerRow]);
        const uint64_t v = n_major(shared_address(s.keys[place.index]) + group * (kKeyBlocks / 2 * kBlockBytes));
        mma_fence();
#pragma unroll
        for (int k = 0; k < kValueProducts; ++k) mma_64x128(o[k & 1], p + step_offset(k >> 1), v + value_offset(k));
        mma_commit();
        mma_wait<0>();
        if (lane == 0) barrier_arrive(shared_address(&s.summed));
        turn ^= 1;
        if (tile + 1 == last) break;
        if (lane == 0) barrier_arrive(shared_address(&s.empty[place.index]));
        place.advance();
      }
      ++tile;
      settle(o[0]), settle(o[1]);
      // The sums, as halves, take the warpgroup's half of the split's last tile, once all of its warps are past it.
      named_sync(kTileRead + group, kWarpgroup);
      const uint32_t units =
          shared_address(s.keys[place.index]) + group * (kKeyBlocks / 2 * kBlockBytes) + warp * kWarpBlockBytes;
      store_units(s, o, units, run, group, warp, lane);
      if (run + 1 < u.runs) {
        store_split(args, units, run, work.splits, group, warp, lane);
      } else {
        combine_rows<kRounded>(args, s, units, u, work.splits, group, warp, lane, thread);
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(shared_address(&s.empty[place.index]));
      place.advance();
    }
  }
}

// `kRounded`: the output is e4m3.
template <bool kRounded>
__global__ void __launch_bounds__(kRowsThreads, 1)
    attend_rows_kernel(const __grid_constant__ AttendRowsArgs args, const __grid_constant__ RowsMaps maps,
                       const RowsWork work) {
  let_next_start();
  extern __shared__ __align__(1024) uint8_t raw[];
  RowsShared& s = *reinterpret_cast<RowsShared*>(raw);
  const int thread = threadIdx.x, group = over<kWarpgroup>(thread), lane = lane_of(thread);
  const int warp = __shfl_sync(kAllLanes, warp_of(thread) & 3, 0);
  if (thread == 0) {
    for (int i = 0; i < kRowsStages; ++i) {
      barrier_init(shared_address(&s.full[i]), kWarpgroup + kWarpgroupWarps);
      barrier_init(shared_address(&s.empty[i]), kSumWarps);
    }
    barrier_init(shared_address(&s.weighed), kWarpgroupWarps);
    barrier_init(shared_address(&s.summed), kSumWarps);
    barrier_init_fence();
  }
  __syncthreads();
  wait_for_previous();
  if (group == 3) {
    give_registers<kCopyRegisters>();
    copy_all({args.attend, maps, work.window_tiles, warp, lane}, work, s);
  } else if (group == 2) {
    take_registers<kWeighRegisters>();
    weigh_all(args, work, s, warp, lane);
  } else {
    take_registers<kSumRegisters>();
    sum_all<kRounded>(args, work, s, group, warp, thread);
  }
}

}  // namespace dsv4
