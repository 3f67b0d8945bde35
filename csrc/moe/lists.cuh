// What goes before and after the products of moe/experts.cu: rows of tokens by expert, and each token's sum over its
// experts.
//
// A pair is a token and one of its experts. The pairs of an expert fill groups of 8 rows; a group's rows lie in blocks
// of 64 columns, 1 KiB each, as the matrix units want them (common/hopper.cuh), the blocks one after the other along K.
// Which row a pair has changes no bit of its result.
#pragma once

#include "common/hopper.cuh"
#include "common/overlap.cuh"

namespace dsv4 {

constexpr int kGroupRows = kSwizzle;
constexpr int kAtomBytes = kGroupRows * kRowBytes;  // a group's rows of a block
constexpr int kMaxExperts = 512;                    // of one device
constexpr int kMaxTop = 16;                         // experts of a token
constexpr int kListThreads = 256, kListWarps = kListThreads / kLanes;
constexpr int kMaxPairs = 98304;         // their experts fill a block's shared memory
constexpr uint32_t kElsewhere = 0xFFFF;  // expert of a pair that another device computes

// Rows of one expert that one pass multiplies, in a word: at most 127 rows, 512 experts and 2^16 groups.
struct RowTile {
  static constexpr int kRowBits = 7, kGroupBit = 16;
  static_assert(kMaxExperts == 1 << (kGroupBit - kRowBits), "what the bits between hold");

