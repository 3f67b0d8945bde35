// Index scores over paged fp4 or fp8 keys (dsv4_jax/ops/index_scores.py): I[t, s] = sum_h w[t, h] relu(q[t, h] . K[s]).
//
// A block of one warpgroup takes one token and a run of its keys, 64 at a time. Each thread loads its share of two keys
// straight into registers, a tile or more ahead, decodes it to bf16 there and multiplies (wgmma, A from registers) with
// the token's 64 heads, which stay in shared memory. The order of the 128 dims within the product is free, so it is
// the one in which a thread's bytes lie; the queries are brought into it on their way to shared memory.
// A score depends on its token and key alone.
//
// All four warps work alike, each on 16 keys of a tile: no warp only loads, and none waits for another after the start.
//
// Where it loses nothing, products are of FP8 (index_scores_fp8.cuh): whether a token takes them depends on its queries
// alone, so that its scores do not depend on what else is in the batch.
#pragma once

#include "index_scores_keys.cuh"

namespace dsv4 {

constexpr int kWord = sizeof(uint32_t);
constexpr int kOwnHeads = kScoreHeads / kQuad;  // whose weights a thread has
constexpr uint32_t kLowHalf = 0xFFFF;
constexpr int kHalfBits = 16;
constexpr int kMaxRunTiles = 128;  // bounds the row numbers kept in shared memory

// A thread's part of a token's queries: a quarter of the dims of two heads, in chunks of the order of the key's.
// Four lanes take a head's quarters and eight the heads of a swizzle: every store of a warp covers all banks.
struct QueryPart {
  static constexpr int kParts = kIndexDim / kQuad / kChunkColumns;

  uint4 x[2][kParts];

  static __device__ __forceinline__ int head(int i, int warp, int lane) {
    return kScoreHeads / 2 * i + kLanes / kQuad * warp + quad_of(lane);
  }

  template <typename Key>
  __device__ __forceinline__ void load(const ScoreArgs& args, int token, int warp, int lane) {
    const auto* q = reinterpret_cast<const uint4*>(args.queries + static_cast<int64_t>(token) * args.heads * kIndexDim);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        x[i][part] = {0, 0, 0, 0};
        if (head(i, warp, lane) < args.heads) {
          x[i][part] =
              __ldg(q + head(i, warp, lane) * (kIndexDim / kChunkColumns) + Key::query_chunk(quad_lane(lane), part));
        }
      }
    }
  }

  // To shared memory in bf16, in the order of dims in which keys are decoded.
  template <typename Key>
  __device__ __forceinline__ void store(uint32_t shared, int warp, int lane) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = head(i, warp, lane);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const uint4 pairs = Key::query_pairs(x[i][part]);
        const uint32_t words[kPairs] = {pairs.x, pairs.y, pairs.z, pairs.w};
        const uint32_t start = shared + (part >> 1) * kBlockBytes + row * kRowBytes + kWord * quad_lane(lane);
#pragma unroll
        for (int w = 0; w < kPairs; ++w) store_shared(start + swizzled(kPairs * (part & 1) + w, row), words[w]);
      }
    }
  }

  // To shared memory in e4m3, each head divided by a power of two, which goes to `factors`. False if a number had to be
  // rounded or is out of range.
  __device__ __forceinline__ bool store_e4m3(uint32_t shared, float* factors, int warp, int lane) const {
    uint32_t lost = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = head(i, warp, lane);
      uint32_t most = __vmaxu2(__vmaxu2(max_magnitudes(x[i][0]), max_magnitudes(x[i][1])),
                               __vmaxu2(max_magnitudes(x[i][2]), max_magnitudes(x[i][3])));
      most = __vmaxu2(most, __shfl_xor_sync(kAllLanes, most, 1));
      most = __vmaxu2(most, __shfl_xor_sync(kAllLanes, most, 2));
      const uint32_t field = query_factor_field(max(most & kLowHalf, most >> kHalfBits) >> kBf16Mantissa);
      lost |= field == 0;
      if (quad_lane(lane) == 0) factors[row] = of_exponent_field(2 * kBias - field);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const uint2 y = to_e4m3(x[i][part], of_exponent_field(field), lost);
        const uint32_t start = shared + row * kRowBytes + kWord * quad_lane(lane);
        store_shared(start + swizzled(2 * part, row), y.x);
        store_shared(start + swizzled(2 * part + 1, row), y.y);
      }
    }
    return lost == 0;
  }
};

