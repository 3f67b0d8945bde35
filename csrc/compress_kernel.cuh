// The CSA and HCA compressors (dsv4_jax/ops/compress.py) in one launch: state update and, where a token completes an
// entry, softmax pool, RMSNorm, RoPE, Hadamard, quantisation and store.
//
// A row of E channels is held four to a thread. No block of a launch reads a state row that another writes: a step's rows
// come from its operands, older ones from ring rows it leaves alone. A step too long for that brings its old rows in
// `history`, copied before.
#pragma once

#include "emit_row.cuh"

namespace dsv4 {

constexpr int kCompressThreads = 128;
constexpr int kCsaRatio = 4;

struct CompressPlan {
  const int32_t* token_slot;      // [T]
  const int32_t* token_position;  // [T]
  const int32_t* token_row;       // [T]
  const int32_t* row_start;       // [B]
  const int32_t* row_count;       // [B]
  const int32_t* row_first;       // [B]
  const int32_t* table;           // [slots, columns] block ids
  const int32_t* groups;          // HCA: [G, J] tokens of each entry, padded with T
  int tokens, columns, group_count, group_length;
};

struct CompressStream {
  float* state;          // CSA: [.., 4 E] ring of [kv | score]; HCA: [.., 3 E] banks of [max | sum | acc]
  const float* kv;       // [T, 2 E] or [T, E], rows `kv_stride` apart
  const float* score;    // as kv, rows `score_stride` apart
  const float* ape;      // [ratio, width of score], added to the scores of a step: row p % ratio at position p; or null
  const float* history;  // old state rows or null: CSA [B * 7, 4 E], HCA [B, 3 E]
  FinishArgs finish;
  RowPool pool;
  int ratio, ordinal, slots, ring, base, rows_per_block;
  int kv_stride, score_stride;
};

// Scores of a step with the position bias at `ape`, where there is one. Asked for together: neither waits for the other.
__device__ __forceinline__ Float4 load_score(const float* score, const float* ape) {
  Float4 v = load4_constant(score);
  if (ape == nullptr) return v;
  const Float4 bias = load4_constant(ape);
#pragma unroll
  for (int i = 0; i < 4; ++i) v.x[i] = __fadd_rn(v.x[i], bias.x[i]);
  return v;
}

// Where the block table has the block of entry `entry` of `slot`.
__device__ __forceinline__ const int32_t* block_of(const CompressStream& s, const CompressPlan& plan, int slot, int entry) {
  return plan.table + static_cast<int64_t>(slot) * plan.columns + min(entry / s.rows_per_block, plan.columns - 1);
}

// Where that entry is stored; negative without a block: then it is not stored anywhere.
__device__ __forceinline__ int64_t entry_row(const CompressStream& s, const CompressPlan& plan, int slot, int entry) {
  const int block = __ldg(block_of(s, plan, slot, entry));
  const int64_t row = static_cast<int64_t>(s.base) + static_cast<int64_t>(block) * s.rows_per_block + entry % s.rows_per_block;
  return block > 0 ? row : -1;
}

__device__ __forceinline__ void add(Float4& v, const Float4& x) {
#pragma unroll
  for (int i = 0; i < 4; ++i) v.x[i] = __fadd_rn(v.x[i], x.x[i]);
}

// Four columns from `column` on of each half of a token's [kv | score].
template <int kChannels>
__device__ __forceinline__ void load_parts(const CompressStream& s, int token, int column, Float4 (&parts)[4]) {
  const float* kv = s.kv + static_cast<int64_t>(token) * s.kv_stride + column;
  const float* score = s.score + static_cast<int64_t>(token) * s.score_stride + column;
  parts[0] = load4_constant(kv), parts[1] = load4_constant(kv + kChannels);
  parts[2] = load4_constant(score), parts[3] = load4_constant(score + kChannels);
}

// The position bias of their scores; nought where there is none.
template <int kChannels>
__device__ __forceinline__ void load_bias(const CompressStream& s, int position, int column, Float4 (&bias)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    constexpr float kNought = -0.f;  // which leaves every number as it is
    bias[half] = {{kNought, kNought, kNought, kNought}};
    if (s.ape != nullptr) bias[half] = load4_constant(s.ape + (2 * (position % kCsaRatio) + half) * kChannels + column);
  }
}

// Stores them in row `place` of the ring.
template <int kChannels>
__device__ __forceinline__ void store_parts(float* ring, int place, const Float4 (&parts)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) store4(ring + (static_cast<int64_t>(place) * 4 + i) * kChannels, parts[i]);
}

