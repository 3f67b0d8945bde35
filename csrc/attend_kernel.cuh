// Sparse MQA decode over fp8 rows: one softmax over window and selected entries, with a sink (dsv4_jax/ops/attend.py).
//
// A cluster of `splits` blocks serves one token and 64 heads. The keys are cut into tiles of 64 (the window's, then the
// counted entries'), the tiles into `splits` runs of (almost) equal length: the cut depends on the token alone, so its
// bits do not depend on the batch. Within a block four warpgroups work on a run:
//
//   warpgroups 2, 3   gather rows, turn e4m3 codes into bf16 and store them swizzled, two tiles deep
//   warpgroup 0       S = Q K^T (64 heads x 64 keys), online softmax, P; then O[:, 0:256] += P K
//   warpgroup 1       O[:, 256:512] += P K with the same P, through shared memory
//
// K and V are the same rows: one tile in shared memory serves both products. The runs are merged in rank order through
// distributed shared memory, and the sink enters there.
#pragma once

#include "hopper.cuh"

namespace dsv4 {

constexpr int kTile = 64;    // keys of a tile
constexpr int kHeads = 64;   // heads of a block
constexpr int kDim = 512;    // 448 NoPE + 64 RoPE
constexpr int kNope = 448;
constexpr int kRope = 64;
constexpr int kScales = 8;   // scale bytes of a row
constexpr int kThreads = 512;
constexpr int kProducerWarps = 8;
constexpr int kRowsPerWarp = kTile / kProducerWarps;
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kInf = __builtin_huge_valf();

struct Rows {
  const uint8_t* nope;   // [rows, 448] e4m3
  const uint16_t* rope;  // [rows, 64] bf16
  const uint8_t* scale;  // [rows, 8] ue8m0, one per 64 NoPE dims
  int rows;
};

struct AttendArgs {
  const __nv_bfloat16* queries;  // [T, H, 512]
  const float* sink;             // [H]
  Rows window, entries;
  const int32_t* window_ids;      // [T, W]
  const uint8_t* window_visible;  // [T, W]
  const int32_t* entry_ids;       // [T, K]
  const int32_t* entry_count;     // [T]
  void* out;                      // [T, H, 512] float32, or bfloat16 if `bf16_out`
  float* lse;                     // [T, H]
  int tokens, heads, window_keys, entry_keys;
  float scale_log2;     // softmax scale * log2(e)
  const float* cosine;  // [T, 32]: the last 64 dims of the output turn back by these angles; null: they do not
  const float* sine;    // [T, 32]
  int bf16_out;
};

struct Shared {
  alignas(1024) uint8_t queries[8 * kBlockBytes];
  alignas(1024) uint8_t keys[2][8 * kBlockBytes];  // after the last tile: the block's float [64][512] sums
  alignas(1024) uint8_t weights[2][kBlockBytes];  // P, bf16
  uint8_t codes[kProducerWarps][2][2][32][16];    // rows on their way: [warp][slot][groups 0-3 or 4-6][lane]
  float keep[2][kHeads];                          // factor by which a tile shrinks the sums before it
  float2 stats[kHeads];                           // (top, total) of this block's run
  alignas(8) uint8_t visible[2][kProducerWarps];  // eight keys a byte
  uint64_t full[2], empty[2];
};

// ---- producers ------------------------------------------------------------------------------------------------------

// Two e4m3 codes of x as bf16 times 2^-120: a code's bits, moved into the bf16 fields, are its value times 2^-120,
// subnormals included. `kSelect` picks the bytes: any, code 0, the sign of code 0 eight times, code 1.
template <uint32_t kSelect>
__device__ __forceinline__ uint32_t scaled(uint32_t x, __nv_bfloat162 factor) {
  uint32_t y;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(y) : "r"(x), "n"(kSelect));
  y = static_cast<uint32_t>(static_cast<int32_t>(y) >> 4) & 0x87F087F0u;
  const __nv_bfloat162 z = __hmul2(reinterpret_cast<const __nv_bfloat162&>(y), factor);
  return reinterpret_cast<const uint32_t&>(z);
}
constexpr uint32_t kLowPair = 0x1800, kHighPair = 0x3A22;

