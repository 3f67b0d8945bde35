// Sparse MQA decode over fp8 rows: one softmax over window and selected entries, with a sink (dsv4_jax/ops/attend.py).
//
// A cluster of `splits` blocks serves one token and 64 heads. The keys are cut into tiles of 64 (the window's, then the
// counted entries'), the tiles into `splits` runs of (almost) equal length: the cut depends on the token alone, so its
// bits do not depend on the batch. Within a block four warpgroups work on a run:
//
//   warpgroups 2, 3   gather rows, turn e4m3 codes into bf16 and store them swizzled, up to two tiles ahead
//   warpgroup 0       S = Q K^T (64 heads x 64 keys), online softmax, P; then O[:, 0:256] += P K
//   warpgroup 1       O[:, 256:512] += P K with the same P, through shared memory
//
// K and V are the same rows: one tile in shared memory serves both products. The runs are merged in rank order through
// distributed shared memory, which halves cross (2e-4 of relative error; it moves about 16 bytes a clock), and the sink
// enters there. benchmarks/RESULTS.md says what bounds it and what was slower.
#pragma once

#include <cuda_fp16.h>

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
constexpr int kWeightsThere = 1, kWeightsFree = 2, kQueriesThere = 3;  // hardware barriers of the consumers
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
  alignas(1024) uint8_t queries[8 * kBlockBytes];  // after the last tile: the block's __half [64][512] sums
  alignas(1024) uint8_t keys[2][8 * kBlockBytes];
  alignas(1024) uint8_t weights[kBlockBytes];  // P, bf16
  uint8_t codes[kProducerWarps][3][2][32][16];    // rows on their way: [warp][slot][groups 0-3 or 4-6][lane]
  float keep[kHeads];                             // factor by which a tile shrinks the sums before it
  float2 stats[kHeads];                           // (top, total) of this block's run
  float sink[kHeads];
  uint8_t unit[kHeads][2];                        // of the sums: exponent of what 256 columns of a row are counted in
  alignas(8) uint8_t visible[2][kProducerWarps];  // eight keys a byte
  uint64_t full[2], empty[2];
  int rank, token, head;  // of this block: for the merge, so that they take no register before
};
static_assert(sizeof(Shared) <= 227 * 1024, "more shared memory than a block can have");

// ---- producers ------------------------------------------------------------------------------------------------------

// Two e4m3 codes (in the low half, or the high one) times their scale as bf16: by way of half and float, conversions that are
// exact and keep NaN.
template <bool kHigh>
__device__ __forceinline__ uint32_t decode(uint32_t codes, __nv_bfloat162 scale) {
  uint32_t halves;
  if constexpr (kHigh) {
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, high;}" : "=r"(halves) : "r"(codes));
  } else {
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, low;}" : "=r"(halves) : "r"(codes));
  }
  const float2 x = __half22float2(reinterpret_cast<const __half2&>(halves));
  const __nv_bfloat162 y = __hmul2(__floats2bfloat162_rn(x.x, x.y), scale);
  return reinterpret_cast<const uint32_t&>(y);
}

// Sixteen codes with one scale, as two 16-byte chunks at `address` and its swizzle partner.
__device__ __forceinline__ void store_codes(uint32_t address, uint4 x, __nv_bfloat162 scale) {
  store_shared(address, {decode<false>(x.x, scale), decode<true>(x.x, scale), decode<false>(x.y, scale), decode<true>(x.y, scale)});
  store_shared(address ^ 16, {decode<false>(x.z, scale), decode<true>(x.z, scale), decode<false>(x.w, scale), decode<true>(x.w, scale)});
}

// The scale 2^(code - 127) in byte `group` of a word of ue8m0 codes, in both halves.
__device__ __forceinline__ __nv_bfloat162 scale_of(uint32_t codes, int group) {
  const uint32_t bits = __byte_perm(codes, 0, 0x0404 | group << 4 | group << 12) >> 1;
  return reinterpret_cast<const __nv_bfloat162&>(bits);
}

// One producer warp: rows [8 warp, 8 warp + 8) of every tile; lane l knows the id and scales of row l % 8.
struct Producer {
  const AttendArgs& args;
  int token, count, window_tiles, warp, lane;

  __device__ __forceinline__ const Rows& rows(int tile) const { return tile < window_tiles ? args.window : args.entries; }

