// What an attending block does in a layer (persistent_layer.cu): the new rows, attend, and Sinkhorn's steps.
#pragma once

#include "persistent_layer.cuh"

namespace {

struct Attender {
  alignas(128) uint8_t keys[kKeys][kKeyPitch];
  alignas(128) uint8_t queries[kRows16][kKeyPitch];
  alignas(128) uint8_t weights[kRows16][kWeightPitch];
  float most[kScoreWarps][kRows16], total[kScoreWarps][kRows16];
  float reduced[kWorkWarps], amax[kWorkWarps];
  float sums[kSumRows];
  uint32_t epoch;
};

// A row of 512, a dim a thread: normalised, turned, quantised, into the pool and into shared memory as bf16.
__device__ __forceinline__ void finish_row(const Args& args, Attender& s, int layer, float x, float norm,
                                           const float* angles, int key) {
  const int thread = threadIdx.x, warp = warp_of(thread), lane = lane_of(thread);
  const float sum = lanes_sum<kLanes>(x * x);
  if (lane == 0) s.reduced[warp] = sum;
  workers();
  const float all = lanes_sum<kWorkWarps>(s.reduced[lane % kWorkWarps]);
  x = x * rsqrtf(all * (1.f / kDim) + kEps) * norm;
  const float other = __shfl_xor_sync(kAllLanes, x, 1);
  const bool rotary = thread >= kNope;
  if (rotary) {
    const int pair = (thread - kNope) / 2;
    const float cosine = __ldg(angles + pair), sine = __ldg(angles + kRopePairs + pair);
    x = thread % 2 == 0 ? x * cosine - other * sine : x * cosine + other * sine;
  }
  const float most = lanes_max<kLanes>(fabsf(x));
  if (lane == 0) s.amax[warp] = most;
  workers();
  const int k = scale_exponent(fmaxf(fmaxf(s.amax[warp & ~1], s.amax[warp | 1]), 1e-4f), kE4m3Limit);
  const __nv_fp8_storage_t code = __nv_cvt_float_to_fp8(x * power_of_two(-k), __NV_SATFINITE, __NV_E4M3);
  const float stored = __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3))) * power_of_two(k);
  const __nv_bfloat16 rounded = __float2bfloat16_rn(rotary ? x : stored);
  reinterpret_cast<__nv_bfloat16*>(s.keys[key])[thread] = rounded;
  if (blockIdx.x != kProjectors) return;
  const size_t row = static_cast<size_t>(layer) * args.rows + args.ids[key];
  if (rotary) {
    args.rope[row * kRope + thread - kNope] = reinterpret_cast<const uint16_t&>(rounded);
  } else {
    args.nope[row * kNope + thread] = code;
    if (thread % kScaleGroup == 0) args.scale[row * kScales + thread / kScaleGroup] = static_cast<uint8_t>(k + kBias);
  }
}

// All keys but the two that this step makes: a warp a row.
__device__ __forceinline__ void load_keys(const Args& args, Attender& s, int layer) {
  constexpr int kAtOnce = 4, kCodeLanes = kNope / kChunkBytes;
  const int warp = warp_of(threadIdx.x), lane = lane_of(threadIdx.x);
  const int own = __ldg(args.ids + (lane / kAtOnce * kWorkWarps + warp) * kAtOnce % kKeys + lane % kAtOnce);
#pragma unroll 1
  for (int turn = 0; turn < kKeys / (kWorkWarps * kAtOnce); ++turn) {
    const int first = (turn * kWorkWarps + warp) * kAtOnce;
    uint4 words[kAtOnce], more[kAtOnce];
    uint32_t scale[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const size_t row = static_cast<size_t>(layer) * args.rows + __shfl_sync(kAllLanes, own, turn * kAtOnce + i);
      const bool codes = lane < kCodeLanes;
      const uint8_t* from = codes
                                ? args.nope + row * kNope + lane * kChunkBytes
                                : reinterpret_cast<const uint8_t*>(args.rope + row * kRope) + (lane - kCodeLanes) * 32;
      words[i] = fresh_words(from);
      more[i] = fresh_words(codes ? from : from + kChunkBytes);
      scale[i] = __ldg(args.scale + row * kScales + (codes ? lane / 4 : 0));
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i == kNewKey || first + i == kNewEntry) continue;
      const uint32_t to = shared_address(s.keys[first + i]) + lane * 32;
      if (lane < kCodeLanes) {
        const uint32_t bits = scale[i] << kBf16Mantissa | scale[i] << (kBf16Mantissa + 16);
        const __nv_bfloat162 factor = reinterpret_cast<const __nv_bfloat162&>(bits);
        const uint4& x = words[i];
        store_shared(to, uint4{decode<false>(x.x, factor), decode<true>(x.x, factor), decode<false>(x.y, factor),
                               decode<true>(x.y, factor)});
        store_shared(to + kChunkBytes, uint4{decode<false>(x.z, factor), decode<true>(x.z, factor),
                                             decode<false>(x.w, factor), decode<true>(x.w, factor)});
      } else {
        store_shared(to, words[i]);
        store_shared(to + kChunkBytes, more[i]);
      }
    }
  }
}

