// Index scores over paged fp4 or fp8 keys (dsv4_jax/ops/index_scores.py): I[t, s] = sum_h w[t, h] relu(q[t, h] . K[s]).
//
// A block of one warpgroup takes one token and a run of its keys, 64 at a time. Each thread loads its share of two keys
// straight into registers, a tile ahead, decodes it to bf16 there and multiplies (wgmma, A from registers) with
// the token's 64 heads, which stay in shared memory. The order of the 128 dims within the product is free, so it is
// the one in which a thread's bytes lie; the queries are brought into it on their way to shared memory.
// A score depends on its token and key alone.
//
// A thread holds a quarter q of a key as 32-bit words. Product i takes four dims of every quarter: columns
// 16 i + 2 q + {0, 1} are one pair of its dims, columns 16 i + 8 + 2 q + {0, 1} another.
#pragma once

#include "hopper.cuh"

namespace dsv4 {

constexpr int kScoreTile = 64;    // keys of a tile
constexpr int kScoreHeads = 64;   // fewer are padded with zero weights
constexpr int kScoreDim = 128;
constexpr int kScoreThreads = 128;
constexpr int kGroupKeys = 16;    // keys of a warp's part of a tile; never cross a block of the table
constexpr int kMaxRunTiles = 128;  // bounds the row numbers kept in shared memory

struct ScoreArgs {
  const uint8_t* codes;            // [rows, 64] e2m1 pairs or [rows, 128] e4m3
  const void* scale;               // [rows, 4] ue8m0 or [rows] float32
  const __nv_bfloat16* queries;    // [T, H, 128]
  const float* weights;            // [T, H]
  const int32_t* table;            // [T, X] block ids
  const int32_t* count;            // [T] visible keys
  float* scores;                   // [T, S], S = X * rows_per_block
  int tokens, heads, columns, base, rows_per_block;
  int run_tiles;                   // tiles of a block
};

// Eight e2m1 codes -> four pairs of bf16 (codes i and i + 4). A code's bits, moved into the bf16 fields, are its value
// times 2^-126 (subnormals too); `factor` undoes that and applies the scale.
__device__ __forceinline__ void decode_fp4(uint32_t x, __nv_bfloat162 factor, uint32_t (&out)[4]) {
  constexpr uint32_t kSign = 0x80008000u, kRest = 0x01C001C0u;
  const uint32_t raw[4] = {(x << 12 & kSign) | (x << 6 & kRest), (x << 8 & kSign) | (x << 2 & kRest),
                           (x << 4 & kSign) | (x >> 2 & kRest), (x & kSign) | (x >> 6 & kRest)};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __nv_bfloat162 y = __hmul2(reinterpret_cast<const __nv_bfloat162&>(raw[i]), factor);
    out[i] = reinterpret_cast<const uint32_t&>(y);
  }
}

// Two e4m3 codes as bf16; `kSelect` picks the bytes: any, code 0, the sign of code 0 eight times, code 1.
template <uint32_t kSelect>
__device__ __forceinline__ uint32_t decode_fp8(uint32_t x) {
  uint32_t y;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(y) : "r"(x), "n"(kSelect));
  y = static_cast<uint32_t>(static_cast<int32_t>(y) >> 4) & 0x87F087F0u;
  const uint32_t bits = 0x7B807B80u;  // 2^120
  const __nv_bfloat162 z =
      __hmul2(reinterpret_cast<const __nv_bfloat162&>(y), reinterpret_cast<const __nv_bfloat162&>(bits));
  return reinterpret_cast<const uint32_t&>(z);
}

__device__ __forceinline__ uint4 load_key(const uint8_t* p) {
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(p));
  return x;
}

// The low (half 0) or high halves of two words, side by side.
__device__ __forceinline__ uint32_t halves(uint32_t low, uint32_t high, int half) {
  return __byte_perm(low, high, half == 0 ? 0x5410 : 0x7632);
}

// A thread's share of two keys, `row` and `row + 8`: a quarter of the dims each. Part p of a quarter of a query, 8
// dims, goes to products 2 p and 2 p + 1; `query_chunk` says which 8 dims, `query_pairs` in what order.
struct Fp4Key {
  static constexpr int kStages = 2;

  // Dims 32 q + 8 p and on: the key's word p, whose codes i and i + 4 decode as a pair.
  static __device__ __forceinline__ int query_chunk(int quarter, int part) { return 4 * quarter + part; }
  static __device__ __forceinline__ uint4 query_pairs(uint4 x) {
    return {halves(x.x, x.z, 0), halves(x.x, x.z, 1), halves(x.y, x.w, 0), halves(x.y, x.w, 1)};
  }

  uint4 codes[2];
  uint32_t scale[2];  // ue8m0 of this quarter

