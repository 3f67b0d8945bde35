// The grouped products of the experts with rows of e4m3: FP4 weights widened without loss while they are multiplied,
// streamed from memory once.
//
// A block takes an item: a run of an expert's rows (tokens) and 256 of the weights' rows, four tiles of 64. M are the
// weights' rows, N the tokens; an expert of more has several items. Within a block
//
//   warpgroups 0 .. kGroups - 1   widen `kDown` tiles of weights each in registers and multiply (moe/e4m3_weights.cuh)
//   one more warpgroup            copies weights, rows and their scales to shared memory, up to `kStages` runs of K
//                                 ahead, over the end of an item too, and leaves its registers to the others
//
// 256 of the first product's rows are 128 columns between the products, which share a scale: a block rounds them
// itself.
//
// Every number is the sum of dense/e4m3.cuh with all of K as one part, whatever N, the block's shape or the other rows
// are. Where a matrix cannot be widened 32 columns are added up at a time instead of 128; of a matrix that can be,
// never.
#pragma once

#include "common/row_math.cuh"
#include "moe/e4m3_lists.cuh"
#include "moe/e4m3_weights.cuh"

namespace dsv4 {

constexpr int kItemTiles = 4;                          // of 64 of the weights' rows
constexpr int kGroupCodes = kCodeBytes / kWordGroups;  // bytes of a tile, of 32 columns
constexpr int kItemRows = kItemTiles * kWeightRows;
constexpr int kSmRegisters = 65536, kRegisterStep = 8;
constexpr int kRowScaleBytes = kGroupRows * static_cast<int>(sizeof(float));  // of a group

template <int kGroupsOf, int kRowsOf, int kBlocksOf, int kStagesOf, int kRunOf>
struct MoeE4m3Shape {
  static constexpr int kGroups = kGroupsOf;  // warpgroups
  static constexpr int kDown = kItemTiles / kGroups;
  static constexpr int kRows = kRowsOf;      // tokens of an item, at most: N
  static constexpr int kBlocks = kBlocksOf;  // an SM
  static constexpr int kStages = kStagesOf;
  static constexpr int kRun = kRunOf;       // blocks of 128 columns, a stage
  static constexpr bool kMany = kDown > 1;  // items of several sizes
  static constexpr int kConsumers = kWarpgroup * kGroups;
  static constexpr int kThreads = kConsumers + kWarpgroup;
  // A thread's, of those that multiply and of those that copy: together no more than all have when the block starts.
  static constexpr int kOwnRegisters = kGroups == 2 ? 232 : 112, kCopyRegisters = kGroups == 2 ? 40 : 32;
  static constexpr int kFirstRegisters = kSmRegisters / kThreads / kRegisterStep * kRegisterStep;
  static_assert(kConsumers * kOwnRegisters + kWarpgroup * kCopyRegisters <= kThreads * kFirstRegisters,
                "else they would wait for registers that nobody gives");
  static constexpr int kBlockRowBytes = kRows * kRowBytes, kBlockScaleBytes = kRows * static_cast<int>(sizeof(float));
  static constexpr int kWeightBytes = kItemTiles * kRun * kTileBytes;  // of a stage
  static constexpr int kStageBytes = kRun * (kBlockRowBytes + kBlockScaleBytes) + kWeightBytes;
  // What leaves: of each token a row of bf16, padded so that a warp's stores meet no other's bank.
  static constexpr int kOutColumns = kWeightRows * kGroups;
  static constexpr int kOutPitch = 2 * kOutColumns + kChunkBytes;
  static_assert(kOutColumns >= kE4m3Columns, "columns between the products have room");
  static constexpr int kSharedBytes = static_cast<int>(kPageBytes) + kStages * kStageBytes + kRows * kOutPitch;
  static_assert(kSharedBytes + 2048 <= kSharedLimit / kBlocks, "fits");
};

struct MoeE4m3Stage {
  alignas(8) uint64_t full, empty;
};

// Some of an expert's rows, and which 256 of the weights' rows. No rows: there is no more.
struct MoeE4m3Item {
  RowTile rows;
  int row_tile;
};

// What differs between the two products.
struct MoeE4m3Product {
  const uint8_t* weights;
  const uint8_t* rows;
  const float* scales;
  int32_t* taken;
  int steps;      // stages along K
  int row_tiles;  // items of a run of rows
  int groups;     // of rows, of all experts
};

// Addresses in shared memory, and a stage of the ring.
template <typename Shape>
struct E4m3Ring {
  uint32_t barriers, rows, weights, scales, out, tables;
  Stage stage = {0, 0};

