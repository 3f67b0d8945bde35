// Hopper (sm_90a) building blocks: warpgroup matrix products on swizzled shared memory, mbarriers, register hand-over.
//
// Shared-memory operands are blocks of 64 columns of bf16 (128 bytes a row) with the 128-byte swizzle: the 16-byte
// chunk c of row r lies at chunk c ^ (r & 7). A block of 64 rows is 8 KiB and starts on a 1 KiB boundary.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "common/lanes.cuh"

namespace dsv4 {

constexpr int kBlockRows = 64, kBlockColumns = 64;  // of bf16
constexpr int kRowBytes = 2 * kBlockColumns;        // of a row in a block
constexpr uint32_t kBlockBytes = kBlockRows * kRowBytes;
constexpr int kSwizzle = 8;  // rows after which it repeats, and chunks of a row
constexpr int kChunkBytes = 16, kChunkColumns = kChunkBytes / 2;
constexpr int kMmaDepth = 16;             // columns of K of one bf16 product
constexpr int kMmaBytes = 2 * kMmaDepth;  // theirs in a row
constexpr int kSharedLimit = 227 * 1024;  // bytes of shared memory that a block can have
constexpr int kMaxCluster = 8;            // blocks of a cluster, on every device

// Where chunk `chunk` of a row lies within its row of a block.
__device__ __forceinline__ int swizzled(int chunk, int row) { return (chunk ^ within<kSwizzle>(row)) * kChunkBytes; }

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Descriptors count bytes in units of 16: address, leading offset at bit 16, stride offset at bit 32, swizzle 128 B at
// bit 62.
constexpr int kDescriptorUnit = 4;  // as a shift
__device__ __forceinline__ uint64_t operand(uint32_t address, uint32_t leading_bytes, uint32_t stride_bytes) {
  constexpr uint32_t kAddressMask = 0x3FFFF;
  constexpr int kLeadingBit = 16, kStrideBit = 32, kSwizzleBit = 62;
  return static_cast<uint64_t>((address & kAddressMask) >> kDescriptorUnit) |
         static_cast<uint64_t>(leading_bytes >> kDescriptorUnit) << kLeadingBit |
         static_cast<uint64_t>(stride_bytes >> kDescriptorUnit) << kStrideBit | uint64_t{1} << kSwizzleBit;
}
constexpr uint32_t kGroupBytes = kSwizzle * kRowBytes;  // from eight rows of a block to the next
constexpr uint32_t kUnused = 16;                        // leading offset

// Rows are M or N and the block's columns are K: 8-row groups lie 1 KiB apart, the leading offset is unused.
__device__ __forceinline__ uint64_t k_major(uint32_t address) { return operand(address, kUnused, kGroupBytes); }

// The same by its low half, as found for the start of a block or blocks, at a distance of `offset` bytes.
__device__ __forceinline__ uint32_t k_major_low(uint32_t address) { return static_cast<uint32_t>(k_major(address)); }
__device__ __forceinline__ uint64_t k_major(uint32_t low, uint32_t offset) {
  return (k_major(0) & ~uint64_t{~0u}) | (low + (offset >> kDescriptorUnit));
}

// Rows are K and the columns are N: 64-column blocks lie `kBlockBytes` apart, 8-row groups 1 KiB.
__device__ __forceinline__ uint64_t n_major(uint32_t address) { return operand(address, kBlockBytes, kGroupBytes); }

__device__ __forceinline__ void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void mma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Accumulator of a 64 x kN product: a lane holds, of rows r and r + 8 (r = 16 * warp + lane / 4), columns
// 8 j + 2 (lane % 4) + {0, 1} as d[4 j + {0, 1}] and d[4 j + {2, 3}].
template <int kN>
using Accumulator = float[kN / 2];
constexpr int kWarpRows = 16;  // rows of a warp
constexpr int kLowerRow = 8;   // from row r to the other
constexpr int kCell = 4;       // numbers of 8 columns
constexpr int kCellColumns = 8;
__device__ __forceinline__ int accumulator_row(int warp, int lane) { return warp * kWarpRows + quad_of(lane); }
// The greatest number, or the sum, of a row's four lanes.
__device__ __forceinline__ float row_max(float x) { return lanes_max<kQuad>(x); }
__device__ __forceinline__ float row_total(float x) { return lanes_sum<kQuad>(x); }

// A of a product in registers: of rows r, r + 8, r and r + 8, columns 2 (lane % 4) + {0, 1}, the last two 8 columns on.
constexpr int kFragment = 4;
using Fragment = uint32_t[kFragment];

#define DSV4_F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define DSV4_F8(d, i) DSV4_F4(d, i), DSV4_F4(d, i + 4)
#define DSV4_F16(d, i) DSV4_F8(d, i), DSV4_F8(d, i + 8)
#define DSV4_F64(d, i) DSV4_F16(d, i), DSV4_F16(d, i + 16), DSV4_F16(d, i + 32), DSV4_F16(d, i + 48)

// d[64 x 64] (+)= A[64 x 16] B[16 x 64]; A and B K-major in shared memory. `accumulate` 0 overwrites d.
__device__ __forceinline__ void mma_64x64(Accumulator<kBlockColumns>& d, uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, %32, %33, p, 1, 1, 0, 0;}"
      : DSV4_F16(d, 0), DSV4_F16(d, 16)
      : "l"(a), "l"(b), "r"(accumulate));
}

