// The grouped products of the experts: FP4 weights x bf16 rows, weights streamed from memory once.
//
// A block takes an item: a run of an expert's rows (tokens) and `kGroups` tiles of 64 of the weights' rows. M are the
// weights' rows, N the tokens; an expert of more has several items. Within a block
//
//   warpgroups 0 .. kGroups - 1   decode a tile of weights each in registers and multiply (moe/weights.cuh); for few
//                                 tokens each warp by itself
//   one more warp                 copies weights and rows to shared memory, up to `kStages` runs of 128 or 256 columns
//                                 of K ahead, over the end of an item too
//
// Every number is one chain of products along K from first to last, whatever N, the block's shape or the other rows
// are: its bits depend on its token and its expert alone.
#pragma once

#include "common/bulk_copy.cuh"
#include "common/mma_64.cuh"
#include "moe/lists.cuh"
#include "moe/weights.cuh"

namespace dsv4 {

constexpr int kWarps = kWarpgroup / kLanes;  // of a warpgroup

template <int kGroupsOf, int kRowsOf, int kTilesOf, int kStagesOf, int kBlocksOf, int kWindowOf = kStagesOf,
          bool kByWarpOf = false>
struct MoeShape {
  static constexpr int kGroups = kGroupsOf;  // warpgroups, each a tile of weights
  static constexpr int kRows = kRowsOf;      // tokens of an item, at most: N
  static constexpr int kTiles = kTilesOf;    // of 128 columns, a stage
  static constexpr int kStages = kStagesOf;
  static constexpr int kBlocks = kBlocksOf;   // an SM
  static constexpr int kWindow = kWindowOf;   // stages of the first product that are under way until one is there
  static constexpr bool kByWarp = kByWarpOf;  // products of a warp, not of a warpgroup
  static constexpr int kThreads = kWarpgroup * kGroups + kLanes;
  static constexpr int kRowBytes = kRows / kGroupRows * 2 * kTiles * kAtomBytes;  // of a stage
  static constexpr int kWeightBytes = kGroups * kTiles * kTileBytes;
  static constexpr int kSharedBytes = kPageBytes + kStages * (kRowBytes + kWeightBytes);
};

struct MoeStage {
  alignas(8) uint64_t full, empty;
};

// What differs between the two products.
struct MoeProduct {
  const uint8_t* weights;
  const uint8_t* rows;
  size_t group_bytes;  // of rows, from a group to the next
  int atom_bytes;      // the same from 64 columns to the next
  int32_t* taken;      // items beyond each block's first; null: every block takes each gridDim.x-th item
  int steps;           // stages along K
  int row_tiles;       // items of a run of rows
};

// Of a single token, whose experts every block lists by itself: the tiles, in the order of experts, and their pairs.
struct SingleToken {
  RowTile tiles[kMaxTop];
  int pairs[kMaxTop];
  int count;
};

// By the first warp. Experts should be distinct. Each pair of one that is named twice has a tile and a group by
// itself, in the order of lanes: no place stays unwritten.
__device__ __forceinline__ void list_single(const MoeArgs& args, SingleToken& single, int lane) {
  const int mine = lane < args.top ? __ldg(args.chosen + lane) - args.first : -1;
  const bool here = mine >= 0 && mine < args.experts;
  int place = 0;
  for (int k = 0; k < args.top; ++k) {
    const int other = __shfl_sync(kAllLanes, mine, k);
    place += other >= 0 && (other < mine || (other == mine && k < lane));
  }
  if (here) single.tiles[place] = RowTile::make(mine, place, 1), single.pairs[place] = lane;
  const int count = __popc(__ballot_sync(kAllLanes, here));
  if (lane == 0) single.count = count;
}

// Work of a block: some of an expert's rows and `kGroups` tiles of the weights' rows. No rows: there is no more.
struct MoeItem {
  RowTile rows;
  int row_tile;
};

// A stage of the ring, as addresses in shared memory that are moved along, and how often it came round.
template <typename Shape>
struct Ring {
  uint32_t full;  // barrier
  uint32_t rows, weights;
  Stage stage = {0, 0};

