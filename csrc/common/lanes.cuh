// Threads of a warp: who is who, and what they make together.
#pragma once

#include <cstdint>

namespace dsv4 {

constexpr int kLanes = 32;  // of a warp
constexpr int kWarpgroup = 4 * kLanes;
constexpr uint32_t kAllLanes = ~0u;

// i / kBy and i % kBy for kBy a power of two and i not negative, which the compiler does not know of a thread's number.
template <int kBy>
__device__ __forceinline__ constexpr int over(int i) {
  static_assert((kBy & (kBy - 1)) == 0, "a power of two");
  return i >> __builtin_ctz(kBy);
}
template <int kBy>
__device__ __forceinline__ constexpr int within(int i) {
  static_assert((kBy & (kBy - 1)) == 0, "a power of two");
  return i & (kBy - 1);
}

__device__ __forceinline__ int lane_of(int thread) { return within<kLanes>(thread); }
__device__ __forceinline__ int warp_of(int thread) { return over<kLanes>(thread); }

// Of the rows of a matrix fragment a quad, four lanes, has one.
constexpr int kQuad = 4;
__device__ __forceinline__ int quad_of(int lane) { return over<kQuad>(lane); }
__device__ __forceinline__ int quad_lane(int lane) { return within<kQuad>(lane); }

// The sum or the maximum over the lanes that differ in the bits below `kCount`, a power of two.
template <int kCount>
__device__ __forceinline__ float lanes_sum(float x) {
#pragma unroll
  for (int d = 1; d < kCount; d *= 2) x += __shfl_xor_sync(kAllLanes, x, d);
  return x;
}
template <int kCount>
__device__ __forceinline__ float lanes_max(float x) {
#pragma unroll
  for (int d = 1; d < kCount; d *= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, d));
  return x;
}

// Sum up to and including this lane.
__device__ __forceinline__ uint32_t running_sum(uint32_t x, int lane) {
#pragma unroll
  for (int d = 1; d < kLanes; d *= 2) {
    const uint32_t y = __shfl_up_sync(kAllLanes, x, d);
    if (lane >= d) x += y;
  }
  return x;
}

}  // namespace dsv4
