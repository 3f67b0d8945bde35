// What the kernels of dense products have in common: the ring of stages through which few rows' weights are streamed
// (dense/stream_kernel.cuh, dense/e4m3_few.cuh), and sums on their way to memory.
#pragma once

#include "common/bulk_copy.cuh"
#include "common/hopper.cuh"
#include "common/overlap.cuh"

namespace dsv4 {

struct StreamStage {
  alignas(8) uint64_t weights, rows, empty;
};

template <typename Shape>
__device__ __forceinline__ void open_ring(StreamStage* stages) {
#pragma unroll
  for (int s = 0; s < Shape::kStages; ++s) {
    barrier_init(shared_address(&stages[s].weights), 1);
    barrier_init(shared_address(&stages[s].rows), 1);
    barrier_init(shared_address(&stages[s].empty), Shape::kConsumers / kLanes);
  }
  barrier_init_fence();
}

// `copies.copy_runs(step, stage, barrier)` of each step's weights as soon as the stage `window` before it is there and
// its own was handed back.
template <typename Shape, typename Copies>
__device__ __forceinline__ void fill_weights(const Copies& copies, int window) {
  Stage there = {0, 0}, next = {0, 0};
  for (int step = 0; step < copies.steps; ++step) {
    if (step >= window) {
      barrier_wait(shared_address(&copies.stages[there.index].weights), there.phase);
      if (++there.index == Shape::kStages) there.index = 0, there.phase ^= 1;
    }
    if (step >= Shape::kStages) barrier_wait(shared_address(&copies.stages[next.index].empty), next.phase ^ 1);
    const uint32_t full = shared_address(&copies.stages[next.index].weights);
    barrier_expect(full, Shape::kStageWeights);
    copies.copy_runs(step, next.index, full);
    if (++next.index == Shape::kStages) next.index = 0, next.phase ^= 1;
  }
}
// `copies.copy_own_rows(step, stage, barrier)`, `bytes` of each step, as soon as its stage was handed back; all wait
// for the previous kernel.
template <typename Shape, typename Copies>
__device__ __forceinline__ void fill_rows(const Copies& copies, uint32_t bytes) {
  Stage next = {0, 0};
  wait_for_previous();
  for (int step = 0; step < copies.steps; ++step) {
    if (step >= Shape::kStages) barrier_wait(shared_address(&copies.stages[next.index].empty), next.phase ^ 1);
    const uint32_t full = shared_address(&copies.stages[next.index].rows);
    barrier_expect(full, bytes);
    copies.copy_own_rows(step, next.index, full);
    if (++next.index == Shape::kStages) next.index = 0, next.phase ^= 1;
  }
}

// What reads or writes the sums stays on its side of here.
template <int kCount>
__device__ __forceinline__ void fence_sums(float (&d)[kCount]) {
#pragma unroll
  for (float& x : d) asm volatile("" : "+f"(x)::"memory");
}

// A warpgroup's sums to shared memory: [row of x][row of its weights].
template <typename Shape>
__device__ __forceinline__ void put_own_sums(const float (&d)[Shape::kRows / 2], uint32_t sums, int thread) {
  const int lane = lane_of(thread), row = accumulator_row(warp_of(thread), lane);
  const uint32_t to = sums + (2 * quad_lane(lane) * Shape::kSumPitch + row) * sizeof(float);
#pragma unroll
  for (int i = 0; i < Shape::kRows / kCellColumns; ++i) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const uint32_t at = to + (kCellColumns * i + k) * Shape::kSumPitch * sizeof(float);
      store_shared(at, __float_as_uint(d[kCell * i + k]));
      store_shared(at + kLowerRow * sizeof(float), __float_as_uint(d[kCell * i + 2 + k]));
    }
  }
}

// Four results next to each other.
template <typename Args>
__device__ __forceinline__ void store_four(const Args& args, size_t at, float4 x) {
  if (args.float_out) {
    *reinterpret_cast<float4*>(static_cast<float*>(args.out) + at) = x;
    return;
  }
  const __nv_bfloat162 low = __floats2bfloat162_rn(x.x, x.y), high = __floats2bfloat162_rn(x.z, x.w);
  *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(args.out) + at) = {reinterpret_cast<const uint32_t&>(low),
                                                                           reinterpret_cast<const uint32_t&>(high)};
}

}  // namespace dsv4
