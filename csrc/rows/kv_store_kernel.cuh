// K and V rows of bf16 into the fp8 pools of `KVPool` (dsv4_jax/pools/kv_pool.py): a warp a row, a lane eight values at
// a time. The bytes are those of the reference (dsv4_jax/formats/index_fp8.py).
//
// Neighbouring scales share a line, of which a row writes four bytes at a random place: with many rows the lines are
// kept in L2 until others have come, or each would be read from memory and written back.
#pragma once

#include "common/l2_policy.cuh"
#include "common/row_math.cuh"

namespace dsv4 {

struct KVRows {
  const uint16_t* values;  // [tokens, width] bf16
  uint8_t* codes;          // [pool_rows, width] e4m3
  float* scale;            // [pool_rows]
  int width;               // a multiple of kStoreOwn, at most kStoreMaxWidth
};
struct KVStoreArgs {
  KVRows k, v;
  const int32_t* ids;  // [tokens]; nothing is stored where there is no such row
  int64_t tokens, pool_rows;
};

constexpr int kStoreThreads = 128, kStoreBlocks = 5;  // of a block; an SM
constexpr int kStoreOwn = 8;                          // values of a lane and step
constexpr int kStoreStep = kLanes * kStoreOwn, kStoreMaxSteps = 8, kStoreMaxWidth = kStoreMaxSteps * kStoreStep;
constexpr float kStoreFloor = 1e-4f;  // no scale is made of a smaller magnitude

// Codes of two values times `factor`, all finite and none above the greatest code.
__device__ __forceinline__ uint32_t finite_codes(uint32_t pair, float factor) {
  return __nv_cvt_float2_to_fp8x2({lower_bf16(pair) * factor, upper_bf16(pair) * factor}, __NV_SATFINITE, __NV_E4M3);
}
__device__ __forceinline__ uint32_t finite_codes(uint32_t first, uint32_t second, float factor) {
  return finite_codes(first, factor) | finite_codes(second, factor) << 2 * kE4m3Bits;
}
// Of any two pairs.
__device__ __forceinline__ uint32_t any_codes(uint32_t first, uint32_t second, float factor) {
  Float4 v = {{lower_bf16(first), upper_bf16(first), lower_bf16(second), upper_bf16(second)}};
#pragma unroll
  for (float& x : v.x) flush_subnormal(x);
  return e4m3_codes(v, factor);
}
// The greatest of two magnitudes, NaN ignored, infinity as the largest float.
__device__ __forceinline__ float pair_max(uint32_t pair) {
  const auto magnitude = [](float x) { return x != x ? 0.f : fminf(fabsf(x), kMaxFloat); };
  return fmaxf(magnitude(lower_bf16(pair)), magnitude(upper_bf16(pair)));
}

// Encodes row `token` and stores it as row `id` of the pool, if that is no negative number. The values do not wait for
// the id.
template <int kSteps>
__device__ __forceinline__ void store_kv_row(const KVRows& rows, int64_t token, int64_t id, bool many, int lane) {
  uint4 x[kSteps];
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int column = i * kStoreStep + kStoreOwn * lane;
    x[i] = column < rows.width ? load_once16(rows.values + token * rows.width + column) : uint4{};
  }
  // The greatest magnitude by its bits, those of bf16 numbers as integers: right where all are finite.
  constexpr uint32_t kMagnitudes = 0x7FFF7FFF, kInfinite = 0x7F80, kHalf = 16;
  uint32_t pairs = 0;
#pragma unroll
  for (const uint4& w : x) {
    for (const uint32_t pair : {w.x, w.y, w.z, w.w}) pairs = __vmaxu2(pairs, pair & kMagnitudes);
  }
  const uint32_t most = __reduce_max_sync(kAllLanes, max(pairs >> kHalf, pairs & ~0u >> kHalf));
  const bool finite = most < kInfinite;
  float amax = __uint_as_float(most << kHalf);
  if (!finite) {
    amax = 0;
#pragma unroll
    for (const uint4& w : x) {
      for (const uint32_t pair : {w.x, w.y, w.z, w.w}) amax = fmaxf(amax, pair_max(pair));
    }
    amax = lanes_max<kLanes>(amax);
  }
  const int k = scale_exponent(fmaxf(amax, kStoreFloor), kE4m3Limit);
  const float factor = power_of_two(-k);
  if (id < 0) return;
  const uint64_t policy = many ? streamed_once() : as_usual();
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int column = i * kStoreStep + kStoreOwn * lane;
    if (column >= rows.width) break;
    const uint2 codes = finite ? uint2{finite_codes(x[i].x, x[i].y, factor), finite_codes(x[i].z, x[i].w, factor)}
                               : uint2{any_codes(x[i].x, x[i].y, factor), any_codes(x[i].z, x[i].w, factor)};
    store(rows.codes + id * rows.width + column, codes, policy);
  }
  if (lane == 0) store(rows.scale + id, power_of_two(k), many ? kept() : as_usual());
}

template <int kSteps>
__global__ void __launch_bounds__(kStoreThreads, kStoreBlocks)
    kv_store_kernel(const __grid_constant__ KVStoreArgs args) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kStoreThreads / kLanes) + warp_of(threadIdx.x);
  const int64_t token = row / 2;
  if (token >= args.tokens) return;
  const int64_t id = args.ids[token];
  const bool many = args.tokens * (args.k.width + args.v.width) > kStaysInL2;
  store_kv_row<kSteps>(row % 2 == 0 ? args.k : args.v, token, id < args.pool_rows ? id : -1, many,
                       lane_of(threadIdx.x));
}

}  // namespace dsv4
