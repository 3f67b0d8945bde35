// Products of many e4m3 rows with e4m3 weights, and the bits of dense/e4m3_few.cuh: rows of x are M here, weights N.
//
// A persistent block takes tiles of `kTokens` rows of x by `kColumns` of the weights' rows, one after the other. Two
// warpgroups (or one) multiply 64 rows by `kN` of the weights' rows at a time, for 128 columns of K, and add what comes
// out to totals that stay in registers; one more warpgroup copies, tiles ahead. Results leave through shared memory by
// the copy engine while the next tile is multiplied.
//
//   kShare  blocks of a cluster that take neighbouring tiles of rows: each copies a share of the weights to all
//   kSplit  blocks of a cluster that share the parts of K of a tile; then a block takes one tile and no more
//   kParked a block takes all parts one after the other and keeps the sum of those before
#pragma once

#include "common/row_math.cuh"
#include "dense/e4m3.cuh"
#include "dense/round_eight.cuh"

namespace dsv4 {

template <int kGroupsOf, int kDownOf, int kAcrossOf, int kNOf, int kStagesOf, int kShareOf, int kSplitOf,
          bool kParkedOf>
struct E4m3ManyShape {
  static constexpr int kGroups = kGroupsOf;  // warpgroups, one below the other along rows of x
  static constexpr int kDown = kDownOf;      // 64s of rows of x, of a warpgroup
  static constexpr int kAcross = kAcrossOf;  // times kN of the weights' rows
  static constexpr int kN = kNOf;
  static constexpr int kStages = kStagesOf;
  static constexpr int kShare = kShareOf, kSplit = kSplitOf, kCluster = kShare * kSplit;
  static constexpr bool kParked = kParkedOf;
  static constexpr int kProducts = kDown * kAcross;  // of a warpgroup, one after the other
  static constexpr int kSums = kN / 2;               // registers of a product
  static_assert(!kParked || (kProducts == 1 && kSplit == 1), "registers");
  static_assert(kSplit == 1 || kProducts == 1, "a cluster's totals have room");
  static constexpr int kTokens = kE4m3Rows * kDown * kGroups;
  static constexpr int kColumns = kN * kAcross;
  static constexpr int kWeightTiles = kColumns / kE4m3Rows;
  static_assert(kWeightTiles % kShare == 0, "a share each");
  static constexpr int kConsumers = kWarpgroup * kGroups;
  static constexpr bool kHandOver = kGroups > 1;  // registers, from the warpgroup that copies
  static constexpr int kThreads = kConsumers + (kHandOver ? kWarpgroup : kLanes);
  static constexpr int kStageRows = kTokens * kE4m3Columns;
  static constexpr int kStageWeights = kWeightTiles * kE4m3Tile;
  static constexpr int kStageScales = kTokens * static_cast<int>(sizeof(float));
  static constexpr int kOutBytes = kE4m3Rows * kE4m3Columns;  // 64 rows of 64 bf16: a box, of a warpgroup
  static constexpr int kRingBytes = kStages * (kStageRows + kStageWeights);
  static constexpr int kSharedBytes = kGroupBytes + kRingBytes + kGroups * kOutBytes + kStages * kStageScales;
  // Of a split tile, totals [kTokens, kColumns] float32 take the ring's place.
  static constexpr int kSumPitch = kColumns + 4;
  static_assert(kSplit == 1 || kTokens * kSumPitch * static_cast<int>(sizeof(float)) <= kRingBytes, "totals have room");
  static_assert(kSharedBytes + 1024 <= kSharedLimit, "fits");
  static constexpr int kBlocks = kGroups == 1 && 2 * (kSharedBytes + 2048) <= kSharedLimit ? 2 : 1;  // an SM
};

struct E4m3ManyStage {
  alignas(8) uint64_t full, empty;
};

struct E4m3ManyMaps {
  CUtensorMap rows, out;  // out: of bf16, or of pairs of e4m3
};

// How the tiles are cut: `pairs` of `kShare` tiles of rows each, `band` pairs side by side for all weights.
struct E4m3Tiling {
  int pairs, across, band;

