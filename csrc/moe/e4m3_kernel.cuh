// The grouped products of the experts with rows of e4m3: FP4 weights widened without loss while they are multiplied,
// streamed from memory once.
//
// A block takes an item: a run of an expert's rows (tokens) and 256 of the weights' rows, four tiles of 64. M are the
// weights' rows, N the tokens; an expert of more has several items. Within a block
//
//   warpgroups 0 .. kGroups - 1   widen `kDown` tiles of weights each in registers and multiply (moe/e4m3_weights.cuh)
//   one more warpgroup            a thread copies weights, rows and their scales to shared memory, up to `kStages` runs
//                                 of K ahead, over the end of an item too; three warps take what an item has made from
//                                 shared memory to global, while the next one is multiplied; their registers are the
//                                 others'
//
// 256 of the first product's rows are 128 columns between the products, which share a scale: those three warps round
// them.
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
constexpr int kOutThreads = kWarpgroup - kLanes;
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
  static constexpr int kTablesAt = (kStages * kStageBytes + kTablesBytes - 1) / kTablesBytes * kTablesBytes;
  static constexpr int kOutAt = kTablesAt + kTablesBytes;
  static constexpr int kSharedBytes = static_cast<int>(kPageBytes) + kOutAt + kRows * kOutPitch;
  static_assert(kSharedBytes + 2048 <= kSharedLimit / kBlocks, "fits");
};

struct MoeE4m3Stage {
  alignas(8) uint64_t full, empty;
};
constexpr uint32_t kEmptyBarrier = sizeof(uint64_t);  // from the full one

// Some of an expert's rows, and which 256 of the weights' rows. No rows: there is no more.
struct MoeE4m3Item {
  RowTile rows;
  int row_tile;
};

// What an item has made, on its way out of shared memory: what those that multiply see of it.
struct MoeE4m3Out {
  uint32_t barrier, rows;  // addresses; rows of bf16
  MoeE4m3Item* item;       // whose they are
  uint32_t turn = 0;

  // Until what was handed over before has left.
  __device__ __forceinline__ void wait() const { barrier_wait(barrier + kEmptyBarrier, turn & 1 ^ 1); }
  __device__ __forceinline__ void hand_over(const MoeE4m3Item& of) {
    if (threadIdx.x == 0) *item = of;
    __syncwarp();
    if (lane_of(threadIdx.x) == 0) barrier_arrive(barrier);
    ++turn;
  }
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
  uint32_t barriers, rows, weights, scales, tables;
  Stage stage = {0, 0};

