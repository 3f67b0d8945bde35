// Sums of the values and the output of attend for few tokens (attend/wide_kernel.cuh).
#pragma once

#include "attend/combine.cuh"
#include "attend/wide_block.cuh"
#include "attend/wide_combine.cuh"

namespace dsv4 {

// d[64 x 64] += A[64 x 16] B[16 x 64]; A in registers, B N-major in shared memory.
__device__ __forceinline__ void mma_64x64_values(Accumulator<kBlockColumns>& d, const uint4& a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
      : DSV4_F16(d, 0), DSV4_F16(d, 16)
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b));
}

// A warpgroup adds up a round's values, of a slice of 64 columns.
template <int kBlocks>
__device__ __forceinline__ void sum_slice(WideShared<kBlocks>& s, Accumulator<kBlockColumns>& o, WideRound<kBlocks> r,
                                          int slice, int thread) {
  const int row = accumulator_row(warp_of(thread), lane_of(thread));
  const uint64_t v = n_major(shared_address(s.values[slice]));
#pragma unroll 1
  for (int tile = 0; tile < r.tiles; ++tile) {
    uint4 weights[kTileSteps];
#pragma unroll
    for (int i = 0; i < kTileSteps; ++i) weights[i] = s.weighed.weights[tile * kTileSteps + i][thread];
    const float upper = s.weighed.rescale[tile][row], lower = s.weighed.rescale[tile][row + kLowerRow];
    if (!__all_sync(kAllLanes, upper == 1.f && lower == 1.f)) {
#pragma unroll
      for (int j = 0; j < kSliceCells; ++j) {
        float* x = o + j * kCell;
        x[0] *= upper, x[1] *= upper, x[2] *= lower, x[3] *= lower;
      }
    }
    mma_fence();
#pragma unroll
    for (int i = 0; i < kTileSteps; ++i) {
      mma_64x64_values(o, weights[i], v + ((tile * kTileSteps + i) * kStepKeys * kRowBytes >> kDescriptorUnit));
    }
    mma_commit();
    mma_wait<0>();
  }
}

// What a thread has of the output: of rows r and r + 8 two columns of every eight of a slice.
__device__ __forceinline__ void store_slice(const AttendArgs& args, int token, int head, int column,
                                            float (&x)[kBlockColumns / 2], int row, int lane) {
  const int pair = quad_lane(lane);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int h = head + row + kLowerRow * half;
    if (h >= args.heads) continue;
    const int64_t first = (static_cast<int64_t>(token) * args.heads + h) * kDim + column + 2 * pair;
#pragma unroll
    for (int j = 0; j < kSliceCells; ++j) {
      float even = x[half * kSliceWords + 2 * j], odd = x[half * kSliceWords + 2 * j + 1];
      if (args.cosine != nullptr && column >= kNope) {
        const int at = token * kRopePairs + j * kCellColumns / 2 + pair;
        turn_back(even, odd, __ldg(args.cosine + at), __ldg(args.sine + at));
      }
      if (args.bf16_out != 0) {
        *reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(args.out) + first + j * kCellColumns) =
            pack(even, odd);
      } else {
        *reinterpret_cast<float2*>(static_cast<float*>(args.out) + first + j * kCellColumns) = make_float2(even, odd);
      }
    }
  }
}

// The sums of split `run` become halves; the block that adds up this slice of all splits does so, with the sink. Of a
// split alone in its cluster they go to memory.
template <bool kAlone, int kBlocks>
__device__ __forceinline__ void finish_slice(const AttendArgs& args, WideShared<kBlocks>& s,
                                             const Accumulator<kBlockColumns>& o, int token, int head, int run,
                                             int block, int slice, int thread, SplitSums alone) {
  using Shared = WideShared<kBlocks>;
  constexpr int kHalfBlocks = kBlocks / 2;
  const int lane = lane_of(thread), row = accumulator_row(warp_of(thread), lane), quad = over<kQuad>(thread);
  const int columns = block * Shared::kSlices + slice, base = kAlone ? 0 : run * kBlocks,
            first = base + over<kHalfBlocks>(block) * kHalfBlocks;
  float most[2] = {0, 0};
#pragma unroll
  for (int j = 0; j < kSliceCells; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* x = o + j * kCell + 2 * half;
      most[half] = fmaxf(most[half], fmaxf(fabsf(x[0]), fabsf(x[1])));
    }
  }
  most[0] = row_max(most[0]), most[1] = row_max(most[1]);
  if (quad_lane(lane) < kHalfBlocks) {
    send(first + quad_lane(lane), &s.weighed.most[within<kHalfSlices>(columns)][quad], make_float2(most[0], most[1]),
         s.most_in);
  }
  messages_wait(s.most_in, 0);
