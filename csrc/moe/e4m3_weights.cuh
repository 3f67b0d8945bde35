// Packed FP4 expert weights for products with rows of e4m3 (dsv4_jax/formats/weights/fp4_e4m3.py makes them): tiles of
// 64 rows x 128 columns of K, 4,096 bytes of codes and 256 of scales, the tiles of 64 rows one after the other along K.
//
// A thread of the warpgroup widens exactly the codes that it multiplies (A from registers): a word holds eight codes of
// a row and 32 columns, whose magnitudes select bytes of a table, that of the group's scale beside the row's.
#pragma once

#include "common/mma_64.cuh"
#include "dense/e4m3.cuh"
#include "moe/weights.cuh"

namespace dsv4 {

constexpr int kWordGroups = kE4m3Columns / kWeightGroup;  // of 32 columns, in a tile
// The last byte of a row's scales: one counts for 128 columns; one counts for all columns of the row, in all rows.
constexpr uint32_t kWidened = 0xFF, kOneScale = 0xFE;
constexpr int kLeastTable = -8;  // 2^k times e2m1 numbers are e4m3 ones from k = -8 to 6
constexpr int kTables = 16;
constexpr uint32_t kTablesBytes = kTables * sizeof(uint2);  // they lie at a multiple of it
constexpr int kNoFactor = -kLeastTable;                     // the table of k = 0

// The e4m3 codes of the eight magnitudes of e2m1 times 2^k, eight bytes: of table k - kLeastTable.
__device__ __forceinline__ uint2 widening_table(int index) {
  constexpr int kLow = 3, kMagnitudes = 8;                        // bits of a mantissa; codes
  constexpr int kTwice[kMagnitudes] = {0, 1, 2, 3, 4, 6, 8, 12};  // the magnitudes, in halves
  uint32_t words[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < kMagnitudes; ++i) {
    // As a multiple of 2^-9, the least e4m3 number, whose code is 1.
    const uint32_t units = static_cast<uint32_t>(kTwice[i]) << index;
    const int above = units == 0 ? 0 : max(31 - __clz(units) - kLow, 0);  // binades above the subnormal numbers'
    const uint32_t code = (above << kLow) + (units >> above);
    words[i / 4] |= code << kE4m3Bits * (i % 4);
  }
  return {words[0], words[1]};
}

// The table that the scales of a row say for a group of 32 columns.
template <int kGroup>
__device__ __forceinline__ uint2 table_of(uint32_t tables, uint32_t of_row) {
  constexpr int kTableBit = 3;  // eight bytes each
  constexpr uint32_t kOffsets = 15u << kTableBit;
  return load_shared2(of_row >> (kE4m3Bits + 4 * kGroup - kTableBit) & kOffsets | tables);
}

// Four bytes of a table, by the low halves of the selectors.
__device__ __forceinline__ uint32_t selected(uint2 table, uint32_t selectors) {
  uint32_t x;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(x) : "r"(table.x), "r"(table.y), "r"(selectors));
  return x;
}

// Eight codes: of columns 4 (lane % 4) and on, and of those 16 further.
__device__ __forceinline__ void widen(uint32_t word, uint2 table, uint32_t& first, uint32_t& second) {
  constexpr uint32_t kMagnitudes = 0x77777777u, kSigns = 0x80808080u;
  const uint32_t selectors = word & kMagnitudes;
  first = selected(table, selectors) | (word & kSigns);
  second = selected(table, selectors >> 16) | (word << 4 & kSigns);
}

// The power of two of an e8m0 code, of 0 as well.
__device__ __forceinline__ float factor_of(uint32_t code) {
  constexpr uint32_t kLeast = 1u << (kFloatMantissa - 1);  // 2^-127
  return __uint_as_float(max(code << kFloatMantissa, kLeast));
}

// d[64 x N] (+)= A[64 x 32] B[32 x N] of e4m3, A in registers (words as `mma_64x64_e4m3` has them), B K-major in shared
// memory. `accumulate` 0 overwrites d.
template <int kN>
__device__ __forceinline__ void mma_e4m3(float (&d)[kN / 2], const uint32_t* a, uint64_t b, int accumulate);

#define DSV4_MMA_E4M3(N, A, B, P) \
  DSV4_MMA(mma_e4m3, N, const uint32_t*, "k32.f32.e4m3.e4m3", "{" A "}", B, P, "1, 1;}", DSV4_A4(a))

DSV4_MMA_E4M3(8, "%4, %5, %6, %7", "8", "9")
DSV4_MMA_E4M3(16, "%8, %9, %10, %11", "12", "13")
DSV4_MMA_E4M3(32, "%16, %17, %18, %19", "20", "21")
DSV4_MMA_E4M3(64, "%32, %33, %34, %35", "36", "37")
DSV4_MMA_E4M3(96, "%48, %49, %50, %51", "52", "53")
DSV4_MMA_E4M3(104, "%52, %53, %54, %55", "56", "57")
DSV4_MMA_E4M3(120, "%60, %61, %62, %63", "64", "65")

}  // namespace dsv4