// What a block's threads share, and where its tiles lie.
struct ScoreRun {
  uint32_t first_row;       // in shared memory: a row number per 16 keys
  uint32_t queries, table;  // shared memory
  uint32_t weights;         // shared memory: half of them, times the powers of two that queries were divided by
  float* scores;            // of the token
  int first, tiles, visible, end;
};

// Head of the weight at `place` in shared memory: runs of four weights of quarters 0, 1, 2, 3, and so on.
__device__ __forceinline__ int head_of_weight(int place) {
  return 16 * (place >> 4) + 8 * (place >> 1 & 1) + 2 * (place >> 2 & 3) + (place & 1);
}

// Weights of heads 8 j + 2 quarter + {0, 1}.
__device__ __forceinline__ void load_weights(uint32_t shared, int quarter, float (&weights)[kOwnHeads]) {
#pragma unroll
  for (int i = 0; i < kOwnHeads / 4; ++i) {
    const uint4 x = load_shared(shared + kQuad * kChunkBytes * i + kChunkBytes * quarter);
    weights[4 * i] = __uint_as_float(x.x), weights[4 * i + 1] = __uint_as_float(x.y);
    weights[4 * i + 2] = __uint_as_float(x.z), weights[4 * i + 3] = __uint_as_float(x.w);
  }
}

// FP4 keys leave registers for four tiles (three: 64.6 us, two: 69.7, four: 63.5, at 64 x 32,768).
constexpr int kFp4Stages = 4;

// `kStages` - 1 tiles are loaded ahead.
template <typename Key, bool kE4m3, int kStages>
__device__ __forceinline__ void score_tiles(const ScoreArgs& args, const ScoreRun& run, int warp, int lane) {
  const int quarter = quad_lane(lane);
  const int odd = quarter & 1;
  const uint32_t b = k_major_low(run.queries);
  const typename Key::Source source(args, lane);
  const int own =
      run.first + warp * kGroupKeys + quad_of(lane) + kLowerRow * quarter;  // the key of the first tile to write
  float* scores = run.scores + own;
  float weights[kOwnHeads];
  load_weights(run.weights, quarter, weights);
  Key keys[kStages];
  auto load = [&](Key& key, int tile) {
    if (tile < run.tiles)
      key.load(source, load_shared1(run.first_row + (tile * kScoreTile / kGroupKeys + warp) * kWord));
  };
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) load(keys[i], i);
  for (int round = 0; round < run.tiles; round += kStages) {
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      const int tile = round + stage;
      if (tile >= run.tiles) break;
      load(keys[(stage + kStages - 1) % kStages], tile + kStages - 1);
      Accumulator<kScoreHeads> z;
      float rest;
      if constexpr (kE4m3) {
        Fragments a;
        const uint32_t most = keys[stage].largest_scales();
        keys[stage].decode_e4m3(a, run.table, most);
        mma_fence();
#pragma unroll
        for (int i = 0; i < kSteps; ++i) mma_64x64_e4m3(z, a[i], k_major(b, i * kMmaBytes), i > 0);
        mma_commit();
        rest = keys[stage].rest_e4m3(odd, most);
      } else {
        Fragments a[2];
        keys[stage].template decode<0>(a[0]);
        mma_fence();
#pragma unroll
        for (int i = 0; i < kSteps; ++i) mma_64x64(z, a[0][i], k_major(b, i * kMmaBytes), i > 0);
        mma_commit();
        keys[stage].template decode<1>(a[1]);
        mma_fence();
#pragma unroll
        for (int i = 0; i < kSteps; ++i) mma_64x64(z, a[1][i], k_major(b, kBlockBytes + i * kMmaBytes), 1);
        mma_commit();
        rest = keys[stage].rest(odd);
      }
      mma_wait<0>();
      float sum[2][2] = {};
#pragma unroll
      for (int j = 0; j < kScoreHeads / 2; ++j) {
        // Twice relu on the multiplication pipes (a maximum would go to the busy integer pipe); NaN stays NaN.
        sum[j >> 1 & 1][j & 1] += weights[(j >> 2) * 2 + (j & 1)] * (z[j] + fabsf(z[j]));
      }
      // Even quarters finish the first key's sum, odd ones the second's.
      const float part[2] = {sum[0][0] + sum[0][1], sum[1][0] + sum[1][1]};
      float score = (odd ? part[1] : part[0]) + __shfl_xor_sync(kAllLanes, odd ? part[0] : part[1], 1);
      score = (score + __shfl_xor_sync(kAllLanes, score, 2)) * rest;
      const int key = tile * kScoreTile;
      if (quarter < 2 && own + key < run.end) scores[key] = own + key < run.visible ? score : -kInf;
    }
  }
}

