// attend over fp8 rows for few tokens: as attend/kernel.cuh with the same bits, a split of keys over several blocks.
//
// A cluster of eight blocks serves one token and 64 heads. `kBlocks` of them share a split, round by round of a few
// tiles: each scores some of the keys, sixteen at a time, and sums some of the columns of all values. For no number
// needs more than its own row and its own column: logits are of one key, a sum of values is of one column and adds up
// the same products in the same order wherever it is made, and what a tile's weights are relative to is a maximum.
// Blocks send one another, in this order, the maxima of their keys, weights, and sums of weights as far as their keys;
// then what the columns of a row are counted in, and halves of the sums for the splits to be added up as there. Or a
// split has a cluster alone, and its sums go to memory (attend/wide_combine.cuh).
//
//   warpgroup 0      S = Q K^T of the block's own keys, their weights, sums of weights
//   warpgroups 1, 2  values of a slice of 64 columns each, for all keys of the split (of eight blocks only the first)
//   warpgroup 3      by how much each tile shrinks the sums before it
//
// All copy rows and turn their codes into bf16: their own keys for all columns, then all keys for their own columns.
#pragma once

#include "attend/wide_keys.cuh"
#include "attend/wide_softmax.cuh"
#include "attend/wide_sum.cuh"
#include "common/bulk_copy.cuh"
#include "common/overlap.cuh"

namespace dsv4 {

// How the warps share out the rows that they copy and turn into bf16.
template <int kBlocks>
struct WideTurns {
  static constexpr int kSlices = WideShared<kBlocks>::kSlices;
  static constexpr int kValueWarps = kWideWarps - kWarpgroup / kLanes;
  // Eights of rows of a warp that takes all keys for the block's columns.
  static constexpr int kTurns = (WideShared<kBlocks>::kKeys / kGroupRows + kValueWarps - 1) / kValueWarps;
  static constexpr int kIds =
      (kTurns + kQuad - 1) / kQuad;  // of a lane: of row lane % 8 of the (lane / 8 + 4 i)th eight
  static constexpr int kOwnEights = kOwnKeys / kGroupRows, kOwnTasks = kOwnEights * kNopeGroups;
  static constexpr int kOwnTurns = (kOwnTasks + kWideWarps - 1) / kWideWarps;
  static_assert(kTurns * kSlices <= 8 && kOwnTurns <= 8, "scales of a lane, in 64 bits");
  static constexpr int kRopeWarp = kWideWarps - kOwnEights;
};

// The queries of 64 heads of a token, in blocks of 64 columns.
template <int kBlocks>
__device__ __forceinline__ void copy_queries(const AttendArgs& args, WideShared<kBlocks>& s, int token, int head,
                                             int thread) {
  constexpr int kRowChunks = kDim / kChunkColumns, kBlockChunks = kBlockColumns / kChunkColumns;
#pragma unroll 4
  for (int i = 0; i < kHeads * kRowChunks / kWideThreads; ++i) {
    const int chunk = i * kWideThreads + thread, row = over<kRowChunks>(chunk), column = within<kRowChunks>(chunk);
    const bool exists = head + row < args.heads;
    const __nv_bfloat16* from =
        args.queries + (static_cast<int64_t>(token) * args.heads + (exists ? head + row : 0)) * kDim;
    const uint32_t to = shared_address(s.queries) + over<kBlockChunks>(column) * kBlockBytes + row * kRowBytes;
    copy_async(to + swizzled(within<kBlockChunks>(column), row), from + column * kChunkColumns, exists);
  }
}

// Copies of the block's own keys, eight rows and 64 columns a warp at a time; `scales` of what a warp copies.
template <int kBlocks>
__device__ __forceinline__ void copy_own(WideShared<kBlocks>& s, const WideKeys& keys, const WideRound<kBlocks>& r,
                                         int first_step, int own, uint32_t (&scales)[WideTurns<kBlocks>::kOwnTurns],
                                         int warp, int lane) {
  using Turns = WideTurns<kBlocks>;
#pragma unroll
  for (int k = 0; k < Turns::kOwnTurns; ++k) {
    const int task = warp + kWideWarps * k, eight = task % Turns::kOwnEights, columns = task / Turns::kOwnEights;
    scales[k] = 0;
    if (task < Turns::kOwnTasks && eight < 2 * own) {
      const Rows& rows = keys.rows(r.first + over<kTileSteps>(first_step + eight / 2));
      scales[k] = copy_group(rows, shared_address(s.keys[columns]) + eight * kGroupRows * kRowBytes,
                             s.ids[eight * kGroupRows + quad_of(lane)], columns, lane);
    }
  }
  if (warp >= Turns::kRopeWarp && warp - Turns::kRopeWarp < 2 * own) {
    const int eight = warp - Turns::kRopeWarp;
    copy_rope_rows(keys.rows(r.first + over<kTileSteps>(first_step + eight / 2)),
                   shared_address(s.keys[kNopeGroups]) + eight * kGroupRows * kRowBytes,
                   s.ids[eight * kGroupRows + quad_of(lane)], lane);
  }
}

// Copies of all keys of a round, the block's columns of them.
template <int kBlocks>
__device__ __forceinline__ void copy_values(WideShared<kBlocks>& s, const WideKeys& keys, const WideRound<kBlocks>& r,
                                            const int (&ids)[WideTurns<kBlocks>::kIds],
                                            uint32_t (&scales)[WideTurns<kBlocks>::kTurns][WideTurns<kBlocks>::kSlices],
                                            int block, int value_warp, int lane) {
  using Turns = WideTurns<kBlocks>;
  constexpr int kTurns = Turns::kTurns, kSlices = Turns::kSlices, kValueWarps = Turns::kValueWarps;
#pragma unroll
  for (int k = 0; k < kTurns; ++k) {
    const int eight = value_warp + kValueWarps * k;
    const int id = __shfl_sync(kAllLanes, ids[k / kQuad], k % kQuad * kGroupRows + quad_of(lane));
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      const int columns = block * kSlices + slice;
      scales[k][slice] = 0;
      if (eight < r.tiles * (kTile / kGroupRows)) {
        const Rows& rows = keys.rows(r.first + over<kTile / kGroupRows>(eight));
        const uint32_t to = shared_address(s.values[slice]) + eight * kGroupRows * kRowBytes;
        if (columns < kNopeGroups) {
          scales[k][slice] = copy_group(rows, to, id, columns, lane);
        } else {
          copy_rope_rows(rows, to, id, lane);
        }
      }
    }
  }
}

