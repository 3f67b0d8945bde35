// What the parts of persistent_layer.cu share: sizes, arguments, waiting for other blocks and for copies.
#pragma once

#include <cuda_runtime.h>

#include "../csrc/attend_producers.cuh"
#include "../csrc/bulk_copy.cuh"
#include "../csrc/dense_fp8_weights.cuh"
#include "../csrc/hyper_mixing.cuh"
#include "../csrc/mma_64.cuh"
#include "../csrc/row_math.cuh"

namespace {

using namespace dsv4;

constexpr int kHidden = 4096, kLatent = 1024, kOfInput = kLatent + kDim, kAllHeads = 64, kOutLatent = 8192;
constexpr int kProjectors = 128, kAttenders = 4, kGrid = kProjectors + kAttenders;
constexpr int kWorkWarps = 16, kWork = kWorkWarps * kLanes, kLaunchThreads = kWork + kLanes;
constexpr int kRows16 = 16;                           // of a warp's products
constexpr int kInputBlocks = kOfInput / kRows16;      // that have rows of of_input
constexpr int kWarpBytes = 2048;                      // of a warp in a stage: 16 rows x 128 codes
constexpr int kCodesBytes = kWorkWarps * kWarpBytes;  // of a stage
constexpr int kOneStage = kCodesBytes + 128;          // behind them the scale of each warp
constexpr int kInputStages = 2, kPooledStages = 2, kMatrixStages = 8, kLayerStages = 4 + 3 * kMatrixStages;
constexpr int kBeforeFn = 4 + kMatrixStages;  // a stage that no block reaches before it is done with the last layer's
constexpr int kFnRows = kStreams + kHyperBack, kChannels = kHidden / kProjectors, kSumRows = kFnRows + 1;
constexpr int kFnFloats = kFnRows * kStreams * kChannels;  // of a block
constexpr int kWindowKeys = 128, kKeys = 192, kNewKey = kWindowKeys - 1, kNewEntry = kKeys - 1;
constexpr int kKeyPitch = 2 * kDim + kChunkBytes, kWeightPitch = 2 * kKeys + kChunkBytes, kScoreWarps = kKeys / 16;
constexpr float kEps = 1e-6f, kMixEps = 1e-6f;
constexpr int kSinkhornSteps = 20;
constexpr int kMostPolls = 1 << 21;  // then the kernel stops with an error
constexpr int kMarks = 16;

// Of a layer's vectors, floats.
enum : int {
  kNormX = 0,
  kNormQ = kNormX + kHidden,
  kNormKv = kNormQ + kLatent,
  kNormEntry = kNormKv + kDim,
  kPoolBias = kNormEntry + kDim,
  kSink = kPoolBias + kDim,
  kBase = kSink + kAllHeads,
  kScale = kBase + kFnRows,
  kVectorFloats = kScale + 8
};
enum Counter : int {
  kOfXThere,
  kPooledThere,
  kQThere,
  kOutThere = kQThere + kAttenders,
  kLatentThere = kOutThere + kAttenders,
  kSumsThere,
  kMixedThere,
  kLaunches,
  kCounters
};
enum Without : int { kNoWaits = 1, kNoAttend = 2, kNoWeights = 4 };

}  // namespace

struct Args {
  const uint8_t* weights;  // [layers, 128, 28, kOneStage]
  const float* fn;         // [layers, 128, 24, 4, 32]
  const float* vectors;    // [layers, kVectorFloats]
  uint8_t* nope;           // pools [layers, rows, ..]
  uint16_t* rope;
  uint8_t* scale;
  float* state;           // [layers, 3, 512]: max, sum, accumulated
  const int* ids;         // [192] rows of the window's and the entries' keys
  const float* angles;    // [2, 2, 32]: of the token and of the entry, cosine and sine
  float* streams;         // [4, 4096]
  float* mixed;           // [4096]: x before its norm
  float* squares;         // [128] of it
  float* mixing;          // [20]: post, comb
  float* of_x;            // [1536]
  float* pooled;          // [2, 1024]
  float* q;               // [64, 512]
  __nv_bfloat16* out;     // [64, 512]
  __nv_bfloat16* latent;  // [8192]
  float* sums;            // [25, 128]
  uint32_t* counters;     // [kCounters, 32]
  uint64_t* marks;        // [layers, 132, 16] or null: ns
  int first, layers;      // of this launch
  int rows, window, without;
};

namespace {

__device__ __forceinline__ void arrive(const Args& args, int counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(args.counters + counter * kLanes) : "memory");
}
__device__ __forceinline__ void poll(const Args& args, int counter, uint32_t target) {
  if (args.without & kNoWaits) return;
#pragma unroll 1
  for (int i = 0; i < kMostPolls; ++i) {
    uint32_t seen;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(args.counters + counter * kLanes) : "memory");
    if (static_cast<int>(seen - target) >= 0) {
      asm volatile("fence.acq_rel.gpu;" ::: "memory");
      return;
    }
  }
  __trap();
}
__device__ __forceinline__ void workers() { named_sync(1, kWork); }
// All workers of a block, until `counter` has come to `target`.
__device__ __forceinline__ void meet(const Args& args, int counter, uint32_t target) {
  if (threadIdx.x == 0) poll(args, counter, target);
  __syncwarp();
  workers();
}
__device__ __forceinline__ void await(uint32_t barrier, uint32_t parity) {
#pragma unroll 1
  for (int i = 0; i < kMostPolls; ++i) {
    uint32_t done;
    asm volatile(
        "{.reg .pred p; mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p;}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    if (done) return;
  }
  __trap();
}

// What other blocks wrote: from L2, in order.
__device__ __forceinline__ float fresh(const float* p) {
  float x;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(p) : "memory");
  return x;
}
__device__ __forceinline__ float4 fresh4(const float* p) {
  float4 x;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"(p)
               : "memory");
  return x;
}
__device__ __forceinline__ uint4 fresh_words(const void* p) {
  uint4 x;
  asm volatile("ld.global.cg.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(p)
               : "memory");
  return x;
}

// What is constant, asked for here and not where it is used.
__device__ __forceinline__ float early(const float* p) {
  float x;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(x) : "l"(p) : "memory");
  return x;
}
__device__ __forceinline__ float2 early2(const float* p) {
  float2 x;
  asm volatile("ld.global.nc.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "l"(p) : "memory");
  return x;
}
__device__ __forceinline__ float4 early4(const float* p) {
  float4 x;
  asm volatile("ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"(p)
               : "memory");
  return x;
}

__device__ __forceinline__ void mark(const Args& args, int layer, int i) {
  if (args.marks == nullptr || threadIdx.x != 0) return;
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  args.marks[(layer * kGrid + blockIdx.x) * kMarks + i] = now;
}

}  // namespace
