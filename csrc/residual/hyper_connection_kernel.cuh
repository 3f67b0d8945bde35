// From the end of a block to the beginning of the next (dsv4_jax/ops/hyper_connection.py): the block's output goes into
// the four residual streams, what the next block reads is mixed from them and normalised.
//
// A cluster takes eight tokens, each of its sixteen blocks a sixteenth of the channels of all streams; of more tokens
// than clusters have room for at a time it takes eight after eight, and keeps its part of `fn`. In a block
//
//   all warps but one   32 channels each: new streams, and their products with `fn`
//   the last warp       what post and comb of one token are made of (residual/hyper_mixing.cuh), while the others mix
//
// The streams stay in registers from the first phase to the last. Two sums go over all channels: products and squares
// of the streams, then the squares of x. Each block stores its share into those that need it, counted there by an
// mbarrier: a barrier of the cluster would wait until the new streams are in memory.
//
// Products are TF32's of high and low halves, three for each: as good as float32. Streams of bfloat16 are exact without
// a low half. What is mixed is then rounded as they are: new streams before the products, x before its norm. A number's
// sum over the channels has one order, whatever the number of tokens.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "common/bulk_copy.cuh"
#include "common/hopper.cuh"
#include "common/numbers.cuh"
#include "common/overlap.cuh"
#include "residual/hyper_mixing.cuh"

namespace dsv4 {

constexpr int kHyperRows = kStreams + kHyperBack;   // of fn: pre, post, comb
constexpr int kHyperParts = 16;                     // blocks of a cluster
constexpr int kHyperTokens = 8;                     // of a cluster
constexpr int kHyperMaxTokens = 1 << 17;            // whose numbers 32 bits count
constexpr int kHyperOutputs = 2;                    // at most
constexpr int kHyperRun = 16;                       // channels of two products, four a lane
constexpr int kHyperRuns = 2;                       // of a warp
constexpr int kHyperSpan = kHyperRun * kHyperRuns;  // channels of a warp
constexpr int kRowGroups = kHyperRows / 8;          // eight rows of fn are a half of a product's
constexpr int kHyperChunks = kHyperSpan * static_cast<int>(sizeof(float)) / kChunkBytes;  // of a warp's row of fn
constexpr int kHyperWarpBytes = kStreams * kHyperRows * kHyperChunks * kChunkBytes;
constexpr int kTf32Drop = 13;  // bits of a float32 that TF32 lacks
// What a block sends, 16 bytes each: to all pre of a token, or squares of four tokens; to one its token's post and
// comb.
constexpr int kHyperVector = 4;
constexpr int kHyperSquares = kHyperTokens / kHyperVector;
constexpr int kHyperShared = kHyperTokens + kHyperSquares;
constexpr int kHyperOwn = kHyperBack / kHyperVector;

struct HyperArgs {
  const void* streams;                 // [tokens, 4, width], float32 or bfloat16; of their type outputs and new streams
  const float* fn;                     // [rows, 4 * width]
  const float* base;                   // [rows]
  const float* scale;                  // [3], of the head [1]; 16 bytes are read of both, and may be
  const float* norm;                   // [width]
  const void* outputs[kHyperOutputs];  // [tokens, width]; null: not given. Without the first nothing is added
  const float* old_post;               // [tokens, 4]
  const float* old_comb;               // [tokens, 4, 4]
  void* x;                             // [x_rows, width], zeros behind the tokens
  void* new_streams;                   // [tokens, 4, width], may be `streams`; null: not asked for
  float* back;                         // [tokens, 20]
  int tokens, width;
  int rows;  // 24, or 4: the head's gates, nothing but x
  float hc_eps, eps;
  int bf16_out, x_rows;  // x_rows: the tokens, or up to as many more as fill the last cluster
};

// Which channels of a warp's lane c has: in 16 bytes of a stream as many as there are, the runs of four that follow
// each other or not.
template <typename Stream>
struct HyperLane {
  static constexpr int kOwn = kChunkBytes / static_cast<int>(sizeof(Stream));    // from lane to lane
  static constexpr int kApart = kOwn > kHyperVector ? kHyperVector : kHyperRun;  // from run to run
  static constexpr bool kIsRounded = sizeof(Stream) < sizeof(float);
  __device__ __forceinline__ static constexpr int chunk(int run, int c) {  // of a row of fn
    return (run * kApart + c * kOwn) / kHyperVector;
  }
};

// A warp's sums: products by token, and squares.
struct HyperSums {
  float rows[kHyperTokens][kHyperRows];
  float squares[kHyperTokens];
};

template <int kWarps>
struct HyperShared {
  alignas(16) HyperSums sums[kWarps];
  alignas(16) float shared[kHyperParts][kHyperShared * kHyperVector];  // pre by token, then squares, from every block
  alignas(16) float own[kHyperParts][kHyperBack];                      // post and comb of one token, from every block
  alignas(16) float norm[kWarps][kHyperSpan];
  alignas(16) float base[kStreams], scale[kStreams];         // of pre; and what follows it
  alignas(16) float squares[kWarps][kHyperTokens];           // of x
  alignas(16) float norms[kHyperParts][kHyperTokens];        // the same, from every block
  alignas(8) uint64_t shared_there, own_there, norms_there;  // mbarriers
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

// 16 bytes to where `address` lies in block `rank` of the cluster, counted by its `barrier`.
__device__ __forceinline__ void send(uint32_t address, uint32_t barrier, int rank, float4 x) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                   peer_address(address, rank)),
               "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(peer_address(barrier, rank))
               : "memory");
}
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// Sums of `kCount` numbers `kStride` floats apart, in pairs of neighbours.
template <int kCount, int kStride>
__device__ __forceinline__ float tree(const float* x) {
  if constexpr (kCount == 1) {
    return *x;
  } else {
    constexpr int kFirst = kCount / 2;
    return tree<kFirst, kStride>(x) + tree<kCount - kFirst, kStride>(x + kFirst * kStride);
  }
}
template <int kCount, int kStride>
__device__ __forceinline__ float4 tree4(const float* x) {
  if constexpr (kCount == 1) {
    return *reinterpret_cast<const float4*>(x);
  } else {
    constexpr int kFirst = kCount / 2;
    const float4 a = tree4<kFirst, kStride>(x), b = tree4<kCount - kFirst, kStride>(x + kFirst * kStride);
    return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
  }
}

