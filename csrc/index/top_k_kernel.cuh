// Exact top-k of a row of scores (dsv4_jax/ops/top_k.py): highest first, ties to the lowest index, NaN as -inf.
//
// A cluster of up to 8 blocks holds a row in registers, dealt out in chunks. Three steps:
// 1. Bound. Every thread has the greatest score of each of its four columns. As many scores as columns reach any value,
//    so the k-th greatest of the columns bounds the k-th score from below, and little more than k scores reach it. A
//    histogram of the columns gives the bound; what reaches it are the candidates.
// 2. Order. The first block counts the candidates in bins between the bound and the greatest score. Sums over the bins
//    say where each bin's candidates go; within a bin each counts those before it. A row of one chunk starts here, with
//    bins below its greatest score.
// 3. Where the bound leaves too many candidates or a bin has too many (equal scores), the k-th score is found by radix
//    histograms of score and index, and the k winners are sorted.
// All warps work alike, each on its scores; step 2 is the first block's, and one warp's where it looks for the bound.
// The result is defined by the scores alone; it does not depend on how a row is cut. Blocks are of 512 threads because
// most steps are bound by the instructions of all warps, not by the work in them.
#pragma once

#include "common/numbers.cuh"
#include "index/top_k_rows.cuh"

namespace dsv4 {

constexpr int kFewVectors = 4;  // that are loaded at once where registers are short
constexpr int kWordBits = 32;

// The bin of the bound: at least `need` columns of all blocks lie in bins up to it. The last bin: there is no bound.
template <int kBlocks, typename Held>
__device__ __forceinline__ uint32_t find_bound(TopKShared& s, const Held& held, uint32_t need, int rank, int thread,
                                               uint32_t& best) {
  const int lane = lane_of(thread), warp = warp_of(thread);
  float column[kFour];
  held.columns(column);
  __syncthreads();  // the histograms are zero
#pragma unroll
  for (int j = 0; j < kFour; ++j) {
    if (column[j] > -INFINITY) atomicAdd(&s.columns[code_of(column[j]) >> (kTopCodeBits - kTopBinBits)], 1u);
  }
  const uint32_t least = __reduce_min_sync(
      kAllLanes, code_of(fmaxf(fmaxf(column[0], column[1]), fmaxf(column[2], column[3])) + 0.f));  // 0 for -0
  if (lane == 0) s.best[warp] = least;
  __syncthreads();
  uint4* four = reinterpret_cast<uint4*>(s.columns) + thread;
  uint4 h = *four;
  h.y += h.x, h.z += h.y, h.w += h.z;
  const uint32_t sum = block_sums(s.sums[0], h.w, thread);
  best = __reduce_min_sync(kAllLanes, s.best[lane % (kTopWarps)]);
  h.x += sum, h.y += sum, h.z += sum, h.w += sum;
  const uint32_t share = (need + kBlocks - 1) / kBlocks;  // if all blocks have it, so has the row
  const bool here = sum < share && h.w >= share;
  const uint32_t bin = kFour * thread + (h.x < share) + (h.y < share) + (h.z < share);
  if (kBlocks == 1) {
    if (here) s.bound = bin;
    __syncthreads();
    return s.bound;
  }
  *four = h;
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
      const uint32_t step = (high - low + kLanes) / kLanes, at = min(low + step * (lane + 1) - 1, high);
      uint32_t sums[kBlocks], all = 0;
#pragma unroll
      for (int c = 0; c < kBlocks; ++c) sums[c] = load_peer1(peer_address(shared_address(&s.columns[at]), c));
#pragma unroll
      for (int c = 0; c < kBlocks; ++c) all += sums[c];
      const int first = __ffs(__ballot_sync(kAllLanes, all >= need || at == high)) - 1;
      high = __shfl_sync(kAllLanes, at, first);
      low += step * first;
    }
    if (lane == 0) s.bound = low;
  }
  __syncthreads();
  return s.bound;
}

