// Products with a bf16 matrix of few rows (the router's gate) as an XLA FFI handler: one launch, only enqueues: fit for
// a command buffer. Wrapper and arguments: dsv4_jax/cuda/dense_bf16.py.
//
// A block takes eight of the weights' rows, a warp 512 of their columns, which it keeps in registers, asked for before
// the previous kernel's end. Tokens are multiplied by sixteens: M are tokens, N the weights' rows. Every number is one
// sum in one order, whatever the other tokens are: of 512 columns four chains of products, added up in pairs; and those
// sums one after the other. So of many tokens a block can have 64 by 64 numbers and the same bits, each warp all
// columns of 16 tokens and 32 rows of the weights, from a ring in shared memory.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "common/handler.h"
#include "common/hopper.cuh"
#include "common/lanes.cuh"
#include "common/overlap.cuh"

namespace dsv4 {

constexpr int kGateRows = 8;                            // of the weights, of a block
constexpr int kGateTokens = 16;                         // of a product
constexpr int kGateTiles = 4;                           // of tokens, of a block
constexpr int kGateColumns = 512;                       // of a warp
constexpr int kGateLoads = kGateColumns / (8 * kQuad);  // of 16 bytes, of a lane's row
constexpr int kGateWarps = 16;                          // at most
constexpr int kGateChains = 4;                          // of products
constexpr int kGateCells = kGateTokens * kGateRows;     // numbers of a tile

struct DenseBf16Args {
  const __nv_bfloat16* x;        // [tokens, columns]
  const __nv_bfloat16* weights;  // [rows, columns]
  float* out;                    // [tokens, rows]
  int tokens, rows, columns;
};

__device__ __forceinline__ void mma_bf16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                         uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Grid: eights of the weights' rows, tiles of tokens. Lane 4 n + c has the 16 bytes c of 64 of row n: of the weights,
// and of tokens n and n + 8. Which columns a product takes together is the same for both.
template <int kWarps>
__global__ void __launch_bounds__(kWarps* kLanes) dense_bf16_kernel(const __grid_constant__ DenseBf16Args args) {
  __shared__ float sums[kWarps][kGateCells];
  const int lane = lane_of(threadIdx.x), warp = warp_of(threadIdx.x), n = quad_of(lane), c = quad_lane(lane);
  constexpr int kStep = kQuad;  // loads from one to the next of a lane
  const auto row = [&](const __nv_bfloat16* matrix, int i) {
    return reinterpret_cast<const uint4*>(matrix + static_cast<size_t>(i) * args.columns + warp * kGateColumns) + c;
  };
  let_next_start();
  uint4 w[kGateLoads];
  const uint4* weights = row(args.weights, blockIdx.x * kGateRows + n);
#pragma unroll
  for (int i = 0; i < kGateLoads; ++i) w[i] = __ldg(weights + i * kStep);
  wait_for_previous();
  const int first = blockIdx.y * kGateTiles * kGateTokens, last = min(args.tokens, first + kGateTiles * kGateTokens);
  for (int token = first; token < last; token += kGateTokens) {
    const bool upper = token + n < last, lower = token + n + kGateTokens / 2 < last;
    const uint4 *x = row(args.x, upper ? token + n : token),
                *y = row(args.x, lower ? token + n + kGateTokens / 2 : token);
    float d[kGateChains][4] = {};
    constexpr int kAtOnce = kWarps <= 12 ? 8 : 4;  // with which registers suffice
#pragma unroll
    for (int part = 0; part < kGateLoads / kAtOnce; ++part) {
      uint4 a[kAtOnce], b[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        a[i] = upper ? x[(part * kAtOnce + i) * kStep] : uint4{};
        b[i] = lower ? y[(part * kAtOnce + i) * kStep] : uint4{};
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const uint4& v = w[part * kAtOnce + i];
        mma_bf16(d[2 * i % kGateChains], a[i].x, b[i].x, a[i].y, b[i].y, v.x, v.y);
        mma_bf16(d[(2 * i + 1) % kGateChains], a[i].z, b[i].z, a[i].w, b[i].w, v.z, v.w);
      }
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int cell = (n + k / 2 * (kGateTokens / 2)) * kGateRows + 2 * c + k % 2;
      sums[warp][cell] = (d[0][k] + d[1][k]) + (d[2][k] + d[3][k]);
    }
    __syncthreads();
    if (threadIdx.x < kGateCells) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kWarps; ++i) sum += sums[i][threadIdx.x];
      const int at = token + over<kGateRows>(threadIdx.x);
      if (at < last)
        args.out[static_cast<size_t>(at) * args.rows + blockIdx.x * kGateRows + within<kGateRows>(threadIdx.x)] = sum;
    }
    __syncthreads();
  }
}

