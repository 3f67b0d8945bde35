// Queries of a long chunk: the product of latents and weights, and the last steps of attend/queries_kernel.cuh on its
// sums, which so never go to memory: out[t, h] = RoPE(norm(x[t] weights[h]^T)), rounded to bf16. The indexer's: no
// norm, but Hadamard and the FP4 round trip.
//
// A cluster of two blocks takes 128 tokens and a head (of the indexer's four), a block 256 columns; then the next such
// pair of tiles.
//
//   a warpgroup for every 64 tokens   products, then norm and RoPE, and the store, of heads of 512 half of it beside
//                                     the next tile's products
//   a thread of one more              copies: each block half of the tokens for both, and its own weights, stages of
//                                     64 columns of K ahead, the next tile's too
//
// Each result is one chain of products from first to last column. The sum of squares: of each lane's columns in order,
// then of the lanes of a quad, then of the two blocks.
#pragma once

#include "common/bulk_copy.cuh"
#include "common/hopper.cuh"
#include "common/overlap.cuh"
#include "common/row_math.cuh"

namespace dsv4 {

struct QueryProductArgs {
  const __nv_bfloat16* x;        // [tokens, columns]
  const __nv_bfloat16* weights;  // [heads * width, columns]
  const float* cosine;           // [tokens, 32]
  const float* sine;             // [tokens, 32]
  __nv_bfloat16* out;            // [tokens, heads, width]
  int tokens, heads, columns;
  float eps;                // of the norm, of heads of 512
  int hadamard, round_fp4;  // of heads of 128
};

constexpr int kProductColumns = kDim / 2;  // of a block
constexpr int kProductCluster = 2;
constexpr int kLeastColumns = 512;

constexpr int kProductGroups = 2;                          // warpgroups, of 64 tokens each
constexpr int kProductRows = kProductGroups * kBlockRows;  // of a tile
constexpr int kProductWarps = kProductGroups * kWarpgroup / kLanes;
constexpr int kProductThreads = (kProductGroups + 1) * kWarpgroup;
constexpr int kProductRegisters = 232, kProductCopyRegisters = 40;  // a thread
constexpr int kProductStages = 4;
constexpr int kProductParts = 2;  // a warp's rows of the output go to memory in so many
constexpr int kOutBoxes = kProductColumns / kBlockColumns / kProductParts;
constexpr int kOutBoxBytes = kWarpRows * kRowBytes;  // 16 rows of 64 columns
static_assert(kProductStages * kBlockColumns < kLeastColumns, "a tile is more than the ring");

struct ProductShared {
  alignas(1024) uint8_t tokens[kProductStages][kProductRows * kRowBytes];
  alignas(1024) uint8_t weights[kProductStages][kProductColumns * kRowBytes];
  alignas(1024) uint8_t out[kProductWarps][kOutBoxes * kOutBoxBytes];
  float squares[kProductRows];  // the other block's share
  uint64_t full[kProductStages], empty[kProductStages], summed[kProductGroups];
};
static_assert(sizeof(ProductShared) <= kSharedLimit, "more shared memory than a block can have");

// d[64 x 256] (+)= A[64 x 16] B[16 x 256]; A and B K-major in shared memory. `accumulate` 0 overwrites d.
using ProductSums = Accumulator<kProductColumns / 2>[2];
__device__ __forceinline__ void mma_64x256(ProductSums& d, uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
      "}, %128, %129, p, 1, 1, 0, 0;}"
      : DSV4_F64(d[0], 0), DSV4_F64(d[1], 0)
      : "l"(a), "l"(b), "r"(accumulate));
}

// A box of 64 columns of a matrix to both blocks of the cluster, where the barriers are counted too.
__device__ __forceinline__ void copy_box_to_both(uint32_t to, const CUtensorMap& map, int column, int row,
                                                 uint32_t barrier) {
  constexpr uint16_t kBoth = 3;
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(kBoth)
      : "memory");
}
// A number to the other block, counted by its barrier.
__device__ __forceinline__ void send_float(uint32_t address, uint32_t barrier, float x) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(address), "f"(x),
               "r"(barrier)
               : "memory");
}

