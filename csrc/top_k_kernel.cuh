// Exact top-k of a row of scores (dsv4_jax/ops/top_k.py): highest first, ties to the lowest index, NaN as -inf.
//
// A cluster of up to 8 blocks holds a row in registers, dealt out in chunks. Three steps:
// 1. Bound. Every thread has the greatest of two halves of its scores. As many scores as halves reach any value, so the
//    k-th greatest half bounds the k-th score from below, and little more than k scores reach it. A histogram of the
//    halves gives the bound; what reaches it are the candidates. All scores of a row of at most a chunk are.
// 2. Order. The first block counts the candidates in bins between the bound and the greatest score. Sums over the bins
//    say where each bin's candidates go; within a bin each counts those before it.
// 3. Where the bound leaves too many candidates or a bin has too many (equal scores), the k-th score is found by radix
//    histograms of score and index, and the k winners are sorted.
// The result is defined by the scores alone; it does not depend on how a row is cut.
#pragma once

#include "hopper.cuh"

namespace dsv4 {

constexpr int kTopThreads = 1024;
constexpr int kTopMax = 1024;                 // largest k
constexpr int kTopCluster = 8;                // largest portable cluster
constexpr int kTopChunk = 4 * kTopThreads;    // scores that a block loads at once, and most candidates
constexpr int kTopBins = 4 * kTopThreads;
constexpr int kTopBinBits = 12, kTopCodeBits = 30;
constexpr int kTopCrowd = 64;                 // most candidates of a bin that count each other
constexpr int kTopIndexBits = 18;
constexpr uint64_t kTopNone = ~uint64_t{0};   // no candidate; behind all

struct TopKArgs {
  const float* scores;   // [T, S]
  const int32_t* count;  // [T]
  int32_t* indices;      // [T, k]
  int32_t* kept;         // [T]
  int width, k;          // S <= 262,144, k <= min(S, 1024)
  int blocks;            // of a row: 1, 2, 4, 8; 0: as the launch chooses
};

struct TopKShared {
  uint32_t halves[kTopBins];  // histogram of the halves' greatest, then its running sums; the radix histograms
  uint32_t bins[kTopBins];    // histogram of the candidates
  uint32_t before[kTopThreads];  // candidates in bins before a thread's four
  uint2 candidates[kTopChunk];   // score, index
  uint64_t grouped[kTopMax + kTopCrowd];  // candidates by bin
  uint32_t sums[2][32];
  uint32_t best[32];           // least rank of each warp
  uint32_t reach[kTopCluster];      // of each block: the bin by which its share of k is reached,
  uint32_t block_best[kTopCluster];  // its least rank,
  uint32_t counts[kTopCluster];      // its candidates
  uint32_t taken, bound, placed;     // candidates of this block; bin of the bound; candidates that are grouped
  uint32_t crowded;
  uint32_t digit, below, inside;     // of the bin with the k-th: its number, scores in bins before it and in it
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
__device__ __forceinline__ uint32_t rank_at(uint64_t place) { return static_cast<uint32_t>(place >> kTopIndexBits); }

// Ranks in 30 bits, in order: magnitudes below 2^-31 or from 2^33 are as one.
__device__ __forceinline__ uint32_t code_of(uint32_t rank) {
  return rank < 0x80000000u ? min(max(rank, 0x30000000u), 0x4FFFFFFFu) - 0x30000000u
                            : min(max(rank, 0xB0000000u), 0xCFFFFFFFu) - 0x90000000u;
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
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

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

// This thread's scores of kVectors vectors from `vector` on; -inf from `count` on. Reads nothing from `limit` on, or from
// the next multiple of four.
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
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int left = count - index_of<kBlocks>(vector + i, rank, thread);
    x[4 * i] = left > 0 ? v[i].x : -INFINITY;
    x[4 * i + 1] = left > 1 ? v[i].y : -INFINITY;
    x[4 * i + 2] = left > 2 ? v[i].z : -INFINITY;
    x[4 * i + 3] = left > 3 ? v[i].w : -INFINITY;
  }
}

// The bin of the bound: at least `need` halves of all blocks lie in bins up to it. The last bin: there is no bound.
template <int kVectors, int kBlocks>
__device__ __forceinline__ uint32_t find_bound(TopKShared& s, const float (&x)[4 * kVectors], uint32_t need, int rank,
                                               int thread, uint32_t& best) {
  const int lane = thread & 31, warp = thread >> 5;
  float half[2] = {-INFINITY, -INFINITY};
#pragma unroll
  for (int i = 0; i < 4 * kVectors; ++i) half[i & 1] = fmaxf(half[i & 1], x[i]);
  __syncthreads();  // the histograms are zero
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (half[h] > -INFINITY) atomicAdd(&s.halves[code_of(rank_of(half[h])) >> (kTopCodeBits - kTopBinBits)], 1u);
  }
  const uint32_t least = __reduce_min_sync(~0u, rank_of(fmaxf(half[0], half[1])));
  if (lane == 0) s.best[warp] = least;
  __syncthreads();
  uint4* quad = reinterpret_cast<uint4*>(s.halves) + thread;
  uint4 h = *quad;
  h.y += h.x, h.z += h.y, h.w += h.z;
  const uint32_t sum = block_sums(s.sums[0], h.w, thread);
  best = __reduce_min_sync(~0u, s.best[lane]);
  h.x += sum, h.y += sum, h.z += sum, h.w += sum;
  const uint32_t share = (need + kBlocks - 1) / kBlocks;  // if all blocks have it, so has the row
  const bool here = sum < share && h.w >= share;
  const uint32_t bin = 4 * thread + (h.x < share) + (h.y < share) + (h.z < share);
  if (kBlocks == 1) {
    if (here) s.bound = bin;
    __syncthreads();
    return s.bound;
  }
  *quad = h;
  cluster_wait();  // all blocks have started
  if (here || (thread == kTopThreads - 1 && h.w < share)) {
#pragma unroll
    for (int c = 0; c < kBlocks; ++c) {
      store_peer1(peer_address(shared_address(&s.reach[rank]), c), here ? bin : kTopBins - 1);
    }
  }
  if (thread < kBlocks) store_peer1(peer_address(shared_address(&s.block_best[rank]), thread), best);
  cluster_sync();
  uint32_t low = kTopBins - 1, high = 0;
#pragma unroll
  for (int c = 0; c < kBlocks; ++c) {
    low = min(low, s.reach[c]), high = max(high, s.reach[c]), best = min(best, s.block_best[c]);
  }
  if (warp == 0) {
    while (low < high) {  // 32 probes between them, the last at `high`, where all blocks have their shares
      const uint32_t step = (high - low + 32) / 32, at = min(low + step * (lane + 1) - 1, high);
      uint32_t sums[kBlocks], all = 0;
#pragma unroll
      for (int c = 0; c < kBlocks; ++c) sums[c] = load_peer1(peer_address(shared_address(&s.halves[at]), c));
#pragma unroll
      for (int c = 0; c < kBlocks; ++c) all += sums[c];
      const uint32_t enough = __ballot_sync(~0u, all >= need || at == high);
      const int first = __ffs(enough) - 1;
      high = __shfl_sync(~0u, at, first);
      low += step * first;
    }
    if (lane == 0) s.bound = low;
  }
  __syncthreads();
  return s.bound;
}

