// The end of attend (attend/kernel.cuh): the splits of a cluster become the output.
#pragma once

#include <cuda_fp16.h>

#include "attend/consumers.cuh"
#include "common/row_math.cuh"

namespace dsv4 {

constexpr int kSumBytes = kDim * sizeof(__half);                                // of a row of sums
constexpr uint32_t kUnitField = kBias + 14 + kBias, kMaxField = 2 * kBias - 1;  // exponent fields
constexpr int kChunk = kChunkBytes / sizeof(__half);                            // sums that a thread combines at once
constexpr int kCombiners = kThreads / kHeads;                                   // threads of a row
constexpr uint32_t kByte = 0xFF;
static_assert(kCombiners >= kMaxCluster, "a lane a run");

// The biased exponent of 2^14 / the largest magnitude; both are normal.
__device__ __forceinline__ uint32_t unit_exponent(float most) {
  return min(kUnitField - (__float_as_uint(most) >> kFloatMantissa), kMaxField);
}
// The biased exponent of what the 256 columns of a thread's row (its upper or lower one) are multiplied by, such that
// the largest lies in [2^14, 2^15).
__device__ __forceinline__ uint32_t unit_exponent(const Sums& o, int half) {
  float most = 0;
#pragma unroll
  for (int j = 0; j < 2 * kSumCells; ++j) {
    const float* x = o[over<kSumCells>(j)] + within<kSumCells>(j) * kCell + 2 * half;
    most = fmaxf(most, fmaxf(fabsf(x[0]), fabsf(x[1])));
  }
  return unit_exponent(row_max(most));
}

// Leaves a split's sums in shared memory for `combine_splits`, as halves: the 256 columns of a row in units of their
// own, such that the largest lies in [2^14, 2^15). Both consumer warpgroups call it; `o` holds 256 columns from 256
// group on.
__device__ __forceinline__ void store_sums(Shared& s, const Sums& o, int group, int thread) {
  const int lane = lane_of(thread), upper = accumulator_row(warp_of(thread) & 3, lane);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = upper + kLowerRow * half;
    const uint32_t exponent = unit_exponent(o, half);
    const float factor = of_exponent_field(exponent);
    if (quad_lane(lane) == 0) s.unit[row][group] = static_cast<uint8_t>(2 * kBias - exponent);
    // Chunks of eight columns are swizzled by row, so that the eight rows of a warp's store hit different banks.
    const uint32_t to =
        shared_address(s.queries) + row * kSumBytes + group * kSumBytes / 2 + quad_lane(lane) * sizeof(__half2);
#pragma unroll
    for (int j = 0; j < 2 * kSumCells; ++j) {
      const float* x = o[over<kSumCells>(j)] + within<kSumCells>(j) * kCell + 2 * half;
      const __half2 y = __floats2half2_rn(x[0] * factor, x[1] * factor);
      store_shared(to + swizzled(within<kSwizzle>(j), row) + over<kSwizzle>(j) * kRowBytes,
                   reinterpret_cast<const uint32_t&>(y));
    }
  }
}

// The combine of splits, wherever their sums lie. Of a row, each split has its row max, its row sum relative to that,
// and sums of values as halves in a unit; the sink joins the denominator alone.

// What a split's weights, which are relative to its own row max, are multiplied by.
__device__ __forceinline__ float split_rescale(float row_max_of_split, float row_max_of_all) {
  return row_max_of_split == -kInf ? 0.f : exp2_fast(row_max_of_split - row_max_of_all);
}
// The sink's weight; it has the units of logits before log2(e).
__device__ __forceinline__ float sink_weight(float sink, float row_max_of_all) {
  return exp2_fast(fmaf(sink, kLog2e, -row_max_of_all));
}
__device__ __forceinline__ void store_lse(const AttendArgs& args, int token, int head, float row_max_of_all,
                                          float row_sum) {
  args.lse[static_cast<int64_t>(token) * args.heads + head] =
      row_max_of_all == -kInf ? -kInf : (__log2f(row_sum) + row_max_of_all) * kLn2;
}
// x += weight * two halves.
__device__ __forceinline__ void add_halves(float& even, float& odd, uint32_t halves, float weight) {
  const float2 pair = __half22float2(reinterpret_cast<const __half2&>(halves));
  even = fmaf(weight, pair.x, even), odd = fmaf(weight, pair.y, odd);
}
// x += weight * the eight halves of a chunk.
__device__ __forceinline__ void add_chunk(float (&x)[kChunk], const uint4& halves, float weight) {
  const uint32_t words[] = {halves.x, halves.y, halves.z, halves.w};
#pragma unroll
  for (int i = 0; i < kChunk / 2; ++i) add_halves(x[2 * i], x[2 * i + 1], words[i], weight);
}
// Two adjacent dims of the output, `at` of all its numbers, rounded once.
__device__ __forceinline__ void store_pair(const AttendArgs& args, int64_t at, float even, float odd) {
  if (args.bf16_out != 0) {
    *reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(args.out) + at) = pack(even, odd);
  } else {
    *reinterpret_cast<float2*>(static_cast<float*>(args.out) + at) = make_float2(even, odd);
  }
}
// Eight of them.
__device__ __forceinline__ void store_chunk(const AttendArgs& args, int64_t at, const float (&x)[kChunk]) {
  if (args.bf16_out != 0) {
    *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(args.out) + at) = {pack(x[0], x[1]), pack(x[2], x[3]),
                                                                             pack(x[4], x[5]), pack(x[6], x[7])};
  } else {
    float4* out = reinterpret_cast<float4*>(static_cast<float*>(args.out) + at);
    out[0] = make_float4(x[0], x[1], x[2], x[3]);
    out[1] = make_float4(x[4], x[5], x[6], x[7]);
  }
}