  __device__ __forceinline__ uint32_t empty() const { return full + sizeof(uint64_t); }
  __device__ __forceinline__ void next() {
    ++stage.index;
    full += sizeof(MoeStage);
    rows += Shape::kRowBytes;
    weights += Shape::kWeightBytes;
    if (stage.index == Shape::kStages) {
      stage.index = 0;
      full -= Shape::kStages * sizeof(MoeStage);
      rows -= Shape::kStages * Shape::kRowBytes;
      weights -= Shape::kStages * Shape::kWeightBytes;
      stage.phase ^= 1;
    }
  }
};

// One thread: all copies of a block, in order. Weights of the first stages are asked for before what the previous
// kernel writes is there. Copies that are under way finish together: of a whole ring asked for at once the first stage
// would come with the last, so the first product, which nothing precedes, begins with `kWindow` of them.
template <typename Shape, bool kGateUp>
__device__ __forceinline__ void copy_items(Ring<Shape> ring, MoeItem* announced, const MoeProduct& product,
                                           const RowTile* tiles, RowTile tile, int items) {
  const uint64_t policy = streamed_once();
  constexpr uint32_t kRun = Shape::kTiles * kTileBytes, kRow = 2 * Shape::kTiles * kRowBytes,
                     kGroup = kGroupRows * kRow;
  const size_t tile_bytes = static_cast<size_t>(product.steps) * kRun;  // 64 of the weights' rows
  bool first = true;
  int next;
  for (int item = blockIdx.x; item < items; item = next) {
    if (!first) tile = tiles[item / product.row_tiles];
    const int row_tile = item % product.row_tiles;
    const int tile_row = (tile.expert() * product.row_tiles + row_tile) * Shape::kGroups;
    const uint8_t* weights = product.weights + tile_row * tile_bytes;
    const uint8_t* rows = product.rows + tile.group() * product.group_bytes;
    const auto start = [&](const Ring<Shape>& to, int step) {
      announced[to.stage.index] = {tile, row_tile};
      barrier_expect(to.full, Shape::kWeightBytes + tile.rows() * kRow);
#pragma unroll
      for (int g = 0; g < Shape::kGroups; ++g) {
        copy_bulk(to.weights + g * kRun, weights + g * tile_bytes + step * kRun, kRun, to.full, policy);
      }
    };
    const auto add_rows = [&](const Ring<Shape>& at, int step) {
      const uint8_t* from = rows + step * 2 * Shape::kTiles * product.atom_bytes;
      uint32_t to = at.rows;
      for (int left = tile.rows(); left > 0; left -= kGroupRows) {
        if (left >= kGroupRows) {
          copy_bulk(to, from, kGroup, at.full);
        } else {
#pragma unroll
          for (int i = 0; i < 2 * Shape::kTiles; ++i) {
            copy_bulk(to + i * kAtomBytes, from + i * product.atom_bytes, left * kRowBytes, at.full);
          }
        }
        to += kGroup;
        from += product.group_bytes;
      }
    };
    int step = 0;
    if (first) {
      constexpr int kAhead = kGateUp ? Shape::kWindow : Shape::kStages;
      const int ahead = min(kAhead, product.steps);
      Ring<Shape> early = ring;
      for (int i = 0; i < ahead; ++i, early.next()) start(early, i);
      wait_for_previous();
      for (; step < ahead; ++step, ring.next()) add_rows(ring, step);
      for (; step < min(Shape::kStages, product.steps); ++step, ring.next()) {
        barrier_wait(ring.full - kAhead * sizeof(MoeStage), 0);
        start(ring, step);
        add_rows(ring, step);
      }
      first = false;
    }
    next = product.taken == nullptr ? item + gridDim.x : gridDim.x + atomicAdd(product.taken, 1);
    for (; step < product.steps; ++step, ring.next()) {
      barrier_wait(ring.empty(), ring.stage.phase ^ 1);
      start(ring, step);
      add_rows(ring, step);
    }
  }
  barrier_wait(ring.empty(), ring.stage.phase ^ 1);
  announced[ring.stage.index] = {};
  barrier_arrive(ring.full);
}

// A warpgroup's 64 x N products over all of K. Leaves with nothing in flight and all its stages handed back.
template <typename Shape>
__device__ __forceinline__ void multiply(float (&d)[Shape::kRows / 2], Ring<Shape>& ring, int steps, int group,
                                         int thread) {
  constexpr int kParts = kWeightColumns / kWeightGroup, kWords = 2 * sizeof(uint32_t);
  uint32_t a[2][kTwoFragments];
  const uint32_t run = group * Shape::kTiles * kTileBytes;
  const uint32_t codes = run + thread * kWords, scales = run + kCodeBytes + quad_of(thread) * kWords;
  uint32_t before = 0;
  for (int step = 0; step < steps; ++step) {
    barrier_wait(ring.full, ring.stage.phase);
    const uint64_t b = operand(ring.rows, kUnused, 2 * Shape::kTiles * kAtomBytes);
    uint2 words = load_shared2(ring.weights + codes);
#pragma unroll
    for (int part = 0; part < kParts * Shape::kTiles; ++part) {
      // 32 columns, two products; the words of the next ones are loaded meanwhile. (With the scales too, the compiler
      // starts to decode so early that registers limit the warps.)
      const uint2 now = words;
      const int next = part + 1;
      const uint32_t scale =
          load_shared1(ring.weights + scales + part / kParts * kTileBytes + part % kParts / 2 * sizeof(uint32_t));
      if (next < kParts * Shape::kTiles) {
        words = load_shared2(ring.weights + codes + next / kParts * kTileBytes + next % kParts * (kCodeBytes / kParts));
      }
      decode_weights(now.x, now.y, part % 2 == 0 ? weight_factors<0>(scale) : weight_factors<1>(scale), a[part % 2]);
      mma_fence();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        mma_64<Shape::kRows>(d, a[part % 2] + kFragment * i,
                             b + (part / 2 * kAtomBytes + (part % 2 * 2 + i) * kMmaBytes) / kChunkBytes,
                             step > 0 || part > 0 || i > 0);
      }
      mma_commit();
      mma_wait<1>();
      if (part == 0 && step > 0 && lane_of(thread) == 0) barrier_arrive(before);
    }
    before = ring.empty();
    ring.next();
  }
  mma_wait<0>();
  if (lane_of(thread) == 0) barrier_arrive(before);
}

