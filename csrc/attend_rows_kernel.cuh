// attend over bf16 rows: a cache of them, or the rows of a long chunk's requests, decoded once for all of its tokens.
//
// Same sums in the same order as attend_kernel.cuh over the fp8 rows that these were decoded from: the bits are equal.
// A block takes one token and 64 heads after the other, with all their runs:
//
//   warpgroup 3     copies queries and rows to shared memory, up to three tiles ahead, the next token's too
//   warpgroup 2     queries in registers; S = Q K^T of a tile, softmax, P
//   warpgroup 0, 1  O[:, 0:256] and O[:, 256:512] += P K, while the next tile is weighed
//
// The sums of a run that is not the token's last wait in memory, as halves, in the order in which threads hold them.
#pragma once

#include "attend_rows_block.cuh"
#include "attend_rows_copies.cuh"
#include "attend_rows_finish.cuh"
#include "overlap.cuh"

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

// S = Q K^T of a tile; the first part of the queries in registers.
__device__ __forceinline__ void score(Accumulator<kTile>& z, const Fragment (&q)[kHeldSteps], uint32_t queries,
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
  mma_wait<0>();
  settle(z);
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

// The weights as A of the products with the values.
__device__ __forceinline__ void store_weights(RowsShared& s, const Accumulator<kTile>& z, const float (&keep)[2],
                                              int row, int lane) {
  const uint32_t weights = shared_address(s.weights) + row * kRowBytes + quad_lane(lane) * sizeof(uint32_t);
#pragma unroll
  for (int j = 0; j < kTileCells; ++j) {
    const float* x = z + kCell * j;
    const uint32_t at = weights + swizzled(j, row);
    store_shared(at, pack(x[0], x[1]));
    store_shared(at + kLowerRow * kRowBytes, pack(x[2], x[3]));
  }
  if (quad_lane(lane) == 0) s.keep[row] = keep[0], s.keep[row + kLowerRow] = keep[1];
  fence_for_mma();
}

// Warpgroup 2: the weights of every tile.
__device__ __forceinline__ void weigh_all(const AttendRowsArgs& args, const RowsWork& work, RowsShared& s, int warp,
                                          int lane) {
  const int row = accumulator_row(warp, lane);
  const float scale = args.attend.scale_log2;
  const uint32_t queries = shared_address(s.queries);
  Ring place;
  uint32_t turn = 0;
  bool any = false;
  for (int i = blockIdx.x; i < work.units; i += gridDim.x) {
    const RowsUnit u = work.unit(args.attend, i);
    Fragment q[kHeldSteps];
    barrier_wait(shared_address(&s.full[place.index]), place.phase);
    if (any) named_sync(kHeldQueries, kWarpgroup);  // all are past the last products with those before
    hold_queries(q, queries, shared_address(s.keys[place.index]), warp, lane);
    if (lane < kSumWarps / kWarpgroupWarps) barrier_arrive(shared_address(&s.empty[place.index]));
    place.advance();
    int tile = 0;
    for (int run = 0; run < u.runs; ++run) {
      Softmax softmax;
      for (const int last = u.first_tile(run + 1); tile < last; ++tile) {
        barrier_wait(shared_address(&s.full[place.index]), place.phase);
        fence_for_mma();
        Accumulator<kTile> z;
        score(z, q, queries, shared_address(s.keys[place.index]));
        float keep[2];
        update(softmax, z, keep, *reinterpret_cast<const uint64_t*>(s.visible[place.index]), scale, lane);
        barrier_wait(shared_address(&s.summed), turn ^ 1);
        store_weights(s, z, keep, row, lane);
        __syncwarp();
        if (lane == 0) barrier_arrive(shared_address(&s.weighed));
        turn ^= 1;
        place.advance();
      }
      if (run == 0 && any) named_sync(kStatsFree, kSumThreads + kWarpgroup);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float total = row_total(softmax.total[half]);
        if (quad_lane(lane) == 0) {
          s.stats[run][row + kLowerRow * half] = make_float2(softmax.top[half] * scale, total);
        }
      }
    }
    named_arrive(kStatsReady, kSumThreads + kWarpgroup);
    any = true;
  }
  if (any) named_sync(kStatsFree, kSumThreads + kWarpgroup);
}

// Warpgroups 0 and 1: the sums of 256 columns each.
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
      for (const int last = u.first_tile(run + 1); tile < last; ++tile) {
        barrier_wait(shared_address(&s.full[place.index]), place.phase);
        fence_for_mma();
        barrier_wait(shared_address(&s.weighed), turn);
        shrink(o, s.keep[row], s.keep[row + kLowerRow]);
        const uint64_t v = n_major(shared_address(s.keys[place.index]) + group * (kKeyBlocks / 2 * kBlockBytes));
        mma_fence();
#pragma unroll
        for (int k = 0; k < kValueProducts; ++k) mma_64x128(o[k & 1], p + step_offset(k >> 1), v + value_offset(k));
        mma_commit();
        mma_wait<0>();
        if (lane == 0) {
          barrier_arrive(shared_address(&s.summed));
          barrier_arrive(shared_address(&s.empty[place.index]));
        }
        turn ^= 1;
        place.advance();
      }
      settle(o[0]), settle(o[1]);
      SumWords words;
      in_units(s, o, words, run, group, thread);
      if (run + 1 < u.runs) {
        keep_run(args, words, run, work.splits, thread);
      } else {
        finish_rows(args, s, words, u, work.splits, group, thread);
      }
    }
  }
}

__global__ void __launch_bounds__(kRowsThreads, 1)
    attend_rows_kernel(const __grid_constant__ AttendRowsArgs args, const RowsWork work) {
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
    copy_all({args.attend, work.window_tiles, warp, lane}, work, s);
  } else if (group == 2) {
    take_registers<kWeighRegisters>();
    weigh_all(args, work, s, warp, lane);
  } else {
    take_registers<kSumRegisters>();
    sum_all(args, work, s, group, warp, thread);
  }
}

}  // namespace dsv4
