// The end of attend (attend_kernel.cuh): the runs of a cluster become the output.
#pragma once

#include <cuda_fp16.h>

#include "attend_block.cuh"

namespace dsv4 {

// Leaves a run's sums in shared memory for `add_runs`, as halves: the 256 columns of a row in units of their own, such that
// the largest lies in [2^14, 2^15). Both consumer warpgroups call it; `o` holds columns [256 group, 256 group + 256).
__device__ __forceinline__ void store_sums(Shared& s, const Sums& o, int group, int thread) {
  const int warp = thread >> 5 & 3, lane = thread & 31, upper = warp * 16 + (lane >> 2);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = upper + 8 * half;
    float most = 0;
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      const float* x = o[j >> 4] + (j & 15) * 4 + 2 * half;
      most = fmaxf(most, fmaxf(fabsf(x[0]), fabsf(x[1])));
    }
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    const uint32_t exponent = min(268 - (__float_as_uint(most) >> 23), 253u);  // of 2^14 / most, biased; both normal
    const float factor = __uint_as_float(exponent << 23);
    if ((lane & 3) == 0) s.unit[row][group] = static_cast<uint8_t>(254 - exponent);
    // Chunks of eight columns are swizzled by row, so that the eight rows of a warp's store hit different banks.
    const uint32_t to = shared_address(s.queries) + row * (kDim * 2) + group * 512 + (lane & 3) * 4;
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      const float* x = o[j >> 4] + (j & 15) * 4 + 2 * half;
      const __half2 y = __floats2half2_rn(x[0] * factor, x[1] * factor);
      store_shared(to + (((j & 7) ^ (row & 7)) << 4) + (j >> 3) * 128, reinterpret_cast<const uint32_t&>(y));
    }
  }
}

// Eight adjacent dims of the output, the first of them `column`: turned back where they are RoPE dims, rounded once.
// Products are rounded before they are added, as in dsv4_jax/ops/numerics.py.
__device__ __forceinline__ void store_out(const AttendArgs& args, int token, int64_t row, int column, float (&x)[8]) {
  if (args.cosine != nullptr && column >= kNope) {
    const int at = token * (kRope / 2) + (column - kNope) / 2;
    const float4 c = __ldg(reinterpret_cast<const float4*>(args.cosine + at));
    const float4 s = __ldg(reinterpret_cast<const float4*>(args.sine + at));
    const float cosine[4] = {c.x, c.y, c.z, c.w}, sine[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float even = x[2 * i], odd = x[2 * i + 1];
      x[2 * i] = __fadd_rn(__fmul_rn(even, cosine[i]), __fmul_rn(odd, sine[i]));
      x[2 * i + 1] = __fsub_rn(__fmul_rn(odd, cosine[i]), __fmul_rn(even, sine[i]));
    }
  }
  const int64_t first = row * kDim + column;
  if (args.bf16_out != 0) {
    *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(args.out) + first) = {pack(x[0], x[1]), pack(x[2], x[3]),
                                                                                pack(x[4], x[5]), pack(x[6], x[7])};
  } else {
    float4* out = reinterpret_cast<float4*>(static_cast<float*>(args.out) + first);
    out[0] = make_float4(x[0], x[1], x[2], x[3]);
    out[1] = make_float4(x[4], x[5], x[6], x[7]);
  }
}

// Merges the runs of the cluster in rank order, with the sink, and writes this block's columns of the output. All threads
// call it, eight a row.
__device__ __forceinline__ void add_runs(const AttendArgs& args, Shared& s, int splits, int thread) {
  constexpr int kChunks = kDim / 8;
  const int rank = s.rank, token = s.token;
  const int row = thread >> 3, sub = thread & 7, h = s.head + row;
  const int begin = rank * kChunks / splits + sub, end = (rank + 1) * kChunks / splits;
  const uint32_t sums = shared_address(s.queries) + row * (kDim * 2);
  // Lane `sub` weighs run `sub`: columns below 256 by `low`, the others by `high`.
  float2 run = {-kInf, 0};
  uint32_t units = 0;
  if (sub < splits) {
    run = load_peer2(peer_address(shared_address(&s.stats[row]), sub));
    units = load_peer_half(peer_address(shared_address(s.unit[row]), sub));
  }
  float top = run.x;
#pragma unroll
  for (int d = 1; d < 8; d *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
  const float part = run.x == -kInf ? 0.f : exp2_fast(run.x - top);
  float total = part * run.y;
#pragma unroll
  for (int d = 1; d < 8; d *= 2) total += __shfl_xor_sync(~0u, total, d);
  const float share = __fdividef(part, total + exp2_fast(s.sink[row] * kLog2e - top));
  const float low = share * __uint_as_float((units & 0xFF) << 23), high = share * __uint_as_float((units >> 8) << 23);
  if (rank == 0 && sub == 0 && h < args.heads) {
    args.lse[static_cast<int64_t>(token) * args.heads + h] = top == -kInf ? -kInf : (__log2f(total) + top) * kLn2;
  }
#pragma unroll 1
  for (int chunk = begin; __any_sync(~0u, chunk < end); chunk += 2 * 8) {
    float x[2][8] = {};
#pragma unroll 2
    for (int c = 0; c < splits; ++c) {
      const float below = __shfl_sync(~0u, low, (thread & 24) | c), above = __shfl_sync(~0u, high, (thread & 24) | c);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = min(chunk + 8 * i, kChunks - 1);
        const uint32_t address = sums + ((at ^ (row & 7)) << 4);
        const uint4 halves = load_peer(peer_address(address, c));
        const uint32_t words[4] = {halves.x, halves.y, halves.z, halves.w};
        const float weight = at < kChunks / 2 ? below : above;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const float2 pair = __half22float2(reinterpret_cast<const __half2&>(words[k]));
          x[i][2 * k] = fmaf(weight, pair.x, x[i][2 * k]);
          x[i][2 * k + 1] = fmaf(weight, pair.y, x[i][2 * k + 1]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = chunk + 8 * i;
      if (at < end && h < args.heads) store_out(args, token, static_cast<int64_t>(token) * args.heads + h, at * 8, x[i]);
    }
  }
}

}  // namespace dsv4
