// Products of few e4m3 rows with e4m3 weights (dense/e4m3.cuh says which sum): weights, M, are streamed from memory
// once; the rows of x are N, 8 to 128.
//
// A block takes `kTiles` tiles of 64 of the weights' rows, a warpgroup each, and one part of K; the parts of a result
// are the blocks of a cluster. Two more warps copy: weights, which wait for no kernel before this one, and rows with
// their scales, which do. The sums of a stage, `kRun` times 128 columns, are made together and added to the total in
// order; the other blocks of an SM multiply meanwhile.
#pragma once

#include <algorithm>

#include "dense/e4m3.cuh"

namespace dsv4 {

constexpr int kSmShared = 228 * 1024;  // bytes of shared memory that an SM has
constexpr int kBlockShared = 3 * 512;  // beside its dynamic shared memory, what a block takes of it

template <int kTilesOf, int kRowsOf, int kRunOf, int kBlocksOf>
struct E4m3FewShape {
  static constexpr int kTiles = kTilesOf;
  static constexpr int kRows = kRowsOf;      // of x, at most: N
  static constexpr int kRun = kRunOf;        // blocks of 128 columns in a stage
  static constexpr int kBlocks = kBlocksOf;  // an SM
  static constexpr int kConsumers = kWarpgroup * kTiles;
  static constexpr int kThreads = kConsumers + 2 * kLanes;
  static constexpr int kTileRows = kE4m3Rows * kTiles;
  static constexpr int kBoxBytes = kRows * kE4m3Columns;
  static constexpr int kStageRows = kRun * kBoxBytes;
  static constexpr int kRunWeights = kRun * kE4m3Tile;  // of a tile
  static constexpr int kStageWeights = kTiles * kRunWeights;
  static constexpr int kBoxScales = kRows * static_cast<int>(sizeof(float));
  static constexpr int kStageScales = kRun * kBoxScales;
  static constexpr int kStageBytes = kStageRows + kStageWeights + kStageScales, kMaxStages = 12;
  static constexpr int kStages =
      std::min(kMaxStages, (kSmShared / kBlocks - kBlockShared - static_cast<int>(kGroupBytes)) / kStageBytes);
  static constexpr int kRingBytes = kStages * kStageBytes;
  // Totals [kRows, kTileRows] float32 take the ring's place; padded, so that a quad's stores meet no other's bank.
  static constexpr int kSumPitch = kTileRows + 4;
  static_assert(kRows * kSumPitch * static_cast<int>(sizeof(float)) <= kRingBytes, "totals have room");
  static_assert(kStages > 1, "a stage is filled while another is read");
  static constexpr int kSharedBytes = kGroupBytes + kRingBytes;
  static_assert(kSharedBytes <= kSharedLimit, "fits");
};

template <typename Shape>
struct E4m3FewCopies {
  StreamStage* stages;
  uint32_t rows, weights, scales;
  const E4m3Args& args;
  const CUtensorMap& map;
  int tile, first_row;
  int block, row_block;  // the first: of the weights, of the rows
  int steps;
  size_t tile_bytes = static_cast<size_t>(args.columns) * kE4m3Rows;
  const uint8_t* from = args.weights + tile * tile_bytes + static_cast<size_t>(block) * kE4m3Tile;
  uint64_t policy = streamed_once();

  __device__ __forceinline__ uint32_t scale_bytes() const {
    return min(Shape::kRows, args.pitch - first_row) * sizeof(float);
  }
  __device__ __forceinline__ void copy_runs(int step, int stage, uint32_t full) const {
#pragma unroll
    for (int t = 0; t < Shape::kTiles; ++t)
      copy_bulk(weights + stage * Shape::kStageWeights + t * Shape::kRunWeights,
                from + t * tile_bytes + static_cast<size_t>(step) * Shape::kRunWeights, Shape::kRunWeights, full,
                policy);
  }
  __device__ __forceinline__ void copy_own_rows(int step, int stage, uint32_t full) const {
    const int at = row_block + step * Shape::kRun;
    copy_boxes(rows + stage * Shape::kStageRows, map, first_row, at, full);
#pragma unroll
    for (int r = 0; r < Shape::kRun; ++r)
      copy_bulk(
          scales + stage * Shape::kStageScales + r * Shape::kBoxScales,
          reinterpret_cast<const uint8_t*>(args.row_scales + static_cast<size_t>(at + r) * args.pitch + first_row),
          scale_bytes(), full);
  }
};

// total += sum * scale of the weights * scale of the row of x, which is a column here.
template <int kRows>
__device__ __forceinline__ void add_scaled(float (&total)[kRows / 2], const float (&sum)[kRows / 2], float factor,
                                           uint32_t scales, int lane) {
  const uint32_t own = scales + 2 * quad_lane(lane) * sizeof(float);
#pragma unroll
  for (int j = 0; j < kRows / kCellColumns; ++j) {
    const uint2 bits = load_shared2(own + j * kCellColumns * sizeof(float));
    const float even = __uint_as_float(bits.x) * factor, odd = __uint_as_float(bits.y) * factor;
    total[kCell * j] = __fmaf_rn(sum[kCell * j], even, total[kCell * j]);
    total[kCell * j + 1] = __fmaf_rn(sum[kCell * j + 1], odd, total[kCell * j + 1]);
    total[kCell * j + 2] = __fmaf_rn(sum[kCell * j + 2], even, total[kCell * j + 2]);
    total[kCell * j + 3] = __fmaf_rn(sum[kCell * j + 3], odd, total[kCell * j + 3]);
  }
}

// A warpgroup's totals of its part of K. Leaves with nothing in flight.
template <typename Shape>
__device__ __forceinline__ void multiply_few(float (&total)[Shape::kRows / 2], StreamStage* stages, uint32_t weights,
                                             uint32_t rows, uint32_t scales, WeightFactors factors, int steps,
                                             int lane) {
  constexpr int kRun = Shape::kRun;
  float sum[kRun][Shape::kRows / 2];
  clear(total);
  clear(sum);
  Stage stage = {0, 0};
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    barrier_wait(shared_address(&stages[stage.index].weights), stage.phase);
    barrier_wait(shared_address(&stages[stage.index].rows), stage.phase);
#pragma unroll
    for (int r = 0; r < kRun; ++r) {
      fence_sums(sum[r]);
      multiply_block<Shape::kRows>(sum[r], k_major_low(weights + stage.index * Shape::kStageWeights + r * kE4m3Tile),
                                   k_major_low(rows + stage.index * Shape::kStageRows + r * Shape::kBoxBytes));
    }
    each<kRun>([&](auto number) {
      constexpr int r = decltype(number)::value;
      mma_wait<kRun - 1 - r>();
      fence_sums(sum[r]);
      add_scaled<Shape::kRows>(total, sum[r], factors.of(step * kRun + r),
                               scales + stage.index * Shape::kStageScales + r * Shape::kBoxScales, lane);
    });
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&stages[stage.index].empty));
    if (++stage.index == Shape::kStages) stage.index = 0, stage.phase ^= 1;
  }
}

