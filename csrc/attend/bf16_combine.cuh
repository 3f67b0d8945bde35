// The end of a split and of a token in attend over bf16 rows (attend/bf16_kernel.cuh): numbers as in
// attend/combine.cuh, in registers.
#pragma once

#include "attend/bf16_block.cuh"
#include "dense/round_eight.cuh"

namespace dsv4 {

__device__ __forceinline__ void clear(Sums& o) {
#pragma unroll
  for (int i = 0; i < kSumCells * kCell; ++i) o[0][i] = 0, o[1][i] = 0;
}

// Keeps what reads an accumulator behind the wait for its products.
template <int kNumbers>
__device__ __forceinline__ void settle(float (&x)[kNumbers]) {
#pragma unroll
  for (int i = 0; i < kNumbers; ++i) asm volatile("" : "+f"(x[i]));
}
// Has words made before what follows.
template <int kWords>
__device__ __forceinline__ void settle(uint32_t (&x)[kWords]) {
#pragma unroll
  for (int i = 0; i < kWords; ++i) asm volatile("" : "+r"(x[i]));
}

// Leaves the sums of a split in shared memory as halves, the 256 columns of a row in units of their own, such that the
// largest lies in [2^14, 2^15). They lie as a tile's keys do; `to`: the warp's 16 rows, of the first of four blocks.
__device__ __forceinline__ void store_units(RowsShared& s, const Sums& o, uint32_t to, int run, int group, int warp,
                                            int lane) {
  const int upper = accumulator_row(warp, lane);
  float factor[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t exponent = unit_exponent(o, half);
    factor[half] = of_exponent_field(exponent);
    if (quad_lane(lane) == 0) s.unit[run][upper + kLowerRow * half][group] = static_cast<uint8_t>(2 * kBias - exponent);
  }
  // Four matrices of eight rows at a time: the upper and lower rows of two chunks; a lane names a row of one of them.
  const int row = within<2 * kSwizzle>(lane), second = over<2 * kSwizzle>(lane);
  to += row * kRowBytes;
#pragma unroll
  for (int j = 0; j < 2 * kSumCells; j += 2) {
    uint32_t words[kFragment];
#pragma unroll
    for (int k = 0; k < kFragment; ++k) {
      const int cell = j + over<2>(k), half = within<2>(k);
      const float* x = o[over<kSumCells>(cell)] + within<kSumCells>(cell) * kCell + 2 * half;
      const __half2 y = __floats2half2_rn(x[0] * factor[half], x[1] * factor[half]);
      words[k] = reinterpret_cast<const uint32_t&>(y);
    }
    store_matrices(to + over<kSwizzle>(j) * kBlockBytes + swizzled(within<kSwizzle>(j) + second, row), words);
  }
  __syncwarp();
}

// Where this lane's chunk of a row of the warp's lies, from the first of the four blocks.
__device__ __forceinline__ uint32_t chunk_of(int row, int lane) {
  return over<kSwizzle>(lane) * kBlockBytes + row * kRowBytes + swizzled(within<kSwizzle>(lane), row);
}

// Where this lane's chunks of a split that is not the last lie in memory: of row i of the warp kLanes * i further on.
__device__ __forceinline__ uint4* stored_split(const AttendRowsArgs& args, int run, int splits, int group, int warp,
                                               int lane) {
  const int64_t before = static_cast<int64_t>(blockIdx.x) * (splits - 1) + run;
  return args.sums + (before * kSumWarps + group * kWarpgroupWarps + warp) * (kWarpRows * kLanes) + lane;
}

__device__ __forceinline__ void store_split(const AttendRowsArgs& args, uint32_t from, int run, int splits, int group,
                                            int warp, int lane) {
  uint4* to = stored_split(args, run, splits, group, warp, lane);
#pragma unroll kRowsInFlight
  for (int row = 0; row < kWarpRows; ++row) to[row * kLanes] = load_shared(from + chunk_of(row, lane));
  fence_for_mma();  // and for copies into the place
}

// How much of each split's sums enters the output, and the LSE. All consumers call it, four a row, each for two splits.
__device__ __forceinline__ void weigh_splits(const AttendArgs& args, RowsShared& s, const RowsUnit& u, int thread) {
  const int row = over<kQuad>(thread), sub = within<kQuad>(thread), h = u.head + row;
  float2 run[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) run[i] = sub + kQuad * i < u.runs ? s.stats[sub + kQuad * i][row] : make_float2(-kInf, 0);
  const float top = row_max(fmaxf(run[0].x, run[1].x));
  float part[2], total[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    part[i] = split_rescale(run[i].x, top);
    total[i] = row_total(__fmul_rn(part[i], run[i].y));
  }
  const float all = total[0] + total[1];
  const float sink = h < args.heads ? __ldg(args.sink + h) : 0.f;
  const float rest = all + sink_weight(sink, top);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int at = sub + kQuad * i;
    if (at < u.runs) {
      const float share = __fdividef(part[i], rest);
      s.share[at][row] =
          make_float2(share * of_exponent_field(s.unit[at][row][0]), share * of_exponent_field(s.unit[at][row][1]));
    }
  }
  if (sub == 0 && h < args.heads) store_lse(args, u.token, h, top, all);
}

