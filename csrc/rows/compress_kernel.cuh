// The CSA and HCA compressors (dsv4_jax/ops/compress.py) in one launch: state update and, where a token completes an
// entry, softmax pool, RMSNorm, RoPE, Hadamard, quantisation and store.
//
// A row of E channels is held four to a thread, an index key of a decode step one. No block of a launch reads a state
// row that another writes: a step's rows come from its operands, older ones from ring rows it leaves alone. A step too
// long for that brings its old rows in `history`, copied before.
//
// CSA: a block of four warps takes a token of the main compressor or of the indexer's, whose key one warp finishes; of
// a long chunk, four tokens, or each of its warps four of the indexer's. HCA: a block takes an entry. All threads of a
// row do the same work, each for its channels.
//
// A plan and a block table may hold anything: slots, blocks, rows and tokens are compared with their number before they
// become addresses, and positions, which are unsigned here, only enter as remainders.
#pragma once

#include "rows/emit.cuh"

namespace dsv4 {

constexpr int kCompressThreads = kDim / kOwn;  // a KV row takes a block, an index key a warp
constexpr int kCompressWarps = kCompressThreads / kLanes;
constexpr int kCompressBlocks = 4;  // an SM

// The parts of a row of CSA state: what a token gives the entry of its own group and the one after.
enum CsaPart : int { kFirstValue, kSecondValue, kFirstScore, kSecondScore };

struct CompressPlan {
  const int32_t* token_slot;      // [T]
  const int32_t* token_position;  // [T]
  const int32_t* token_seq;       // [T]
  const int32_t* seq_start;       // [B]
  const int32_t* seq_count;       // [B]
  const int32_t* seq_first;       // [B]
  const int32_t* table;           // [slots, columns] block ids
  const int32_t* groups;          // HCA: [G, J] tokens of each entry, padded with T
  int tokens, sequences, slots, columns, group_count, group_length;
};

struct Compressor {
  float* state;          // CSA: [.., 4 E] ring of [kv | score]; HCA: [.., 3 E] banks of [max | sum | acc]
  const float* kv;       // [T, 2 E] or [T, E], rows `kv_stride` apart
  const float* score;    // as kv, rows `score_stride` apart
  const float* ape;      // [ratio, width of score], added to the scores of a step: row p % ratio at position p; or null
  const float* history;  // old state rows or null: CSA [B * 7, 4 E], HCA [B, 3 E]
  EpilogueArgs epilogue;  // its angles: of the first position of each token's entry
  RowPool pool;
  int ratio, ordinal, slots, ring, base, rows_per_block, blocks;
  int kv_stride, score_stride;
};

// Whether `id` is one of 0 .. number - 1.
__device__ __forceinline__ bool below(int id, int number) {
  return static_cast<unsigned>(id) < static_cast<unsigned>(number);
}

// Where the block table has the block of entry `entry` of `slot`, which exists; of the last column, if it has none.
__device__ __forceinline__ const int32_t* block_of(const Compressor& c, const CompressPlan& plan, int slot, int entry) {
  return plan.table + static_cast<int64_t>(slot) * plan.columns + min(entry / c.rows_per_block, plan.columns - 1);
}

// Where that entry is stored; negative without a block: then it is not stored anywhere.
__device__ __forceinline__ int64_t entry_row(const Compressor& c, const CompressPlan& plan, int slot, int entry) {
  const int block = __ldg(block_of(c, plan, slot, entry)), column = entry / c.rows_per_block;
  const int64_t row =
      static_cast<int64_t>(c.base) + static_cast<int64_t>(block) * c.rows_per_block + entry % c.rows_per_block;
  return block > 0 && block < c.blocks && column < plan.columns ? row : -1;
}

// A thread's columns, from `column` on, of each half of a token's [kv | score].
template <int kChannels, int kCount>
__device__ __forceinline__ void load_parts(const Compressor& c, int token, int column,
                                           Floats<kCount> (&parts)[kCsaParts]) {
  const float* kv = c.kv + static_cast<int64_t>(token) * c.kv_stride + column;
  const float* score = c.score + static_cast<int64_t>(token) * c.score_stride + column;
  parts[kFirstValue] = load_constants<kCount>(kv), parts[kSecondValue] = load_constants<kCount>(kv + kChannels);
  parts[kFirstScore] = load_constants<kCount>(score), parts[kSecondScore] = load_constants<kCount>(score + kChannels);
}

// The position bias of their scores; nought where there is none.
template <int kChannels, int kCount>
__device__ __forceinline__ void load_bias(const Compressor& c, unsigned position, int column,
                                          Floats<kCount> (&bias)[kCsaHalves]) {
#pragma unroll
  for (int half = 0; half < kCsaHalves; ++half) {
    constexpr float kNought = -0.f;  // which leaves every number as it is
    fill(bias[half], kNought);
    if (c.ape != nullptr)
      bias[half] = load_constants<kCount>(c.ape + (kCsaHalves * (position % kCsaRatio) + half) * kChannels + column);
  }
}

// Stores them in row `place` of the ring.
template <int kChannels, int kCount>
__device__ __forceinline__ void store_parts(float* ring, unsigned place, const Floats<kCount> (&parts)[kCsaParts]) {
#pragma unroll
  for (int i = 0; i < kCsaParts; ++i)
    store_floats(ring + (static_cast<int64_t>(place) * kCsaParts + i) * kChannels, parts[i]);
}

// Softmax over the rows, per channel, and the sum of the values weighted by it.
template <int kRows, int kCount>
__device__ __forceinline__ Floats<kCount> softmax_pool(const Floats<kCount> (&value)[kRows],
                                                       const Floats<kCount> (&weight)[kRows]) {
  Floats<kCount> pooled;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    float peak = weight[0].x[i];
#pragma unroll
    for (int j = 1; j < kRows; ++j) peak = max_nan(peak, weight[j].x[i]);
    float w[kRows], p[kRows];
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      w[j] = exact_exp(__fsub_rn(weight[j].x[i], peak));
      p[j] = __fmul_rn(w[j], value[j].x[i]);
    }
#pragma unroll
    for (int n = kRows / 2; n > 0; n /= 2) {
#pragma unroll
      for (int j = 0; j < n; ++j) w[j] = __fadd_rn(w[j], w[j + n]), p[j] = __fadd_rn(p[j], p[j + n]);
    }
    pooled.x[i] = __fdiv_rn(p[0], w[0]);
  }
  return pooled;
}

