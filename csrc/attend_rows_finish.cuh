// The end of a run and of a token in attend over bf16 rows (attend_rows_kernel.cuh): numbers as in attend_merge.cuh,
// in registers.
#pragma once

#include "attend_rows_block.cuh"

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

// The sums of a run as halves: the 256 columns of a row in units of their own, such that the largest lies in [2^14,
// 2^15).
__device__ __forceinline__ void in_units(RowsShared& s, const Sums& o, SumWords& words, int run, int group,
                                         int thread) {
  const int lane = lane_of(thread), upper = accumulator_row(warp_of(thread) & 3, lane);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t exponent = unit_exponent(o, half);
    const float factor = of_exponent_field(exponent);
    if (quad_lane(lane) == 0) s.unit[run][upper + kLowerRow * half][group] = static_cast<uint8_t>(2 * kBias - exponent);
#pragma unroll
    for (int j = 0; j < 2 * kSumCells; ++j) {
      const float* x = o[over<kSumCells>(j)] + within<kSumCells>(j) * kCell + 2 * half;
      const __half2 y = __floats2half2_rn(x[0] * factor, x[1] * factor);
      words[half * 2 * kSumCells + j] = reinterpret_cast<const uint32_t&>(y);
    }
  }
}

// Where a thread's sums of a run that is not the last lie in memory.
__device__ __forceinline__ uint4* kept_run(const AttendRowsArgs& args, int run, int splits, int thread) {
  return args.sums + (static_cast<int64_t>(blockIdx.x) * (splits - 1) + run) * (kSumVectors * kSumThreads) + thread;
}

__device__ __forceinline__ void keep_run(const AttendRowsArgs& args, const SumWords& words, int run, int splits,
                                         int thread) {
  uint4* to = kept_run(args, run, splits, thread);
#pragma unroll
  for (int i = 0; i < kSumVectors; ++i) {
    to[i * kSumThreads] = {words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]};
  }
}

// How much of each run's sums enters the output, and the LSE. All consumers call it, four a row, each for two runs.
__device__ __forceinline__ void weigh_runs(const AttendArgs& args, RowsShared& s, const RowsUnit& u, int thread) {
  const int row = over<kQuad>(thread), sub = within<kQuad>(thread), h = u.head + row;
  float2 run[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) run[i] = sub + kQuad * i < u.runs ? s.stats[sub + kQuad * i][row] : make_float2(-kInf, 0);
  const float top = row_max(fmaxf(run[0].x, run[1].x));
  float part[2], total[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    part[i] = run[i].x == -kInf ? 0.f : exp2_fast(run[i].x - top);
    total[i] = row_total(__fmul_rn(part[i], run[i].y));
  }
  const float all = total[0] + total[1];
  const float sink = h < args.heads ? __ldg(args.sink + h) : 0.f;
  const float rest = all + exp2_fast(fmaf(sink, kLog2e, -top));
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int at = sub + kQuad * i;
    if (at < u.runs) {
      const float share = __fdividef(part[i], rest);
      s.share[at][row] =
          make_float2(share * of_exponent_field(s.unit[at][row][0]), share * of_exponent_field(s.unit[at][row][1]));
    }
  }
  if (sub == 0 && h < args.heads) {
    args.lse[static_cast<int64_t>(u.token) * args.heads + h] = top == -kInf ? -kInf : (__log2f(all) + top) * kLn2;
  }
}

// Of four words a lane, its cells c to c + 3 of a row: afterwards lane q of a quad has all of cell c + q.
__device__ __forceinline__ uint4 own_cell(uint32_t (&w)[kQuad], int lane) {
  const bool odd = (lane & 1) != 0, high = (lane & 2) != 0;
  const uint32_t a = __shfl_xor_sync(kAllLanes, odd ? w[0] : w[1], 1);
  const uint32_t b = __shfl_xor_sync(kAllLanes, odd ? w[2] : w[3], 1);
  const uint32_t x0 = odd ? a : w[0], x1 = odd ? w[1] : a, x2 = odd ? b : w[2], x3 = odd ? w[3] : b;
  const uint32_t c = __shfl_xor_sync(kAllLanes, high ? x0 : x2, 2);
  const uint32_t d = __shfl_xor_sync(kAllLanes, high ? x1 : x3, 2);
  return high ? make_uint4(c, d, x2, x3) : make_uint4(x0, x1, c, d);
}

