// Products of e4m3 rows with e4m3 weights: what the kernels for few and for many rows (dense/e4m3_few.cuh,
// dense/e4m3_many.cuh) share, and the sum that both compute.
//
// The sum, whatever the number of rows, the tile or the device:
//
//   total = 0 for each part of K (`e4m3_parts`: of the matrix alone)
//   for each 128 columns of the part in order: sum = 0; four products of 32 columns in order, added up by the matrix
//     unit; total = fma(sum, scale of the row * scale of the weights, total)
//   the parts' totals are added one after the other; the result is rounded once
//
// A product's element depends on its row, its column and what it is added to alone: not on N, nor on which operand is
// A. So weights are M for few rows, and rows are M for many. tests/oracle/matrix_unit.py computes the same bits.
#pragma once

#include <cuda_runtime.h>

#include <utility>

#include "common/mma_64.cuh"
#include "common/numbers.cuh"
#include "dense/ring.cuh"

namespace dsv4 {

constexpr int kE4m3Rows = 64;      // of the weights: of a tile as packed
constexpr int kE4m3Columns = 128;  // of K, that share scales: a row of a swizzled block
constexpr int kE4m3Tile = kE4m3Rows * kE4m3Columns;
constexpr int kE4m3ScaleRows = 128;  // of the weights
constexpr int kE4m3Depth = 32;       // columns of one product, which are bytes

struct E4m3Args {
  const float* row_scales;  // [groups * columns / 128, pitch]: of 128 columns, of each row
  const uint8_t* weights;   // [weight_rows / 64, columns / 128, 8192]: tiles of 64 rows, swizzled
  const uint8_t* scales;    // [ceil(weight_rows / 128), columns / 128], ue8m0
  void* out;                // [rows, weight_rows] bf16, or as one of the next two says
  int rows, pitch;          // pitch: rows, rounded up to whole 16 bytes of scales
  int weight_rows, columns;
  int groups;     // of the weights' rows, equally many each: group g takes columns g * columns .. of the rows
  int float_out;  // float32
  float* out_scales = nullptr;  // [weight_rows / 128, pitch] of e4m3 (dense/round_eight.cuh); null: it is not
};

// Parts of K: as many as give 96 blocks of 64 rows, at most four, of 512 columns or more.
inline int e4m3_parts(int weight_rows, int columns) {
  constexpr int kEnough = 96, kMaxParts = 4, kLeast = 4;
  const int tiles = weight_rows / kE4m3Rows, blocks = columns / kE4m3Columns;
  int parts = 1;
  while (parts < kMaxParts && tiles * parts < kEnough && blocks % (2 * parts) == 0 && blocks / (2 * parts) >= kLeast)
    parts *= 2;
  return parts;
}

// Sums begin.
template <int kCount>
__device__ __forceinline__ void clear(float (&sums)[kCount]) {
#pragma unroll
  for (float& x : sums) x = 0;
}
template <int kRows, int kCount>
__device__ __forceinline__ void clear(float (&sums)[kRows][kCount]) {
#pragma unroll
  for (auto& one : sums) clear(one);
}

// d[64 x N] (+)= A[64 x 32] B[32 x N] of e4m3, both K-major in shared memory. `accumulate` 0 overwrites d.
template <int kN>
__device__ __forceinline__ void mma_e4m3(float (&d)[kN / 2], uint64_t a, uint64_t b, int accumulate);

#define DSV4_SHARED_MMA_E4M3(N, A, B, P) \
  DSV4_MMA(mma_e4m3, N, uint64_t, "k32.f32.e4m3.e4m3", "%" A, B, P, "1, 1;}", "l"(a))

DSV4_SHARED_MMA_E4M3(8, "4", "5", "6")
DSV4_SHARED_MMA_E4M3(16, "8", "9", "10")
DSV4_SHARED_MMA_E4M3(32, "16", "17", "18")
DSV4_SHARED_MMA_E4M3(64, "32", "33", "34")
DSV4_SHARED_MMA_E4M3(128, "64", "65", "66")

// The sum of 128 columns, enqueued: a and b are the low halves of the operands' descriptors.
template <int kN>
__device__ __forceinline__ void multiply_block(float (&d)[kN / 2], uint32_t a, uint32_t b) {
  mma_fence();
#pragma unroll
  for (int i = 0; i < kE4m3Columns / kE4m3Depth; ++i)
    mma_e4m3<kN>(d, k_major(a, i * kE4m3Depth), k_major(b, i * kE4m3Depth), i > 0);
  mma_commit();
}

// `f` of 0, 1, ..., kCount - 1, as types whose `value` is the number.
template <int... i, typename F>
__device__ __forceinline__ void each_of(std::integer_sequence<int, i...>, const F& f) {
  (f(std::integral_constant<int, i>{}), ...);
}
template <int kCount, typename F>
__device__ __forceinline__ void each(const F& f) {
  each_of(std::make_integer_sequence<int, kCount>{}, f);
}

// The scales of a tile's blocks of 128 columns, in order. A warp holds 32 of them, a lane each.
struct WeightFactors {
  const uint8_t* scales;
  int count, lane;
  float mine = 0;

  __device__ __forceinline__ void load(int first) {
    constexpr uint32_t kLeast = 1u << (kFloatMantissa - 1);  // 2^-127, of code 0
    const uint32_t code = first + lane < count ? __ldg(scales + first + lane) : 0u;
    mine = __uint_as_float(max(code << kFloatMantissa, kLeast));
  }
  // Of block `i`, asked for in order.
  __device__ __forceinline__ float of(int i) {
    if (within<kLanes>(i) == 0) load(i);
    return __shfl_sync(kAllLanes, mine, within<kLanes>(i));
  }
};

// The parts' totals at this place, of blocks of the cluster `step` apart from `first` on, added one after the other.
template <int kParts>
__device__ __forceinline__ float4 add_in_order(uint32_t address, int first, int step) {
  if constexpr (kParts == 1) {
    const uint4 bits = load_shared(address);
    return reinterpret_cast<const float4&>(bits);
  } else {
    float4 x[kParts];
#pragma unroll
    for (int p = 0; p < kParts; ++p) x[p] = load_peer4(peer_address(address, first + p * step));
#pragma unroll
    for (int p = 1; p < kParts; ++p) {
      x[0].x = __fadd_rn(x[0].x, x[p].x), x[0].y = __fadd_rn(x[0].y, x[p].y);
      x[0].z = __fadd_rn(x[0].z, x[p].z), x[0].w = __fadd_rn(x[0].w, x[p].w);
    }
    return x[0];
  }
}

}  // namespace dsv4
