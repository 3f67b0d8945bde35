// The consumers of attend (attend/kernel.cuh): products of the queries and a split's keys, softmax, sums of the values.
#pragma once

#include "attend/block.cuh"

namespace dsv4 {

constexpr int kTileCells = kTile / kCellColumns;             // of a lane's logits
constexpr int kValueSteps = kTile / kMmaDepth;               // products of a tile's keys along K
constexpr int kSumCells = 2 * kBlockColumns / kCellColumns;  // of one of its accumulators of the sums

// Both consumer warpgroups copy the block's queries to shared memory.
__device__ __forceinline__ void load_queries(const AttendArgs& args, Shared& s, int token, int head, int thread) {
  constexpr int kRowChunks = kDim / kChunkColumns, kBlockChunks = kBlockColumns / kChunkColumns;
  const uint32_t base = shared_address(s.queries);
#pragma unroll
  for (int i = 0; i < kHeads * kRowChunks / kConsumerThreads; ++i) {
    const int chunk = i * kConsumerThreads + thread, row = over<kRowChunks>(chunk), column = within<kRowChunks>(chunk);
    const bool exists = head + row < args.heads;
    const __nv_bfloat16* from =
        args.queries + (static_cast<int64_t>(token) * args.heads + (exists ? head + row : 0)) * kDim;
    const uint32_t to = base + over<kBlockChunks>(column) * kBlockBytes + row * kRowBytes;
    copy_async(to + swizzled(within<kBlockChunks>(column), row), from + column * kChunkColumns, exists);
  }
  copy_commit();
  copy_wait<0>();
  fence_for_mma();
  named_sync(kQueriesReady, kConsumerThreads);
}

// Multiplies the sums of a lane's two rows.
__device__ __forceinline__ void shrink(Sums& o, float upper, float lower) {
  if (__all_sync(kAllLanes, upper == 1.f && lower == 1.f)) return;
#pragma unroll
  for (int j = 0; j < 2 * kSumCells; ++j) {
    float* x = o[over<kSumCells>(j)] + within<kSumCells>(j) * kCell;
    x[0] *= upper;
    x[1] *= upper;
    x[2] *= lower;
    x[3] *= lower;
  }
}

// Of the i-th of eight products of P K: rows 16 (i / 2) of the keys, columns 128 (i % 2) of the half.
constexpr int kValueProducts = 2 * kValueSteps;
// Where its operand starts within the half's four blocks, in a descriptor's units.
__device__ __forceinline__ constexpr uint32_t value_offset(int i) {
  return ((i & 1) * 2 * kBlockBytes + (i >> 1) * kMmaDepth * kRowBytes) >> kDescriptorUnit;
}
// Where the columns of the weights of step i of K start within their block.
__device__ __forceinline__ constexpr uint32_t step_offset(int i) { return i * kMmaBytes >> kDescriptorUnit; }

struct Softmax {
  float top[2] = {-kInf, -kInf};  // largest logit so far of rows r and r + 8, before scaling
  float total[2] = {0, 0};        // this lane's share of the sum of 2^(scale (z - top))
};

// Logits -> weights: z becomes 2^(scale (z - top)), `rescale` the factor of the sums before. `visible`: a bit per key.
__device__ __forceinline__ void update(Softmax& m, Accumulator<kTile>& z, float (&rescale)[2], uint64_t visible,
                                       float scale, int lane) {
  if (visible != ~uint64_t{0}) {
    visible >>= 2 * quad_lane(lane);
#pragma unroll
    for (int i = 0; i < kTileCells * kCell; ++i) {
      if ((visible >> (kCellColumns * over<kCell>(i) + (i & 1)) & 1) == 0) z[i] = -kInf;
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float top = m.top[half];
#pragma unroll
    for (int j = 0; j < kTileCells; ++j) top = fmaxf(top, fmaxf(z[kCell * j + 2 * half], z[kCell * j + 2 * half + 1]));
    top = row_max(top);
    const float base = top == -kInf ? 0.f : top * scale;
    rescale[half] = exp2_fast(m.top[half] * scale - base);
    m.top[half] = top;
    float sum = 0;
#pragma unroll
    for (int j = 0; j < kTileCells; ++j) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        float& x = z[kCell * j + 2 * half + k];
        x = exp2_fast(x * scale - base);
        sum += x;
      }
    }
    m.total[half] = m.total[half] * rescale[half] + sum;
  }
}

