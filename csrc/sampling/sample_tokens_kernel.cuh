// A token of each row of logits, drawn as the row's settings say (dsv4_jax/ops/sample_tokens.py).
//
// 1. Race. A block takes a chunk of a row and finds the largest of logit / temperature + noise, or at temperature 0 the
//    largest logit.
// 2. Filters. The first of all chunks is drawn, unless filters are to be asked. Then a cluster has the row in
// registers:
//    a count and a sum over the tokens before the winner say whether it is kept; if not, those before it race again.
// Sums are added in an order that follows from the vocabulary alone.
#pragma once

#include "common/hopper.cuh"
#include "common/lanes.cuh"
#include "common/numbers.cuh"
#include "common/overlap.cuh"

namespace dsv4 {

constexpr int kRaceThreads = 256, kRaceOwn = 4, kRaceChunk = kRaceThreads * kRaceOwn;
constexpr int kRaceWarps = kRaceThreads / kLanes;
constexpr int kFilterThreads = 512, kFilterBlocks = kMaxCluster, kFilterWarps = kFilterThreads / kLanes;
constexpr int kFilterOwn = 32;  // most tokens of a thread
constexpr int kMostTokens = kFilterBlocks * kFilterThreads * kFilterOwn;
constexpr int kDigitBits = 4, kDigits = 1 << kDigitBits, kOrderBits = 32;
constexpr int kKindShift = 1;
constexpr uint32_t kFiltered = 2;  // of the kinds of a row

// A row of settings as SETTINGS of dsv4_jax/ops/sample_tokens.py packs it.
struct SampleSettings {
  float temperature, top_p, min_p, repetition, presence, frequency;
  int32_t top_k;
  uint32_t kind, seed_low, seed_high;
};
constexpr int kSettingWords = sizeof(SampleSettings) / sizeof(uint32_t);

struct SampleArgs {
  const float* logits;             // [rows, vocab]
  const SampleSettings* settings;  // [rows]
  const int32_t* position;         // [rows]
  int32_t* tokens;                 // [rows]
  uint64_t* winners;               // [rows, chunks]: of each chunk, as `entrant` has it
  int vocab, chunks;
};

// Larger for larger values, then for lower ids; zero is nobody's.
__device__ __forceinline__ uint64_t entrant(float value, int id) {
  return static_cast<uint64_t>(in_order(value)) << 32 | ~static_cast<uint32_t>(id);
}
__device__ __forceinline__ int id_of(uint64_t entrant) { return static_cast<int>(~static_cast<uint32_t>(entrant)); }

__device__ __forceinline__ uint64_t first_of_lanes(uint64_t x) {
  const auto order = static_cast<uint32_t>(x >> 32);
  const uint32_t most = __reduce_max_sync(kAllLanes, order);
  const uint32_t id = __reduce_max_sync(kAllLanes, order == most ? static_cast<uint32_t>(x) : 0u);
  return static_cast<uint64_t>(most) << 32 | id;
}

// Threefry-2x32 of 20 rounds (Salmon et al. 2011).
__device__ __forceinline__ uint2 threefry(uint32_t key0, uint32_t key1, uint32_t x0, uint32_t x1) {
  constexpr int kTurns[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  const uint32_t keys[3] = {key0, key1, key0 ^ key1 ^ 0x1BD11BDAu};
  x0 += keys[0], x1 += keys[1];
#pragma unroll
  for (int i = 0; i < 5; ++i) {
#pragma unroll
    for (int turn : kTurns[i % 2]) {
      x0 += x1;
      x1 = __funnelshift_l(x1, x1, turn) ^ x0;
    }
    x0 += keys[(i + 1) % 3], x1 += keys[(i + 2) % 3] + static_cast<uint32_t>(i + 1);
  }
  return make_uint2(x0, x1);
}

// Standard Gumbel noise of a token.
__device__ __forceinline__ float gumbel(const SampleSettings& row, int32_t position, int id) {
  const uint2 bits = threefry(row.seed_low, row.seed_high, static_cast<uint32_t>(position), static_cast<uint32_t>(id));
  float share = __fadd_rn(__uint2float_rn(bits.x) * 0x1p-32f, __uint2float_rn(bits.y) * 0x1p-64f);
  share = fminf(fmaxf(share, 0x1p-65f), 1.f - 0x1p-24f);
  return -logf(-log1pf(-share));
}

__device__ __forceinline__ float scaled(float logit, float temperature) {
  return temperature > 0.f ? __fdiv_rn(logit, temperature) : logit;
}

__global__ void __launch_bounds__(kRaceThreads) race_kernel(const __grid_constant__ SampleArgs args) {
  let_next_start();
  wait_for_previous();
  __shared__ uint64_t best_of[kRaceWarps];
  const int thread = threadIdx.x, lane = lane_of(thread), row_index = blockIdx.y;
  const SampleSettings row = args.settings[row_index];
  const int32_t position = args.position[row_index];
  const float* logits = args.logits + static_cast<size_t>(row_index) * args.vocab;
  uint64_t best = 0;
#pragma unroll
  for (int i = 0; i < kRaceOwn; ++i) {
    const int id = blockIdx.x * kRaceChunk + i * kRaceThreads + thread;
    if (id >= args.vocab) break;
    float value = scaled(logits[id], row.temperature);
    if (row.temperature > 0.f) value = __fadd_rn(value, gumbel(row, position, id));
    best = max(best, entrant(value, id));
  }
  best = first_of_lanes(best);
  if (lane == 0) best_of[warp_of(thread)] = best;
  __syncthreads();
  if (thread >= kLanes) return;
  best = first_of_lanes(lane < kRaceWarps ? best_of[lane] : 0);
  if (lane == 0) args.winners[static_cast<size_t>(row_index) * args.chunks + blockIdx.x] = best;
}

struct alignas(16) FilterShared {
  uint64_t parts[2][kFilterWarps];  // of each warp, of this exchange and the one before it
  uint32_t digits[2][kDigits];
};

// What the blocks of a row tell one another. Every exchange takes the other half of the shared memory: who writes there
// again has met everyone who read it.
struct RowExchange {
  FilterShared& s;
  int half = 0;

  // This lane's share of what all warps of the row put there: the same lanes have the same, in all warps.
  __device__ __forceinline__ void shares(uint64_t own, uint64_t (&parts)[4]) {
    const int lane = lane_of(threadIdx.x);
    half ^= 1;
    if (lane == 0) s.parts[half][warp_of(threadIdx.x)] = own;
    cluster_sync();
    static_assert(kFilterBlocks * kFilterWarps == 4 * kLanes, "four parts a lane");
    const uint32_t from = peer_address(shared_address(&s.parts[half][4 * (lane % 4)]), lane / 4);
    const uint4 low = load_peer(from), high = load_peer(from + sizeof(uint4));
    parts[0] = static_cast<uint64_t>(low.y) << 32 | low.x, parts[1] = static_cast<uint64_t>(low.w) << 32 | low.z;
    parts[2] = static_cast<uint64_t>(high.y) << 32 | high.x, parts[3] = static_cast<uint64_t>(high.w) << 32 | high.z;
  }

  __device__ __forceinline__ uint64_t first(uint64_t own) {
    uint64_t parts[4];
    shares(first_of_lanes(own), parts);
    return first_of_lanes(max(max(parts[0], parts[1]), max(parts[2], parts[3])));
  }

  // Sums over all threads of the row.
  __device__ __forceinline__ void add(uint32_t& count, float& mass) {
    count = __reduce_add_sync(kAllLanes, count);
    mass = lanes_sum<kLanes>(mass);
    uint64_t parts[4];
    shares(static_cast<uint64_t>(count) << 32 | __float_as_uint(mass), parts);
    count = 0, mass = 0.f;
#pragma unroll
    for (const uint64_t part : parts) {
      count += static_cast<uint32_t>(part >> 32);
      mass += __uint_as_float(static_cast<uint32_t>(part));
    }
    count = __reduce_add_sync(kAllLanes, count);
    mass = lanes_sum<kLanes>(mass);
  }
};

// The k-th largest of a row's numbers, NaN aside, digit by digit of their order.
template <int kOwn>
__device__ __forceinline__ float kth_largest(const float (&x)[kOwn], uint32_t k, FilterShared& s) {
  const int thread = threadIdx.x, lane = lane_of(thread);
  uint32_t found = 0, missing = k;
  if (thread < 2 * kDigits) s.digits[over<kDigits>(thread)][within<kDigits>(thread)] = 0;
  __syncthreads();
  int half = 0;
#pragma unroll 1
  for (int shift = kOrderBits - kDigitBits; shift >= 0; shift -= kDigitBits, half ^= 1) {
    uint64_t low = 0, high = 0;  // eight digits each, eight bits a digit
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const uint32_t order = in_order(x[i]);
      const bool here = x[i] == x[i] && ((order ^ found) >> shift) < kDigits;
      const uint32_t digit = within<kDigits>(static_cast<int>(order >> shift));
      const uint64_t one = static_cast<uint64_t>(here) << (8 * (digit % 8));
      low += digit < 8 ? one : 0, high += digit < 8 ? 0 : one;
    }
#pragma unroll
    for (int digit = 0; digit < kDigits; ++digit) {
      const auto own = static_cast<uint32_t>((digit < 8 ? low : high) >> (8 * (digit % 8))) & 0xFFu;
      const uint32_t sum = __reduce_add_sync(kAllLanes, own);
      if (lane == 0 && sum > 0) atomicAdd(&s.digits[half][digit], sum);
    }
    cluster_sync();      // of the other half everyone has read
    uint32_t count = 0;  // of digit 15 - lane
    if (lane < kDigits) {
      const uint32_t at = shared_address(&s.digits[half][kDigits - 1 - lane]);
#pragma unroll
      for (int block = 0; block < kFilterBlocks; ++block) {
        uint32_t of_block;
        asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(of_block) : "r"(peer_address(at, block)) : "memory");
        count += of_block;
      }
    }
    const uint32_t so_far = running_sum(count, lane);
    const int rank = min(__ffs(static_cast<int>(__ballot_sync(kAllLanes, so_far >= missing))) - 1, kDigits - 1);
    const uint32_t digit = rank < 0 ? 0 : kDigits - 1 - rank;  // fewer numbers than k: below all
    missing -= rank < 0 ? 0 : __shfl_sync(kAllLanes, so_far - count, max(rank, 0));
    found |= digit << shift;
    if (thread < kDigits) s.digits[half ^ 1][thread] = 0;
    __syncthreads();
  }
  return number_at(found);
}

