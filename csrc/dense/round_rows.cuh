// Rows of bf16 as e4m3 with a power-of-two scale for every 128 columns (dense/round_eight.cuh), and the scales as the
// products read them: by blocks of columns, rows next to each other.
#pragma once

#include "common/overlap.cuh"
#include "dense/round_eight.cuh"

namespace dsv4 {

struct RoundRowsArgs {
  const __nv_bfloat16* x;  // [rows, columns]
  uint8_t* codes;          // [rows, columns]
  float* scales;           // [columns / 128, pitch]: zeros from `rows` on
  int rows, pitch, columns;
};

constexpr int kRoundThreads = 128;
constexpr int kRoundRows = 4;  // of a thread

// Each source that launches it has its own. Grid: columns in 1,024s, so that blocks side by side read rows on; rows in
// fours up to the pitch. A thread has its columns of four rows, asked for together.
static __global__ void __launch_bounds__(kRoundThreads) round_rows_kernel(const __grid_constant__ RoundRowsArgs args) {
  let_next_start();
  wait_for_previous();
  const int column = (blockIdx.x * kRoundThreads + threadIdx.x) * kRoundOwn;
  if (column >= args.columns) return;  // whole groups of 16 threads: columns are in 128s
  const bool first = within<kRoundSharers>(threadIdx.x) == 0;
  const int row = blockIdx.y * kRoundRows;
  uint4 words[kRoundRows] = {};
#pragma unroll
  for (int r = 0; r < kRoundRows; ++r) {
    if (row + r < args.rows)
      words[r] = __ldcs(reinterpret_cast<const uint4*>(args.x + static_cast<size_t>(row + r) * args.columns + column));
  }
#pragma unroll
  for (int r = 0; r < kRoundRows; ++r) {
    if (row + r >= args.pitch) return;
    float* const scale = args.scales + static_cast<size_t>(column / kRoundGroup) * args.pitch + row + r;
    if (row + r >= args.rows) {
      if (first) *scale = 0.f;
      continue;
    }
    uint2 codes;
    const int exponent = round_eight(words[r], codes);
    *reinterpret_cast<uint2*>(args.codes + static_cast<size_t>(row + r) * args.columns + column) = codes;
    if (first) *scale = power_of_two(exponent);
  }
}

static inline cudaError_t round_rows(const RoundRowsArgs& args, cudaStream_t stream) {
  constexpr int kBlock = kRoundThreads * kRoundOwn;
  const dim3 grid((args.columns + kBlock - 1) / kBlock, (args.pitch + kRoundRows - 1) / kRoundRows);
  return start(round_rows_kernel, {grid, kRoundThreads}, follows, stream, args);
}

}  // namespace dsv4