  uint32_t word;
  __device__ __forceinline__ static RowTile make(int expert, int group, int rows) {
    return {static_cast<uint32_t>(rows | expert << kRowBits | group << kGroupBit)};
  }
  __device__ __forceinline__ int rows() const { return word & ((1 << kRowBits) - 1); }
  __device__ __forceinline__ int expert() const { return word >> kRowBits & (kMaxExperts - 1); }
  __device__ __forceinline__ int group() const { return word >> kGroupBit; }
};

struct MoeArgs {
  const __nv_bfloat16* x;  // [T, hidden]
  const int32_t* chosen;   // [T, top] distinct experts; pairs of one that is named twice count each by itself
  const float* share;      // [T, top] their weights
  const uint8_t* gate_up;  // [experts, 2 * inter / 64, hidden / 128, 4352], packed; see moe/weights.cuh
  const uint8_t* down;     // [experts, hidden / 64, inter / 128, 4352]
  void* out;               // [T, hidden] float32; bf16 if there is something beside
  uint8_t* work;           // as many bytes as dsv4_moe_workspace says
  int tokens, top, hidden, inter;
  int experts, first;           // those of this device: first .. first + experts - 1
  int routed;                   // all that tokens choose among
  float limit;                  // of the SwiGLU
  const __nv_bfloat16* beside;  // [T, hidden], added to the sums of moe/e4m3.cu before they are rounded; null: nothing
};

// Where things lie in the workspace.
struct MoeWork {
  int32_t* tile_count;
  int32_t* taken;  // items beyond each block's first, of either product
  RowTile* tiles;
  int32_t* pairs;   // of a row
  uint8_t* rows;    // tokens' rows
  uint8_t* middle;  // rows between the products
  float* parts;     // [T * top, hidden] results of the experts
};

constexpr size_t kPageBytes = 1024;  // what lies in the workspace starts at multiples of it
__host__ __device__ constexpr size_t aligned(size_t bytes) {
  return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

// Groups that `pairs` can need: each expert's last one may hold a single row. Each pair of a single token has its own.
__host__ __device__ inline int most_groups(int tokens, int pairs, int experts) {
  const int partly = tokens == 1 || pairs < experts ? pairs : experts;
  return (pairs - partly) / kGroupRows + partly;
}

__host__ __device__ inline MoeWork moe_work(const MoeArgs& args, size_t* bytes) {
  const int pairs = args.tokens * args.top;
  const size_t groups = most_groups(args.tokens, pairs, args.experts);
  const size_t sizes[] = {static_cast<size_t>(pairs) * sizeof(RowTile), groups * kGroupRows * sizeof(int32_t),
                          groups * kGroupRows * args.hidden * 2, groups * kGroupRows * args.inter * 2,
                          static_cast<size_t>(pairs) * args.hidden * sizeof(float)};
  constexpr int kParts = sizeof(sizes) / sizeof(sizes[0]);
  size_t at[kParts + 1] = {kPageBytes};  // the counts come first
  for (int i = 0; i < kParts; ++i) at[i + 1] = at[i] + aligned(sizes[i]);
  if (bytes != nullptr) *bytes = at[kParts];
  constexpr int kMiddle = 3, kResults = 4;
  uint8_t* w = args.work;
  auto* counts = reinterpret_cast<int32_t*>(w);
  return {counts,    counts + 1,      reinterpret_cast<RowTile*>(w + at[0]),     reinterpret_cast<int32_t*>(w + at[1]),
          w + at[2], w + at[kMiddle], reinterpret_cast<float*>(w + at[kResults])};
}

// Byte of 16-byte chunk `chunk` of a row among rows of `columns` columns.
__device__ __forceinline__ size_t chunk_place(int group, int row, int chunk, int columns) {
  return (static_cast<size_t>(group) * (columns / kBlockColumns) + chunk / kSwizzle) * kAtomBytes + row * kRowBytes +
         ((chunk % kSwizzle ^ row) << 4);
}

// The experts of pairs lie in shared memory as uint16_t, read 16 bytes at a time.
constexpr int kWordPairs = kChunkBytes / sizeof(uint16_t);

// Bytes of shared memory of moe_lists_kernel.
inline int list_bytes(int pairs) { return (pairs + kWordPairs - 1) / kWordPairs * kChunkBytes; }

constexpr int kFewPairs = 512;  // so few that the first product's blocks make the list of tiles themselves

// How many pairs each expert has, by `kThreads` threads. `place` gets every pair with its expert.
template <int kThreads, typename Place>
__device__ __forceinline__ void count_pairs(const MoeArgs& args, int* count, const Place& place) {
  const int pairs = args.tokens * args.top;
  for (int e = threadIdx.x; e < args.experts; e += kThreads) count[e] = 0;
  __syncthreads();
#pragma unroll 4
  for (int p = threadIdx.x; p < pairs; p += kThreads) {
    const int e = __ldg(args.chosen + p) - args.first;
    const bool here = e >= 0 && e < args.experts;
    if (here) atomicAdd(count + e, 1);
    place(p, here ? static_cast<uint32_t>(e) : kElsewhere);
  }
  __syncthreads();
}

// The tiles of the products, by a warp: runs of at most `tile_rows` rows of an expert. `begin` gets each expert's first
// group; returns the number of tiles. Each lane takes a run of experts.
template <typename Begin>
__device__ __forceinline__ int list_tiles(const int* count, int experts, int tile_rows, RowTile* tiles,
                                          const Begin& begin) {
  const int lane = threadIdx.x & (kLanes - 1), each = (experts + kLanes - 1) / kLanes;
  const int from = min(lane * each, experts), to = min(from + each, experts);
  int2 sum = {0, 0};  // groups, tiles
  for (int e = from; e < to; ++e) {
    sum.x += (count[e] + kGroupRows - 1) / kGroupRows;
    sum.y += (count[e] + tile_rows - 1) / tile_rows;
  }
  int2 at = sum;
  for (int step = 1; step < kLanes; step *= 2) {
    const int x = __shfl_up_sync(kAllLanes, at.x, step), y = __shfl_up_sync(kAllLanes, at.y, step);
    if (lane >= step) at.x += x, at.y += y;
  }
  const int total = __shfl_sync(kAllLanes, at.y, kLanes - 1);
  at.x -= sum.x, at.y -= sum.y;
  for (int e = from; e < to; ++e) {
    begin(e, at.x);
    for (int row = 0; row < count[e] && tiles != nullptr; row += tile_rows) {
      tiles[at.y++] = RowTile::make(e, at.x + row / kGroupRows, min(tile_rows, count[e] - row));
    }
    at.x += (count[e] + kGroupRows - 1) / kGroupRows;
  }
  return total;
}

// Every block counts all pairs and copies the rows of some of them, or parts of rows: a warp each.
template <int kParts>
__global__ void __launch_bounds__(kListThreads) moe_lists_kernel(const __grid_constant__ MoeArgs args, int tile_rows) {
  extern __shared__ uint4 shared_experts[];
  __shared__ int count[kMaxExperts], first_group[kMaxExperts];
  wait_for_previous();
  let_next_start();  // not before: the next kernel reads at once which experts were chosen
  const int pairs = args.tokens * args.top, lane = threadIdx.x & (kLanes - 1);
  const int warp = blockIdx.x * kListWarps + (threadIdx.x / kLanes), warps = gridDim.x * kListWarps;
  const MoeWork work = moe_work(args, nullptr);
  auto* experts = reinterpret_cast<uint16_t*>(shared_experts);
  count_pairs<kListThreads>(args, count, [&](int p, uint32_t e) { experts[p] = static_cast<uint16_t>(e); });
  if (threadIdx.x < kLanes) {
    const int tiles = list_tiles(count, args.experts, tile_rows, blockIdx.x == 0 ? work.tiles : nullptr,
                                 [&](int e, int group) { first_group[e] = group; });
    if (threadIdx.x == 0 && blockIdx.x == 0) *work.tile_count = tiles, work.taken[0] = work.taken[1] = 0;
  }
  __syncthreads();
  const int chunks = args.hidden / kChunkColumns / kParts;
  for (int unit = warp; unit < pairs * kParts; unit += warps) {
    const int p = unit / kParts, part = unit % kParts;
    const uint32_t e = experts[p];
    if (e == kElsewhere) continue;
    // The pair's place among its expert's, eight pairs before it at a time.
    uint32_t equal = 0;
    for (int i = lane; i <= p / kWordPairs; i += kLanes) {
      const uint4 x = shared_experts[i];
      const uint32_t words[kWordPairs / 2] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int w = 0; w < kWordPairs / 2; ++w) {
        equal += (words[w] & kElsewhere) == e && kWordPairs * i + 2 * w < p;
        equal += words[w] >> 16 == e && kWordPairs * i + 2 * w + 1 < p;
      }
    }
    const int place = __reduce_add_sync(kAllLanes, equal);
    const int group = first_group[e] + place / kGroupRows, row = place % kGroupRows;
    if (lane == 0 && part == 0) work.pairs[group * kGroupRows + row] = p;
    const auto* from = reinterpret_cast<const uint4*>(args.x + static_cast<size_t>(p / args.top) * args.hidden);
#pragma unroll 8
    for (int c = part * chunks + lane; c < (part + 1) * chunks; c += kLanes) {
      *reinterpret_cast<uint4*>(work.rows + chunk_place(group, row, c, args.hidden)) = __ldg(from + c);
    }
  }
}

constexpr int kSumThreads = 128;
constexpr int kSumLevels = 3, kSumParts = 1 << kSumLevels;
constexpr int kSumAhead = 8;     // experts' results that are asked for at a time
constexpr int kSumWhole = 1024;  // tokens from which on a block adds up all columns of one
constexpr int kWordBits = 32;

// A token's experts that are here in the order in which their results are added: the same in all lanes of a warp.
struct SumOrder {
  static constexpr int kRankBits = 4, kDoneBits = 2;
  static_assert(kMaxTop <= 1 << kRankBits && kMaxTop * kDoneBits <= kWordBits && kSumLevels < 1 << kDoneBits);

