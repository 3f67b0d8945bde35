// Exact top-k of a row of scores (dsv4_jax/ops/top_k.py): highest first, ties to the lowest index, NaN as -inf.
//
// A cluster of up to 8 blocks holds one row in registers as order-preserving integers. Three histograms of 11, 11 and 10
// bits, summed over the cluster through distributed shared memory, give the k-th key; ties are counted off in index
// order; the winners are sorted by the first block. The result does not depend on how a row is cut.
#pragma once

#include "hopper.cuh"

namespace dsv4 {

constexpr int kTopThreads = 1024;
constexpr int kTopMax = 1024;        // largest k
constexpr int kTopCluster = 8;       // largest portable cluster
constexpr int kTopBins = 2048;

struct TopKArgs {
  const float* scores;   // [T, S]
  const int32_t* count;  // [T]
  int32_t* indices;      // [T, k]
  int32_t* kept;         // [T]
  int width, k;          // S, k <= min(S, 1024)
  int slice;             // scores of a block, a multiple of 4
};

struct TopKShared {
  uint32_t histogram[3][kTopBins];
  uint64_t winners[kTopMax];  // key above, complement of the index below
  uint64_t sorted[2][kTopMax];
  uint32_t warp_sums[32];
  uint32_t digit, above, inside;  // of the bin with the k-th key: its number, keys above it, keys in it
  uint32_t ties, taken;           // ties of this block; winners of this block
};

// Greater floats have greater keys; no number has key 0. -0 counts as 0, NaN as -inf.
__device__ __forceinline__ uint32_t order_key(float x) {
  const uint32_t bits = __float_as_uint(x == 0.f ? 0.f : x);
  const uint32_t key = bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
  return x != x ? 0x007FFFFFu : key;
}

__device__ __forceinline__ uint32_t load_peer1(uint32_t address) {
  uint32_t x;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}
__device__ __forceinline__ uint64_t load_peer_long(uint32_t address) {
  uint64_t x;
  asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(x) : "r"(address) : "memory");
  return x;
}

// Exclusive sum over the block in thread order.
__device__ __forceinline__ uint32_t scan(TopKShared& s, uint32_t x, int thread) {
  const int lane = thread & 31, warp = thread >> 5;
  uint32_t sum = x;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const uint32_t y = __shfl_up_sync(~0u, sum, d);
    if (lane >= d) sum += y;
  }
  __syncthreads();  // the previous scan's sums have been read
  if (lane == 31) s.warp_sums[warp] = sum;
  __syncthreads();
  uint32_t before = lane < warp ? s.warp_sums[lane] : 0;
#pragma unroll
  for (int d = 16; d > 0; d /= 2) before += __shfl_xor_sync(~0u, before, d);
  return before + sum - x;
}

// One value from each block of the cluster, in rank order. All loads are under way before the first is used.
template <int kBlocks>
__device__ __forceinline__ void load_peers(uint32_t address, uint32_t (&x)[kBlocks]) {
#pragma unroll
  for (int c = 0; c < kBlocks; ++c) x[c] = load_peer1(peer_address(address, c));
}