constexpr int kManyTile = 64;     // tokens, and rows of the weights, of a block
constexpr int kManyColumns = 64;  // of a stage
constexpr int kManyStages = 4;
constexpr int kManyThreads = 256;
constexpr int kManyCells = 4;                    // of eight rows of the weights, of a warp
constexpr int kManyRowBytes = kManyColumns * 2;  // of a stage
constexpr int kManyChunks = kManyRowBytes / kChunkBytes;
constexpr int kManyTileBytes = kManyTile * kManyRowBytes, kManyBytes = 2 * kManyStages * kManyTileBytes;
constexpr int kManyLeast = 256;  // tokens from which on it is faster

// Where a stage has a row's 16 bytes `chunk`: a pair of rows fills all banks.
__device__ __forceinline__ uint32_t many_place(int row, int chunk) {
  return row * kManyRowBytes + (chunk ^ (row & 1) * (kManyChunks / 2)) * kChunkBytes;
}

// Grid: tiles of tokens, tiles of the weights' rows.
__global__ void __launch_bounds__(kManyThreads) dense_bf16_many_kernel(const __grid_constant__ DenseBf16Args args) {
  extern __shared__ __align__(128) uint8_t dynamic[];
  const uint32_t ring = shared_address(dynamic);
  const int lane = lane_of(threadIdx.x), warp = warp_of(threadIdx.x), n = quad_of(lane), c = quad_lane(lane);
  const int first_token = blockIdx.x * kManyTile, first_row = blockIdx.y * kManyTile;
  const int stages = args.columns / kManyColumns;
  let_next_start();
  wait_for_previous();
  const auto copy_stage = [&](int stage) {
    const uint32_t to = ring + stage % kManyStages * 2 * kManyTileBytes;
    constexpr int kRowsAtOnce = kManyThreads / kManyChunks;
    const int chunk = threadIdx.x % kManyChunks;
#pragma unroll
    for (int i = 0; i < kManyTile / kRowsAtOnce; ++i) {
      const int row = i * kRowsAtOnce + threadIdx.x / kManyChunks, token = first_token + row;
      const bool there = token < args.tokens;
      const size_t column = static_cast<size_t>(stage) * kManyColumns + chunk * (kChunkBytes / 2);
      copy_async(to + many_place(row, chunk), args.x + static_cast<size_t>(there ? token : 0) * args.columns + column,
                 there);
      copy_async(to + kManyTileBytes + many_place(row, chunk),
                 args.weights + static_cast<size_t>(first_row + row) * args.columns + column, true);
    }
  };
  for (int stage = 0; stage < kManyStages - 1; ++stage) {
    if (stage < stages) copy_stage(stage);
    copy_commit();
  }
  const int token = warp / 2 * kGateTokens, row = warp % 2 * kManyCells * kGateRows;  // the warp's first in the tile
  float sums[kManyCells][4] = {}, d[kManyCells][kGateChains][4] = {};
  for (int stage = 0; stage < stages; ++stage) {
    copy_wait<kManyStages - 2>();
    __syncthreads();
    if (stage + kManyStages - 1 < stages) copy_stage(stage + kManyStages - 1);
    copy_commit();
    const uint32_t x = ring + stage % kManyStages * 2 * kManyTileBytes, weights = x + kManyTileBytes;
#pragma unroll
    for (int i = 0; i < kManyChunks / kQuad; ++i) {
      const uint4 a = load_shared(x + many_place(token + n, i * kQuad + c));
      const uint4 b = load_shared(x + many_place(token + n + kGateTokens / 2, i * kQuad + c));
#pragma unroll
      for (int m = 0; m < kManyCells; ++m) {
        const uint4 v = load_shared(weights + many_place(row + m * kGateRows + n, i * kQuad + c));
        mma_bf16(d[m][2 * i % kGateChains], a.x, b.x, a.y, b.y, v.x, v.y);
        mma_bf16(d[m][(2 * i + 1) % kGateChains], a.z, b.z, a.w, b.w, v.z, v.w);
      }
    }
    if ((stage + 1) % (kGateColumns / kManyColumns) != 0) continue;
#pragma unroll
    for (int m = 0; m < kManyCells; ++m) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        sums[m][k] += (d[m][0][k] + d[m][1][k]) + (d[m][2][k] + d[m][3][k]);
#pragma unroll
        for (int chain = 0; chain < kGateChains; ++chain) d[m][chain][k] = 0;
      }
    }
  }