  int count;
  uint32_t ranks[kMaxTop * kRankBits / kWordBits];  // which of the token's experts each is
  uint32_t done;                                    // levels of the tree that are complete before it is added
  float share;                                      // of the token's expert of the lane's number

  // Of those from `start` on, a multiple of kSumAhead.
  __device__ __forceinline__ uint32_t rank(int start, int i) const {
    return (start == 0 ? ranks[0] : ranks[1]) >> kRankBits * i & (kMaxTop - 1);
  }
  __device__ __forceinline__ uint32_t levels(int at) const { return done >> kDoneBits * at & ((1 << kDoneBits) - 1); }
};
static_assert(kSumAhead * SumOrder::kRankBits == kWordBits, "a word for each round of results");

// By a whole warp. `kOnce`: an expert that is named again has no result of its own.
template <bool kOnce>
__device__ __forceinline__ SumOrder sum_order(const MoeArgs& args, int token) {
  constexpr int kNever = 0x7FFFFFFF, kPartBit = 16;
  const int lane = lane_of(threadIdx.x);
  const bool named = lane < args.top;
  const uint32_t expert =
      named ? static_cast<uint32_t>(__ldg(args.chosen + token * args.top + lane)) - static_cast<uint32_t>(args.first)
            : ~0u;
  bool here = expert < static_cast<uint32_t>(args.experts);
  if constexpr (kOnce) here &= (__match_any_sync(kAllLanes, expert) & ((1u << lane) - 1)) == 0;
  // Parts, which experts follow in order, above the experts.
  const int mine =
      here ? static_cast<int>(expert * kSumParts / static_cast<uint32_t>(args.routed) << kPartBit | expert) : kNever;
  int place = 0, before = -1;
  for (int k = 0; k < args.top; ++k) {
    const int other = __shfl_sync(kAllLanes, mine, k);
    if (other < mine || (other == mine && k < lane)) ++place, before = max(before, other);
  }
  const uint32_t passed = before < 0 ? 0u : static_cast<uint32_t>(mine ^ before) >> kPartBit;
  const uint32_t levels = kWordBits - __clz(passed);
  SumOrder order;
#pragma unroll
  for (int i = 0; i < kMaxTop / kSumAhead; ++i) {
    const int at = place - i * kSumAhead;
    const bool own = here && at >= 0 && at < kSumAhead;
    order.ranks[i] = __reduce_or_sync(kAllLanes, own ? lane << SumOrder::kRankBits * at : 0u);
  }
  order.done = __reduce_or_sync(kAllLanes, here ? levels << SumOrder::kDoneBits * place : 0u);
  order.count = static_cast<int>(__reduce_add_sync(kAllLanes, here ? 1u : 0u));
  order.share = named ? __ldg(args.share + token * args.top + lane) : 0.f;
  return order;
}

// Sums of a part, of pairs of parts, of quarters and of all.
template <int kOwn>
struct SumTree {
  float levels[kSumLevels + 1][kOwn] = {};

