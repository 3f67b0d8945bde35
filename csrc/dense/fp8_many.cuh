// Dense products of many rows with FP8 weights: as dense/stream_kernel.cuh and with the same bits, for more rows than
// make the weights the most of the work.
//
// A block takes a tile of 128 of the weights' rows by 128 rows of x: two warpgroups decode 64 rows of weights each and
// multiply, one more warp copies. Of the parts of K a block takes `kInTurn` one after the other and adds their sums in
// registers; `kParts` blocks of a cluster share the parts where there are too few tiles. Parts are added up in pairs of
// neighbours, as there.
#pragma once

#include "dense/stream_kernel.cuh"

namespace dsv4 {

template <int kInTurnOf, int kPartsOf>
struct ManyShape {
  static constexpr int kTiles = 2;           // of weights, a warpgroup each
  static constexpr int kRows = 128;          // of x: N
  static constexpr int kInTurn = kInTurnOf;  // parts of K one after the other
  static constexpr int kParts = kPartsOf;    // blocks of a cluster, with other parts of K
  static constexpr int kColumns = 128;       // of a stage
  static constexpr int kStages = 4;
  static constexpr int kConsumers = kWarpgroup * kTiles;
  static constexpr bool kHandOver = kInTurn > 1;  // registers, from the warpgroup that copies: for more sums than one
  static constexpr int kThreads = kConsumers + (kHandOver ? kWarpgroup : kLanes);
  static constexpr int kTileRows = kDenseRows * kTiles;
  static constexpr int kBoxes = kColumns / kBlockColumns;
  static constexpr int kBoxBytes = kRows * dsv4::kRowBytes;  // 64 columns of x
  static constexpr int kStageRows = kBoxes * kBoxBytes;
  static constexpr int kRunWeights = kDenseRows * kColumns;  // of a tile
  static constexpr int kStageWeights = kTiles * kRunWeights;
  static constexpr int kRingBytes = kStages * (kStageRows + kStageWeights);
  // A warpgroup's sums [kRows, 64] float32 take the ring's place, padded as those of `DenseShape`.
  static constexpr int kSumPitch = kDenseRows + 4;
  static constexpr int kSumBytes = kRows * kSumPitch * static_cast<int>(sizeof(float));
  static_assert(kTiles * kSumBytes <= kRingBytes, "sums have room");
  static constexpr int kSharedBytes = kGroupBytes + kRingBytes;
  static_assert(kSharedBytes <= kSharedLimit, "fits");
};

struct ManyStage {
  alignas(8) uint64_t full, empty;
};

// A warpgroup's products of one part of K, the stages from `stage` on.
template <typename Shape>
__device__ __forceinline__ void multiply_part(float (&d)[Shape::kRows / 2], ManyStage* stages, Stage& stage,
                                              uint32_t weights, uint32_t rows, const uint8_t* scales, int steps,
                                              int thread) {
  constexpr int kPartColumns = 2 * kMmaDepth;  // two products: a thread's 16 bytes
  constexpr int kRuns = Shape::kColumns / kPartColumns, kRunBytes = kPartColumns * kDenseRows;
  static_assert(Shape::kColumns == kDenseColumns, "a stage has one scale");
  const int lane = lane_of(thread);
  uint32_t a[2][2 * kFragment];
  uint32_t factors = first_factors(scales, steps, lane), word = 0;
  int before = -1;
  fence_sums(d);
  for (int step = 0; step < steps; ++step) {
    barrier_wait(shared_address(&stages[stage.index].full), stage.phase);
    const uint32_t codes = weights + stage.index * Shape::kStageWeights + thread * kChunkBytes;
    const uint32_t b = k_major_low(rows + stage.index * Shape::kStageRows);
    uint4 words = load_shared4(codes);
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      if (run == 0) {
        if (within<kLanes>(step) == 0 && step > 0) factors = first_factors(scales + step, steps - step, lane);
        word = __shfl_sync(kAllLanes, factors, within<kLanes>(step));
      }
      const uint4 now = words;
      if (run + 1 < kRuns) words = load_shared4(codes + (run + 1) * kRunBytes);
      multiply_codes<Shape>(d, a[run % 2], now, word, b, run, step > 0 || run > 0);
      if (run == 0 && before >= 0 && lane == 0) barrier_arrive(shared_address(&stages[before].empty));
    }
    before = stage.index;
    if (++stage.index == Shape::kStages) stage.index = 0, stage.phase ^= 1;
  }
  mma_wait<0>();
  fence_sums(d);
  if (lane == 0) barrier_arrive(shared_address(&stages[before].empty));
}

template <int kCount>
__device__ __forceinline__ void add_to(float (&to)[kCount], const float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) to[i] += x[i];
}
template <int kCount>
__device__ __forceinline__ void copy_to(float (&to)[kCount], const float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) to[i] = x[i];
}

// The sum of the block's parts of K, `multiply(i)` leaving that of part i in d.
template <int kInTurn, int kCount, typename Multiply>
__device__ __forceinline__ void add_in_turn(float (&d)[kCount], const Multiply& multiply) {
  static_assert(kInTurn == 1 || kInTurn == 2 || kInTurn == 4, "parts");
  float part[kCount], pair[kCount];
#pragma unroll 1
  for (int i = 0; i < kInTurn; ++i) {
    multiply(i);
    if constexpr (kInTurn > 1) {
      if (i % 2 == 0) {
        copy_to(part, d);
      } else {
        add_to(d, part);
      }
    }
    if constexpr (kInTurn > 2) {
      if (i == 1) copy_to(pair, d);
      if (i == 3) add_to(d, pair);
    }
    fence_sums(d);
  }
}

