// Dense products of few rows with FP8 or bf16 weights: out[rows, N] = x[rows, K] weights[N, K]^T, weights streamed from
// memory once.
//
// A block takes `kTiles` tiles of 64 of the weights' rows, `kSplit` parts of K, and up to `kRows` rows of x. M are the
// weights' rows, N the rows of x. Within a block
//
//   all warpgroups   decode a tile of weights each in registers (dense/fp8_weights.cuh), unless they are bf16, and
//                    multiply
//   two more warps   copy weights and rows to shared memory; of the weights as many stages are under way as keep the
//                    memory busy: with more the first would arrive with the last, and nothing be multiplied meanwhile.
//                    Rows wait for the previous kernel (common/overlap.cuh), weights do not
//
// The parts of K of one result are warpgroups of a block, blocks of a cluster, or both: their sums lie in shared
// memory, and each block adds up a share of the weights' rows from all of them.
//
// Every number is the sum of the parts of K, added up in pairs of neighbours, each one chain of products from first to
// last. How many parts there are the matrix alone decides, so a row's bits depend on nothing else in the call.
#pragma once

#include "common/mma_64.cuh"
#include "dense/fp8_weights.cuh"
#include "dense/ring.cuh"

namespace dsv4 {

struct DenseFp8Args {
  const __nv_bfloat16* x;  // [rows, groups * columns]
  const uint8_t* codes;    // [weight_rows / 64, columns / 128, 8192], packed; see dense/fp8_weights.cuh. Or bf16
                           // [weight_rows, columns], as they are
  const uint8_t* scales;   // [ceil(weight_rows / 128), columns / 128], of FP8
  void* out;               // [rows, weight_rows]
  int rows, weight_rows, columns;
  int groups;     // of the weights' rows, equally many each: group g takes columns g * columns .. of x
  int float_out;  // float32, else bf16
};

template <int kTilesOf, int kSplitOf, int kRowsOf, int kColumnsOf, int kStagesOf, int kWindowOf, int kBlocksOf,
          int kBytesOf = 1>
struct DenseShape {
  static constexpr int kBytes = kBytesOf;      // of a weight: FP8 or bf16
  static constexpr int kTiles = kTilesOf;      // of weights
  static constexpr int kSplit = kSplitOf;      // parts of K, each with a warpgroup for every tile
  static constexpr int kRows = kRowsOf;        // of x, at most: N
  static constexpr int kColumns = kColumnsOf;  // of a stage, of each part
  static constexpr int kStages = kStagesOf;
  static constexpr int kWindow = kWindowOf;  // stages under way, unless the launch says otherwise
  static constexpr int kBlocks = kBlocksOf;  // an SM
  static constexpr int kWarpgroups = kTiles * kSplit;
  static constexpr int kConsumers = kWarpgroup * kWarpgroups;
  static constexpr int kThreads = kConsumers + 2 * kLanes;
  static constexpr int kTileRows = kDenseRows * kTiles;
  static constexpr int kBoxBytes = kRows * dsv4::kRowBytes;  // 64 columns of x
  static constexpr int kBoxes = kColumns / kBlockColumns;
  static constexpr int kRunBytes = kBoxes * kBoxBytes;                // of x, of a part
  static constexpr int kRunWeights = kDenseRows * kColumns * kBytes;  // of a tile, of a part
  static constexpr int kStageRows = kSplit * kRunBytes;               // of a stage
  static constexpr int kStageWeights = kWarpgroups * kRunWeights;
  static constexpr int kRingBytes = kStages * (kStageRows + kStageWeights);
  // Sums [kSplit, kRows, kTileRows] float32 take the ring's place; padded, so that a quad's stores meet no other's
  // bank.
  static constexpr int kSumPitch = kTileRows + 4;
  static constexpr int kPartBytes = kRows * kSumPitch * static_cast<int>(sizeof(float));
  static_assert(kSplit * kPartBytes <= kRingBytes, "sums have room");
  static constexpr int kSharedBytes = kGroupBytes + kRingBytes;
};

// Of the rows of x; of bf16 weights, then.
template <typename Shape>
struct DenseMaps {
  CUtensorMap of[Shape::kBytes];
};

// The copies of a block, each kind made by one thread, in order.
template <typename Shape>
struct DenseCopies {
  StreamStage* stages;
  uint32_t weights, rows;
  const uint8_t* from;  // the first tile's first run
  size_t tile_bytes;    // 64 of the weights' rows
  const DenseMaps<Shape>& maps;
  int row, column;                // of x
  int weight_row, weight_column;  // the first tile's
  int steps;                      // of a part
  uint64_t policy = streamed_once();