  __device__ __forceinline__ uint32_t full() const { return barriers + stage.index * sizeof(MoeE4m3Stage); }
  __device__ __forceinline__ uint32_t empty() const { return full() + sizeof(uint64_t); }
  __device__ __forceinline__ uint32_t rows_of(int run) const {
    return rows + (stage.index * Shape::kRun + run) * Shape::kBlockRowBytes;
  }
  __device__ __forceinline__ uint32_t scales_of(int run) const {
    return scales + (stage.index * Shape::kRun + run) * Shape::kBlockScaleBytes;
  }
  __device__ __forceinline__ uint32_t weights_of(int tile, int run) const {
    return weights + stage.index * Shape::kWeightBytes + (tile * Shape::kRun + run) * kTileBytes;
  }
  __device__ __forceinline__ void next() {
    if (++stage.index == Shape::kStages) stage.index = 0, stage.phase ^= 1;
  }
};

// One thread: all copies of a block, in order.
template <typename Shape>
__device__ __forceinline__ void copy_e4m3_items(E4m3Ring<Shape> ring, MoeE4m3Item* announced,
                                                const MoeE4m3Product& product, const RowTile* tiles, int items) {
  constexpr uint32_t kRunBytes = Shape::kRun * kTileBytes;
  const uint64_t policy = streamed_once();
  const size_t tile_bytes = static_cast<size_t>(product.steps) * kRunBytes;  // 64 of the weights' rows
  int next;
  for (int item = blockIdx.x; item < items; item = next) {
    next = gridDim.x + atomicAdd(product.taken, 1);
    const RowTile tile = tiles[item / product.row_tiles];
    const int row_tile = item % product.row_tiles, groups = (tile.rows() + kGroupRows - 1) / kGroupRows;
    const uint8_t* weights =
        product.weights + static_cast<size_t>(tile.expert() * product.row_tiles + row_tile) * kItemTiles * tile_bytes;
    for (int step = 0; step < product.steps; ++step, ring.next()) {
      barrier_wait(ring.empty(), ring.stage.phase ^ 1);
      announced[ring.stage.index] = {tile, row_tile};
      barrier_expect(ring.full(), Shape::kWeightBytes + Shape::kRun * groups * (kAtomBytes + kRowScaleBytes));
#pragma unroll
      for (int t = 0; t < kItemTiles; ++t)
        copy_bulk(ring.weights_of(t, 0), weights + t * tile_bytes + step * kRunBytes, kRunBytes, ring.full(), policy);
#pragma unroll
      for (int r = 0; r < Shape::kRun; ++r) {
        const size_t group = static_cast<size_t>(step * Shape::kRun + r) * product.groups + tile.group();
        copy_bulk(ring.rows_of(r), product.rows + group * kAtomBytes, groups * kAtomBytes, ring.full());
        copy_bulk(ring.scales_of(r), reinterpret_cast<const uint8_t*>(product.scales + group * kGroupRows),
                  groups * kRowScaleBytes, ring.full());
      }
    }
  }
  barrier_wait(ring.empty(), ring.stage.phase ^ 1);
  announced[ring.stage.index] = {};
  barrier_arrive(ring.full());
}

// total += sum * scale of the token, which is a column here, * that of the weights: `upper` of the lane's row, `lower`
// of the one eight below.
template <int kN>
__device__ __forceinline__ void add_scaled_columns(float (&total)[kN / 2], const float (&sum)[kN / 2], uint32_t scales,
                                                   float upper, float lower, int lane) {
  const uint32_t own = scales + 2 * quad_lane(lane) * sizeof(float);
#pragma unroll
  for (int j = 0; j < kN / kCellColumns; ++j) {
    const uint2 bits = load_shared2(own + j * kCellColumns * sizeof(float));
    const float even = __uint_as_float(bits.x), odd = __uint_as_float(bits.y);
    total[kCell * j] = __fmaf_rn(sum[kCell * j], even * upper, total[kCell * j]);
    total[kCell * j + 1] = __fmaf_rn(sum[kCell * j + 1], odd * upper, total[kCell * j + 1]);
    total[kCell * j + 2] = __fmaf_rn(sum[kCell * j + 2], even * lower, total[kCell * j + 2]);
    total[kCell * j + 3] = __fmaf_rn(sum[kCell * j + 3], odd * lower, total[kCell * j + 3]);
  }
}

// A tile's 128 columns, which have one scale.
template <int kN>
__device__ __forceinline__ void multiply_widened(float (&total)[kN / 2], float (&sum)[kN / 2], uint32_t tile,
                                                 uint32_t rows, uint32_t scales, uint32_t tables, int thread) {
  constexpr uint32_t kCode = (1u << kE4m3Bits) - 1;
  const uint2 of_rows = load_shared2(tile + kCodeBytes + quad_of(thread) * sizeof(uint2));
  const uint32_t codes = tile + thread * sizeof(uint2), b = k_major_low(rows);
  uint32_t a[kWordGroups][kFragment];
  fence_sums(sum);
  each<kWordGroups>([&](auto number) {
    constexpr int g = decltype(number)::value;
    const uint2 words = load_shared2(codes + g * kGroupCodes);
    widen(words.x, load_shared2(tables + table_offset<g>(of_rows.x)), a[g][0], a[g][2]);
    widen(words.y, load_shared2(tables + table_offset<g>(of_rows.y)), a[g][1], a[g][3]);
    mma_fence();
    mma_e4m3<kN>(sum, a[g], k_major(b, g * kE4m3Depth), g > 0);
    mma_commit();
  });
  mma_wait<0>();
  fence_sums(sum);
  add_scaled_columns<kN>(total, sum, scales, factor_of(of_rows.x & kCode), factor_of(of_rows.y & kCode),
                         lane_of(thread));
}

// The same of a tile of which each 32 columns have a scale of their own.
template <int kN>
__device__ __forceinline__ void multiply_by_32(float (&total)[kN / 2], float (&sum)[kN / 2], uint32_t tile,
                                               uint32_t rows, uint32_t scales, uint32_t tables, int thread) {
  constexpr uint32_t kCode = (1u << kE4m3Bits) - 1;
  uint2 of_rows = load_shared2(tile + kCodeBytes + quad_of(thread) * sizeof(uint2));
  const uint2 table = load_shared2(tables + kNoFactor * sizeof(uint2));
  uint32_t codes = tile + thread * sizeof(uint2), b = k_major_low(rows);
#pragma unroll 1
  for (int g = 0; g < kWordGroups; ++g) {
    const uint2 words = load_shared2(codes);
    uint32_t a[kFragment];
    widen(words.x, table, a[0], a[2]);
    widen(words.y, table, a[1], a[3]);
    fence_sums(sum);
    mma_fence();
    mma_e4m3<kN>(sum, a, k_major(b, 0), 0);
    mma_commit();
    mma_wait<0>();
    fence_sums(sum);
    add_scaled_columns<kN>(total, sum, scales, factor_of(of_rows.x & kCode), factor_of(of_rows.y & kCode),
                           lane_of(thread));
    codes += kGroupCodes, b += kE4m3Depth >> kDescriptorUnit;
    of_rows.x >>= kE4m3Bits, of_rows.y >>= kE4m3Bits;
  }
}

// A warpgroup's products over all of K. Leaves with nothing in flight and all its stages handed back.
template <typename Shape, int kN, bool kIsWidened>
__device__ __forceinline__ void multiply_e4m3(float (&total)[Shape::kDown][kN / 2], E4m3Ring<Shape>& ring, int steps,
                                              int group, int thread) {
  float sum[kN / 2];
#pragma unroll
  for (float& x : sum) x = 0;
#pragma unroll
  for (auto& one : total) {
#pragma unroll
    for (float& x : one) x = 0;
  }
#pragma unroll 1
  for (int step = 0; step < steps; ++step, ring.next()) {
    barrier_wait(ring.full(), ring.stage.phase);
#pragma unroll
    for (int r = 0; r < Shape::kRun; ++r) {
#pragma unroll
      for (int m = 0; m < Shape::kDown; ++m) {
        const uint32_t tile = ring.weights_of(m * Shape::kGroups + group, r);
        if constexpr (kIsWidened) {
          multiply_widened<kN>(total[m], sum, tile, ring.rows_of(r), ring.scales_of(r), ring.tables, thread);
        } else {
          multiply_by_32<kN>(total[m], sum, tile, ring.rows_of(r), ring.scales_of(r), ring.tables, thread);
        }
      }
    }
    __syncwarp();
    if (lane_of(thread) == 0) barrier_arrive(ring.empty());
  }
}

// silu(gate) * up, the gate clamped above and up on both sides, NaN stays; times the share. Each step rounded by
// itself.
__device__ __forceinline__ float shared_swiglu(float gate, float up, float limit, float share) {
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up < -limit ? -limit : up;
  const float e = exact_exp(-fabsf(gate));
  const float silu = __fdiv_rn(gate < 0 ? __fmul_rn(gate, e) : gate, __fadd_rn(1.f, e));
  return __fmul_rn(__fmul_rn(silu, up), share);
}

__device__ __forceinline__ float rounded_bf16(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }

// Eight rows of a cell's 16-bit numbers as its columns.
__device__ __forceinline__ uint32_t transposed(uint32_t x) {
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(x));
  return x;
}