  __device__ __forceinline__ uint32_t full() const { return barriers + stage.index * sizeof(MoeE4m3Stage); }
  __device__ __forceinline__ uint32_t empty() const { return full() + kEmptyBarrier; }
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

// total += sum * scale of the token, which is a column here.
template <int kN>
__device__ __forceinline__ void add_scaled_columns(float (&total)[kN / 2], const float (&sum)[kN / 2], uint32_t scales,
                                                   int lane) {
  const uint32_t own = scales + 2 * quad_lane(lane) * sizeof(float);
#pragma unroll
  for (int j = 0; j < kN / kCellColumns; ++j) {
    const uint2 bits = load_shared2(own + j * kCellColumns * sizeof(float));
    const float even = __uint_as_float(bits.x), odd = __uint_as_float(bits.y);
    total[kCell * j] = __fmaf_rn(sum[kCell * j], even, total[kCell * j]);
    total[kCell * j + 2] = __fmaf_rn(sum[kCell * j + 2], even, total[kCell * j + 2]);
    total[kCell * j + 1] = __fmaf_rn(sum[kCell * j + 1], odd, total[kCell * j + 1]);
    total[kCell * j + 3] = __fmaf_rn(sum[kCell * j + 3], odd, total[kCell * j + 3]);
  }
}

// The same, and times the scale of the weights: `upper` of the lane's row, `lower` of the one eight below.
template <int kN>
__device__ __forceinline__ void add_scaled_cells(float (&total)[kN / 2], const float (&sum)[kN / 2], uint32_t scales,
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

// A tile's codes as the operand of its four products; returns the scales of the thread's two rows.
__device__ __forceinline__ uint2 widen_tile(uint32_t (&a)[kWordGroups][kFragment], uint32_t tile, uint32_t tables,
                                            int thread) {
  const uint2 of_rows = load_shared2(tile + kCodeBytes + quad_of(thread) * sizeof(uint2));
  const uint32_t codes = tile + thread * sizeof(uint2);
  uint2 words[kWordGroups];
#pragma unroll
  for (int g = 0; g < kWordGroups; ++g) words[g] = load_shared2(codes + g * kGroupCodes);
  each<kWordGroups>([&](auto number) {
    constexpr int g = decltype(number)::value;
    widen(words[g].x, table_of<g>(tables, of_rows.x), a[g][0], a[g][2]);
    widen(words[g].y, table_of<g>(tables, of_rows.y), a[g][1], a[g][3]);
  });
  return of_rows;
}

// A tile's products, enqueued.
template <int kN>
__device__ __forceinline__ void multiply_tile(float (&sum)[kN / 2], const uint32_t (&a)[kWordGroups][kFragment],
                                              uint32_t rows) {
  const uint32_t b = k_major_low(rows);
  fence_sums(sum);
  mma_fence();
  each<kWordGroups>([&](auto number) {
    constexpr int g = decltype(number)::value;
    mma_e4m3<kN>(sum, a[g], k_major(b, g * kE4m3Depth), g > 0);
  });
  mma_commit();
}

// A tile's 128 columns, which have one scale a row.
template <int kN>
__device__ __forceinline__ void multiply_widened(float (&total)[kN / 2], float (&sum)[kN / 2], uint32_t tile,
                                                 uint32_t rows, uint32_t scales, uint32_t tables, int thread) {
  constexpr uint32_t kCode = (1u << kE4m3Bits) - 1;
  uint32_t a[kWordGroups][kFragment];
  const uint2 of_rows = widen_tile(a, tile, tables, thread);
  multiply_tile<kN>(sum, a, rows);
  mma_wait<0>();
  fence_sums(sum);
  add_scaled_cells<kN>(total, sum, scales, factor_of(of_rows.x & kCode), factor_of(of_rows.y & kCode), lane_of(thread));
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
    add_scaled_cells<kN>(total, sum, scales, factor_of(of_rows.x & kCode), factor_of(of_rows.y & kCode),
                         lane_of(thread));
    codes += kGroupCodes, b += kE4m3Depth >> kDescriptorUnit;
    of_rows.x >>= kE4m3Bits, of_rows.y >>= kE4m3Bits;
  }
}

// A warpgroup's products over all of K of a matrix whose rows have one scale each: it multiplies the totals at the end,
// a power of two, which is as exact. Multiply-adds hold up the matrix unit, the widening of the next tile does not: it
// is done beside a tile's products, and the sums are added up in one go.
template <typename Shape, int kN>
__device__ __forceinline__ void multiply_one_scale(float (&total)[Shape::kDown][kN / 2], E4m3Ring<Shape>& ring,
                                                   int steps, int group, int thread) {
  constexpr int kTiles = Shape::kRun * Shape::kDown;  // a stage's
  static_assert(kTiles % 2 == 0, "so that a tile's operand is always of the same registers");
  float sum[kN / 2];
  clear(sum);
  clear(total);
  const auto tile_of = [&](int t) {
    return ring.weights_of(t % Shape::kDown * Shape::kGroups + group, t / Shape::kDown);
  };
  uint32_t a[2][kWordGroups][kFragment];
  uint2 of_rows[Shape::kDown];
  barrier_wait(ring.full(), ring.stage.phase);
  widen_tile(a[0], tile_of(0), ring.tables, thread);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const E4m3Ring<Shape> here = ring;
    const bool last = step + 1 == steps;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const int run = t / Shape::kDown;
      multiply_tile<kN>(sum, a[t % 2], here.rows_of(run));
      if (t + 1 < kTiles) {
        // Already over: what follows stays behind what was enqueued, and so does what follows the next.
        if constexpr (!Shape::kMany) barrier_wait(here.full(), here.stage.phase);
        widen_tile(a[(t + 1) % 2], tile_of(t + 1), ring.tables, thread);
        if constexpr (!Shape::kMany) barrier_wait(here.full(), here.stage.phase);
      } else if (!last) {
        ring.next();
        barrier_wait(ring.full(), ring.stage.phase);
        widen_tile(a[0], tile_of(0), ring.tables, thread);
      } else {
#pragma unroll
        for (int m = 0; m < Shape::kDown; ++m)
          of_rows[m] = load_shared2(here.weights_of(m * Shape::kGroups + group, 0) + kCodeBytes +
                                    quad_of(thread) * sizeof(uint2));
      }
      mma_wait<0>();
      fence_sums(sum);
      add_scaled_columns<kN>(total[t % Shape::kDown], sum, here.scales_of(run), lane_of(thread));
    }
    __syncwarp();
    if (lane_of(thread) == 0) barrier_arrive(here.empty());
  }
  ring.next();
  constexpr uint32_t kCode = (1u << kE4m3Bits) - 1;
