// Sparse MQA decode over fp8 rows: one softmax over window and selected entries, with a sink (dsv4_jax/ops/attend.py).
//
// A cluster of `splits` blocks serves one token and 64 heads. The keys are cut into tiles of 64 (the window's, then the
// counted entries'), the tiles into `splits` runs of (almost) equal length: the cut depends on the token alone, so its
// bits do not depend on the batch. Within a block four warpgroups work on a run:
//
//   warpgroups 2, 3   gather rows, turn e4m3 codes into bf16 and store them swizzled, up to two tiles ahead
//   warpgroup 0       S = Q K^T (64 heads x 64 keys), online softmax, P; then O[:, 0:256] += P K
//   warpgroup 1       O[:, 256:512] += P K with the same P, through shared memory
//
// K and V are the same rows: one tile in shared memory serves both products. The runs are merged in rank order through
// distributed shared memory, which halves cross (2e-4 of relative error; it moves about 16 bytes a clock), and the sink
// enters there. benchmarks/RESULTS.md says what bounds it and what was slower.
#pragma once

#include "attend_block.cuh"
#include "attend_merge.cuh"
#include "attend_rows.cuh"

namespace dsv4 {

__device__ __forceinline__ void load_queries(const AttendArgs& args, Shared& s, int token, int head, int thread) {
  const uint32_t base = shared_address(s.queries);
#pragma unroll
  for (int i = 0; i < kHeads * kDim / 8 / 256; ++i) {
    const int chunk = i * 256 + thread, row = chunk >> 6, column = chunk & 63;
    const bool exists = head + row < args.heads;
    const __nv_bfloat16* from = args.queries + (static_cast<int64_t>(token) * args.heads + (exists ? head + row : 0)) * kDim;
    copy_async(base + (column >> 3) * kBlockBytes + row * 128 + (((column & 7) ^ (row & 7)) << 4), from + column * 8, exists);
  }
  copy_commit();
  copy_wait<0>();
  fence_for_mma();
  named_sync(kQueriesThere, 256);
}

__device__ __forceinline__ void shrink(Sums& o, float upper, float lower) {
  if (__all_sync(~0u, upper == 1.f && lower == 1.f)) return;
#pragma unroll
  for (int j = 0; j < 32; ++j) {
    float* x = o[j >> 4] + (j & 15) * 4;
    x[0] *= upper;
    x[1] *= upper;
    x[2] *= lower;
    x[3] *= lower;
  }
}

// Where the operand of the i-th of eight products of P K starts within its four blocks: rows 16 (i / 2), columns 128 (i % 2).
__device__ __forceinline__ constexpr uint32_t value_offset(int i) { return ((i & 1) * 2 * kBlockBytes + (i >> 1) * 2048) >> 4; }

struct Softmax {
  float top[2] = {-kInf, -kInf};  // largest logit so far of rows r and r + 8, before scaling
  float total[2] = {0, 0};        // this lane's share of the sum of 2^(scale (z - top))
};

// Logits -> weights: z becomes 2^(scale (z - top)) and `keep` the factor of the sums before. `visible` has a bit per key.
__device__ __forceinline__ void update(Softmax& m, float (&z)[32], float (&keep)[2], uint64_t visible, float scale,
                                       int lane) {
  if (visible != ~uint64_t{0}) {
    visible >>= 2 * (lane & 3);
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      if ((visible >> (8 * (i >> 2) + (i & 1)) & 1) == 0) z[i] = -kInf;
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float top = m.top[half];
#pragma unroll
    for (int j = 0; j < 8; ++j) top = fmaxf(top, fmaxf(z[4 * j + 2 * half], z[4 * j + 2 * half + 1]));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    const float base = top == -kInf ? 0.f : top * scale;
    keep[half] = exp2_fast(m.top[half] * scale - base);
    m.top[half] = top;
    float sum = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        float& x = z[4 * j + 2 * half + k];
        x = exp2_fast(x * scale - base);
        sum += x;
      }
    }
    m.total[half] = m.total[half] * keep[half] + sum;
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    attend_kernel(const __grid_constant__ AttendArgs args, int splits, int head_blocks) {
  extern __shared__ __align__(1024) uint8_t raw[];
  Shared& s = *reinterpret_cast<Shared*>(raw);
  const int rank = blockIdx.x % splits, unit = blockIdx.x / splits;
  const int head = unit % head_blocks * kHeads, token = unit / head_blocks;
  const int thread = threadIdx.x, group = thread >> 7, lane = thread & 31;
  const int warp = __shfl_sync(~0u, thread >> 5 & 3, 0);
  const int window_tiles = (args.window_keys + kTile - 1) / kTile;
  const auto first_tile = [=](int run, int keys) { return run * (window_tiles + (keys + kTile - 1) / kTile) / splits; };

  const auto count = [&] { return min(max(__ldg(args.entry_count + token), 0), args.entry_keys); };

  // What the first rows wait for comes first: the count, and their ids, where they are if all entries count.
  Producer p{args, token, 0, window_tiles, (group & 1) * 4 + warp, lane};
  const int guess = first_tile(rank, args.entry_keys);
  int2 key = {0, 0}, next_key = {0, 0};
  if (group >= 2) key = p.load_key(guess), next_key = p.load_key(guess + 1), p.count = count();
  if (thread < kHeads) s.sink[thread] = head + thread < args.heads ? __ldg(args.sink + head + thread) : 0.f;
  if (thread == 0) {
    s.rank = rank, s.token = token, s.head = head;
    for (int i = 0; i < 2; ++i) {
      barrier_init(shared_address(&s.full[i]), kProducerWarps);
      barrier_init(shared_address(&s.empty[i]), 8);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  if (group >= 2) {
    give_registers<64>();
    produce(p, s, first_tile(rank, p.count), first_tile(rank + 1, p.count), guess, key, next_key);
    cluster_sync();
    add_runs(args, s, splits, thread);
    cluster_meet();  // no block leaves while another reads its sums
    return;
  }
  take_registers<192>();
  load_queries(args, s, token, head, thread);
  const int keys = count(), first = first_tile(rank, keys), last = first_tile(rank + 1, keys);
  const int row = warp * 16 + (lane >> 2);
  Sums o = {};
  if (group == 0) {
    Softmax softmax;
    float z[32];
    for (int tile = first; tile < last; ++tile) {
      const int stage = (tile - first) & 1, phase = (tile - first) >> 1 & 1;
      barrier_wait(shared_address(&s.full[stage]), phase);
      const uint64_t q = k_major(shared_address(s.queries)), k = k_major(shared_address(s.keys[stage]));
      mma_fence();
#pragma unroll
      for (int i = 0; i < kDim / 16; ++i) {
        const uint32_t offset = ((i >> 2) * kBlockBytes + (i & 3) * 32) >> 4;
        mma_64x64(z, q + offset, k + offset, i > 0);
      }
      mma_commit();
      mma_wait<0>();
      float keep[2];
      update(softmax, z, keep, *reinterpret_cast<const uint64_t*>(s.visible[stage]), args.scale_log2, lane);
      if (tile > first) named_sync(kWeightsFree, 256);
      const uint32_t weights = shared_address(s.weights) + row * 128 + (lane & 3) * 4;
      uint32_t p[4][4];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const uint32_t upper = pack(z[4 * j], z[4 * j + 1]), lower = pack(z[4 * j + 2], z[4 * j + 3]);
        p[j >> 1][(j & 1) * 2] = upper;
        p[j >> 1][(j & 1) * 2 + 1] = lower;
        const uint32_t at = weights + ((j ^ (row & 7)) << 4);
        store_shared(at, upper);
        store_shared(at + 8 * 128, lower);
      }
      if ((lane & 3) == 0) {
        s.keep[row] = keep[0];
        s.keep[row + 8] = keep[1];
      }
      fence_for_mma();
      named_arrive(kWeightsThere, 256);
      shrink(o, keep[0], keep[1]);
      const uint64_t v = n_major(shared_address(s.keys[stage]));
      mma_fence();
#pragma unroll
      for (int i = 0; i < 8; ++i) mma_64x128(o[i & 1], p[i >> 1], v + value_offset(i));
      mma_commit();
      mma_wait<0>();
      if (lane == 0) barrier_arrive(shared_address(&s.empty[stage]));
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = softmax.total[half];
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
      if ((lane & 3) == 0) s.stats[row + 8 * half] = make_float2(softmax.top[half] * args.scale_log2, total);
    }
  } else {
    for (int tile = first; tile < last; ++tile) {
      const int stage = (tile - first) & 1, phase = (tile - first) >> 1 & 1;
      barrier_wait(shared_address(&s.full[stage]), phase);
      named_sync(kWeightsThere, 256);
      shrink(o, s.keep[row], s.keep[row + 8]);
      const uint64_t p = k_major(shared_address(s.weights));
      const uint64_t v = n_major(shared_address(s.keys[stage]) + 4 * kBlockBytes);
      mma_fence();
#pragma unroll
      for (int i = 0; i < 8; ++i) mma_64x128(o[i & 1], p + ((i >> 1) * 32 >> 4), v + value_offset(i));
      mma_commit();
      mma_wait<0>();
      if (tile + 1 < last) named_arrive(kWeightsFree, 256);
      if (lane == 0) barrier_arrive(shared_address(&s.empty[stage]));
    }
  }
  // Both warpgroups are past the last product with the queries: their place takes the sums.
  store_sums(s, o, group, thread);
  cluster_sync();
  add_runs(args, s, splits, thread);
  cluster_meet();  // no block leaves while another reads its sums
}

}  // namespace dsv4