// Bits of 0x80808080 are set where a code is NaN (0x7F or 0xFF); the other bits mean nothing.
__device__ __forceinline__ uint32_t nan_bits(uint4 x) {
  const auto carry = [](uint32_t w) { return (w & 0x7F7F7F7Fu) + 0x01010101u; };
  return carry(x.x) | carry(x.y) | carry(x.z) | carry(x.w);
}

// One code at a time, exact for NaN codes and every scale. Slow, and not needed for rows a healthy model writes.
__device__ __forceinline__ void store_codes_exact(uint32_t address, uint4 x, uint32_t exponent) {
#pragma unroll 1
  for (int i = 0; i < 16; ++i) {
    const uint32_t word = (i & 8) != 0 ? ((i & 4) != 0 ? x.w : x.z) : ((i & 4) != 0 ? x.y : x.x);
    const uint32_t code = word >> 8 * (i & 3) & 0xFF;
    float value = __uint_as_float((code & 0x80) << 24 | (code & 0x7F) << 20) * 0x1p120f * __uint_as_float(exponent << 23);
    if ((code & 0x7F) == 0x7F) value = __uint_as_float(0x7FC00000);
    const __nv_bfloat16 y = __float2bfloat16_rn(value);
    asm volatile("st.shared.u16 [%0], %1;" ::"r"((address ^ (i & 8) << 1) + 2 * (i & 7)),
                 "h"(reinterpret_cast<const uint16_t&>(y))
                 : "memory");
  }
}

// Sixteen codes with one scale, as two 16-byte chunks at `address` and its swizzle partner.
__device__ __forceinline__ void store_codes(uint32_t address, uint4 x, __nv_bfloat162 factor, bool valid) {
  const uint4 lo = {scaled<kLowPair>(x.x, factor), scaled<kHighPair>(x.x, factor), scaled<kLowPair>(x.y, factor),
                    scaled<kHighPair>(x.y, factor)};
  const uint4 hi = {scaled<kLowPair>(x.z, factor), scaled<kHighPair>(x.z, factor), scaled<kLowPair>(x.w, factor),
                    scaled<kHighPair>(x.w, factor)};
  store_shared_if(valid, address, lo);
  store_shared_if(valid, address ^ 16, hi);
}

// 2^120 times the scale in byte `group` of a word of ue8m0 codes, in both halves; for codes 1 to 134.
__device__ __forceinline__ __nv_bfloat162 scale_factor(uint32_t codes, int group) {
  const uint32_t bits = (__byte_perm(codes, 0, 0x0404 | group << 4 | group << 12) >> 1) + 0x3C003C00u;
  return reinterpret_cast<const __nv_bfloat162&>(bits);
}

// Whether a word of ue8m0 codes has one that `scale_factor` cannot take: 0 or above 134.
__device__ __forceinline__ bool odd_scales(uint32_t codes) {
  return (__vcmpeq4(codes, 0) | __vcmpgtu4(codes, 0x86868686u)) != 0;
}

__device__ __forceinline__ uint4 load16(const void* p) {
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(p));
  return x;
}

__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// One producer warp: rows [8 warp, 8 warp + 8) of every tile; lane l knows the id and scales of row l % 8.
struct Producer {
  const AttendArgs& args;
  int token, count, window_tiles, warp, lane;

  __device__ __forceinline__ const Rows& rows(int tile) const { return tile < window_tiles ? args.window : args.entries; }

  // The id of this lane's key as stored and whether it is a key. Loads only: `row_of` looks at them later.
  __device__ __forceinline__ int2 load_key(int tile) const {
    const int slot = warp * kRowsPerWarp + (lane & 7);
    if (tile < window_tiles) {
      const int key = tile * kTile + slot;
      if (key >= args.window_keys) return {0, 0};
      const int64_t at = static_cast<int64_t>(token) * args.window_keys + key;
      return {__ldg(args.window_ids + at), __ldg(args.window_visible + at)};
    }
    const int key = (tile - window_tiles) * kTile + slot;
    if (key >= count) return {0, 0};
    return {__ldg(args.entry_ids + static_cast<int64_t>(token) * args.entry_keys + key), 1};
  }