// Of one token: what post and comb are made of, from the sums that all blocks sent. All lanes of a warp.
template <int kWarps>
__device__ __forceinline__ void store_back(const HyperArgs& args, const HyperShared<kWarps>& shared, int own, int token,
                                           float base, float scale, int lane) {
  constexpr float kInverse = 1.f / (kStreams * kHyperParts * kHyperSpan * kWarps);
  const float squares =
      tree<kHyperParts, kHyperShared * kHyperVector>(&shared.shared[0][kHyperTokens * kStreams + own]);
  const float factor = rsqrtf(squares * kInverse + args.eps);
  if (lane >= kHyperBack) return;
  const float product = tree<kHyperParts, kHyperBack>(&shared.own[0][lane]);
  args.back[token * kHyperBack + lane] = product * factor * scale + base;
}

// Asks for what the cluster reads next, from token `first` on: this block's channels of streams and outputs, into L2.
template <int kWarps, typename Stream>
__device__ __forceinline__ void fetch_tokens(const HyperArgs& args, int rank, int first, int lane) {
  constexpr int kOwn = kHyperSpan * kWarps;  // channels of a block
  constexpr uint32_t kBytes = kOwn * sizeof(Stream);
  const auto fetch = [&](const void* from, size_t row) {
    const auto* const at = static_cast<const Stream*>(from) + (row * kHyperParts + rank) * kOwn;
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(at), "r"(kBytes) : "memory");
  };
  static_assert(kHyperTokens * kStreams == kLanes, "a lane for each stream of a token");
  if (first + lane / kStreams < args.tokens) fetch(args.streams, static_cast<size_t>(first) * kStreams + lane);
  const int output = lane / kHyperTokens, token = first + lane % kHyperTokens;
  if (output < kHyperOutputs && token < args.tokens && args.outputs[output] != nullptr)
    fetch(args.outputs[output], token);
}