#pragma unroll
  for (int m = 0; m < kManyCells; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = first_token + token + n + half * (kGateTokens / 2);
      if (at >= args.tokens) continue;
      float* const to = args.out + static_cast<size_t>(at) * args.rows + first_row + row + m * kGateRows + 2 * c;
      *reinterpret_cast<float2*>(to) = make_float2(sums[m][2 * half], sums[m][2 * half + 1]);
    }
  }
}

namespace {

namespace ffi = xla::ffi;

cudaError_t launch_many(const DenseBf16Args& args, cudaStream_t stream) {
  const dim3 grid((args.tokens + kManyTile - 1) / kManyTile, args.rows / kManyTile);
  return start(dense_bf16_many_kernel, {grid, kManyThreads, kManyBytes}, follows, stream, args);
}

template <int kWarps = kGateWarps>
cudaError_t launch_with(const DenseBf16Args& args, cudaStream_t stream) {
  constexpr int kFewest = kGateCells / kLanes;
  if constexpr (kWarps > kFewest) {
    if (args.columns != kWarps * kGateColumns) return launch_with<kWarps - 2>(args, stream);
  }
  if (args.columns != kWarps * kGateColumns) return cudaErrorInvalidValue;
  constexpr int kTokens = kGateTiles * kGateTokens;
  const dim3 grid(args.rows / kGateRows, (args.tokens + kTokens - 1) / kTokens);
  return start(dense_bf16_kernel<kWarps>, {grid, kWarps * kLanes}, follows, stream, args);
}

using Matrix = ffi::Buffer<ffi::BF16, 2>;
using Products = ffi::Buffer<ffi::F32, 2>;

ffi::Error dense_bf16(cudaStream_t stream, Matrix x, Matrix weights, ffi::Result<Products> out) {
  const int64_t tokens = x.dimensions()[0], columns = x.dimensions()[1], rows = weights.dimensions()[0];
  constexpr int64_t kMaxTokens = 1 << 21;  // the grid's second axis
  constexpr int64_t kStep = 2 * kGateColumns, kLeast = kGateCells / kLanes * kGateColumns,
                    kMost = kGateWarps * kGateColumns;
  if (const ffi::Error error = check(
          "dense_bf16",
          {{"x", x, {tokens, columns}},
           {"weights", weights, {rows, columns}},
           {"out", *out, {tokens, rows}, kElements}},
          {{rows % kGateRows == 0 && rows <= INT32_MAX, "weights must have rows in eights"},
           {columns % kStep == 0 && columns >= kLeast && columns <= kMost, "2048 to 8192 columns in steps of 1024"},
           {tokens <= kMaxTokens, "more than 2^21 tokens"}});
      error.failure())
    return error;
  if (tokens == 0 || rows == 0) return ffi::Error::Success();
  const DenseBf16Args args = {reinterpret_cast<const __nv_bfloat16*>(x.untyped_data()),
                              reinterpret_cast<const __nv_bfloat16*>(weights.untyped_data()),
                              out->typed_data(),
                              static_cast<int>(tokens),
                              static_cast<int>(rows),
                              static_cast<int>(columns)};
  const bool many = tokens >= kManyLeast && rows % kManyTile == 0 && aligned_to(out->untyped_data());
  return launched("dense_bf16", many ? launch_many(args, stream) : launch_with(args, stream));
}

}  // namespace

DSV4_HANDLER(dense_bf16, dsv4_dense_bf16, dense_bf16, on_stream().Arg<Matrix>().Arg<Matrix>().Ret<Products>());

}  // namespace dsv4