  // Row id of a key, -1 if it is none; an id past the pool reads its last row, as in the reference.
  __device__ __forceinline__ int row_of(int tile, int2 key) const {
    return key.y != 0 ? min(max(key.x, 0), rows(tile).rows - 1) : -1;
  }

  __device__ __forceinline__ uint2 load_scale(int tile, int id) const {
    if (id < 0) return {0x7F7F7F7F, 0x7F7F7F7F};
    return __ldg(reinterpret_cast<const uint2*>(rows(tile).scale + static_cast<int64_t>(id) * kScales));
  }

  // Brings this warp's rows into L2: four lines of codes, one of RoPE dims, one of scales.
  __device__ __forceinline__ void prefetch_rows(int tile, int id) const {
    if (id < 0) return;
    const Rows& r = rows(tile);
    prefetch(r.nope + static_cast<int64_t>(id) * kNope + (lane >> 3) * 128);
    if (lane < 8) prefetch(r.rope + static_cast<int64_t>(id) * kRope);
    if (lane >= 24) prefetch(r.scale + static_cast<int64_t>(id) * kScales);
  }

  // Starts the copy of two rows, 2 pair and 2 pair + 1, into a slot. A lane copies what it will convert: 16 codes of
  // group l / 8 and 16 of group 4 + l / 8 (lanes 24-31: none), of row l / 4 % 2 of the two, quarter l % 4.
  __device__ __forceinline__ void copy_codes(uint32_t slot, int tile, int id, int pair) const {
    const int row = __shfl_sync(~0u, id, pair * 2 + (lane >> 2 & 1));
    const uint8_t* p = rows(tile).nope + static_cast<int64_t>(max(row, 0)) * kNope + (lane >> 3) * 64 + (lane & 3) * 16;
    copy_async(slot, p, row >= 0);
    if (lane < 24) copy_async(slot + 512, p + 256, row >= 0);
  }

  // Converts the codes of a slot. A quarter-warp writes eight chunks of two neighbouring rows: with the swizzle, eight
  // different bank groups. Returns `nan_bits` of what it saw.
  __device__ __forceinline__ uint32_t store_pair(uint32_t keys, uint32_t slot, uint2 scale, int pair) const {
    const int sub = pair * 2 + (lane >> 2 & 1), group = lane >> 3;
    const uint32_t low = __shfl_sync(~0u, scale.x, sub), high = __shfl_sync(~0u, scale.y, sub);
    const uint32_t block = keys + group * kBlockBytes + warp * kRowsPerWarp * 128;
    const uint32_t address = block + sub * 128 + (((lane & 3) * 2 ^ sub) << 4);
    const uint4 x = load_shared(slot);
    uint4 y = {0, 0, 0, 0};
    if (lane < 24) y = load_shared(slot + 512);
    store_codes(address, x, scale_factor(low, group), true);
    store_codes(address + 4 * kBlockBytes, y, scale_factor(high, group), lane < 24);
    return nan_bits(x) | nan_bits(y);
  }

  // The same for any codes and scales, from global memory.
  __device__ __forceinline__ void store_pair_exact(uint32_t keys, int tile, int id, uint2 scale, int pair) const {
    const int sub = pair * 2 + (lane >> 2 & 1), group = lane >> 3;
    const int row = __shfl_sync(~0u, id, sub);
    const uint32_t low = __shfl_sync(~0u, scale.x, sub), high = __shfl_sync(~0u, scale.y, sub);
    if (row < 0) return;
    const uint8_t* p = rows(tile).nope + static_cast<int64_t>(row) * kNope + group * 64 + (lane & 3) * 16;
    const uint32_t block = keys + group * kBlockBytes + warp * kRowsPerWarp * 128;
    const uint32_t address = block + sub * 128 + (((lane & 3) * 2 ^ sub) << 4);
#pragma unroll 1
    for (int i = 0; i < (lane < 24 ? 2 : 1); ++i) {
      store_codes_exact(address + i * 4 * kBlockBytes, load16(p + i * 256), (i == 0 ? low : high) >> 8 * group & 0xFF);
    }
  }