// Lists those of a thread's scores that `chosen` names by bits.
template <int kBlocks>
__device__ __forceinline__ void list(TopKShared& s, const float* row, uint64_t chosen, int rank, int thread) {
  const int lane = lane_of(thread);
  const uint32_t own = __popcll(chosen);
  if (!__any_sync(kAllLanes, own > 0)) return;
  uint32_t place = running_sum(own, lane), start = 0;
  if (lane == kLanes - 1) start = add_shared(shared_address(&s.taken), place);
  place += __shfl_sync(kAllLanes, start, kLanes - 1) - own;
  for (; chosen != 0; chosen &= chosen - 1, ++place) {
    const int i = __ffsll(chosen) - 1, index = index_of<kBlocks>(over<kFour>(i), rank, thread) + within<kFour>(i);
    if (place < kTopChunk) s.candidates[place] = make_uint2(__float_as_uint(__ldg(row + index)), index);
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

// Candidate i of all blocks: its score and index.
template <int kBlocks>
__device__ __forceinline__ uint2 candidate(TopKShared& s, uint32_t i) {
  uint32_t from = 0;
#pragma unroll
  for (int c = 0; c < kBlocks - 1; ++c) {
    if (from == c && i >= s.counts[c]) i -= s.counts[c], from = c + 1;
  }
  if (kBlocks == 1) return s.candidates[i];
  const uint64_t x = load_peer_long(peer_address(shared_address(&s.candidates[i]), from));
  return make_uint2(static_cast<uint32_t>(x), static_cast<uint32_t>(x >> kWordBits));
}

// Turns the histogram of the bins into where each starts. False if a bin of the first `need` has too many, or all bins
// together too few.
__device__ __forceinline__ bool start_bins(TopKShared& s, uint32_t& crowded, uint32_t need, int thread) {
  __syncthreads();
  uint4* four = reinterpret_cast<uint4*>(s.bins) + thread;
  const uint4 h = *four;
  const uint32_t sum = h.x + h.y + h.z + h.w, start = block_sums(s.sums[1], sum, thread);
  *four = make_uint4(start, start + h.x, start + h.x + h.y, start + h.x + h.y + h.z);
  if (start < need && max(max(h.x, h.y), max(h.z, h.w)) > kTopCrowd) crowded = 1;
  if (thread == kTopThreads - 1 && start + sum < need) crowded = 1;
  __syncthreads();
  return crowded == 0;
}

// Puts a candidate among those of its bin.
__device__ __forceinline__ void group(TopKShared& s, uint32_t bin, float score, uint32_t index) {
  const uint32_t at = atomicAdd(&s.bins[bin], 1u);
  if (at < kTopMax + kTopCrowd) s.grouped[at] = static_cast<uint64_t>(bin) << kTopPlaceBits | place_of(score, index);
}

// Writes the first `need` of the grouped candidates in order, then zeros.
__device__ __forceinline__ void write_ordered(TopKShared& s, uint32_t need, uint32_t k, int32_t* indices, int thread) {
  __syncthreads();
  const uint32_t last = min(s.bins[kTopBins - 1], need + kTopCrowd);
#pragma unroll 1
  for (uint32_t i = thread; i < last; i += kTopThreads) {
    const uint64_t x = s.grouped[i];
    const uint32_t bin = static_cast<uint32_t>(x >> kTopPlaceBits), end = s.bins[bin];
    uint32_t at = bin == 0 ? 0 : s.bins[bin - 1];
    if (at >= need) continue;  // its bin may go on behind those that are grouped
    for (uint32_t p = at; p < end; ++p) at += s.grouped[p] < x;
    if (at < need) indices[at] = static_cast<int32_t>(x & ((1u << kTopIndexBits) - 1));
  }
  for (uint32_t i = need + thread; i < k; i += kTopThreads) indices[i] = 0;
}

// The k of a row of one chunk, by bins of 2^-8 of an octave over eight octaves below the greatest score. False if they
// do not hold the k, or one holds too many.
__device__ __forceinline__ bool order_chunk(TopKShared& s, const float (&x)[kFour], uint32_t need, uint32_t k,
                                            int32_t* indices, int thread) {
  constexpr int kShift = kFloatMantissa - 8;
  const float most = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
  const uint32_t least = __reduce_min_sync(kAllLanes, code_of(most + 0.f));  // 0 for -0
  if (lane_of(thread) == 0) s.best[warp_of(thread)] = least;
  __syncthreads();
  const uint32_t best = __reduce_min_sync(kAllLanes, s.best[thread % (kTopWarps)]);
  uint32_t bin[kFour];
#pragma unroll
  for (int i = 0; i < kFour; ++i) {
    bin[i] = (code_of(x[i] + 0.f) - best) >> kShift;
    if (!(x[i] > -INFINITY)) bin[i] = kTopBins;  // NaN, or not there
    if (bin[i] < kTopBins) atomicAdd(&s.bins[bin[i]], 1u);
  }
  if (!start_bins(s, s.crowded[1], need, thread)) return false;
#pragma unroll
  for (int i = 0; i < kFour; ++i) {
    if (bin[i] < kTopBins) group(s, bin[i], x[i], kFour * thread + i);
  }
  write_ordered(s, need, k, indices, thread);
  return true;
}

// Calls f(four scores, index of the first) for all of this thread's vectors. Registers do not hold them until here.
template <int kVectors, int kBlocks, typename F>
__device__ __forceinline__ void for_scores(const float* row, int width, int count, int rank, int thread, F f) {
  constexpr int kAtOnce = kVectors < kFewVectors ? kVectors : kFewVectors;
#pragma unroll 1
  for (int i = 0; i < kVectors; i += kAtOnce) {
    float x[kFour * kAtOnce];
    load_scores<kAtOnce, kBlocks>(x, row, width, count, count, i, rank, thread);
#pragma unroll
    for (int v = 0; v < kAtOnce; ++v) {
      const float* y = x + kFour * v;
      const float four[kFour] = {y[0], y[1], y[2], y[3]};
      f(four, index_of<kBlocks>(i + v, rank, thread));
    }
  }
}

// The place behind the `need`-th score's: by radix histograms of rank and index over all blocks, in turn in the second
// and the first half of the columns. Of the first half other blocks may still read the running sums until they meet.
template <int kVectors, int kBlocks>
__device__ __forceinline__ uint64_t select(TopKShared& s, const float* row, int width, int count, uint32_t need,
                                           int rank, int thread) {
  constexpr int kRankPasses = 3, kDigitBits = 11, kLastBits = 32 - 2 * kDigitBits, kIndexBits = kTopIndexBits / 2;
  constexpr int kDigits = 1 << kDigitBits;
  uint4* four = reinterpret_cast<uint4*>(s.columns) + thread;
  four[kTopThreads] = make_uint4(0, 0, 0, 0);
  __syncthreads();
  if (thread == 0) s.taken = 0;  // all have read it
  uint32_t prefix = 0, bound = 0;
#pragma unroll 1
  for (int pass = 0;; ++pass) {  // three over the ranks, two over the indices of those of the rank `bound`
    const int shift = pass == 0 ? kDigitBits + kLastBits : pass == 1 ? kLastBits : pass == kRankPasses ? kIndexBits : 0;
    const int bits = pass < 2 ? kDigitBits : pass == 2 ? kLastBits : kIndexBits;
    uint32_t* histogram = s.columns + (~pass & 1) * kDigits;
    for_scores<kVectors, kBlocks>(row, width, count, rank, thread, [&](const float(&x)[kFour], int at) {
#pragma unroll
      for (int j = 0; j < kFour; ++j) {
        const uint32_t score = rank_of(x[j]), digits = (pass < kRankPasses ? score : at + j) >> shift;
        if (at + j < count && digits >> bits == prefix && (pass < kRankPasses || score == bound)) {
          atomicAdd(&histogram[digits & ((1u << bits) - 1)], 1u);
        }
      }
    });
    meet<kBlocks>();
    uint4 h = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int c = 0; c < kBlocks; ++c) {
      const uint32_t at = shared_address(&histogram[kFour * thread]);
      const uint4 peer = load_peer(kBlocks == 1 ? at : peer_address(at, c));
      h.x += peer.x, h.y += peer.y, h.z += peer.z, h.w += peer.w;
    }
    uint32_t below = block_sums(s.sums[pass & 1], h.x + h.y + h.z + h.w, thread);
    const uint32_t inside[kFour] = {h.x, h.y, h.z, h.w};
#pragma unroll
    for (int j = 0; j < kFour; ++j) {
      if (below < need && below + inside[j] >= need)
        s.digit = kFour * thread + j, s.below = below, s.inside = inside[j];
      below += inside[j];
    }
    four[(pass & 1) * kTopThreads] = make_uint4(0, 0, 0, 0);  // for the next pass; no block reads it since they met
    __syncthreads();
    prefix = prefix << bits | s.digit;
    need -= s.below;
    if (s.inside == need) {  // all of the bin; of the last pass' there is one
      const uint64_t end = (uint64_t{prefix} + 1) << shift;
      return pass < kRankPasses ? end << kTopIndexBits : (static_cast<uint64_t>(bound) << kTopIndexBits) + end;
    }
    if (pass == 2) bound = prefix, prefix = 0;
  }
}

// Sorts the first `size` (a power of two) of the places that the threads hold in turn, least first. `buffers`: two, so
// that one barrier an exchange suffices.
constexpr int kTopHeld = kTopMax / kTopThreads;
__device__ __forceinline__ void sort(uint64_t* buffers, uint64_t (&x)[kTopHeld], int size, int thread) {
  static_assert(kTopHeld == 2, "the widest exchange is within a thread");
  uint64_t* buffer = buffers;
  for (int run = 2; run <= size; run *= 2) {
    for (int d = run / 2; d > 0; d /= 2) {
      uint64_t y[kTopHeld] = {x[1], x[0]};
      if (d < kLanes) {
#pragma unroll
        for (int j = 0; j < kTopHeld; ++j) y[j] = __shfl_xor_sync(kAllLanes, x[j], d);
      } else if (d < kTopThreads) {
#pragma unroll
        for (int j = 0; j < kTopHeld; ++j) buffer[kTopThreads * j + thread] = x[j];
        __syncthreads();
#pragma unroll
        for (int j = 0; j < kTopHeld; ++j) y[j] = buffer[(kTopThreads * j + thread) ^ d];
        buffer = buffer == buffers ? buffers + kTopMax : buffers;
      }
#pragma unroll
      for (int j = 0; j < kTopHeld; ++j) {
        const int at = kTopThreads * j + thread;
        const bool wants_less = ((at & d) == 0) == ((at & run) == 0);
        if ((y[j] < x[j]) == wants_less) x[j] = y[j];
      }
    }
  }
}

// How many of a row's scores count.
__device__ __forceinline__ int count_of(const TopKArgs& args, int token) {
  return min(max(__ldg(args.count + token), 0), args.width);
}

// Before a row's scores are looked at.
__device__ __forceinline__ void clear(TopKShared& s, int thread) {
  reinterpret_cast<uint4*>(s.columns)[thread] = make_uint4(0, 0, 0, 0);
  reinterpret_cast<uint4*>(s.bins)[thread] = make_uint4(0, 0, 0, 0);
  if (thread == 0) s.bound = kTopBins - 1, s.taken = s.crowded[0] = s.crowded[1] = 0;
}

// The result of a row whose scores the threads of its blocks hold, as `held`. (Found in here, `indices` would cost 35
// registers.)
template <int kVectors, int kBlocks, typename Held>
__device__ __forceinline__ void choose(const TopKArgs& args, TopKShared& s, const float* row, int32_t* indices,
                                       const Held& held, int count, int token, int rank, int thread) {
  const uint32_t need = min(args.k, count);
  if (rank == 0 && thread == 0) args.kept[token] = need;
  if (need == 0) {
    for (int i = thread; rank == 0 && i < args.k; i += kTopThreads) indices[i] = 0;
    if (kBlocks > 1) cluster_wait();
    return;
  }
  if constexpr (kVectors == 1) {  // of one block
    if (order_chunk(s, held.x, need, args.k, indices, thread)) return;
    reinterpret_cast<uint4*>(s.bins)[thread] = make_uint4(0, 0, 0, 0);
  }
  uint32_t best;
  const uint32_t bound = find_bound<kBlocks>(s, held, need, rank, thread, best);
  bool fits = bound < kTopBins - 1;
  if (fits) {
    const uint32_t last = ((bound + 1) << (kTopCodeBits - kTopBinBits)) - 1;
    list<kBlocks>(s, row, held.reaching(score_at(last)), rank, thread);
    const uint32_t n = count_listed<kBlocks>(s, rank, thread);
    fits = n <= kTopChunk;
    if (fits) {
      const int shift = max(kWordBits - kTopBinBits - __clz(last - best), 0);
      uint2* found = kBlocks == 1 ? s.candidates : s.gathered;
      if (rank == 0) {
#pragma unroll 1
        for (uint32_t i = thread; i < n; i += kTopThreads) {
          const uint2 x = candidate<kBlocks>(s, i);
          if (kBlocks > 1) found[i] = x;
          atomicAdd(&s.bins[(code_of(__uint_as_float(x.x) + 0.f) - best) >> shift], 1u);  // 0 for -0
        }
        fits = start_bins(s, s.crowded[0], need, thread);
      }
      if (kBlocks > 1) {  // the first block tells the others, and waits for them only before it ends
        if (rank == 0 && 0 < thread && thread < kBlocks) {
          store_peer1(peer_address(shared_address(&s.crowded[0]), thread), !fits);
        }
        cluster_arrive();
        if (rank > 0 || !fits) cluster_wait();
        if (rank > 0) fits = s.crowded[0] == 0;
      }
      if (fits && rank == 0) {
#pragma unroll 1
        for (uint32_t i = thread; i < n; i += kTopThreads) {
          const float score = __uint_as_float(found[i].x) + 0.f;
          group(s, (code_of(score) - best) >> shift, score, found[i].y);
        }
        write_ordered(s, need, args.k, indices, thread);
        if (kBlocks > 1) cluster_wait();
      }
      if (fits) return;
    }
  }

  const uint64_t end = select<kVectors, kBlocks>(s, row, args.width, count, need, rank, thread);
  uint64_t chosen = 0;
  int bit = 0;
  for_scores<kVectors, kBlocks>(row, args.width, count, rank, thread, [&](const float(&y)[kFour], int at) {
#pragma unroll
    for (int j = 0; j < kFour; ++j, ++bit) {
      if (at + j < count && place_of(y[j], at + j) < end) chosen |= uint64_t{1} << bit;
    }
  });
  list<kBlocks>(s, row, chosen, rank, thread);
  count_listed<kBlocks>(s, rank, thread);
  int size = kLanes;
  while (size < args.k) size *= 2;
  uint64_t place[kTopHeld];
#pragma unroll
  for (int j = 0; j < kTopHeld; ++j) {
    const uint32_t i = kTopThreads * j + thread;
    place[j] = kTopNone;
    if (rank == 0 && i < need) {
      const uint2 x = candidate<kBlocks>(s, i);
      place[j] = place_of(__uint_as_float(x.x), x.y);
    }
  }
  meet<kBlocks>();  // no block leaves, and no list is written over, while it is read
  if (rank > 0) return;
  sort(reinterpret_cast<uint64_t*>(s.candidates), place, size, thread);
#pragma unroll
  for (int j = 0; j < kTopHeld; ++j) {
    const uint32_t i = kTopThreads * j + thread;
    if (i < args.k) indices[i] = i < need ? static_cast<int32_t>(place[j] & ((1u << kTopIndexBits) - 1)) : 0;
  }
}

template <int kVectors>
constexpr int kTopAtOnce = kVectors == 1   ? 4
                           : kVectors == 2 ? 2
                                           : 1;  // blocks of an SM, at least
template <int kVectors, int kBlocks>
__global__ void __launch_bounds__(kTopThreads, kTopAtOnce<kVectors>)
    top_k_kernel(const __grid_constant__ TopKArgs args) {
  extern __shared__ __align__(16) uint8_t raw[];
  TopKShared& s = *reinterpret_cast<TopKShared*>(raw);
  const int thread = threadIdx.x, token = blockIdx.x / kBlocks, rank = blockIdx.x % kBlocks;
  if (kBlocks > 1) cluster_arrive();  // waited for before the first access to a peer
  const float* row = args.scores + static_cast<int64_t>(token) * args.width;
  int32_t* indices = args.indices + static_cast<int64_t>(token) * args.k;
  const int count = count_of(args, token);
  clear(s, thread);
  // A few loads do not wait for the count.
  HeldScores<kVectors> held;
  load_scores<kVectors, kBlocks>(held.x, row, args.width, kVectors <= kFewVectors ? args.width : count, count, 0, rank,
                                 thread);
  choose<kVectors, kBlocks>(args, s, row, indices, held, count, token, rank, thread);
}

// Of many rows, each a block's, kRows to an SM at once.
template <int kVectors, int kRows>
__global__ void __launch_bounds__(kTopThreads, kRows) top_k_rows_kernel(const __grid_constant__ TopKArgs args) {
  extern __shared__ __align__(16) uint8_t raw[];
  TopKShared& s = *reinterpret_cast<TopKShared*>(raw);
  const int thread = threadIdx.x, token = blockIdx.x;
  const float* row = args.scores + static_cast<int64_t>(token) * args.width;
  int32_t* indices = args.indices + static_cast<int64_t>(token) * args.k;
  const int count = count_of(args, token);
  clear(s, thread);
  HeldHalves<kVectors> held;
  held.load(row, args.width, count, thread);
  choose<kVectors, 1>(args, s, row, indices, held, count, token, 0, thread);
}

}  // namespace dsv4
