// One row on its way into a pool: RMSNorm, RoPE, Hadamard, quantisation, store (dsv4_jax/ops/finish.py, dsv4_jax/formats/).
//
// What a row needs beside its values (`Finish`) is asked for ahead of them: the loads of a kernel that stores few rows are
// cold, so that each one that waits for another costs it about a microsecond.
//
// Every product and sum is rounded on its own and sums follow the reference's trees, so that the bytes do not depend on
// the kernel or the chunking and equal the reference's but for the last bit of rsqrt, cos and sin.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cstdint>

namespace dsv4 {

enum class Format : int { kFp8 = 0, kIndexFp4 = 1, kIndexFp8 = 2 };

struct FinishArgs {
  const float* norm;           // [E]
  const float *cosine, *sine;  // [T, 32], of the angles to which the row of each token turns
  float eps;
  int hadamard;
};

struct RowPool {
  uint8_t* codes;  // e4m3 NoPE dims [rows, 448], e2m1 pairs [rows, 64] or e4m3 [rows, 128]
  uint16_t* rope;  // [rows, 64], fp8 KV rows only
  void* scale;     // ue8m0 [rows, 8] or [rows, 4], or float32 [rows]
  int64_t rows;
  int format;
};

struct Float4 {
  float x[4];
};

__device__ __forceinline__ Float4 load4(const float* p) {
  const float4 v = *reinterpret_cast<const float4*>(p);
  return {{v.x, v.y, v.z, v.w}};
}
// For what no thread of the launch writes.
__device__ __forceinline__ Float4 load4_constant(const float* p) {
  const float4 v = __ldg(reinterpret_cast<const float4*>(p));
  return {{v.x, v.y, v.z, v.w}};
}
// Brings a line near without a register for it.
__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L1 [%0];" ::"l"(p)); }
__device__ __forceinline__ void store4(float* p, const Float4& v) {
  *reinterpret_cast<float4*>(p) = make_float4(v.x[0], v.x[1], v.x[2], v.x[3]);
}

// The greater one; NaN if either is (fmaxf would drop it).
__device__ __forceinline__ float max_nan(float a, float b) {
  float x;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));
  return x;
}

// e^x for x <= 0, step by step as dsv4_jax/ops/numerics.py `exp`.
__device__ __forceinline__ float exact_exp(float x) {
  // The sum has the nearest integer as its low bits. No clamp at -88 as there: what is below is replaced.
  const float sum = __fadd_rn(__fmul_rn(x, 1.4426950408889634f), 0x1.8p23f);
  const float n = __fsub_rn(sum, 0x1.8p23f);
  float r = __fsub_rn(x, __fmul_rn(n, 0.693359375f));
  r = __fsub_rn(r, __fmul_rn(n, -2.12194440e-4f));
  float s = 1.f / 5040;
  constexpr float kTerms[7] = {1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, 0.5f, 1.f, 1.f};
#pragma unroll
  for (int i = 0; i < 7; ++i) s = __fadd_rn(__fmul_rn(s, r), kTerms[i]);
  s = __fmul_rn(s, __uint_as_float((__float_as_uint(sum) + 127) << 23));
  return x < -87.f ? 0.f : s;
}

// Sum over all channels of a row, the tree that adds the second half to the first until one is left. All threads of the
// row call it and get it. `shared` is [128][4] floats, for rows of 512.
template <int kChannels>
__device__ __forceinline__ float row_sum(Float4 v, float* shared, int thread) {
  if constexpr (kChannels == 512) {
    __syncthreads();
    store4(shared + 4 * thread, v);
    __syncthreads();
    const int lane = thread & 31;
    const Float4 a = load4(shared + 4 * lane), b = load4(shared + 4 * (lane + 32)), c = load4(shared + 4 * (lane + 64)),
                 d = load4(shared + 4 * (lane + 96));
#pragma unroll
    for (int i = 0; i < 4; ++i) v.x[i] = __fadd_rn(__fadd_rn(a.x[i], c.x[i]), __fadd_rn(b.x[i], d.x[i]));
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) v.x[i] = __fadd_rn(v.x[i], __shfl_xor_sync(~0u, v.x[i], d));
  }
  return __fadd_rn(__fadd_rn(v.x[0], v.x[2]), __fadd_rn(v.x[1], v.x[3]));
}