#pragma unroll
  for (int m = 0; m < Shape::kDown; ++m) {
    const float upper = factor_of(of_rows[m].x & kCode), lower = factor_of(of_rows[m].y & kCode);
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) total[m][i] = __fmul_rn(total[m][i], i % kCell < 2 ? upper : lower);
  }
}

// A warpgroup's products over all of K of any other matrix. Both leave with nothing in flight and all their stages
// handed back.
template <typename Shape, int kN, bool kIsWidened>
__device__ __forceinline__ void multiply_e4m3(float (&total)[Shape::kDown][kN / 2], E4m3Ring<Shape>& ring, int steps,
                                              int group, int thread) {
  float sum[kN / 2];
  clear(sum);
  clear(total);
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

// a / b for b from 1 to 2, rounded once: as __fdiv_rn, which looks first whether it may be so simple, and between whose
// branches nothing else can be done. A quotient below 2^-100 may be off in its last bit.
__device__ __forceinline__ float divided(float a, float b) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(b));
  r = __fmaf_rn(__fmaf_rn(-b, r, 1.f), r, r);
  float q = __fmul_rn(a, r);
#pragma unroll
  for (int i = 0; i < 2; ++i) q = __fmaf_rn(__fmaf_rn(-b, q, a), r, q);
  return fabsf(a) < __int_as_float(0x7F800000) ? q : a;
}

// The smaller one; NaN stays.
__device__ __forceinline__ float smaller(float a, float b) {
  float x;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));
  return x;
}

// silu(gate) * up of both rounded to bf16 first, the gate clamped above and up on both sides, NaN stays; times the
// share. Each step rounded by itself. What is below 2^-100 is zero once it is rounded to e4m3.
__device__ __forceinline__ float shared_swiglu(float gate, float up, float limit, float share) {
  const uint32_t both = bf16_pair(gate, up);  // at once: a conversion of one number takes four times as long
  gate = smaller(lower_bf16(both), limit);
  up = -smaller(-smaller(upper_bf16(both), limit), limit);
  const float e = exact_exp(-fabsf(gate));
  const float silu = divided(gate < 0 ? __fmul_rn(gate, e) : gate, __fadd_rn(1.f, e));
  return __fmul_rn(__fmul_rn(silu, up), share);
}

// Eight rows of a cell's 16-bit numbers as its columns.
__device__ __forceinline__ uint32_t transposed(uint32_t x) {
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(x));
  return x;
}

// Of each 16 rows of a warp the first 8 are gates and the others their ups: 128 columns of each token leave.
template <typename Shape, int kN>
__device__ __forceinline__ void store_e4m3_middle(const float (&d)[Shape::kDown][kN / 2], const MoeArgs& args,
                                                  const MoeE4m3Work& work, MoeE4m3Out& out, const MoeE4m3Item& item,
                                                  int group, int thread) {
  const int lane = lane_of(thread), rows = item.rows.rows(), first = item.rows.group() * kGroupRows;
  constexpr int kTileColumns = kWeightRows / 2;
  out.wait();
#pragma unroll
  for (int j = 0; j < kN / kCellColumns; ++j) {
    if (kCellColumns * j >= rows) break;
    const float2 share =
        __ldg(reinterpret_cast<const float2*>(work.shares + first + kCellColumns * j + 2 * quad_lane(lane)));
#pragma unroll
    for (int m = 0; m < Shape::kDown; ++m) {
      const float* cell = d[m] + kCell * j;
      const float even = shared_swiglu(cell[0], cell[2], args.limit, share.x);
      const float odd = shared_swiglu(cell[1], cell[3], args.limit, share.y);
      const int column = (m * Shape::kGroups + group) * kTileColumns + warp_of(thread) * kCellColumns;
      store_shared(
          out.rows + (kCellColumns * j + quad_of(lane)) * Shape::kOutPitch + 2 * (column + 2 * quad_lane(lane)),
          transposed(bf16_pair(even, odd)));
    }
  }
  out.hand_over(item);
}