// Of each 16 rows of a warp the first 8 are gates and the others their ups. Rows of the next product are written: 128
// columns of each token, and their scales.
template <typename Shape, int kN>
__device__ __forceinline__ void store_e4m3_middle(const float (&d)[Shape::kDown][kN / 2], const MoeArgs& args,
                                                  const MoeE4m3Work& work, uint32_t out, const MoeE4m3Item& item,
                                                  int group, int thread) {
  const int lane = lane_of(thread), rows = item.rows.rows(), first = item.rows.group() * kGroupRows;
  constexpr int kTileColumns = kWeightRows / 2;
  named_sync(1, Shape::kConsumers);  // what left before has been read
#pragma unroll
  for (int j = 0; j < kN / kCellColumns; ++j) {
    if (kCellColumns * j >= rows) break;
    const float2 share =
        __ldg(reinterpret_cast<const float2*>(work.shares + first + kCellColumns * j + 2 * quad_lane(lane)));
#pragma unroll
    for (int m = 0; m < Shape::kDown; ++m) {
      const float* cell = d[m] + kCell * j;
      const float even = shared_swiglu(rounded_bf16(cell[0]), rounded_bf16(cell[2]), args.limit, share.x);
      const float odd = shared_swiglu(rounded_bf16(cell[1]), rounded_bf16(cell[3]), args.limit, share.y);
      const int column = (m * Shape::kGroups + group) * kTileColumns + warp_of(thread) * kCellColumns;
      store_shared(out + (kCellColumns * j + quad_of(lane)) * Shape::kOutPitch + 2 * (column + 2 * quad_lane(lane)),
                   transposed(bf16_pair(even, odd)));
    }
  }
  named_sync(1, Shape::kConsumers);
  const int own = within<kRoundSharers>(threadIdx.x);  // its eight columns
  const size_t blocks = static_cast<size_t>(item.row_tile) * work.groups + item.rows.group();
  for (int row = over<kRoundSharers>(threadIdx.x); row < rows; row += Shape::kConsumers / kRoundSharers) {
    uint2 codes;
    const int exponent = round_eight(load_shared(out + row * Shape::kOutPitch + own * kChunkBytes), codes);
    uint8_t* const to = work.middle + (blocks + row / kGroupRows) * kAtomBytes + within<kGroupRows>(row) * kRowBytes +
                        swizzled(own / 2, row) + own % 2 * sizeof(uint2);
    *reinterpret_cast<uint2*>(to) = codes;
    if (own == 0) work.middle_scales[blocks * kGroupRows + row] = power_of_two(exponent);
  }
}