  // A step's runs of weights.
  __device__ __forceinline__ void copy_runs(int step, int stage, uint32_t full) const {
    const uint32_t to = weights + stage * Shape::kStageWeights;
#pragma unroll
    for (int s = 0; s < Shape::kSplit; ++s) {
#pragma unroll
      for (int t = 0; t < Shape::kTiles; ++t) {
        const uint32_t at = to + (s * Shape::kTiles + t) * Shape::kRunWeights;
        if constexpr (Shape::kBytes == 1) {
          copy_bulk(at, from + t * tile_bytes + static_cast<size_t>(s * steps + step) * Shape::kRunWeights,
                    Shape::kRunWeights, full, policy);
        } else {
          copy_boxes(at, maps.of[1], weight_row + t * kDenseRows,
                     weight_column / kBlockColumns + (s * steps + step) * Shape::kBoxes, full);
        }
      }
    }
  }
  // A step's rows.
  __device__ __forceinline__ void copy_own_rows(int step, int stage, uint32_t full) const {
#pragma unroll
    for (int s = 0; s < Shape::kSplit; ++s) {
      copy_boxes(rows + stage * Shape::kStageRows + s * Shape::kRunBytes, maps.of[0], row,
                 column / kBlockColumns + (s * steps + step) * Shape::kBoxes, full);
    }
  }
};

// Of the lane's run of columns among the first 32.
__device__ __forceinline__ uint32_t first_factors(const uint8_t* scales, int count, int lane) {
  return lane < count ? code_factor(__ldg(scales + lane)) : 0;
}

// Two products of a thread's 16 bytes of codes, the `part`-th of a stage, with the stage's rows of x at `b`; all but
// these have ended then. `more`: they are added to what is in `d`.
template <typename Shape>
__device__ __forceinline__ void multiply_codes(float (&d)[Shape::kRows / 2], uint32_t (&a)[2 * kFragment], uint4 codes,
                                               uint32_t scale, uint32_t b, int part, bool more) {
  const __nv_bfloat162 factor = reinterpret_cast<const __nv_bfloat162&>(scale);
  decode_codes(codes.x, codes.y, factor, a);
  decode_codes(codes.z, codes.w, factor, a + kFragment);
  mma_fence();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int depth = 2 * part + i;  // in 16 columns
    constexpr int kPerBox = kBlockColumns / kMmaDepth;
    const uint32_t offset = depth / kPerBox * Shape::kBoxBytes + depth % kPerBox * kMmaBytes;
    mma_64<Shape::kRows>(d, a + kFragment * i, k_major(b, offset), more || i > 0);
  }
  mma_commit();
  mma_wait<1>();
}

// A warpgroup's 64 x N products over its part of K. Leaves with nothing in flight.
template <typename Shape>
__device__ __forceinline__ void multiply_dense(float (&d)[Shape::kRows / 2], StreamStage* stages, uint32_t weights,
                                               uint32_t rows, const uint8_t* scales, int steps, int thread) {
  constexpr int kPartColumns = 2 * kMmaDepth;  // two products: a thread's 16 bytes
  constexpr int kParts = Shape::kColumns / kPartColumns, kPartBytes = kPartColumns * kDenseRows;
  constexpr int kOfScale = kDenseColumns / kPartColumns;
  const int lane = lane_of(thread), scale_count = steps * Shape::kColumns / kDenseColumns;
  uint32_t a[2][2 * kFragment];
  uint32_t factors = first_factors(scales, scale_count, lane), word = 0;
  Stage stage = {0, 0};
  int before = 0;
  for (int step = 0; step < steps; ++step) {
    barrier_wait(shared_address(&stages[stage.index].weights), stage.phase);
    barrier_wait(shared_address(&stages[stage.index].rows), stage.phase);
    const uint32_t codes = weights + stage.index * Shape::kStageWeights + thread * kChunkBytes;
    const uint32_t b = k_major_low(rows + stage.index * Shape::kStageRows);
    uint4 words = load_shared4(codes);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (kParts < kOfScale ? part == 0 : part % kOfScale == 0) {
        const int run = (step * kParts + part) / kOfScale;
        if (within<kLanes>(run) == 0 && run > 0) factors = first_factors(scales + run, scale_count - run, lane);
        word = __shfl_sync(kAllLanes, factors, within<kLanes>(run));
      }
      const uint4 now = words;
      if (part + 1 < kParts) words = load_shared4(codes + (part + 1) * kPartBytes);
      multiply_codes<Shape>(d, a[part % 2], now, word, b, part, step > 0 || part > 0);
      if (part == 0 && step > 0 && lane == 0) barrier_arrive(shared_address(&stages[before].empty));
    }
    before = stage.index;
    if (++stage.index == Shape::kStages) stage.index = 0, stage.phase ^= 1;
  }
  mma_wait<0>();
}