  __device__ __forceinline__ int slot() const { return warp * kRowsPerWarp + (lane & 7); }

  // The id of this lane's key as stored and whether it is seen. Loads only, and without a look at the count: `row_of`
  // judges them later.
  __device__ __forceinline__ int2 load_key(int tile) const {
    if (tile < window_tiles) {
      const int key = tile * kTile + slot();
      if (key >= args.window_keys) return {0, 0};
      const int64_t at = static_cast<int64_t>(token) * args.window_keys + key;
      return {__ldg(args.window_ids + at), __ldg(args.window_visible + at)};
    }
    const int key = (tile - window_tiles) * kTile + slot();
    if (key >= args.entry_keys) return {0, 0};
    return {__ldg(args.entry_ids + static_cast<int64_t>(token) * args.entry_keys + key), 1};
  }

  // Row id of a key, -1 if it is none; an id past the pool reads its last row, as in the reference.
  __device__ __forceinline__ int row_of(int tile, int2 key) const {
    const bool counted = (tile - window_tiles) * kTile + slot() < count;
    return key.y != 0 && counted ? min(max(key.x, 0), rows(tile).rows - 1) : -1;
  }

  __device__ __forceinline__ uint2 load_scale(int tile, int id) const {
    if (id < 0) return {0x7F7F7F7F, 0x7F7F7F7F};
    return __ldg(reinterpret_cast<const uint2*>(rows(tile).scale + static_cast<int64_t>(id) * kScales));
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
  // different bank groups.
  __device__ __forceinline__ void store_pair(uint32_t keys, uint32_t slot, uint2 scale, int pair) const {
    const int sub = pair * 2 + (lane >> 2 & 1), group = lane >> 3;
    const uint32_t low = __shfl_sync(~0u, scale.x, sub), high = __shfl_sync(~0u, scale.y, sub);
    const uint32_t block = keys + group * kBlockBytes + warp * kRowsPerWarp * 128;
    const uint32_t address = block + sub * 128 + (((lane & 3) * 2 ^ sub) << 4);
    const uint4 x = load_shared(slot);
    store_codes(address, x, scale_of(low, group));
    if (lane < 24) store_codes(address + 4 * kBlockBytes, load_shared(slot + 512), scale_of(high, group));
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

// `key` and `next_key` are those of the tiles `guess` and the one after: loaded before the run was known.
__device__ __forceinline__ void produce(const Producer& p, Shared& s, int first, int last, int guess, int2 key, int2 next_key) {
  if (first >= last) return;
  const int2 none = {0, 0};
  if (first != guess) key = p.load_key(first), next_key = p.load_key(first + 1);
  if (first + 1 == last) next_key = none;
  int id = p.row_of(first, key);
  uint2 scale = p.load_scale(first, id);
  const uint32_t slots = shared_address(s.codes[p.warp][0][0][p.lane]);
  p.copy_codes(slots, first, id, 0);
  copy_commit();
  p.copy_codes(slots + 1024, first, id, 1);
  copy_commit();
  p.copy_codes(slots + 2048, first, id, 2);
  copy_commit();
  uint32_t slot = slots;
  int next_id = p.row_of(first + 1, next_key);
  for (int tile = first; tile < last; ++tile) {
    const int stage = (tile - first) & 1, phase = (tile - first) >> 1 & 1;
    const uint32_t keys = shared_address(s.keys[stage]);
    const uint2 next_scale = p.load_scale(tile + 1, next_id);
    key = tile + 2 < last ? p.load_key(tile + 2) : none;
    const uint32_t seen = __ballot_sync(~0u, id >= 0);
    barrier_wait(shared_address(&s.empty[stage]), phase ^ 1);
    p.copy_rope(keys, tile, id);  // joins the first group committed below: there before the last pair is converted
    if (p.lane == 0) s.visible[stage][p.warp] = static_cast<uint8_t>(seen);
#pragma unroll
    for (int pair = 0; pair < kRowsPerWarp / 2; ++pair) {  // three pairs are on their way while one is converted
      copy_wait<2>();
      p.store_pair(keys, slot, scale, pair);
      if (pair == 0) {
        p.copy_codes(slot, tile, id, 3);
      } else {
        p.copy_codes(slot, tile + 1, next_id, pair - 1);
      }
      copy_commit();
      slot = slot == slots + 2048 ? slots : slot + 1024;
    }
    fence_for_mma();
    __syncwarp();
    if (p.lane == 0) barrier_arrive(shared_address(&s.full[stage]));
    id = next_id;
    scale = next_scale;
    next_id = p.row_of(tile + 2, key);
  }
  copy_wait<0>();
}

// ---- consumers ------------------------------------------------------------------------------------------------------
// Accumulator of a 64 x N product: this lane holds, of rows r and r + 8 (r = 16 * warp + lane / 4), columns
// 8 j + 2 (lane % 4) + {0, 1} as d[4 j + {0, 1}] and d[4 j + {2, 3}].

__device__ __forceinline__ void load_queries(const AttendArgs& args, Shared& s, int token, int head, int thread) {
  const uint32_t base = shared_address(s.queries);
#pragma unroll
  for (int i = 0; i < kHeads * kDim / 8 / 256; ++i) {
    const int chunk = i * 256 + thread, row = chunk >> 6, column = chunk & 63;
    const bool exists = head + row < args.heads;
    const __nv_bfloat16* from = args.queries + (static_cast<int64_t>(token) * args.heads + (exists ? head + row : 0)) * kDim;
    copy_async(base + (column >> 3) * kBlockBytes + row * 128 + (((column & 7) ^ (row & 7)) << 4), from + column * 8, exists);
  }
  copy_commit();
  copy_wait<0>();
  fence_for_mma();
  named_sync(kQueriesThere, 256);
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

// Where the operand of the i-th of eight products of P K starts within its four blocks: rows 16 (i / 2), columns 128 (i % 2).
__device__ __forceinline__ constexpr uint32_t value_offset(int i) { return ((i & 1) * 2 * kBlockBytes + (i >> 1) * 2048) >> 4; }

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

// Leaves a run's sums in shared memory for `add_runs`, as halves: the 256 columns of a row in units of their own, such that
// the largest lies in [2^14, 2^15). Both consumer warpgroups call it; `o` holds columns [256 group, 256 group + 256).
__device__ __forceinline__ void store_sums(Shared& s, const Sums& o, int group, int thread) {
  const int warp = thread >> 5 & 3, lane = thread & 31, upper = warp * 16 + (lane >> 2);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = upper + 8 * half;
    float most = 0;
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      const float* x = o[j >> 4] + (j & 15) * 4 + 2 * half;
      most = fmaxf(most, fmaxf(fabsf(x[0]), fabsf(x[1])));
    }
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    const uint32_t exponent = min(268 - (__float_as_uint(most) >> 23), 253u);  // of 2^14 / most, biased; both normal
    const float factor = __uint_as_float(exponent << 23);
    if ((lane & 3) == 0) s.unit[row][group] = static_cast<uint8_t>(254 - exponent);
    // Chunks of eight columns are swizzled by row, so that the eight rows of a warp's store hit different banks.
    const uint32_t to = shared_address(s.queries) + row * (kDim * 2) + group * 512 + (lane & 3) * 4;
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      const float* x = o[j >> 4] + (j & 15) * 4 + 2 * half;
      const __half2 y = __floats2half2_rn(x[0] * factor, x[1] * factor);
      store_shared(to + (((j & 7) ^ (row & 7)) << 4) + (j >> 3) * 128, reinterpret_cast<const uint32_t&>(y));
    }
  }
}

// Eight adjacent dims of the output, the first of them `column`: turned back where they are RoPE dims, rounded once.
// Products are rounded before they are added, as in dsv4_jax/ops/numerics.py.
__device__ __forceinline__ void store_out(const AttendArgs& args, int token, int64_t row, int column, float (&x)[8]) {
  if (args.cosine != nullptr && column >= kNope) {
    const int at = token * (kRope / 2) + (column - kNope) / 2;
    const float4 c = __ldg(reinterpret_cast<const float4*>(args.cosine + at));
    const float4 s = __ldg(reinterpret_cast<const float4*>(args.sine + at));
    const float cosine[4] = {c.x, c.y, c.z, c.w}, sine[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float even = x[2 * i], odd = x[2 * i + 1];
      x[2 * i] = __fadd_rn(__fmul_rn(even, cosine[i]), __fmul_rn(odd, sine[i]));
      x[2 * i + 1] = __fsub_rn(__fmul_rn(odd, cosine[i]), __fmul_rn(even, sine[i]));
    }
  }
  const int64_t first = row * kDim + column;
  if (args.bf16_out != 0) {
    *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(args.out) + first) = {pack(x[0], x[1]), pack(x[2], x[3]),
                                                                                pack(x[4], x[5]), pack(x[6], x[7])};
  } else {
    float4* out = reinterpret_cast<float4*>(static_cast<float*>(args.out) + first);
    out[0] = make_float4(x[0], x[1], x[2], x[3]);
    out[1] = make_float4(x[4], x[5], x[6], x[7]);
  }
}