// Lists those of a thread's scores that `chosen` names by bits.
template <int kBlocks, int kScores>
__device__ __forceinline__ void list(TopKShared& s, const float (&x)[kScores], uint32_t chosen, int first, int rank,
                                     int thread) {
  asm volatile("" : "+r"(chosen));  // or the compiler keeps the bits apart, and they do not fit
  if (!__any_sync(~0u, chosen != 0)) return;
  const int lane = thread & 31;
  const uint32_t own = __popc(chosen);
  uint32_t place = warp_sums(own, lane), start = 0;
  if (lane == 31) start = atomicAdd(&s.taken, place);
  place += __shfl_sync(~0u, start, 31) - own;
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    if (chosen >> i & 1) {
      const uint32_t index = index_of<kBlocks>(first + i / 4, rank, thread) + i % 4;
      if (place < kTopChunk) s.candidates[place] = make_uint2(__float_as_uint(x[i]), index);
      ++place;
    }
  }
}

// How many scores all blocks have listed. Everyone may read the lists from here on.
template <int kBlocks>
__device__ __forceinline__ uint32_t count_listed(TopKShared& s, int rank, int thread) {
  __syncthreads();
  if (kBlocks == 1) return s.taken;
  if (thread < kBlocks) store_peer1(peer_address(shared_address(&s.counts[rank]), thread), s.taken);
  cluster_sync();
  uint32_t all = 0;
#pragma unroll
  for (int c = 0; c < kBlocks; ++c) all += s.counts[c];
  return all;
}

