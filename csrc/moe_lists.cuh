// What goes before and after the products of moe.cu: rows of tokens by expert, and each token's sum over its experts.
//
// A pair is a token and one of its experts. The pairs of an expert fill groups of 8 rows; a group's rows lie in blocks of
// 64 columns, 1 KiB each, as the matrix units want them (hopper.cuh), the blocks one after the other along K.
// Which row a pair has changes no bit of its result.
#pragma once

#include "hopper.cuh"

namespace dsv4 {

constexpr int kGroupRows = 8;
constexpr int kAtomBytes = kGroupRows * 128;
constexpr int kMaxExperts = 512;  // of one device
constexpr int kListThreads = 256;
constexpr uint32_t kElsewhere = 0xFFFF;  // expert of a pair that another device computes

// Rows of one expert that one pass multiplies.
struct RowTile {
  int expert, group, rows, unused;
};

struct MoeArgs {
  const __nv_bfloat16* x;  // [T, hidden]
  const int32_t* chosen;   // [T, top] distinct experts
  const float* share;      // [T, top] their weights
  const uint8_t* gate_up;  // [experts, 2 * inter / 64, hidden / 128, 4352], packed; see moe_weights.cuh
  const uint8_t* down;     // [experts, hidden / 64, inter / 128, 4352]
  float* out;              // [T, hidden]
  uint8_t* work;           // as many bytes as dsv4_moe_workspace says
  int tokens, top, hidden, inter;
  int experts, first;  // those of this device: first .. first + experts - 1
  float limit;         // of the SwiGLU
};

// Where things lie in the workspace.
struct MoeWork {
  int32_t* tile_count;
  RowTile* tiles;
  int32_t* pairs;      // of a row
  uint8_t* rows;       // tokens' rows
  uint8_t* middle;     // rows between the products
  float* parts;        // [T * top, hidden] results of the experts
};

__host__ __device__ constexpr size_t aligned(size_t bytes) { return (bytes + 1023) / 1024 * 1024; }

// Groups that `pairs` can need: each expert's last one may hold a single row.
__host__ __device__ inline int most_groups(int pairs, int experts) {
  const int partly = pairs < experts ? pairs : experts;
  return (pairs - partly) / kGroupRows + partly;
}

__host__ __device__ inline MoeWork moe_work(const MoeArgs& args, size_t* bytes) {
  const int pairs = args.tokens * args.top;
  const size_t groups = most_groups(pairs, args.experts);
  const size_t sizes[] = {groups * sizeof(RowTile), groups * kGroupRows * 4, groups * kGroupRows * args.hidden * 2,
                          groups * kGroupRows * args.inter * 2, static_cast<size_t>(pairs) * args.hidden * 4};
  size_t at[6] = {1024};
  for (int i = 0; i < 5; ++i) at[i + 1] = at[i] + aligned(sizes[i]);
  if (bytes != nullptr) *bytes = at[5];
  uint8_t* w = args.work;
  return {reinterpret_cast<int32_t*>(w), reinterpret_cast<RowTile*>(w + at[0]), reinterpret_cast<int32_t*>(w + at[1]),
          w + at[2], w + at[3], reinterpret_cast<float*>(w + at[4])};
}

// Byte of 16-byte chunk `chunk` of a row among rows of `columns` columns.
__device__ __forceinline__ size_t chunk_place(int group, int row, int chunk, int columns) {
  return (static_cast<size_t>(group) * (columns / 64) + chunk / 8) * kAtomBytes + row * 128 + ((chunk % 8 ^ row) << 4);
}

__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Bytes of shared memory of moe_lists_kernel.
inline int list_bytes(int pairs) { return (pairs + 7) / 8 * 16; }

// Every block counts all pairs and places some of them, a warp each. The first block writes the tiles of the products:
// runs of at most `tile_rows` rows of an expert.
__global__ void __launch_bounds__(kListThreads) moe_lists_kernel(const __grid_constant__ MoeArgs args, int tile_rows) {
  extern __shared__ uint4 shared_experts[];
  __shared__ int count[kMaxExperts], first_group[kMaxExperts];
  let_next_start();
  const int pairs = args.tokens * args.top, lane = threadIdx.x & 31;
  const int warp = blockIdx.x * (kListThreads / 32) + (threadIdx.x >> 5), warps = gridDim.x * (kListThreads / 32);
  const MoeWork work = moe_work(args, nullptr);
  auto* experts = reinterpret_cast<uint16_t*>(shared_experts);
  for (int e = threadIdx.x; e < args.experts; e += kListThreads) count[e] = 0;
  __syncthreads();
  for (int p = threadIdx.x; p < (pairs + 7) / 8 * 8; p += kListThreads) {
    const int e = p < pairs ? __ldg(args.chosen + p) - args.first : -1;
    const bool here = e >= 0 && e < args.experts;
    experts[p] = static_cast<uint16_t>(here ? e : kElsewhere);
    if (here) atomicAdd(count + e, 1);
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    // Each lane a run of experts: groups in the low half, tiles in the high half.
    const int each = (args.experts + 31) / 32, from = lane * each, to = min(from + each, args.experts);
    int2 sum = {0, 0};
    for (int e = from; e < to; ++e) {
      sum.x += (count[e] + kGroupRows - 1) / kGroupRows;
      sum.y += (count[e] + tile_rows - 1) / tile_rows;
    }
    int2 before = sum;
    for (int step = 1; step < 32; step *= 2) {
      const int x = __shfl_up_sync(~0u, before.x, step), y = __shfl_up_sync(~0u, before.y, step);
      if (lane >= step) before.x += x, before.y += y;
    }
    if (blockIdx.x == 0 && lane == 31) *work.tile_count = before.y;
    before.x -= sum.x, before.y -= sum.y;
    for (int e = from; e < to; ++e) {
      first_group[e] = before.x;
      for (int row = 0; row < count[e]; row += tile_rows) {
        const RowTile tile = {e, before.x + row / kGroupRows, min(tile_rows, count[e] - row), 0};
        if (blockIdx.x == 0) work.tiles[before.y] = tile;
        ++before.y;
      }
      before.x += (count[e] + kGroupRows - 1) / kGroupRows;
    }
  }
  __syncthreads();
  const int chunks = args.hidden / 8;
  for (int p = warp; p < pairs; p += warps) {
    const uint32_t e = experts[p];
    if (e == kElsewhere) continue;
    // The pair's place among its expert's, eight pairs before it at a time.
    uint32_t equal = 0;
    for (int i = lane; i <= p / 8; i += 32) {
      const uint4 x = shared_experts[i];
      const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        equal += (words[w] & 0xFFFF) == e && 8 * i + 2 * w < p;
        equal += words[w] >> 16 == e && 8 * i + 2 * w + 1 < p;
      }
    }
    const int place = __reduce_add_sync(~0u, equal);
    const int group = first_group[e] + place / kGroupRows, row = place % kGroupRows;
    if (lane == 0) work.pairs[group * kGroupRows + row] = p;
    const auto* from = reinterpret_cast<const uint4*>(args.x + static_cast<size_t>(p / args.top) * args.hidden);
#pragma unroll 8
    for (int c = lane; c < chunks; c += 32) {
      *reinterpret_cast<uint4*>(work.rows + chunk_place(group, row, c, args.hidden)) = __ldg(from + c);
    }
  }
}