// S = Q K^T of a tile, all of it.
__device__ __forceinline__ void score(Accumulator<kTile>& z, uint32_t queries, uint32_t keys) {
  constexpr int kBlockSteps = kBlockColumns / kMmaDepth;
  const uint64_t q = k_major(queries), k = k_major(keys);
  mma_fence();
#pragma unroll
  for (int i = 0; i < kDim / kMmaDepth; ++i) {
    const uint32_t offset = ((i / kBlockSteps) * kBlockBytes + (i % kBlockSteps) * kMmaBytes) >> kDescriptorUnit;
    mma_64x64(z, q + offset, k + offset, i > 0);
  }
  mma_commit();
  mma_wait<0>();
}

// The weights as A of the products with the values, and a copy in shared memory for the other warpgroup.
__device__ __forceinline__ void share_weights(Shared& s, const Accumulator<kTile>& z, const float (&rescale)[2],
                                              Fragment (&p)[kValueSteps], int row, int lane) {
  const uint32_t weights = shared_address(s.weights) + row * kRowBytes + quad_lane(lane) * sizeof(uint32_t);
#pragma unroll
  for (int j = 0; j < kTileCells; ++j) {
    const float* x = z + kCell * j;
    const uint32_t upper = pack(x[0], x[1]), lower = pack(x[2], x[3]);
    p[j >> 1][(j & 1) * 2] = upper;
    p[j >> 1][(j & 1) * 2 + 1] = lower;
    const uint32_t at = weights + swizzled(j, row);
    store_shared(at, upper);
    store_shared(at + kLowerRow * kRowBytes, lower);
  }
  if (quad_lane(lane) == 0) {
    s.rescale[row] = rescale[0];
    s.rescale[row + kLowerRow] = rescale[1];
  }
  fence_for_mma();
  named_arrive(kWeightsReady, kConsumerThreads);
}

// Warpgroup 0: the weights of every tile of the split, and the sums of the first 256 columns.
__device__ __forceinline__ void weigh_and_sum(const AttendArgs& args, Shared& s, Softmax& softmax, Sums& o, Split run,
                                              int row, int lane) {
  Accumulator<kTile> z;
  for (int tile = run.first; tile < run.last; ++tile) {
    const Stage stage = stage_of<kStages>(tile - run.first);
    barrier_wait(shared_address(&s.full[stage.index]), stage.phase);
    score(z, shared_address(s.queries), shared_address(s.keys[stage.index]));
    float rescale[2];
    update(softmax, z, rescale, *reinterpret_cast<const uint64_t*>(s.visible[stage.index]), args.scale_log2, lane);
    if (tile > run.first) named_sync(kWeightsFree, kConsumerThreads);
    Fragment p[kValueSteps];
    share_weights(s, z, rescale, p, row, lane);
    shrink(o, rescale[0], rescale[1]);
    const uint64_t v = n_major(shared_address(s.keys[stage.index]));
    mma_fence();
#pragma unroll
    for (int i = 0; i < kValueProducts; ++i) mma_64x128(o[i & 1], p[i >> 1], v + value_offset(i));
    mma_commit();
    mma_wait<0>();
    if (lane == 0) barrier_arrive(shared_address(&s.empty[stage.index]));
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float total = row_total(softmax.total[half]);
    if (quad_lane(lane) == 0) s.stats[row + kLowerRow * half] = make_float2(softmax.top[half] * args.scale_log2, total);
  }
}

// Warpgroup 1: the sums of the other 256 columns, by the same weights.
__device__ __forceinline__ void sum_only(Shared& s, Sums& o, Split run, int row, int lane) {
  for (int tile = run.first; tile < run.last; ++tile) {
    const Stage stage = stage_of<kStages>(tile - run.first);
    barrier_wait(shared_address(&s.full[stage.index]), stage.phase);
    named_sync(kWeightsReady, kConsumerThreads);
    shrink(o, s.rescale[row], s.rescale[row + kLowerRow]);
    const uint64_t p = k_major(shared_address(s.weights));
    const uint64_t v = n_major(shared_address(s.keys[stage.index]) + kKeyBlocks / 2 * kBlockBytes);
    mma_fence();
#pragma unroll
    for (int i = 0; i < kValueProducts; ++i) mma_64x128(o[i & 1], p + step_offset(i >> 1), v + value_offset(i));
    mma_commit();
    mma_wait<0>();
    if (tile + 1 < run.last) named_arrive(kWeightsFree, kConsumerThreads);
    if (lane == 0) barrier_arrive(shared_address(&s.empty[stage.index]));
  }
}

}  // namespace dsv4