// Turns the codes of the block's own keys into bf16.
template <int kBlocks>
__device__ __forceinline__ void convert_own(WideShared<kBlocks>& s, int own,
                                            const uint32_t (&scales)[WideTurns<kBlocks>::kOwnTurns], int warp,
                                            int lane) {
  using Turns = WideTurns<kBlocks>;
  uint64_t packed = 0;
#pragma unroll
  for (int k = 0; k < Turns::kOwnTurns; ++k) packed |= static_cast<uint64_t>(scales[k]) << 8 * k;
#pragma unroll 1
  for (int task = warp; task < Turns::kOwnTasks; task += kWideWarps, packed >>= 8) {
    const int eight = task % Turns::kOwnEights, columns = task / Turns::kOwnEights;
    if (eight < 2 * own) {
      convert_group(shared_address(s.keys[columns]) + eight * kGroupRows * kRowBytes,
                    static_cast<uint32_t>(packed) & kByte, lane);
    }
  }
}

// Turns the codes of the block's columns of all keys into bf16.
template <int kBlocks>
__device__ __forceinline__ void convert_values(
    WideShared<kBlocks>& s, const WideRound<kBlocks>& r,
    const uint32_t (&scales)[WideTurns<kBlocks>::kTurns][WideTurns<kBlocks>::kSlices], int block, int value_warp,
    int lane) {
  using Turns = WideTurns<kBlocks>;
  constexpr int kTurns = Turns::kTurns, kSlices = Turns::kSlices, kValueWarps = Turns::kValueWarps;
  uint64_t packed = 0;
#pragma unroll
  for (int k = 0; k < kTurns * kSlices; ++k) {
    packed |= static_cast<uint64_t>(scales[k / kSlices][k % kSlices]) << 8 * k;
  }
#pragma unroll 1
  for (int k = 0; k < kTurns * kSlices; ++k, packed >>= 8) {
    const int eight = value_warp + kValueWarps * (k / kSlices), slice = k % kSlices;
    if (eight < r.tiles * (kTile / kGroupRows) && block * kSlices + slice < kNopeGroups) {
      convert_group(shared_address(s.values[slice]) + eight * kGroupRows * kRowBytes,
                    static_cast<uint32_t>(packed) & kByte, lane);
    }
  }
}