// The same for eight rows, each warp by itself.
template <typename Shape>
__device__ __forceinline__ void multiply_dense_by_warp(float (&d)[Shape::kRows / 2], StreamStage* stages,
                                                       uint32_t weights, uint32_t rows, const uint8_t* scales,
                                                       int steps, int thread) {
  constexpr int kPartColumns = 2 * kMmaDepth;  // two products: a thread's 16 bytes
  constexpr int kParts = Shape::kColumns / kPartColumns, kPartBytes = kPartColumns * kDenseRows;
  constexpr int kOfScale = kDenseColumns / kPartColumns;
  const int lane = lane_of(thread), scale_count = steps * Shape::kColumns / kDenseColumns;
  const uint32_t place = place_of_rows(lane);
  uint32_t factors = first_factors(scales, scale_count, lane), word = 0;
  Stage stage = {0, 0};
  int before = 0;
#pragma unroll
  for (float& x : d) x = 0;
  for (int step = 0; step < steps; ++step) {
    barrier_wait(shared_address(&stages[stage.index].weights), stage.phase);
    const uint32_t codes = weights + stage.index * Shape::kStageWeights + thread * kChunkBytes;
    const uint32_t block = rows + stage.index * Shape::kStageRows;
    uint4 words[kParts], b[kParts];
#pragma unroll
    for (int part = 0; part < kParts; ++part) words[part] = load_shared4(codes + part * kPartBytes);
    barrier_wait(shared_address(&stages[stage.index].rows), stage.phase);
#pragma unroll
    for (int part = 0; part < kParts; ++part) b[part] = load_rows(block + part / 2 * Shape::kBoxBytes, place, part % 2);
    if (step > 0) {
      __syncwarp();
      if (lane == 0) barrier_arrive(shared_address(&stages[before].empty));
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (part % kOfScale == 0) {
        const int run = (step * kParts + part) / kOfScale;
        if (within<kLanes>(run) == 0 && run > 0) factors = first_factors(scales + run, scale_count - run, lane);
        word = __shfl_sync(kAllLanes, factors, within<kLanes>(run));
      }
      const __nv_bfloat162 factor = reinterpret_cast<const __nv_bfloat162&>(word);
      uint32_t a[2 * kFragment];
      decode_codes(words[part].x, words[part].y, factor, a);
      decode_codes(words[part].z, words[part].w, factor, a + kFragment);
      mma_16x8(d, a, b[part].x, b[part].y);
      mma_16x8(d, a + kFragment, b[part].z, b[part].w);
    }
    before = stage.index;
    if (++stage.index == Shape::kStages) stage.index = 0, stage.phase ^= 1;
  }
}

// The same with bf16 weights, which lie in shared memory as the matrix units want them.
template <typename Shape>
__device__ __forceinline__ void multiply_dense_bf16(float (&d)[Shape::kRows / 2], StreamStage* stages, uint32_t weights,
                                                    uint32_t rows, int steps, int thread) {
  constexpr int kDepths = Shape::kColumns / kMmaDepth, kPerBox = kBlockColumns / kMmaDepth;
  Stage stage = {0, 0};
  int before = 0;
  for (int step = 0; step < steps; ++step) {
    barrier_wait(shared_address(&stages[stage.index].weights), stage.phase);
    barrier_wait(shared_address(&stages[stage.index].rows), stage.phase);
    const uint32_t a = k_major_low(weights + stage.index * Shape::kStageWeights);
    const uint32_t b = k_major_low(rows + stage.index * Shape::kStageRows);
    mma_fence();
#pragma unroll
    for (int depth = 0; depth < kDepths; ++depth) {
      const uint32_t within_box = depth % kPerBox * kMmaBytes;
      mma_64<Shape::kRows>(d, k_major(a, depth / kPerBox * kBlockBytes + within_box),
                           k_major(b, depth / kPerBox * Shape::kBoxBytes + within_box), step > 0 || depth > 0);
    }
    mma_commit();
    mma_wait<1>();
    if (step > 0 && lane_of(thread) == 0) barrier_arrive(shared_address(&stages[before].empty));
    before = stage.index;
    if (++stage.index == Shape::kStages) stage.index = 0, stage.phase ^= 1;
  }
  mma_wait<0>();
}