// The experts' results, by pair.
template <typename Shape, int kN>
__device__ __forceinline__ void store_e4m3_parts(const float (&d)[Shape::kDown][kN / 2], const MoeArgs& args,
                                                 const MoeE4m3Work& work, uint32_t out, const MoeE4m3Item& item,
                                                 int group, int thread) {
  const int lane = lane_of(thread), rows = item.rows.rows(), first = item.rows.group() * kGroupRows;
  constexpr int kChunks = Shape::kOutColumns / kChunkColumns;  // of a row
  const uint32_t own = out + quad_of(lane) * Shape::kOutPitch +
                       2 * (group * kWeightRows + warp_of(thread) * kWarpRows + 2 * quad_lane(lane));
#pragma unroll
  for (int m = 0; m < Shape::kDown; ++m) {
    named_sync(1, Shape::kConsumers);  // what left before has been read
#pragma unroll
    for (int j = 0; j < kN / kCellColumns; ++j) {
      if (kCellColumns * j >= rows) break;
      const float* cell = d[m] + kCell * j;
      const uint32_t to = own + kCellColumns * j * Shape::kOutPitch;
      store_shared(to, transposed(bf16_pair(cell[0], cell[1])));
      store_shared(to + 2 * kLowerRow, transposed(bf16_pair(cell[2], cell[3])));
    }
    named_sync(1, Shape::kConsumers);
    const int column = item.row_tile * kItemRows + m * Shape::kOutColumns;
    for (int i = threadIdx.x; i < rows * kChunks; i += Shape::kConsumers) {
      const int row = over<kChunks>(i), chunk = within<kChunks>(i);
      const size_t pair = __ldg(work.pairs + first + row);
      *reinterpret_cast<uint4*>(work.parts + pair * args.hidden + column + chunk * kChunkColumns) =
          load_shared(out + row * Shape::kOutPitch + chunk * kChunkBytes);
    }
  }
}