// A sequence of the plan is a run of tokens of one slot, and only it has that slot: which of the tokens behind a token
// this step schedules, and whether its ring row will be overrun, the slots around it tell. So nothing waits for fields
// of sequences.
struct CsaToken {
  int token, slot;
  unsigned position;
  int behind;  // how many of the seven tokens before it this step schedules
};

// Of a lane: the slot and position of the token as many places after `token` as the lane is after 7. The slot is 0, as
// of padding, beyond the step and if there is no such slot.
struct CsaPlace {
  int at, slot;
  unsigned position;
};
__device__ __forceinline__ CsaPlace place_of_lane(const CompressPlan& plan, int token, int slots) {
  const int at = token - kCsaBehind + static_cast<int>(threadIdx.x & (kLanes - 1)),
            clamped = min(max(at, 0), plan.tokens - 1);
  const int slot = __ldg(plan.token_slot + clamped), position = __ldg(plan.token_position + clamped);
  return {at, (at == clamped) & below(slot, slots) ? slot : 0, static_cast<unsigned>(position)};
}

__device__ __forceinline__ CsaToken token_of(const CsaPlace& here, int token) {
  const int slot = __shfl_sync(~0u, here.slot, kCsaBehind);
  const unsigned same = __ballot_sync(~0u, here.slot == slot) & ((1u << kCsaBehind) - 1);
  return {token, slot, __shfl_sync(~0u, here.position, kCsaBehind), __popc(same)};
}

// Which of `kTokens` tokens from `first` on stay in their ring, and which complete an entry: bit i is token first + i.
struct CsaWork {
  unsigned kept, completed;
};
template <int kTokens>
__device__ __forceinline__ CsaWork work_of(const CompressPlan& plan, const CsaPlace& here, int first, int ring) {
  const int last = plan.tokens - 1, ahead = __ldg(plan.token_slot + min(max(here.at + ring, 0), last));
  // No branch: it would put a load behind another.
  const bool scheduled = (here.at >= first) & (here.at < first + kTokens) & (here.slot > 0);
  const bool newest = (here.at + ring > last) | (ahead != here.slot), full = (here.position + 1) % kCsaRatio == 0;
  return {__ballot_sync(~0u, scheduled & newest) >> kCsaBehind, __ballot_sync(~0u, scheduled & full) >> kCsaBehind};
}

