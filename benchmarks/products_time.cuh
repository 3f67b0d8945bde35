// How benchmarks/products.cu and products_now.cu time calls: in a CUDA graph.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <vector>

// us of a call, the median of `replays` graphs of `calls` calls, which `enqueue(i, stream)` makes and `prepare(stream)`
// precedes; below zero, an error.
template <typename Prepare, typename Enqueue>
float time_graphs(int calls, int replays, const Prepare& prepare, const Enqueue& enqueue) {
  cudaStream_t stream;
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  prepare(stream);
  cudaError_t error = cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
  for (int i = 0; i < calls && error == cudaSuccess; ++i) error = enqueue(i, stream);
  cudaGraph_t graph = nullptr;
  const cudaError_t ended = cudaStreamEndCapture(stream, &graph);
  if (error == cudaSuccess) error = ended;
  cudaGraphExec_t run = nullptr;
  if (error == cudaSuccess) error = cudaGraphInstantiate(&run, graph, 0);
  float us = -static_cast<float>(error);
  if (error == cudaSuccess) {
    cudaEvent_t begin, end;
    cudaEventCreate(&begin), cudaEventCreate(&end);
    std::vector<float> taken;
    for (int i = 0; i <= replays && error == cudaSuccess; ++i) {
      cudaEventRecord(begin, stream), cudaGraphLaunch(run, stream), cudaEventRecord(end, stream);
      error = cudaEventSynchronize(end);
      float ms = 0;
      cudaEventElapsedTime(&ms, begin, end);
      if (i > 0) taken.push_back(1e3f * ms / calls);
    }
    std::sort(taken.begin(), taken.end());
    us = error == cudaSuccess ? taken[taken.size() / 2] : -static_cast<float>(error);
    cudaEventDestroy(begin), cudaEventDestroy(end);
  }
  if (run != nullptr) cudaGraphExecDestroy(run);
  if (graph != nullptr) cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  (void)cudaGetLastError();  // a shape that does not take the matrix
  return us;
}