  __device__ __forceinline__ void load(const ScoreArgs& args, int64_t row, int quarter) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      codes[i] = load_key(args.codes + (row + 8 * i) * 64 + 16 * quarter);
      scale[i] = __ldg(static_cast<const uint8_t*>(args.scale) + (row + 8 * i) * 4 + quarter);
    }
  }

  // Fragments of the four products of one half.
  template <int kHalf>
  __device__ __forceinline__ void decode(uint32_t (&a)[4][4]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // 2^126 times the scale, up to 2^127; 0 for the scale 0 of a row never written.
      const uint32_t exponent = scale[i] == 0 ? 0 : min(scale[i] + 126, 254u);
      const uint32_t factor = exponent << 7 | exponent << 23;
      const uint32_t words[2] = {kHalf == 0 ? codes[i].x : codes[i].z, kHalf == 0 ? codes[i].y : codes[i].w};
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        uint32_t pairs[4];
        decode_fp4(words[w], reinterpret_cast<const __nv_bfloat162&>(factor), pairs);
#pragma unroll
        for (int p = 0; p < 4; ++p) a[2 * w + (p >> 1)][2 * (p & 1) + i] = pairs[p];
      }
    }
    if (__any_sync(~0u, max(scale[0], scale[1]) > 128)) large_scales(a);
  }

  // Scales above 2, and the NaN scale: a second exact factor.
  __device__ __forceinline__ void large_scales(uint32_t (&a)[4][4]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t bits = scale[i] == 255 ? 0x7FC0u : (max(scale[i], 128u) - 1) << 7;
      bits |= bits << 16;
#pragma unroll
      for (int s = 0; s < 4; ++s) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          uint32_t& x = a[s][2 * j + i];
          const __nv_bfloat162 y = __hmul2(reinterpret_cast<const __nv_bfloat162&>(x),
                                           reinterpret_cast<const __nv_bfloat162&>(bits));
          x = reinterpret_cast<const uint32_t&>(y);
        }
      }
    }
  }

  // Factor left to apply to the score of key `row + 8 i`.
  __device__ __forceinline__ float rest(int) const { return 1.f; }
};

struct Fp8Key {
  static constexpr int kStages = 2;

  // Dims 64 (p / 2) + 16 q + 8 (p % 2) and on: two words of the key, neighbours pair up.
  static __device__ __forceinline__ int query_chunk(int quarter, int part) {
    return 8 * (part >> 1) + 2 * quarter + (part & 1);
  }
  static __device__ __forceinline__ uint4 query_pairs(uint4 x) { return x; }

  uint4 codes[2][2];
  float scale[2];

  __device__ __forceinline__ void load(const ScoreArgs& args, int64_t row, int quarter) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint8_t* p = args.codes + (row + 8 * i) * 128 + 16 * quarter;
      codes[i][0] = load_key(p);
      codes[i][1] = load_key(p + 64);
      scale[i] = __ldg(static_cast<const float*>(args.scale) + row + 8 * i);
    }
  }

  template <int kHalf>
  __device__ __forceinline__ void decode(uint32_t (&a)[4][4]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 x = codes[i][kHalf];
      const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        a[w][i] = decode_fp8<0x1800>(words[w]);
        a[w][2 + i] = decode_fp8<0x3A22>(words[w]);
      }
    }
  }

  // A NaN code makes its key's score NaN.
  __device__ __forceinline__ float rest(int i) const {
    uint32_t nan = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 x = codes[i][half];
      const auto carry = [](uint32_t w) { return (w & 0x7F7F7F7Fu) + 0x01010101u; };
      nan |= carry(x.x) | carry(x.y) | carry(x.z) | carry(x.w);
    }
    nan |= __shfl_xor_sync(~0u, nan, 1);
    nan |= __shfl_xor_sync(~0u, nan, 2);
    return (nan & 0x80808080u) != 0 ? __uint_as_float(0x7FC00000) : scale[i];
  }
};

// A token's queries to shared memory, in the order of dims in which keys are decoded. Four lanes take a head's quarters
// and eight the heads of a swizzle: every store of a warp covers all banks.
template <typename Key>
__device__ __forceinline__ void load_score_queries(const ScoreArgs& args, int token, uint32_t shared, int warp,
                                                   int lane) {
  const int quarter = lane & 3;
  const auto* q = reinterpret_cast<const uint4*>(args.queries + static_cast<int64_t>(token) * args.heads * kScoreDim);
  uint4 x[2][4];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int head = 32 * i + 8 * warp + (lane >> 2);
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      x[i][part] = {0, 0, 0, 0};
      if (head < args.heads) x[i][part] = __ldg(q + head * (kScoreDim / 8) + Key::query_chunk(quarter, part));
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int head = 32 * i + 8 * warp + (lane >> 2);
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const uint4 pairs = Key::query_pairs(x[i][part]);
      const uint32_t words[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
      const uint32_t row = shared + (part >> 1) * kBlockBytes + head * 128 + 4 * quarter;
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const uint32_t at = row + (((4 * (part & 1) + w) ^ (head & 7)) << 4);
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(words[w]) : "memory");
      }
    }
  }
}

