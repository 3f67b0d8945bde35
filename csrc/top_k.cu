// top_k as an XLA FFI handler and as a plain C call. One launch, only enqueues: fit for a command buffer.
// Wrapper, argument meaning and fallbacks: dsv4_jax/cuda/top_k.py.
#include <cuda_runtime.h>

#include <cstddef>
#include <string>

#include "built_for.h"
#include "device.h"
#include "top_k_kernel.cuh"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

template <int kVectors, int kBlocks>
cudaError_t launch_with(const dsv4::TopKArgs& args, int tokens, cudaStream_t stream) {
  const int shared = kBlocks == 1 ? offsetof(dsv4::TopKShared, gathered) : sizeof(dsv4::TopKShared);
  cudaError_t error = cudaFuncSetAttribute(dsv4::top_k_kernel<kVectors, kBlocks>,
                                           cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {kBlocks, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(tokens) * kBlocks);
  config.blockDim = dim3(dsv4::kTopThreads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = kBlocks > 1;
  return cudaLaunchKernelEx(&config, dsv4::top_k_kernel<kVectors, kBlocks>, args);
}

// Scores one block can hold in registers.
constexpr int kCapacity = dsv4::kTopVectors * dsv4::kTopChunk;

// Whether `tokens` clusters of kBlocks blocks run at once, one block an SM: a cluster lies within one of the device's groups of 16
// to 18 SMs, so that clusters of 8 reach two thirds of the SMs, clusters of 4 six sevenths.
template <int kBlocks>
bool run_at_once(int tokens) {
  static_assert(kBlocks == 4 || kBlocks == 8, "of which the share is known");
  const int sms = dsv4::multiprocessors(), reached = kBlocks == 8 ? sms * 2 / 3 : sms * 6 / 7;
  return int64_t{tokens} * kBlocks <= reached;
}

cudaError_t launch(const dsv4::TopKArgs& args, int tokens, cudaStream_t stream) {
  if (tokens == 0 || args.k == 0) return cudaSuccess;
  const int chunks = (args.width + dsv4::kTopChunk - 1) / dsv4::kTopChunk;
  // One block where it holds a row: blocks of a cluster wait for one another longer than they gain.
  if (chunks <= 1) return launch_with<1, 1>(args, tokens, stream);
  if (chunks <= 2) return launch_with<2, 1>(args, tokens, stream);
  if (chunks <= 4) return launch_with<4, 1>(args, tokens, stream);
  if (chunks <= 8) return launch_with<8, 1>(args, tokens, stream);
  if (chunks <= 16) return launch_with<16, 1>(args, tokens, stream);
  // Else the most of 2, 4 and 8 with which all rows still run at once, and as many as hold a row.
  if (chunks <= 8 * 8 && run_at_once<8>(tokens)) return launch_with<8, 8>(args, tokens, stream);
  if (chunks <= 8 * 4 && run_at_once<4>(tokens)) return launch_with<8, 4>(args, tokens, stream);
  if (chunks <= 16 * 2) return launch_with<16, 2>(args, tokens, stream);
  if (chunks <= 16 * 4) return launch_with<16, 4>(args, tokens, stream);
  if (chunks <= 16 * 8) return launch_with<16, 8>(args, tokens, stream);
  return cudaErrorInvalidValue;
}

using Scores = ffi::Buffer<ffi::F32, 2>;
using Counts = ffi::Buffer<ffi::S32, 1>;
using Indices = ffi::Buffer<ffi::S32, 2>;

ffi::Error top_k(cudaStream_t stream, Scores scores, Counts count, ffi::Result<Indices> indices,
                 ffi::Result<Counts> kept) {
  const int64_t tokens = scores.dimensions()[0], width = scores.dimensions()[1], k = indices->dimensions()[1];
  if (k > width || k > dsv4::kTopMax || width > dsv4::kTopCluster * kCapacity || count.dimensions()[0] != tokens ||
      indices->dimensions()[0] != tokens || kept->dimensions()[0] != tokens) {
    return ffi::Error::InvalidArgument("top_k: at most 1024 of at most 262144 scores; shapes must agree");
  }
  const dsv4::TopKArgs args = {scores.typed_data(), count.typed_data(),      indices->typed_data(),
                               kept->typed_data(),  static_cast<int>(width), static_cast<int>(k)};
  const cudaError_t error = launch(args, static_cast<int>(tokens), stream);
  if (error != cudaSuccess) return ffi::Error::Internal(std::string("top_k: ") + cudaGetErrorString(error));
  return ffi::Error::Success();
}

}  // namespace

DSV4_BUILT_FOR(top_k);
DSV4_ARGS_SIZE(top_k, dsv4::TopKArgs)

XLA_FFI_DEFINE_HANDLER_SYMBOL(Dsv4TopK, top_k,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<Scores>()
                                  .Arg<Counts>()
                                  .Ret<Indices>()
                                  .Ret<Counts>(),
                              {ffi::Traits::kCmdBufferCompatible});

// The launch alone, for timing without XLA. Returns a cudaError_t.
extern "C" int dsv4_top_k_launch(const dsv4::TopKArgs* args, int tokens, cudaStream_t stream) {
  return static_cast<int>(launch(*args, tokens, stream));
}
