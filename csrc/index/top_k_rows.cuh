// top_k's row of scores: how it is dealt out and loaded, what stands for a score, and sums over a block.
#pragma once

#include "common/hopper.cuh"

namespace dsv4 {

constexpr int kTopThreads = 512;
constexpr int kTopMax = 1024;  // largest k
constexpr int kTopCluster = kMaxCluster;
constexpr int kTopWarps = kTopThreads / kLanes;
constexpr int kFour = 4;                        // scores of a load, and columns of a thread
constexpr int kTopChunk = kFour * kTopThreads;  // consecutive scores that a block loads at once, and most candidates
constexpr int kTopVectors = 16;                 // most chunks of a block
constexpr int kTopBins = kFour * kTopThreads, kTopBinBits = 11;
constexpr int kTopCodeBits = 30;
constexpr int kTopCrowd = 512;  // most candidates of a bin that count each other
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
  uint32_t sums[2][kLanes];
  uint32_t best[kLanes];              // least code of each warp
  uint32_t reach[kTopCluster];        // of each block: the bin by which it has its share of k,
  uint32_t block_best[kTopCluster];   // its least code,
  uint32_t counts[kTopCluster];       // how many it lists
  uint32_t bound, taken, crowded[2];  // bin of the bound; how many this block lists; whether a bin has too many
  uint32_t digit, below, inside;      // of the bin with the k-th: its number, scores in bins before it and in it
  uint2 gathered[kTopChunk];          // all blocks' candidates: of a cluster only
};

constexpr int kSignBit = 31;
constexpr uint32_t kMagnitude = 0x7FFFFFFF, kRankOfNaN = 0xFF800000;

// Greater scores have lesser ranks; -0 counts as 0, NaN as -inf.
__device__ __forceinline__ uint32_t rank_of(float x) {
  const uint32_t bits = __float_as_uint(x == 0.f ? 0.f : x);
  const uint32_t rank = bits ^ (static_cast<uint32_t>(~static_cast<int32_t>(bits) >> kSignBit) & kMagnitude);
  return x != x ? kRankOfNaN : rank;
}

// Rank above, index below: the order of the result.
__device__ __forceinline__ uint64_t place_of(float x, uint32_t index) {
  return static_cast<uint64_t>(rank_of(x)) << kTopIndexBits | index;
}

