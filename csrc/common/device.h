// What a launch asks of the current device.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

namespace dsv4 {

// Its number of SMs. Launches cut their work by it; no result depends on the cut. Asked of each device once.
inline int multiprocessors() {
  constexpr int kDevices = 64;  // those beyond are asked every time
  static std::atomic<int> known[kDevices];
  int device = 0, count = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 1;
  if (device < kDevices) count = known[device].load(std::memory_order_relaxed);
  if (count > 0) return count;
  if (cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) return 1;
  if (device < kDevices) known[device].store(count, std::memory_order_relaxed);
  return count;
}

}  // namespace dsv4