  __device__ __forceinline__ void copy_rope(uint32_t keys, int tile, int id) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int sub = i * 4 + (lane >> 3), from = __shfl_sync(~0u, id, sub);
      const uint32_t address = keys + 7 * kBlockBytes + (warp * kRowsPerWarp + sub) * 128 + (((lane & 7) ^ sub) << 4);
      copy_async(address, rows(tile).rope + static_cast<int64_t>(max(from, 0)) * kRope + (lane & 7) * 8, from >= 0);
    }
  }
};

__device__ __forceinline__ void produce(const Producer& p, Shared& s, int first, int last) {
  if (first >= last) return;
  const int2 none = {0, 0};
  int2 key = p.load_key(first), next_key = first + 1 < last ? p.load_key(first + 1) : none;
  int id = p.row_of(first, key);
  const uint32_t slots = shared_address(s.codes[p.warp][0][0][p.lane]);
  p.copy_codes(slots, first, id, 0);
  copy_commit();
  p.copy_codes(slots + 1024, first, id, 1);
  copy_commit();
  uint2 scale = p.load_scale(first, id);
  int next_id = p.row_of(first + 1, next_key);
  p.prefetch_rows(first + 1, next_id);
  for (int tile = first; tile < last; ++tile) {
    const int stage = (tile - first) & 1, phase = (tile - first) >> 1 & 1;
    const uint32_t keys = shared_address(s.keys[stage]);
    const uint2 next_scale = p.load_scale(tile + 1, next_id);
    key = tile + 2 < last ? p.load_key(tile + 2) : none;
    uint32_t odd = odd_scales(scale.x) || odd_scales(scale.y | 0x7F000000u) ? 0x80u : 0u;
    const uint32_t seen = __ballot_sync(~0u, id >= 0);
    barrier_wait(shared_address(&s.empty[stage]), phase ^ 1);
    p.copy_rope(keys, tile, id);  // joins the first group committed below: there before the third pair is
    if (p.lane == 0) s.visible[stage][p.warp] = static_cast<uint8_t>(seen);
#pragma unroll
    for (int pair = 0; pair < kRowsPerWarp / 2; ++pair) {  // two pairs are on their way while one is converted
      const uint32_t slot = slots + (pair & 1) * 1024;
      copy_wait<1>();
      odd |= p.store_pair(keys, slot, scale, pair);
      if (pair < 2) {
        p.copy_codes(slot, tile, id, pair + 2);
      } else {
        p.copy_codes(slot, tile + 1, next_id, pair - 2);
      }
      copy_commit();
    }
    if (__any_sync(~0u, (odd & 0x80808080u) != 0)) {
#pragma unroll 1
      for (int pair = 0; pair < kRowsPerWarp / 2; ++pair) p.store_pair_exact(keys, tile, id, scale, pair);
    }
    fence_for_mma();
    __syncwarp();
    if (p.lane == 0) barrier_arrive(shared_address(&s.full[stage]));
    id = next_id;
    scale = next_scale;
    next_id = p.row_of(tile + 2, key);
    p.prefetch_rows(tile + 2, next_id);
  }
  copy_wait<0>();
}

// ---- consumers ------------------------------------------------------------------------------------------------------
// Accumulator of a 64 x N product: this lane holds, of rows r and r + 8 (r = 16 * warp + lane / 4), columns
// 8 j + 2 (lane % 4) + {0, 1} as d[4 j + {0, 1}] and d[4 j + {2, 3}].

__device__ __forceinline__ void load_queries(const AttendArgs& args, Shared& s, int token, int head, int thread) {
  const uint32_t base = shared_address(s.queries);
#pragma unroll 8
  for (int i = 0; i < kHeads * kDim / 8 / 256; ++i) {
    const int chunk = i * 256 + thread, row = chunk >> 6, column = chunk & 63;
    uint4 x = {0, 0, 0, 0};
    if (head + row < args.heads) {
      x = load16(args.queries + (static_cast<int64_t>(token) * args.heads + head + row) * kDim + column * 8);
    }
    store_shared(base + (column >> 3) * kBlockBytes + row * 128 + (((column & 7) ^ (row & 7)) << 4), x);
  }
  fence_for_mma();
  named_sync(3, 256);
}