template <typename Shape, bool kGateUp, int kN, bool kIsWidened>
__device__ __forceinline__ void run_item(const MoeArgs& args, const MoeE4m3Work& work, E4m3Ring<Shape>& ring, int steps,
                                         const MoeE4m3Item& item, int group, int thread) {
  float total[Shape::kDown][kN / 2];
  multiply_e4m3<Shape, kN, kIsWidened>(total, ring, steps, group, thread);
  if constexpr (kGateUp) {
    store_e4m3_middle<Shape, kN>(total, args, work, ring.out, item, group, thread);
  } else {
    store_e4m3_parts<Shape, kN>(total, args, work, ring.out, item, group, thread);
  }
}

template <typename Shape, bool kGateUp>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    moe_e4m3_kernel(const __grid_constant__ MoeArgs args) {
  extern __shared__ uint8_t dynamic[];
  __shared__ MoeE4m3Stage stages[Shape::kStages];
  __shared__ MoeE4m3Item announced[Shape::kStages];
  __shared__ uint2 tables[kTables];
  const int group = __shfl_sync(kAllLanes, threadIdx.x / kWarpgroup, 0), thread = threadIdx.x & (kWarpgroup - 1);
  const MoeE4m3Work work = moe_e4m3_work(args, nullptr);
  E4m3Ring<Shape> ring;
  ring.barriers = shared_address(stages);
  ring.tables = shared_address(tables);
  ring.rows = (shared_address(dynamic) + kGroupBytes - 1) & ~(kGroupBytes - 1);
  ring.weights = ring.rows + Shape::kStages * Shape::kRun * Shape::kBlockRowBytes;
  ring.scales = ring.weights + Shape::kStages * Shape::kWeightBytes;
  ring.out = ring.scales + Shape::kStages * Shape::kRun * Shape::kBlockScaleBytes;
  if (threadIdx.x < kTables) tables[threadIdx.x] = widening_table(threadIdx.x);
  if (threadIdx.x == 0) {
    for (int s = 0; s < Shape::kStages; ++s) {
      barrier_init(shared_address(&stages[s].full), 1);
      barrier_init(shared_address(&stages[s].empty), Shape::kConsumers / kLanes);
    }
    barrier_init_fence();
  }
  __syncthreads();
  wait_for_previous();
  if constexpr (kGateUp) let_next_start();
  const int steps = (kGateUp ? args.hidden : args.inter) / (kE4m3Columns * Shape::kRun);
  if (group == Shape::kGroups) {
    give_registers<Shape::kCopyRegisters>();
    if (thread == 0) {
      MoeE4m3Product product;
      product.weights = kGateUp ? args.gate_up : args.down;
      product.rows = kGateUp ? work.rows : work.middle;
      product.scales = kGateUp ? work.row_scales : work.middle_scales;
      product.taken = work.taken + !kGateUp;
      product.steps = steps;
      product.row_tiles = (kGateUp ? 2 * args.inter : args.hidden) / kItemRows;
      product.groups = work.groups;
      copy_e4m3_items<Shape>(ring, announced, product, work.tiles, *work.tile_count * product.row_tiles);
    }
  } else {
    take_registers<Shape::kOwnRegisters>();
    while (true) {
      barrier_wait(ring.full(), ring.stage.phase);
      const MoeE4m3Item item = announced[ring.stage.index];
      const int rows = item.rows.rows();
      if (rows == 0) break;
      const bool widened = load_shared1(ring.weights_of(group, 0) + kCodeBytes) >> (32 - kE4m3Bits) == kWidened;
      const auto run = [&](auto n) {
        run_item<Shape, kGateUp, decltype(n)::value, true>(args, work, ring, steps, item, group, thread);
      };
      if (!widened) {
        run_item<Shape, kGateUp, Shape::kRows, false>(args, work, ring, steps, item, group, thread);
      } else if constexpr (Shape::kMany) {
        if (rows <= 64) {
          run(std::integral_constant<int, 64>{});
        } else if (rows <= 96) {
          run(std::integral_constant<int, 96>{});
        } else {
          run(std::integral_constant<int, Shape::kRows>{});
        }
      } else {
        run(std::integral_constant<int, Shape::kRows>{});
      }
    }
  }
}

}  // namespace dsv4