// A warpgroup's results: of its rows of weights the share of this block, added up from the blocks of the cluster.
template <typename Shape>
__device__ __forceinline__ void store_results(const DenseFp8Args& args, uint32_t sums, int first_row, int tile,
                                              int part, int thread) {
  constexpr int kSteps = kDenseRows / kStepFloats / Shape::kParts, kPass = kWarpgroup / kSteps;
  const int rows = min(Shape::kRows, args.rows - first_row), step = part * kSteps + within<kSteps>(thread);
  const size_t at = static_cast<size_t>(first_row) * args.weight_rows + tile * kDenseRows + kStepFloats * step;
  uint32_t from[Shape::kParts];
#pragma unroll
  for (int c = 0; c < Shape::kParts; ++c) {
    from[c] = sums + step * kChunkBytes;
    if constexpr (Shape::kParts > 1) from[c] = peer_address(from[c], c);
  }
#pragma unroll(4)
  for (int row = over<kSteps>(thread); row < rows; row += kPass) {
    const uint32_t offset = row * Shape::kSumPitch * sizeof(float);
    float4 x[Shape::kParts];
#pragma unroll
    for (int c = 0; c < Shape::kParts; ++c) {
      if constexpr (Shape::kParts > 1) {
        x[c] = load_peer4(from[c] + offset);
      } else {
        const uint4 bits = load_shared(from[c] + offset);
        x[c] = reinterpret_cast<const float4&>(bits);
      }
    }
    store_four(args, at + static_cast<size_t>(row) * args.weight_rows, added(x));
  }
}

// Grid: `kParts` blocks, tiles of rows of x, tiles of the weights' rows.
template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    dense_fp8_many_kernel(const __grid_constant__ DenseFp8Args args, const __grid_constant__ CUtensorMap map) {
  let_next_start();
  extern __shared__ uint8_t dynamic[];
  __shared__ ManyStage stages[Shape::kStages];
  const int part = Shape::kParts == 1 ? 0 : blockIdx.x, first_row = blockIdx.y * Shape::kRows;
  const int first_tile = blockIdx.z * Shape::kTiles;
  const int warpgroup = __shfl_sync(kAllLanes, threadIdx.x / kWarpgroup, 0), thread = threadIdx.x & (kWarpgroup - 1);
  const uint32_t rows = (shared_address(dynamic) + kGroupBytes - 1) & ~(kGroupBytes - 1);
  const uint32_t weights = rows + Shape::kStages * Shape::kStageRows;
  const int part_columns = args.columns / (Shape::kParts * Shape::kInTurn), steps = part_columns / Shape::kColumns;
  const int first_column = part * Shape::kInTurn * part_columns;
  if (threadIdx.x == Shape::kConsumers) {
    fetch_map(map);
#pragma unroll
    for (int s = 0; s < Shape::kStages; ++s) {
      barrier_init(shared_address(&stages[s].full), 1);
      barrier_init(shared_address(&stages[s].empty), Shape::kConsumers / kLanes);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (warpgroup == Shape::kTiles) {
    if constexpr (Shape::kHandOver) give_registers<24>();
    if (thread == 0) {
      const size_t tile_bytes = static_cast<size_t>(args.columns) * kDenseRows;
      const uint8_t* from = args.codes + first_tile * tile_bytes + static_cast<size_t>(first_column) * kDenseRows;
      const int group = args.groups == 1 ? 0 : first_tile / (args.weight_rows / args.groups / kDenseRows);
      const int box = (group * args.columns + first_column) / kBlockColumns;
      Stage next = {0, 0};
      wait_for_previous();
      for (int step = 0; step < Shape::kInTurn * steps; ++step) {
        if (step >= Shape::kStages) barrier_wait(shared_address(&stages[next.index].empty), next.phase ^ 1);
        const uint32_t full = shared_address(&stages[next.index].full);
        barrier_expect(full, Shape::kStageWeights + Shape::kStageRows);
        copy_boxes(rows + next.index * Shape::kStageRows, map, first_row, box + step * Shape::kBoxes, full);
#pragma unroll
        for (int t = 0; t < Shape::kTiles; ++t) {
          copy_bulk(weights + next.index * Shape::kStageWeights + t * Shape::kRunWeights,
                    from + t * tile_bytes + static_cast<size_t>(step) * Shape::kRunWeights, Shape::kRunWeights, full);
        }
        if (++next.index == Shape::kStages) next.index = 0, next.phase ^= 1;
      }
    }
    __syncwarp();
    if constexpr (Shape::kParts > 1) cluster_sync();
  } else {
    if constexpr (Shape::kHandOver) take_registers<240>();
    float d[Shape::kRows / 2];
    const int tile = first_tile + warpgroup, part_scales = part_columns / kDenseColumns;
    const uint8_t* scales = args.scales + first_column / kDenseColumns +
                            static_cast<size_t>(tile / (kDenseScaleRows / kDenseRows)) * (args.columns / kDenseColumns);
    Stage stage = {0, 0};
    add_in_turn<Shape::kInTurn>(d, [&](int i) {
      multiply_part<Shape>(d, stages, stage, weights + warpgroup * Shape::kRunWeights, rows, scales + i * part_scales,
                           steps, thread);
    });
    named_sync(1, Shape::kConsumers);  // the ring is free
    const uint32_t sums = rows + warpgroup * Shape::kSumBytes;
    put_own_sums<Shape>(d, sums, thread);
    if constexpr (Shape::kParts > 1) {
      cluster_sync();
    } else {
      named_sync(2 + warpgroup, kWarpgroup);
    }
    store_results<Shape>(args, sums, first_row, tile, part, thread);
  }
  if constexpr (Shape::kParts > 1) cluster_meet();  // nobody leaves while others read its sums
}

}  // namespace dsv4
