// The grouped products of the experts: FP4 weights x bf16 rows, weights streamed from memory once.
//
// A block takes an item: a run of an expert's rows (tokens) and `kGroups` tiles of 64 of the weights' rows, one to each of
// its warpgroups. One warp copies weights and rows to shared memory, up to `kStages` runs of 128 or 256 columns of K ahead, over the
// end of an item too; the others decode their weights in registers and multiply (moe_weights.cuh). M are the weights'
// rows, N the tokens; an expert of more has several items.
//
// Every number is one chain of products along K from first to last, whatever N, the block's shape or the other rows are:
// its bits depend on its token and its expert alone.
#pragma once

#include <type_traits>

#include "moe_lists.cuh"
#include "moe_mma.cuh"
#include "moe_weights.cuh"

namespace dsv4 {

template <int kGroupsOf, int kRowsOf, int kTilesOf, int kStagesOf, int kBlocksOf>
struct MoeShape {
  static constexpr int kGroups = kGroupsOf;    // warpgroups, each a tile of weights
  static constexpr int kRows = kRowsOf;      // tokens of an item, at most: N
  static constexpr int kTiles = kTilesOf;      // of 128 columns, a stage
  static constexpr int kStages = kStagesOf;
  static constexpr int kBlocks = kBlocksOf;    // a multiprocessor
  static constexpr int kThreads = 128 * kGroups + 32;
  static constexpr int kRowBytes = kRows / kGroupRows * 2 * kTiles * kAtomBytes;  // of a stage
  static constexpr int kWeightBytes = kGroups * kTiles * kTileBytes;
  static constexpr int kSharedBytes = 1024 + kStages * (kRowBytes + kWeightBytes);
};

struct MoeStage {
  alignas(8) uint64_t full, empty;
};

// What differs between the two products.
struct MoeProduct {
  const uint8_t* weights;
  const uint8_t* rows;
  int steps;      // stages along K
  int row_tiles;  // items of a run of rows
};

__device__ __forceinline__ uint64_t streamed_once() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void copy_bulk(uint32_t to, const uint8_t* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
               "r"(bytes), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void copy_bulk(uint32_t to, const uint8_t* from, uint32_t bytes, uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void barrier_expect(uint32_t bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

// Addresses in shared memory.
template <typename Shape>
struct MoeShared {
  uint32_t rows, weights, stages;
  __device__ __forceinline__ uint32_t full(int s) const { return stages + 16 * s; }
  __device__ __forceinline__ uint32_t empty(int s) const { return stages + 16 * s + 8; }
  __device__ __forceinline__ uint32_t row_stage(int s) const { return rows + s * Shape::kRowBytes; }
  __device__ __forceinline__ uint32_t weight_stage(int s) const { return weights + s * Shape::kWeightBytes; }
};

// A stage of the ring and how often it came round.
template <int kStages>
struct Turn {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

// One thread: all copies of a block, in order. Weights of the first stages are asked for before what the previous kernel
// writes is there.
template <typename Shape>
__device__ __forceinline__ void copy_items(const MoeShared<Shape>& shared, RowTile* announced, const MoeProduct& product,
                                           const RowTile* tiles, int items) {
  const uint64_t policy = streamed_once();
  constexpr uint32_t kRun = Shape::kTiles * kTileBytes, kRow = 2 * Shape::kTiles * 128, kGroup = kGroupRows * kRow;
  const size_t stream = static_cast<size_t>(product.steps) * kRun;  // 64 of the weights' rows
  Turn<Shape::kStages> turn;
  bool first = true;
  RowTile tile, next = {};
  if (blockIdx.x < items) next = tiles[blockIdx.x / product.row_tiles];
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    tile = next;
    if (item + gridDim.x < items) next = tiles[(item + gridDim.x) / product.row_tiles];
    const int tile_row = (tile.expert * product.row_tiles + item % product.row_tiles) * Shape::kGroups;
    const uint8_t* weights = product.weights + tile_row * stream;
    const uint8_t* rows = product.rows + static_cast<size_t>(tile.group) * product.steps * kGroup;
    const auto start = [&](int stage, int step) {
      announced[stage] = tile;
      barrier_expect(shared.full(stage), Shape::kWeightBytes + tile.rows * kRow);
#pragma unroll
      for (int g = 0; g < Shape::kGroups; ++g) {
        copy_bulk(shared.weight_stage(stage) + g * kRun, weights + g * stream + step * kRun, kRun, shared.full(stage),
                  policy);
      }
    };
    const auto add_rows = [&](int stage, int step) {
      const uint8_t* from = rows + step * kGroup;
      uint32_t to = shared.row_stage(stage);
      for (int left = tile.rows; left > 0; left -= kGroupRows) {
        if (left >= kGroupRows) {
          copy_bulk(to, from, kGroup, shared.full(stage));
        } else {
#pragma unroll
          for (int i = 0; i < 2 * Shape::kTiles; ++i) {
            copy_bulk(to + i * kAtomBytes, from + i * kAtomBytes, left * 128, shared.full(stage));
          }
        }
        to += kGroup;
        from += static_cast<size_t>(product.steps) * kGroup;
      }
    };
    int step = 0;
    if (first) {
      const int ahead = min(Shape::kStages, product.steps);
      for (int i = 0; i < ahead; ++i) start(i, i);
      wait_for_previous();
      for (; step < ahead; ++step, turn.next()) add_rows(turn.stage, step);
      first = false;
    }
    for (; step < product.steps; ++step, turn.next()) {
      barrier_wait(shared.empty(turn.stage), turn.parity ^ 1);
      start(turn.stage, step);
      add_rows(turn.stage, step);
    }
  }
}

// A warpgroup's 64 x N products over all of K. Leaves with nothing in flight and all its stages handed back.
template <typename Shape>
__device__ __forceinline__ void multiply(float (&d)[Shape::kRows / 2], const MoeShared<Shape>& shared, Turn<Shape::kStages>& turn,
                                         int steps, int group, int thread) {
  uint32_t a[2][8];
  const uint32_t run = group * Shape::kTiles * kTileBytes;
  const uint32_t codes = run + thread * 16, scales = run + kCodeBytes + (thread >> 2) * 8;
  int before = 0;
  for (int step = 0; step < steps; ++step) {
    barrier_wait(shared.full(turn.stage), turn.parity);
    const uint32_t weights = shared.weight_stage(turn.stage);
    const uint64_t b = operand(shared.row_stage(turn.stage), 16, 2 * Shape::kTiles * kAtomBytes);
    uint4 words = load_shared(weights + codes);
    uint2 factors[Shape::kTiles];
#pragma unroll
    for (int i = 0; i < Shape::kTiles; ++i) factors[i] = load_shared2(weights + scales + i * kTileBytes);
#pragma unroll
    for (int half = 0; half < 2 * Shape::kTiles; ++half) {
      // 64 columns: two times two products, the words of the next ones loaded meanwhile.
      const uint4 now = words;
      const uint32_t scale = half % 2 == 0 ? factors[half / 2].x : factors[half / 2].y;
      if (half + 1 < 2 * Shape::kTiles) {
        words = load_shared(weights + codes + (half + 1) / 2 * kTileBytes + (half + 1) % 2 * (kCodeBytes / 2));
      }
      const auto multiply_two = [&](auto second, uint32_t w0, uint32_t w1) {
        constexpr int kSecond = decltype(second)::value;
        decode_weights(w0, w1, weight_factors<kSecond>(scale), a[kSecond]);
        mma_fence();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          mma_64<Shape::kRows>(d, a[kSecond] + 4 * i, b + (half * kAtomBytes + (2 * kSecond + i) * 32) / 16,
                               step > 0 || half > 0 || kSecond > 0 || i > 0);
        }
        mma_commit();
        mma_wait<1>();
      };
      multiply_two(std::integral_constant<int, 0>(), now.x, now.y);
      if (half == 0 && step > 0 && (thread & 31) == 0) barrier_arrive(shared.empty(before));
      multiply_two(std::integral_constant<int, 1>(), now.z, now.w);
    }
    before = turn.stage;
    turn.next();
  }
  mma_wait<0>();
  if ((thread & 31) == 0) barrier_arrive(shared.empty(before));
}

// silu(gate) * up, the gate clamped above and up on both sides; NaN stays.
__device__ __forceinline__ float swiglu(float gate, float up, float limit) {
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up < -limit ? -limit : up;
  return __fdividef(gate, 1.f + __expf(-gate)) * up;
}

// Of each 16 rows of a warp the first 8 are gates and the others their ups. Rows of the next product are written: 8 columns,
// one chunk, of each token.
template <int kN>
__device__ __forceinline__ void store_middle(const float (&d)[kN / 2], const MoeArgs& args, const MoeWork& work,
                                             const RowTile& tile, int weight_tile, int thread) {
  const int warp = thread >> 5, lane = thread & 31, chunk = weight_tile * 4 + warp;
#pragma unroll
  for (int i = 0; i < kN / 8; ++i) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(swiglu(d[4 * i], d[4 * i + 2], args.limit),
                                                      swiglu(d[4 * i + 1], d[4 * i + 3], args.limit));
    uint32_t x = reinterpret_cast<const uint32_t&>(pair);
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(x));
    const int row = lane >> 2;
    if (8 * i + row >= tile.rows) continue;
    uint8_t* to = work.middle + chunk_place(tile.group + i, row, chunk, args.inter);
    *reinterpret_cast<uint32_t*>(to + 4 * (lane & 3)) = x;
  }
}

// The experts' results, by pair.
template <int kN>
__device__ __forceinline__ void store_parts(const float (&d)[kN / 2], const MoeArgs& args, const MoeWork& work,
                                            const RowTile& tile, int weight_tile, int thread) {
  const int warp = thread >> 5, lane = thread & 31;
  float* column = work.parts + weight_tile * 64 + warp * 16 + (lane >> 2);
  const auto* pairs = reinterpret_cast<const int2*>(work.pairs + tile.group * kGroupRows + 2 * (lane & 3));
#pragma unroll
  for (int i = 0; i < kN / 8; ++i) {
    const int row = 8 * i + 2 * (lane & 3);
    if (row >= tile.rows) continue;
    const int2 pair = __ldg(pairs + i * (kGroupRows / 2));
    float* to = column + static_cast<size_t>(pair.x) * args.hidden;
    to[0] = d[4 * i];
    to[8] = d[4 * i + 2];
    if (row + 1 >= tile.rows) continue;
    to = column + static_cast<size_t>(pair.y) * args.hidden;
    to[0] = d[4 * i + 1];
    to[8] = d[4 * i + 3];
  }
}

template <typename Shape, bool kGateUp>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks) moe_kernel(const __grid_constant__ MoeArgs args) {
  extern __shared__ uint8_t dynamic[];
  __shared__ MoeStage stages[Shape::kStages];
  __shared__ RowTile announced[Shape::kStages];
  const int group = __shfl_sync(~0u, threadIdx.x >> 7, 0), thread = threadIdx.x & 127;
  const MoeWork work = moe_work(args, nullptr);
  MoeProduct product;
  product.weights = kGateUp ? args.gate_up : args.down;
  product.rows = kGateUp ? work.rows : work.middle;
  product.steps = (kGateUp ? args.hidden : args.inter) / (kWeightColumns * Shape::kTiles);
  product.row_tiles = (kGateUp ? 2 * args.inter : args.hidden) / kWeightRows / Shape::kGroups;
  MoeShared<Shape> shared;
  shared.rows = (shared_address(dynamic) + 1023) & ~1023u;
  shared.weights = shared.rows + Shape::kStages * Shape::kRowBytes;
  shared.stages = shared_address(stages);
  if (threadIdx.x == 0) {
    for (int s = 0; s < Shape::kStages; ++s) {
      barrier_init(shared.full(s), 1);
      barrier_init(shared.empty(s), 4 * Shape::kGroups);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  // The lists are the first kernel's: there before the second product's kernel can start.
  if constexpr (kGateUp) wait_for_previous();
  let_next_start();
  const int items = *work.tile_count * product.row_tiles;
  if (group == Shape::kGroups) {
    if (thread == 0) copy_items<Shape>(shared, announced, product, work.tiles, items);
  } else {
    Turn<Shape::kStages> turn;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
      barrier_wait(shared.full(turn.stage), turn.parity);
      const RowTile tile = announced[turn.stage];
      float d[Shape::kRows / 2];
      multiply(d, shared, turn, product.steps, group, thread);
      const int weight_tile = item % product.row_tiles * Shape::kGroups + group;
      if constexpr (kGateUp) {
        store_middle<Shape::kRows>(d, args, work, tile, weight_tile, thread);
      } else {
        store_parts<Shape::kRows>(d, args, work, tile, weight_tile, thread);
      }
    }
  }
}

}  // namespace dsv4
