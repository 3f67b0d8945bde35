// Scores, softmax and weights of attend for few tokens (attend/wide_kernel.cuh).
#pragma once

#include "attend/consumers.cuh"
#include "attend/wide_block.cuh"

namespace dsv4 {

// d[64 x 80] (+)= A[64 x 16] B[16 x 80]; A and B K-major in shared memory. `accumulate` 0 overwrites d.
__device__ __forceinline__ void mma_64x80(Accumulator<kOwnKeys>& d, uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %42, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39"
      "}, %40, %41, p, 1, 1, 0, 0;}"
      : DSV4_F16(d, 0), DSV4_F16(d, 16), DSV4_F4(d, 32), DSV4_F4(d, 36)
      : "l"(a), "l"(b), "r"(accumulate));
}

// Running softmax of a split, of rows r and r + 8.
struct WideSoftmax {
  float top[2] = {-kInf, -kInf};  // largest logit of the rounds before, before scaling
  float total[2] = {0, 0};        // this lane's share of the sum of weights; in the split's last block
};

__device__ __forceinline__ float base_of(float top, float scale) { return top == -kInf ? 0.f : top * scale; }
__device__ __forceinline__ float weight_of(float z, float scale, float base) {
  return exp2_fast(fmaf(z, scale, -base));
}

// S = Q K^T of the block's own keys.
template <int kBlocks>
__device__ __forceinline__ void score_own(WideShared<kBlocks>& s, Accumulator<kOwnKeys>& z) {
  const uint64_t q = k_major(shared_address(s.queries)), k = k_major(shared_address(s.keys));
#pragma unroll
  for (int i = 0; i < kScoreCells * kCell; ++i) z[i] = 0;
  mma_fence();
#pragma unroll 1
  for (int block = 0; block < kKeyBlocks; ++block) {
    const uint64_t a = q + (block * kBlockBytes >> kDescriptorUnit),
                   b = k + (block * kOwnBlockBytes >> kDescriptorUnit);
#pragma unroll
    for (int i = 0; i < kBlockColumns / kMmaDepth; ++i) mma_64x80(z, a + step_offset(i), b + step_offset(i), block + i);
  }
  mma_commit();
  mma_wait<0>();
}

// A warpgroup weighs the block's keys of a round for all blocks of the split, whose first has rank `base`.
template <int kBlocks>
__device__ __forceinline__ void softmax_own(const AttendArgs& args, WideShared<kBlocks>& s, WideRound<kBlocks> r,
                                            int round, bool last, int block, int base, WideSoftmax& m, int thread) {
  const int lane = lane_of(thread), quad = over<kQuad>(thread), column = 2 * quad_lane(lane);
  const int first = r.first_step(block), own = r.first_step(block + 1) - first, tile = over<kTileSteps>(first);
  const auto second = [&](int step) { return over<kTileSteps>(first + step) != tile; };
  const float scale = args.scale_log2;
  Accumulator<kOwnKeys> z;
  score_own(s, z);
  if (last) arrive_in_cluster();  // no more use of the queries

  float tops[2][2] = {{-kInf, -kInf}, {-kInf, -kInf}};  // of rows r and r + 8: the first tile's, the second's
#pragma unroll
  for (int i = 0; i < kOwnSteps; ++i) {
    if (i >= own) break;
    constexpr uint32_t kAll = 0xFFFF;
    const uint32_t visible = s.visible[i];
    if (visible != kAll) {
#pragma unroll
      for (int j = 0; j < kStepCells * kCell; ++j) {
        float& x = z[i * kStepCells * kCell + j];
        if ((visible >> (column + kCellColumns * over<kCell>(j) + (j & 1)) & 1) == 0) x = -kInf;
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* x = z + i * kStepCells * kCell + 2 * half;
      const float top = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[kCell], x[kCell + 1]));
      if (second(i)) {
        tops[half][1] = fmaxf(tops[half][1], top);
      } else {
        tops[half][0] = fmaxf(tops[half][0], top);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) tops[0][i] = row_max(tops[0][i]), tops[1][i] = row_max(tops[1][i]);
#pragma unroll
  for (int p = 0; p < kBlocks; p += kQuad) {
    send(base + p + quad_lane(lane), &s.tops[block][quad], as_words(tops[0][0], tops[0][1], tops[1][0], tops[1][1]),
         s.tops_in);
  }
  messages_wait(s.tops_in, round & 1);
  // Running tops before the first tile, with it, with the second, and of the whole round: of a row by its four lanes.
  float before[2] = {-kInf, -kInf}, at[2][2] = {{-kInf, -kInf}, {-kInf, -kInf}}, rest[2] = {-kInf, -kInf};
#pragma unroll
  for (int k = 0; k < kBlocks; k += kQuad) {
    const int p = k + quad_lane(lane);
    const float4 x = s.tops[p][quad];
    const float own_tops[2][2] = {{x.x, x.z}, {x.y, x.w}};  // first, second; of rows r and r + 8
    const int distance = r.first_tile(p) - tile;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int d = distance + i;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float y = own_tops[i][half];
        if (d < 0) {
          before[half] = fmaxf(before[half], y);
        } else if (d == 0) {
          at[0][half] = fmaxf(at[0][half], y);
        } else if (d == 1) {
          at[1][half] = fmaxf(at[1][half], y);
        } else {
          rest[half] = fmaxf(rest[half], y);
        }
      }
    }
  }
  float bases[2][2], rescales[2][2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    before[half] = fmaxf(m.top[half], row_max(before[half]));
    at[0][half] = fmaxf(before[half], row_max(at[0][half]));
    at[1][half] = fmaxf(at[0][half], row_max(at[1][half]));
    m.top[half] = fmaxf(at[1][half], row_max(rest[half]));
    bases[0][half] = base_of(at[0][half], scale), bases[1][half] = base_of(at[1][half], scale);
    rescales[0][half] = weight_of(before[half], scale, bases[0][half]);
    rescales[1][half] = weight_of(at[0][half], scale, bases[1][half]);
  }
  uint4 weights[kOwnSteps];