template <typename Key>
__global__ void __launch_bounds__(kScoreThreads, 4) index_scores_kernel(const __grid_constant__ ScoreArgs args) {
  __shared__ alignas(1024) uint8_t queries[2 * kBlockBytes];
  __shared__ int32_t first_row[kMaxRunTiles * kScoreTile / kGroupKeys];
  const int token = blockIdx.y, thread = threadIdx.x, lane = thread & 31;
  const int warp = __shfl_sync(~0u, thread >> 5, 0), quarter = lane & 3;
  const int total = args.columns * args.rows_per_block;
  const int first = blockIdx.x * args.run_tiles * kScoreTile;
  const int end = min(first + args.run_tiles * kScoreTile, total);
  const int visible = min(max(__ldg(args.count + token), 0), end);
  float* scores = args.scores + static_cast<int64_t>(token) * total;

  const int tiles = visible > first ? (visible - first + kScoreTile - 1) / kScoreTile : 0;
  for (int s = first + tiles * kScoreTile + thread; s < end; s += kScoreThreads) scores[s] = -__builtin_huge_valf();
  if (tiles == 0) return;

  // Rows of the run, one number per 16 keys. Keys past the end of the table repeat the last 16.
  for (int g = thread; g < tiles * (kScoreTile / kGroupKeys); g += kScoreThreads) {
    const int key = min(first + g * kGroupKeys, total - kGroupKeys);
    const int column = key / args.rows_per_block;
    first_row[g] = args.base + __ldg(args.table + static_cast<int64_t>(token) * args.columns + column) * args.rows_per_block +
                   key - column * args.rows_per_block;
  }
  load_score_queries<Key>(args, token, shared_address(queries), warp, lane);
  float weights[16];  // half of those of heads 8 j + 2 quarter + {0, 1}
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    const int head = 8 * (j >> 1) + 2 * quarter + (j & 1);
    weights[j] = head < args.heads ? 0.5f * __ldg(args.weights + static_cast<int64_t>(token) * args.heads + head) : 0.f;
  }
  fence_for_mma();
  __syncthreads();

  const uint64_t b = k_major(shared_address(queries));
  Key keys[Key::kStages];
  auto load = [&](Key& key, int tile) {
    if (tile < tiles) key.load(args, static_cast<int64_t>(first_row[tile * 4 + warp]) + (lane >> 2), quarter);
  };
#pragma unroll
  for (int i = 0; i < Key::kStages - 1; ++i) load(keys[i], i);
  for (int round = 0; round < tiles; round += Key::kStages) {
#pragma unroll
    for (int stage = 0; stage < Key::kStages; ++stage) {
      const int tile = round + stage;
      if (tile >= tiles) break;
      load(keys[(stage + Key::kStages - 1) % Key::kStages], tile + Key::kStages - 1);
      uint32_t a[2][4][4];
      float z[32];
      keys[stage].template decode<0>(a[0]);
      mma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) mma_64x64(z, a[0][i], b + (i * 32 >> 4), i > 0);
      mma_commit();
      keys[stage].template decode<1>(a[1]);
      mma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) mma_64x64(z, a[1][i], b + ((kBlockBytes + i * 32) >> 4), 1);
      mma_commit();
      const float rest[2] = {keys[stage].rest(0), keys[stage].rest(1)};
      mma_wait<0>();
      float sum[2][2] = {};
#pragma unroll
      for (int j = 0; j < 32; ++j) {
        // Twice relu on the multiplication pipes (a maximum would go to the busy integer pipe); NaN stays NaN.
        sum[j >> 1 & 1][j & 1] += weights[(j >> 2) * 2 + (j & 1)] * (z[j] + fabsf(z[j]));
      }
      float score[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float x = sum[i][0] + sum[i][1];
        x += __shfl_xor_sync(~0u, x, 1);
        x += __shfl_xor_sync(~0u, x, 2);
        score[i] = x * rest[i];
      }
      const int key = first + tile * kScoreTile + warp * kGroupKeys + (lane >> 2) + 8 * quarter;
      if (quarter < 2 && key < end) scores[key] = key < visible ? (quarter == 0 ? score[0] : score[1]) : -__builtin_huge_valf();
    }
  }
}

}  // namespace dsv4