template <typename Key>
__global__ void __launch_bounds__(kScoreThreads, kScoreBlocks)
    index_scores_kernel(const __grid_constant__ ScoreArgs args) {
  __shared__ alignas(1024) uint8_t queries[2 * kBlockBytes];
  __shared__ int32_t first_row[kMaxRunTiles * kScoreTile / kGroupKeys];
  __shared__ alignas(8) uint8_t table[kShifts * kShiftBytes];
  __shared__ float factors[kScoreHeads];
  __shared__ alignas(kChunkBytes) float weights[kScoreHeads];
  const int token = blockIdx.y, thread = threadIdx.x, lane = lane_of(thread);
  const int warp = __shfl_sync(kAllLanes, warp_of(thread), 0);
  const int total = args.columns * args.rows_per_block;
  ScoreRun run;
  run.first_row = shared_address(first_row);
  run.queries = shared_address(queries);
  run.table = shared_address(table);
  run.weights = shared_address(weights);
  run.scores = args.scores + static_cast<int64_t>(token) * total;
  run.first = blockIdx.x * args.run_tiles * kScoreTile;
  run.end = min(run.first + args.run_tiles * kScoreTile, total);
  run.visible = min(max(__ldg(args.count + token), 0), run.end);
  run.tiles = run.visible > run.first ? (run.visible - run.first + kScoreTile - 1) / kScoreTile : 0;
  for (int s = run.first + run.tiles * kScoreTile + thread; s < run.end; s += kScoreThreads) {
    run.scores[s] = -kInf;
  }
  if (run.tiles == 0) return;

  // All that is needed from memory is asked for at once.
  QueryPart part;
  part.load<Key>(args, token, warp, lane);
  const int head = head_of_weight(thread % kScoreHeads);
  const float* token_weights = args.weights + static_cast<int64_t>(token) * args.weight_stride;
  const float weight = head < args.heads ? __fmul_rn(__ldg(token_weights + head), args.weight_scale) : 0.f;

  // Rows of the run, one number per 16 keys. Keys past the end of the table repeat the last 16.
  for (int g = thread; g < run.tiles * (kScoreTile / kGroupKeys); g += kScoreThreads) {
    const int key = min(run.first + g * kGroupKeys, total - kGroupKeys);
    const int column = key / args.rows_per_block;
    const int id = __ldg(args.table + static_cast<int64_t>(token) * args.columns + column);
    const int block = min(max(id, 0), args.blocks - 1);  // of none that exists: the nearest, as in the reference
    first_row[g] = args.base + block * args.rows_per_block + key - column * args.rows_per_block;
  }
  bool e4m3 = false;
  float unit = 1.f;  // what a one is worth in the products of this thread's head
  if constexpr (Key::kE4m3) {
    static_assert(kShifts * kShiftBytes == kScoreThreads, "a byte of the table a thread");
    table[thread] = shifted_code(thread % kShiftBytes, thread / kShiftBytes);
    e4m3 = __syncthreads_and(part.store_e4m3(run.queries, factors, warp, lane));
    if (e4m3) unit = Key::kE4m3Unit * factors[head];
  }
  if (!e4m3) part.store<Key>(run.queries, warp, lane);
  if (thread < kScoreHeads) weights[thread] = 0.5f * unit * weight;
  fence_for_mma();
  __syncthreads();

  if constexpr (Key::kE4m3) {
    if (e4m3) return score_tiles<Key, true, kFp4Stages>(args, run, warp, lane);
  }
  score_tiles<Key, false, 2>(args, run, warp, lane);
}

}  // namespace dsv4