struct ProductStage {
  int index = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++index == kProductStages) index = 0, phase ^= 1;
  }
};

// The tiles of a cluster: all tokens of a head, then the next head's.
struct ProductTiles {
  int of_tokens, tiles;
};

__device__ __forceinline__ void copy_products(const QueryProductArgs& args, const CUtensorMap& x,
                                              const CUtensorMap& weights, ProductShared& s, const ProductTiles& all,
                                              int rank) {
  constexpr int kOwn = kProductRows / kProductCluster;
  constexpr uint32_t kStageBytes = (kProductRows + kProductColumns) * kRowBytes;
  ProductStage stage;
  for (int tile = blockIdx.x / kProductCluster; tile < all.tiles; tile += gridDim.x / kProductCluster) {
    const int row = tile % all.of_tokens * kProductRows + rank * kOwn;
    const int weight = tile / all.of_tokens * kDim + rank * kProductColumns;
    for (int column = 0; column < args.columns; column += kBlockColumns) {
      const uint32_t full = shared_address(&s.full[stage.index]);
      barrier_wait(shared_address(&s.empty[stage.index]), stage.phase ^ 1);
      barrier_expect(full, kStageBytes);
      copy_box_to_both(shared_address(s.tokens[stage.index]) + rank * kOwn * kRowBytes, x, column, row, full);
      copy_box(shared_address(s.weights[stage.index]), weights, column, weight, full);
      stage.advance();
    }
  }
}

// What a warp finishes: 16 tokens' sums of 256 columns, of which a lane has two rows.
struct ProductPart {
  int first_token, column;  // of the block's tile
  int rank, group, warp, lane;

  // Of the tile, the upper of the lane's rows.
  __device__ __forceinline__ int row() const { return group * kBlockRows + accumulator_row(warp, lane); }
  __device__ __forceinline__ uint32_t boxes(ProductShared& s) const {
    return shared_address(s.out[group * (kWarpgroup / kLanes) + warp]);
  }
};

// The angles of a lane's tokens. They are four bytes of a line to each lane, so they are asked for long before the
// products end: a load stays where it is written.
constexpr int kTurningCells = kRope / kCellColumns;
struct ProductAngles {
  float cosine[kTurningCells][2], sine[kTurningCells][2];

  __device__ __forceinline__ void load(const QueryProductArgs& args, const ProductPart& part) {
    const auto load_now = [](float& x, const float* p) {
      asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(x) : "l"(p));
    };
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = min(part.first_token + part.row() + kLowerRow * half, args.tokens - 1);
      const int64_t at = static_cast<int64_t>(token) * kRopePairs + quad_lane(part.lane);
#pragma unroll
      for (int cell = 0; cell < kTurningCells; ++cell) {
        load_now(cosine[cell][half], args.cosine + at + cell * (kCellColumns / 2));
        load_now(sine[cell][half], args.sine + at + cell * (kCellColumns / 2));
      }
    }
  }
  // Turns the pair of a cell, counted from the first that turns.
  __device__ __forceinline__ void turn_cell(float& even, float& odd, int cell, int half) const {
    turn<Rounding::kFused>(even, odd, cosine[cell][half], sine[cell][half]);
  }
};

constexpr int kProductCells = kProductColumns / kCellColumns, kBoxCells = kBlockColumns / kCellColumns;

// Two cells of both rows, as bf16, to where they leave for memory. `cell` of the warp's boxes.
__device__ __forceinline__ void stage_cells(uint32_t boxes, int cell, const Fragment& words, int lane) {
  const int row = within<2 * kSwizzle>(lane), second = over<2 * kSwizzle>(lane);
  const uint32_t box = boxes + cell / kBoxCells * kOutBoxBytes + row * kRowBytes;
  store_matrices(box + swizzled(cell % kBoxCells + second, row), words);
}
// Has the boxes free again, and sends them off.
__device__ __forceinline__ void wait_boxes(int lane) {
  if (lane == 0) store_wait_read();
  __syncwarp();
}
__device__ __forceinline__ void send_boxes(const CUtensorMap& out, ProductShared& s, const ProductPart& part,
                                           int column) {
  fence_for_mma();  // and for copies to memory
  __syncwarp();
  if (part.lane != 0) return;
  const int first = part.first_token + part.group * kBlockRows + part.warp * kWarpRows;
#pragma unroll
  for (int box = 0; box < kOutBoxes; ++box) {
    store_box(out, part.boxes(s) + box * kOutBoxBytes, part.column + column + box * kBlockColumns, first);
  }
  store_commit();
}

