// From the end of a block to the beginning of the next (dsv4_jax/ops/hyper_connection.py): the block's output goes into
// the four residual streams, what the next block reads is mixed from them and normalised.
//
// A cluster takes eight tokens, each of its sixteen blocks a sixteenth of the channels of all streams. In a block
//
//   all warps but one   32 channels each: new streams, and their products with `fn`
//   the last warp       post and comb of one token, while the others mix and normalise
//
// The streams stay in registers from the first phase to the last. Two sums go over all channels: products and squares
// of the streams, then the squares of x; each block sends its share to those that need it.
//
// Products are TF32's of high and low halves, three for each: as good as float32. A number's sum over the channels has
// one order, whatever the number of tokens.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "hopper.cuh"
#include "numbers.cuh"

namespace dsv4 {

constexpr int kStreams = 4;
constexpr int kHyperRows = (2 + kStreams) * kStreams;             // of fn: pre, post, comb
constexpr int kHyperRest = kHyperRows - kStreams;                 // without pre
constexpr int kHyperParts = 16;                                   // blocks of a cluster
constexpr int kHyperTokens = 8;                                   // of a cluster
constexpr int kHyperOutputs = 2;                                  // at most
constexpr int kHyperRun = 16;                                     // channels of two products, four a lane
constexpr int kHyperRuns = 2;                                     // of a warp
constexpr int kHyperSpan = kHyperRun * kHyperRuns;                // channels of a warp
constexpr int kRowGroups = kHyperRows / 8;                        // eight rows of fn are a half of a product's
constexpr int kHyperPieces = kHyperRuns * kStreams * kRowGroups;  // 16 bytes of fn each, of a lane
constexpr int kTf32Drop = 13;                                     // bits of a float32 that TF32 lacks

struct HyperArgs {
  const float* streams;                 // [tokens, 4, width]
  const float* fn;                      // [rows, 4 * width]
  const float* base;                    // [rows]
  const float* scale;                   // [3]; of the head [1]
  const float* norm;                    // [width]
  const float* outputs[kHyperOutputs];  // [tokens, width]; null: not given. Without the first nothing is added
  const float* old_post;                // [tokens, 4]
  const float* old_comb;                // [tokens, 4, 4]
  void* x;                              // [tokens, width]
  float* new_streams;                   // [tokens, 4, width], may be `streams`; null: not asked for
  float* post;                          // [tokens, 4]
  float* comb;                          // [tokens, 4, 4]
  int tokens, width;
  int rows;  // 24, or 4: the head's gates, nothing but x
  int iterations;
  float hc_eps, eps;
  int bf16_out;
};

template <int kWarps>
struct HyperShared {
  float mixed[kWarps][kHyperRows + 1][kHyperTokens];                 // a warp's products, and squares
  alignas(16) float gates[kHyperTokens][kStreams + 1][kHyperParts];  // pre and squares, from all blocks
  alignas(16) float rest[kHyperRest][kHyperParts];                   // post and comb of one token
  float squares[kWarps][kHyperTokens];                               // of x
  alignas(16) float norms[kHyperTokens][kHyperParts];                // the same, from all blocks
};

// The nearest number that TF32 has (halfway away from zero), and what is left.
struct Halves {
  uint32_t high, low;
};
__device__ __forceinline__ Halves halves(float x) {
  const uint32_t high = (__float_as_uint(x) + (1u << (kTf32Drop - 1))) & ~((1u << kTf32Drop) - 1);
  return {high, __float_as_uint(x - __uint_as_float(high))};
}

// d[16 x 8] += a[16 x 8] b[8 x 8] of TF32: rows lane / 4 and + 8, columns lane % 4 and + 4 of a; b the other way round.
__device__ __forceinline__ void mma_tf32(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                         uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void store_peer(uint32_t address, float x) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// The sum of what all blocks sent, in pairs of neighbours.
__device__ __forceinline__ float from_all(const float (&x)[kHyperParts]) {
  float sums[kHyperParts / 4];
#pragma unroll
  for (int i = 0; i < kHyperParts / 4; ++i) {
    const float4 v = reinterpret_cast<const float4*>(x)[i];
    sums[i] = (v.x + v.y) + (v.z + v.w);
  }
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

__device__ __forceinline__ float inverse(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

using Matrix4 = float[kStreams][kStreams];

// Rows (or columns) divided by their sum and `eps`.
template <bool kRows>
__device__ __forceinline__ void normalise(Matrix4& m, float eps) {
#pragma unroll
  for (int i = 0; i < kStreams; ++i) {
    float sum = 0;
#pragma unroll
    for (int k = 0; k < kStreams; ++k) sum += kRows ? m[i][k] : m[k][i];
    const float factor = inverse(sum + eps);
#pragma unroll
    for (int k = 0; k < kStreams; ++k) (kRows ? m[i][k] : m[k][i]) *= factor;
  }
}

__device__ __forceinline__ void sinkhorn(Matrix4& m, int iterations, float eps) {
#pragma unroll
  for (auto& row : m) {
    const float most = max_nan(max_nan(row[0], row[1]), max_nan(row[2], row[3]));
#pragma unroll
    for (float& x : row) x = expf(x - most);
    const float factor = 1.f / ((row[0] + row[1]) + (row[2] + row[3]));
#pragma unroll
    for (float& x : row) x = x * factor + eps;
  }
  normalise<false>(m, eps);
  for (int i = 1; i < iterations; ++i) {
    normalise<true>(m, eps);
    normalise<false>(m, eps);
  }
}

// Of one token: post and comb, from the sums that all blocks sent. All lanes of a warp.
template <int kWarps>
__device__ __forceinline__ void finish_rest(const HyperArgs& args, const HyperShared<kWarps>& shared, int own,
                                            int token, float base, float scale, int lane) {
  const float factor = rsqrtf(from_all(shared.gates[own][kStreams]) * (1.f / (kStreams * args.width)) + args.eps);
  const float mixed = from_all(shared.rest[min(lane, kHyperRest - 1)]) * factor * scale + base;
  Matrix4 m;
#pragma unroll
  for (int i = 0; i < kStreams * kStreams; ++i)
    m[i / kStreams][i % kStreams] = __shfl_sync(kAllLanes, mixed, kStreams + i);
  if (lane < kStreams) args.post[token * kStreams + lane] = 2.f * sigmoid(mixed);
  sinkhorn(m, args.iterations, args.hc_eps);
  if (lane == 0) {
    float4* comb = reinterpret_cast<float4*>(args.comb) + static_cast<size_t>(token) * kStreams;
#pragma unroll
    for (int j = 0; j < kStreams; ++j) comb[j] = make_float4(m[j][0], m[j][1], m[j][2], m[j][3]);
  }
}

struct Four {
  float x[4];
};
__device__ __forceinline__ Four load_four(const float* p) {
  const float4 v = *reinterpret_cast<const float4*>(p);
  return {{v.x, v.y, v.z, v.w}};
}

// Grid: a cluster, eights of tokens.
template <int kWarps>
__global__ void __launch_bounds__(kLanes*(kWarps + 1), kWarps <= 8 ? 2 : 1)
    hyper_connection_kernel(const __grid_constant__ HyperArgs args) {
  constexpr int kConsumers = kWarps * kLanes;
  extern __shared__ __align__(16) uint8_t dynamic[];  // fn: a lane's pieces, those of all lanes side by side
  __shared__ HyperShared<kWarps> shared;
  const int rank = blockIdx.x, warp = warp_of(threadIdx.x), lane = lane_of(threadIdx.x);
  const bool head = args.rows == kStreams;
  cluster_arrive();  // the others have begun when this was waited for
  if (warp == kWarps) {
    const int token = blockIdx.y * kHyperTokens + rank;
    const bool mine = rank < kHyperTokens && token < args.tokens && !head;
    const float base = mine ? args.base[kStreams + min(lane, kHyperRest - 1)] : 0.f;
    const float scale = mine ? args.scale[lane < kStreams ? 1 : 2] : 0.f;
    cluster_wait();
    cluster_sync();  // products
    cluster_arrive();
    if (mine) finish_rest<kWarps>(args, shared, rank, token, base, scale, lane);
    __syncwarp();
    cluster_wait();
    return;
  }

  // Lane 4 n + c has four channels 4 c of token n, and for products those of row n of fn.
  const int n = quad_of(lane), c = quad_lane(lane), token = blockIdx.y * kHyperTokens + n;
  const bool there = token < args.tokens;
  const int width = args.width, channel = (rank * kWarps + warp) * kHyperSpan + 4 * c;
  const uint32_t pieces = shared_address(dynamic) + threadIdx.x * kChunkBytes;
#pragma unroll
  for (int b = 0; b < kHyperRuns; ++b) {
#pragma unroll
    for (int i = 0; i < kStreams * kRowGroups; ++i) {
      const int row = i % kRowGroups * 8 + n, stream = i / kRowGroups;
      const bool given = row < args.rows;
      const float* from = args.fn + (static_cast<size_t>(given ? row : 0) * kStreams + stream) * width + channel;
      copy_async(pieces + (b * kStreams * kRowGroups + i) * kConsumers * kChunkBytes, from + b * kHyperRun, given);
    }
    copy_commit();
  }

  // New streams.
  Four x[kHyperRuns][kStreams] = {};
  if (there) {
    const float* streams = args.streams + static_cast<size_t>(token) * kStreams * width + channel;
#pragma unroll
    for (int b = 0; b < kHyperRuns; ++b) {
#pragma unroll
      for (int j = 0; j < kStreams; ++j) x[b][j] = load_four(streams + j * width + b * kHyperRun);
    }
    if (args.outputs[0] != nullptr) {
      const size_t at = static_cast<size_t>(token) * width + channel;
      Four y[kHyperRuns], more[kHyperRuns] = {}, comb[kStreams];
#pragma unroll
      for (int b = 0; b < kHyperRuns; ++b) y[b] = load_four(args.outputs[0] + at + b * kHyperRun);
      const Four post = load_four(args.old_post + token * kStreams);
#pragma unroll
      for (int j = 0; j < kStreams; ++j) comb[j] = load_four(args.old_comb + (token * kStreams + j) * kStreams);
      if (args.outputs[1] != nullptr) {
#pragma unroll
        for (int b = 0; b < kHyperRuns; ++b) more[b] = load_four(args.outputs[1] + at + b * kHyperRun);
      }
      float* to = args.new_streams + static_cast<size_t>(token) * kStreams * width + channel;
#pragma unroll
      for (int b = 0; b < kHyperRuns; ++b) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float old[kStreams] = {x[b][0].x[i], x[b][1].x[i], x[b][2].x[i], x[b][3].x[i]};
          const float written = y[b].x[i] + more[b].x[i];
#pragma unroll
          for (int k = 0; k < kStreams; ++k) {
            float sum = post.x[k] * written;
#pragma unroll
            for (int j = 0; j < kStreams; ++j) sum += comb[j].x[k] * old[j];
            x[b][k].x[i] = sum;
          }
        }
        if (args.new_streams != nullptr) {
#pragma unroll
          for (int k = 0; k < kStreams; ++k) {
            const auto& [p, q, r, s] = x[b][k].x;
            *reinterpret_cast<float4*>(to + k * width + b * kHyperRun) = make_float4(p, q, r, s);
          }
        }
      }
    }
  }
  float squares = 0;
#pragma unroll
  for (const auto& run : x) {
#pragma unroll
    for (const Four& four : run) {
#pragma unroll
      for (const float v : four.x) squares += v * v;
    }
  }
  squares = lanes_sum<kQuad>(squares);

  // Products: rows of fn by tokens. Of halves high x high, low x high, high x low, each a sum of its own.
  float upper[3][4] = {}, lower[3][4] = {};  // rows n and n + 8; 16 + n
#pragma unroll
  for (int b = 0; b < kHyperRuns; ++b) {
    b == 0 ? copy_wait<1>() : copy_wait<0>();
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
      Halves rows[kRowGroups][4], of_x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) of_x[i] = halves(x[b][j].x[i]);
#pragma unroll
      for (int m = 0; m < kRowGroups; ++m) {
        const uint4 w = load_shared(pieces + ((b * kStreams + j) * kRowGroups + m) * kConsumers * kChunkBytes);
        const uint32_t bits[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) rows[m][i] = halves(__uint_as_float(bits[i]));
      }
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const Halves &p = rows[0][i], &q = rows[1][i], &r = rows[2][i];
        const Halves &p1 = rows[0][i + 1], &q1 = rows[1][i + 1], &r1 = rows[2][i + 1];
        const Halves &v = of_x[i], &v1 = of_x[i + 1];
        mma_tf32(upper[0], p.high, q.high, p1.high, q1.high, v.high, v1.high);
        mma_tf32(lower[0], r.high, 0, r1.high, 0, v.high, v1.high);
        mma_tf32(upper[1], p.low, q.low, p1.low, q1.low, v.high, v1.high);
        mma_tf32(lower[1], r.low, 0, r1.low, 0, v.high, v1.high);
        mma_tf32(upper[2], p.high, q.high, p1.high, q1.high, v.low, v1.low);
        mma_tf32(lower[2], r.high, 0, r1.high, 0, v.low, v1.low);
      }
    }
  }
  const auto put = [&](int row, const float(&sums)[3][4], int i) {
    const float2 pair = {sums[0][i] + (sums[1][i] + sums[2][i]), sums[0][i + 1] + (sums[1][i + 1] + sums[2][i + 1])};
    *reinterpret_cast<float2*>(&shared.mixed[warp][row][2 * c]) = pair;
  };
  put(n, upper, 0);
  put(n + 8, upper, 2);
  put(n + 16, lower, 0);
  if (c == 0) shared.mixed[warp][kHyperRows][n] = squares;
  named_sync(1, kConsumers);

  // The block's sums, each to the blocks that need it: pre and squares to all, the rest to one for each token.
  cluster_wait();
  for (int i = threadIdx.x; i < (kHyperRows + 1) * kHyperTokens; i += kConsumers) {
    const int row = i / kHyperTokens, of = i % kHyperTokens;
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += shared.mixed[w][row][of];
    if (row < kStreams || row == kHyperRows) {
      const uint32_t to = shared_address(&shared.gates[of][min(row, kStreams)][rank]);
#pragma unroll
      for (int r = 0; r < kHyperParts; ++r) store_peer(peer_address(to, r), sum);
    } else {
      store_peer(peer_address(shared_address(&shared.rest[row - kStreams][rank]), of), sum);
    }
  }
  __syncwarp();
  const float scale = args.scale[0], base = args.base[c];
  Four norm[kHyperRuns];