// A warpgroup's sums to shared memory: [row of x][weights' row of the block].
template <typename Shape>
__device__ __forceinline__ void put_sums(const float (&d)[Shape::kRows / 2], float* sums, int tile, int thread) {
  const int lane = lane_of(thread), row = accumulator_row(warp_of(thread), lane);
  float* to = sums + 2 * quad_lane(lane) * Shape::kSumPitch + tile * kDenseRows + row;
#pragma unroll
  for (int i = 0; i < Shape::kRows / kCellColumns; ++i) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      float* at = to + (kCellColumns * i + k) * Shape::kSumPitch;
      at[0] = d[kCell * i + k];
      at[kLowerRow] = d[kCell * i + 2 + k];
    }
  }
}

// Neighbours first, then pairs of them: however parts are grouped by powers of two, the same sums.
template <int kCount>
__device__ __forceinline__ float4 added(float4 (&x)[kCount]) {
#pragma unroll
  for (int apart = 1; apart < kCount; apart *= 2) {
#pragma unroll
    for (int i = 0; i < kCount; i += 2 * apart) {
      const float4& y = x[i + apart];
      x[i].x += y.x, x[i].y += y.y, x[i].z += y.z, x[i].w += y.w;
    }
  }
  return x[0];
}

constexpr int kStepFloats = 4;  // of a load of sums

// Four sums of a row, added up from the block's own parts.
template <typename Shape>
__device__ __forceinline__ float4 own_parts(uint32_t address) {
  float4 x[Shape::kSplit];
#pragma unroll
  for (int p = 0; p < Shape::kSplit; ++p) {
    const uint4 bits = load_shared(address + p * Shape::kPartBytes);
    x[p] = reinterpret_cast<const float4&>(bits);
  }
  return added(x);
}

// Sums of the block's own parts, where the first was: for the cluster to read.
template <typename Shape>
__device__ __forceinline__ void add_own(uint32_t sums, int rows) {
  constexpr int kSteps = Shape::kTileRows / kStepFloats;
  for (int i = threadIdx.x; i < rows * kSteps; i += Shape::kConsumers) {
    const uint32_t address =
        sums + over<kSteps>(i) * Shape::kSumPitch * sizeof(float) + within<kSteps>(i) * kChunkBytes;
    const float4 sum = own_parts<Shape>(address);
    store_shared(address, reinterpret_cast<const uint4&>(sum));
  }
}

// This block's share of the weights' rows, from `tile` on, added up from all parts and stored.
template <typename Shape, int kCluster>
__device__ __forceinline__ void add_parts(const DenseFp8Args& args, uint32_t sums, int first_row, int tile, int rank) {
  constexpr int kSteps = Shape::kTileRows / kStepFloats / kCluster, kPass = Shape::kConsumers / kSteps;
  static_assert(Shape::kConsumers % kSteps == 0, "a thread keeps its columns");
  const int rows = min(Shape::kRows, args.rows - first_row);
  const int step = rank * kSteps + within<kSteps>(threadIdx.x);
  const size_t at = static_cast<size_t>(first_row) * args.weight_rows + tile * kDenseRows + kStepFloats * step;
  uint32_t from[kCluster];
#pragma unroll
  for (int c = 0; c < kCluster; ++c) {
    from[c] = sums + step * kChunkBytes;
    if constexpr (kCluster > 1) from[c] = peer_address(from[c], c);
  }
#pragma unroll(2)
  for (int row = over<kSteps>(threadIdx.x); row < rows; row += kPass) {
    const uint32_t offset = row * Shape::kSumPitch * sizeof(float);
    float4 sum;
    if constexpr (kCluster == 1) {
      sum = own_parts<Shape>(from[0] + offset);
    } else {
      float4 x[kCluster];
#pragma unroll
      for (int c = 0; c < kCluster; ++c) x[c] = load_peer4(from[c] + offset);
      sum = added(x);
    }
    store_four(args, at + static_cast<size_t>(row) * args.weight_rows, sum);
  }
}