  __host__ __device__ int count() const { return pairs * across; }
};

struct E4m3Place {
  int first_row, weight_tile;  // the latter in 64s
};
template <typename Shape>
__device__ __forceinline__ E4m3Place place_of(const E4m3Tiling& tiling, int index, int share) {
  const int whole = tiling.band * tiling.across, band = index / whole, rest = index - band * whole;
  const int here = min(tiling.band, tiling.pairs - band * tiling.band), across = rest / here;
  const int pair = band * tiling.band + rest - across * here;
  return {(pair * Shape::kShare + share) * Shape::kTokens, across * Shape::kWeightTiles};
}

// To the blocks of the cluster that `mask` has a bit for, at the same places.
__device__ __forceinline__ void copy_bulk_to_all(uint32_t to, const uint8_t* from, uint32_t bytes, uint32_t barrier,
                                                 uint32_t mask) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], "
      "%4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "h"(static_cast<uint16_t>(mask))
      : "memory");
}

// One thread's copies of all the tiles of a block.
template <typename Shape>
__device__ __forceinline__ void copy_tiles(const E4m3Args& args, const E4m3ManyMaps& maps, const E4m3Tiling& tiling,
                                           E4m3ManyStage* stages, uint32_t rows, uint32_t weights, uint32_t scales,
                                           int share, int split, int first, int apart) {
  constexpr int kShareTiles = Shape::kWeightTiles / Shape::kShare;
  const int blocks = args.columns / kE4m3Columns, part_blocks = blocks / Shape::kSplit;
  const size_t tile_bytes = static_cast<size_t>(args.columns) * kE4m3Rows;
  const uint32_t mask = ((1u << Shape::kShare) - 1) << (split * Shape::kShare);
  Stage next = {0, 0};
  bool again = false;  // whether the stage was used before
  wait_for_previous();
  for (int index = first; index < tiling.count(); index += apart) {
    const E4m3Place place = place_of<Shape>(tiling, index, share);
    const int group = args.groups == 1 ? 0 : place.weight_tile / (args.weight_rows / args.groups / kE4m3Rows);
    const int first_block = split * part_blocks;
    const uint8_t* from = args.weights + (place.weight_tile + share * kShareTiles) * tile_bytes +
                          static_cast<size_t>(first_block) * kE4m3Tile;
    const int box = group * blocks + first_block;
    const int scale_rows = max(0, min(Shape::kTokens, args.pitch - place.first_row));
    for (int block = 0; block < part_blocks; ++block) {
      const uint32_t empty = shared_address(&stages[next.index].empty), full = shared_address(&stages[next.index].full);
      if (again) barrier_wait(empty, next.phase ^ 1);
      barrier_expect(full, Shape::kStageRows + Shape::kStageWeights + scale_rows * sizeof(float));
      copy_boxes(rows + next.index * Shape::kStageRows, maps.rows, place.first_row, box + block, full);
      if (scale_rows > 0)
        copy_bulk(scales + next.index * Shape::kStageScales,
                  reinterpret_cast<const uint8_t*>(args.row_scales + static_cast<size_t>(box + block) * args.pitch +
                                                   place.first_row),
                  scale_rows * sizeof(float), full);
#pragma unroll
      for (int t = 0; t < kShareTiles; ++t) {
        const uint32_t to = weights + next.index * Shape::kStageWeights + (share * kShareTiles + t) * kE4m3Tile;
        const uint8_t* tile = from + t * tile_bytes + static_cast<size_t>(block) * kE4m3Tile;
        if constexpr (Shape::kShare > 1) {
          copy_bulk_to_all(to, tile, kE4m3Tile, full, mask);
        } else {
          copy_bulk(to, tile, kE4m3Tile, full);
        }
      }
      if (++next.index == Shape::kStages) next.index = 0, next.phase ^= 1, again = true;
    }
  }
}

// total += sum * scales of the two rows: `upper` of the lane's row, `lower` of the one eight below.
template <int kCount>
__device__ __forceinline__ void add_scaled_rows(float (&total)[kCount], const float (&sum)[kCount], float upper,
                                                float lower) {
#pragma unroll
  for (int j = 0; j < kCount / kCell; ++j) {
    total[kCell * j] = __fmaf_rn(sum[kCell * j], upper, total[kCell * j]);
    total[kCell * j + 1] = __fmaf_rn(sum[kCell * j + 1], upper, total[kCell * j + 1]);
    total[kCell * j + 2] = __fmaf_rn(sum[kCell * j + 2], lower, total[kCell * j + 2]);
    total[kCell * j + 3] = __fmaf_rn(sum[kCell * j + 3], lower, total[kCell * j + 3]);
  }
}

