// The epilogue of a row: RMSNorm, RoPE and, for index keys, Hadamard (dsv4_jax/ops/epilogue.py).
//
// What it needs beside the row's values (`Epilogue`) is asked for ahead of them: the loads of a kernel that stores few
// rows are cold, so that each one that waits for another costs it about a microsecond.
#pragma once

#include <cstdint>

#include "common/row_math.cuh"

namespace dsv4 {

struct EpilogueArgs {
  const float* norm;           // [E]
  const float *cosine, *sine;  // [T, 32], of the angles to which the row of each token turns
  float eps;
  int hadamard;
};

// A thread's share: the norm's weights and, in a thread with rotary dims, its pairs' two angles.
struct Epilogue {
  Float4 norm;
  float sine[2], cosine[2];
};

// The first of a thread's two pairs among the rotary ones; negative: it has none.
template <int kChannels>
__device__ __forceinline__ int rotary_pair(int thread) {
  return 2 * thread - (kChannels - kRope) / 2;
}

// Asks for all that the epilogue of `token` needs, which does not depend on its values. Without a branch (a thread
// without rotary dims loads what it does not need): loads on either side of one would wait for each other. Not by
// constant loads: the compiler would put those off beyond the barriers of the row's sum, to where they are used.
template <int kChannels>
__device__ __forceinline__ Epilogue load_epilogue(const EpilogueArgs& args, int64_t token, int thread) {
  const int64_t pair = token * kRopePairs + max(rotary_pair<kChannels>(thread), 0);
  const float2 cosine = *reinterpret_cast<const float2*>(args.cosine + pair);
  const float2 sine = *reinterpret_cast<const float2*>(args.sine + pair);
  return {load4(args.norm + kOwn * thread), {sine.x, sine.y}, {cosine.x, cosine.y}};
}

// Norm, RoPE and Hadamard of a row, in place.
template <int kChannels>
__device__ __forceinline__ void apply_epilogue(const EpilogueArgs& args, const Epilogue& epilogue, Float4& v,
                                               float* shared, int thread) {
  Float4 squares;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) squares.x[i] = __fmul_rn(v.x[i], v.x[i]);
  const float mean = __fmul_rn(row_sum<kChannels>(squares, shared, thread), 1.f / kChannels);
  const float factor = rsqrtf(__fadd_rn(mean, args.eps));
#pragma unroll
  for (int i = 0; i < kOwn; ++i) v.x[i] = __fmul_rn(__fmul_rn(v.x[i], factor), epilogue.norm.x[i]);

  // Selected, not branched to: the compiler would move the loads of the angles into the branch.
  const bool rotary = rotary_pair<kChannels>(thread) >= 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float even = v.x[2 * i], odd = v.x[2 * i + 1];
    turn<Rounding::kEach>(even, odd, epilogue.cosine[i], epilogue.sine[i]);
    v.x[2 * i] = rotary ? even : v.x[2 * i], v.x[2 * i + 1] = rotary ? odd : v.x[2 * i + 1];
  }
  if constexpr (kChannels == kIndexDim) {
    if (args.hadamard) hadamard(v, thread);
  }
}

}  // namespace dsv4