// Softmax over the rows, per channel, and the sum of the values weighted by it.
template <int kRows>
__device__ __forceinline__ Float4 softmax_pool(const Float4 (&value)[kRows], const Float4 (&weight)[kRows]) {
  Float4 pooled;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
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

// `kTokens` tokens of a CSA stream from `first` on: their ring rows, and the entries they complete. The threads of a row
// call it together, in whole warps.
//
// Loads wait for each other twice at most. What depends on nothing comes first: the plan, the finish and, of a single
// token, its row. A row of the plan is a run of tokens of one slot, and only it has that slot: which of the rows behind a
// token this step feeds, and whether its ring row will be overrun, is told by the slots of the tokens around it.
template <int kChannels, int kTokens>
__device__ __forceinline__ void feed_csa(const CompressStream& s, const CompressPlan& plan, int first, float* shared,
                                         int thread) {
  constexpr int kRows = 2 * kCsaRatio, kBehind = kRows - 1, kState = 4 * kChannels;
  constexpr int kLoaded = kTokens == 1 ? kBehind : kRows;  // of an entry's rows: a single token has its own already
  const int lane = thread & 31, column = 4 * thread, last = plan.tokens - 1;
  // Lane l looks at the token l - 7 places on from the first.
  const int at_lane = first - kBehind + lane, clamped = min(max(at_lane, 0), last);
  const int slot_here = __ldg(plan.token_slot + clamped), position_here = __ldg(plan.token_position + clamped);
  const int slot_ahead = __ldg(plan.token_slot + min(max(at_lane + s.ring, 0), last));
  Finish finish = load_finish<kChannels>(s.finish, thread);
  Float4 own[4], own_bias[2];  // [kv | score] of a single token
  if constexpr (kTokens == 1) load_parts<kChannels>(s, first, column, own);

  const int slot_lane = at_lane == clamped ? slot_here : 0;
  const bool fed = lane >= kBehind && lane < kBehind + kTokens && slot_lane > 0;
  const unsigned kept = __ballot_sync(~0u, fed && (at_lane + s.ring > last || slot_ahead != slot_lane));
  const unsigned completed = __ballot_sync(~0u, fed && (position_here + 1) % kCsaRatio == 0);
  for (unsigned rest = kept | completed; rest != 0; rest &= rest - 1) {
    const int at = __ffs(rest) - 1, token = first - kBehind + at;
    const bool keeps = kept >> at & 1, completes = completed >> at & 1;
    const int slot = __shfl_sync(~0u, slot_lane, at), position = __shfl_sync(~0u, position_here, at);
    const int place = position % s.ring;
    const int behind = __popc(__ballot_sync(~0u, slot_lane == slot) >> (at - kBehind) & ((1u << kBehind) - 1));
    float* ring = s.state + (static_cast<int64_t>(s.ordinal) * s.slots + slot) * s.ring * kState + column;
    if constexpr (kTokens == 1) {
      load_bias<kChannels>(s, position, column, own_bias);
    } else {
      if (keeps) {
        load_parts<kChannels>(s, token, column, own), load_bias<kChannels>(s, position, column, own_bias);
        add(own[2], own_bias[0]), add(own[3], own_bias[1]);
        store_parts<kChannels>(ring, place, own);
      }
    }

    const int entry = position / kCsaRatio;
    Float4 value[kRows], weight[kRows];
    int64_t to = -1;
    if (completes) {
      const float* kv = s.kv + static_cast<int64_t>(token) * s.kv_stride + column;
      const float* score = s.score + static_cast<int64_t>(token) * s.score_stride + column;
      if (behind == kBehind) {
#pragma unroll
        for (int j = 0; j < kLoaded; ++j) {
          const int64_t back = kBehind - j, half = j >= kCsaRatio ? kChannels : 0;
          value[j] = load4_constant(kv - back * s.kv_stride + half), weight[j] = load4_constant(score - back * s.score_stride + half);
        }
      } else {
        // Older rows are behind this one in the ring, beyond its start at its end, or in a history.
        const float* old = ring + static_cast<int64_t>(place) * kState;
        int around = place;
        if (s.history != nullptr) {
          const int64_t row = __ldg(plan.token_row + token);
          old = s.history + ((row + 1) * kBehind + behind) * kState + column, around = kBehind;
        }
#pragma unroll
        for (int j = 0; j < kLoaded; ++j) {
          constexpr float kNever = -__builtin_huge_valf();
          const int back = kBehind - j, half = j >= kCsaRatio ? kChannels : 0;
          const float* before = old + static_cast<int64_t>((back > around ? s.ring : 0) - back) * kState;
          const float* v = back <= behind ? kv - static_cast<int64_t>(back) * s.kv_stride : before;
          const float* l = back <= behind ? score - static_cast<int64_t>(back) * s.score_stride : before + 2 * kChannels;
          value[j] = {{0, 0, 0, 0}}, weight[j] = {{kNever, kNever, kNever, kNever}};
          if (back <= position) value[j] = load4(v + half), weight[j] = load4(l + half);
        }
      }
      to = entry_row(s, plan, slot, entry);
      turn<kChannels>(finish, entry * kCsaRatio, thread);
    }
    if constexpr (kTokens == 1) {
      add(own[2], own_bias[0]), add(own[3], own_bias[1]);
      if (keeps) store_parts<kChannels>(ring, place, own);
      value[kBehind] = own[1], weight[kBehind] = own[3];
    }
    if (!completes) continue;
    if (s.ape != nullptr) {
#pragma unroll
      for (int j = 0; j < kLoaded; ++j) {  // rows of the state have their bias
        const int half = j >= kCsaRatio ? kChannels : 0;
        if (kBehind - j <= behind) add(weight[j], load4_constant(s.ape + j % kCsaRatio * (2 * kChannels) + half + column));
      }
    }
    emit_row<kChannels>(s.finish, finish, s.pool, softmax_pool(value, weight), to, shared, thread);
  }
}

struct CsaArgs {
  CompressPlan plan;
  CompressStream main, index;  // either may be absent (state null)
  int main_blocks;
};

// Blocks 0 .. main_blocks - 1 feed the main stream, kTokens rows of 512 each; the others the indexer's, as many to a warp.
template <int kTokens>
__global__ void __launch_bounds__(kCompressThreads, 4) csa_kernel(const __grid_constant__ CsaArgs args) {
  __shared__ alignas(16) float shared[512];
  const int thread = threadIdx.x, block = blockIdx.x;
  if (block < args.main_blocks) {
    feed_csa<512, kTokens>(args.main, args.plan, block * kTokens, shared, thread);
  } else {
    const int first = ((block - args.main_blocks) * (kCompressThreads / 32) + (thread >> 5)) * kTokens;
    if (first < args.plan.tokens) feed_csa<128, kTokens>(args.index, args.plan, first, nullptr, thread & 31);
  }
}

struct HcaArgs {
  CompressPlan plan;
  CompressStream stream;
};

// One block an HCA entry (or the part of it that this step feeds): the online softmax over its tokens, in order.
__global__ void __launch_bounds__(kCompressThreads) hca_kernel(const __grid_constant__ HcaArgs args) {
  constexpr int kChannels = 512, kAhead = 8;
  __shared__ alignas(16) float shared[512];
  const CompressStream& s = args.stream;
  const CompressPlan& plan = args.plan;
  const int thread = threadIdx.x;
  const int32_t* members = plan.groups + static_cast<int64_t>(blockIdx.x) * plan.group_length;
  const int token = __ldg(members);
  // Needed last, where the registers are full: now only fetched.
  prefetch(s.finish.norm + 4 * thread), prefetch(s.finish.inv_freq);
  if (token >= plan.tokens) return;
  const int slot = __ldg(plan.token_slot + token), start = __ldg(plan.token_position + token), row = __ldg(plan.token_row + token);
  const float* kv = s.kv + static_cast<int64_t>(token) * s.kv_stride + 4 * thread;
  const float* score = s.score + static_cast<int64_t>(token) * s.score_stride + 4 * thread;
  prefetch(kv), prefetch(score);
  if (slot <= 0) return;
  const int entry = start / s.ratio;
  prefetch(block_of(s, plan, slot, entry));
  const int end = __ldg(plan.row_start + row) + __ldg(plan.row_count + row);
  // A group ends with its row or with its entry, whichever is first.
  int count = plan.group_length;
  if (count > 1) count = min(min(end, (entry + 1) * s.ratio) - start, count);
  float* banks = s.state + (static_cast<int64_t>(s.ordinal) * s.slots + slot) * s.ring * (3 * kChannels) + 4 * thread;

  Float4 peak, total, acc;
#pragma unroll
  for (int i = 0; i < 4; ++i) peak.x[i] = -__builtin_huge_valf(), total.x[i] = 0, acc.x[i] = 0;
  if (start % s.ratio != 0) {
    const float* from = s.history == nullptr ? banks + static_cast<int64_t>((start - 1) % s.ring) * (3 * kChannels)
                                             : s.history + static_cast<int64_t>(row) * (3 * kChannels) + 4 * thread;
    peak = load4(from), total = load4(from + kChannels), acc = load4(from + 2 * kChannels);
  }
  const float* ape = s.ape == nullptr ? nullptr : s.ape + start % s.ratio * kChannels + 4 * thread;
  for (int step = 0; step < count; step += kAhead) {
    Float4 value[kAhead], logit[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int64_t i = step + j;
      if (i >= count) continue;
      value[j] = load4(kv + i * s.kv_stride);
      logit[j] = load_score(score + i * s.score_stride, ape == nullptr ? nullptr : ape + i * kChannels);
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (step + j >= count) break;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
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
      if (position >= end - s.ring) {
        float* to = banks + static_cast<int64_t>(position % s.ring) * (3 * kChannels);
        store4(to, peak), store4(to + kChannels, total), store4(to + 2 * kChannels, acc);
      }
    }
  }
  if ((start + count) % s.ratio != 0) return;
  const int64_t to = entry_row(s, plan, slot, entry);
  Finish finish = load_finish<kChannels>(s.finish, thread);
  turn<kChannels>(finish, entry * s.ratio, thread);
  Float4 pooled;
#pragma unroll
  for (int i = 0; i < 4; ++i) pooled.x[i] = __fdiv_rn(acc.x[i], total.x[i]);
  emit_row<kChannels>(s.finish, finish, s.pool, pooled, to, shared, thread);
}

}  // namespace dsv4
