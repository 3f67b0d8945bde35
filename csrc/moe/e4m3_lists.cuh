// What goes before the products of moe/e4m3.cu: rows of e4m3 by expert, in groups of eight as of moe/lists.cuh. One
// kernel gives each pair its row, the next rounds the tokens' rows and writes them there.
//
// A group's rows of 128 columns are a swizzled block of 1 KiB, and the blocks of all groups of 128 columns lie next to
// each other: what a product takes of some groups is one run of bytes, and so are their scales.
#pragma once

#include "common/row_math.cuh"
#include "dense/e4m3.cuh"
#include "dense/round_eight.cuh"
#include "moe/lists.cuh"

namespace dsv4 {

// Where things lie in the workspace.
struct MoeE4m3Work {
  int32_t* tile_count;
  int32_t* taken;  // items beyond each block's first, of either product
  RowTile* tiles;
  int32_t* pairs;        // of a row
  float* shares;         // of a row
  int32_t* places;       // [T, top] rows of the pairs; -1: none
  uint8_t* rows;         // [hidden / 128, groups, 1024] tokens' rows
  float* row_scales;     // [hidden / 128, groups * 8]
  uint8_t* middle;       // [inter / 128, groups, 1024] rows between the products
  float* middle_scales;  // [inter / 128, groups * 8]
  __nv_bfloat16* parts;  // [T * top, hidden] results of the experts
  int groups;
};

__host__ __device__ inline MoeE4m3Work moe_e4m3_work(const MoeArgs& args, size_t* bytes) {
  const size_t pairs = static_cast<size_t>(args.tokens) * args.top;
  const int groups = most_groups(args.tokens, args.tokens * args.top, args.experts);
  const size_t rows = static_cast<size_t>(groups) * kGroupRows;
  const size_t hidden = args.hidden, inter = args.inter;
  const size_t of_hidden = hidden / kE4m3Columns * sizeof(float), of_inter = inter / kE4m3Columns * sizeof(float);
  uint8_t* at = args.work + kPageBytes;  // the counts come first
  const auto taken = [&](size_t size) {
    uint8_t* const here = at;
    at += aligned(size);
    return here;
  };
  MoeE4m3Work work;
  work.tile_count = reinterpret_cast<int32_t*>(args.work), work.taken = work.tile_count + 1, work.groups = groups;
  work.tiles = reinterpret_cast<RowTile*>(taken(pairs * sizeof(RowTile)));
  work.pairs = reinterpret_cast<int32_t*>(taken(rows * sizeof(int32_t)));
  work.shares = reinterpret_cast<float*>(taken(rows * sizeof(float)));
  work.places = reinterpret_cast<int32_t*>(taken(pairs * sizeof(int32_t)));
  work.rows = taken(rows * hidden);
  work.row_scales = reinterpret_cast<float*>(taken(of_hidden * rows));
  work.middle = taken(rows * inter);
  work.middle_scales = reinterpret_cast<float*>(taken(of_inter * rows));
  work.parts = reinterpret_cast<__nv_bfloat16*>(taken(pairs * hidden * sizeof(__nv_bfloat16)));
  if (bytes != nullptr) *bytes = at - args.work;
  return work;
}

// The expert of a pair among those that are here; -1: it is none, or the token has named it before.
__device__ __forceinline__ int expert_of(const MoeArgs& args, int pair) {
  const int32_t* const chosen = args.chosen + pair / args.top * args.top;
  const int k = pair % args.top, mine = __ldg(chosen + k);
  const uint32_t expert = static_cast<uint32_t>(mine) - static_cast<uint32_t>(args.first);
  if (expert >= static_cast<uint32_t>(args.experts)) return -1;
  for (int other = 0; other < k; ++other) {
    if (__ldg(chosen + other) == mine) return -1;
  }
  return static_cast<int>(expert);
}

// What a pair's expert counts: with all shares under which the token has named it.
__device__ __forceinline__ float share_of(const MoeArgs& args, int pair) {
  const int first = pair / args.top * args.top, mine = __ldg(args.chosen + pair);
  float share = 0;
  for (int k = 0; k < args.top; ++k) {
    if (__ldg(args.chosen + first + k) == mine) share = __fadd_rn(share, __ldg(args.share + first + k));
  }
  return share;
}

constexpr int kPlaceThreads = 1024, kPlaceWarps = kPlaceThreads / kLanes;
constexpr int kPlacePairs = kPlaceThreads;  // so few that one block places them, one a thread

// Pairs of a warp, in whole warps.
__host__ __device__ constexpr int place_run(int pairs, int warps) {
  return (pairs + warps * kLanes - 1) / (warps * kLanes) * kLanes;
}

struct PlaceCounts {
  uint16_t of[kMaxExperts];
};
inline int place_bytes(int pairs, int blocks, int warps) {
  return warps * static_cast<int>(sizeof(PlaceCounts) + place_run(pairs, blocks * warps) * sizeof(uint32_t));
}

// Gives every pair its row: a pair comes behind those of its expert that come before it. A block, or a cluster of
// eight, of whose warps each has a run of the pairs, which it alone counts; only experts' counts are exchanged.
__global__ void __launch_bounds__(kPlaceThreads)
    moe_e4m3_places_kernel(const __grid_constant__ MoeArgs args, const __grid_constant__ MoeE4m3Work work,
                           int tile_rows) {
  constexpr uint32_t kNone = ~0u;
  constexpr int kExpertBit = 16, kVector = 4;
  extern __shared__ PlaceCounts counts[];  // of a warp's pairs; then of those of the warps before it
  __shared__ alignas(kChunkBytes) int totals[kMaxExperts], count[kMaxExperts], first[kMaxExperts];
  wait_for_previous();
  let_next_start();  // not before: the next kernel reads the tokens' rows at once
  const int pairs = args.tokens * args.top, blocks = gridDim.x, rank = blockIdx.x;
  const int lane = lane_of(threadIdx.x), warp = warp_of(threadIdx.x), warps = warp_of(blockDim.x);
  const int run = place_run(pairs, blocks * warps), own = warp * run;
  const int from = rank * warps * run + own, to = min(from + run, pairs);
  // Of the block's pairs: the expert, and how many of the warp have it before.
  auto* const named = reinterpret_cast<uint32_t*>(counts + warps);
  for (int e = lane; e < args.experts; e += kLanes) counts[warp].of[e] = 0;
  __syncwarp();
  for (int i = lane; from + i - lane < to; i += kLanes) {
    const int expert = from + i < to ? expert_of(args, from + i) : -1;
    const uint32_t same = __match_any_sync(kAllLanes, expert), before = same & ((1u << lane) - 1);
    const uint32_t counted = expert >= 0 ? counts[warp].of[expert] : 0;
    __syncwarp();
    if (expert >= 0 && before == 0) counts[warp].of[expert] = static_cast<uint16_t>(counted + __popc(same));
    __syncwarp();
    named[own + i] = expert < 0 ? kNone : expert << kExpertBit | (counted + __popc(before));
  }
  __syncthreads();
  for (int e = threadIdx.x; e < args.experts; e += blockDim.x) {
    int sum = 0;
#pragma unroll 8
    for (int w = 0; w < warps; ++w) {
      const int more = counts[w].of[e];
      counts[w].of[e] = static_cast<uint16_t>(sum);
      sum += more;
    }
    totals[e] = sum;
  }
  if (blocks > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  for (int e = kVector * threadIdx.x; e < args.experts; e += kVector * blockDim.x) {
    uint4 all = {}, before = {};
#pragma unroll
    for (int block = 0; block < kMaxCluster; ++block) {
      if (block == rank) before = all;
      if (block >= blocks) continue;
      const uint32_t at = shared_address(totals + e);
      const uint4 more = blocks == 1 ? load_shared(at) : load_peer(peer_address(at, block));
      all = {all.x + more.x, all.y + more.y, all.z + more.z, all.w + more.w};
    }
    *reinterpret_cast<uint4*>(count + e) = all;
    *reinterpret_cast<uint4*>(first + e) = before;
  }
  __syncthreads();
  if (warp == 0) {
    const int tiles = list_tiles(count, args.experts, tile_rows, rank == 0 ? work.tiles : nullptr,
                                 [&](int e, int group) { first[e] += group * kGroupRows; });
    if (lane == 0 && rank == 0) *work.tile_count = tiles, work.taken[0] = work.taken[1] = 0;
  }
  __syncthreads();
  for (int i = lane; from + i < to; i += kLanes) {
    const uint32_t of_pair = named[own + i];
    const int pair = from + i, expert = of_pair >> kExpertBit;
    int place = -1;
    if (of_pair != kNone) {
      place = first[expert] + counts[warp].of[expert] + static_cast<int>(of_pair & ((1u << kExpertBit) - 1));
      work.pairs[place] = pair, work.shares[place] = share_of(args, pair);
    }
    work.places[pair] = place;
  }
  if (blocks > 1) cluster_meet();  // others have read the totals
}

constexpr int kListedThreads = 128;
constexpr int kListedTokens = 4;  // of a thread, where there are many
constexpr int kListedFew = 512;   // tokens that are not

// Rounds the tokens' rows and writes each to all of its places. A thread has eight columns.
template <int kTokens>
__global__ void __launch_bounds__(kListedThreads)
    moe_e4m3_rows_kernel(const __grid_constant__ MoeArgs args, const __grid_constant__ MoeE4m3Work work) {
  static_assert(kMaxTop <= kRoundSharers, "a lane for each place of a token");
  let_next_start();
  const int column = (blockIdx.x * kListedThreads + threadIdx.x) * kRoundOwn, token = blockIdx.y * kTokens;
  if (column >= args.hidden) return;  // whole warps: columns are in 256s
  const int own = within<kRoundSharers>(threadIdx.x);
  uint4 words[kTokens] = {};
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    if (token + t < args.tokens)
      words[t] = __ldg(reinterpret_cast<const uint4*>(args.x + static_cast<size_t>(token + t) * args.hidden + column));
  }
  uint2 codes[kTokens];
  int exponents[kTokens];
#pragma unroll
  for (int t = 0; t < kTokens; ++t) exponents[t] = round_eight(words[t], codes[t]);
  wait_for_previous();
  int places[kTokens];
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    const bool has = own < args.top && token + t < args.tokens;
    places[t] = has ? __ldcg(work.places + (token + t) * args.top + own) : -1;
  }
  const int chunk = own / 2;
  const size_t block = static_cast<size_t>(column / kRoundGroup) * work.groups;
  uint8_t* const rows = work.rows + block * kAtomBytes + own % 2 * sizeof(uint2);
  float* const scales = work.row_scales + block * kGroupRows;
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    if (places[t] >= 0) scales[places[t]] = power_of_two(exponents[t]);
    for (int k = 0; k < args.top; ++k) {
      const int place = __shfl_sync(kAllLanes, places[t], k);
      if (place >= 0) *reinterpret_cast<uint2*>(rows + place * kRowBytes + swizzled(chunk, place)) = codes[t];
    }
  }
}

