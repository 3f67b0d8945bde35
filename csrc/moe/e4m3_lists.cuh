// What goes before the products of moe/e4m3.cu: rows of e4m3 by expert, in groups of eight as of moe/lists.cuh.
//
// A group's rows of 128 columns are a swizzled block of 1 KiB, and the blocks of all groups of 128 columns lie next to
// each other: what a product takes of some groups is one run of bytes, and so are their scales.
#pragma once

#include "dense/e4m3.cuh"
#include "dense/round_rows.cuh"
#include "moe/lists.cuh"

namespace dsv4 {

// Where things lie in the workspace.
struct MoeE4m3Work {
  int32_t* tile_count;
  int32_t* taken;  // items beyond each block's first, of either product
  RowTile* tiles;
  int32_t* pairs;        // of a row
  float* shares;         // of a row
  uint8_t* codes;        // [T, hidden] of the tokens
  float* scales;         // [hidden / 128, pitch] of the tokens
  uint8_t* rows;         // [hidden / 128, groups, 1024] tokens' rows
  float* row_scales;     // [hidden / 128, groups * 8]
  uint8_t* middle;       // [inter / 128, groups, 1024] rows between the products
  float* middle_scales;  // [inter / 128, groups * 8]
  __nv_bfloat16* parts;  // [T * top, hidden] results of the experts
  int groups;
};

// Rows of scales next to each other, in whole 16 bytes.
__host__ __device__ constexpr int scale_pitch(int rows) { return (rows + 3) / 4 * 4; }

__host__ __device__ inline MoeE4m3Work moe_e4m3_work(const MoeArgs& args, size_t* bytes) {
  const size_t pairs = static_cast<size_t>(args.tokens) * args.top;
  const int groups = most_groups(args.tokens, args.tokens * args.top, args.experts);
  const size_t rows = static_cast<size_t>(groups) * kGroupRows, tokens = args.tokens;
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
  work.codes = taken(tokens * hidden);
  work.scales = reinterpret_cast<float*>(taken(of_hidden * scale_pitch(args.tokens)));
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

// Calls `f` with the number and the expert of each pair of a token that has one: the token's experts are read once.
template <typename F>
__device__ __forceinline__ void each_expert(const MoeArgs& args, int token, const F& f) {
  const int32_t* const chosen = args.chosen + token * args.top;
  int named[kMaxTop];
#pragma unroll
  for (int k = 0; k < kMaxTop; ++k) named[k] = k < args.top ? __ldg(chosen + k) : 0;
#pragma unroll
  for (int k = 0; k < kMaxTop; ++k) {
    if (k >= args.top) break;
    const uint32_t expert = static_cast<uint32_t>(named[k]) - static_cast<uint32_t>(args.first);
    bool counts = expert < static_cast<uint32_t>(args.experts);
#pragma unroll
    for (int other = 0; other < k; ++other) counts &= named[other] != named[k];
    if (counts) f(k, static_cast<int>(expert));
  }
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

// Every block counts all pairs, and gives places to a run of them: a warp copies a row. A pair comes behind those of
// its expert that come before it.
__global__ void __launch_bounds__(kListThreads)
    moe_e4m3_lists_kernel(const __grid_constant__ MoeArgs args, int tile_rows) {
  __shared__ int count[kMaxExperts], before[kMaxExperts], first_group[kMaxExperts];
  wait_for_previous();
  let_next_start();
  const int pairs = args.tokens * args.top, lane = lane_of(threadIdx.x), warp = warp_of(threadIdx.x);
  const int run = (pairs + gridDim.x - 1) / gridDim.x, from = min(static_cast<int>(blockIdx.x) * run, pairs);
  const int to = min(from + run, pairs);
  const MoeE4m3Work work = moe_e4m3_work(args, nullptr);
  for (int e = threadIdx.x; e < args.experts; e += kListThreads) count[e] = before[e] = 0;
  __syncthreads();
#pragma unroll 2
  for (int token = threadIdx.x; token < args.tokens; token += kListThreads) {
    each_expert(args, token, [&](int k, int e) {
      atomicAdd(count + e, 1);
      if (token * args.top + k < from) atomicAdd(before + e, 1);
    });
  }
  __syncthreads();
  if (threadIdx.x < kLanes) {
    const int tiles = list_tiles(count, args.experts, tile_rows, blockIdx.x == 0 ? work.tiles : nullptr,
                                 [&](int e, int group) { first_group[e] = group; });
    if (threadIdx.x == 0 && blockIdx.x == 0) *work.tile_count = tiles, work.taken[0] = work.taken[1] = 0;
  }
  __syncthreads();
  const int chunks = args.hidden / kChunkBytes, blocks = args.hidden / kE4m3Columns, pitch = scale_pitch(args.tokens);
  constexpr int kBlockChunks = kE4m3Columns / kChunkBytes;
  for (int p = from + warp; p < to; p += kListWarps) {
    const int e = expert_of(args, p);
    if (e < 0) continue;
    int equal = 0;
    for (int i = from + lane; i < p; i += kLanes) equal += expert_of(args, i) == e;
    const int place = before[e] + __reduce_add_sync(kAllLanes, equal), token = p / args.top;
    const int group = first_group[e] + place / kGroupRows, row = within<kGroupRows>(place);
    const size_t own = static_cast<size_t>(group) * kGroupRows + row;
    if (lane == 0) work.pairs[own] = p, work.shares[own] = share_of(args, p);
    const auto* codes = reinterpret_cast<const uint4*>(work.codes + static_cast<size_t>(token) * args.hidden);
#pragma unroll 8
    for (int c = lane; c < chunks; c += kLanes) {
      const size_t block = static_cast<size_t>(c / kBlockChunks) * work.groups + group;
      *reinterpret_cast<uint4*>(work.rows + block * kAtomBytes + row * kRowBytes + swizzled(c % kBlockChunks, row)) =
          __ldcg(codes + c);
    }
    for (int b = lane; b < blocks; b += kLanes)
      work.row_scales[static_cast<size_t>(b) * work.groups * kGroupRows + own] =
          __ldcg(work.scales + static_cast<size_t>(b) * pitch + token);
  }
}

// The experts' results by pair, of moe/e4m3.cu: a pair has its share already, one whose token has named its expert
// before none.
struct RoundedParts {
  static constexpr bool kShared = true;
  __device__ __forceinline__ static const __nv_bfloat16* of(const MoeArgs& args) {
    return moe_e4m3_work(args, nullptr).parts;
  }
  __device__ __forceinline__ static float4 load(const __nv_bfloat16* from) {
    constexpr uint32_t kUpper = 0xFFFF0000u;
    const uint2 x = __ldcs(reinterpret_cast<const uint2*>(from));
    return make_float4(__uint_as_float(x.x << 16), __uint_as_float(x.x & kUpper), __uint_as_float(x.y << 16),
                       __uint_as_float(x.y & kUpper));
  }
};

}  // namespace dsv4