// Adds up the runs of a token in order, with the sink, and writes the output. All consumers call it, with the sums of
// the last run.
__device__ __forceinline__ void finish_rows(const AttendRowsArgs& args, RowsShared& s, const SumWords& words,
                                            const RowsUnit& u, int splits, int group, int thread) {
  const AttendArgs& a = args.attend;
  const int lane = lane_of(thread), quad = quad_lane(lane), upper = accumulator_row(warp_of(thread) & 3, lane);
  // A part of a row's cells at a time: all that a thread has of them would not fit its registers.
  constexpr int kCells = 2 * kSumCells, kPart = 16, kVectors = kPart / 4;
  // The first run's sums and the angles are asked for before they are waited for.
  const bool several = u.runs > 1;
  const uint4* first_run = kept_run(args, 0, splits, thread);
  uint4 kept[kVectors] = {};
  const auto load_part = [&](int part) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) kept[i] = first_run[(part * kVectors + i) * kSumThreads];
  };
  if (several) load_part(0);
  if (a.cosine != nullptr) prefetch(a.cosine + u.token * kRopePairs), prefetch(a.sine + u.token * kRopePairs);
  named_sync(kStatsReady, kSumThreads + kWarpgroup);
  weigh_runs(a, s, u, thread);
  named_arrive(kStatsFree, kSumThreads + kWarpgroup);
  named_sync(kSharesReady, kSumThreads);
#pragma unroll
  for (int part = 0; part < kSumWords / kPart; ++part) {
    const int half = part * kPart / kCells, begin = part * kPart % kCells;
    const int row = upper + kLowerRow * half, h = u.head + row;
    const auto share = [&](int run) { return group == 0 ? s.share[run][row].x : s.share[run][row].y; };
    float x[kPart][2];
#pragma unroll
    for (int j = 0; j < kPart; ++j) x[j][0] = 0, x[j][1] = 0;
    const auto add = [&](int j, uint32_t word, float weight) {
      const float2 pair = __half22float2(reinterpret_cast<const __half2&>(word));
      x[j][0] = fmaf(weight, pair.x, x[j][0]), x[j][1] = fmaf(weight, pair.y, x[j][1]);
    };
    const auto add_four = [&](int i, const uint4& words, float weight) {
      add(4 * i, words.x, weight), add(4 * i + 1, words.y, weight);
      add(4 * i + 2, words.z, weight), add(4 * i + 3, words.w, weight);
    };
    if (several) {
      const float first_share = share(0);
#pragma unroll
      for (int i = 0; i < kVectors; ++i) add_four(i, kept[i], first_share);
      if ((part + 1) * kPart < kSumWords) load_part(part + 1);
    }
#pragma unroll 1
    for (int run = 1; run + 1 < u.runs; ++run) {
      const uint4* from = kept_run(args, run, splits, thread) + part * kVectors * kSumThreads;
      const float weight = share(run);
      uint4 more[kVectors];
#pragma unroll
      for (int i = 0; i < kVectors; ++i) more[i] = from[i * kSumThreads];
#pragma unroll
      for (int i = 0; i < kVectors; ++i) add_four(i, more[i], weight);
    }
    const float weight = share(u.runs - 1);
#pragma unroll
    for (int j = 0; j < kPart; ++j) add(j, words[part * kPart + j], weight);
    constexpr int kTurning = kCells - kRope / kCellColumns;
    if (group == 1 && a.cosine != nullptr) {
#pragma unroll
      for (int j = 0; j < kPart; ++j) {
        if (begin + j < kTurning) continue;
        const int at = u.token * kRopePairs + (begin + j - kTurning) * (kCellColumns / 2) + quad;
        turn_back(x[j][0], x[j][1], __ldg(a.cosine + at), __ldg(a.sine + at));
      }
    }
    const int64_t first = (static_cast<int64_t>(u.token) * a.heads + h) * kDim + group * kHalf + begin * kCellColumns;
#pragma unroll
    for (int j = 0; j < kPart; j += kQuad) {
      if (a.bf16_out != 0) {
        uint32_t pairs[kQuad];
#pragma unroll
        for (int k = 0; k < kQuad; ++k) pairs[k] = pack(x[j + k][0], x[j + k][1]);
        const uint4 cell = own_cell(pairs, lane);
        if (h < a.heads) {
          *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(a.out) + first + (j + quad) * kCellColumns) = cell;
        }
      } else if (h < a.heads) {
#pragma unroll
        for (int k = 0; k < kQuad; ++k) {
          *reinterpret_cast<float2*>(static_cast<float*>(a.out) + first + (j + k) * kCellColumns + 2 * quad) =
              make_float2(x[j + k][0], x[j + k][1]);
        }
      }
    }
  }
}

}  // namespace dsv4