#pragma unroll
  for (int i = 0; i < kHalfSlices; ++i) {
    const float2 x = s.weighed.most[i][quad];
    most[0] = fmaxf(most[0], x.x), most[1] = fmaxf(most[1], x.y);
  }
  uint32_t words[kSliceWords], units = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t exponent = unit_exponent(most[half]);
    const float factor = of_exponent_field(exponent);
    units |= (2 * kBias - exponent) << 8 * half;
#pragma unroll
    for (int j = 0; j < kSliceCells; ++j) {
      const float* x = o + j * kCell + 2 * half;
      const __half2 y = __floats2half2_rn(x[0] * factor, x[1] * factor);
      words[half * kSliceCells + j] = reinterpret_cast<const uint32_t&>(y);
    }
  }
  wait_for_cluster();
  if constexpr (kAlone) {
#pragma unroll
    for (int i = 0; i < kSliceVectors; ++i) {
      alone.words(columns, i)[thread] = {words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]};
    }
    alone.units(columns)[thread] = units;
    return;
  }
  if (Shared::kSplits > 1 && slice != run) {  // of all splits it is the block's of split `slice`
    const int rank = slice * kBlocks + block;
#pragma unroll
    for (int i = 0; i < kSliceVectors; ++i) {
      send(rank, &s.summed.words[run][i][thread],
           uint4{words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]}, s.words_in);
    }
    send(rank, &s.summed.units[run][thread], units, s.words_in);
    return;
  }
  float sink[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int h = head + row + kLowerRow * half;
    sink[half] = h < args.heads ? __ldg(args.sink + h) : 0.f;
  }
  messages_wait(s.stats_in, 0);
  float share[2][Shared::kSplits];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float top = -kInf, total = 0;
    float2 stats[Shared::kSplits];
#pragma unroll
    for (int c = 0; c < Shared::kSplits; ++c) {
      stats[c] = reinterpret_cast<const float2*>(&s.summed.stats[c][quad])[half];
      top = fmaxf(top, stats[c].x);
    }
#pragma unroll
    for (int c = 0; c < Shared::kSplits; ++c) {
      share[half][c] = split_rescale(stats[c].x, top);
      total = __fadd_rn(total, __fmul_rn(share[half][c], stats[c].y));
    }
    const float rest = total + sink_weight(sink[half], top);
#pragma unroll
    for (int c = 0; c < Shared::kSplits; ++c) share[half][c] = __fdividef(share[half][c], rest);
    const int h = head + row + kLowerRow * half;
    if (columns == 0 && quad_lane(lane) == 0 && h < args.heads) store_lse(args, token, h, top, total);
  }
  float x[kBlockColumns / 2] = {};
  if (Shared::kSplits > 1) messages_wait(s.words_in, 0);
#pragma unroll
  for (int c = 0; c < Shared::kSplits; ++c) {
    uint32_t theirs[kSliceWords];
    uint32_t unit = units;
#pragma unroll
    for (int i = 0; i < kSliceWords; ++i) theirs[i] = words[i];
    if (Shared::kSplits > 1 && c != run) {
      unit = s.summed.units[c][thread];
#pragma unroll
      for (int i = 0; i < kSliceVectors; ++i) {
        const uint4 y = s.summed.words[c][i][thread];
        theirs[4 * i] = y.x, theirs[4 * i + 1] = y.y, theirs[4 * i + 2] = y.z, theirs[4 * i + 3] = y.w;
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float weight = share[half][c] * of_exponent_field(unit >> 8 * half & kByte);
#pragma unroll
      for (int j = 0; j < kSliceCells; ++j) {
        float* y = x + half * kSliceWords + 2 * j;
        add_halves(y[0], y[1], theirs[half * kSliceCells + j], weight);
      }
    }
  }
  store_slice(args, token, head, columns * kBlockColumns, x, row, lane);
}

}  // namespace dsv4