// Grid: parts of K (the cluster), tiles of rows of x, tiles of the weights' rows. `window`: stages of weights under
// way.
template <typename Shape, int kParts>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    dense_e4m3_few_kernel(const __grid_constant__ E4m3Args args, const __grid_constant__ CUtensorMap map, int window) {
  let_next_start();
  extern __shared__ uint8_t dynamic[];
  __shared__ StreamStage stages[Shape::kStages];
  const int part = kParts == 1 ? 0 : blockIdx.x, first_row = blockIdx.y * Shape::kRows;
  const int tile = blockIdx.z * Shape::kTiles;
  const int warpgroup = __shfl_sync(kAllLanes, threadIdx.x / kWarpgroup, 0), thread = threadIdx.x & (kWarpgroup - 1);
  const uint32_t weights = (shared_address(dynamic) + kGroupBytes - 1) & ~(kGroupBytes - 1);
  const uint32_t rows = weights + Shape::kStages * Shape::kStageWeights;
  const uint32_t scales = rows + Shape::kStages * Shape::kStageRows;
  const int blocks = args.columns / kE4m3Columns, part_blocks = blocks / kParts, first_block = part * part_blocks;
  const int steps = part_blocks / Shape::kRun;
  if (threadIdx.x == Shape::kConsumers) {
    fetch_map(map);
    open_ring<Shape>(stages);
  }
  __syncthreads();
  if (warpgroup == Shape::kTiles) {
    if (thread == 0 || thread == kLanes) {
      const int group = args.groups == 1 ? 0 : tile / (args.weight_rows / args.groups / kE4m3Rows);
      const E4m3FewCopies<Shape> copies = {
          stages, rows, weights, scales, args, map, tile, first_row, first_block, group * blocks + first_block, steps};
      if (thread == 0) {
        fill_weights<Shape>(copies, window);
      } else {
        fill_rows<Shape>(copies, Shape::kStageRows + Shape::kRun * copies.scale_bytes());
      }
    }
    __syncwarp();
  } else {
    const int lane = lane_of(thread), mine = tile + warpgroup;
    const WeightFactors factors = {
        args.scales + first_block + static_cast<size_t>(mine / (kE4m3ScaleRows / kE4m3Rows)) * blocks, part_blocks,
        lane};
    float total[Shape::kRows / 2];
    multiply_few<Shape>(total, stages, weights + warpgroup * Shape::kRunWeights, rows, scales, factors, steps, lane);
    named_sync(1, Shape::kConsumers);  // the ring is free
    put_own_sums<Shape>(total, weights + warpgroup * kE4m3Rows * sizeof(float), thread);
    if constexpr (kParts == 1) named_sync(1, Shape::kConsumers);
  }
  if constexpr (kParts > 1) cluster_sync();
  if (warpgroup < Shape::kTiles) {
    // Of the block's rows of weights this block of the cluster finishes a share.
    constexpr int kOwnFloats = 4, kSteps = Shape::kTileRows / kOwnFloats / kParts, kPass = Shape::kConsumers / kSteps;
    static_assert(Shape::kConsumers % kSteps == 0, "a thread keeps its columns");
    const int count = min(Shape::kRows, args.rows - first_row), step = part * kSteps + within<kSteps>(threadIdx.x);
    const size_t at = static_cast<size_t>(first_row) * args.weight_rows + tile * kE4m3Rows + kOwnFloats * step;
#pragma unroll(2)
    for (int row = over<kSteps>(threadIdx.x); row < count; row += kPass) {
      const float4 x =
          add_in_order<kParts>(weights + row * Shape::kSumPitch * sizeof(float) + step * kChunkBytes, 0, 1);
      store_four(args, at + static_cast<size_t>(row) * args.weight_rows, x);
    }
  }
  if constexpr (kParts > 1) cluster_meet();  // nobody leaves while others read its totals
}

}  // namespace dsv4