constexpr int kLeastCoded = 0x30000000, kMaxCoded = 0x4FFFFFFF;  // the bits of 2^-31 and below 2^33
constexpr uint32_t kCodeOfZero = 0x1FFFFFFF;
// A score that is not NaN in 30 bits, greater ones first. Magnitudes below 2^-31 or from 2^33 are as one; -0 is
// behind 0.
__device__ __forceinline__ uint32_t code_of(float x) {
  const int32_t bits = __float_as_int(x);
  const uint32_t magnitude = max(min(bits & static_cast<int>(kMagnitude), kMaxCoded) - kLeastCoded, 0);
  return (magnitude ^ static_cast<uint32_t>(bits >> kSignBit) ^ kCodeOfZero) & ((1u << kTopCodeBits) - 1);
}
// The least score whose code is at most `code`, for any code but the last.
__device__ __forceinline__ float score_at(uint32_t code) {
  constexpr uint32_t kNegative = (1u << kSignBit) + kLeastCoded - (kCodeOfZero + 1);
  if (code == kCodeOfZero) return 0.f;
  return __uint_as_float(code < kCodeOfZero + 1 ? (code + kLeastCoded) ^ kMagnitude : code + kNegative);
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
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

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

// Exclusive sum over the block in thread order. `sums` was last read before a barrier.
__device__ __forceinline__ uint32_t block_sums(uint32_t (&sums)[kLanes], uint32_t x, int thread) {
  const int lane = lane_of(thread), warp = warp_of(thread);
  const uint32_t sum = running_sum(x, lane);
  if (lane == kLanes - 1) sums[warp] = sum;
  __syncthreads();
  return __reduce_add_sync(kAllLanes, lane < warp ? sums[lane] : 0) + sum - x;
}

// Index of the first of the four scores of a thread in vector i.
template <int kBlocks>
__device__ __forceinline__ int index_of(int i, int rank, int thread) {
  return kTopChunk * (i * kBlocks + rank) + kFour * thread;
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
__device__ __forceinline__ void load_scores(float (&x)[kFour * kVectors], const float* row, int width, int limit,
                                            int count, int vector, int rank, int thread) {
  float4 v[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) v[i] = make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
  if (width % kFour == 0) {
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
  const bool all = index_of<kBlocks>(vector + kVectors - 1, rank, thread) + kFour <= count;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    float* four = x + kFour * i;
    four[0] = v[i].x, four[1] = v[i].y, four[2] = v[i].z, four[3] = v[i].w;
  }
  if (all) return;
#pragma unroll
  for (int i = 0; i < kFour * kVectors; ++i) {
    if (index_of<kBlocks>(vector + i / kFour, rank, thread) + i % kFour >= count) x[i] = -INFINITY;
  }
}

// A thread's scores.
template <int kVectors>
struct HeldScores {
  float x[kFour * kVectors];

  // The greatest of each column.
  __device__ __forceinline__ void columns(float (&column)[kFour]) const {
#pragma unroll
    for (int j = 0; j < kFour; ++j) column[j] = -INFINITY;
#pragma unroll
    for (int i = 0; i < kFour * kVectors; ++i) column[i % kFour] = fmaxf(column[i % kFour], x[i]);
  }
  // Which of the scores are `edge` or greater, as bits. Edges end bins.
  __device__ __forceinline__ uint64_t reaching(float edge) const {
    uint64_t chosen = 0;
#pragma unroll
    for (int i = 0; i < kFour * kVectors; ++i) {
      if (x[i] >= edge) chosen |= uint64_t{1} << i;
    }
    return chosen;
  }
};

// The same of a row that a block has for itself, in half the registers: of the scores the upper halves are kept. Bins
// are made of fewer bits than these, so that they tell as well on which side of a bin's end a score is.
template <int kVectors>
struct HeldHalves {
  static constexpr int kAtOnce = kVectors < kTopVectors ? 2 : 4;  // vectors
  static_assert(kTopBinBits <= 14, "bits of a code that upper halves have");

  uint32_t pairs[kFour / 2 * kVectors];
  float most[kFour];  // of each column

  __device__ __forceinline__ void load(const float* row, int width, int count, int thread) {
#pragma unroll
    for (int j = 0; j < kFour; ++j) most[j] = -INFINITY;
#pragma unroll
    for (int vector = 0; vector < kVectors; vector += kAtOnce) {
      float x[kFour * kAtOnce];
      load_scores<kAtOnce, 1>(x, row, width, count, count, vector, 0, thread);
#pragma unroll
      for (int i = 0; i < kFour * kAtOnce; ++i) most[i % kFour] = fmaxf(most[i % kFour], x[i]);
#pragma unroll
      for (int i = 0; i < kFour / 2 * kAtOnce; ++i) {  // towards zero; NaN stays NaN
        asm("cvt.rz.bf16x2.f32 %0, %1, %2;" : "=r"(pairs[kFour / 2 * vector + i]) : "f"(x[2 * i + 1]), "f"(x[2 * i]));
      }
    }
  }
  __device__ __forceinline__ void columns(float (&column)[kFour]) const {
#pragma unroll
    for (int j = 0; j < kFour; ++j) column[j] = most[j];
  }
  __device__ __forceinline__ uint64_t reaching(float edge) const {
    constexpr uint32_t kUpper = 0xFFFF0000u;
    const float end = __uint_as_float(__float_as_uint(edge) & kUpper);
    uint64_t chosen = 0;
#pragma unroll
    for (int i = 0; i < kFour / 2 * kVectors; ++i) {
      if (__uint_as_float(pairs[i] << 16) >= end) chosen |= uint64_t{1} << 2 * i;
      if (__uint_as_float(pairs[i] & kUpper) >= end) chosen |= uint64_t{2} << 2 * i;
    }
    return chosen;
  }
};

}  // namespace dsv4
