// top_k's row of scores: how it is dealt out and loaded, what stands for a score, and sums over a block.
#pragma once

#include "hopper.cuh"

namespace dsv4 {

constexpr int kTopThreads = 512;
constexpr int kTopMax = 1024;                // largest k
constexpr int kTopCluster = 8;               // largest portable cluster
constexpr int kTopChunk = 4 * kTopThreads;   // consecutive scores that a block loads at once, and most candidates
constexpr int kTopVectors = 16;              // most chunks of a block
constexpr int kTopBins = 4 * kTopThreads, kTopBinBits = 11;
constexpr int kTopCodeBits = 30;
constexpr int kTopCrowd = 512;               // most candidates of a bin that count each other
constexpr int kTopIndexBits = 18, kTopPlaceBits = 50;
constexpr uint64_t kTopNone = ~uint64_t{0};  // no candidate; behind all

struct TopKArgs {
  const float* scores;   // [T, S]
  const int32_t* count;  // [T]
  int32_t* indices;      // [T, k]
  int32_t* kept;         // [T]
  int width, k;          // S <= 262,144, k <= min(S, 1024)
};

struct TopKShared {
  uint32_t columns[2 * kTopBins];         // histogram of the columns, then its running sums; the radix histograms
  uint32_t bins[kTopBins];                // histogram of the candidates, then where the next of each bin goes
  uint2 candidates[kTopChunk];            // score, index; the sort's buffer
  uint64_t grouped[kTopMax + kTopCrowd];  // candidates by bin: bin, rank, index
  uint32_t sums[2][32];
  uint32_t best[32];                      // least code of each warp
  uint32_t reach[kTopCluster];            // of each block: the bin by which it has its share of k,
  uint32_t block_best[kTopCluster];       // its least code,
  uint32_t counts[kTopCluster];           // how many it lists
  uint32_t bound, taken, crowded[2];      // bin of the bound; how many this block lists; whether a bin has too many
  uint32_t digit, below, inside;          // of the bin with the k-th: its number, scores in bins before it and in it
  uint2 gathered[kTopChunk];              // all blocks' candidates: of a cluster only
};

// Greater scores have lesser ranks; -0 counts as 0, NaN as -inf.
__device__ __forceinline__ uint32_t rank_of(float x) {
  const uint32_t bits = __float_as_uint(x == 0.f ? 0.f : x);
  const uint32_t rank = bits ^ (static_cast<uint32_t>(~static_cast<int32_t>(bits) >> 31) & 0x7FFFFFFFu);
  return x != x ? 0xFF800000u : rank;
}

// Rank above, index below: the order of the result.
__device__ __forceinline__ uint64_t place_of(float x, uint32_t index) {
  return static_cast<uint64_t>(rank_of(x)) << kTopIndexBits | index;
}

// A score that is not NaN in 30 bits, greater ones first. Magnitudes below 2^-31 or from 2^33 are as one; -0 is
// behind 0.
__device__ __forceinline__ uint32_t code_of(float x) {
  const int32_t bits = __float_as_int(x);
  const uint32_t magnitude = max(min(bits & 0x7FFFFFFF, 0x4FFFFFFF) - 0x30000000, 0);
  return (magnitude ^ static_cast<uint32_t>(bits >> 31) ^ 0x1FFFFFFFu) & 0x3FFFFFFFu;
}
// The least score whose code is at most `code`, for any code but the last.
__device__ __forceinline__ float score_at(uint32_t code) {
  if (code == 0x1FFFFFFFu) return 0.f;
  return __uint_as_float(code < 0x20000000u ? (code + 0x30000000u) ^ 0x7FFFFFFFu : code + 0x90000000u);
}

__device__ __forceinline__ uint64_t load_peer_long(uint32_t address) {
  uint64_t x;
  asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(x) : "r"(address) : "memory");
  return x;
}
__device__ __forceinline__ uint32_t load_peer1(uint32_t address) {
  uint32_t x;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}
__device__ __forceinline__ void store_peer1(uint32_t address, uint32_t x) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// atomicAdd in shared memory by one lane of a warp; the compiler would add up the warp's lanes first.
__device__ __forceinline__ uint32_t add_shared(uint32_t address, uint32_t x) {
  uint32_t before;
  asm volatile("atom.shared.add.u32 %0, [%1], %2;" : "=r"(before) : "r"(address), "r"(x) : "memory");
  return before;
}

// Barrier of the cluster; of the block if it is alone.
template <int kBlocks>
__device__ __forceinline__ void meet() {
  if (kBlocks == 1) {
    __syncthreads();
  } else {
    cluster_sync();
  }
}

// Sum up to and including this lane.
__device__ __forceinline__ uint32_t warp_sums(uint32_t x, int lane) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const uint32_t y = __shfl_up_sync(~0u, x, d);
    if (lane >= d) x += y;
  }
  return x;
}

// Exclusive sum over the block in thread order. `sums` was last read before a barrier.
__device__ __forceinline__ uint32_t block_sums(uint32_t (&sums)[32], uint32_t x, int thread) {
  const int lane = thread & 31, warp = thread >> 5;
  const uint32_t sum = warp_sums(x, lane);
  if (lane == 31) sums[warp] = sum;
  __syncthreads();
  return __reduce_add_sync(~0u, lane < warp ? sums[lane] : 0) + sum - x;
}

// Index of the first of the four scores of a thread in vector i.
template <int kBlocks>
__device__ __forceinline__ int index_of(int i, int rank, int thread) {
  return kTopChunk * (i * kBlocks + rank) + 4 * thread;
}

// Four or one where `exists`, without a branch, so that loads follow one another.
__device__ __forceinline__ void load_if(bool exists, const float* from, float4& v) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %4, 0;\n@p ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%5];}"
               : "+f"(v.x), "+f"(v.y), "+f"(v.z), "+f"(v.w)
               : "r"(static_cast<int>(exists)), "l"(from));
}
__device__ __forceinline__ void load_if(bool exists, const float* from, float& x) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %1, 0;\n@p ld.global.nc.f32 %0, [%2];}"
               : "+f"(x)
               : "r"(static_cast<int>(exists)), "l"(from));
}

// This thread's scores of kVectors vectors from `vector` on; -inf from `count` on. Reads nothing from `limit` on,
// rounded up to a multiple of four.
template <int kVectors, int kBlocks>
__device__ __forceinline__ void load_scores(float (&x)[4 * kVectors], const float* row, int width, int limit, int count,
                                            int vector, int rank, int thread) {
  float4 v[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) v[i] = make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
  if ((width & 3) == 0) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int at = index_of<kBlocks>(vector + i, rank, thread);
      load_if(at < limit, row + at, v[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int at = index_of<kBlocks>(vector + i, rank, thread);
      load_if(at < limit, row + at, v[i].x);
      load_if(at + 1 < limit, row + at + 1, v[i].y);
      load_if(at + 2 < limit, row + at + 2, v[i].z);
      load_if(at + 3 < limit, row + at + 3, v[i].w);
    }
  }
  const bool all = index_of<kBlocks>(vector + kVectors - 1, rank, thread) + 4 <= count;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    x[4 * i] = v[i].x, x[4 * i + 1] = v[i].y, x[4 * i + 2] = v[i].z, x[4 * i + 3] = v[i].w;
  }
  if (all) return;
#pragma unroll
  for (int i = 0; i < 4 * kVectors; ++i) {
    if (index_of<kBlocks>(vector + i / 4, rank, thread) + i % 4 >= count) x[i] = -INFINITY;
  }
}

}  // namespace dsv4