template <int kChannels>
__device__ __forceinline__ float* ring_of(const Compressor& c, int slot, int column) {
  return c.state + (static_cast<int64_t>(c.ordinal) * c.slots + slot) * c.ring * (kCsaParts * kChannels) + column;
}

// The first `kLoaded` rows of the entry that a token completes, without the bias of those that this step schedules.
template <int kChannels, int kLoaded, int kCount>
__device__ __forceinline__ void load_rows(const Compressor& c, const CompressPlan& plan, const CsaToken& t, int column,
                                          Floats<kCount> (&value)[kCsaRows], Floats<kCount> (&weight)[kCsaRows]) {
  const float* kv = c.kv + static_cast<int64_t>(t.token) * c.kv_stride + column;
  const float* score = c.score + static_cast<int64_t>(t.token) * c.score_stride + column;
  if (t.behind == kCsaBehind) {
#pragma unroll
    for (int j = 0; j < kLoaded; ++j) {
      const int64_t back = kCsaBehind - j, half = j >= kCsaRatio ? kChannels : 0;
      value[j] = load_constants<kCount>(kv - back * c.kv_stride + half),
      weight[j] = load_constants<kCount>(score - back * c.score_stride + half);
    }
    return;
  }
  // Older rows are behind this one in the ring, beyond its start at its end, or in a history.
  int around = static_cast<int>(t.position % c.ring);
  const float* old = ring_of<kChannels>(c, t.slot, column) + static_cast<int64_t>(around) * (kCsaParts * kChannels);
  if (c.history != nullptr) {
    const int64_t row = min(max(__ldg(plan.token_seq + t.token), 0), plan.sequences - 1);
    old = c.history + ((row + 1) * kCsaBehind + t.behind) * (kCsaParts * kChannels) + column, around = kCsaBehind;
  }
#pragma unroll
  for (int j = 0; j < kLoaded; ++j) {
    const int back = kCsaBehind - j, half = j >= kCsaRatio ? kChannels : 0;
    const float* before = old + static_cast<int64_t>((back > around ? c.ring : 0) - back) * (kCsaParts * kChannels);
    const float* v = back <= t.behind ? kv - static_cast<int64_t>(back) * c.kv_stride : before;
    const float* l = back <= t.behind ? score - static_cast<int64_t>(back) * c.score_stride : before + 2 * kChannels;
    fill(value[j], 0), fill(weight[j], -kInf);
    if (static_cast<unsigned>(back) <= t.position)
      value[j] = load_floats<kCount>(v + half), weight[j] = load_floats<kCount>(l + half);
  }
}

// That bias: rows of the state have theirs.
template <int kChannels, int kLoaded, int kCount>
__device__ __forceinline__ void add_bias(const Compressor& c, const CsaToken& t, int column,
                                         Floats<kCount> (&weight)[kCsaRows]) {
  if (c.ape == nullptr) return;
#pragma unroll
  for (int j = 0; j < kLoaded; ++j) {
    const float* ape = c.ape + (kCsaHalves * (j % kCsaRatio) + j / kCsaRatio) * kChannels + column;
    if (kCsaBehind - j <= t.behind) add(weight[j], load_constants<kCount>(ape));
  }
}

// One token of a CSA compressor: its ring row, and the entry it completes. The threads of a row, `kCount` channels
// each, call it together, in whole warps. Loads wait for each other twice at most: what depends on nothing (the plan,
// the finish, the token's own row) is asked for first, all the rest as soon as the slot and the position are known.
template <int kChannels, int kCount>
__device__ __forceinline__ void compress_token(const Compressor& c, const CompressPlan& plan, int token, float* shared,
                                               int thread) {
  constexpr bool kOneWarp = kChannels == kIndexDim && kCount < kOwn;  // finishes the row, four channels a lane
  const int column = kCount * thread;
  const CsaPlace here = place_of_lane(plan, token, c.slots);
  const CsaWork work = work_of<1>(plan, here, token, c.ring);
  const CsaToken t = token_of(here, token);
  const Epilogue epilogue = load_epilogue<kChannels>(c.epilogue, token, kOneWarp ? lane_of(thread) : thread);
  Floats<kCount> own[kCsaParts], bias[kCsaHalves], value[kCsaRows], weight[kCsaRows];
  load_parts<kChannels>(c, token, column, own);
  load_bias<kChannels>(c, t.position, column, bias);
  int64_t to = -1;
  if (work.completed != 0) {
    load_rows<kChannels, kCsaBehind>(c, plan, t, column, value, weight);
    to = entry_row(c, plan, t.slot, t.position / kCsaRatio);
  }
  add(own[kFirstScore], bias[0]), add(own[kSecondScore], bias[1]);
  if (work.kept != 0) store_parts<kChannels>(ring_of<kChannels>(c, t.slot, column), t.position % c.ring, own);
  if (work.completed == 0) return;
  add_bias<kChannels, kCsaBehind>(c, t, column, weight);
  value[kCsaBehind] = own[kSecondValue], weight[kCsaBehind] = own[kSecondScore];
  const Floats<kCount> pooled = softmax_pool(value, weight);
  if constexpr (kOneWarp) {
    shared[thread] = pooled.x[0];
    __syncthreads();
    if (thread >= kLanes) return;
    emit_row<kChannels>(c.epilogue, epilogue, c.pool, load4(shared + kOwn * thread), to, nullptr, thread);
  } else {
    emit_row<kChannels>(c.epilogue, epilogue, c.pool, pooled, to, shared, thread);
  }
}