#pragma unroll
  for (int b = 0; b < kHyperRuns; ++b) norm[b] = load_four(args.norm + channel + b * kHyperRun);
  cluster_sync();

  // x, and its squares to all blocks.
  float factor = rsqrtf(from_all(shared.gates[n][kStreams]) * (1.f / (kStreams * width)) + args.eps);
  const float own = sigmoid(from_all(shared.gates[n][c]) * factor * scale + base) + args.hc_eps;
  float pre[kStreams];
#pragma unroll
  for (int k = 0; k < kStreams; ++k) pre[k] = __shfl_sync(kAllLanes, own, kQuad * n + k);
  Four mixed[kHyperRuns];
  squares = 0;
#pragma unroll
  for (int b = 0; b < kHyperRuns; ++b) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float sum = pre[0] * x[b][0].x[i];
#pragma unroll
      for (int k = 1; k < kStreams; ++k) sum += pre[k] * x[b][k].x[i];
      mixed[b].x[i] = sum;
      squares += sum * sum;
    }
  }
  squares = lanes_sum<kQuad>(squares);
  if (c == 0) shared.squares[warp][n] = squares;
  named_sync(1, kConsumers);
  if (threadIdx.x < kHyperParts * kHyperTokens) {
    const int of = threadIdx.x % kHyperTokens, to = threadIdx.x / kHyperTokens;
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += shared.squares[w][of];
    store_peer(peer_address(shared_address(&shared.norms[of][rank]), to), sum);
  }
  __syncwarp();
  cluster_sync();
  if (!there) return;
  factor = rsqrtf(from_all(shared.norms[n]) * (1.f / width) + args.eps);
#pragma unroll
  for (int b = 0; b < kHyperRuns; ++b) {
    const size_t at = static_cast<size_t>(token) * width + channel + b * kHyperRun;
    float out[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] = mixed[b].x[i] * factor * norm[b].x[i];
    if (args.bf16_out) {
      const __nv_bfloat162 low = __floats2bfloat162_rn(out[0], out[1]), high = __floats2bfloat162_rn(out[2], out[3]);
      *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(args.x) + at) = {reinterpret_cast<const uint32_t&>(low),
                                                                             reinterpret_cast<const uint32_t&>(high)};
    } else {
      *reinterpret_cast<float4*>(static_cast<float*>(args.x) + at) = make_float4(out[0], out[1], out[2], out[3]);
    }
  }
}

}  // namespace dsv4
