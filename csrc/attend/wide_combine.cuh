// Runs of a token whose clusters are their own, of attend for few tokens (attend/wide_kernel.cuh): their sums go
// through memory, and a second kernel combines them in rank order, as attend/combine.cuh does within a cluster.
#pragma once

#include "attend/combine.cuh"
#include "attend/wide_block.cuh"
#include "common/overlap.cuh"

namespace dsv4 {

constexpr int kSliceCount = kDim / kBlockColumns;
constexpr int kSumVectors = kSliceCount * kSliceVectors * kWarpgroup;  // of a split, of 16 bytes: halves,
constexpr int kUnitVectors = kSliceCount * kWarpgroup / 4;             // what they are counted in,
constexpr int kSplitVectors = kSumVectors + kUnitVectors + kQuads;     // and (row max, row sum)
constexpr int kSplitWords = kSplitVectors * 4;

// Where the sums of a split of a token and 64 heads lie, as its threads have them.
struct SplitSums {
  uint4* at;

  __device__ __forceinline__ uint4* words(int slice, int vector) const {
    return at + (slice * kSliceVectors + vector) * kWarpgroup;
  }
  __device__ __forceinline__ uint32_t* units(int slice) const {
    return reinterpret_cast<uint32_t*>(at + kSumVectors) + slice * kWarpgroup;
  }
  __device__ __forceinline__ float4* stats() const {
    return reinterpret_cast<float4*>(at + kSumVectors + kUnitVectors);
  }
};

// A block adds up a vector of a slice of all splits: a thread eight columns of a row.
__global__ void __launch_bounds__(kWarpgroup)
    attend_wide_runs_kernel(const __grid_constant__ AttendArgs args, int splits, int head_blocks) {
  let_next_start();
  const int vector = blockIdx.x % kSliceVectors, slice = blockIdx.x / kSliceVectors, unit = blockIdx.y;
  const int head = unit % head_blocks * kHeads, token = unit / head_blocks;
  const int thread = threadIdx.x, lane = lane_of(thread), quad = over<kQuad>(thread);
  constexpr int kRowVectors = kSliceVectors / 2;
  const int half = vector / kRowVectors, cell = vector % kRowVectors * 4;
  const int h = head + accumulator_row(warp_of(thread), lane) + kLowerRow * half;
  const float sink = h < args.heads ? __ldg(args.sink + h) : 0.f;

  wait_for_previous();
  uint4 halves[kMaxCluster];
  uint32_t units[kMaxCluster];
  float2 stats[kMaxCluster];
#pragma unroll
  for (int c = 0; c < kMaxCluster; ++c) {
    halves[c] = {0, 0, 0, 0}, units[c] = 0, stats[c] = {-kInf, 0};
    if (c < splits) {
      const SplitSums run{args.sums + (static_cast<int64_t>(unit) * splits + c) * kSplitVectors};
      stats[c] = reinterpret_cast<const float2*>(run.stats() + quad)[half];
      units[c] = run.units(slice)[thread];
      halves[c] = run.words(slice, vector)[thread];
    }
  }
  float top = -kInf, part[kMaxCluster], totals[kMaxCluster];
#pragma unroll
  for (int c = 0; c < kMaxCluster; ++c) top = fmaxf(top, stats[c].x);
#pragma unroll
  for (int c = 0; c < kMaxCluster; ++c) {
    part[c] = split_rescale(stats[c].x, top);
    totals[c] = __fmul_rn(part[c], stats[c].y);
  }
#pragma unroll
  for (int d = 1; d < kMaxCluster; d *= 2) {  // by pairs, as lanes add up there
#pragma unroll
    for (int c = 0; c < kMaxCluster; c += 2 * d) totals[c] = __fadd_rn(totals[c], totals[c + d]);
  }
  const float rest = totals[0] + sink_weight(sink, top);
  if (slice == 0 && vector % kRowVectors == 0 && quad_lane(lane) == 0 && h < args.heads)
    store_lse(args, token, h, top, totals[0]);
  float x[kChunk] = {};
#pragma unroll
  for (int c = 0; c < kMaxCluster; ++c) {
    if (c >= splits) break;
    add_chunk(x, halves[c], __fdividef(part[c], rest) * of_exponent_field(units[c] >> 8 * half & kByte));
  }
  if (h >= args.heads) return;
  const int column = slice * kBlockColumns + 2 * quad_lane(lane);
  const int64_t first = (static_cast<int64_t>(token) * args.heads + h) * kDim + column;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int j = cell + i;
    float even = x[2 * i], odd = x[2 * i + 1];
    if (args.cosine != nullptr && slice == kSliceCount - 1) {
      const int at = token * kRopePairs + j * kCellColumns / 2 + quad_lane(lane);
      turn_back(even, odd, __ldg(args.cosine + at), __ldg(args.sine + at));
    }
    store_pair(args, first + j * kCellColumns, even, odd);
  }
}

}  // namespace dsv4
