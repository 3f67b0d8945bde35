// What the L2 cache keeps: policies, and loads and stores that name one.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace dsv4 {

// For what is read or written once: first to leave the cache.
__device__ __forceinline__ uint64_t streamed_once() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// For lines that others of the launch share: last to leave.
__device__ __forceinline__ uint64_t kept() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ uint64_t as_usual() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Bytes of results that whoever reads them next may find in the cache (an H100 or H200 has 50 MB of it). More of them
// push out what the launch itself needs again.
constexpr int64_t kStaysInL2 = 32 << 20;

// Constants that nobody in the block reads again: not by way of L1.
__device__ __forceinline__ uint2 load_once8(const void* from) {
  uint2 x;
  asm volatile("ld.global.nc.L1::no_allocate.v2.b32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(from));
  return x;
}
__device__ __forceinline__ uint4 load_once16(const void* from) {
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from));
  return x;
}
__device__ __forceinline__ uint2 load8(const void* from, uint64_t policy) {
  uint2 x;
  asm volatile("ld.global.nc.L2::cache_hint.v2.b32 {%0, %1}, [%2], %3;"
               : "=r"(x.x), "=r"(x.y)
               : "l"(from), "l"(policy));
  return x;
}
__device__ __forceinline__ void store(void* to, float x, uint64_t policy) {
  asm volatile("st.global.L2::cache_hint.b32 [%0], %1, %2;" ::"l"(to), "f"(x), "l"(policy) : "memory");
}
__device__ __forceinline__ void store(void* to, uint2 x, uint64_t policy) {
  asm volatile("st.global.L2::cache_hint.v2.b32 [%0], {%1, %2}, %3;" ::"l"(to), "r"(x.x), "r"(x.y), "l"(policy)
               : "memory");
}
__device__ __forceinline__ void store(void* to, uint4 x, uint64_t policy) {
  asm volatile("st.global.L2::cache_hint.v4.b32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z),
               "r"(x.w), "l"(policy)
               : "memory");
}

}  // namespace dsv4
