// How a block's output goes into the residual streams, made of what residual/hyper_connection_kernel.cuh leaves behind:
// Sinkhorn's steps are few numbers one after the other, which x has no use for. A launch of its own, beside the block.
#pragma once

#include <cstdint>

#include "common/lanes.cuh"
#include "common/numbers.cuh"

namespace dsv4 {

constexpr int kStreams = 4;
constexpr int kHyperBack = kStreams + kStreams * kStreams;  // numbers of a token that post and comb are made of
constexpr int kMixingThreads = 128, kMixingTokens = kMixingThreads / kStreams;  // of a block; a quad takes a token

struct HyperMixingArgs {
  const float* back;  // [tokens, 20]
  float* post;        // [tokens, 4]
  float* comb;        // [tokens, 4, 4]
  int tokens, iterations;
  float eps;
};

__device__ __forceinline__ float inverse(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float sigmoid(float x) { return inverse(1.f + expf(-x)); }

// One of the factors of the rows, or of the columns, of diag(r) K diag(c), beside what it is one by.
struct MixingFactor {
  float factor = 1, divisor = 1;
};
// The lane's factor such that its row or column of the matrix has the sum 1, but for `eps`: `k` is that of K, number d
// of the lane whose number differs by d, which has the other factor.
__device__ __forceinline__ void normalise(const float (&k)[kStreams], float other, MixingFactor& own, float eps) {
  float sum = __fmaf_rn(k[0], other, __fmul_rn(eps, own.divisor));
#pragma unroll
  for (int d = 1; d < kStreams; ++d) sum = __fmaf_rn(k[d], __shfl_xor_sync(kAllLanes, other, d), sum);
  own = {inverse(sum), sum};
}

__global__ void __launch_bounds__(kMixingThreads) hyper_mixing_kernel(const __grid_constant__ HyperMixingArgs args) {
  const int token = blockIdx.x * kMixingTokens + quad_of(threadIdx.x), own = quad_lane(threadIdx.x);
  const bool there = token < args.tokens;
  const float* back = args.back + (there ? token : 0) * kHyperBack;
  const float post = back[own];
  float row[kStreams], column[kStreams];
#pragma unroll
  for (int d = 0; d < kStreams; ++d) row[d] = back[kStreams + kStreams * own + (own ^ d)];
  // Softmax of rows; then columns, and rows and columns in turn.
  const float most = max_nan(max_nan(row[0], row[1]), max_nan(row[2], row[3]));
#pragma unroll
  for (int d = 0; d < kStreams; ++d) row[d] = expf(row[d] - most);
  const float factor = inverse((row[0] + row[1]) + (row[2] + row[3]));
#pragma unroll
  for (int d = 0; d < kStreams; ++d) {
    row[d] = __fmaf_rn(row[d], factor, args.eps);
    column[d] = __shfl_xor_sync(kAllLanes, row[d], d);
  }
  MixingFactor r, c;
  normalise(column, r.factor, c, args.eps);
  for (int i = 1; i < args.iterations; ++i) {
    normalise(row, c.factor, r, args.eps);
    normalise(column, r.factor, c, args.eps);
  }
#pragma unroll
  for (int d = 0; d < kStreams; ++d) {
    const float of_column = __shfl_xor_sync(kAllLanes, c.factor, d);
    if (there) args.comb[(token * kStreams + own) * kStreams + (own ^ d)] = r.factor * row[d] * of_column;
  }
  if (there) args.post[token * kStreams + own] = 2.f * sigmoid(post);
}

}  // namespace dsv4
