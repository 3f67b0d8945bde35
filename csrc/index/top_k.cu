// top_k as an XLA FFI handler. One launch, only enqueues: fit for a command buffer.
// Wrapper, argument meaning and fallbacks: dsv4_jax/cuda/top_k.py.
#include <cuda_runtime.h>

#include <cstddef>
#include "common/device.h"
#include "common/handler.h"
#include "index/top_k_kernel.cuh"

namespace dsv4 {
namespace {

namespace ffi = xla::ffi;

template <int kVectors, int kBlocks>
cudaError_t launch_with(const TopKArgs& args, int tokens, cudaStream_t stream) {
  const int shared = kBlocks == 1 ? offsetof(TopKShared, gathered) : sizeof(TopKShared);
  cudaError_t error =
      cudaFuncSetAttribute(top_k_kernel<kVectors, kBlocks>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {kBlocks, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(tokens) * kBlocks);
  config.blockDim = dim3(kTopThreads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = kBlocks > 1;
  return cudaLaunchKernelEx(&config, top_k_kernel<kVectors, kBlocks>, args);
}

// Scores one block can hold in registers.
constexpr int kCapacity = kTopVectors * kTopChunk;

// Whether `tokens` clusters of kBlocks blocks run at once, one block an SM. A cluster lies within one of the device's
// groups of 16 to 18 SMs: the largest clusters reach two thirds of all SMs, those half as large six sevenths.
template <int kBlocks>
bool run_at_once(int tokens) {
  constexpr bool kLargest = kBlocks == kTopCluster;
  static_assert(kLargest || kBlocks == kTopCluster / 2, "of which the share is known");
  constexpr int kReached = kLargest ? 2 : 6, kOf = kLargest ? 3 : 7;
  return int64_t{tokens} * kBlocks <= multiprocessors() * kReached / kOf;
}

// One block of as few vectors as hold a row, where one does: blocks of a cluster wait for one another longer than they
// gain.
template <int kVectors = 1>
cudaError_t launch_block(const TopKArgs& args, int chunks, int tokens, cudaStream_t stream) {
  if constexpr (kVectors < kTopVectors) {
    if (chunks > kVectors) return launch_block<2 * kVectors>(args, chunks, tokens, stream);
  }
  return launch_with<kVectors, 1>(args, tokens, stream);
}

// Many rows, each a block's of as few vectors as hold it; more blocks share an SM the shorter rows are.
constexpr int rows_at_once(int vectors) { return vectors < kTopVectors ? 3 : 2; }
template <int kVectors = 4>
cudaError_t launch_rows(const TopKArgs& args, int chunks, int tokens, cudaStream_t stream) {
  if constexpr (kVectors < kTopVectors) {
    if (chunks > kVectors) return launch_rows<2 * kVectors>(args, chunks, tokens, stream);
  }
  constexpr int kShared = offsetof(TopKShared, gathered);
  const auto kernel = top_k_rows_kernel<kVectors, rows_at_once(kVectors)>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  if (error != cudaSuccess) return error;
  kernel<<<tokens, kTopThreads, kShared, stream>>>(args);
  return cudaGetLastError();
}

// Whether there are so many rows of some vectors that SMs take several, one after the other.
bool many_rows(int chunks, int tokens) {
  const int once = chunks > kTopVectors / 2 ? 1 : 2;  // of a block that holds all of its row
  return chunks > 2 && chunks <= kTopVectors && tokens > once * multiprocessors();
}

// A cluster of full blocks, as few as hold a row.
template <int kBlocks = 2>
cudaError_t launch_cluster(const TopKArgs& args, int chunks, int tokens, cudaStream_t stream) {
  if constexpr (kBlocks < kTopCluster) {
    if (chunks > kTopVectors * kBlocks) return launch_cluster<2 * kBlocks>(args, chunks, tokens, stream);
  }
  return launch_with<kTopVectors, kBlocks>(args, tokens, stream);
}

cudaError_t launch(const TopKArgs& args, int tokens, cudaStream_t stream) {
  if (tokens == 0 || args.k == 0) return cudaSuccess;
  const int chunks = (args.width + kTopChunk - 1) / kTopChunk;
  if (chunks > kTopVectors * kTopCluster) return cudaErrorInvalidValue;
  if (many_rows(chunks, tokens)) return launch_rows(args, chunks, tokens, stream);
  if (chunks <= kTopVectors) return launch_block(args, chunks, tokens, stream);
  // More blocks that are half full, if all rows still run at once.
  constexpr int kHalf = kTopVectors / 2, kMany = kTopCluster, kSome = kMany / 2;
  if (chunks <= kHalf * kMany && run_at_once<kMany>(tokens)) return launch_with<kHalf, kMany>(args, tokens, stream);
  if (chunks <= kHalf * kSome && run_at_once<kSome>(tokens)) return launch_with<kHalf, kSome>(args, tokens, stream);
  return launch_cluster(args, chunks, tokens, stream);
}

using Scores = ffi::Buffer<ffi::F32, 2>;
using Counts = ffi::Buffer<ffi::S32, 1>;
using Indices = ffi::Buffer<ffi::S32, 2>;

ffi::Error top_k(cudaStream_t stream, Scores scores, Counts count, ffi::Result<Indices> indices,
                 ffi::Result<Counts> kept) {
  const int64_t tokens = scores.dimensions()[0], width = scores.dimensions()[1], k = indices->dimensions()[1];
  if (const ffi::Error error = check(
          "top_k",
          {{"scores", scores, {tokens, width}},
           {"count", count, {tokens}, kElements},
           {"indices", *indices, {tokens, k}, kElements},
           {"kept", *kept, {tokens}, kElements}},
          {{k <= width && k <= kTopMax && width <= kTopCluster * kCapacity, "at most 1024 of at most 262144 scores"}});
      error.failure())
    return error;
  const TopKArgs args = {scores.typed_data(), count.typed_data(),      indices->typed_data(),
                         kept->typed_data(),  static_cast<int>(width), static_cast<int>(k)};
  return launched("top_k", launch(args, static_cast<int>(tokens), stream));
}

}  // namespace

DSV4_HANDLER(top_k, dsv4_top_k, top_k, on_stream().Arg<Scores>().Arg<Counts>().Ret<Indices>().Ret<Counts>());

}  // namespace dsv4