// Eight adjacent dims of the output, the first of them `column`: turned back where they are RoPE dims. Products are
// rounded before they are added, as in dsv4_jax/ops/numerics.py.
__device__ __forceinline__ void store_out(const AttendArgs& args, int token, int64_t row, int column,
                                          float (&x)[kChunk]) {
  if (args.cosine != nullptr && column >= kNope) {
    const int at = token * kRopePairs + (column - kNope) / 2;
    const float4 c = __ldg(reinterpret_cast<const float4*>(args.cosine + at));
    const float4 s = __ldg(reinterpret_cast<const float4*>(args.sine + at));
    const float cosine[4] = {c.x, c.y, c.z, c.w}, sine[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
    for (int i = 0; i < kChunk / 2; ++i) {
      turn_back(x[2 * i], x[2 * i + 1], cosine[i], sine[i]);
    }
  }
  store_chunk(args, row * kDim + column, x);
}

// Combines the splits of the cluster in rank order, with the sink, and writes this block's columns of the output. All
// threads call it, eight a row.
__device__ __forceinline__ void combine_splits(const AttendArgs& args, Shared& s, int splits, int thread) {
  constexpr int kChunks = kDim / kChunk;
  const int rank = s.rank, token = s.token;
  const int row = over<kCombiners>(thread), sub = within<kCombiners>(thread), h = s.head + row;
  const int begin = rank * kChunks / splits + sub, end = (rank + 1) * kChunks / splits;
  const uint32_t sums = shared_address(s.queries) + row * kSumBytes;
  // Lane `sub` weighs run `sub`: columns below 256 by `low`, the others by `high`.
  float2 run = {-kInf, 0};
  uint32_t units = 0;
  if (sub < splits) {
    run = load_peer2(peer_address(shared_address(&s.stats[row]), sub));
    units = load_peer_half(peer_address(shared_address(s.unit[row]), sub));
  }
  float top = run.x;
#pragma unroll
  for (int d = 1; d < kCombiners; d *= 2) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, d));
  const float part = split_rescale(run.x, top);
  float total = __fmul_rn(part, run.y);  // rounded on its own, whatever it is added to
#pragma unroll
  for (int d = 1; d < kCombiners; d *= 2) total += __shfl_xor_sync(kAllLanes, total, d);
  const float share = __fdividef(part, total + sink_weight(s.sink[row], top));
  const float low = share * of_exponent_field(units & kByte), high = share * of_exponent_field(units >> 8);
  if (rank == 0 && sub == 0 && h < args.heads) store_lse(args, token, h, top, total);
#pragma unroll 1
  for (int chunk = begin; __any_sync(kAllLanes, chunk < end); chunk += 2 * kCombiners) {
    float x[2][kChunk] = {};
#pragma unroll 2
    for (int c = 0; c < splits; ++c) {
      const int from = (thread & (kLanes - kCombiners)) | c;
      const float below = __shfl_sync(kAllLanes, low, from), above = __shfl_sync(kAllLanes, high, from);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = min(chunk + kCombiners * i, kChunks - 1);
        const uint32_t address = sums + swizzled(at, row);
        add_chunk(x[i], load_peer(peer_address(address, c)), at < kChunks / 2 ? below : above);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = chunk + kCombiners * i;
      if (at < end && h < args.heads) {
        store_out(args, token, static_cast<int64_t>(token) * args.heads + h, at * kChunk, x[i]);
      }
    }
  }
}

}  // namespace dsv4
