// Index scores over paged fp4 or fp8 keys (dsv4_jax/ops/index_scores.py): I[t, s] = sum_h w[t, h] relu(q[t, h] . K[s]).
//
// A block takes one token, or eight that share their keys, and a run of these. Its warpgroups take turns at tiles of 64
// keys, which a warp for each of them copies to shared memory some tiles ahead (index/scores_copies.cuh). A thread
// reads its share of two keys, decodes it in registers and multiplies (wgmma, A from registers) with the heads of each
// token, which stay in shared memory (index/scores_queries.cuh). A score depends on its token and key alone.
//
// Where it loses little, products are of FP8 (index/scores_fp8.cuh): whether a token takes them depends on its queries
// alone, so that its scores do not depend on what else is in the batch.
#pragma once

#include "index/scores_copies.cuh"
#include "index/scores_queries.cuh"

namespace dsv4 {

// Named barriers: of the warpgroups that multiply; of all, which agree on how to go on.
constexpr int kConsumers = 1, kAgree = 2;

// A block's run.
template <int kTokens>
struct ScoreRun {
  int first, end, tiles;
  int visible[kTokens];
  int stride;  // from a token's scores to the next one's
};

// The weighted sums of a quad's two keys: of the first one in even quarters, of the second in odd ones.
__device__ __forceinline__ float weigh(const Accumulator<kScoreHeads>& z, const float (&weights)[kOwnHeads], int odd) {
  float sum[2][2] = {};
#pragma unroll
  for (int j = 0; j < kScoreHeads / 2; ++j) {
    // Twice relu on the multiplication pipes (a maximum would go to the busy integer pipe); NaN stays NaN.
    sum[j >> 1 & 1][j & 1] += weights[(j >> 2) * 2 + (j & 1)] * (z[j] + fabsf(z[j]));
  }
  const float part[2] = {sum[0][0] + sum[0][1], sum[1][0] + sum[1][1]};
  const float score = (odd ? part[1] : part[0]) + __shfl_xor_sync(kAllLanes, odd ? part[0] : part[1], 1);
  return score + __shfl_xor_sync(kAllLanes, score, 2);
}

// A warpgroup: every kGroups-th tile, from `turn` on.
template <typename Key, int kTokens, bool kE4m3, typename Shared>
__device__ __forceinline__ void score_tiles(Shared& s, const ScoreRun<kTokens>& run, float* scores, int turn, int group,
                                            int warp, int lane) {
  constexpr int kGroups = Shared::Shape::kGroups;
  static_assert(kE4m3 || kTokens == 1, "bf16 queries of one token fill the shared memory");
  const int quarter = quad_lane(lane), odd = quarter & 1;
  const uint32_t shared = kept_address(&s), b = k_major_low(shared + offsetof(Shared, queries));
  const uint32_t all_weights = shared + offsetof(Shared, weights);
  float weights[kOwnHeads];
  constexpr bool kKept = kTokens == 1 && kE4m3;  // registers hold the weights
  if (kKept) load_weights(all_weights, quarter, weights);
  // The key whose score this thread writes; half of the threads write none.
  int own = run.first + group * kScoreTile + warp * kGroupKeys + quad_of(lane) + kLowerRow * quarter;
  scores += own;
  if (quarter >= 2) own = run.end;
  turn += group;
#pragma unroll 1
  for (int tile = group; tile < run.tiles; tile += kGroups) {
    const Stage slot = stage_of<Shared::kSlots>(turn);
    const uint32_t bars = shared + slot.index * sizeof(uint64_t);
    barrier_wait(bars + offsetof(Shared, full), slot.phase);
    Key key;
    key.fetch(shared + offsetof(Shared, keys) + slot.index * kSlotBytes<Key>, warp, lane);
    const auto give_back = [&] {
      __syncwarp();
      if (lane == 0) barrier_arrive(bars + offsetof(Shared, empty));
    };
    const auto write = [&](int t, float score) {
      if (own < run.end) scores[static_cast<int64_t>(t) * run.stride] = own < run.visible[t] ? score : -kInf;
    };
    Accumulator<kScoreHeads> z[kTokens == 1 ? 1 : 2];
    if constexpr (kE4m3) {
      Fragments a;
      const uint32_t most = key.largest_scales();
      key.decode_e4m3(a, shared + offsetof(Shared, table), most);
      const auto multiply = [&](int t) {
        mma_fence();
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          mma_64x64_e4m3(z[t & 1], a[i], k_major(b, t * kBlockBytes + i * kMmaBytes), i > 0);
        }
        mma_commit();
      };
      multiply(0);
      const float rest = key.rest_e4m3(odd, most);
      give_back();
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        if (t + 1 < kTokens) {
          multiply(t + 1);
          mma_wait<1>();
        } else {
          mma_wait<0>();
        }
        if (!kKept) load_weights(all_weights + t * kScoreHeads * kWord, quarter, weights);
        write(t, weigh(z[t & 1], weights, odd) * rest);
      }
    } else {
      Fragments a[2];
      key.template decode<0>(a[0]);
      mma_fence();
#pragma unroll
      for (int i = 0; i < kSteps; ++i) mma_64x64(z[0], a[0][i], k_major(b, i * kMmaBytes), i > 0);
      mma_commit();
      key.template decode<1>(a[1]);
      mma_fence();
#pragma unroll
      for (int i = 0; i < kSteps; ++i) mma_64x64(z[0], a[1][i], k_major(b, kBlockBytes + i * kMmaBytes), 1);
      mma_commit();
      const float rest = key.rest(odd);
      give_back();
      mma_wait<0>();
      load_weights(all_weights, quarter, weights);
      write(0, weigh(z[0], weights, odd) * rest);
    }
    turn += kGroups;
    if (own < run.end) own += kGroups * kScoreTile;
    scores += kGroups * kScoreTile;
  }
}