// Makes the barriers, and expects the messages that come once.
template <int kBlocks>
__device__ __forceinline__ void expect_messages(WideShared<kBlocks>& s) {
  using Shared = WideShared<kBlocks>;
  for (uint64_t* barrier : {&s.tops_in, &s.weights_in, &s.chain_in, &s.most_in, &s.stats_in, &s.words_in}) {
    barrier_init(shared_address(barrier), 1);
  }
  barrier_init_fence();
  barrier_expect(shared_address(&s.most_in), sizeof(s.weighed.most));
  barrier_expect(shared_address(&s.stats_in), sizeof(s.summed.stats));
  barrier_expect(shared_address(&s.words_in),
                 (Shared::kSplits - 1) * (sizeof(s.summed.words[0]) + sizeof(s.summed.units[0])));
}

// Expects the messages of a round; `chained`: sums of weights of the block before, too.
template <int kBlocks>
__device__ __forceinline__ void expect_round(WideShared<kBlocks>& s, const WideRound<kBlocks>& r, bool chained) {
  barrier_expect(shared_address(&s.tops_in), sizeof(s.tops));
  barrier_expect(shared_address(&s.weights_in), r.tiles * kTileSteps * sizeof(s.weighed.weights[0]));
  if (chained) barrier_expect(shared_address(&s.chain_in), sizeof(s.weighed.chain));
}

// The i-th key whose id a thread loads in a round, by tile and place; tile -1: none. Of the first warpgroup the block's
// own keys, of the others all keys.
template <int kBlocks>
__device__ __forceinline__ int2 key_place(const WideRound<kBlocks>& r, int i, int block, int group, int value_warp,
                                          int thread) {
  constexpr int kValueWarps = WideTurns<kBlocks>::kValueWarps;
  const int lane = lane_of(thread);
  if (group == 0) {
    const int step = r.first_step(block) + over<kStepKeys>(thread);
    if (i > 0 || step >= r.first_step(block + 1)) return {-1, 0};
    return {r.first + over<kTileSteps>(step), within<kTileSteps>(step) * kStepKeys + within<kStepKeys>(thread)};
  }
  const int eight = value_warp + kValueWarps * (over<kGroupRows>(lane) + kQuad * i);
  if (eight >= r.tiles * (kTile / kGroupRows)) return {-1, 0};
  return {r.first + over<kTile / kGroupRows>(eight),
          within<kTile / kGroupRows>(eight) * kGroupRows + within<kGroupRows>(lane)};
}