// The experts' results: 64 columns of each warpgroup's at a time.
template <typename Shape, int kN>
__device__ __forceinline__ void store_e4m3_parts(const float (&d)[Shape::kDown][kN / 2], MoeE4m3Out& out,
                                                 const MoeE4m3Item& item, int group, int thread) {
  const int lane = lane_of(thread), rows = item.rows.rows();
  const uint32_t own = out.rows + quad_of(lane) * Shape::kOutPitch +
                       2 * (group * kWeightRows + warp_of(thread) * kWarpRows + 2 * quad_lane(lane));
#pragma unroll
  for (int m = 0; m < Shape::kDown; ++m) {
    out.wait();
#pragma unroll
    for (int j = 0; j < kN / kCellColumns; ++j) {
      if (kCellColumns * j >= rows) break;
      const float* cell = d[m] + kCell * j;
      const uint32_t to = own + kCellColumns * j * Shape::kOutPitch;
      store_shared(to, transposed(bf16_pair(cell[0], cell[1])));
      store_shared(to + 2 * kLowerRow, transposed(bf16_pair(cell[2], cell[3])));
    }
    out.hand_over(item);
  }
}

// Rows of the next product, rounded, and their scales.
template <typename Shape>
__device__ __forceinline__ void round_middle(const MoeE4m3Work& work, uint32_t out, const MoeE4m3Item& item,
                                             int thread) {
  const int own = within<kRoundSharers>(thread);  // its eight columns
  const size_t blocks = static_cast<size_t>(item.row_tile) * work.groups + item.rows.group();
  for (int row = over<kRoundSharers>(thread); row < item.rows.rows(); row += kOutThreads / kRoundSharers) {
    uint2 codes;
    const int exponent = round_eight(load_shared(out + row * Shape::kOutPitch + own * kChunkBytes), codes);
    uint8_t* const to = work.middle + (blocks + row / kGroupRows) * kAtomBytes + within<kGroupRows>(row) * kRowBytes +
                        swizzled(own / 2, row) + own % 2 * sizeof(uint2);
    *reinterpret_cast<uint2*>(to) = codes;
    if (own == 0) work.middle_scales[blocks * kGroupRows + row] = power_of_two(exponent);
  }
}

// The experts' results, by pair: of the item's `m`-th columns.
template <typename Shape>
__device__ __forceinline__ void copy_parts(const MoeArgs& args, const MoeE4m3Work& work, uint32_t out,
                                           const MoeE4m3Item& item, int m, int thread) {
  constexpr int kChunks = Shape::kOutColumns / kChunkColumns;  // of a row
  static_assert(kOutThreads % kChunks == 0, "a thread has the same columns of each row");
  const int first = item.rows.group() * kGroupRows, chunk = within<kChunks>(thread);
  const int column = item.row_tile * kItemRows + m * Shape::kOutColumns + chunk * kChunkColumns;
  for (int row = over<kChunks>(thread); row < item.rows.rows(); row += kOutThreads / kChunks) {
    const size_t pair = __ldg(work.pairs + first + row);
    *reinterpret_cast<uint4*>(work.parts + pair * args.hidden + column) =
        load_shared(out + row * Shape::kOutPitch + chunk * kChunkBytes);
  }
}

// Three warps: all that leaves a block, in order.
template <typename Shape, bool kGateUp>
__device__ __forceinline__ void take_out_items(const MoeArgs& args, const MoeE4m3Work& work, const MoeE4m3Out& out,
                                               int thread) {
  for (uint32_t turn = 0;; ++turn) {
    barrier_wait(out.barrier, turn & 1);
    const MoeE4m3Item item = *out.item;
    if (item.rows.rows() == 0) return;
    if constexpr (kGateUp) {
      round_middle<Shape>(work, out.rows, item, thread);
    } else {
      copy_parts<Shape>(args, work, out.rows, item, turn % Shape::kDown, thread);
    }
    __syncwarp();
    if (lane_of(thread) == 0) barrier_arrive(out.barrier + kEmptyBarrier);
  }
}