  // When `done` levels are complete, from the one after the first on.
  template <int kLevel = 1>
  __device__ __forceinline__ void carry(uint32_t done) {
    if constexpr (kLevel < kSumLevels) {
      if (done <= kLevel) return;
#pragma unroll
      for (int c = 0; c < kOwn; ++c) levels[kLevel + 1][c] += levels[kLevel][c], levels[kLevel][c] = 0;
      carry<kLevel + 1>(done);
    }
  }
  // A part's sum begins as its first number. Zero plus that differs at most in the sign of a zero, and what adds the
  // part up begins as zero: there it is lost.
  template <typename Add>
  __device__ __forceinline__ void add(uint32_t done, const Add& to) {
    float(&part)[kOwn] = levels[0];
    if (done == 0) {
#pragma unroll
      for (int c = 0; c < kOwn; ++c) part[c] = to(part[c], c);
      return;
    }
#pragma unroll
    for (int c = 0; c < kOwn; ++c) levels[1][c] += part[c], part[c] = to.first(c);
    carry(done);
  }
  __device__ __forceinline__ const float (&total())[kOwn] {
#pragma unroll
    for (int k = 0; k < kSumLevels; ++k) {
#pragma unroll
      for (int c = 0; c < kOwn; ++c) levels[k + 1][c] += levels[k][c];
    }
    return levels[kSumLevels];
  }
};

// The experts' results by pair, of moe/experts.cu.
struct FloatParts {
  using Number = float;
  using Words = float4;
  static constexpr int kOwn = 4;          // columns of a thread
  static constexpr bool kShared = false;  // a share is still to be multiplied with
  struct Addend {
    float x[kOwn], share;
    __device__ __forceinline__ float operator()(float sum, int c) const { return fmaf(share, x[c], sum); }
    __device__ __forceinline__ float first(int c) const { return share * x[c]; }
  };
  __device__ __forceinline__ static Addend addend(const Words& x, float share) { return {{x.x, x.y, x.z, x.w}, share}; }
};

// Has an address made where it stands, once: not again under the condition of each load.
__device__ __forceinline__ void made(uintptr_t& address) { asm volatile("" : "+l"(address)); }

// Each token's experts' results times their shares. All experts there are make eight parts; in each they are added in
// their order, and the parts by a binary tree: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)). So devices that have whole
// branches of the tree give sums that, added by the rest of it, are those of one device. A warp finds the order by
// itself; all that a thread adds up is asked for before the first is waited for. `kBeside`: what is beside the sums is
// added to them, and they are rounded.
template <typename Parts, bool kBeside>
__global__ void __launch_bounds__(kSumThreads)
    moe_sum_kernel(const __grid_constant__ MoeArgs args, const typename Parts::Number* __restrict__ parts) {
  constexpr int kOwn = Parts::kOwn, kBlockColumns = kSumThreads * kOwn;
  const int token = blockIdx.x;
  const SumOrder order = sum_order<Parts::kShared>(args, token);
  wait_for_previous();
  const size_t row = static_cast<size_t>(token) * args.hidden;
  const uint32_t row_bytes = args.hidden * sizeof(typename Parts::Number);
  // Whole warps: columns are in 256s.
  for (int column = blockIdx.y * kBlockColumns + threadIdx.x * kOwn; column < args.hidden;
       column += gridDim.y * kBlockColumns) {
    auto from = reinterpret_cast<uintptr_t>(parts + row * args.top + column);
    made(from);
    [[maybe_unused]] typename Parts::Words beside;
    if constexpr (kBeside) beside = *reinterpret_cast<const typename Parts::Words*>(args.beside + row + column);
    SumTree<kOwn> sums;
    for (int start = 0; start < order.count; start += kSumAhead) {
      typename Parts::Words words[kSumAhead];
#pragma unroll
      for (int i = 0; i < kSumAhead; ++i) {
        uintptr_t at = from + order.rank(start, i) * row_bytes;
        made(at);
        if (start + i < order.count) words[i] = __ldcs(reinterpret_cast<const typename Parts::Words*>(at));
      }
#pragma unroll
      for (int i = 0; i < kSumAhead; ++i) {
        if (start + i >= order.count) break;
        const float share = Parts::kShared ? 1.f : __shfl_sync(kAllLanes, order.share, order.rank(start, i));
        sums.add(order.levels(start + i), Parts::addend(words[i], share));
      }
    }
    const float(&all)[kOwn] = sums.total();
    if constexpr (kBeside) {
      *reinterpret_cast<typename Parts::Words*>(static_cast<__nv_bfloat16*>(args.out) + row + column) =
          Parts::rounded(all, beside);
    } else {
      auto* const out = reinterpret_cast<float4*>(static_cast<float*>(args.out) + row + column);
#pragma unroll
      for (int c = 0; c < kOwn; c += 4) out[c / 4] = {all[c], all[c + 1], all[c + 2], all[c + 3]};
    }
  }
}

template <typename Parts, bool kBeside = false>
cudaError_t sum_parts(const MoeArgs& args, const typename Parts::Number* parts, cudaStream_t stream) {
  constexpr int kBlockColumns = kSumThreads * Parts::kOwn;
  const int blocks = args.tokens < kSumWhole ? (args.hidden + kBlockColumns - 1) / kBlockColumns : 1;
  return start(moe_sum_kernel<Parts, kBeside>, {dim3(args.tokens, blocks), kSumThreads}, true, stream, args, parts);
}

}  // namespace dsv4