// The last warp's part: it waits for the sums of all blocks, and stores post and comb of the block's own token.
template <int kWarps, typename Stream, bool kMany>
__device__ __forceinline__ void serve_back(const HyperArgs& args, const HyperShared<kWarps>& shared, int rank,
                                           bool head, uint32_t shared_there, uint32_t own_there, int lane) {
  const bool mine = rank < kHyperTokens && !head;
  const int stride = gridDim.y * kHyperTokens;
  for (int first = blockIdx.y * kHyperTokens, phase = 0;; phase ^= 1) {
    if constexpr (kMany) fetch_tokens<kWarps, Stream>(args, rank, first + stride, lane);
    cluster_wait();
    if (mine) {
      const float base = args.base[kStreams + min(lane, kHyperBack - 1)], scale = args.scale[lane < kStreams ? 1 : 2];
      barrier_wait(shared_there, phase);
      barrier_wait(own_there, phase);
      if (first + rank < args.tokens) store_back<kWarps>(args, shared, rank, first + rank, base, scale, lane);
    }
    first += stride;
    if (!kMany || first >= args.tokens) return;
    __syncwarp();
    if (mine && lane == 0) barrier_expect(own_there, sizeof(shared.own));
    __syncwarp();
    cluster_arrive();
  }
}

struct Four {
  float x[4];
};
// What streams of this type hold of the numbers.
template <typename Stream>
__device__ __forceinline__ void round_four(Four& v) {
  if constexpr (HyperLane<Stream>::kIsRounded) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(v.x[i], v.x[i + 1]);
      const uint32_t bits = reinterpret_cast<const uint32_t&>(pair);
      v.x[i] = lower_bf16(bits), v.x[i + 1] = upper_bf16(bits);
    }
  }
}
template <int kCount>
using Runs = Four[kHyperRuns][kCount];  // a lane's channels of streams

__device__ __forceinline__ Four load_four(const float* p) {
  const float4 v = *reinterpret_cast<const float4*>(p);
  return {{v.x, v.y, v.z, v.w}};
}
// A lane's channels of `kCount` streams or outputs, `stride` numbers apart.
template <int kCount>
__device__ __forceinline__ void load_runs(Runs<kCount>& x, const float* from, int stride) {
#pragma unroll
  for (int b = 0; b < kHyperRuns; ++b) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) x[b][j] = load_four(from + j * stride + b * HyperLane<float>::kApart);
  }
}
template <int kCount>
__device__ __forceinline__ void load_runs(Runs<kCount>& x, const __nv_bfloat16* from, int stride) {
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    const uint4 v = *reinterpret_cast<const uint4*>(from + j * stride);
    const uint32_t words[2 * kHyperRuns] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 2 * kHyperRuns; ++i) {
      x[i / 2][j].x[i % 2 * 2] = lower_bf16(words[i]);
      x[i / 2][j].x[i % 2 * 2 + 1] = upper_bf16(words[i]);
    }
  }
}
// A lane's channels of one stream, or of x, to memory.
template <typename Stream, int kCount>
__device__ __forceinline__ void store_runs(float* to, const Runs<kCount>& x, int j) {
#pragma unroll
  for (int b = 0; b < kHyperRuns; ++b) {
    const auto& [p, q, r, s] = x[b][j].x;
    *reinterpret_cast<float4*>(to + b * HyperLane<Stream>::kApart) = make_float4(p, q, r, s);
  }
}
template <typename Stream, int kCount>
__device__ __forceinline__ void store_runs(__nv_bfloat16* to, const Runs<kCount>& x, int j) {
  uint2 words[kHyperRuns];
#pragma unroll
  for (int b = 0; b < kHyperRuns; ++b) {
    const auto& [p, q, r, s] = x[b][j].x;
    const __nv_bfloat162 low = __floats2bfloat162_rn(p, q), high = __floats2bfloat162_rn(r, s);
    words[b] = {reinterpret_cast<const uint32_t&>(low), reinterpret_cast<const uint32_t&>(high)};
    if constexpr (!HyperLane<Stream>::kIsRounded)
      *reinterpret_cast<uint2*>(to + b * HyperLane<Stream>::kApart) = words[b];
  }
  if constexpr (HyperLane<Stream>::kIsRounded)
    *reinterpret_cast<uint4*>(to) = {words[0].x, words[0].y, words[1].x, words[1].y};
}