// Candidate i of all blocks.
template <int kBlocks>
__device__ __forceinline__ uint64_t candidate(TopKShared& s, uint32_t i) {
  uint32_t from = 0;
#pragma unroll
  for (int c = 0; c < kBlocks - 1; ++c) {
    if (from == c && i >= s.counts[c]) i -= s.counts[c], from = c + 1;
  }
  if (kBlocks == 1) {
    const uint2 x = s.candidates[i];
    return place_of(__uint_as_float(x.x), x.y);
  }
  const uint64_t x = load_peer_long(peer_address(shared_address(&s.candidates[i]), from));
  return place_of(__uint_as_float(static_cast<uint32_t>(x)), static_cast<uint32_t>(x >> 32));
}

// Where the candidates of a bin are grouped: from x to y.
__device__ __forceinline__ uint2 extent(const TopKShared& s, uint32_t bin) {
  const uint4 h = reinterpret_cast<const uint4*>(s.bins)[bin >> 2];
  const uint32_t q = bin & 3, start = s.before[bin >> 2] + (q > 0 ? h.x : 0) + (q > 1 ? h.y : 0) + (q > 2 ? h.z : 0);
  return make_uint2(start, start + (q == 0 ? h.x : q == 1 ? h.y : q == 2 ? h.z : h.w));
}

// Bin of a candidate: codes from `low` on, 2^shift of them a bin.
__device__ __forceinline__ uint32_t bin_of(uint64_t place, uint32_t low, int shift) {
  return (code_of(rank_at(place)) - low) >> shift;
}

// Counts the candidates into bins and finds where each bin starts. False: a bin of the first `need` has too many.
__device__ __forceinline__ bool count_bins(TopKShared& s, const uint64_t (&mine)[4], uint32_t (&arrival)[4],
                                           uint32_t low, int shift, uint32_t need, int thread) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (mine[j] != kTopNone) arrival[j] = atomicAdd(&s.bins[bin_of(mine[j], low, shift)], 1u);
  }
  __syncthreads();
  const uint4 h = reinterpret_cast<const uint4*>(s.bins)[thread];
  uint32_t start = block_sums(s.sums[1], h.x + h.y + h.z + h.w, thread);
  s.before[thread] = start;
  const uint32_t inside[4] = {h.x, h.y, h.z, h.w};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (start < need) {
      if (inside[j] > kTopCrowd) s.crowded = 1;
      if (start + inside[j] >= need) s.placed = start + inside[j];
    }
    start += inside[j];
  }
  __syncthreads();
  return s.crowded == 0;
}

// Writes the first `need` candidates in order, then zeros.
__device__ __forceinline__ void write_ordered(TopKShared& s, const uint64_t (&mine)[4], const uint32_t (&arrival)[4],
                                              uint32_t low, int shift, uint32_t need, uint32_t k, int32_t* indices,
                                              int thread) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (mine[j] != kTopNone) {
      const uint32_t start = extent(s, bin_of(mine[j], low, shift)).x;
      if (start < need) s.grouped[start + arrival[j]] = mine[j];
    }
  }
  __syncthreads();
  for (uint32_t i = thread; i < s.placed; i += kTopThreads) {
    const uint64_t x = s.grouped[i];
    const uint2 bin = extent(s, bin_of(x, low, shift));
    uint32_t at = bin.x;
    for (uint32_t p = bin.x; p < bin.y; ++p) at += s.grouped[p] < x;
    if (at < need) indices[at] = static_cast<int32_t>(x & ((1u << kTopIndexBits) - 1));
  }
  for (uint32_t i = need + thread; i < k; i += kTopThreads) indices[i] = 0;
}