// A cluster a row.
template <int kOwn>
__global__ void __launch_bounds__(kFilterThreads, 1) filter_kernel(const __grid_constant__ SampleArgs args) {
  wait_for_previous();
  const int thread = threadIdx.x, lane = lane_of(thread), rank = blockIdx.x % kFilterBlocks;
  const int row_index = blockIdx.x / kFilterBlocks;
  const SampleSettings row = args.settings[row_index];
  const uint64_t* winners = args.winners + static_cast<size_t>(row_index) * args.chunks;
  uint64_t best = 0;
  for (int i = lane; i < args.chunks; i += kLanes) best = max(best, winners[i]);
  int token = id_of(first_of_lanes(best));
  if (row.kind >> kKindShift != kFiltered) {  // all blocks of the row
    if (rank == 0 && thread == 0) args.tokens[row_index] = token;
    return;
  }
  __shared__ FilterShared s;
  RowExchange exchange = {s};
  const int32_t position = args.position[row_index];
  const float* logits = args.logits + static_cast<size_t>(row_index) * args.vocab;
  const auto id_at = [&](int i) { return (i * kFilterBlocks + rank) * kFilterThreads + thread; };
  float x[kOwn];  // NaN: there is no token
  uint64_t greatest = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) x[i] = id_at(i) < args.vocab ? logits[id_at(i)] : __uint_as_float(kFloatNaN);
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    x[i] = scaled(x[i], row.temperature);
    if (x[i] == x[i]) greatest = max(greatest, entrant(x[i], id_at(i)));
  }
  const float largest = number_at(static_cast<uint32_t>(exchange.first(greatest) >> 32));
  const float floor = row.min_p > 0.f ? largest + logf(row.min_p) : -kInf;
  const auto most = static_cast<uint32_t>(row.top_k > 0 ? min(row.top_k, args.vocab) : args.vocab);
  // How many of the tokens that `there` names, and the probability of those that min_p keeps, over the likeliest one's.
  const auto tally = [&](const auto& there, uint32_t& count, float& mass) {
    count = 0, mass = 0.f;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (!there(x[i], id_at(i))) continue;
      ++count;
      if (x[i] >= floor) mass += expf(x[i] - largest);
    }
    exchange.add(count, mass);
  };
  uint32_t count;
  float mass, reach = kInf;
  if (row.top_p < 1.f) {
    if (most < static_cast<uint32_t>(args.vocab)) {
      // Of the `most` likeliest: those above the last one, and as many equals of it as are missing, whichever.
      const float last = kth_largest(x, most, s);
      uint32_t ties;
      tally([&](float value, int) { return value == last; }, ties, mass);
      tally([&](float value, int) { return value > last; }, count, mass);
      if (last >= floor) mass += static_cast<float>(min(most - count, ties)) * expf(last - largest);
    } else {
      tally([](float value, int) { return value == value; }, count, mass);
    }
    reach = row.top_p * mass;
  }
#pragma unroll 1
  while (true) {
    const float value = scaled(logits[token], row.temperature);
    const auto before = [&](float other, int id) { return other > value || (other == value && id < token); };
    tally(before, count, mass);
    // The first one is always kept; so each row comes to an end, whatever is infinite or no number in it.
    if (count == 0 || (value >= floor && count < most && mass < reach)) break;
    best = 0;
#pragma unroll 1
    for (int i = 0; i < kOwn; ++i) {
      const int id = id_at(i);
      if (id >= args.vocab) break;
      const float other = scaled(logits[id], row.temperature);
      if (before(other, id) && other >= floor)
        best = max(best, entrant(__fadd_rn(other, gumbel(row, position, id)), id));
    }
    best = exchange.first(best);
    if (best == 0) break;
    token = id_of(best);
  }
  if (rank == 0 && thread == 0) args.tokens[row_index] = token;
  cluster_sync();  // nobody ends whom another one reads
}

}  // namespace dsv4
