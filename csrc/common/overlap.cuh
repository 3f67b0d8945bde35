// Kernels that start while the one before them on the stream ends (programmatic dependent launch).
//
// A kernel started so may read what no kernel of the step writes (weights) before `wait_for_previous`, and nothing
// else: which kernels before the last have ended is not known until then. At least one thread of every such kernel
// waits, so that what comes later finds all before it done. From `let_next_start` on, called by all blocks, the next
// one's blocks take what room the SMs have left.
#pragma once

#include <cuda_runtime.h>

namespace dsv4 {

// Whether a kernel of ours comes right before on the stream: set by a sequence (fusion/sequence.h) while it calls a
// handler.
inline thread_local bool follows = false;
// What to record when all blocks of the next launch have called `let_next_start`; null: nothing. Set likewise.
inline thread_local cudaEvent_t announced = nullptr;

struct Launch {
  dim3 grid;
  int threads;
  int shared = 0;        // bytes of dynamic shared memory
  unsigned cluster = 1;  // blocks along x
};

constexpr int kFreeShared =
    40 * 1024;  // bytes of shared memory that every launch may have, beside a kernel's own 8 KiB

// Launches a kernel; `early`: it may start while the one before it ends.
template <typename Kernel, typename... Args>
cudaError_t start(Kernel kernel, const Launch& launch, bool early, cudaStream_t stream, const Args&... args) {
  if (launch.shared > kFreeShared) {  // on every launch: it belongs to the current device and costs no device work
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, launch.shared);
    if (error != cudaSuccess) return error;
  }
  cudaLaunchAttribute attributes[3];
  cudaLaunchConfig_t config = {};
  config.gridDim = launch.grid;
  config.blockDim = dim3(launch.threads);
  config.dynamicSmemBytes = launch.shared;
  config.stream = stream;
  config.attrs = attributes;
  if (launch.cluster > 1) {
    auto& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {launch.cluster, 1, 1};
  }
  if (early) {
    auto& overlap = attributes[config.numAttrs++];
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
  }
  if (announced != nullptr) {
    auto& event = attributes[config.numAttrs++];
    event.id = cudaLaunchAttributeProgrammaticEvent;
    event.val.programmaticEvent = {announced, 0, 0};
  }
  return cudaLaunchKernelEx(&config, kernel, args...);
}

// Launches a kernel that takes each element by itself: a row of blocks for every row, of threads with `own` columns
// each.
template <typename Kernel, typename Args>
cudaError_t start_rows(Kernel kernel, int64_t rows, int64_t columns, int threads, int own, cudaStream_t stream,
                       const Args& args) {
  const int64_t block = int64_t{threads} * own;
  const dim3 grid(static_cast<unsigned>(rows), static_cast<unsigned>((columns + block - 1) / block));
  return start(kernel, {grid, threads}, follows, stream, args);
}

#ifdef __CUDACC__
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
#endif

}  // namespace dsv4