// The place behind the `need`-th score's: by radix histograms of rank and index over all blocks.
template <int kVectors, int kBlocks>
__device__ __forceinline__ uint64_t select(TopKShared& s, const float* row, int width, int count, uint32_t need,
                                           int rank, int thread) {
  constexpr int kDigits = 2048;
  uint2* pairs = reinterpret_cast<uint2*>(s.halves);
  pairs[thread] = pairs[thread + kDigits / 2] = make_uint2(0, 0);
  __syncthreads();
  if (thread == 0) s.taken = 0;  // all have read it
  uint64_t prefix = 0;
#pragma unroll 1
  for (int pass = 0;; ++pass) {
    const int shift = pass == 0 ? 39 : pass == 1 ? 28 : pass == 2 ? 18 : pass == 3 ? 9 : 0;
    const int bits = pass < 2 ? 11 : pass == 2 ? 10 : 9;
    uint32_t* histogram = s.halves + (pass & 1) * kDigits;
#pragma unroll 1
    for (int i = 0; i < kVectors; ++i) {
      const int at = index_of<kBlocks>(i, rank, thread);
      float x[4];
      load_scores<1, kBlocks>(x, row, width, count, count, i, rank, thread);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint64_t place = place_of(x[j], at + j);
        if (at + j < count && place >> (shift + bits) == prefix) {
          atomicAdd(&histogram[static_cast<uint32_t>(place >> shift) & ((1u << bits) - 1)], 1u);
        }
      }
    }
    meet<kBlocks>();
    uint32_t first = 0, second = 0;
    const uint32_t at = shared_address(&histogram[2 * thread]);
    uint64_t both[kBlocks];
#pragma unroll
    for (int c = 0; c < kBlocks; ++c) both[c] = load_peer_long(kBlocks == 1 ? at : peer_address(at, c));
#pragma unroll
    for (int c = 0; c < kBlocks; ++c) first += static_cast<uint32_t>(both[c]), second += static_cast<uint32_t>(both[c] >> 32);
    const uint32_t below = block_sums(s.sums[pass & 1], first + second, thread);
    if (below < need && below + first >= need) s.digit = 2 * thread, s.below = below, s.inside = first;
    if (below + first < need && below + first + second >= need) {
      s.digit = 2 * thread + 1, s.below = below + first, s.inside = second;
    }
    // The next pass' histogram: all blocks have read it in the last.
    reinterpret_cast<uint2*>(s.halves + (~pass & 1) * kDigits)[thread] = make_uint2(0, 0);
    __syncthreads();
    prefix = prefix << bits | s.digit;
    need -= s.below;
    if (s.inside == need) return (prefix + 1) << shift;  // all of the bin; of the last pass' there is one
  }
}

// Sorts the `size` (a power of two, 32 to 1024) places that the first threads hold, least first.
__device__ __forceinline__ uint64_t sort(TopKShared& s, uint64_t x, int size, int thread) {
  uint64_t* buffer = reinterpret_cast<uint64_t*>(s.candidates);  // two, so that one barrier an exchange suffices
  for (int run = 2; run <= size; run *= 2) {
    for (int d = run / 2; d > 0; d /= 2) {
      uint64_t y;
      if (d >= 32) {
        buffer[thread] = x;
        named_sync(1, size);
        y = buffer[thread ^ d];
        buffer = reinterpret_cast<uint64_t*>(s.candidates) + (buffer == reinterpret_cast<uint64_t*>(s.candidates) ? kTopMax : 0);
      } else {
        y = __shfl_xor_sync(~0u, x, d);
      }
      const bool wants_less = ((thread & d) == 0) == ((thread & run) == 0);
      if ((y < x) == wants_less) x = y;
    }
  }
  return x;
}