// A warpgroup's results of 64 rows by 128 of the weights' rows, rounded to bf16 and then to e4m3: four lanes have those
// of a row, which share a scale.
template <int kSums>
__device__ __forceinline__ void store_rounded_product(const E4m3Args& args, const CUtensorMap& map,
                                                      const float (&d)[kSums], uint32_t box, int first_row,
                                                      int first_column, int warpgroup, int thread) {
  constexpr int kCells = kRoundGroup / kCellColumns, kHalves = 2;  // rows eight apart
  static_assert(kSums == kCells * kCell && kRoundGroup == kE4m3Columns, "a block of 128 columns");
  const int lane = lane_of(thread), own_row = accumulator_row(warp_of(thread), lane);
  uint32_t most[kHalves] = {};
#pragma unroll
  for (int j = 0; j < kCells; ++j) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h)
      most[h] = greater_magnitudes(most[h], bf16_pair(d[kCell * j + 2 * h], d[kCell * j + 2 * h + 1]));
  }
  if (thread == 0) store_wait_read();
  named_sync(2 + warpgroup, kWarpgroup);  // the box is free
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
#pragma unroll
    for (int step = 1; step < kQuad; step *= 2)
      most[h] = greater_pair(most[h], __shfl_xor_sync(kAllLanes, most[h], step));
    const int exponent = round_exponent(most[h]), row = own_row + kLowerRow * h;
    const float factor = power_of_two(-exponent);
    const uint32_t to = box + row * kRowBytes + 2 * quad_lane(lane);
#pragma unroll
    for (int j = 0; j < kCells; ++j) {
      const uint32_t codes = e4m3_pair(bf16_pair(d[kCell * j + 2 * h], d[kCell * j + 2 * h + 1]), factor);
      asm volatile("st.shared.b16 [%0], %1;" ::"r"(to + swizzled(j / 2, row) + j % 2 * kCellColumns),
                   "h"(static_cast<uint16_t>(codes))
                   : "memory");
    }
    const int at = first_row + row;
    if (quad_lane(lane) == 0 && at < args.pitch)
      args.out_scales[static_cast<size_t>(first_column / kRoundGroup) * args.pitch + at] =
          at < args.rows ? power_of_two(exponent) : 0.f;
  }
  fence_for_mma();
  named_sync(2 + warpgroup, kWarpgroup);
  if (thread == 0) {
    store_box(map, box, first_column / 2, first_row);
    store_commit();
  }
}

// A warpgroup's results of 64 rows by kN of the weights' rows, to memory. `box`: its shared memory for 64 x 64 bf16.
template <typename Shape>
__device__ __forceinline__ void store_product(const E4m3Args& args, const CUtensorMap& map,
                                              const float (&d)[Shape::kSums], uint32_t box, int first_row,
                                              int first_column, int warpgroup, int thread) {
  const int lane = lane_of(thread);
  if (args.float_out) {
    const int row = first_row + accumulator_row(warp_of(thread), lane);
    float* to = static_cast<float*>(args.out) + static_cast<size_t>(row) * args.weight_rows + first_column +
                2 * quad_lane(lane);
#pragma unroll
    for (int j = 0; j < Shape::kN / kCellColumns; ++j) {
      float* at = to + kCellColumns * j;
      if (row < args.rows) *reinterpret_cast<float2*>(at) = make_float2(d[kCell * j], d[kCell * j + 1]);
      if (row + kLowerRow < args.rows)
        *reinterpret_cast<float2*>(at + static_cast<size_t>(kLowerRow) * args.weight_rows) =
            make_float2(d[kCell * j + 2], d[kCell * j + 3]);
    }
    return;
  }
  if constexpr (Shape::kN == kRoundGroup) {
    if (args.out_scales != nullptr) {
      store_rounded_product(args, map, d, box, first_row, first_column, warpgroup, thread);
      return;
    }
  }
  constexpr int kBoxCells = kBlockColumns / kCellColumns;  // of eight columns
  const int own_row = warp_of(thread) * kWarpRows + within<kWarpRows>(lane), half = lane / kWarpRows;
  const uint32_t to = box + own_row * kRowBytes;
#pragma unroll
  for (int b = 0; b < Shape::kN / kBlockColumns; ++b) {
    if (thread == 0) store_wait_read();
    named_sync(2 + warpgroup, kWarpgroup);  // the box is free
#pragma unroll
    for (int c = 0; c < kBoxCells; c += 2) {
      const float* x = d + kCell * (b * kBoxCells + c);
      Fragment packed;
#pragma unroll
      for (int i = 0; i < kFragment; ++i) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
        packed[i] = reinterpret_cast<const uint32_t&>(pair);
      }
      store_matrices(to + swizzled(c + half, own_row), packed);
    }
    fence_for_mma();
    named_sync(2 + warpgroup, kWarpgroup);
    if (thread == 0) {
      store_box(map, box, first_column + b * kBlockColumns, first_row);
      store_commit();
    }
  }
}

