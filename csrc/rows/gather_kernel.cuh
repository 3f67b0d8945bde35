// Stored KV rows back to dense values (dsv4_jax/ops/gather.py): a warp a row, a lane eight dims of either half of it,
// so that a store of the warp is contiguous.
//
// The rows lie at random places. Eight of them share a line of scales, which is kept in L2 where there are many rows:
// otherwise it would be read again for each.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <type_traits>

#include "common/l2_policy.cuh"
#include "common/lanes.cuh"
#include "common/numbers.cuh"
#include "common/widths.h"

namespace dsv4 {

struct GatherArgs {
  const uint8_t* codes;  // [pool_rows, 448] e4m3
  const uint16_t* rope;  // [pool_rows, 64] bf16
  const uint8_t* scale;  // [pool_rows, 8] ue8m0
  const int32_t* ids;    // [rows]; one out of range reads the nearest row
  void* out;             // [rows, 512]
  int64_t rows, pool_rows;
  int float_out;  // float32, else bf16
};

constexpr int kGatherThreads = 128, kGatherBlocks = 12;  // of a block; an SM
constexpr int kGatherOwn = 8;                            // dims of a lane, of each half
constexpr int kGatherHalf = kLanes * kGatherOwn;
constexpr int kGatherCodes = (kNope - kGatherHalf) / kGatherOwn;  // lanes whose dims of the upper half are codes
constexpr int kOfScale = kScaleGroup / kGatherOwn;                // lanes with one scale
static_assert(2 * kGatherHalf == kDim && kLanes / kOfScale == sizeof(uint32_t), "a word of scales for each half");

// Eight codes times their scale: exact.
template <typename Out>
__device__ __forceinline__ void store_codes(Out* to, uint2 codes, float scale, uint64_t policy) {
  float x[kGatherOwn];
#pragma unroll
  for (int i = 0; i < kGatherOwn; i += 2) {
    const uint32_t word = i < 4 ? codes.x : codes.y;
    const auto pair = static_cast<__nv_fp8x2_storage_t>(word >> i % 4 * kE4m3Bits);
    const float2 two = __half22float2(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3));
    x[i] = __fmul_rn(two.x, scale), x[i + 1] = __fmul_rn(two.y, scale);
  }
  if constexpr (std::is_same_v<Out, float>) {
    const auto bits = [&](int i) { return __float_as_uint(x[i]); };
    store(to, uint4{bits(0), bits(1), bits(2), bits(3)}, policy);
    store(to + 4, uint4{bits(4), bits(5), bits(6), bits(7)}, policy);
  } else {
    const auto bits = [&](int i) {
      const __nv_bfloat162 y = __floats2bfloat162_rn(x[i], x[i + 1]);
      return reinterpret_cast<const uint32_t&>(y);
    };
    store(to, uint4{bits(0), bits(2), bits(4), bits(6)}, policy);
  }
}
// Eight bf16, as they are.
template <typename Out>
__device__ __forceinline__ void store_rope(Out* to, uint4 x, uint64_t policy) {
  if constexpr (std::is_same_v<Out, float>) {
    constexpr int kHalf = 16;  // bits
    constexpr uint32_t kUpper = ~0u << kHalf;
    store(to, uint4{x.x << kHalf, x.x & kUpper, x.y << kHalf, x.y & kUpper}, policy);
    store(to + 4, uint4{x.z << kHalf, x.z & kUpper, x.w << kHalf, x.w & kUpper}, policy);
  } else {
    store(to, x, policy);
  }
}

template <typename Out>
__global__ void __launch_bounds__(kGatherThreads, kGatherBlocks)
    gather_kernel(const __grid_constant__ GatherArgs args) {
  const int lane = lane_of(threadIdx.x);
  const int64_t place = static_cast<int64_t>(blockIdx.x) * (kGatherThreads / kLanes) + warp_of(threadIdx.x);
  if (place >= args.rows) return;
  const bool many = args.rows * kDim * static_cast<int64_t>(sizeof(Out)) > kStaysInL2;
  const int64_t row = min(max(static_cast<int64_t>(args.ids[place]), int64_t{0}), args.pool_rows - 1);
  const uint8_t* codes = args.codes + row * kNope + kGatherOwn * lane;
  const uint2 low = load_once8(codes);
  const bool has_codes = lane < kGatherCodes;
  uint4 high = {};
  if (has_codes) {
    const uint2 x = load_once8(codes + kGatherHalf);
    high.x = x.x, high.y = x.y;
  } else {
    high = load_once16(args.rope + row * kRope + (lane - kGatherCodes) * kGatherOwn);
  }
  const uint2 scales = load8(args.scale + row * kScales, many ? kept() : as_usual());
  const auto scale_in = [&](uint32_t word) { return of_exponent_field(word >> over<kOfScale>(lane) * 8 & 0xFF); };

  const uint64_t policy = many ? streamed_once() : as_usual();
  Out* out = static_cast<Out*>(args.out) + place * kDim + kGatherOwn * lane;
  store_codes(out, low, scale_in(scales.x), policy);
  if (has_codes) {
    store_codes(out + kGatherHalf, {high.x, high.y}, scale_in(scales.y), policy);
  } else {
    store_rope(out + kGatherHalf, high, policy);
  }
}

}  // namespace dsv4