// The bin in which the `need`-th highest key lies, over all blocks of the cluster -> s.digit, s.above, s.inside.
template <int kBlocks>
__device__ __forceinline__ void find_bin(TopKShared& s, int pass, uint32_t need, int thread) {
  const int high = kTopBins - 1 - 2 * thread;  // this thread's bins, from the top: high, high - 1
  uint32_t upper = 0, lower = 0;
  if (kBlocks == 1) {
    upper = s.histogram[pass][high], lower = s.histogram[pass][high - 1];
  } else {
    const uint32_t at = shared_address(&s.histogram[pass][high - 1]);
    uint64_t both[kBlocks];
#pragma unroll
    for (int c = 0; c < kBlocks; ++c) both[c] = load_peer_long(peer_address(at, c));
#pragma unroll
    for (int c = 0; c < kBlocks; ++c) lower += static_cast<uint32_t>(both[c]), upper += static_cast<uint32_t>(both[c] >> 32);
  }
  const uint32_t above = scan(s, upper + lower, thread);
  if (above < need && above + upper >= need) s.digit = high, s.above = above, s.inside = upper;
  if (above + upper < need && above + upper + lower >= need) {
    s.digit = high - 1, s.above = above + upper, s.inside = lower;
  }
  __syncthreads();
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

// Sorts the `size` (a power of two, 32 to 1024) keys that the first threads hold, highest first.
__device__ __forceinline__ uint64_t sort(TopKShared& s, uint64_t x, int size, int thread) {
  int buffer = 0;  // two, so that one barrier an exchange suffices
  for (int run = 2; run <= size; run *= 2) {
    for (int d = run / 2; d > 0; d /= 2) {
      uint64_t y;
      if (d >= 32) {
        s.sorted[buffer][thread] = x;
        named_sync(1, size);
        y = s.sorted[buffer][thread ^ d];
        buffer ^= 1;
      } else {
        y = __shfl_xor_sync(~0u, x, d);
      }
      const bool wants_greater = ((thread & d) == 0) == ((thread & run) == 0);
      if ((y > x) == wants_greater) x = y;
    }
  }
  return x;
}

template <int kVectors, int kBlocks>
__global__ void __launch_bounds__(kTopThreads, 1) top_k_kernel(const __grid_constant__ TopKArgs args) {
  extern __shared__ __align__(16) uint8_t raw[];
  TopKShared& s = *reinterpret_cast<TopKShared*>(raw);
  const int thread = threadIdx.x, token = blockIdx.x / kBlocks, rank = blockIdx.x % kBlocks;
  const int count = min(max(__ldg(args.count + token), 0), args.width);
  const int first = rank * args.slice, last = min(first + args.slice, count);
  const float* row = args.scores + static_cast<int64_t>(token) * args.width;

  uint32_t keys[4 * kVectors];  // keys[4 i + j] is score first + 4 (1024 i + thread) + j; 0 where there is none
  const bool aligned = (args.width & 3) == 0;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = first + 4 * (kTopThreads * i + thread);
    float x[4];
    if (aligned && at + 4 <= last) {
      const float4 v = *reinterpret_cast<const float4*>(row + at);
      x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
#pragma unroll
      for (int j = 0; j < 4; ++j) keys[4 * i + j] = order_key(x[j]);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) keys[4 * i + j] = at + j < last ? order_key(row[at + j]) : 0;
    }
  }
  for (int i = thread; i < 3 * kTopBins; i += kTopThreads) s.histogram[0][i] = 0;
  if (thread == 0) s.ties = s.taken = 0;
  __syncthreads();

  // Winners: keys >= bound, or with `ordered` ties keys > bound and the first `need` that equal it.
  const int kept = min(args.k, count);
  uint32_t bound = 1, need = kept;
  bool ordered = false;
  if (count > args.k) {
    uint32_t prefix = 0;
#pragma unroll
    for (int pass = 0; pass < 3; ++pass) {
      const int shift = pass == 0 ? 21 : pass == 1 ? 10 : 0;
      const uint32_t mask = pass == 2 ? 1023 : 2047;
      const int decided = pass == 0 ? 32 : pass == 1 ? 21 : 10;  // bits above this one are equal to `prefix`
#pragma unroll
      for (int i = 0; i < 4 * kVectors; ++i) {
        const bool counts = keys[i] != 0 && (pass == 0 || keys[i] >> (decided & 31) == prefix);
        if (counts) atomicAdd(&s.histogram[pass][keys[i] >> shift & mask], 1u);
      }
      meet<kBlocks>();
      find_bin<kBlocks>(s, pass, need, thread);
      prefix = pass == 0 ? s.digit : prefix << (pass == 1 ? 11 : 10) | s.digit;
      need -= s.above;
      bound = prefix << shift;
      if (s.inside == need) break;  // all of the bin
      ordered = pass == 2;
    }
  }

  uint32_t quota = 0;  // ties this block may take
  if (ordered) {
    uint32_t own = 0;
#pragma unroll
    for (int i = 0; i < 4 * kVectors; ++i) own += keys[i] == bound;
    own = __reduce_add_sync(~0u, own);
    if ((thread & 31) == 0) atomicAdd(&s.ties, own);
    meet<kBlocks>();
    uint32_t ties[kBlocks], before = 0;
    load_peers(shared_address(&s.ties), ties);
#pragma unroll
    for (int c = 0; c < kBlocks; ++c) before += c < rank ? ties[c] : 0;
    quota = before < need ? need - before : 0;
    uint32_t seen = 0;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      uint32_t mine = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) mine += keys[4 * i + j] == bound;
      uint32_t place = seen + scan(s, mine, thread);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const bool tie = keys[4 * i + j] == bound;
        if (tie && place >= quota) keys[4 * i + j] = 0;
        place += tie;
      }
      if (thread == kTopThreads - 1) s.digit = place;
      __syncthreads();
      seen = s.digit;
    }
  }

  uint32_t wins = 0;
#pragma unroll
  for (int i = 0; i < 4 * kVectors; ++i) wins += keys[i] >= bound;
  uint32_t place = wins;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const uint32_t y = __shfl_up_sync(~0u, place, d);
    if ((thread & 31) >= d) place += y;
  }
  uint32_t start = 0;
  if ((thread & 31) == 31 && place > 0) start = atomicAdd(&s.taken, place);
  place += __shfl_sync(~0u, start, 31) - wins;
  if (wins > 0) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (keys[4 * i + j] >= bound) {
          const uint32_t index = first + 4 * (kTopThreads * i + thread) + j;
          s.winners[place++] = static_cast<uint64_t>(keys[4 * i + j]) << 32 | ~index;
        }
      }
    }
  }
  meet<kBlocks>();
  if (rank == 0) {
    // The winners of all blocks, one a thread, and zeros: at most k.
    uint32_t taken[kBlocks], place = thread, from = kBlocks;
    load_peers(shared_address(&s.taken), taken);
#pragma unroll
    for (int c = 0; c < kBlocks; ++c) {
      if (from == kBlocks) {
        if (place < taken[c]) {
          from = c;
        } else {
          place -= taken[c];
        }
      }
    }
    uint64_t x = from < kBlocks ? load_peer_long(peer_address(shared_address(&s.winners[place]), from)) : 0;
    int size = 32;
    while (size < args.k) size *= 2;
    if (thread < size) {
      x = sort(s, x, size, thread);
      if (thread < args.k) {
        args.indices[static_cast<int64_t>(token) * args.k + thread] =
            thread < kept ? static_cast<int32_t>(~static_cast<uint32_t>(x)) : 0;
      }
    }
    if (thread == 0) args.kept[token] = kept;
  }
  meet<kBlocks>();  // no block leaves while another reads from it
}

}  // namespace dsv4