// Where a warp has the 16 bytes `chunk` of a row of fn, of one stream: so that lanes with two rows meet no bank twice.
template <typename Stream>
__device__ __forceinline__ constexpr uint32_t fn_chunk(int stream, int row, int chunk) {
  constexpr int kApart = HyperLane<Stream>::chunk(1, 0);
  return ((stream * kHyperRows + row) * kHyperChunks + (chunk ^ (row & 1) * kApart)) * kChunkBytes;
}
// A warp's channels, from `channel` on, of fn and of the norm. In two groups of copies, of two streams each.
template <typename Stream>
__device__ __forceinline__ void copy_fn(const HyperArgs& args, uint32_t to, uint32_t norm, int channel, int lane,
                                        int width) {
  constexpr int kAtOnce = kLanes / kHyperChunks;  // rows
  const int chunk = lane % kHyperChunks, four = chunk * kHyperVector;
#pragma unroll
  for (int j = 0; j < kStreams; ++j) {
#pragma unroll
    for (int i = 0; i < kHyperRows / kAtOnce; ++i) {
      const int row = i * kAtOnce + lane / kHyperChunks;
      const bool given = row < args.rows;
      const float* from = args.fn + (static_cast<size_t>(given ? row : 0) * kStreams + j) * width + channel + four;
      copy_async(to + fn_chunk<Stream>(j, row, chunk), from, given);
    }
    if (j == 0 && lane < kHyperChunks) copy_async(norm + chunk * kChunkBytes, args.norm + channel + four, true);
    if (j % 2 == 1) copy_commit();
  }
}

// This lane's part of a token's squares.
__device__ __forceinline__ float squares_of(const Runs<kStreams>& x) {
  float squares = 0;
#pragma unroll
  for (const auto& run : x) {
#pragma unroll
    for (const Four& four : run) {
#pragma unroll
      for (const float v : four.x) squares += v * v;
    }
  }
  return squares;
}

// What the next block reads, before its norm; this lane's part of its squares.
template <typename Stream>
__device__ __forceinline__ float mix_streams(Runs<1>& mixed, const float (&pre)[kStreams], const Runs<kStreams>& x) {
  float squares = 0;
#pragma unroll
  for (int b = 0; b < kHyperRuns; ++b) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float sum = pre[0] * x[b][0].x[i];
#pragma unroll
      for (int k = 1; k < kStreams; ++k) sum += pre[k] * x[b][k].x[i];
      mixed[b][0].x[i] = sum;
    }
    round_four<Stream>(mixed[b][0]);
#pragma unroll
    for (const float v : mixed[b][0].x) squares += v * v;
  }
  return squares;
}

// The last block's outputs go into the streams.
template <int kWidth, typename Stream>
__device__ __forceinline__ void write_outputs(const HyperArgs& args, uint32_t row, const Runs<1>& y,
                                              const Runs<1>& more, const Four& post, const Four (&comb)[kStreams],
                                              Runs<kStreams>& x) {
#pragma unroll
  for (int b = 0; b < kHyperRuns; ++b) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float old[kStreams] = {x[b][0].x[i], x[b][1].x[i], x[b][2].x[i], x[b][3].x[i]};
      const float output = y[b][0].x[i] + more[b][0].x[i];
#pragma unroll
      for (int k = 0; k < kStreams; ++k) {
        float sum = post.x[k] * output;
#pragma unroll
        for (int j = 0; j < kStreams; ++j) sum += comb[j].x[k] * old[j];
        x[b][k].x[i] = sum;
      }
    }
#pragma unroll
    for (int k = 0; k < kStreams; ++k) round_four<Stream>(x[b][k]);
  }
  if (args.new_streams == nullptr) return;
#pragma unroll
  for (int k = 0; k < kStreams; ++k)
    store_runs<Stream>(static_cast<Stream*>(args.new_streams) + row + k * kWidth, x, k);
}

// Of `upper` rows n and n + 8, of `lower` 16 + n, of which one product makes two sums.
__device__ __forceinline__ void store_products(HyperSums& sums, const float (&upper)[3][4], const float (&lower)[2][4],
                                               int n, int c) {
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    float* to = sums.rows[2 * c + k];
    to[n] = upper[0][k] + (upper[1][k] + upper[2][k]);
    to[n + 8] = upper[0][2 + k] + (upper[1][2 + k] + upper[2][2 + k]);
    to[n + 16] = lower[0][k] + (lower[0][2 + k] + lower[1][k]);
  }
}

// The block's sums, 16 bytes a thread, to the blocks that need them.
template <int kWarps>
__device__ __forceinline__ void send_sums(HyperShared<kWarps>& shared, int rank, bool head, uint32_t shared_there,
                                          uint32_t own_there) {
  constexpr int kToAll = kHyperParts * kHyperShared, kToOne = kHyperTokens * kHyperOwn;
  static_assert(kToAll + kToOne <= kWarps * kLanes, "a thread for each");
  constexpr int kStride = sizeof(HyperSums) / sizeof(float);
  if (threadIdx.x < kToAll) {
    const int to = threadIdx.x / kHyperShared, piece = threadIdx.x % kHyperShared;
    const float* from = piece < kHyperTokens ? shared.sums[0].rows[piece]
                                             : shared.sums[0].squares + (piece - kHyperTokens) * kHyperVector;
    send(shared_address(&shared.shared[rank][piece * kHyperVector]), shared_there, to, tree4<kWarps, kStride>(from));
  } else if (threadIdx.x < kToAll + kToOne && !head) {
    const int to = (threadIdx.x - kToAll) / kHyperOwn, piece = (threadIdx.x - kToAll) % kHyperOwn * kHyperVector;
    send(shared_address(&shared.own[rank][piece]), own_there, to,
         tree4<kWarps, kStride>(shared.sums[0].rows[to] + kStreams + piece));
  }
}