constexpr int kSumThreads = 128;
constexpr int kMostTop = 16;  // experts of a token

// Each token's experts' results times their shares, added in the order of the experts. A thread has four columns.
__global__ void __launch_bounds__(kSumThreads) moe_sum_kernel(const __grid_constant__ MoeArgs args) {
  __shared__ int order[kMostTop];
  __shared__ float shares[kMostTop];
  const int token = blockIdx.y;
  if (threadIdx.x < args.top) {
    const int32_t* chosen = args.chosen + token * args.top;
    const int mine = __ldg(chosen + threadIdx.x);
    int place = 0;
    for (int k = 0; k < args.top; ++k) {
      const int other = __ldg(chosen + k);
      place += other < mine || (other == mine && k < static_cast<int>(threadIdx.x));
    }
    const bool here = mine >= args.first && mine < args.first + args.experts;
    order[place] = here ? static_cast<int>(threadIdx.x) : -1;
    shares[place] = __ldg(args.share + token * args.top + threadIdx.x);
  }
  __syncthreads();
  wait_for_previous();
  const int column = 4 * (blockIdx.x * kSumThreads + threadIdx.x);
  if (column >= args.hidden) return;
  const float* parts = moe_work(args, nullptr).parts + static_cast<size_t>(token) * args.top * args.hidden + column;
  float4 sum = {0, 0, 0, 0};
#pragma unroll 8
  for (int i = 0; i < args.top; ++i) {
    if (order[i] < 0) continue;
    const float4 y = __ldcs(reinterpret_cast<const float4*>(parts + static_cast<size_t>(order[i]) * args.hidden));
    const float w = shares[i];
    sum = {fmaf(w, y.x, sum.x), fmaf(w, y.y, sum.y), fmaf(w, y.z, sum.z), fmaf(w, y.w, sum.w)};
  }
  *reinterpret_cast<float4*>(args.out + static_cast<size_t>(token) * args.hidden + column) = sum;
}

}  // namespace dsv4