__device__ __forceinline__ uint32_t pack(float lo, float hi) {
  const __nv_bfloat162 x = __floats2bfloat162_rn(lo, hi);
  return reinterpret_cast<const uint32_t&>(x);
}

using Sums = float[2][64];  // of 64 rows x 256 columns: two accumulators of 128 columns

__device__ __forceinline__ void shrink(Sums& o, float upper, float lower) {
  if (__all_sync(~0u, upper == 1.f && lower == 1.f)) return;
#pragma unroll
  for (int j = 0; j < 32; ++j) {
    float* x = o[j >> 4] + (j & 15) * 4;
    x[0] *= upper;
    x[1] *= upper;
    x[2] *= lower;
    x[3] *= lower;
  }
}

struct Softmax {
  float top[2] = {-kInf, -kInf};  // largest logit so far of rows r and r + 8, before scaling
  float total[2] = {0, 0};        // this lane's share of the sum of 2^(scale (z - top))
};

// Logits -> weights: z becomes 2^(scale (z - top)) and `keep` the factor of the sums before. `visible` has a bit per key.
__device__ __forceinline__ void update(Softmax& m, float (&z)[32], float (&keep)[2], uint64_t visible, float scale,
                                       int lane) {
  if (visible != ~uint64_t{0}) {
    visible >>= 2 * (lane & 3);
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      if ((visible >> (8 * (i >> 2) + (i & 1)) & 1) == 0) z[i] = -kInf;
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float top = m.top[half];
#pragma unroll
    for (int j = 0; j < 8; ++j) top = fmaxf(top, fmaxf(z[4 * j + 2 * half], z[4 * j + 2 * half + 1]));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    const float base = top == -kInf ? 0.f : top * scale;
    keep[half] = exp2_fast(m.top[half] * scale - base);
    m.top[half] = top;
    float sum = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        float& x = z[4 * j + 2 * half + k];
        x = exp2_fast(x * scale - base);
        sum += x;
      }
    }
    m.total[half] = m.total[half] * keep[half] + sum;
  }
}

// Scales a block's sums by its run's share of the softmax and leaves them in shared memory for `add_runs`. The 256
// threads of both consumer warpgroups call it; `o` holds columns [256 group, 256 group + 256).
__device__ __forceinline__ void share_sums(const AttendArgs& args, Shared& s, const Sums& o, int token, int head,
                                           int rank, int splits, int group, int thread) {
  const int warp = thread >> 5 & 3, lane = thread & 31;
  float* sums = reinterpret_cast<float*>(s.keys);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp * 16 + (lane >> 2) + 8 * half, h = head + row;
    const uint32_t stats = shared_address(&s.stats[row]);
    float top = -kInf, total = 0;
#pragma unroll 1
    for (int c = 0; c < splits; ++c) {  // a running softmax over the runs, in rank order
      const float2 x = load_peer2(peer_address(stats, c));
      const float higher = fmaxf(top, x.x);
      if (higher == -kInf) continue;
      total = total * exp2_fast(top - higher) + x.y * exp2_fast(x.x - higher);
      top = higher;
    }
    const float sink = h < args.heads ? __ldg(args.sink + h) : 0.f;
    const float own = s.stats[row].x;
    const float share = own == -kInf ? 0.f : exp2_fast(own - top) / (total + exp2f(sink * kLog2e - top));
    if (rank == 0 && group == 0 && (lane & 3) == 0 && h < args.heads) {
      args.lse[static_cast<int64_t>(token) * args.heads + h] = top == -kInf ? -kInf : (log2f(total) + top) * kLn2;
    }
    // Columns are swizzled by row in units of eight, so that the eight rows of a warp's store hit different banks.
    float* to = sums + row * kDim + 256 * group + 2 * (lane & 3);
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      const float* x = o[j >> 4] + (j & 15) * 4 + 2 * half;
      *reinterpret_cast<float2*>(to + ((j ^ (row & 7)) << 3)) = make_float2(x[0] * share, x[1] * share);
    }
  }
}

