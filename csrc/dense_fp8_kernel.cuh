// Dense products of few rows with FP8 weights: out[rows, N] = x[rows, K] weights[N, K]^T, weights streamed from memory
// once.
//
// A block takes `kGroups` tiles of 64 of the weights' rows, a part of K, and up to `kRows` rows of x. M are the
// weights' rows, N the rows of x. Within a block
//
//   warpgroups 0 .. kGroups - 1   decode a tile of weights each in registers (dense_fp8_weights.cuh) and multiply
//   one more warp                 copies weights and rows to shared memory, `kStages` runs of 128 columns ahead
//
// The parts of K of one result are the blocks of a cluster: each puts its sums into its shared memory, and each adds up
// a share of the columns from all of them.
//
// Every number is the sum of the parts of K in order, each one chain of products from first to last. How many parts
// there are the matrix alone decides, so a row's bits depend on nothing else in the call.
#pragma once

#include "bulk_copy.cuh"
#include "dense_fp8_weights.cuh"
#include "mma_64.cuh"

namespace dsv4 {

struct DenseFp8Args {
  const __nv_bfloat16* x;  // [rows, groups * columns]
  const uint8_t* codes;    // [weight_rows / 64, columns / 128, 8192], packed; see dense_fp8_weights.cuh
  const uint8_t* scales;   // [ceil(weight_rows / 128), columns / 128]
  void* out;               // [rows, weight_rows]
  int rows, weight_rows, columns;
  int groups;     // of the weights' rows, equally many each: group g takes columns g * columns .. of x
  int float_out;  // float32, else bf16
};

constexpr int kMostParts = 8;  // of K

template <int kGroupsOf, int kRowsOf, int kStagesOf, int kBlocksOf>
struct DenseShape {
  static constexpr int kGroups = kGroupsOf;  // warpgroups, each a tile of weights
  static constexpr int kRows = kRowsOf;      // of x, at most: N
  static constexpr int kStages = kStagesOf;
  static constexpr int kBlocks = kBlocksOf;  // an SM
  static constexpr int kConsumers = kWarpgroup * kGroups;
  static constexpr int kThreads = kConsumers + kLanes;
  static constexpr int kTileRows = kDenseRows * kGroups;
  static constexpr int kBoxBytes = kRows * dsv4::kRowBytes;        // 64 columns of x
  static constexpr int kBoxes = kDenseColumns / kBlockColumns;     // of a stage
  static constexpr int kStageRows = kBoxes * kBoxBytes;            // bytes of x
  static constexpr int kStageWeights = kGroups * kDenseTileBytes;  // of weights
  static constexpr int kRingBytes = kStages * (kStageRows + kStageWeights);
  // Sums [kRows, kTileRows] float32 take the ring's place. Padded, so that lanes of a quad's store meet no other's
  // bank.
  static constexpr int kSumPitch = kTileRows + 4;
  static constexpr int kSumBytes = kRows * kSumPitch * static_cast<int>(sizeof(float));
  static_assert(kSumBytes <= kRingBytes, "sums have room");
  static constexpr int kSharedBytes = kGroupBytes + kRingBytes;
};

struct DenseStage {
  alignas(8) uint64_t full, empty;
};

// What a block computes.
struct DenseItem {
  int row;            // first of x
  int tile;           // first of the weights' tiles
  int block, blocks;  // runs of 128 columns: the first and their number
  int all;            // of a whole row
  int column;         // of x at which the first of them is
};

// One thread: all copies of a block, in order. The rows' map is being fetched while the first weights are asked for.
template <typename Shape>
__device__ __forceinline__ void copy_dense(DenseStage* stages, uint32_t weights, uint32_t rows,
                                           const DenseFp8Args& args, const CUtensorMap& map, const DenseItem& item) {
  const uint64_t policy = streamed_once();
  const size_t tile_bytes = static_cast<size_t>(item.all) * kDenseTileBytes;  // 64 rows
  const uint8_t* from = args.codes + item.tile * tile_bytes + static_cast<size_t>(item.block) * kDenseTileBytes;
  const auto add_weights = [&](int stage, int step) {
    const uint32_t full = shared_address(&stages[stage].full);
    barrier_expect(full, Shape::kStageRows + Shape::kStageWeights);
#pragma unroll
    for (int g = 0; g < Shape::kGroups; ++g) {
      copy_bulk(weights + stage * Shape::kStageWeights + g * kDenseTileBytes,
                from + g * tile_bytes + static_cast<size_t>(step) * kDenseTileBytes, kDenseTileBytes, full, policy);
    }
  };
  const auto add_rows = [&](int stage, int step) {
    const uint32_t full = shared_address(&stages[stage].full);
#pragma unroll
    for (int i = 0; i < Shape::kBoxes; ++i) {
      copy_box(rows + stage * Shape::kStageRows + i * Shape::kBoxBytes, map,
               item.column + step * kDenseColumns + i * kBlockColumns, item.row, full);
    }
  };
  const int ahead = min(Shape::kStages, item.blocks);
  for (int i = 0; i < ahead; ++i) add_weights(i, i);
  for (int i = 0; i < ahead; ++i) add_rows(i, i);
  int stage = 0;
  uint32_t phase = 0;
  for (int step = ahead; step < item.blocks; ++step) {
    barrier_wait(shared_address(&stages[stage].empty), phase);
    add_weights(stage, step);
    add_rows(stage, step);
    if (++stage == Shape::kStages) stage = 0, phase ^= 1;
  }
}

// A warpgroup's 64 x N products over the block's part of K. Leaves with nothing in flight.
template <typename Shape>
__device__ __forceinline__ void multiply_dense(float (&d)[Shape::kRows / 2], DenseStage* stages, uint32_t weights,
                                               uint32_t rows, const uint8_t* scales, const DenseItem& item,
                                               int thread) {
  constexpr int kParts = kDenseColumns / (2 * kMmaDepth);  // two products each: a thread's 16 bytes
  constexpr int kPartBytes = kDenseTileBytes / kParts;
  const int lane = lane_of(thread);
  uint32_t a[2][2 * kFragment];
  uint32_t factors = 0;  // of the lane's run of columns among 32
  int stage = 0, before = 0;
  uint32_t phase = 0;
  for (int step = 0; step < item.blocks; ++step) {
    if (within<kLanes>(step) == 0 && step + lane < item.blocks) factors = code_factor(__ldg(scales + step + lane));
    const uint32_t word = __shfl_sync(kAllLanes, factors, within<kLanes>(step));
    const __nv_bfloat162 factor = reinterpret_cast<const __nv_bfloat162&>(word);
    barrier_wait(shared_address(&stages[stage].full), phase);
    const uint32_t codes = weights + stage * Shape::kStageWeights + thread * kChunkBytes;
    const uint32_t b = k_major_low(rows + stage * Shape::kStageRows);
    uint4 words = load_shared4(codes);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const uint4 now = words;
      if (part + 1 < kParts) words = load_shared4(codes + (part + 1) * kPartBytes);
      decode_codes(now.x, now.y, factor, a[part % 2]);
      decode_codes(now.z, now.w, factor, a[part % 2] + kFragment);
      mma_fence();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int depth = 2 * part + i;  // in 16 columns
        constexpr int kPerBox = kBlockColumns / kMmaDepth;
        const uint32_t offset = depth / kPerBox * Shape::kBoxBytes + depth % kPerBox * kMmaBytes;
        mma_64<Shape::kRows>(d, a[part % 2] + kFragment * i, k_major(b, offset), step > 0 || part > 0 || i > 0);
      }
      mma_commit();
      mma_wait<1>();
      if (part == 0 && step > 0 && lane == 0) barrier_arrive(shared_address(&stages[before].empty));
    }
    before = stage;
    if (++stage == Shape::kStages) stage = 0, phase ^= 1;
  }
  mma_wait<0>();
}

