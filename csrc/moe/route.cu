// Which experts tokens go to, as an XLA FFI handler. One launch, only enqueued: fit for a command
// buffer. Wrapper and argument meaning: dsv4_jax/cuda/route.py and ops/route.py.
#include <cuda_runtime.h>

#include <cstdint>

#include "common/handler.h"
#include "common/lanes.cuh"
#include "common/numbers.cuh"
#include "common/overlap.cuh"

namespace dsv4 {

struct RouteArgs {
  const float* logits;   // [tokens, experts]
  const float* bias;     // [experts]; null: `given` says which
  const int32_t* given;  // [tokens, top]; what is no expert has the score NaN
  int32_t* chosen;       // [tokens, top]
  float* share;          // [tokens, top]
  int tokens, experts, top;
  float scale;
};

constexpr int kRouteExperts = 512, kRouteTop = 8;  // at most
constexpr int kRouteWarps = kRouteExperts / kLanes;
constexpr int kCandidates = kRouteWarps * kRouteTop / kLanes;  // of a lane
constexpr float kShareFloor = 1e-20f;
constexpr int kNanBits = 0x7FFFFFFF;

__device__ __forceinline__ float expert_score(float logit) {
  return sqrtf(fmaxf(logit, 0.f) + log1pf(expf(-fabsf(logit))));
}

// A block a token, a thread an expert. Each warp finds the best of its 32, the first one the best of those.
__global__ void __launch_bounds__(kRouteExperts) route_kernel(const __grid_constant__ RouteArgs args) {
  let_next_start();
  __shared__ float scores[kRouteExperts];
  __shared__ uint32_t best[kRouteWarps * kRouteTop];
  __shared__ uint16_t best_expert[kRouteWarps * kRouteTop];
  const int expert = threadIdx.x, lane = lane_of(expert), warp = warp_of(expert), top = args.top;
  const float* logits = args.logits + static_cast<size_t>(blockIdx.x) * args.experts;
  const size_t row = static_cast<size_t>(blockIdx.x) * top;
  const float bias = args.bias != nullptr && expert < args.experts ? args.bias[expert] : 0.f;
  wait_for_previous();
  int mine = 0;  // the expert of the lane's rank
  float score = 0;
  if (args.bias == nullptr) {
    if (lane < top) {
      mine = args.given[row + lane];
      score = mine >= 0 && mine < args.experts ? expert_score(logits[mine]) : __int_as_float(kNanBits);
    }
  } else {
    uint32_t key = 0;
    if (expert < args.experts) {
      scores[expert] = score = expert_score(logits[expert]);
      key = in_order(score + bias);
    }
    for (int rank = 0; rank < top; ++rank) {
      const uint32_t most = __reduce_max_sync(kAllLanes, key);
      if (lane == __ffs(__ballot_sync(kAllLanes, key == most)) - 1) {
        best[warp * top + rank] = key;
        best_expert[warp * top + rank] = static_cast<uint16_t>(expert);
        key = 0;
      }
    }
    __syncthreads();
    if (warp > 0) return;
    uint32_t keys[kCandidates];  // in the order of experts where they are equal
    const int count = blockDim.x / kLanes * top;
#pragma unroll
    for (int i = 0; i < kCandidates; ++i) keys[i] = i * kLanes + lane < count ? best[i * kLanes + lane] : 0u;
    for (int rank = 0; rank < top; ++rank) {
      uint32_t greatest = 0, place = ~0u;
#pragma unroll
      for (int i = 0; i < kCandidates; ++i) greatest = max(greatest, keys[i]);
      const uint32_t most = __reduce_max_sync(kAllLanes, greatest);
#pragma unroll
      for (int i = kCandidates - 1; i >= 0; --i) {
        if (keys[i] == most) place = i * kLanes + lane;
      }
      place = __reduce_min_sync(kAllLanes, place);
      if (lane == rank) mine = best_expert[place];
#pragma unroll
      for (int i = 0; i < kCandidates; ++i) {
        if (place == i * kLanes + lane) keys[i] = 0;
      }
    }
    score = lane < top ? scores[mine] : 0;
  }
  const float sum = lanes_sum<kLanes>(score);
  if (lane < top) {
    args.chosen[row + lane] = mine;
    args.share[row + lane] = score / (sum + kShareFloor) * args.scale;
  }
}

namespace {

namespace ffi = xla::ffi;

using Logits = ffi::Buffer<ffi::F32, 2>;
using Chosen = ffi::Buffer<ffi::S32, 2>;

ffi::Error route(cudaStream_t stream, Logits logits, ffi::AnyBuffer picks, ffi::Result<Chosen> chosen,
                 ffi::Result<Logits> share, bool hashed, float scale) {
  const int64_t tokens = logits.dimensions()[0], experts = logits.dimensions()[1], top = chosen->dimensions()[1];
  const Operand of_picks = hashed ? Operand("picks", picks, {tokens, top}, kElements, {ffi::S32})
                                  : Operand("picks", picks, {experts}, kElements, {ffi::F32});
  if (const ffi::Error error =
          check("route",
                {of_picks, {"chosen", *chosen, {tokens, top}, kElements}, {"share", *share, {tokens, top}, kElements}},
                {{experts <= kRouteExperts && top <= kRouteTop && top <= experts,
                  "at most 512 experts, and 8 of them a token"}});
      error.failure())
    return error;
  if (tokens == 0) return ffi::Error::Success();
  RouteArgs args = {};
  args.logits = logits.typed_data();
  if (hashed) {
    args.given = static_cast<const int32_t*>(picks.untyped_data());
  } else {
    args.bias = static_cast<const float*>(picks.untyped_data());
  }
  args.chosen = chosen->typed_data();
  args.share = share->typed_data();
  args.tokens = static_cast<int>(tokens);
  args.experts = static_cast<int>(experts);
  args.top = static_cast<int>(top);
  args.scale = scale;
  const int warps = hashed ? 1 : (args.experts + kLanes - 1) / kLanes;
  return launched("route", start(route_kernel, {dim3(args.tokens), warps * kLanes}, follows, stream, args));
}

}  // namespace

DSV4_HANDLER(
    route, dsv4_route, route,
    on_stream().Arg<Logits>().Arg<ffi::AnyBuffer>().Ret<Chosen>().Ret<Logits>().Attr<bool>("hashed").Attr<float>(
        "scale"));

}  // namespace dsv4