// As `compress_token` four tokens of a long chunk, where about one completes an entry and hardly any stays in its ring.
template <int kChannels>
__device__ __forceinline__ void compress_tokens(const Compressor& c, const CompressPlan& plan, int first, float* shared,
                                                int thread) {
  const int column = kOwn * thread;
  const CsaWork work = work_of<kCsaRatio>(plan, place_of_lane(plan, first, c.slots), first, c.ring);
  for (unsigned rest = work.kept; rest != 0; rest &= rest - 1) {
    const int token = first + __ffs(rest) - 1;
    const CsaToken t = token_of(place_of_lane(plan, token, c.slots), token);
    Float4 own[kCsaParts], bias[kCsaHalves];
    load_parts<kChannels>(c, t.token, column, own), load_bias<kChannels>(c, t.position, column, bias);
    add(own[kFirstScore], bias[0]), add(own[kSecondScore], bias[1]);
    store_parts<kChannels>(ring_of<kChannels>(c, t.slot, column), t.position % c.ring, own);
  }
  for (unsigned rest = work.completed; rest != 0; rest &= rest - 1) {
    const int token = first + __ffs(rest) - 1;
    const CsaToken t = token_of(place_of_lane(plan, token, c.slots), token);
    Float4 value[kCsaRows], weight[kCsaRows];
    load_rows<kChannels, kCsaRows>(c, plan, t, column, value, weight);
    const Epilogue epilogue = load_epilogue<kChannels>(c.epilogue, token, thread);
    const int64_t to = entry_row(c, plan, t.slot, t.position / kCsaRatio);
    add_bias<kChannels, kCsaRows>(c, t, column, weight);
    emit_row<kChannels>(c.epilogue, epilogue, c.pool, softmax_pool(value, weight), to, shared, thread);
  }
}

struct CsaArgs {
  CompressPlan plan;
  Compressor main, index;  // either may be absent (state null)
  int main_blocks;
};

// Blocks 0 .. main_blocks - 1 are the main compressor's, kTokens rows of 512 each; the others the indexer's: a token
// each, or of a long chunk as many to a warp.
template <int kTokens>
__global__ void __launch_bounds__(kCompressThreads, kCompressBlocks) csa_kernel(const __grid_constant__ CsaArgs args) {
  __shared__ alignas(16) float shared[kDim];
  const int thread = threadIdx.x, block = blockIdx.x;
  if (block < args.main_blocks) {
    const auto compress = kTokens == 1 ? compress_token<kDim, kOwn> : compress_tokens<kDim>;
    compress(args.main, args.plan, block * kTokens, shared, thread);
  } else if constexpr (kTokens == 1) {
    compress_token<kIndexDim, kIndexDim / kCompressThreads>(args.index, args.plan, block - args.main_blocks, shared,
                                                            thread);
  } else {
    const int first = ((block - args.main_blocks) * kCompressWarps + warp_of(thread)) * kTokens;
    if (first < args.plan.tokens) compress_tokens<kIndexDim>(args.index, args.plan, first, nullptr, lane_of(thread));
  }
}

struct HcaArgs {
  CompressPlan plan;
  Compressor compressor;
};