template <int kTokens>
__device__ __forceinline__ ScoreRun<kTokens> run_of(const ScoreArgs& args, int token) {
  const int total = args.columns * args.rows_per_block;
  ScoreRun<kTokens> run;
  run.stride = total;
  run.first = blockIdx.x * args.run_tiles * kScoreTile;
  run.end = min(run.first + args.run_tiles * kScoreTile, total);
  int most = 0;
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    run.visible[t] = min(max(__ldg(args.count + token + t), 0), run.end);
    most = max(most, run.visible[t]);
  }
  run.tiles = most > run.first ? (most - run.first + kScoreTile - 1) / kScoreTile : 0;
  return run;
}

// Whether the tables of the tokens name the same blocks for the run, as far as the threads from `thread` on, kWarpgroup
// of them, can tell.
template <int kTokens>
__device__ __forceinline__ bool shares_keys(const ScoreArgs& args, int token, int thread) {
  const ScoreRun<1> run = run_of<1>(args, token);
  const int32_t* table = args.table + static_cast<int64_t>(token) * args.columns;
  bool same = true;
#pragma unroll 1
  for (int c = run.first / args.rows_per_block + thread; c <= (run.end - 1) / args.rows_per_block; c += kWarpgroup) {
    const int id = __ldg(table + c);
#pragma unroll
    for (int t = 1; t < kTokens; ++t) same &= __ldg(table + static_cast<int64_t>(t) * args.columns + c) == id;
  }
  return same;
}

// The run of kTokens tokens. More than one: false, and nothing done, if not all of them share their keys and take FP8
// products.
template <typename Key, int kTokens, typename Shared>
__device__ __forceinline__ bool score_run(const ScoreArgs& args, Shared& s, int token, int& turn, int thread,
                                          int warp) {
  using Shape = typename Shared::Shape;
  constexpr int kThreads = Shape::kThreads, kBlockQuads = kThreads / kQuad, kHeads = kTokens * kScoreHeads;
  constexpr int kRounds = (kHeads + kBlockQuads - 1) / kBlockQuads;
  constexpr int kWeightRounds = (kHeads + kThreads - 1) / kThreads;
  const int lane = lane_of(thread);
  // All that is needed from memory is asked for at once.
  const ScoreRun<kTokens> run = run_of<kTokens>(args, token);
  QueryPart part[kRounds];
  float weight[kWeightRounds];
  const auto row_of = [&](int i) { return kBlockQuads * i + kLanes / kQuad * warp + quad_of(lane); };
  const auto place_of = [&](int i) { return kThreads * i + thread; };
  const uint32_t queries = shared_address(s.queries);
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    if (row_of(i) < kHeads) part[i].template load<Key>(args, token, row_of(i), lane);
  }