// Four adjacent dims of the output, the first of them `column`: turned back where they are RoPE dims, rounded once.
// Products are rounded before they are added, as in dsv4_jax/ops/numerics.py.
__device__ __forceinline__ void store_out(const AttendArgs& args, int token, int64_t row, int column, float4 x) {
  if (args.cosine != nullptr && column >= kNope) {
    const int at = token * (kRope / 2) + (column - kNope) / 2;
    const float2 c = __ldg(reinterpret_cast<const float2*>(args.cosine + at));
    const float2 s = __ldg(reinterpret_cast<const float2*>(args.sine + at));
    x = {__fadd_rn(__fmul_rn(x.x, c.x), __fmul_rn(x.y, s.x)), __fsub_rn(__fmul_rn(x.y, c.x), __fmul_rn(x.x, s.x)),
         __fadd_rn(__fmul_rn(x.z, c.y), __fmul_rn(x.w, s.y)), __fsub_rn(__fmul_rn(x.w, c.y), __fmul_rn(x.z, s.y))};
  }
  const int64_t first = row * kDim + column;
  if (args.bf16_out != 0) {
    *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(args.out) + first) = {pack(x.x, x.y), pack(x.z, x.w)};
  } else {
    *reinterpret_cast<float4*>(static_cast<float*>(args.out) + first) = x;
  }
}