// What a warp reads of a tile of weights and of eight rows.
struct WarpTile {
  static constexpr int kParts = kWeightColumns / kWeightGroup;
  uint2 words[kParts], scales;
  uint4 rows[kParts];

  __device__ __forceinline__ void load(uint32_t codes, uint32_t scales_at, uint32_t block, uint32_t place) {
    scales = load_shared2(scales_at);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      words[part] = load_shared2(codes + part * (kCodeBytes / kParts));
      rows[part] = load_rows(block + part / 2 * kAtomBytes, place, part % 2);
    }
  }
  __device__ __forceinline__ void multiply(float (&d)[kCell]) const {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      uint32_t a[kTwoFragments];
      const uint32_t scale = part < 2 ? scales.x : scales.y;
      decode_weights(words[part].x, words[part].y, part % 2 == 0 ? weight_factors<0>(scale) : weight_factors<1>(scale),
                     a);
      mma_16x8(d, a, rows[part].x, rows[part].y);
      mma_16x8(d, a + kFragment, rows[part].z, rows[part].w);
    }
  }
};

// The same for eight rows, each warp by itself: it waits for no other, and its numbers have the same bits.
template <typename Shape>
__device__ __forceinline__ void multiply_by_warp(float (&d)[Shape::kRows / 2], Ring<Shape>& ring, int steps, int group,
                                                 int thread) {
  const uint32_t run = group * Shape::kTiles * kTileBytes, word = 2 * sizeof(uint32_t);
  const uint32_t codes = run + thread * word, scales = run + kCodeBytes + quad_of(thread) * word;
  const int lane = lane_of(thread);
  const uint32_t place = place_of_rows(lane);
  uint32_t before = 0;
#pragma unroll
  for (float& x : d) x = 0;
  for (int step = 0; step < steps; ++step) {
#pragma unroll
    for (int t = 0; t < Shape::kTiles; ++t) {
      const uint32_t weights = ring.weights + t * kTileBytes, block = ring.rows + 2 * t * kAtomBytes;
      if (t == 0) barrier_wait(ring.full, ring.stage.phase);
      WarpTile tile;
      tile.load(weights + codes, weights + scales, block, place);
      // Passed already: the compiler, which would put each load off to where it is used, keeps them before it.
      barrier_wait(ring.full, ring.stage.phase);
      __syncwarp();
      if (t == 0 && step > 0 && lane == 0) barrier_arrive(before);
      tile.multiply(d);
    }
    before = ring.empty();
    ring.next();
  }
  __syncwarp();
  if (lane == 0) barrier_arrive(before);
}