template <typename Shape, bool kGateUp, int kN, uint32_t kKind>
__device__ __forceinline__ void run_item(const MoeArgs& args, const MoeE4m3Work& work, E4m3Ring<Shape>& ring,
                                         MoeE4m3Out& out, int steps, const MoeE4m3Item& item, int group, int thread) {
  float total[Shape::kDown][kN / 2];
  if constexpr (kKind == kOneScale) {
    multiply_one_scale<Shape, kN>(total, ring, steps, group, thread);
  } else {
    multiply_e4m3<Shape, kN, kKind == kWidened>(total, ring, steps, group, thread);
  }
  if constexpr (kGateUp) {
    store_e4m3_middle<Shape, kN>(total, args, work, out, item, group, thread);
  } else {
    store_e4m3_parts<Shape, kN>(total, out, item, group, thread);
  }
}

template <typename Shape, bool kGateUp>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    moe_e4m3_kernel(const __grid_constant__ MoeArgs args) {
  extern __shared__ uint8_t dynamic[];
  __shared__ MoeE4m3Stage stages[Shape::kStages];
  __shared__ MoeE4m3Item announced[Shape::kStages], leaving;
  __shared__ MoeE4m3Stage leaves;
  const int group = __shfl_sync(kAllLanes, threadIdx.x / kWarpgroup, 0), thread = threadIdx.x & (kWarpgroup - 1);
  const MoeE4m3Work work = moe_e4m3_work(args, nullptr);
  E4m3Ring<Shape> ring;
  ring.barriers = shared_address(stages);
  ring.rows = (shared_address(dynamic) + kGroupBytes - 1) & ~(kGroupBytes - 1);
  ring.weights = ring.rows + Shape::kStages * Shape::kRun * Shape::kBlockRowBytes;
  ring.scales = ring.weights + Shape::kStages * Shape::kWeightBytes;
  ring.tables = ring.rows + Shape::kTablesAt;
  MoeE4m3Out out = {shared_address(&leaves), ring.rows + Shape::kOutAt, &leaving};
  if (threadIdx.x < kTables) {
    const uint2 table = widening_table(threadIdx.x);
    store_shared(ring.tables + threadIdx.x * sizeof(uint2), table.x);
    store_shared(ring.tables + threadIdx.x * sizeof(uint2) + sizeof(table.x), table.y);
  }
  if (threadIdx.x == 0) {
    for (int s = 0; s < Shape::kStages; ++s) {
      barrier_init(shared_address(&stages[s].full), 1);
      barrier_init(shared_address(&stages[s].empty), Shape::kConsumers / kLanes);
    }
    barrier_init(out.barrier, Shape::kConsumers / kLanes);
    barrier_init(out.barrier + kEmptyBarrier, kOutThreads / kLanes);
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
    } else if (thread >= kLanes) {
      take_out_items<Shape, kGateUp>(args, work, out, thread - kLanes);
    }
  } else {
    take_registers<Shape::kOwnRegisters>();
    while (true) {
      barrier_wait(ring.full(), ring.stage.phase);
      const MoeE4m3Item item = announced[ring.stage.index];
      const int rows = item.rows.rows();
      if (rows == 0) break;
      const uint32_t kind = load_shared1(ring.weights_of(group, 0) + kCodeBytes) >> (32 - kE4m3Bits);
      const auto run = [&](auto n, auto of_kind) {
        run_item<Shape, kGateUp, decltype(n)::value, decltype(of_kind)::value>(args, work, ring, out, steps, item,
                                                                               group, thread);
      };
      constexpr std::integral_constant<int, Shape::kRows> all;
      constexpr std::integral_constant<uint32_t, kOneScale> one_scale;
      if (kind == kWidened) {
        run(all, std::integral_constant<uint32_t, kWidened>{});
      } else if (kind != kOneScale) {
        run(all, std::integral_constant<uint32_t, 0>{});
      } else if constexpr (Shape::kMany) {
        if (rows <= 64) {
          run(std::integral_constant<int, 64>{}, one_scale);
        } else if (rows <= 96) {
          run(std::integral_constant<int, 96>{}, one_scale);
        } else if (rows <= 104) {
          run(std::integral_constant<int, 104>{}, one_scale);
        } else {
          run(all, one_scale);
        }
      } else {
        run(all, one_scale);
      }
    }
    out.wait();
    out.hand_over({});
  }
}

}  // namespace dsv4
