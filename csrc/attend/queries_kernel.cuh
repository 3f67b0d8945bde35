// The last steps of a query (dsv4_jax/ops/queries.py): RMSNorm without weight, RoPE on the last 64 dims, for the
// indexer also a Hadamard rotation and the FP4 round trip; rounded to bf16.
//
// Each warp has a row of its own: a lane holds dims 128 i + 4 lane + {0, 1, 2, 3}.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "common/overlap.cuh"
#include "common/row_math.cuh"

namespace dsv4 {

constexpr int kQueryThreads = 256;
constexpr int kQueryWarps = kQueryThreads / kLanes;
constexpr int kSweep = kOwn * kLanes;                // dims that a warp holds side by side
constexpr int kFirstRotary = kLanes - kRope / kOwn;  // lane with the first of the last 64
constexpr int kQueryRows = 4;                        // short rows of a warp, where there are many

struct QueryArgs {
  const void* queries;  // [tokens, heads * dim] float32 or bfloat16 from column `start` on, tokens `stride` apart
  const float* cosine;  // [tokens, 32]
  const float* sine;    // [tokens, 32]
  __nv_bfloat16* out;   // [rows, dim]
  int rows, heads;      // rows = tokens * heads
  int start, stride;
  float eps;  // of the norm; negative: no norm
  int hadamard, round_fp4;
};

// What FP4 storage would make of the 32 dims that eight lanes hold (dsv4_jax/formats/index_fp4.py).
__device__ __forceinline__ void round_trip_fp4(Float4& v) {
  const auto& [a, b, c, d] = v.x;
  float most = max_nan(max_nan(fabsf(a), fabsf(b)), max_nan(fabsf(c), fabsf(d)));
#pragma unroll
  for (int distance = 1; distance < kFp4Threads; distance *= 2) {
    most = max_nan(most, __shfl_xor_sync(kAllLanes, most, distance));
  }
  const int k = scale_exponent(fmaxf(fminf(most, kMaxFloat), kFp4Floor), kE2m1Limit);
  const float scale = power_of_two(k), inverse = power_of_two(-k);
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const float rounded = round_e2m1(v.x[i], scale, inverse);
    v.x[i] = most != most ? __uint_as_float(kFloatNaN) : rounded;
  }
}

// Products and sums are fused here by hand, so that every width of a warp's work has the same bits.
template <int kWidth>
__device__ __forceinline__ void finish(const QueryArgs& args, Float4 (&x)[kWidth / kSweep], float2 cosine, float2 sine,
                                       int lane) {
  constexpr int kParts = kWidth / kSweep;
  if (args.eps >= 0) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
#pragma unroll
      for (int j = 0; j < kOwn; ++j) sum = __fmaf_rn(x[i].x[j], x[i].x[j], sum);
    }
#pragma unroll
    for (int d = kLanes / 2; d > 0; d /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(kAllLanes, sum, d));
    const float factor = rsqrtf(__fmaf_rn(sum, 1.f / kWidth, args.eps));
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
#pragma unroll
      for (int j = 0; j < kOwn; ++j) x[i].x[j] = __fmul_rn(x[i].x[j], factor);
    }
  }
  if (lane >= kFirstRotary) {
    auto& [even, odd, next_even, next_odd] = x[kParts - 1].x;
    turn<Rounding::kFused>(even, odd, cosine.x, sine.x);
    turn<Rounding::kFused>(next_even, next_odd, cosine.y, sine.y);
  }
  if constexpr (kWidth == kIndexDim) {
    if (args.hadamard) hadamard(x[0], lane);
    if (args.round_fp4) round_trip_fp4(x[0]);
  }
}

__device__ __forceinline__ Float4 load_projected(const float* p) { return load4_constant(p); }
__device__ __forceinline__ Float4 load_projected(const __nv_bfloat16* p) {
  return of_bf16(__ldg(reinterpret_cast<const uint2*>(p)));
}

// A warp takes kRows rows, which are of one token.
template <int kWidth, int kRows, typename Projected>
__global__ void __launch_bounds__(kQueryThreads) query_kernel(const __grid_constant__ QueryArgs args) {
  constexpr int kParts = kWidth / kSweep;
  let_next_start();
  wait_for_previous();
  const int lane = lane_of(threadIdx.x);
  const unsigned index = (blockIdx.x * kQueryWarps + threadIdx.x / kLanes) * kRows, heads = args.heads;
  if (index >= static_cast<unsigned>(args.rows)) return;
  const int64_t row = index, token = index / heads;
  const auto* queries =
      static_cast<const Projected*>(args.queries) + args.start + token * args.stride + (index % heads) * kWidth;
  Float4 x[kRows][kParts];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) x[r][i] = load_projected(queries + r * kWidth + kSweep * i + kOwn * lane);
  }
  // The angles of the last 64 dims, as adjacent pairs: asked for by all lanes, beside the row.
  const int64_t at = token * kRopePairs + 2 * max(lane - kFirstRotary, 0);
  const float2 cosine = __ldg(reinterpret_cast<const float2*>(args.cosine + at));
  const float2 sine = __ldg(reinterpret_cast<const float2*>(args.sine + at));
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    finish<kWidth>(args, x[r], cosine, sine, lane);
    __nv_bfloat16* out = args.out + (row + r) * kWidth;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const auto& [a, b, c, d] = x[r][i].x;
      reinterpret_cast<uint2*>(out + kSweep * i)[lane] = {bf16_pair(a, b), bf16_pair(c, d)};
    }
  }
}

}  // namespace dsv4
