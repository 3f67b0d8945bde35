// Products of a few tokens with big matrices (dsv4_jax/ops/linear.py): y[t, n] = sum_k x[t, k] W[n, k], bf16 operands,
// float32 sums. Bound by the reading of W, which is read once.
//
// A cluster of blocks takes a tile of rows of W, each block a part of K: so many rows that x, which every cluster reads
// again, is little beside them. Copying threads keep a ring of stages (64 columns of the tile and of x) full, all the
// shared memory there is; consumer warpgroups multiply (wgmma: 64 tokens are M, rows of W are N). At the end of a tile
// the ring is empty and takes the block's sums, and each block adds its share of the cluster's, in the order of K.
//
// The sum of a token and row depends on them, K and the number of parts alone: neither on the other tokens nor on the
// tile. Stale shared memory stands in for tokens and rows that do not exist; it meets only sums that are not stored.
#pragma once

#include "hopper.cuh"

namespace dsv4 {

constexpr int kLinearSections = 8;
constexpr int kLinearDepth = 64;       // columns of a stage
constexpr int kLinearMaxStages = 16;
constexpr int kLinearMaxSplit = 8;
constexpr int kLinearCopiers = 128;    // threads that copy
constexpr int kLinearRing = 225 * 1024;  // shared memory of the stages
constexpr int kLinearShared = kLinearRing + 1024;  // room to start on a 1 KiB boundary

struct LinearArgs {
  const __nv_bfloat16* x;           // [tokens, groups * depth]
  const __nv_bfloat16* weights;     // [rows, depth]
  void* out[kLinearSections];       // [tokens, rows of the section] each
  int end[kLinearSections];         // row after the section's last; multiples of 8
  int sections, tokens, rows, depth, groups;
  int rounded;                      // results are bf16, not float32
  // The plan (linear.cu).
  int split;                        // blocks of a cluster, parts of K
  int tile_rows, group_tiles;       // rows of a tile, a multiple of 8; tiles of a group's rows
  int stages, stream;               // stages of the ring; whether to fetch ahead into L2
};

// Where the results of a row are: column `column` of [tokens, width].
struct LinearRow {
  void* out;
  int column, width;
};
__device__ __forceinline__ LinearRow linear_row(const LinearArgs& args, int row) {
  int begin = 0;
  LinearRow found = {nullptr, 0, 0};
#pragma unroll
  for (int s = 0; s < kLinearSections; ++s) {
    if (s < args.sections) {
      if (row >= begin && row < args.end[s]) found = {args.out[s], row - begin, args.end[s] - begin};
      begin = args.end[s];
    }
  }
  return found;
}

// Stores the sums of consecutive rows, two or four.
__device__ __forceinline__ void linear_store(const LinearArgs& args, const LinearRow& to, int token, float2 sum) {
  const int64_t i = static_cast<int64_t>(token) * to.width + to.column;
  if (args.rounded) {
    *reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(to.out) + i) = __float22bfloat162_rn(sum);
  } else {
    *reinterpret_cast<float2*>(static_cast<float*>(to.out) + i) = sum;
  }
}
__device__ __forceinline__ void linear_store(const LinearArgs& args, const LinearRow& to, int token, float4 sum) {
  const int64_t i = static_cast<int64_t>(token) * to.width + to.column;
  if (args.rounded) {
    const __nv_bfloat162 pairs[2] = {__float22bfloat162_rn(make_float2(sum.x, sum.y)),
                                     __float22bfloat162_rn(make_float2(sum.z, sum.w))};
    *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(to.out) + i) =
        make_uint2(reinterpret_cast<const uint32_t&>(pairs[0]), reinterpret_cast<const uint32_t&>(pairs[1]));
  } else {
    *reinterpret_cast<float4*>(static_cast<float*>(to.out) + i) = sum;
  }
}

// Partial sums in shared memory: distance of two tokens, so that four tokens' pairs of rows fall in different banks.
__host__ __device__ constexpr int linear_pitch(int tile_rows) { return (tile_rows + 31) / 32 * 32 + 8; }