template <int kVectors, int kBlocks>
__global__ void __launch_bounds__(kTopThreads, 1) top_k_kernel(const __grid_constant__ TopKArgs args) {
  extern __shared__ __align__(16) uint8_t raw[];
  TopKShared& s = *reinterpret_cast<TopKShared*>(raw);
  const int thread = threadIdx.x, token = blockIdx.x / kBlocks, rank = blockIdx.x % kBlocks;
  const float* row = args.scores + static_cast<int64_t>(token) * args.width;
  int32_t* indices = args.indices + static_cast<int64_t>(token) * args.k;
  if (kBlocks > 1) cluster_arrive();  // waited for before the first access to a peer
  const int count = min(max(__ldg(args.count + token), 0), args.width);
  reinterpret_cast<uint4*>(s.halves)[thread] = make_uint4(0, 0, 0, 0);
  reinterpret_cast<uint4*>(s.bins)[thread] = make_uint4(0, 0, 0, 0);
  if (thread == 0) s.bound = kTopBins - 1, s.taken = s.placed = s.crowded = 0;
  float x[4 * kVectors];
  // A few loads do not wait for the count.
  load_scores<kVectors, kBlocks>(x, row, args.width, kVectors <= 2 ? args.width : count, count, 0, rank, thread);
  const uint32_t need = min(args.k, count);
  if (rank == 0 && thread == 0) args.kept[token] = need;
  constexpr int kCoarse = kTopCodeBits - kTopBinBits;
  uint64_t mine[4] = {kTopNone, kTopNone, kTopNone, kTopNone};
  uint32_t arrival[4], low = 0;
  int shift = kCoarse;
  bool fits = true;
  if (count <= kTopChunk) {  // all in the first block's first vectors
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (rank == 0 && 4 * thread + j < count) mine[j] = place_of(x[j], 4 * thread + j);
    }
    __syncthreads();  // the histograms are zero
    if (kBlocks > 1) cluster_wait();
  } else {
    uint32_t best;
    const uint32_t bound = find_bound<kVectors, kBlocks>(s, x, need, rank, thread, best);
    fits = bound < kTopBins - 1;
    if (fits) {
      const uint32_t last = ((bound + 1) << kCoarse) - 1;
      const float edge = score_at(last);
      uint32_t chosen = 0;
#pragma unroll
      for (int i = 0; i < 4 * kVectors; ++i) {
        if (x[i] >= edge) chosen |= 1u << i;
      }
      list<kBlocks>(s, x, chosen, 0, rank, thread);
      const uint32_t n = count_listed<kBlocks>(s, rank, thread);
      fits = n <= kTopChunk;
      if (fits && rank == 0) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (kTopThreads * j + thread < n) mine[j] = candidate<kBlocks>(s, kTopThreads * j + thread);
        }
        low = code_of(best);
        shift = max(32 - kTopBinBits - __clz(last - low), 0);
      }
    }
  }
  if (fits) {
    if (rank == 0) fits = count_bins(s, mine, arrival, low, shift, need, thread);
    if (kBlocks > 1) {
      if (rank == 0 && thread < kBlocks) store_peer1(peer_address(shared_address(&s.crowded), thread), !fits);
      cluster_sync();
      fits = s.crowded == 0;
    }
    if (fits) {
      if (rank == 0) write_ordered(s, mine, arrival, low, shift, need, args.k, indices, thread);
      return;
    }
  }

  // Registers do not hold the scores until here: they are read again.
  const uint64_t end = select<kVectors, kBlocks>(s, row, args.width, count, need, rank, thread);
#pragma unroll 1
  for (int i = 0; i < kVectors; ++i) {
    const int at = index_of<kBlocks>(i, rank, thread);
    float y[4];
    load_scores<1, kBlocks>(y, row, args.width, count, count, i, rank, thread);
    uint32_t chosen = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) chosen |= (at + j < count && place_of(y[j], at + j) < end) << j;
    list<kBlocks>(s, y, chosen, i, rank, thread);
  }
  count_listed<kBlocks>(s, rank, thread);
  uint64_t place = kTopNone;
  if (rank == 0 && thread < need) place = candidate<kBlocks>(s, thread);
  meet<kBlocks>();  // no block leaves, and no list is written over, while it is read
  if (rank == 0) {
    int size = 32;
    while (size < args.k) size *= 2;
    if (thread < size) {
      place = sort(s, place, size, thread);
      if (thread < args.k) indices[thread] = thread < need ? static_cast<int32_t>(place & ((1u << kTopIndexBits) - 1)) : 0;
    }
  }
}

}  // namespace dsv4
