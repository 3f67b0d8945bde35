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

// Four scores of a step at `score`, with the position bias at `ape` where there is one.
__device__ __forceinline__ Float4 load_score(const float* score, const float* ape) {
  Float4 v = load4(score);
  if (ape == nullptr) return v;
  const Float4 bias = load4(ape);
#pragma unroll
  for (int i = 0; i < 4; ++i) v.x[i] = __fadd_rn(v.x[i], bias.x[i]);
  return v;
}

// Where entry `entry` of `slot` is stored; negative without a block: then it is not stored anywhere.
__device__ __forceinline__ int64_t entry_row(const CompressStream& s, const CompressPlan& plan, int slot, int entry) {
  const int column = min(entry / s.rows_per_block, plan.columns - 1);
  const int block = __ldg(plan.table + static_cast<int64_t>(slot) * plan.columns + column);
  const int64_t row = static_cast<int64_t>(s.base) + static_cast<int64_t>(block) * s.rows_per_block + entry % s.rows_per_block;
  return block > 0 ? row : -1;
}

// One token of a CSA stream: its ring row, and the entry it completes. The threads of a row call it together.
template <int kChannels>
__device__ __forceinline__ void feed_csa(const CompressStream& s, const CompressPlan& plan, int token, float* shared,
                                         int thread) {
  constexpr int kRows = 2 * kCsaRatio;
  const int slot = __ldg(plan.token_slot + token);
  if (slot <= 0) return;
  const int position = __ldg(plan.token_position + token), row = __ldg(plan.token_row + token);
  const int start = __ldg(plan.row_start + row), end = start + __ldg(plan.row_count + row);
  const int first = __ldg(plan.row_first + row);
  float* ring = s.state + (static_cast<int64_t>(s.ordinal) * s.slots + slot) * s.ring * (4 * kChannels) + 4 * thread;
  if (position >= end - s.ring) {
    float* to = ring + static_cast<int64_t>(position % s.ring) * (4 * kChannels);
    const float* kv = s.kv + static_cast<int64_t>(token) * s.kv_stride + 4 * thread;
    const float* score = s.score + static_cast<int64_t>(token) * s.score_stride + 4 * thread;
    const float* ape = s.ape == nullptr ? nullptr : s.ape + position % kCsaRatio * (2 * kChannels) + 4 * thread;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      store4(to + half * kChannels, load4(kv + half * kChannels));
      const float* bias = ape == nullptr ? nullptr : ape + half * kChannels;
      store4(to + (2 + half) * kChannels, load_score(score + half * kChannels, bias));
    }
  }
  if ((position + 1) % kCsaRatio != 0) return;

  Float4 value[kRows], weight[kRows];
#pragma unroll
  for (int j = 0; j < kRows; ++j) {
    const int at = position - (kRows - 1) + j, half = j >= kCsaRatio ? kChannels : 0;
    const float *v, *l, *bias = nullptr;  // rows of the state have their bias
    if (at >= start) {
      const int64_t from = first + at - start;
      const int column = half + 4 * thread;
      v = s.kv + from * s.kv_stride + column, l = s.score + from * s.score_stride + column;
      if (s.ape != nullptr) bias = s.ape + j % kCsaRatio * (2 * kChannels) + column;
    } else {
      const float* old = s.history == nullptr
                             ? ring + static_cast<int64_t>(max(at, 0) % s.ring) * (4 * kChannels)
                             : s.history + (static_cast<int64_t>(row + 1) * (kRows - 1) + at - start) * (4 * kChannels) + 4 * thread;
      v = old + half, l = old + 2 * kChannels + half;
    }
    if (at >= 0) {
      value[j] = load4(v), weight[j] = load_score(l, bias);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) value[j].x[i] = 0, weight[j].x[i] = -__builtin_huge_valf();
    }
  }
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
  const int entry = position / kCsaRatio;
  emit_row<kChannels>(s.finish, s.pool, pooled, entry * kCsaRatio, entry_row(s, plan, slot, entry), shared, thread);
}

struct CsaArgs {
  CompressPlan plan;
  CompressStream main, index;  // either may be absent (state null)
  int tokens_per_block, main_blocks;
};

// Blocks 0 .. main_blocks - 1 feed the main stream, a row of 512 to a block; the others the indexer's, a row to a warp.
__global__ void __launch_bounds__(kCompressThreads) csa_kernel(const __grid_constant__ CsaArgs args) {
  __shared__ alignas(16) float shared[512];
  const int thread = threadIdx.x, block = blockIdx.x;
  if (block < args.main_blocks) {
    for (int i = 0; i < args.tokens_per_block; ++i) {
      const int token = block * args.tokens_per_block + i;
      if (token < args.plan.tokens) feed_csa<512>(args.main, args.plan, token, shared, thread);
    }
  } else {
    const int token = (block - args.main_blocks) * (kCompressThreads / 32) + (thread >> 5);
    if (token < args.plan.tokens) feed_csa<128>(args.index, args.plan, token, nullptr, thread & 31);
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
  if (token >= plan.tokens) return;
  const int slot = __ldg(plan.token_slot + token);
  if (slot <= 0) return;
  const int start = __ldg(plan.token_position + token), row = __ldg(plan.token_row + token);
  const int end = __ldg(plan.row_start + row) + __ldg(plan.row_count + row);
  // A group ends with its row or with its entry, whichever is first.
  const int count = min(min(end, (start / s.ratio + 1) * s.ratio) - start, plan.group_length);
  float* banks = s.state + (static_cast<int64_t>(s.ordinal) * s.slots + slot) * s.ring * (3 * kChannels) + 4 * thread;

  Float4 peak, total, acc;
#pragma unroll
  for (int i = 0; i < 4; ++i) peak.x[i] = -__builtin_huge_valf(), total.x[i] = 0, acc.x[i] = 0;
  if (start % s.ratio != 0) {
    const float* from = s.history == nullptr ? banks + static_cast<int64_t>((start - 1) % s.ring) * (3 * kChannels)
                                             : s.history + static_cast<int64_t>(row) * (3 * kChannels) + 4 * thread;
    peak = load4(from), total = load4(from + kChannels), acc = load4(from + 2 * kChannels);
  }
  const float* kv = s.kv + static_cast<int64_t>(token) * s.kv_stride + 4 * thread;
  const float* score = s.score + static_cast<int64_t>(token) * s.score_stride + 4 * thread;
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
  Float4 pooled;
#pragma unroll
  for (int i = 0; i < 4; ++i) pooled.x[i] = __fdiv_rn(acc.x[i], total.x[i]);
  const int entry = start / s.ratio;
  emit_row<kChannels>(s.finish, s.pool, pooled, entry * s.ratio, entry_row(s, plan, slot, entry), shared, thread);
}

}  // namespace dsv4