// Grid: clusters of `kCluster` blocks; `tiling.count()` of them if parts are split.
template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    dense_e4m3_many_kernel(const __grid_constant__ E4m3Args args, const __grid_constant__ E4m3ManyMaps maps,
                           const E4m3Tiling tiling, int parts) {
  let_next_start();
  extern __shared__ uint8_t dynamic[];
  __shared__ E4m3ManyStage stages[Shape::kStages];
  const int rank = Shape::kCluster == 1 ? 0 : blockIdx.x % Shape::kCluster;
  const int share = rank % Shape::kShare, split = rank / Shape::kShare;
  const int first = blockIdx.x / Shape::kCluster, apart = gridDim.x / Shape::kCluster;
  const int warpgroup = __shfl_sync(kAllLanes, threadIdx.x / kWarpgroup, 0), thread = threadIdx.x & (kWarpgroup - 1);
  const uint32_t rows = (shared_address(dynamic) + kGroupBytes - 1) & ~(kGroupBytes - 1);
  const uint32_t weights = rows + Shape::kStages * Shape::kStageRows;
  const uint32_t outs = weights + Shape::kStages * Shape::kStageWeights;
  const uint32_t scales = outs + Shape::kGroups * Shape::kOutBytes;
  if (threadIdx.x == Shape::kConsumers) {
    fetch_map(maps.rows);
    if (!args.float_out) fetch_map(maps.out);
#pragma unroll
    for (int s = 0; s < Shape::kStages; ++s) {
      barrier_init(shared_address(&stages[s].full), 1);
      barrier_init(shared_address(&stages[s].empty), Shape::kShare * Shape::kConsumers / kLanes);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if constexpr (Shape::kCluster > 1) cluster_sync();  // barriers are there before others arrive on them
  if (warpgroup == Shape::kGroups) {
    if constexpr (Shape::kHandOver) give_registers<56>();
    if (thread == 0) copy_tiles<Shape>(args, maps, tiling, stages, rows, weights, scales, share, split, first, apart);
    __syncwarp();
    if constexpr (Shape::kSplit > 1) cluster_sync();
  } else {
    if constexpr (Shape::kHandOver) take_registers<224>();
    const int lane = lane_of(thread), blocks = args.columns / kE4m3Columns;
    const int turns = Shape::kParked ? parts : 1, part_blocks = blocks / (turns * Shape::kSplit);
    const int own_rows = warpgroup * Shape::kDown * kE4m3Rows;
    const uint32_t own_scales = scales + (own_rows + accumulator_row(warp_of(thread), lane)) * sizeof(float);
    const uint32_t a = k_major_low(rows + own_rows * kE4m3Columns), b = k_major_low(weights);
    float total[Shape::kProducts][Shape::kSums], sum[Shape::kSums];
    [[maybe_unused]] float parked[Shape::kParked ? Shape::kSums : 1];
    clear(sum);
    Stage stage = {0, 0};
    for (int index = first; index < tiling.count(); index += apart) {
      const E4m3Place place = place_of<Shape>(tiling, index, share);
      WeightFactors factors[Shape::kAcross];
#pragma unroll
      for (int n = 0; n < Shape::kAcross; ++n) {
        const int tile = (place.weight_tile + n * (Shape::kN / kE4m3Rows)) / (kE4m3ScaleRows / kE4m3Rows);
        factors[n] = {args.scales + static_cast<size_t>(tile) * blocks + split * part_blocks, blocks / Shape::kSplit,
                      lane};
      }
#pragma unroll 1
      for (int turn = 0; turn < turns; ++turn) {
        clear(total);
#pragma unroll 1
        for (int block = 0; block < part_blocks; ++block) {
          float factor[Shape::kAcross], of_rows[Shape::kDown][2];
#pragma unroll
          for (int n = 0; n < Shape::kAcross; ++n) factor[n] = factors[n].of(turn * part_blocks + block);
          barrier_wait(shared_address(&stages[stage.index].full), stage.phase);
#pragma unroll
          for (int m = 0; m < Shape::kDown; ++m) {
            const uint32_t at = own_scales + stage.index * Shape::kStageScales + m * kE4m3Rows * sizeof(float);
            of_rows[m][0] = __uint_as_float(load_shared1(at));
            of_rows[m][1] = __uint_as_float(load_shared1(at + kLowerRow * sizeof(float)));
          }
          const uint32_t here = stage.index * (Shape::kStageRows >> kDescriptorUnit);
          const uint32_t there = stage.index * (Shape::kStageWeights >> kDescriptorUnit);
#pragma unroll
          for (int p = 0; p < Shape::kProducts; ++p) {
            const int m = p / Shape::kAcross, n = p % Shape::kAcross;
            fence_sums(sum);
            multiply_block<Shape::kN>(sum, a + here + m * (kE4m3Rows * kE4m3Columns >> kDescriptorUnit),
                                      b + there + n * (Shape::kN * kE4m3Columns >> kDescriptorUnit));
            mma_wait<0>();
            fence_sums(sum);
            if (p == Shape::kProducts - 1) {  // the stage has been read
              __syncwarp();
              if constexpr (Shape::kShare > 1) {
                if (lane < Shape::kShare)
                  arrive_at(peer_address(shared_address(&stages[stage.index].empty), split * Shape::kShare + lane));
              } else {
                if (lane == 0) barrier_arrive(shared_address(&stages[stage.index].empty));
              }
            }
            add_scaled_rows(total[p], sum, of_rows[m][0] * factor[n], of_rows[m][1] * factor[n]);
          }
          if (++stage.index == Shape::kStages) stage.index = 0, stage.phase ^= 1;
        }
        if constexpr (Shape::kParked) {
#pragma unroll
          for (int i = 0; i < Shape::kSums; ++i)
            parked[i] = turn == 0 ? total[0][i] : __fadd_rn(parked[i], total[0][i]);
        }
      }
      if constexpr (Shape::kSplit == 1) {
#pragma unroll
        for (int p = 0; p < Shape::kProducts; ++p) {
          const int row = place.first_row + own_rows + p / Shape::kAcross * kE4m3Rows;
          const int column = place.weight_tile * kE4m3Rows + p % Shape::kAcross * Shape::kN;
          const uint32_t box = outs + warpgroup * Shape::kOutBytes;
          if constexpr (Shape::kParked) {
            store_product<Shape>(args, maps.out, parked, box, row, column, warpgroup, thread);
          } else {
            store_product<Shape>(args, maps.out, total[p], box, row, column, warpgroup, thread);
          }
        }
      } else {
        named_sync(1, Shape::kConsumers);  // the ring is free: this is the block's only tile
        const uint32_t to =
            rows + ((own_rows + accumulator_row(warp_of(thread), lane)) * Shape::kSumPitch + 2 * quad_lane(lane)) *
                       sizeof(float);
#pragma unroll
        for (int j = 0; j < Shape::kN / kCellColumns; ++j) {
#pragma unroll
          for (int i = 0; i < kCell; ++i)
            store_shared(to + (i / 2 * kLowerRow * Shape::kSumPitch + kCellColumns * j + i % 2) * sizeof(float),
                         __float_as_uint(total[0][kCell * j + i]));
        }
      }
    }
    if constexpr (Shape::kSplit > 1) {
      cluster_sync();
      constexpr int kOwnFloats = 4, kSteps = Shape::kColumns / kOwnFloats / Shape::kSplit;
      constexpr int kPass = Shape::kConsumers / kSteps;
      static_assert(Shape::kConsumers % kSteps == 0, "a thread keeps its columns");
      const E4m3Place place = place_of<Shape>(tiling, first, share);
      const int count = min(Shape::kTokens, args.rows - place.first_row);
      const int step = split * kSteps + within<kSteps>(threadIdx.x);
      const size_t at =
          static_cast<size_t>(place.first_row) * args.weight_rows + place.weight_tile * kE4m3Rows + kOwnFloats * step;
#pragma unroll(2)
      for (int row = over<kSteps>(threadIdx.x); row < count; row += kPass) {
        const uint32_t from = rows + (row * Shape::kSumPitch + kOwnFloats * step) * sizeof(float);
        const float4 x = add_in_order<Shape::kSplit>(from, share, Shape::kShare);
        store_four(args, at + static_cast<size_t>(row) * args.weight_rows, x);
      }
    } else if (thread == 0) {
      store_wait_read();  // shared memory stays until it has been read
    }
  }
  if constexpr (Shape::kCluster > 1) cluster_meet();  // nobody leaves while others write to it or read from it
}

}  // namespace dsv4