// kBlocks * 64 tokens; kHalves * kN rows at most, a warpgroup for each 64 tokens of each half. (With four consumer
// warpgroups a thread has 96 registers, and kN = 160 does not assemble.)
template <int kBlocks, int kHalves, int kN>
struct LinearShape {
  static constexpr int kConsumers = kBlocks * kHalves;
  static constexpr int kThreads = kConsumers * 128 + kLinearCopiers;
  static constexpr int kMaxRows = kHalves * kN;
};

__device__ __forceinline__ void linear_mma(float (&d)[32], uint64_t a, uint64_t b, int accumulate) {
  mma_64x64(d, a, b, accumulate);
}
__device__ __forceinline__ void linear_mma(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
  mma_64x128(d, a, b, accumulate);
}
__device__ __forceinline__ void linear_mma(float (&d)[80], uint64_t a, uint64_t b, int accumulate) {
  mma_64x160(d, a, b, accumulate);
}

template <int kBlocks, int kHalves, int kN>
__global__ void __launch_bounds__(LinearShape<kBlocks, kHalves, kN>::kThreads, 1)
    linear_kernel(const __grid_constant__ LinearArgs args) {
  using Shape = LinearShape<kBlocks, kHalves, kN>;
  constexpr uint32_t kTokenBytes = kBlocks * kBlockBytes;
  extern __shared__ uint8_t unaligned[];
  __shared__ alignas(8) uint64_t barriers[2][kLinearMaxStages];
  const uint32_t ring = (shared_address(unaligned) + 1023) & ~1023u;
  const uint32_t full = shared_address(barriers[0]), empty = shared_address(barriers[1]);
  const uint32_t row_bytes = args.tile_rows * 128, tokens_at = ring + args.stages * row_bytes;

  const int thread = threadIdx.x, lane = thread & 31;
  const int group = __shfl_sync(~0u, thread >> 7, 0);  // warpgroup
  const int rank = blockIdx.x % args.split, clusters = gridDim.x / args.split;
  const int part = args.depth / args.split, steps = part / kLinearDepth;
  const int group_rows = args.rows / args.groups, tiles = args.groups * args.group_tiles;
  const int half_rows = kHalves == 1 ? args.tile_rows : (args.tile_rows / 8 + 1) / 2 * 8;

  // A block that has all of K stores its sums from registers, while the next tile is loaded (given the registers).
  const bool direct = kBlocks == 1 && args.split == 1;

  if (thread == 0) {
    for (int i = 0; i < args.stages; ++i) {
      barrier_init(full + 8 * i, kLinearCopiers);
      barrier_init(empty + 8 * i, Shape::kConsumers * 4);
    }
  }
  __syncthreads();

  int stage = 0;
  uint32_t parity = 0;
  const auto advance = [&] {
    if (++stage == args.stages) {
      stage = 0;
      parity ^= 1;
    }
  };
  for (int tile = blockIdx.x / args.split; tile < tiles; tile += clusters) {
    const int of = tile / args.group_tiles, first = (tile - of * args.group_tiles) * args.tile_rows;
    const int rows = min(args.tile_rows, group_rows - first), row0 = of * group_rows + first;
    if (group == Shape::kConsumers) {
      // A thread copies one 16-byte chunk of every 16th row; its place in the swizzle is the same in all of them.
      constexpr int kStep = kLinearCopiers / 8, kUnroll = kBlocks == 1 ? 4 : 1;  // registers
      const int copier = thread - Shape::kConsumers * 128, row = copier >> 3, chunk = copier & 7;
      const uint32_t place = row * 128 + ((chunk ^ (row & 7)) << 4);
      const int64_t column = static_cast<int64_t>(rank) * part + chunk * 8;
      const int64_t depth = args.depth, width = depth * args.groups, w_step = kStep * depth, x_step = kStep * width;
      const __nv_bfloat16* w = args.weights + (row0 + row) * depth + column;
      const __nv_bfloat16* x = args.x + row * width + of * depth + column;
      for (int k = 0; k < steps; ++k) {
        barrier_wait(empty + 8 * stage, parity ^ 1);
        const uint32_t to_w = ring + stage * row_bytes + place, to_x = tokens_at + stage * kTokenBytes + place;
        const __nv_bfloat16* from = w;
        if (args.stream) {
#pragma unroll kUnroll
          for (int i = row; i < rows; i += kStep, from += w_step) copy_async_stream(to_w + (i - row) * 128, from);
        } else {
#pragma unroll kUnroll
          for (int i = row; i < rows; i += kStep, from += w_step) copy_async(to_w + (i - row) * 128, from, true);
        }
        from = x;
#pragma unroll kUnroll
        for (int i = row; i < args.tokens; i += kStep, from += x_step) copy_async(to_x + (i - row) * 128, from, true);
        copy_arrive(full + 8 * stage);
        w += kLinearDepth;
        x += kLinearDepth;
        advance();
      }
    } else {
      const int block = group / kHalves, half = group % kHalves;
      float sum[kN / 2];
      for (int k = 0; k < steps; ++k) {
        barrier_wait(full + 8 * stage, parity);
        fence_for_mma();
        const uint64_t a = k_major(tokens_at + stage * kTokenBytes + block * kBlockBytes);
        const uint64_t b = k_major(ring + stage * row_bytes + half * half_rows * 128);
        mma_fence();
#pragma unroll
        for (int i = 0; i < kLinearDepth / 16; ++i) linear_mma(sum, a + (i * 32 >> 4), b + (i * 32 >> 4), k > 0 || i > 0);
        mma_commit();
        mma_wait<0>();
        if (lane == 0) barrier_arrive(empty + 8 * stage);
        advance();
      }
      // sum[4 j + 2 i + {0, 1}]: token + 8 i, rows 8 j + 2 (lane & 3) + {0, 1} of the half.
      const int token = block * 64 + (thread >> 5 & 3) * 16 + (lane >> 2), column = 2 * (lane & 3);
      const int mine = min(rows - half * half_rows, half_rows);
      if (direct) {
#pragma unroll
        for (int j = 0; j < kN / 8; ++j) {
          if (8 * j < mine) {
            LinearRow to = linear_row(args, row0 + half * half_rows + 8 * j);
            to.column += column;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              if (token + 8 * i < args.tokens) {
                linear_store(args, to, token + 8 * i, make_float2(sum[4 * j + 2 * i], sum[4 * j + 2 * i + 1]));
              }
            }
          }
        }
      } else {
        named_sync(1, Shape::kConsumers * 128);  // every stage has been multiplied: the ring is free
        const int pitch = linear_pitch(args.tile_rows);
        const uint32_t to = ring + 4 * (token * pitch + half * half_rows + column);
#pragma unroll
        for (int j = 0; j < kN / 8; ++j) {
          if (8 * j < mine) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              if (token + 8 * i < args.tokens) {
                store_shared2(to + 4 * (8 * i * pitch + 8 * j), sum[4 * j + 2 * i], sum[4 * j + 2 * i + 1]);
              }
            }
          }
        }
      }
    }
    if (!direct) {
      __syncwarp();
      cluster_sync();
      constexpr int kBatch = kBlocks == 1 ? kLinearMaxSplit : 1;  // sums asked for at once (registers)
      const int pitch = linear_pitch(args.tile_rows), quads = rows / 4;
      for (int i = rank * Shape::kThreads + thread; i < args.tokens * quads; i += args.split * Shape::kThreads) {
        const int token = i / quads, row = 4 * (i - token * quads);
        const uint32_t at = ring + 4 * (token * pitch + row);
        float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
        for (int p = 0; p < args.split; p += kBatch) {
          float4 more[kBatch];
#pragma unroll
          for (int q = 0; q < kBatch; ++q) {
            if (p + q < args.split) more[q] = load_peer4(peer_address(at, p + q));
          }
#pragma unroll
          for (int q = 0; q < kBatch; ++q) {
            if (p + q < args.split) {
              sum.x += more[q].x;
              sum.y += more[q].y;
              sum.z += more[q].z;
              sum.w += more[q].w;
            }
          }
        }
        linear_store(args, linear_row(args, row0 + row), token, sum);
      }
      __syncwarp();
      cluster_sync();  // nobody reads this block's sums any more
    }
  }
  if (group == Shape::kConsumers) copy_wait_all();
}

}  // namespace dsv4