__device__ __forceinline__ uint4 load_matrices(uint32_t address) {
  uint4 x;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(address)
               : "memory");
  return x;
}
__device__ __forceinline__ uint4 load_transposed(uint32_t address) {
  uint4 x;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(address)
               : "memory");
  return x;
}

// Cosines and sines of what a thread turns: its four dims of a query, its eight of the output.
struct Angles {
  float2 query[2], out[4];
};
__device__ __forceinline__ Angles load_angles(const Args& args) {
  const int warp = warp_of(threadIdx.x), lane = lane_of(threadIdx.x);
  const float *cosine = args.angles, *sine = args.angles + kRopePairs;
  Angles angles;
  const float2 c = early2(cosine + 2 * max(lane - 16, 0)), t = early2(sine + 2 * max(lane - 16, 0));
  angles.query[0] = {c.x, t.x}, angles.query[1] = {c.y, t.y};
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int pair = max((warp * 32 + n * 8 - kNope) / 2, 0) + quad_lane(lane);
    angles.out[n] = {early(cosine + pair), early(sine + pair)};
  }
  return angles;
}

// A warp's head: normalised, turned, rounded.
__device__ __forceinline__ void finish_query(const Args& args, Attender& s, const Angles& angles, int warp, int lane) {
  const float* from = args.q + ((blockIdx.x - kProjectors) * kRows16 + warp) * kDim + 4 * lane;
  float4 x[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = fresh4(from + 128 * i);
  float sum = 0;
#pragma unroll
  for (const float4& v : x) sum += (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w);
  const float f = rsqrtf(lanes_sum<kLanes>(sum) * (1.f / kDim) + kEps);
#pragma unroll
  for (float4& v : x) v.x *= f, v.y *= f, v.z *= f, v.w *= f;
  if (lane >= 16) {
    const float2 &a = angles.query[0], &b = angles.query[1];
    const float4 v = x[3];
    x[3] = {v.x * a.x - v.y * a.y, v.x * a.y + v.y * a.x, v.z * b.x - v.w * b.y, v.z * b.y + v.w * b.x};
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t to = shared_address(s.queries[warp]) + 256 * i + 8 * lane;
    store_shared(to, bf16_pair(x[i].x, x[i].y));
    store_shared(to + 4, bf16_pair(x[i].z, x[i].w));
  }
}

__device__ __forceinline__ void attend_heads(const Args& args, Attender& s, const Angles& angles,
                                             const float (&sinks)[2], int layer) {
  const int warp = warp_of(threadIdx.x), lane = lane_of(threadIdx.x), upper = quad_of(lane), lower = upper + kLowerRow;
  const int head = (blockIdx.x - kProjectors) * kRows16;
  finish_query(args, s, angles, warp, lane);
  workers();
  mark(args, layer, 6);
  float z[2][kCell] = {};
  const float scale = rsqrtf(kDim) * kLog2e;
  if (warp < kScoreWarps) {
    const uint32_t a = shared_address(s.queries[lane % 16]) + lane / 16 * kChunkBytes;
    const uint32_t b = shared_address(s.keys[warp * 16 + lane % 8]) + lane / 8 * kChunkBytes;
#pragma unroll 4
    for (int i = 0; i < kDim / 32; ++i) {
      const uint4 a0 = load_matrices(a + 64 * i), a1 = load_matrices(a + 64 * i + 32);
      const uint4 b0 = load_matrices(b + 64 * i), b1 = load_matrices(b + 8 * kKeyPitch + 64 * i);
      const uint32_t first[4] = {a0.x, a0.y, a0.z, a0.w}, second[4] = {a1.x, a1.y, a1.z, a1.w};
      mma_16x8(z[0], first, b0.x, b0.y);
      mma_16x8(z[1], first, b1.x, b1.y);
      mma_16x8(z[0], second, b0.z, b0.w);
      mma_16x8(z[1], second, b1.z, b1.w);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float most =
          row_max(fmaxf(fmaxf(z[0][2 * half], z[0][2 * half + 1]), fmaxf(z[1][2 * half], z[1][2 * half + 1])));
      if (quad_lane(lane) == 0) s.most[warp][upper + kLowerRow * half] = most * scale;
    }
  }
  mark(args, layer, 7);
  workers();
  float top[2] = {-kInf, -kInf};
#pragma unroll
  for (int w = 0; w < kScoreWarps; ++w) {
    top[0] = fmaxf(top[0], s.most[w][upper]), top[1] = fmaxf(top[1], s.most[w][lower]);
  }
  if (warp < kScoreWarps) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = 0;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float x = exp2_fast(z[n][2 * half] * scale - top[half]),
                    y = exp2_fast(z[n][2 * half + 1] * scale - top[half]);
        sum += x + y;
        store_shared(shared_address(s.weights[upper + kLowerRow * half]) + warp * 32 + n * 16 + quad_lane(lane) * 4,
                     bf16_pair(x, y));
      }
      sum = row_total(sum);
      if (quad_lane(lane) == 0) s.total[warp][upper + kLowerRow * half] = sum;
    }
  }
  workers();
  mark(args, layer, 8);
  // 32 dims a warp.
  float o[4][kCell] = {};
  const uint32_t p = shared_address(s.weights[lane % 16]) + lane / 16 * kChunkBytes;
  const uint32_t v = shared_address(s.keys[lane % 16]) + lane / 16 * kChunkBytes + warp * 64;
