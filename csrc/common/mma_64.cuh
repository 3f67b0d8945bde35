// Products with weights: d[64 x N] (+)= A[64 x 16] B[16 x N] of a warpgroup, A in registers, B K-major in shared
// memory; and d[16 x 8] += A[16 x 16] B[16 x 8] of a warp, whose numbers have the same bits.
#pragma once

#include "common/hopper.cuh"

namespace dsv4 {

// `accumulate` 0 overwrites d.
template <int kN>
__device__ __forceinline__ void mma_64(float (&d)[kN / 2], const uint32_t* a, uint64_t b, int accumulate);
// A K-major in shared memory, too.
template <int kN>
__device__ __forceinline__ void mma_64(float (&d)[kN / 2], uint64_t a, uint64_t b, int accumulate);

#define DSV4_A4(a) "r"((a)[0]), "r"((a)[1]), "r"((a)[2]), "r"((a)[3])

// The registers of a product's numbers, N / 2 a thread: as text, and as operands.
#define DSV4_REGISTERS_8 "%0, %1, %2, %3"
#define DSV4_REGISTERS_16 DSV4_REGISTERS_8 ", %4, %5, %6, %7"
#define DSV4_REGISTERS_32 DSV4_REGISTERS_16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define DSV4_REGISTERS_64 \
  DSV4_REGISTERS_32       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define DSV4_REGISTERS_96 \
  DSV4_REGISTERS_64       \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define DSV4_REGISTERS_104 DSV4_REGISTERS_96 ", %48, %49, %50, %51"
#define DSV4_REGISTERS_120 \
  DSV4_REGISTERS_96        \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59"
#define DSV4_REGISTERS_128 \
  DSV4_REGISTERS_96        \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define DSV4_SUMS_8(d) DSV4_F4(d, 0)
#define DSV4_SUMS_16(d) DSV4_F8(d, 0)
#define DSV4_SUMS_32(d) DSV4_F16(d, 0)
#define DSV4_SUMS_64(d) DSV4_F16(d, 0), DSV4_F16(d, 16)
#define DSV4_SUMS_96(d) DSV4_SUMS_64(d), DSV4_F16(d, 32)
#define DSV4_SUMS_104(d) DSV4_SUMS_96(d), DSV4_F4(d, 48)
#define DSV4_SUMS_120(d) DSV4_SUMS_96(d), DSV4_F8(d, 48), DSV4_F4(d, 56)
#define DSV4_SUMS_128(d) DSV4_F64(d, 0)

// One product of `name`: `a` is of TYPE, in the instruction A, and given by __VA_ARGS__; B and P are the numbers of the
// operands b and accumulate.
#define DSV4_MMA(NAME, N, TYPE, KINDS, A, B, P, END, ...)                                                         \
  template <>                                                                                                     \
  __device__ __forceinline__ void NAME<N>(float(&d)[N / 2], TYPE a, uint64_t b, int accumulate) {                 \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %" P                                                              \
                 ", 0;\n"                                                                                         \
                 "wgmma.mma_async.sync.aligned.m64n" #N KINDS " {" DSV4_REGISTERS_##N "}, " A ", %" B ", p, " END \
                 : DSV4_SUMS_##N(d)                                                                               \
                 : __VA_ARGS__, "l"(b), "r"(accumulate));                                                         \
  }

#define DSV4_MMA_64(N, A, B, P) \
  DSV4_MMA(mma_64, N, const uint32_t*, "k16.f32.bf16.bf16", "{" A "}", B, P, "1, 1, 0;}", DSV4_A4(a))
#define DSV4_SHARED_MMA_64(N, A, B, P) \
  DSV4_MMA(mma_64, N, uint64_t, "k16.f32.bf16.bf16", "%" A, B, P, "1, 1, 0, 0;}", "l"(a))

DSV4_SHARED_MMA_64(8, "4", "5", "6")
DSV4_SHARED_MMA_64(16, "8", "9", "10")
DSV4_SHARED_MMA_64(64, "32", "33", "34")
DSV4_SHARED_MMA_64(128, "64", "65", "66")

DSV4_MMA_64(8, "%4, %5, %6, %7", "8", "9")
DSV4_MMA_64(16, "%8, %9, %10, %11", "12", "13")
DSV4_MMA_64(32, "%16, %17, %18, %19", "20", "21")
DSV4_MMA_64(64, "%32, %33, %34, %35", "36", "37")
DSV4_MMA_64(128, "%64, %65, %66, %67", "68", "69")

// Of a warp, B in registers: it waits for no other warp, and is done at once.
__device__ __forceinline__ void mma_16x8(float (&d)[kCell], const uint32_t* a, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : DSV4_F4(d, 0)
      : DSV4_A4(a), "r"(b0), "r"(b1));
}

// Where a lane reads what `load_rows` loads, from the start of a swizzled block.
__device__ __forceinline__ uint32_t place_of_rows(int lane) {
  const int row = within<kSwizzle>(lane);
  return row * kRowBytes + swizzled(lane / kSwizzle, row);
}

// B of two of a warp's products: columns 32 h .. 32 h + 31 of eight rows of a swizzled block at `block`.
__device__ __forceinline__ uint4 load_rows(uint32_t block, uint32_t place, int h) {
  constexpr int kChunks = 4;  // of 32 columns
  uint4 x;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(block + (place ^ h * kChunks * kChunkBytes)));
  return x;
}

}  // namespace dsv4