// Largest |x| of the threads that share a scale (NaN ignored, infinity as the largest float), not below `floor`.
template <int kThreads>
__device__ __forceinline__ float shared_max(const Float4& v, float floor) {
  float most = floor;
#pragma unroll
  for (int i = 0; i < 4; ++i) most = fmaxf(most, v.x[i] != v.x[i] ? 0.f : fminf(fabsf(v.x[i]), 3.402823466e38f));
#pragma unroll
  for (int d = kThreads / 2; d > 0; d /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, d));
  return most;
}

// ceil(log2(amax / limit)), limit given by its exponent and mantissa bits.
__device__ __forceinline__ int scale_exponent(float amax, int limit_exponent, uint32_t limit_mantissa) {
  const uint32_t bits = __float_as_uint(amax);
  return static_cast<int>(bits >> 23) - limit_exponent + ((bits & 0x7FFFFF) > limit_mantissa);
}
__device__ __forceinline__ float power_of_two(int k) { return __uint_as_float(static_cast<uint32_t>(k + 127) << 23); }

__device__ __forceinline__ uint32_t e4m3_codes(const Float4& v, float factor) {
  uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float x = v.x[i] * factor;
    const uint32_t code = x != x ? 0x7Fu : __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
    codes |= code << 8 * i;
  }
  return codes;
}

__device__ __forceinline__ uint16_t bf16_code(float x) {
  const __nv_bfloat16 y = __float2bfloat16_rn(x);
  return x != x ? uint16_t{0x7FC0} : reinterpret_cast<const uint16_t&>(y);
}

// A thread's share of what finishes a row: the norm's weights and, in a thread with rotary dims, its pairs' two angles.
struct Finish {
  Float4 norm;
  float sine[2], cosine[2];
};

// The first of a thread's two pairs among the rotary ones; negative: it has none.
template <int kChannels>
__device__ __forceinline__ int rotary_pair(int thread) {
  return 2 * thread - (kChannels - 64) / 2;
}

// Asks for all that finishes the row of `token`, which does not depend on its values. Without a branch (a thread without
// rotary dims loads what it does not need): loads on either side of one would wait for each other. Not by constant loads:
// the compiler would put those off beyond the barriers of the row's sum, to where they are used.
template <int kChannels>
__device__ __forceinline__ Finish load_finish(const FinishArgs& args, int64_t token, int thread) {
  const int64_t pair = token * 32 + max(rotary_pair<kChannels>(thread), 0);
  const float2 cosine = *reinterpret_cast<const float2*>(args.cosine + pair);
  const float2 sine = *reinterpret_cast<const float2*>(args.sine + pair);
  return {load4(args.norm + 4 * thread), {sine.x, sine.y}, {cosine.x, cosine.y}};
}

// Norm, RoPE and Hadamard of a row, in place.
template <int kChannels>
__device__ __forceinline__ void finish_row(const FinishArgs& args, const Finish& finish, Float4& v, float* shared, int thread) {
  Float4 squares;
#pragma unroll
  for (int i = 0; i < 4; ++i) squares.x[i] = __fmul_rn(v.x[i], v.x[i]);
  const float mean = __fmul_rn(row_sum<kChannels>(squares, shared, thread), 1.f / kChannels);
  const float factor = rsqrtf(__fadd_rn(mean, args.eps));
#pragma unroll
  for (int i = 0; i < 4; ++i) v.x[i] = __fmul_rn(__fmul_rn(v.x[i], factor), finish.norm.x[i]);

  // Selected, not branched to: the compiler would move the loads of the angles into the branch.
  const bool rotary = rotary_pair<kChannels>(thread) >= 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float even = v.x[2 * i], odd = v.x[2 * i + 1], sine = finish.sine[i], cosine = finish.cosine[i];
    const float a = __fsub_rn(__fmul_rn(even, cosine), __fmul_rn(odd, sine));
    const float b = __fadd_rn(__fmul_rn(even, sine), __fmul_rn(odd, cosine));
    v.x[2 * i] = rotary ? a : even, v.x[2 * i + 1] = rotary ? b : odd;
  }
  if constexpr (kChannels == 128) {
    if (args.hadamard) {
      const float a = v.x[0] + v.x[1], b = v.x[0] - v.x[1], c = v.x[2] + v.x[3], d = v.x[2] - v.x[3];
      v = {{a + c, b + d, a - c, b - d}};
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float other = __shfl_xor_sync(~0u, v.x[i], distance);
          v.x[i] = (thread & distance) != 0 ? other - v.x[i] : v.x[i] + other;
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) v.x[i] = __fmul_rn(v.x[i], 0.088388346f);
    }
  }
}