// Grid: a cluster, eights of tokens; `kMany`: of which a cluster takes several. `early`: another kernel may still run,
// which writes what this one reads.
template <int kWarps, typename Stream, bool kMany>
__global__ void __launch_bounds__(kLanes*(kWarps + 1), kWarps <= 8 ? 2 : 1)
    hyper_connection_kernel(const __grid_constant__ HyperArgs args, bool early) {
  using Lane = HyperLane<Stream>;
  constexpr int kConsumers = kWarps * kLanes;
  extern __shared__ __align__(128) uint8_t dynamic[];  // the warps' parts of fn
  __shared__ HyperShared<kWarps> shared;
  constexpr int kWidth = kHyperParts * kHyperSpan * kWarps;
  let_next_start();
  const int rank = blockIdx.x, warp = warp_of(threadIdx.x), lane = lane_of(threadIdx.x);
  const bool head = args.rows == kStreams;
  const uint32_t shared_there = shared_address(&shared.shared_there), own_there = shared_address(&shared.own_there),
                 norms_there = shared_address(&shared.norms_there);
  if (threadIdx.x == 0) {
    for (const uint32_t barrier : {shared_there, own_there, norms_there}) barrier_init(barrier, 1);
    barrier_init_fence();
    barrier_expect(shared_there, sizeof(shared.shared));
    barrier_expect(own_there, sizeof(shared.own));
    barrier_expect(norms_there, sizeof(shared.norms));
  }
  __syncwarp();
  cluster_arrive();  // when this was waited for, the others' barriers are there
  if (warp == kWarps) {
    serve_back<kWarps, Stream, kMany>(args, shared, rank, head, shared_there, own_there, lane);
    return;
  }

  // Lane 4 n + c has channels of token n, and for products those of row n of fn.
  const int n = quad_of(lane), c = quad_lane(lane);
  const int own = (rank * kWarps + warp) * kHyperSpan, channel = own + c * Lane::kOwn;  // the warp's first; the lane's

  // All is asked for at once, but what comes first is used first; unless another kernel still runs.
  const uint32_t rows_of_fn = shared_address(dynamic) + warp * kHyperWarpBytes;
  const auto ask_for_weights = [&] {
    if (warp == 0 && lane < 2) {
      const bool first = lane == 0;
      copy_async(shared_address(first ? shared.base : shared.scale), first ? args.base : args.scale, true);
    }
    copy_fn<Stream>(args, rows_of_fn, shared_address(shared.norm[warp]), own, lane, kWidth);
  };
  if (kMany || early) ask_for_weights();
  wait_for_previous();
  for (int first = blockIdx.y * kHyperTokens, phase = 0;; phase ^= 1) {
    const int token = first + n;
    const bool there = token < args.tokens, written = there && args.outputs[0] != nullptr;
    const uint32_t at = token * uint32_t{kWidth} + channel, row = at + token * 3 * uint32_t{kWidth};
    Runs<kStreams> x = {};
    Runs<1> y = {}, more = {};
    Four post = {}, comb[kStreams] = {};
    if (there) load_runs(x, static_cast<const Stream*>(args.streams) + row, kWidth);
    if (written) {
      load_runs(y, static_cast<const Stream*>(args.outputs[0]) + at, 0);
      post = load_four(args.old_post + token * kStreams);
#pragma unroll
      for (int j = 0; j < kStreams; ++j) comb[j] = load_four(args.old_comb + (token * kStreams + j) * kStreams);
    }
    if (!kMany && !early) ask_for_weights();
    if (written && args.outputs[1] != nullptr) load_runs(more, static_cast<const Stream*>(args.outputs[1]) + at, 0);
    cluster_wait();

    if (written) write_outputs<kWidth, Stream>(args, row, y, more, post, comb, x);
    float squares = lanes_sum<kQuad>(squares_of(x));

    // Products: rows of fn by tokens. Of halves high x high, low x high, high x low, each a sum of its own.
    float upper[3][4] = {}, lower[2][4] = {};  // rows n and n + 8; 16 + n, of which one product makes two sums
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
      if (j == 0) copy_wait<1>(), __syncwarp();
      if (j == kStreams / 2) copy_wait<0>(), __syncwarp();
#pragma unroll
      for (int b = 0; b < kHyperRuns; ++b) {
        Halves rows[kRowGroups][4], of_x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          of_x[i] = Lane::kIsRounded ? Halves{__float_as_uint(x[b][j].x[i]), 0} : halves(x[b][j].x[i]);
#pragma unroll
        for (int m = 0; m < kRowGroups; ++m) {
          const uint4 w = load_shared(rows_of_fn + fn_chunk<Stream>(j, 8 * m + n, Lane::chunk(b, c)));
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
          mma_tf32(upper[1], p.low, q.low, p1.low, q1.low, v.high, v1.high);
          mma_tf32(lower[0], r.high, r.low, r1.high, r1.low, v.high, v1.high);
          if constexpr (!Lane::kIsRounded) {
            mma_tf32(upper[2], p.high, q.high, p1.high, q1.high, v.low, v1.low);
            mma_tf32(lower[1], r.high, 0, r1.high, 0, v.low, v1.low);
          }
        }
      }
    }
    store_products(shared.sums[warp], upper, lower, n, c);
    if (c == 0) shared.sums[warp].squares[n] = squares;
    named_sync(1, kConsumers);

    send_sums(shared, rank, head, shared_there, own_there);
    barrier_wait(shared_there, phase);

    // x, and its squares to all blocks.
    constexpr int kSharedStride = kHyperShared * kHyperVector;
    constexpr float kOfStreams = 1.f / (kStreams * kWidth), kOfWidth = 1.f / kWidth;
    const float* from_all = shared.shared[0];
    float factor =
        rsqrtf(tree<kHyperParts, kSharedStride>(from_all + kHyperTokens * kStreams + n) * kOfStreams + args.eps);
    const float product = tree<kHyperParts, kSharedStride>(from_all + lane);
    const float gate = sigmoid(product * factor * shared.scale[0] + shared.base[c]) + args.hc_eps;
    float pre[kStreams];
#pragma unroll
    for (int k = 0; k < kStreams; ++k) pre[k] = __shfl_sync(kAllLanes, gate, kQuad * n + k);
    Runs<1> mixed;
    squares = mix_streams<Stream>(mixed, pre, x);
    squares = lanes_sum<kQuad>(squares);
    if (c == 0) shared.squares[warp][n] = squares;
    named_sync(1, kConsumers);
    if (threadIdx.x < kHyperParts * kHyperSquares) {
      const int to = threadIdx.x / kHyperSquares, piece = threadIdx.x % kHyperSquares * kHyperVector;
      send(shared_address(&shared.norms[rank][piece]), norms_there, to,
           tree4<kWarps, kHyperTokens>(&shared.squares[0][piece]));
    }
    barrier_wait(norms_there, phase);
    first += gridDim.y * kHyperTokens;
    const bool last = !kMany || first >= args.tokens;
    if (last && token >= args.x_rows) return;
    factor = rsqrtf(tree<kHyperParts, kHyperTokens>(&shared.norms[0][n]) * kOfWidth + args.eps);
    if (!last) {
      // Nobody sends to a block again before all its threads are here, which have read what was sent.
      if (threadIdx.x == 0) {
        barrier_expect(shared_there, sizeof(shared.shared));
        barrier_expect(norms_there, sizeof(shared.norms));
      }
      named_sync(1, kConsumers);
      cluster_arrive();
    }
#pragma unroll
    for (int b = 0; b < kHyperRuns; ++b) {
      const Four norm = load_four(&shared.norm[warp][c * Lane::kOwn + b * Lane::kApart]);
#pragma unroll
      for (int i = 0; i < 4; ++i) mixed[b][0].x[i] = there ? mixed[b][0].x[i] * factor * norm.x[i] : 0.f;
    }
    if (args.bf16_out) {
      store_runs<Stream>(static_cast<__nv_bfloat16*>(args.x) + at, mixed, 0);
    } else {
      store_runs<Stream>(static_cast<float*>(args.x) + at, mixed, 0);
    }
    if (last) return;
  }
}

}  // namespace dsv4