// A warpgroup's sums to shared memory: [row of x][weights' row of the block].
template <typename Shape>
__device__ __forceinline__ void put_sums(const float (&d)[Shape::kRows / 2], float* sums, int group, int thread) {
  const int lane = lane_of(thread);
  float* to =
      sums + 2 * quad_lane(lane) * Shape::kSumPitch + group * kDenseRows + accumulator_row(warp_of(thread), lane);
#pragma unroll
  for (int i = 0; i < Shape::kRows / kCellColumns; ++i) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      float* row = to + (kCellColumns * i + k) * Shape::kSumPitch;
      row[0] = d[kCell * i + k];
      row[kLowerRow] = d[kCell * i + 2 + k];
    }
  }
}

__device__ __forceinline__ void store_four(const DenseFp8Args& args, size_t at, float4 x) {
  if (args.float_out) {
    *reinterpret_cast<float4*>(static_cast<float*>(args.out) + at) = x;
    return;
  }
  const __nv_bfloat162 low = __floats2bfloat162_rn(x.x, x.y), high = __floats2bfloat162_rn(x.z, x.w);
  *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(args.out) + at) = {reinterpret_cast<const uint32_t&>(low),
                                                                           reinterpret_cast<const uint32_t&>(high)};
}

// This block's share of the weights' rows, added up from all parts in their order.
template <typename Shape>
__device__ __forceinline__ void add_parts(const DenseFp8Args& args, uint32_t sums, const DenseItem& item, int part,
                                          int parts) {
  constexpr int kStep = 4;  // floats of a load
  const int steps = Shape::kTileRows / kStep / parts, rows = min(Shape::kRows, args.rows - item.row);
  for (int i = threadIdx.x; i < rows * steps; i += Shape::kConsumers) {
    const int row = i / steps, column = kStep * (part * steps + i % steps);
    const uint32_t from = sums + (row * Shape::kSumPitch + column) * sizeof(float);
    float4 x[kMostParts];
#pragma unroll
    for (int p = 0; p < kMostParts; ++p) {
      if (p < parts) x[p] = load_peer4(peer_address(from, p));
    }
    float4 sum = x[0];
#pragma unroll
    for (int p = 1; p < kMostParts; ++p) {
      if (p < parts) sum.x += x[p].x, sum.y += x[p].y, sum.z += x[p].z, sum.w += x[p].w;
    }
    store_four(args, static_cast<size_t>(item.row + row) * args.weight_rows + item.tile * kDenseRows + column, sum);
  }
}