#pragma unroll
  for (int i = 0; i < kWeightRounds; ++i) {
    const int t = over<kScoreHeads>(place_of(i)), head = head_of_weight(within<kScoreHeads>(place_of(i)));
    weight[i] = 0.f;
    if (t < kTokens && head < args.heads) {
      weight[i] = __fmul_rn(__ldg(args.weights + static_cast<int64_t>(token + t) * args.weight_stride + head),
                            args.weight_scale);
    }
  }
  if (Key::kTable && thread < kShifts * kShiftBytes) {
    s.table[thread] = shifted_code(within<kShiftBytes>(thread), over<kShiftBytes>(thread));
  }
  bool e4m3 = true;
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    if (row_of(i) < kHeads) e4m3 &= part[i].store_e4m3(queries, s.factors, row_of(i), lane);
  }
  if constexpr (kTokens > 1) {
    if (!named_all(kAgree, Shape::kAllThreads, e4m3)) return false;
  } else {
    e4m3 = named_all(kConsumers, kThreads, e4m3);
    if (!e4m3) {
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        if (row_of(i) < kHeads) part[i].template store<Key>(queries, row_of(i), lane);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kWeightRounds; ++i) {
    const int place = place_of(i), t = over<kScoreHeads>(place);
    const int row = t * kScoreHeads + head_of_weight(within<kScoreHeads>(place));
    if (t < kTokens) s.weights[place] = 0.5f * (e4m3 ? Key::kE4m3Unit * s.factors[row] : 1.f) * weight[i];
  }
  float* scores = args.scores + static_cast<int64_t>(token) * run.stride;
#pragma unroll 1
  for (int key = run.first + run.tiles * kScoreTile + thread; key < run.end; key += kThreads) {
#pragma unroll
    for (int t = 0; t < kTokens; ++t) scores[static_cast<int64_t>(t) * run.stride + key] = -kInf;
  }
  fence_for_mma();
  named_sync(kConsumers, kThreads);

  const int group = over<kWarpgroup / kLanes>(warp), quarter = within<kWarpgroup / kLanes>(warp);
  if (kTokens > 1 || e4m3) {
    score_tiles<Key, kTokens, true>(s, run, scores, turn, group, quarter, lane);
  } else if constexpr (kTokens == 1) {
    score_tiles<Key, 1, false>(s, run, scores, turn, group, quarter, lane);
  }
  turn += run.tiles;
  return true;
}

template <typename Key, int kTokens, typename Shape>
__global__ void __launch_bounds__(Shape::kAllThreads, Shape::kBlocks)
    index_scores_kernel(const __grid_constant__ ScoreArgs args) {
  using Shared = ScoreShared<Key, kTokens, Shape>;
  extern __shared__ __align__(1024) uint8_t raw[];
  auto& s = *reinterpret_cast<Shared*>(raw);
  const int thread = threadIdx.x, lane = lane_of(thread), warp = __shfl_sync(kAllLanes, warp_of(thread), 0);
  const int token = blockIdx.y * kTokens, tokens = min(kTokens, args.tokens - token);
  // By all warps: a warp makes the barriers of its lanes one after the other, 50 clocks each.
  for (int slot = warp; slot < Shared::kSlots; slot += Shape::kAllThreads / kLanes) {
    if (lane == 0) {
      barrier_init(shared_address(&s.full[slot]), kScoreTile / copied_keys(args.rows_per_block));
      barrier_init(shared_address(&s.empty[slot]), kWarpgroup / kLanes);
      barrier_init_fence();
    }
  }
  __syncthreads();
  int turn = 0;
  if (warp >= Shape::kWarps) {
    give_registers<Shape::kCopyRegisters>();
    const int group = warp - Shape::kWarps;
    bool shared = false;
    if constexpr (kTokens > 1) {
      if (tokens == kTokens) {
        shared = named_all(kAgree, Shape::kAllThreads, shares_keys<kTokens>(args, token, thread - Shape::kThreads));
      }
    }
    if (group >= Shape::kGroups) return;
#pragma unroll 1
    for (int t = token, end = shared ? token + 1 : token + tokens; t < end; ++t) {
      const int tiles = shared ? run_of<kTokens>(args, t).tiles : run_of<1>(args, t).tiles;
      copy_run<Key>(args, s, t, tiles, turn, group, lane);
      turn += tiles;
    }
  } else {
    take_registers<Shape::kRegisters>();
    if constexpr (kTokens > 1) {
      if (tokens == kTokens && score_run<Key, kTokens>(args, s, token, turn, thread, warp)) return;
    }
#pragma unroll 1
    for (int t = 0; t < tokens; ++t) {
      if (kTokens > 1) named_sync(kConsumers, Shape::kThreads);  // what the one before left was read
      score_run<Key, 1>(args, s, token + t, turn, thread, warp);
    }
  }
}

}  // namespace dsv4