// The same with A in registers.
__device__ __forceinline__ void mma_64x64(Accumulator<kBlockColumns>& d, const Fragment& a, uint64_t b,
                                          int accumulate) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;}"
      : DSV4_F16(d, 0), DSV4_F16(d, 16)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

// d[64 x 64] (+)= A[64 x 32] B[32 x 64] of e4m3; A in registers: rows lane / 4 and + 8 of the warp's 16, word 2 h + i
// has columns 16 h + 4 (lane % 4) and on of row i. B K-major in shared memory, 128 columns a row of a block.
__device__ __forceinline__ void mma_64x64_e4m3(Accumulator<kBlockColumns>& d, const Fragment& a, uint64_t b,
                                               int accumulate) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, {%32, %33, %34, %35}, %36, p, 1, 1;}"
      : DSV4_F16(d, 0), DSV4_F16(d, 16)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

// d[64 x 128] += A[64 x 16] B[16 x 128]; A in registers, B N-major in shared memory. (N = 256 does not assemble for a
// block of 512 threads: one instruction would need more than the 128 registers a thread starts with.)
__device__ __forceinline__ void mma_64x128(Accumulator<2 * kBlockColumns>& d, const Fragment& a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
      : DSV4_F64(d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// The same with A K-major in shared memory.
__device__ __forceinline__ void mma_64x128(Accumulator<2 * kBlockColumns>& d, uint64_t a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, %64, %65, 1, 1, 1, 0, 1;"
      : DSV4_F64(d, 0)
      : "l"(a), "l"(b));
}

// Shared memory written by ordinary stores becomes visible to the matrix units. Each writing thread, before the
// barrier.
__device__ __forceinline__ void fence_for_mma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void barrier_init(uint32_t bar, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}
// After the barriers of a block were made, by the thread that made them.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t bar) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
// At a barrier of a block of the cluster, about what the matrix units have read: nothing written need be seen.
__device__ __forceinline__ void arrive_at(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t bar, uint32_t parity) {
  asm volatile(
      "{.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;}" ::"r"(bar),
      "r"(parity)
      : "memory");
}

// A stage of a ring of buffers, and in which of its turns, modulo two: the parity that its barriers are waited with.
struct Stage {
  int index;
  uint32_t phase;
};
// Of step `step` of a ring that starts with step 0.
template <int kStages>
__device__ __forceinline__ Stage stage_of(int step) {
  return {within<kStages>(step), static_cast<uint32_t>(over<kStages>(step) & 1)};
}

// Hardware barrier `id` (1..15) among `threads` threads: wait, or announce without waiting.
__device__ __forceinline__ void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// As named_sync; whether `mine` holds in all of them.
__device__ __forceinline__ bool named_all(int id, int threads, bool mine) {
  int all;
  asm volatile(
      "{.reg .pred p, q; setp.ne.b32 p, %3, 0;\n"
      "barrier.cta.red.and.aligned.pred q, %1, %2, p;\n"
      "selp.b32 %0, 1, 0, q;}"
      : "=r"(all)
      : "r"(id), "r"(threads), "r"(static_cast<int>(mine))
      : "memory");
  return all != 0;
}

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Barrier of the cluster; shared memory written before it is seen by the other blocks after it.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The same for execution only: nothing written before it need be seen.
__device__ __forceinline__ void cluster_meet() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// Address of the same shared-memory location in another block of the cluster.
__device__ __forceinline__ uint32_t peer_address(uint32_t address, int rank) {
  uint32_t peer;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(peer) : "r"(address), "r"(rank));
  return peer;
}
__device__ __forceinline__ float2 load_peer2(uint32_t address) {
  float2 x;
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
  return x;
}
__device__ __forceinline__ float4 load_peer4(uint32_t address) {
  float4 x;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(address)
               : "memory");
  return x;
}
__device__ __forceinline__ uint32_t load_peer_half(uint32_t address) {
  uint16_t x;
  asm volatile("ld.shared::cluster.u16 %0, [%1];" : "=h"(x) : "r"(address));
  return x;
}
__device__ __forceinline__ uint4 load_peer(uint32_t address) {
  uint4 x;
  asm volatile("ld.shared::cluster.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(address));
  return x;
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 16 bytes from global to shared memory without a register; zeros where `valid` is false.
__device__ __forceinline__ void copy_async(uint32_t address, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(valid ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t address, uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t address, uint4 x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}

// Four 8 x 8 matrices of 16-bit numbers, as accumulators hold them; lane 8 i + r names row r of the i-th.
__device__ __forceinline__ void store_matrices(uint32_t address, const Fragment& x) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3])
               : "memory");
}

__device__ __forceinline__ uint32_t load_shared1(uint32_t address) {
  uint32_t x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}
// Words that are not written while they are read: without a memory clobber, for the compiler to schedule freely.
__device__ __forceinline__ uint2 load_shared2(uint32_t address) {
  uint2 x;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(address));
  return x;
}
__device__ __forceinline__ uint4 load_shared4(uint32_t address) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(address));
  return x;
}
__device__ __forceinline__ uint4 load_shared(uint32_t address) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(address)
               : "memory");
  return x;
}

}  // namespace dsv4
