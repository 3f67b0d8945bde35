// Queries and weights of index_scores on their way to shared memory. The order of the 128 dims within a product is
// free, so it is the one in which a thread's bytes of a key lie; the queries are brought into it here.
#pragma once

#include "index/scores_keys.cuh"

namespace dsv4 {

constexpr int kWord = sizeof(uint32_t);
constexpr int kOwnHeads = kScoreHeads / kQuad;  // whose weights a thread has
constexpr uint32_t kLowHalf = 0xFFFF;
constexpr int kHalfBits = 16;

// A thread's part of a head's query: a quarter of its dims, in chunks of the order of the key's. Four lanes take a
// head's quarters and eight the heads of a swizzle: every store of a warp covers all banks.
struct QueryPart {
  static constexpr int kParts = kIndexDim / kQuad / kChunkColumns;

  uint4 x[kParts];

  // `row` counts the heads of all tokens, 64 a token.
  template <typename Key>
  __device__ __forceinline__ void load(const ScoreArgs& args, int token, int row, int lane) {
    const int head = within<kScoreHeads>(row);
    const int64_t of = static_cast<int64_t>(token + over<kScoreHeads>(row)) * args.heads + head;
    const auto* q = reinterpret_cast<const uint4*>(args.queries + of * kIndexDim);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      x[part] = {0, 0, 0, 0};
      if (head < args.heads) x[part] = __ldg(q + Key::query_chunk(quad_lane(lane), part));
    }
  }

  // To shared memory in bf16, in the order of dims in which keys are decoded.
  template <typename Key>
  __device__ __forceinline__ void store(uint32_t shared, int row, int lane) const {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const uint4 pairs = Key::query_pairs(x[part]);
      const uint32_t words[kPairs] = {pairs.x, pairs.y, pairs.z, pairs.w};
      const uint32_t start = shared + (part >> 1) * kBlockBytes + row * kRowBytes + kWord * quad_lane(lane);
#pragma unroll
      for (int w = 0; w < kPairs; ++w) store_shared(start + swizzled(kPairs * (part & 1) + w, row), words[w]);
    }
  }

  // To shared memory in e4m3, each head divided by a power of two, which goes to `factors`. False if a number had to be
  // rounded or is out of range.
  __device__ __forceinline__ bool store_e4m3(uint32_t shared, float* factors, int row, int lane) const {
    uint32_t most = __vmaxu2(__vmaxu2(max_magnitudes(x[0]), max_magnitudes(x[1])),
                             __vmaxu2(max_magnitudes(x[2]), max_magnitudes(x[3])));
    most = __vmaxu2(most, __shfl_xor_sync(kAllLanes, most, 1));
    most = __vmaxu2(most, __shfl_xor_sync(kAllLanes, most, 2));
    const uint32_t field = query_factor_field(max(most & kLowHalf, most >> kHalfBits) >> kBf16Mantissa);
    uint32_t lost = field == 0;
    if (quad_lane(lane) == 0) factors[row] = of_exponent_field(2 * kBias - field);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const uint2 y = to_e4m3(x[part], of_exponent_field(field), lost);
      const uint32_t start = shared + row * kRowBytes + kWord * quad_lane(lane);
      store_shared(start + swizzled(2 * part, row), y.x);
      store_shared(start + swizzled(2 * part + 1, row), y.y);
    }
    return lost == 0;
  }
};

// Head of the weight at `place` in shared memory: runs of four weights of quarters 0, 1, 2, 3, and so on.
__device__ __forceinline__ int head_of_weight(int place) {
  return 16 * (place >> 4) + 8 * (place >> 1 & 1) + 2 * (place >> 2 & 3) + (place & 1);
}

// Weights of heads 8 j + 2 quarter + {0, 1}.
__device__ __forceinline__ void load_weights(uint32_t shared, int quarter, float (&weights)[kOwnHeads]) {
#pragma unroll
  for (int i = 0; i < kOwnHeads / 4; ++i) {
    const uint4 x = load_shared(shared + kQuad * kChunkBytes * i + kChunkBytes * quarter);
    weights[4 * i] = __uint_as_float(x.x), weights[4 * i + 1] = __uint_as_float(x.y);
    weights[4 * i + 2] = __uint_as_float(x.z), weights[4 * i + 3] = __uint_as_float(x.w);
  }
}

}  // namespace dsv4