// silu(gate) * up, the gate clamped above and up on both sides; NaN stays.
__device__ __forceinline__ float swiglu(float gate, float up, float limit) {
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up < -limit ? -limit : up;
  return __fdividef(gate, 1.f + __expf(-gate)) * up;
}

// Of each 16 rows of a warp the first 8 are gates and the others their ups. Rows of the next product are written: 8
// columns, one chunk, of each token.
template <int kN>
__device__ __forceinline__ void store_middle(const float (&d)[kN / 2], const MoeArgs& args, const MoeWork& work,
                                             const RowTile& tile, int weight_tile, int thread) {
  const int warp = warp_of(thread), lane = lane_of(thread), chunk = weight_tile * kWarps + warp;
#pragma unroll
  for (int i = 0; i < kN / kCellColumns; ++i) {
    const float* cell = d + kCell * i;
    const __nv_bfloat162 pair =
        __floats2bfloat162_rn(swiglu(cell[0], cell[2], args.limit), swiglu(cell[1], cell[3], args.limit));
    uint32_t x = reinterpret_cast<const uint32_t&>(pair);
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(x));
    const int row = quad_of(lane);
    if (kCellColumns * i + row >= tile.rows()) continue;
    uint8_t* to = work.middle + chunk_place(tile.group() + i, row, chunk, args.inter);
    *reinterpret_cast<uint32_t*>(to + sizeof(uint32_t) * quad_lane(lane)) = x;
  }
}

// The experts' results, by pair. `pairs`: of a group's rows; of a single token shared memory's, one a group.
template <int kN>
__device__ __forceinline__ void store_parts(const float (&d)[kN / 2], const MoeArgs& args, const MoeWork& work,
                                            const SingleToken& single, const RowTile& tile, int weight_tile,
                                            int thread) {
  const int warp = warp_of(thread), lane = lane_of(thread);
  float* column = work.parts + weight_tile * kWeightRows + accumulator_row(warp, lane);
  const auto* pairs = reinterpret_cast<const int2*>(work.pairs + tile.group() * kGroupRows + 2 * quad_lane(lane));
#pragma unroll
  for (int i = 0; i < kN / kCellColumns; ++i) {
    const int row = kCellColumns * i + 2 * quad_lane(lane);
    if (row >= tile.rows()) continue;
    const int2 pair = args.tokens == 1 ? int2{single.pairs[tile.group()], 0} : __ldg(pairs + i * (kGroupRows / 2));
    float* to = column + static_cast<size_t>(pair.x) * args.hidden;
    to[0] = d[kCell * i];
    to[kLowerRow] = d[kCell * i + 2];
    if (row + 1 >= tile.rows()) continue;
    to = column + static_cast<size_t>(pair.y) * args.hidden;
    to[0] = d[kCell * i + 1];
    to[kLowerRow] = d[kCell * i + 3];
  }
}