// Eight adjacent dims of a head's output, rounded to bf16 and then to e4m3: half a warp has 128.
__device__ __forceinline__ void store_rounded(const AttendRowsArgs& args, int token, int head, int column,
                                              const float (&x)[kChunk]) {
  static_assert(kChunk == kRoundOwn && kDim % kRoundGroup == 0);
  const int64_t row = static_cast<int64_t>(token) * args.attend.heads + head;
  uint2 codes;
  const int exponent = round_eight({pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7])}, codes);
  *reinterpret_cast<uint2*>(static_cast<uint8_t*>(args.attend.out) + row * kDim + column) = codes;
  if (within<kRoundSharers>(threadIdx.x) != 0) return;
  float* const scale =
      args.scales + static_cast<int64_t>(head * (kDim / kRoundGroup) + over<kRoundGroup>(column)) * args.pitch + token;
  *scale = power_of_two(exponent);
  if (token + 1 == args.attend.tokens) {
    for (int more = 1; token + more < args.pitch; ++more) scale[more] = 0.f;
  }
}

// Adds up the splits of a token in order, with the sink, and writes the output: a warp its 16 rows, a lane eight
// columns of each. All consumers call it; `last_split`: the warp's part of the last split, in shared memory.
template <bool kRounded>
__device__ __forceinline__ void combine_rows(const AttendRowsArgs& args, RowsShared& s, uint32_t last_split,
                                             const RowsUnit& u, int splits, int group, int warp, int lane, int thread) {
  const AttendArgs& a = args.attend;
  const bool several = u.runs > 1;
  // All of the first split's sums and the angles are asked for before they are waited for.
  uint4 kept[kWarpRows] = {};
  if (several) {
    const uint4* first_split = stored_split(args, 0, splits, group, warp, lane);
#pragma unroll
    for (int row = 0; row < kWarpRows; ++row) kept[row] = first_split[row * kLanes];
  }
  const int column = group * kHalf + lane * kChunk;
  const bool turning = a.cosine != nullptr && column >= kNope;
  float4 cosine = {}, sine = {};
  if (turning) {
    const int at = u.token * kRopePairs + (column - kNope) / 2;
    cosine = __ldg(reinterpret_cast<const float4*>(a.cosine + at));
    sine = __ldg(reinterpret_cast<const float4*>(a.sine + at));
  }
  named_sync(kStatsReady, kSumThreads + kWarpgroup);
  weigh_splits(a, s, u, thread);
  named_arrive(kStatsFree, kSumThreads + kWarpgroup);
  named_sync(kSharesReady, kSumThreads);
  const auto share = [&](int run, int row) { return group == 0 ? s.share[run][row].x : s.share[run][row].y; };
#pragma unroll 1
  for (int first = 0; first < kWarpRows; first += kRowsInFlight) {
    float x[kRowsInFlight][kChunk] = {};
    const int own = warp * kWarpRows + first;
    if (several) {
#pragma unroll
      for (int i = 0; i < kRowsInFlight; ++i) add_chunk(x[i], kept[i], share(0, own + i));
      // A loop of few instructions: registers cannot be told apart by a number.
#pragma unroll
      for (int i = 0; i + kRowsInFlight < kWarpRows; ++i) kept[i] = kept[i + kRowsInFlight];
    }
#pragma unroll 1
    for (int run = 1; run + 1 < u.runs; ++run) {
      const uint4* from = stored_split(args, run, splits, group, warp, lane) + first * kLanes;
#pragma unroll
      for (int i = 0; i < kRowsInFlight; ++i) add_chunk(x[i], from[i * kLanes], share(run, own + i));
    }
#pragma unroll
    for (int i = 0; i < kRowsInFlight; ++i) {
      const uint32_t chunk = last_split + chunk_of(first + i, lane);
      float(&y)[kChunk] = x[i];
      add_chunk(y, load_shared(chunk), share(u.runs - 1, own + i));
      if (turning) {
        turn_back(y[0], y[1], cosine.x, sine.x), turn_back(y[2], y[3], cosine.y, sine.y);
        turn_back(y[4], y[5], cosine.z, sine.z), turn_back(y[6], y[7], cosine.w, sine.w);
      }
      const int h = u.head + own + i;
      if (h >= a.heads) continue;
      if constexpr (kRounded) {
        store_rounded(args, u.token, h, column, y);
      } else {
        store_chunk(a, (static_cast<int64_t>(u.token) * a.heads + h) * kDim + column, y);
      }
    }
  }
  fence_for_mma();  // and for copies into the place
}

}  // namespace dsv4