// Adds the runs of the cluster in rank order and writes this block's part of the output. All threads call it.
__device__ __forceinline__ void add_runs(const AttendArgs& args, Shared& s, int token, int head, int rank, int splits,
                                         int thread) {
  constexpr int kQuads = kHeads * kDim / 4;
  const uint32_t sums = shared_address(s.keys);
  const int end = (rank + 1) * kQuads / splits;
  const int64_t first_row = static_cast<int64_t>(token) * args.heads + head;
#pragma unroll 2
  for (int i = rank * kQuads / splits + thread; i < end; i += kThreads) {
    const int row = i >> 7, column = (i & 127) * 4;
    const uint32_t at = sums + (row * kDim + (column ^ (row & 7) << 3)) * 4;
    float4 sum = load_peer4(peer_address(at, 0));
    for (int c = 1; c < splits; ++c) {
      const float4 x = load_peer4(peer_address(at, c));
      sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
    }
    if (head + row < args.heads) store_out(args, token, first_row + row, column, sum);
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    attend_kernel(const __grid_constant__ AttendArgs args, int splits, int head_blocks) {
  extern __shared__ __align__(1024) uint8_t raw[];
  Shared& s = *reinterpret_cast<Shared*>(raw);
  const int rank = blockIdx.x % splits, unit = blockIdx.x / splits;
  const int head = unit % head_blocks * kHeads, token = unit / head_blocks;
  const int thread = threadIdx.x, group = thread >> 7, lane = thread & 31;
  const int warp = __shfl_sync(~0u, thread >> 5 & 3, 0);
  const int counted = __ldg(args.entry_count + token);

  if (thread == 0) {
    for (int i = 0; i < 2; ++i) {
      barrier_init(shared_address(&s.full[i]), kProducerWarps);
      barrier_init(shared_address(&s.empty[i]), 8);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  const int count = min(max(counted, 0), args.entry_keys);
  const int window_tiles = (args.window_keys + kTile - 1) / kTile;
  const int tiles = window_tiles + (count + kTile - 1) / kTile;
  const int first = rank * tiles / splits, last = (rank + 1) * tiles / splits;

  if (group >= 2) {
    give_registers<64>();
    produce(Producer{args, token, count, window_tiles, (group - 2) * 4 + warp, lane}, s, first, last);
    cluster_sync();
    cluster_sync();
    add_runs(args, s, token, head, rank, splits, thread);
    cluster_meet();
  } else if (group == 0) {
    take_registers<192>();
    load_queries(args, s, token, head, thread);
    Sums o = {};
    Softmax softmax;
    const uint64_t q = k_major(shared_address(s.queries));
    for (int tile = first; tile < last; ++tile) {
      const int stage = (tile - first) & 1, phase = (tile - first) >> 1 & 1;
      const uint32_t keys = shared_address(s.keys[stage]);
      barrier_wait(shared_address(&s.full[stage]), phase);
      const uint64_t visible = *reinterpret_cast<const uint64_t*>(s.visible[stage]);
      float z[32];
      const uint64_t k = k_major(keys);
      mma_fence();
#pragma unroll
      for (int i = 0; i < kDim / 16; ++i) {
        const uint32_t offset = ((i >> 2) * kBlockBytes + (i & 3) * 32) >> 4;
        mma_64x64(z, q + offset, k + offset, i > 0);
      }
      mma_commit();
      mma_wait<0>();
      float keep[2];
      update(softmax, z, keep, visible, args.scale_log2, lane);
      uint32_t p[4][4];
      const int row = warp * 16 + (lane >> 2);
      const uint32_t weights = shared_address(s.weights[stage]) + row * 128 + (lane & 3) * 4;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const uint32_t upper = pack(z[4 * j], z[4 * j + 1]), lower = pack(z[4 * j + 2], z[4 * j + 3]);
        p[j >> 1][(j & 1) * 2] = upper;
        p[j >> 1][(j & 1) * 2 + 1] = lower;
        const uint32_t at = weights + ((j ^ (row & 7)) << 4);
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(upper) : "memory");
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(at + 8 * 128), "r"(lower) : "memory");
      }
      if ((lane & 3) == 0) {
        s.keep[stage][row] = keep[0];
        s.keep[stage][row + 8] = keep[1];
      }
      fence_for_mma();
      named_arrive(1 + stage, 256);
      shrink(o, keep[0], keep[1]);
      const uint64_t v = n_major(keys);
      mma_fence();
#pragma unroll
      for (int i = 0; i < 8; ++i) mma_64x128(o[i & 1], p[i >> 1], v + (((i & 1) * 2 * kBlockBytes + (i >> 1) * 2048) >> 4));
      mma_commit();
      mma_wait<0>();
      if (lane == 0) barrier_arrive(shared_address(&s.empty[stage]));
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = softmax.total[half];
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
      if ((lane & 3) == 0) {
        s.stats[warp * 16 + (lane >> 2) + 8 * half] = make_float2(softmax.top[half] * args.scale_log2, total);
      }
    }
    cluster_sync();  // every block's statistics are there and its tiles are no longer needed
    share_sums(args, s, o, token, head, rank, splits, 0, thread);
    cluster_sync();
    add_runs(args, s, token, head, rank, splits, thread);
    cluster_meet();  // no block leaves while another reads its sums
  } else {
    take_registers<192>();
    load_queries(args, s, token, head, thread);
    Sums o = {};
    for (int tile = first; tile < last; ++tile) {
      const int stage = (tile - first) & 1, phase = (tile - first) >> 1 & 1;
      barrier_wait(shared_address(&s.full[stage]), phase);
      named_sync(1 + stage, 256);
      const int row = warp * 16 + (lane >> 2);
      shrink(o, s.keep[stage][row], s.keep[stage][row + 8]);
      const uint64_t p = k_major(shared_address(s.weights[stage]));
      const uint64_t v = n_major(shared_address(s.keys[stage]) + 4 * kBlockBytes);
      mma_fence();
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        mma_64x128(o[i & 1], p + ((i >> 1) * 32 >> 4), v + (((i & 1) * 2 * kBlockBytes + (i >> 1) * 2048) >> 4));
      }
      mma_commit();
      mma_wait<0>();
      if (lane == 0) barrier_arrive(shared_address(&s.empty[stage]));
    }
    cluster_sync();
    share_sums(args, s, o, token, head, rank, splits, 1, thread);
    cluster_sync();
    add_runs(args, s, token, head, rank, splits, thread);
    cluster_meet();  // no block leaves while another reads its sums
  }
}

}  // namespace dsv4