// The experts' results by pair, of moe/e4m3.cu: a pair has its share already, one whose token has named its expert
// before none.
struct RoundedParts {
  using Number = __nv_bfloat16;
  using Words = uint4;
  static constexpr int kOwn = 8;
  static constexpr bool kShared = true;
  struct Addend {
    uint32_t pairs[kOwn / 2];
    __device__ __forceinline__ float operator()(float sum, int c) const { return sum + first(c); }
    __device__ __forceinline__ float first(int c) const {
      return c % 2 == 0 ? lower_bf16(pairs[c / 2]) : upper_bf16(pairs[c / 2]);
    }
  };
  __device__ __forceinline__ static Addend addend(const Words& x, float /*share*/) { return {{x.x, x.y, x.z, x.w}}; }
  // Sums with what is beside them, as bf16.
  __device__ __forceinline__ static Words rounded(const float (&sums)[kOwn], const Words& beside) {
    const Addend more = addend(beside, 1.f);
    uint32_t pairs[kOwn / 2];
#pragma unroll
    for (int i = 0; i < kOwn / 2; ++i) pairs[i] = bf16_pair(more(sums[2 * i], 2 * i), more(sums[2 * i + 1], 2 * i + 1));
    return {pairs[0], pairs[1], pairs[2], pairs[3]};
  }
};

}  // namespace dsv4