// A part of a warp's rows, as bf16.
constexpr int kPartCells = kOutBoxes * kBoxCells, kLastColumn = kProductColumns - kPartCells * kCellColumns;
using PartWords = uint32_t[2 * kPartCells];

__device__ __forceinline__ void store_part(const CUtensorMap& out, ProductShared& s, const ProductPart& part,
                                           const PartWords& words, int column) {
  wait_boxes(part.lane);
#pragma unroll
  for (int j = 0; j < kPartCells; j += 2) {
    stage_cells(part.boxes(s), j, {words[2 * j], words[2 * j + 1], words[2 * j + 2], words[2 * j + 3]}, part.lane);
  }
  send_boxes(out, s, part, column);
}

// Norm and RoPE of half a head of 512, and the store of all but its last part.
__device__ __forceinline__ void finish_half(const QueryProductArgs& args, const CUtensorMap& out, ProductShared& s,
                                            ProductSums& d, const ProductPart& part, const ProductAngles& angles,
                                            uint32_t phase, PartWords& last) {
  constexpr int kTurning = kProductCells - kTurningCells;
  const auto cell_of = [&](int j) { return d[j / (kProductCells / 2)] + j % (kProductCells / 2) * kCell; };
  const int other = part.rank ^ 1, row = part.row();
  const uint32_t summed = shared_address(&s.summed[part.group]);
  float squares[2][2] = {};  // of even and odd columns of the upper and lower row
#pragma unroll
  for (int j = 0; j < kProductCells; ++j) {
#pragma unroll
    for (int i = 0; i < kCell; ++i) {
      squares[i / 2][i % 2] = __fmaf_rn(cell_of(j)[i], cell_of(j)[i], squares[i / 2][i % 2]);
    }
  }
  float factor[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    factor[half] = lanes_sum<kQuad>(__fadd_rn(squares[half][0], squares[half][1]));
    const uint32_t to = shared_address(&s.squares[row + kLowerRow * half]);
    if (quad_lane(part.lane) == 0) send_float(peer_address(to, other), peer_address(summed, other), factor[half]);
  }
  barrier_wait(summed, phase);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = __fadd_rn(factor[half], s.squares[row + kLowerRow * half]);
    factor[half] = rsqrtf(__fmaf_rn(sum, 1.f / kDim, args.eps));
  }
#pragma unroll
  for (int first = 0; first < kProductCells; first += kPartCells) {
#pragma unroll
    for (int j = 0; j < 2 * kPartCells; ++j) {
      const int cell = first + j / 2, half = j % 2;
      float even = __fmul_rn(cell_of(cell)[2 * half], factor[half]);
      float odd = __fmul_rn(cell_of(cell)[2 * half + 1], factor[half]);
      if (cell >= kTurning && part.rank == 1) angles.turn_cell(even, odd, cell - kTurning, half);
      last[j] = bf16_pair(even, odd);
    }
    if (first + kPartCells < kProductCells) store_part(out, s, part, last, first * kCellColumns);
  }
}

// x @ H_128 / sqrt(128) of a lane's rows, stage by stage as in common/row_math.cuh: the same bits.
constexpr int kIndexCells = kIndexDim / kCellColumns;
__device__ __forceinline__ void hadamard_cells(Accumulator<kIndexDim>& x, int lane) {
  constexpr float kInverseRoot = 0.088388346f;
  constexpr int kNumbers = kIndexCells * kCell;
#pragma unroll
  for (int i = 0; i < kNumbers; i += 2) {
    const float a = x[i], b = x[i + 1];
    x[i] = a + b, x[i + 1] = a - b;
  }
#pragma unroll
  for (int distance = 1; distance < kQuad; distance *= 2) {
    const float sign = (lane & distance) != 0 ? -1.f : 1.f;
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) x[i] = __fmaf_rn(x[i], sign, __shfl_xor_sync(kAllLanes, x[i], distance));
  }