// Quantises and stores the finished row `v` as row `row` of the pool, or nowhere if there is no such row. All threads of the
// row call it, thread t with channels 4 t .. 4 t + 3.
template <int kChannels>
__device__ __forceinline__ void store_row(const RowPool& pool, Float4 v, int64_t row, int thread) {
  const bool stored = row >= 0 && row < pool.rows;
#pragma unroll
  for (int i = 0; i < 4; ++i) v.x[i] = fabsf(v.x[i]) < 0x1p-126f ? copysignf(0.f, v.x[i]) : v.x[i];

  if constexpr (kChannels == 512) {
    const int k = scale_exponent(shared_max<16>(v, 1e-4f), 135, 0x600000);  // 448 = 1.75 * 2^8
    if (!stored) return;
    uint8_t* scale = static_cast<uint8_t*>(pool.scale) + row * 8;
    if (thread < 112) {
      *reinterpret_cast<uint32_t*>(pool.codes + row * 448 + 4 * thread) = e4m3_codes(v, power_of_two(-k));
      if ((thread & 15) == 0) scale[thread >> 4] = static_cast<uint8_t>(k + 127);
    } else {
      ushort4 rope = {bf16_code(v.x[0]), bf16_code(v.x[1]), bf16_code(v.x[2]), bf16_code(v.x[3])};
      *reinterpret_cast<ushort4*>(pool.rope + row * 64 + 4 * (thread - 112)) = rope;
      if (thread == 112) scale[7] = 0;
    }
  } else if (pool.format == static_cast<int>(Format::kIndexFp8)) {
    const int k = scale_exponent(shared_max<32>(v, 1e-4f), 135, 0x600000);
    if (!stored) return;
    *reinterpret_cast<uint32_t*>(pool.codes + row * 128 + 4 * thread) = e4m3_codes(v, power_of_two(-k));
    if (thread == 0) static_cast<float*>(pool.scale)[row] = power_of_two(k);
  } else {
    const int k = scale_exponent(shared_max<8>(v, 6 * 0x1p-126f), 129, 0x400000);  // 6 = 1.5 * 2^2
    const float inverse = power_of_two(-k);
    uint32_t codes = 0;
    int nan = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float m = fabsf(v.x[i]) * inverse;
      // Codes 0 to 7 stand for 0, .5, 1, 1.5, 2, 3, 4, 6; halfway goes to the even code.
      const float code = m < 2 ? rintf(2 * m) : m < 4 ? rintf(m) + 2 : fminf(rintf(0.5f * m) + 4, 7.f);
      const uint32_t bits = v.x[i] != v.x[i] ? 0u : static_cast<uint32_t>(code) | (__float_as_uint(v.x[i]) >> 28 & 8);
      nan |= v.x[i] != v.x[i];
      codes |= bits << 4 * i;
    }
#pragma unroll
    for (int d = 1; d < 8; d *= 2) nan |= __shfl_xor_sync(~0u, nan, d);
    if (!stored) return;
    *reinterpret_cast<uint16_t*>(pool.codes + row * 64 + 2 * thread) = static_cast<uint16_t>(codes);
    if ((thread & 7) == 0) static_cast<uint8_t*>(pool.scale)[row * 4 + (thread >> 3)] = nan ? 0xFF : static_cast<uint8_t>(k + 127);
  }
}

// Finishes and stores the raw row `v`.
template <int kChannels>
__device__ __forceinline__ void emit_row(const FinishArgs& args, const Finish& finish, const RowPool& pool, Float4 v, int64_t row,
                                         float* shared, int thread) {
  finish_row<kChannels>(args, finish, v, shared, thread);
  store_row<kChannels>(pool, v, row, thread);
}

}  // namespace dsv4