// One block an HCA entry (or the part of it that this step schedules): the online softmax over its tokens, in order.
__global__ void __launch_bounds__(kCompressThreads, kCompressBlocks) hca_kernel(const __grid_constant__ HcaArgs args) {
  constexpr int kChannels = kDim, kAhead = 6;
  __shared__ alignas(16) float shared[kDim];
  const Compressor& c = args.compressor;
  const CompressPlan& plan = args.plan;
  const int thread = threadIdx.x;
  const int32_t* members = plan.groups + static_cast<int64_t>(blockIdx.x) * plan.group_length;
  const int token = __ldg(members);  // T or anything that is no token: no entry
  // Needed last, where the registers are full: now only fetched. So are the angles: the same for all tokens of an
  // entry.
  prefetch(c.epilogue.norm + kOwn * thread);
  if (!below(token, plan.tokens)) return;
  prefetch(c.epilogue.cosine + static_cast<int64_t>(token) * kRopePairs),
      prefetch(c.epilogue.sine + static_cast<int64_t>(token) * kRopePairs);
  const int slot = __ldg(plan.token_slot + token), start = __ldg(plan.token_position + token),
            row = __ldg(plan.token_seq + token);
  const float* kv = c.kv + static_cast<int64_t>(token) * c.kv_stride + kOwn * thread;
  const float* score = c.score + static_cast<int64_t>(token) * c.score_stride + kOwn * thread;
  prefetch(kv), prefetch(score);
  // A test of all, so that all are asked for before it.
  if ((slot == 0) | !below(slot, c.slots) | (start < 0) | !below(row, plan.sequences)) return;
  const int entry = start / c.ratio;
  prefetch(block_of(c, plan, slot, entry));
  const int end = __ldg(plan.seq_start + row) + __ldg(plan.seq_count + row);
  // A group ends with its row, its entry or the step, whichever is first.
  int count = min(plan.group_length, plan.tokens - token);
  if (count > 1) count = min(min(end - start, c.ratio - start % c.ratio), count);
  float* banks =
      c.state + (static_cast<int64_t>(c.ordinal) * c.slots + slot) * c.ring * (kHcaParts * kChannels) + kOwn * thread;

  Float4 peak, total, acc;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) peak.x[i] = -kInf, total.x[i] = 0, acc.x[i] = 0;
  if (start % c.ratio != 0) {
    const float* from = c.history == nullptr
                            ? banks + static_cast<int64_t>((start - 1) % c.ring) * (kHcaParts * kChannels)
                            : c.history + static_cast<int64_t>(row) * (kHcaParts * kChannels) + kOwn * thread;
    peak = load4(from), total = load4(from + kChannels), acc = load4(from + 2 * kChannels);
  }
  const float* ape = c.ape == nullptr ? nullptr : c.ape + start % c.ratio * kChannels + kOwn * thread;
  for (int step = 0; step < count; step += kAhead) {
    Float4 value[kAhead], logit[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int64_t i = step + j;
      if (i >= count) continue;
      value[j] = load4_constant(kv + i * c.kv_stride), logit[j] = load4_constant(score + i * c.score_stride);
    }
    if (ape != nullptr) {
      Float4 bias[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        if (step + j < count) bias[j] = load4_constant(ape + (step + j) * kChannels);
      }
#pragma unroll
      for (int j = 0; j < kAhead; ++j) add(logit[j], bias[j]);
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (step + j >= count) break;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        // One of the two exponentials of the update is exp(0) = 1.
        const float p = peak.x[i], l = logit[j].x[i];
        const bool rises = l > p;
        const float smaller = exact_exp(-fabsf(__fsub_rn(p, l)));
        const float decay = rises ? smaller : 1.f, weight = rises ? 1.f : smaller;
        peak.x[i] = max_nan(p, l);
        total.x[i] = __fadd_rn(__fmul_rn(total.x[i], decay), weight);
        acc.x[i] = __fadd_rn(__fmul_rn(acc.x[i], decay), __fmul_rn(weight, value[j].x[i]));
      }
      const int position = start + step + j;
      if (position >= end - c.ring) {
        float* to = banks + static_cast<int64_t>(static_cast<unsigned>(position) % c.ring) * (kHcaParts * kChannels);
        store4(to, peak), store4(to + kChannels, total), store4(to + 2 * kChannels, acc);
      }
    }
  }
  if ((start + count) % c.ratio != 0) return;
  const int64_t to = entry_row(c, plan, slot, entry);
  const Epilogue epilogue = load_epilogue<kChannels>(c.epilogue, token, thread);
  Float4 pooled;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) pooled.x[i] = __fdiv_rn(acc.x[i], total.x[i]);
  emit_row<kChannels>(c.epilogue, epilogue, c.pool, pooled, to, shared, thread);
}

}  // namespace dsv4