#pragma unroll
  for (int distance = kCell; distance < kNumbers; distance *= 2) {
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) {
      if ((i & distance) != 0) continue;
      const float a = x[i], b = x[i + distance];
      x[i] = a + b, x[i + distance] = a - b;
    }
  }
#pragma unroll
  for (int i = 0; i < kNumbers; ++i) x[i] *= kInverseRoot;
}

// What FP4 storage would make of a lane's rows, as in attend/queries_kernel.cuh.
__device__ __forceinline__ void round_cells(Accumulator<kIndexDim>& x) {
  constexpr int kGroupCells = kFp4Group / kCellColumns;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int first = 0; first < kIndexCells; first += kGroupCells) {
      float most = 0;
#pragma unroll
      for (int i = 0; i < 2 * kGroupCells; ++i) {
        most = max_nan(most, fabsf(x[kCell * (first + i / 2) + 2 * half + i % 2]));
      }
#pragma unroll
      for (int distance = 1; distance < kQuad; distance *= 2) {
        most = max_nan(most, __shfl_xor_sync(kAllLanes, most, distance));
      }
      const int k = scale_exponent(fmaxf(fminf(most, kMaxFloat), kFp4Floor), kE2m1Limit);
      const float scale = power_of_two(k), inverse = power_of_two(-k);
#pragma unroll
      for (int i = 0; i < 2 * kGroupCells; ++i) {
        float& y = x[kCell * (first + i / 2) + 2 * half + i % 2];
        const float rounded = round_e2m1(y, scale, inverse);
        y = most != most ? __uint_as_float(kFloatNaN) : rounded;
      }
    }
  }
}

// The last steps of two heads of 128, and the store.
__device__ __forceinline__ void finish_index(const QueryProductArgs& args, const CUtensorMap& out, ProductShared& s,
                                             ProductSums& d, const ProductPart& part, const ProductAngles& angles) {
  constexpr int kTurning = kIndexCells - kTurningCells, kHeadCells = kIndexCells;
#pragma unroll 1
  for (int head = 0; head < 2; ++head) {
    auto& x = d[0];
#pragma unroll
    for (int j = kTurning; j < kHeadCells; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        angles.turn_cell(x[kCell * j + 2 * half], x[kCell * j + 2 * half + 1], j - kTurning, half);
      }
    }
    if (args.hadamard != 0) hadamard_cells(x, part.lane);
    if (args.round_fp4 != 0) round_cells(x);
    constexpr bool kWhole = kProductParts == 1;  // both heads leave together
    if (head == 0 || !kWhole) wait_boxes(part.lane);
    const uint32_t boxes = part.boxes(s) + (kWhole ? head * (kOutBoxes / 2 * kOutBoxBytes) : 0);
#pragma unroll
    for (int j = 0; j < kHeadCells; j += 2) {
      Fragment words;
#pragma unroll
      for (int k = 0; k < kFragment; ++k) {
        const float* y = x + kCell * (j + k / 2) + 2 * (k % 2);
        words[k] = bf16_pair(y[0], y[1]);
      }
      stage_cells(boxes, j, words, part.lane);
    }
    if (head == 1 || !kWhole) send_boxes(out, s, part, kWhole ? 0 : head * kIndexDim);
    // A loop of few instructions: registers cannot be told apart by a number.
#pragma unroll
    for (int i = 0; i < kIndexCells * kCell; ++i) d[0][i] = d[1][i];
  }
}