#pragma unroll
  for (int k = 0; k < kKeys / 16; ++k) {
    const uint4 a = load_matrices(p + 32 * k);
    const uint4 b0 = load_transposed(v + 16 * k * kKeyPitch), b1 = load_transposed(v + 16 * k * kKeyPitch + 32);
    const uint32_t fragment[4] = {a.x, a.y, a.z, a.w};
    mma_16x8(o[0], fragment, b0.x, b0.y);
    mma_16x8(o[1], fragment, b0.z, b0.w);
    mma_16x8(o[2], fragment, b1.x, b1.y);
    mma_16x8(o[3], fragment, b1.z, b1.w);
  }
  mark(args, layer, 9);
  float total[2] = {0, 0};
#pragma unroll
  for (int w = 0; w < kScoreWarps; ++w) total[0] += s.total[w][upper], total[1] += s.total[w][lower];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float share = 1.f / (total[half] + exp2_fast(sinks[half] * kLog2e - top[half]));
    __nv_bfloat16* to = args.out + (head + upper + kLowerRow * half) * kDim;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int dim = warp * 32 + n * 8 + 2 * quad_lane(lane);
      float x = o[n][2 * half] * share, y = o[n][2 * half + 1] * share;
      if (dim >= kNope) turn_back(x, y, angles.out[n].x, angles.out[n].y);
      *reinterpret_cast<uint32_t*>(to + dim) = bf16_pair(x, y);
    }
  }
}