#pragma unroll
  for (int i = 0; i < kOwnSteps; ++i) {
    if (i >= own) break;
    float* x = z + i * kStepCells * kCell;
    const float upper = second(i) ? bases[1][0] : bases[0][0], lower = second(i) ? bases[1][1] : bases[0][1];
#pragma unroll
    for (int j = 0; j < kStepCells * kCell; ++j) x[j] = weight_of(x[j], scale, (j & 2) != 0 ? lower : upper);
    weights[i] = {pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7])};
  }
  named_sync(kTopsRead, 2 * kWarpgroup);  // from when on others may send those of the next round
#pragma unroll 1
  for (int p = 0; p < kBlocks; ++p) {
    const int rank = base + within<kBlocks>(block + p);
#pragma unroll
    for (int i = 0; i < kOwnSteps; ++i) {
      if (i < own) send(rank, &s.weighed.weights[first + i][thread], weights[i], s.weights_in);
    }
  }

  // Sums of weights go on from block to block, in the order of the keys.
  float total[2] = {0, 0}, sum[2] = {0, 0};
  if (block == kBlocks - 1 && round > 0) {
    send(base, &s.weighed.chain[thread], as_words(m.total[0], m.total[1], 0, 0), s.chain_in);
  }
  if (block > 0 || round > 0) {
    messages_wait(s.chain_in, (block > 0 ? round : round - 1) & 1);
    const uint4 x = s.weighed.chain[thread];
    total[0] = __uint_as_float(x.x), total[1] = __uint_as_float(x.y);
    sum[0] = __uint_as_float(x.z), sum[1] = __uint_as_float(x.w);
  }
#pragma unroll
  for (int i = 0; i < kOwnSteps; ++i) {
    if (i >= own) break;
    const float* x = z + i * kStepCells * kCell;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < kStepCells; ++j)
        sum[half] += x[kCell * j + 2 * half], sum[half] += x[kCell * j + 2 * half + 1];
    }
    if (within<kTileSteps>(first + i) == kTileSteps - 1) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        total[half] = fmaf(total[half], second(i) ? rescales[1][half] : rescales[0][half], sum[half]);
        sum[half] = 0;
      }
    }
  }
  if (block < kBlocks - 1) {
    send(base + block + 1, &s.weighed.chain[thread], as_words(total[0], total[1], sum[0], sum[1]), s.chain_in);
  } else {
    m.total[0] = total[0], m.total[1] = total[1];
  }
}

// A warpgroup: the factors by which tiles shrink the sums before them. `top` is a row's running top, one row a thread.
template <int kBlocks>
__device__ __forceinline__ void find_rescales(const AttendArgs& args, WideShared<kBlocks>& s, WideRound<kBlocks> r,
                                              int round, float& top, int thread) {
  const int row = within<kHeads>(thread), quad = row / kWarpRows * kLowerRow + within<kLowerRow>(row);
  messages_wait(s.tops_in, round & 1);
  float2 tops[kBlocks];
#pragma unroll
  for (int p = 0; p < kBlocks; ++p) {
    tops[p] = reinterpret_cast<const float2*>(&s.tops[p][quad])[over<kLowerRow>(row) & 1];
  }
#pragma unroll
  for (int p = 0; p < kBlocks; ++p) asm volatile("" : "+f"(tops[p].x), "+f"(tops[p].y));  // read by now
  named_arrive(kTopsRead, 2 * kWarpgroup);
#pragma unroll 1
  for (int tile = 0; tile < r.tiles; ++tile) {
    const float before = top;
#pragma unroll
    for (int p = 0; p < kBlocks; ++p) {
      const int distance = tile - r.first_tile(p);
      if (distance == 0) top = fmaxf(top, tops[p].x);
      if (distance == 1) top = fmaxf(top, tops[p].y);
    }
    if (thread < kHeads) {
      s.weighed.rescale[tile][row] = weight_of(before, args.scale_log2, base_of(top, args.scale_log2));
    }
  }
}

}  // namespace dsv4