template <int kWidth>
__device__ __forceinline__ void multiply_queries(const QueryProductArgs& args, const CUtensorMap& out, ProductShared& s,
                                                 const ProductTiles& all, int rank, int group, int warp, int lane) {
  constexpr int kSteps = kBlockColumns / kMmaDepth;
  const uint32_t other = peer_address(shared_address(s.empty), rank ^ 1);
  ProductStage stage;
  uint32_t turn = 0;
  const auto hand_back = [&](int index) {
    if (lane < kProductCluster)
      arrive_at((lane == 0 ? peer_address(shared_address(s.empty), rank) : other) + index * 8);
  };
  ProductPart part = {0, 0, rank, group, warp, lane};
  PartWords last;  // of the tile before
  bool any = false;
  for (int tile = blockIdx.x / kProductCluster; tile < all.tiles; tile += gridDim.x / kProductCluster) {
    if (kWidth == kDim && warp == 0 && lane == 0)
      barrier_expect(shared_address(&s.summed[group]), kBlockRows * sizeof(float));
    ProductSums d;
    int before = -1;
    const auto start = [&](int column) {
      barrier_wait(shared_address(&s.full[stage.index]), stage.phase);
      const uint64_t a = k_major(shared_address(s.tokens[stage.index]) + group * kBlockBytes);
      const uint64_t b = k_major(shared_address(s.weights[stage.index]));
      mma_fence();
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        constexpr int kUnits = kMmaBytes >> kDescriptorUnit;
        mma_64x256(d, a + i * kUnits, b + i * kUnits, column + i > 0);
      }
      mma_commit();
    };
    const auto wait_before = [&] {
      mma_wait<1>();
      if (before >= 0) hand_back(before);
      before = stage.index;
      stage.advance();
    };
    start(0), wait_before();
    start(kBlockColumns), wait_before();
    start(2 * kBlockColumns);
    if (kWidth == kDim && any) store_part(out, s, part, last, kLastColumn);
    wait_before();
    part.first_token = tile % all.of_tokens * kProductRows;
    part.column = tile / all.of_tokens * kDim + rank * kProductColumns;
    ProductAngles angles;
    if (kWidth != kDim || rank == 1) angles.load(args, part);
#pragma unroll 1
    for (int column = 3 * kBlockColumns; column < args.columns; column += kBlockColumns) start(column), wait_before();
    mma_wait<0>();
    hand_back(before);
#pragma unroll
    for (int i = 0; i < kProductColumns / 4; ++i) asm volatile("" : "+f"(d[0][i]), "+f"(d[1][i]));
    if constexpr (kWidth == kDim) {
      finish_half(args, out, s, d, part, angles, turn, last);
    } else {
      finish_index(args, out, s, d, part, angles);
    }
    turn ^= 1, any = true;
  }
  if (kWidth == kDim && any) store_part(out, s, part, last, kLastColumn);
  if (lane == 0) store_wait_read();
}

template <int kWidth>
__global__ void __launch_bounds__(kProductThreads, 1)
    query_product_kernel(const __grid_constant__ QueryProductArgs args, const __grid_constant__ CUtensorMap x,
                         const __grid_constant__ CUtensorMap weights, const __grid_constant__ CUtensorMap out,
                         const ProductTiles all) {
  let_next_start();
  extern __shared__ __align__(1024) uint8_t raw[];
  ProductShared& s = *reinterpret_cast<ProductShared*>(raw);
  const int thread = threadIdx.x, lane = lane_of(thread), rank = blockIdx.x % kProductCluster;
  const int warp = __shfl_sync(kAllLanes, warp_of(thread), 0), group = warp / (kWarpgroup / kLanes);
  if (thread == 0) {
    for (int i = 0; i < kProductStages; ++i) {
      barrier_init(shared_address(&s.full[i]), 1);
      barrier_init(shared_address(&s.empty[i]), kProductCluster * kProductWarps);
    }
    for (int i = 0; i < kProductGroups; ++i) barrier_init(shared_address(&s.summed[i]), 1);
    barrier_init_fence();
  }
  __syncthreads();
  cluster_sync();
  wait_for_previous();
  if (group == kProductGroups) {
    give_registers<kProductCopyRegisters>();
    if (thread == kProductGroups * kWarpgroup) copy_products(args, x, weights, s, all, rank);
    __syncwarp();
  } else {
    take_registers<kProductRegisters>();
    multiply_queries<kWidth>(args, out, s, all, rank, group, warp % (kWarpgroup / kLanes), lane);
  }
  cluster_sync();  // nothing arrives at a block that has ended
}

}  // namespace dsv4