template <typename Shape, bool kGateUp>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks) moe_kernel(const __grid_constant__ MoeArgs args) {
  extern __shared__ uint8_t dynamic[];
  __shared__ MoeStage stages[Shape::kStages];
  __shared__ MoeItem announced[Shape::kStages];
  __shared__ RowTile few_tiles[kGateUp ? kFewPairs : 1];
  __shared__ int few_count;
  __shared__ SingleToken single;
  const bool one = args.tokens == 1;  // no lists: its experts are known, and its row lies as it is
  const int group = __shfl_sync(kAllLanes, threadIdx.x / kWarpgroup, 0), thread = threadIdx.x & (kWarpgroup - 1);
  const MoeWork work = moe_work(args, nullptr);
  MoeProduct product;
  product.weights = kGateUp ? args.gate_up : args.down;
  product.rows = kGateUp ? work.rows : work.middle;
  product.taken = one ? nullptr : work.taken + !kGateUp;
  product.steps = (kGateUp ? args.hidden : args.inter) / (kWeightColumns * Shape::kTiles);
  product.atom_bytes = kAtomBytes;
  product.group_bytes = static_cast<size_t>(product.steps) * 2 * Shape::kTiles * kAtomBytes;
  if (kGateUp && one) {
    product.rows = reinterpret_cast<const uint8_t*>(args.x);
    product.atom_bytes = kRowBytes, product.group_bytes = 0;
  }
  product.row_tiles = (kGateUp ? 2 * args.inter : args.hidden) / kWeightRows / Shape::kGroups;
  Ring<Shape> ring;
  ring.full = shared_address(stages);
  ring.rows = (shared_address(dynamic) + kGroupBytes - 1) & ~(kGroupBytes - 1);
  ring.weights = ring.rows + Shape::kStages * Shape::kRowBytes;
  if (threadIdx.x == 0) {
    for (int s = 0; s < Shape::kStages; ++s) {
      barrier_init(shared_address(&stages[s].full), 1);
      barrier_init(shared_address(&stages[s].empty), kWarps * Shape::kGroups);
    }
    barrier_init_fence();
  }
  __syncthreads();
  const RowTile* tiles = work.tiles;
  RowTile first;
  int count;
  if (one) {
    if constexpr (kGateUp) wait_for_previous();
    if (threadIdx.x < kLanes) list_single(args, single, threadIdx.x);
    __syncthreads();
    count = single.count;
    tiles = single.tiles;
    first = tiles[min(blockIdx.x / product.row_tiles, kMaxTop - 1u)];
  } else if (kGateUp && args.tokens * args.top <= kFewPairs) {
    // Made here beside the first kernel, so that the weights need not wait for it.
    int* of_expert = reinterpret_cast<int*>(dynamic + (ring.rows - shared_address(dynamic)));
    count_pairs<Shape::kThreads>(args, of_expert, [](int, uint32_t) {});
    if (threadIdx.x < kLanes) {
      const int n = list_tiles(of_expert, args.experts, Shape::kRows, few_tiles, [](int, int) {});
      if (threadIdx.x == 0) few_count = n;
    }
    fence_for_mma();
    __syncthreads();
    count = few_count;
    tiles = few_tiles;
    first = tiles[min(blockIdx.x / product.row_tiles, kFewPairs - 1u)];
  } else {
    // The lists are the first kernel's: there before the second product's kernel can start.
    if constexpr (kGateUp) wait_for_previous();
    count = *work.tile_count;
    first = tiles[blockIdx.x / product.row_tiles];
  }
  const int items = count * product.row_tiles;
  if (group == Shape::kGroups) {
    if (thread == 0) copy_items<Shape, kGateUp>(ring, announced, product, tiles, first, items);
  } else {
    wait_for_previous();
    let_next_start();
    while (true) {
      barrier_wait(ring.full, ring.stage.phase);
      const MoeItem item = announced[ring.stage.index];
      if (item.rows.rows() == 0) break;
      float d[Shape::kRows / 2];
      if constexpr (Shape::kByWarp) {
        multiply_by_warp(d, ring, product.steps, group, thread);
      } else {
        multiply(d, ring, product.steps, group, thread);
      }
      const int weight_tile = item.row_tile * Shape::kGroups + group;
      if constexpr (kGateUp) {
        store_middle<Shape::kRows>(d, args, work, item.rows, weight_tile, thread);
      } else {
        store_parts<Shape::kRows>(d, args, work, single, item.rows, weight_tile, thread);
      }
    }
  }
}

}  // namespace dsv4