// Merges the runs of the cluster in rank order, with the sink, and writes this block's columns of the output. All threads
// call it, eight a row.
__device__ __forceinline__ void add_runs(const AttendArgs& args, Shared& s, int splits, int thread) {
  constexpr int kChunks = kDim / 8;
  const int rank = s.rank, token = s.token;
  const int row = thread >> 3, sub = thread & 7, h = s.head + row;
  const int begin = rank * kChunks / splits + sub, end = (rank + 1) * kChunks / splits;
  const uint32_t sums = shared_address(s.queries) + row * (kDim * 2);
  // Lane `sub` weighs run `sub`: columns below 256 by `low`, the others by `high`.
  float2 run = {-kInf, 0};
  uint32_t units = 0;
  if (sub < splits) {
    run = load_peer2(peer_address(shared_address(&s.stats[row]), sub));
    units = load_peer_half(peer_address(shared_address(s.unit[row]), sub));
  }
  float top = run.x;
#pragma unroll
  for (int d = 1; d < 8; d *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
  const float part = run.x == -kInf ? 0.f : exp2_fast(run.x - top);
  float total = part * run.y;
#pragma unroll
  for (int d = 1; d < 8; d *= 2) total += __shfl_xor_sync(~0u, total, d);
  const float share = __fdividef(part, total + exp2_fast(s.sink[row] * kLog2e - top));
  const float low = share * __uint_as_float((units & 0xFF) << 23), high = share * __uint_as_float((units >> 8) << 23);
  if (rank == 0 && sub == 0 && h < args.heads) {
    args.lse[static_cast<int64_t>(token) * args.heads + h] = top == -kInf ? -kInf : (__log2f(total) + top) * kLn2;
  }
#pragma unroll 1
  for (int chunk = begin; __any_sync(~0u, chunk < end); chunk += 2 * 8) {
    float x[2][8] = {};
#pragma unroll 2
    for (int c = 0; c < splits; ++c) {
      const float below = __shfl_sync(~0u, low, (thread & 24) | c), above = __shfl_sync(~0u, high, (thread & 24) | c);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = min(chunk + 8 * i, kChunks - 1);
        const uint32_t address = sums + ((at ^ (row & 7)) << 4);
        const uint4 halves = load_peer(peer_address(address, c));
        const uint32_t words[4] = {halves.x, halves.y, halves.z, halves.w};
        const float weight = at < kChunks / 2 ? below : above;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const float2 pair = __half22float2(reinterpret_cast<const __half2&>(words[k]));
          x[i][2 * k] = fmaf(weight, pair.x, x[i][2 * k]);
          x[i][2 * k + 1] = fmaf(weight, pair.y, x[i][2 * k + 1]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = chunk + 8 * i;
      if (at < end && h < args.heads) store_out(args, token, static_cast<int64_t>(token) * args.heads + h, at * 8, x[i]);
    }
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
  const int window_tiles = (args.window_keys + kTile - 1) / kTile;
  const auto first_tile = [=](int run, int keys) { return run * (window_tiles + (keys + kTile - 1) / kTile) / splits; };

  const auto count = [&] { return min(max(__ldg(args.entry_count + token), 0), args.entry_keys); };

  // What the first rows wait for comes first: the count, and their ids, where they are if all entries count.
  Producer p{args, token, 0, window_tiles, (group & 1) * 4 + warp, lane};
  const int guess = first_tile(rank, args.entry_keys);
  int2 key = {0, 0}, next_key = {0, 0};
  if (group >= 2) key = p.load_key(guess), next_key = p.load_key(guess + 1), p.count = count();
  if (thread < kHeads) s.sink[thread] = head + thread < args.heads ? __ldg(args.sink + head + thread) : 0.f;
  if (thread == 0) {
    s.rank = rank, s.token = token, s.head = head;
    for (int i = 0; i < 2; ++i) {
      barrier_init(shared_address(&s.full[i]), kProducerWarps);
      barrier_init(shared_address(&s.empty[i]), 8);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  if (group >= 2) {
    give_registers<64>();
    produce(p, s, first_tile(rank, p.count), first_tile(rank + 1, p.count), guess, key, next_key);
    cluster_sync();
    add_runs(args, s, splits, thread);
    cluster_meet();  // no block leaves while another reads its sums
    return;
  }
  take_registers<192>();
  load_queries(args, s, token, head, thread);
  const int keys = count(), first = first_tile(rank, keys), last = first_tile(rank + 1, keys);
  const int row = warp * 16 + (lane >> 2);
  Sums o = {};
  if (group == 0) {
    Softmax softmax;
    float z[32];
    for (int tile = first; tile < last; ++tile) {
      const int stage = (tile - first) & 1, phase = (tile - first) >> 1 & 1;
      barrier_wait(shared_address(&s.full[stage]), phase);
      const uint64_t q = k_major(shared_address(s.queries)), k = k_major(shared_address(s.keys[stage]));
      mma_fence();
#pragma unroll
      for (int i = 0; i < kDim / 16; ++i) {
        const uint32_t offset = ((i >> 2) * kBlockBytes + (i & 3) * 32) >> 4;
        mma_64x64(z, q + offset, k + offset, i > 0);
      }
      mma_commit();
      mma_wait<0>();
      float keep[2];
      update(softmax, z, keep, *reinterpret_cast<const uint64_t*>(s.visible[stage]), args.scale_log2, lane);
      if (tile > first) named_sync(kWeightsFree, 256);
      const uint32_t weights = shared_address(s.weights) + row * 128 + (lane & 3) * 4;
      uint32_t p[4][4];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const uint32_t upper = pack(z[4 * j], z[4 * j + 1]), lower = pack(z[4 * j + 2], z[4 * j + 3]);
        p[j >> 1][(j & 1) * 2] = upper;
        p[j >> 1][(j & 1) * 2 + 1] = lower;
        const uint32_t at = weights + ((j ^ (row & 7)) << 4);
        store_shared(at, upper);
        store_shared(at + 8 * 128, lower);
      }
      if ((lane & 3) == 0) {
        s.keep[row] = keep[0];
        s.keep[row + 8] = keep[1];
      }
      fence_for_mma();
      named_arrive(kWeightsThere, 256);
      shrink(o, keep[0], keep[1]);
      const uint64_t v = n_major(shared_address(s.keys[stage]));
      mma_fence();
#pragma unroll
      for (int i = 0; i < 8; ++i) mma_64x128(o[i & 1], p[i >> 1], v + value_offset(i));
      mma_commit();
      mma_wait<0>();
      if (lane == 0) barrier_arrive(shared_address(&s.empty[stage]));
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = softmax.total[half];
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
      if ((lane & 3) == 0) s.stats[row + 8 * half] = make_float2(softmax.top[half] * args.scale_log2, total);
    }
  } else {
    for (int tile = first; tile < last; ++tile) {
      const int stage = (tile - first) & 1, phase = (tile - first) >> 1 & 1;
      barrier_wait(shared_address(&s.full[stage]), phase);
      named_sync(kWeightsThere, 256);
      shrink(o, s.keep[row], s.keep[row + 8]);
      const uint64_t p = k_major(shared_address(s.weights));
      const uint64_t v = n_major(shared_address(s.keys[stage]) + 4 * kBlockBytes);
      mma_fence();
#pragma unroll
      for (int i = 0; i < 8; ++i) mma_64x128(o[i & 1], p + ((i >> 1) * 32 >> 4), v + value_offset(i));
      mma_commit();
      mma_wait<0>();
      if (tile + 1 < last) named_arrive(kWeightsFree, 256);
      if (lane == 0) barrier_arrive(shared_address(&s.empty[stage]));
    }
  }
  // Both warpgroups are past the last product with the queries: their place takes the sums.
  store_sums(s, o, group, thread);
  cluster_sync();
  add_runs(args, s, splits, thread);
  cluster_meet();  // no block leaves while another reads its sums
}

}  // namespace dsv4