// Grid: parts of K (a cluster), tiles of rows of x, tiles of the weights' rows.
template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    dense_fp8_kernel(const __grid_constant__ DenseFp8Args args, const __grid_constant__ CUtensorMap map) {
  extern __shared__ uint8_t dynamic[];
  __shared__ DenseStage stages[Shape::kStages];
  const int part = blockIdx.x, parts = gridDim.x;
  const int group = __shfl_sync(kAllLanes, threadIdx.x / kWarpgroup, 0), thread = threadIdx.x & (kWarpgroup - 1);
  const uint32_t rows = (shared_address(dynamic) + kGroupBytes - 1) & ~(kGroupBytes - 1);
  const uint32_t weights = rows + Shape::kStages * Shape::kStageRows;
  DenseItem item;
  item.row = blockIdx.y * Shape::kRows;
  item.tile = blockIdx.z * Shape::kGroups;
  item.all = args.columns / kDenseColumns;
  item.blocks = item.all / parts;
  item.block = part * item.blocks;
  const int group_tiles = args.weight_rows / args.groups / kDenseRows;
  item.column = item.tile / group_tiles * args.columns + item.block * kDenseColumns;
  if (threadIdx.x == Shape::kConsumers) {
    fetch_map(map);
    for (int s = 0; s < Shape::kStages; ++s) {
      barrier_init(shared_address(&stages[s].full), 1);
      barrier_init(shared_address(&stages[s].empty), Shape::kConsumers / kLanes);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (group == Shape::kGroups) {
    if (thread == 0) copy_dense<Shape>(stages, weights, rows, args, map, item);
    __syncwarp();
  } else {
    float d[Shape::kRows / 2];
    const uint8_t* scales =
        args.scales + static_cast<size_t>((item.tile + group) / (kDenseScaleRows / kDenseRows)) * item.all + item.block;
    multiply_dense<Shape>(d, stages, weights, rows, scales, item, thread);
    named_sync(1, Shape::kConsumers);  // the ring is free
    put_sums<Shape>(d, reinterpret_cast<float*>(dynamic + (rows - shared_address(dynamic))), group, thread);
  }
  if (parts == 1) {
    __syncthreads();
  } else {
    cluster_sync();
  }
  if (group < Shape::kGroups) add_parts<Shape>(args, rows, item, part, parts);
  if (parts > 1) cluster_meet();  // nobody leaves while others read its sums
}

}  // namespace dsv4