template <int kBlocks, bool kAlone>
__global__ void __launch_bounds__(kWideThreads, 1)
    attend_wide_kernel(const __grid_constant__ AttendArgs args, Cut cut, int head_blocks) {
  static_assert(!kAlone || kBlocks == kMaxCluster);
  using Shared = WideShared<kBlocks>;
  using Round = WideRound<kBlocks>;
  constexpr int kSlices = Shared::kSlices;
  using Turns = WideTurns<kBlocks>;
  constexpr int kValueWarps = Turns::kValueWarps, kTurns = Turns::kTurns, kIds = Turns::kIds;

  let_next_start();
  extern __shared__ __align__(1024) uint8_t raw[];
  Shared& s = *reinterpret_cast<Shared*>(raw);
  const int rank = blockIdx.x, unit = blockIdx.z;
  const int splits = kAlone ? gridDim.y : Shared::kSplits, run = kAlone ? blockIdx.y : rank / kBlocks;
  const int block = rank % kBlocks, base = rank - block;
  const int head = unit % head_blocks * kHeads, token = unit / head_blocks;
  const int thread = threadIdx.x, lane = lane_of(thread), warp = __shfl_sync(kAllLanes, warp_of(thread), 0);
  const int group = over<kWarpgroup / kLanes>(warp), member = within<kWarpgroup>(thread);
  const int value_warp = warp - kWarpgroup / kLanes;
  const int window_tiles = (args.window_keys + kTile - 1) / kTile;
  const auto cut_of = [=](int keys) {
    const int tiles = window_tiles + (keys + kTile - 1) / kTile, runs = min(cut.runs(tiles), splits);
    return Split{min(run, runs) * tiles / runs, min(run + 1, runs) * tiles / runs};
  };
  const auto rounds_of = [](Split x) { return (x.last - x.first + Shared::kTiles - 1) / Shared::kTiles; };
  if (thread == 0) expect_messages(s);
  arrive_in_cluster();  // barriers are there

  wait_for_previous();
  WideKeys keys{args, token, 0, window_tiles};
  const auto place_of = [&](const Round& r, int i) { return key_place(r, i, block, group, value_warp, thread); };
  int2 found[kIds];
  const auto load_keys = [&](const Round& r) {
#pragma unroll
    for (int i = 0; i < kIds; ++i) {
      const int2 at = place_of(r, i);
      found[i] = at.x < 0 ? make_int2(0, 0) : keys.load(at.x, at.y);
    }
  };
  // If all entries count: known before the count is.
  const Split full = cut_of(args.entry_keys);
  if (full.first < full.last) load_keys(Round::of(full, 0, rounds_of(full)));
  if (args.entry_keys > 0) keys.count = min(max(__ldg(args.entry_count + token), 0), args.entry_keys);
  copy_queries(args, s, token, head, thread);
  const Split own_split = keys.count == args.entry_keys ? full : cut_of(keys.count);
  const int rounds = rounds_of(own_split);
  if (rounds > 0 && (own_split.first != full.first || own_split.last != full.last))
    load_keys(Round::of(own_split, 0, rounds));
  wait_for_cluster();

  WideSoftmax softmax;
  float row_top = -kInf;
  Accumulator<kBlockColumns> o = {};
#pragma unroll 1
  for (int i = 0; i < rounds; ++i) {
    const Round r = Round::of(own_split, i, rounds);
    const bool last = i + 1 == rounds;
    if (i > 0) {
      load_keys(r);
      __syncthreads();  // keys, weights and values are done with
    }
    const int first_step = r.first_step(block), own = r.first_step(block + 1) - first_step;
    int ids[kIds];
#pragma unroll
    for (int k = 0; k < kIds; ++k) {
      const int2 at = place_of(r, k);
      ids[k] = at.x < 0 ? -1 : keys.row_of(at.x, at.y, found[k]);
    }
    if (warp * kLanes < kOwnKeys) {
      const uint32_t seen = __ballot_sync(kAllLanes, ids[0] >= 0);
      if (lane == 0) reinterpret_cast<uint32_t*>(s.visible)[warp] = seen;
      if (thread < kOwnKeys) s.ids[thread] = ids[0];
    }
    if (thread == 0) expect_round(s, r, block > 0 || i > 0);
    __syncthreads();

    uint32_t own_scales[Turns::kOwnTurns];
    copy_own<kBlocks>(s, keys, r, first_step, own, own_scales, warp, lane);
    copy_commit();
    // All keys of the round, the block's columns of them.
    uint32_t scales[kTurns][kSlices];
    if (group > 0) {
      copy_values<kBlocks>(s, keys, r, ids, scales, block, value_warp, lane);
      copy_commit();
      copy_wait<1>();
    } else {
      copy_wait<0>();
    }
    convert_own<kBlocks>(s, own, own_scales, warp, lane);
    fence_for_mma();
    if (group == 0) {
      named_sync(kKeysReady, kWideThreads);
      softmax_own(args, s, r, i, last, block, base, softmax, thread);
      continue;
    }
    named_arrive(kKeysReady, kWideThreads);
    copy_wait<0>();
    convert_values<kBlocks>(s, r, scales, block, value_warp, lane);
    fence_for_mma();
    if (last) arrive_in_cluster();
    constexpr int kSummed = kWarpgroup * (1 + kSlices);  // threads that the factors concern
    if (group <= kSlices) {
      named_sync(kValuesReady, kValueWarps * kLanes);
      named_sync(kRescalesReady, kSummed);
      messages_wait(s.weights_in, i & 1);
      sum_slice(s, o, r, group - 1, member);
    } else {
      named_arrive(kValuesReady, kValueWarps * kLanes);
      if (group == 3) {
        find_rescales(args, s, r, i, row_top, member);
        named_arrive(kRescalesReady, kSummed);
      }
    }
  }
  if (rounds == 0) {
    copy_commit();
    copy_wait<0>();
    arrive_in_cluster();
  }
  const SplitSums alone{kAlone ? args.sums + (static_cast<int64_t>(unit) * splits + run) * kSplitVectors : nullptr};
  if (group > 0 && group <= kSlices) {
    finish_slice<kAlone>(args, s, o, token, head, run, block, group - 1, member, alone);
    return;
  }
  if (group == 0 && block == kBlocks - 1) {  // the split's last keys, or none: the whole sum of weights
    const float totals[2] = {row_total(softmax.total[0]), row_total(softmax.total[1])};
    wait_for_cluster();
    const uint4 stats =
        as_words(softmax.top[0] * args.scale_log2, totals[0], softmax.top[1] * args.scale_log2, totals[1]);
    if constexpr (kAlone) {
      if (quad_lane(lane) == 0) reinterpret_cast<uint4*>(alone.stats())[over<kQuad>(thread)] = stats;
    } else {
#pragma unroll
      for (int p = 0; p < kMaxCluster; p += kQuad) {
        send(p + quad_lane(lane), &s.summed.stats[run][over<kQuad>(thread)], stats, s.stats_in);
      }
    }
    return;
  }
  wait_for_cluster();
}

}  // namespace dsv4
