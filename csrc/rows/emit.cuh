// One row on its way into a pool: epilogue, quantisation, store (dsv4_jax/formats/).
#pragma once

#include <cstdint>

#include "rows/epilogue.cuh"

namespace dsv4 {

enum class Format : int { kFp8 = 0, kIndexFp4 = 1, kIndexFp8 = 2 };

struct RowPool {
  uint8_t* codes;  // e4m3 NoPE dims [rows, 448], e2m1 pairs [rows, 64] or e4m3 [rows, 128]
  uint16_t* rope;  // [rows, 64], fp8 KV rows only
  void* scale;     // ue8m0 [rows, 8] or [rows, 4], or float32 [rows]
  int64_t rows;
  int format;
};

constexpr float kE4m3Floor = 1e-4f;  // no scale is made of a smaller magnitude

// Quantises and stores the row `v` as row `row` of the pool, or nowhere if there is no such row. All threads of the row
// call it, thread t with channels 4 t .. 4 t + 3.
template <int kChannels>
__device__ __forceinline__ void store_row(const RowPool& pool, Float4 v, int64_t row, int thread) {
  const bool stored = row >= 0 && row < pool.rows;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) flush_subnormal(v.x[i]);

  if constexpr (kChannels == kDim) {
    constexpr int kGroupThreads = kScaleGroup / kOwn, kNopeThreads = kNope / kOwn;
    const int k = scale_exponent(group_max<kGroupThreads>(v, kE4m3Floor), kE4m3Limit);
    if (!stored) return;
    uint8_t* scale = static_cast<uint8_t*>(pool.scale) + row * kScales;
    if (thread < kNopeThreads) {
      *reinterpret_cast<uint32_t*>(pool.codes + row * kNope + kOwn * thread) = e4m3_codes(v, power_of_two(-k));
      if (within<kGroupThreads>(thread) == 0) scale[over<kGroupThreads>(thread)] = static_cast<uint8_t>(k + kBias);
    } else {
      ushort4 rope = {bf16_code(v.x[0]), bf16_code(v.x[1]), bf16_code(v.x[2]), bf16_code(v.x[3])};
      *reinterpret_cast<ushort4*>(pool.rope + row * kRope + kOwn * (thread - kNopeThreads)) = rope;
      if (thread == kNopeThreads) scale[kScales - 1] = 0;
    }
  } else if (pool.format == static_cast<int>(Format::kIndexFp8)) {
    const int k = scale_exponent(group_max<kLanes>(v, kE4m3Floor), kE4m3Limit);
    if (!stored) return;
    *reinterpret_cast<uint32_t*>(pool.codes + row * kIndexDim + kOwn * thread) = e4m3_codes(v, power_of_two(-k));
    if (thread == 0) static_cast<float*>(pool.scale)[row] = power_of_two(k);
  } else {
    const int k = scale_exponent(group_max<kFp4Threads>(v, kFp4Floor), kE2m1Limit);
    const float inverse = power_of_two(-k);
    uint32_t codes = 0;
    bool nan = false;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const uint32_t code = e2m1_code(v.x[i], inverse);
      nan |= v.x[i] != v.x[i];
      codes |= code << kE2m1Bits * i;
    }
    const uint32_t group = ((1u << kFp4Threads) - 1) << (thread & (kLanes - kFp4Threads));
    nan = (__ballot_sync(kAllLanes, nan) & group) != 0;
    if (!stored) return;
    *reinterpret_cast<uint16_t*>(pool.codes + row * kFp4Bytes + 2 * thread) = static_cast<uint16_t>(codes);
    uint8_t* scale = static_cast<uint8_t*>(pool.scale) + row * kFp4Scales;
    if (within<kFp4Threads>(thread) == 0)
      scale[over<kFp4Threads>(thread)] = nan ? kUe8m0NaN : static_cast<uint8_t>(k + kBias);
  }
}

// Epilogue and store of the raw row `v`.
template <int kChannels>
__device__ __forceinline__ void emit_row(const EpilogueArgs& args, const Epilogue& epilogue, const RowPool& pool,
                                         Float4 v, int64_t row, float* shared, int thread) {
  apply_epilogue<kChannels>(args, epilogue, v, shared, thread);
  store_row<kChannels>(pool, v, row, thread);
}

}  // namespace dsv4
