// The weights of a projecting block (persistent_layer.cu): copied through a ring of stages, decoded, multiplied.
#pragma once

#include "persistent_layer.cuh"

namespace {

template <int kRing>
struct Projector {
  alignas(128) uint8_t stages[kRing][kOneStage];
  alignas(128) float fn[kFnFloats];
  // bf16, as lanes read them: of every 32 columns the words 0, 4, 8 and 12, then 1, 5, ..
  alignas(128) uint8_t x[2 * kOutLatent];
  alignas(16) float sums[kWorkWarps][kRows16];
  float old_streams[kStreams][kChannels], new_streams[kStreams][kChannels];
  float reduced[kWorkWarps];
  alignas(8) uint64_t full[kRing], empty[kRing], fn_there;
  uint32_t epoch;
};

template <int kRing>
struct Turn {
  int index = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void next() {
    if (++index == kRing) index = 0, phase ^= 1;
  }
};

// The producer: one thread.
template <int kRing>
__device__ void copy_all(const Args& args, Projector<kRing>& s) {
  const int block = blockIdx.x;
  const uint64_t policy = streamed_once();
  Turn<kRing> next, there;
  int step = 0;
  for (int l = 0; l < args.layers; ++l) {
    const size_t of_block = static_cast<size_t>(args.first + l) * kProjectors + block;
    const uint8_t* from = args.weights + of_block * kLayerStages * kOneStage;
    for (int i = block < kInputBlocks ? 0 : kInputStages; i < kLayerStages; ++i, ++step) {
      if (i == kBeforeFn) {
        const uint32_t fn_there = shared_address(&s.fn_there);
        barrier_expect(fn_there, sizeof(s.fn));
        copy_bulk(shared_address(s.fn), reinterpret_cast<const uint8_t*>(args.fn + of_block * kFnFloats), sizeof(s.fn),
                  fn_there, policy);
      }
      if (step >= args.window) await(shared_address(&s.full[there.index]), there.phase), there.next();
      if (step >= kRing) await(shared_address(&s.empty[next.index]), next.phase ^ 1);
      const uint32_t full = shared_address(&s.full[next.index]);
      if (args.without & kNoWeights) {
        barrier_arrive(full);
      } else {
        barrier_expect(full, kOneStage);
        copy_bulk(shared_address(s.stages[next.index]), from + static_cast<size_t>(i) * kOneStage, kOneStage, full,
                  policy);
      }
      next.next();
    }
  }
}

// 16 rows x 128 columns of codes; all columns of the product are the token's. `release` is called when the stage's
// bytes are in registers.
constexpr int kParts = 4;
__device__ __forceinline__ void load_codes(uint4 (&words)[kParts], uint32_t codes, int lane) {
#pragma unroll
  for (int p = 0; p < kParts; ++p) words[p] = load_shared(codes + p * kWarpBytes / kParts + lane * kChunkBytes);
}
// What a warp multiplies of a stage: decoded before x is there.
struct Fragments {
  uint32_t a[kParts][2 * kFragment];
};
__device__ __forceinline__ Fragments decoded(const uint4 (&words)[kParts], uint32_t scale) {
  const uint32_t word = code_factor(scale);
  const __nv_bfloat162 factor = reinterpret_cast<const __nv_bfloat162&>(word);
  Fragments f;
#pragma unroll
  for (int p = 0; p < kParts; ++p) {
    decode_codes(words[p].x, words[p].y, factor, f.a[p]);
    decode_codes(words[p].z, words[p].w, factor, f.a[p] + kFragment);
#pragma unroll
    for (uint32_t& x : f.a[p]) asm volatile("" : "+r"(x));  // here and not where it is used
  }
  return f;
}
__device__ __forceinline__ void multiply(float (&d)[kCell], const Fragments& f, uint32_t x, int lane) {
#pragma unroll
  for (int p = 0; p < kParts; ++p) {
    const uint4 b = load_shared4(x + p * 64 + quad_lane(lane) * kChunkBytes);
    mma_16x8(d, f.a[p], b.x, b.y);
    mma_16x8(d, f.a[p] + kFragment, b.z, b.w);
  }
}
template <typename Release>
__device__ __forceinline__ void multiply_codes(float (&d)[kCell], const uint4 (&words)[kParts], uint32_t x,
                                               uint32_t scale, int lane, const Release& release) {
  uint4 b[kParts];
#pragma unroll
  for (int p = 0; p < kParts; ++p) b[p] = load_shared(x + p * 64 + quad_lane(lane) * kChunkBytes);
  const uint32_t word = code_factor(scale);
  const __nv_bfloat162 factor = reinterpret_cast<const __nv_bfloat162&>(word);
  release();
#pragma unroll
  for (int p = 0; p < kParts; ++p) {
    uint32_t a[2 * kFragment];
    decode_codes(words[p].x, words[p].y, factor, a);
    decode_codes(words[p].z, words[p].w, factor, a + kFragment);
    mma_16x8(d, a, b[p].x, b[p].y);
    mma_16x8(d, a + kFragment, b[p].z, b[p].w);
  }
}
// 16 rows x 128 columns of bf16: fragments one after the other.
template <typename Release>
__device__ __forceinline__ void multiply_bf16(float (&d)[kCell], uint32_t weights, uint32_t x, int lane,
                                              const Release& release) {
  uint4 b[4], v[8];
#pragma unroll
  for (int p = 0; p < 8; ++p) v[p] = load_shared(weights + p * 512 + lane * kChunkBytes);
#pragma unroll
  for (int p = 0; p < 4; ++p) b[p] = load_shared(x + p * 64 + quad_lane(lane) * kChunkBytes);
  release();
#pragma unroll
  for (int p = 0; p < 8; ++p) {
    const uint32_t a[4] = {v[p].x, v[p].y, v[p].z, v[p].w};
    mma_16x8(d, a, p % 2 == 0 ? b[p / 2].x : b[p / 2].z, p % 2 == 0 ? b[p / 2].y : b[p / 2].w);
  }
}

// Eight columns from `column` on.
__device__ __forceinline__ void put_x(uint8_t* x, int column, uint4 words) {
  const uint32_t to = shared_address(x) + column / 32 * 64 + column % 32 / 8 * 4;
  store_shared(to, words.x);
  store_shared(to + 16, words.y);
  store_shared(to + 32, words.z);
  store_shared(to + 48, words.w);
}

__device__ __forceinline__ void put_sums(float (&to)[kRows16], const float (&d)[kCell], int lane) {
  if (quad_lane(lane) == 0) to[quad_of(lane)] = d[0], to[quad_of(lane) + kLowerRow] = d[2];
}
// Row `row` of `kParts` warps `kApart` apart from `first` on, added in pairs of neighbours.
template <int kParts, int kApart>
__device__ __forceinline__ float add_parts(const float (*sums)[kRows16], int first, int row) {
  float x[kParts];
#pragma unroll
  for (int p = 0; p < kParts; ++p) x[p] = sums[first + p * kApart][row];
#pragma unroll
  for (int apart = 1; apart < kParts; apart *= 2) {
#pragma unroll
    for (int i = 0; i < kParts; i += 2 * apart) x[i] += x[i + apart];
  }
  return x[0];
}

}  // namespace