// Grid: a cluster, tiles of rows of x, tiles of the weights' rows. `window`: stages of weights under way.
template <typename Shape, int kCluster>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    dense_fp8_kernel(const __grid_constant__ DenseFp8Args args, const __grid_constant__ DenseMaps<Shape> maps,
                     int window) {
  let_next_start();
  extern __shared__ uint8_t dynamic[];
  __shared__ StreamStage stages[Shape::kStages];
  const int rank = kCluster == 1 ? 0 : blockIdx.x, first_row = blockIdx.y * Shape::kRows;
  const int tile = blockIdx.z * Shape::kTiles;
  const int warpgroup = __shfl_sync(kAllLanes, threadIdx.x / kWarpgroup, 0), thread = threadIdx.x & (kWarpgroup - 1);
  const uint32_t rows = (shared_address(dynamic) + kGroupBytes - 1) & ~(kGroupBytes - 1);
  const uint32_t weights = rows + Shape::kStages * Shape::kStageRows;
  const int part_columns = args.columns / (kCluster * Shape::kSplit), steps = part_columns / Shape::kColumns;
  const int first_column = rank * Shape::kSplit * part_columns;
  if (threadIdx.x == Shape::kConsumers) {
    for (const CUtensorMap& map : maps.of) fetch_map(map);
    open_ring<Shape>(stages);
  }
  __syncthreads();
  if (warpgroup == Shape::kWarpgroups) {
    if (thread == 0 || thread == kLanes) {
      const size_t tile_bytes = static_cast<size_t>(args.columns) * kDenseRows;
      const uint8_t* from = args.codes + tile * tile_bytes + static_cast<size_t>(first_column) * kDenseRows;
      const int group = args.groups == 1 ? 0 : tile / (args.weight_rows / args.groups / kDenseRows);
      const int column = group * args.columns + first_column;
      const DenseCopies<Shape> copies = {stages, weights,           rows,         from, tile_bytes, maps, first_row,
                                         column, tile * kDenseRows, first_column, steps};
      if (thread == 0) {
        fill_weights<Shape>(copies, window);
      } else {
        fill_rows<Shape>(copies, Shape::kStageRows);
      }
    }
    __syncwarp();
  } else {
    float d[Shape::kRows / 2];
    const int mine = warpgroup % Shape::kTiles, split = warpgroup / Shape::kTiles;
    const uint32_t own_weights = weights + warpgroup * Shape::kRunWeights, own_rows = rows + split * Shape::kRunBytes;
    const uint8_t* scales =
        args.scales + (first_column + split * part_columns) / kDenseColumns +
        static_cast<size_t>((tile + mine) / (kDenseScaleRows / kDenseRows)) * (args.columns / kDenseColumns);
    if constexpr (Shape::kBytes == 2) {
      multiply_dense_bf16<Shape>(d, stages, own_weights, own_rows, steps, thread);
    } else if constexpr (Shape::kRows == kCellColumns) {
      multiply_dense_by_warp<Shape>(d, stages, own_weights, own_rows, scales, steps, thread);
    } else {
      multiply_dense<Shape>(d, stages, own_weights, own_rows, scales, steps, thread);
    }
    named_sync(1, Shape::kConsumers);  // the ring is free
    uint8_t* sums = dynamic + (rows - shared_address(dynamic)) + split * Shape::kPartBytes;
    put_sums<Shape>(d, reinterpret_cast<float*>(sums), mine, thread);
    if (kCluster == 1 || Shape::kSplit > 1) named_sync(1, Shape::kConsumers);
    if (kCluster > 1 && Shape::kSplit > 1) add_own<Shape>(rows, min(Shape::kRows, args.rows - first_row));
  }
  if constexpr (kCluster > 1) cluster_sync();
  if (warpgroup < Shape::kWarpgroups) add_parts<Shape, kCluster>(args, rows, first_row, tile, rank);
  if constexpr (kCluster > 1) cluster_meet();  // nobody leaves while others read its sums
}

}  // namespace dsv4