// Post and comb of the sums of all blocks.
__device__ __forceinline__ void mix(const Args& args, Attender& s, int layer, uint32_t round) {
  const int warp = warp_of(threadIdx.x), lane = lane_of(threadIdx.x);
  meet(args, kSumsThere, round * kProjectors);
  for (int row = warp; row < kSumRows; row += kWorkWarps) {
    const float4 part = fresh4(args.sums + row * kProjectors + 4 * lane);
    const float sum = lanes_sum<kLanes>((part.x + part.y) + (part.z + part.w));
    if (lane == 0) s.sums[row] = sum;
  }
  workers();
  if (warp != 0) return;
  const float* vectors = args.vectors + static_cast<size_t>(layer) * kVectorFloats;
  const float f = rsqrtf(s.sums[kFnRows] * (1.f / (kStreams * kHidden)) + kEps);
  const int j = quad_lane(lane);
  const auto gate = [&](int row, int scale) {
    return s.sums[row] * f * __ldg(vectors + kScale + scale) + __ldg(vectors + kBase + row);
  };
  float m[kStreams];
#pragma unroll
  for (int k = 0; k < kStreams; ++k) m[k] = gate(2 * kStreams + j * kStreams + k, 2);
  const float most = fmaxf(fmaxf(m[0], m[1]), fmaxf(m[2], m[3]));
#pragma unroll
  for (float& x : m) x = expf(x - most);
  const auto rows = [&](float of_sum) {
    const float one = inverse((m[0] + m[1]) + (m[2] + m[3]) + of_sum);
#pragma unroll
    for (float& x : m) x *= one;
  };
  const auto columns = [&] {
#pragma unroll
    for (float& x : m) x *= inverse(lanes_sum<kStreams>(x) + kMixEps);
  };
  rows(0);
#pragma unroll
  for (float& x : m) x += kMixEps;
  columns();
  for (int i = 1; i < kSinkhornSteps; ++i) rows(kMixEps), columns();
  if (lane >= kStreams) return;
  args.mixing[j] = 2.f * sigmoid(gate(kStreams + j, 1));
#pragma unroll
  for (int k = 0; k < kStreams; ++k) args.mixing[kStreams + j * kStreams + k] = m[k];
}

__device__ void attend(const Args& args, Attender& s) {
  const int me = blockIdx.x - kProjectors, thread = threadIdx.x;
  const Angles angles = load_angles(args);
  const uint32_t epoch = s.epoch;
  for (int l = 0; l < args.layers; ++l) {
    const int layer = args.first + l;
    const uint32_t round = epoch + l + 1;
    const float* vectors = args.vectors + static_cast<size_t>(layer) * kVectorFloats;
    mark(args, layer, 0);
    const float norm_kv = early(vectors + kNormKv + thread), norm_entry = early(vectors + kNormEntry + thread);
    const float bias = early(vectors + kPoolBias + thread);
    const float* sink = vectors + kSink + me * kRows16 + quad_of(lane_of(thread));
    const float sinks[2] = {early(sink), early(sink + kLowerRow)};
    float* state = args.state + static_cast<size_t>(layer) * kHcaParts * kDim + thread;
    const float old_most = state[0], old_sum = state[kDim], old_all = state[2 * kDim];
    load_keys(args, s, layer);
    if (me == 1 && l > 0) mix(args, s, layer - 1, round - 1);
    mark(args, layer, 1);
    meet(args, kOfXThere, round * kInputBlocks);
    mark(args, layer, 2);
    finish_row(args, s, layer, fresh(args.of_x + kLatent + thread), norm_kv, args.angles, kNewKey);
    meet(args, kPooledThere, round * kProjectors);
    float new_most, new_sum, new_all;
    mark(args, layer, 3);
    {
      const float kv = fresh(args.pooled + thread) + fresh(args.pooled + 2 * kDim + thread);
      const float score = fresh(args.pooled + kDim + thread) + fresh(args.pooled + 3 * kDim + thread) + bias;
      const float most = fmaxf(old_most, score), keep = expf(old_most - most), weight = expf(score - most);
      const float sum = old_sum * keep + weight, all = old_all * keep + weight * kv;
      finish_row(args, s, layer, all / sum, norm_entry, args.angles + 2 * kRopePairs, kNewEntry);
      new_most = most, new_sum = sum, new_all = all;
    }
    mark(args, layer, 4);
    meet(args, kQThere + me, round * (kProjectors / kAttenders));
    mark(args, layer, 5);
    if (!(args.without & kNoAttend)) attend_heads(args, s, angles, sinks, layer);
    workers();
    mark(args, layer, 10);
    if (thread == 0) arrive(args, kOutThere + me);
    mark(args, layer, 11);
    if (me == 0) {  // when all have read the state
      meet(args, kLatentThere, round * kProjectors);
      state[0] = new_most, state[kDim] = new_sum, state[2 * kDim] = new_all;
    }
    workers();
  }
  if (me == 1) mix(args, s, args.first + args.layers - 1, epoch + args.layers);
}

}  // namespace
