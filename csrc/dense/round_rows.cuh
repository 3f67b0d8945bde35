// Rows of bf16 as e4m3 with a power-of-two scale for every 128 columns (dsv4_jax/formats/activations.py says which),
// and the scales as the products read them: by blocks of columns, rows next to each other.
//
// A thread takes eight columns, sixteen threads those that share a scale. Each source that launches the kernel has its
// own.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "common/lanes.cuh"
#include "common/numbers.cuh"
#include "common/overlap.cuh"

namespace dsv4 {

struct RoundRowsArgs {
  const __nv_bfloat16* x;  // [rows, columns]
  uint8_t* codes;          // [rows, columns]
  float* scales;           // [columns / 128, pitch]: zeros from `rows` on
  int rows, pitch, columns;
};

constexpr int kRoundOwn = 8, kRoundThreads = 128, kRoundGroup = 128;  // columns of a thread; of a scale
constexpr int kRoundSharers = kRoundGroup / kRoundOwn;
constexpr int kRoundRows = 4;         // of a thread
constexpr float kRoundFloor = 1e-4f;  // the least amax

// The bits of a bf16's magnitude; NaN as zero, infinity as the greatest number.
__device__ __forceinline__ uint32_t bf16_magnitude(uint32_t bits) {
  constexpr uint32_t kMagnitude = 0x7FFF, kInfinity = 0x7F80;
  const uint32_t magnitude = bits & kMagnitude;
  return magnitude > kInfinity ? 0u : min(magnitude, kInfinity - 1);
}

// Two codes of bf16 times `factor`, a power of two; of NaN those of NaN.
__device__ __forceinline__ uint32_t e4m3_pair(uint32_t pair, float factor) {
  constexpr uint32_t kUpper = 0xFFFF0000u;
  const float2 x = make_float2(__uint_as_float(pair << 16) * factor, __uint_as_float(pair & kUpper) * factor);
  uint32_t codes = __nv_cvt_float2_to_fp8x2(x, __NV_SATFINITE, __NV_E4M3);
  if (x.x != x.x) codes = (codes & 0xFF00u) | kE4m3NaN;
  if (x.y != x.y) codes = (codes & 0x00FFu) | kE4m3NaN << kE4m3Bits;
  return codes;
}

// A thread's eight columns as codes; returns the exponent of their scale. The sixteen threads that share it, half a
// warp, come here together.
__device__ __forceinline__ int round_eight(uint4 words, uint2& codes) {
  const uint32_t sharers = ((1u << kRoundSharers) - 1) << (threadIdx.x & kRoundSharers);
  const uint32_t pairs[kRoundOwn / 2] = {words.x, words.y, words.z, words.w};
  uint32_t most = 0;
#pragma unroll
  for (uint32_t pair : pairs) most = max(most, max(bf16_magnitude(pair), bf16_magnitude(pair >> 16)));
#pragma unroll
  for (int d = kRoundSharers / 2; d > 0; d /= 2) most = max(most, __shfl_xor_sync(sharers, most, d));
  const int exponent = scale_exponent(fmaxf(__uint_as_float(most << 16), kRoundFloor), kE4m3Limit);
  const float factor = power_of_two(-exponent);
  codes.x = e4m3_pair(pairs[0], factor) | e4m3_pair(pairs[1], factor) << 16;
  codes.y = e4m3_pair(pairs[2], factor) | e4m3_pair(pairs[3], factor) << 16;
  return exponent;
}

// Grid: rows in fours up to the pitch, columns in 1,024s. A thread has its columns of four rows, asked for together.
static __global__ void __launch_bounds__(kRoundThreads) round_rows_kernel(const __grid_constant__ RoundRowsArgs args) {
  let_next_start();
  wait_for_previous();
  const int column = (blockIdx.y * kRoundThreads + threadIdx.x) * kRoundOwn;
  if (column >= args.columns) return;  // whole groups of 16 threads: columns are in 128s
  const bool first = within<kRoundSharers>(threadIdx.x) == 0;
  const int row = blockIdx.x * kRoundRows;
  uint4 words[kRoundRows] = {};
#pragma unroll
  for (int r = 0; r < kRoundRows; ++r) {
    if (row + r < args.rows)
      words[r] = __ldcs(reinterpret_cast<const uint4*>(args.x + static_cast<size_t>(row + r) * args.columns + column));
  }
#pragma unroll
  for (int r = 0; r < kRoundRows; ++r) {
    if (row + r >= args.pitch) return;
    float* const scale = args.scales + static_cast<size_t>(column / kRoundGroup) * args.pitch + row + r;
    if (row + r >= args.rows) {
      if (first) *scale = 0.f;
      continue;
    }
    uint2 codes;
    const int exponent = round_eight(words[r], codes);
    *reinterpret_cast<uint2*>(args.codes + static_cast<size_t>(row + r) * args.columns + column) = codes;
    if (first) *scale = power_of_two(exponent);
  }
}

static inline cudaError_t round_rows(const RoundRowsArgs& args, cudaStream_t stream) {
  constexpr int kBlock = kRoundThreads * kRoundOwn;
  const dim3 grid((args.pitch + kRoundRows - 1) / kRoundRows, (args.columns + kBlock - 1) / kBlock);
  return start(round_rows_kernel, {grid, kRoundThreads}, follows, stream, args);
}

}  // namespace dsv4
