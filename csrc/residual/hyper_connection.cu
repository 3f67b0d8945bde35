// Hyper-connections as XLA FFI handlers: one makes what the next block reads, the other how its
// output goes into the streams, which may be made beside that block. One launch each, only enqueued: fit for a command
// buffer. Wrapper and argument meaning: dsv4_jax/cuda/hyper_connection.py.
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>

#include "common/operands.h"
#include "residual/hyper_connection_kernel.cuh"

namespace dsv4 {
namespace {

namespace ffi = xla::ffi;

// Widths of V4-Flash and V4-Pro.
constexpr int kFlashWidth = 4096, kProWidth = 7168;
constexpr int warps_of(int width) { return width / (kHyperParts * kHyperSpan); }

// What every launch sets: it belongs to the current device.
template <typename Kernel>
cudaError_t allow_clusters(Kernel kernel, int shared) {
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (error != cudaSuccess) return error;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  if (error != cudaSuccess) return error;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
}

// Clusters that there is room for at a time, of which no result depends. Asked of one device.
template <int kWarps, typename Stream>
cudaError_t most_clusters(int* count) {
  static std::atomic<int> known;
  *count = known.load(std::memory_order_relaxed);
  if (*count > 0) return cudaSuccess;
  constexpr int kShared = kWarps * kHyperWarpBytes;
  const auto kernel = hyper_connection_kernel<kWarps, Stream, true>;
  if (const cudaError_t error = allow_clusters(kernel, kShared); error != cudaSuccess) return error;
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {kHyperParts, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(kHyperParts);
  config.blockDim = dim3((kWarps + 1) * kLanes);
  config.dynamicSmemBytes = kShared;
  config.attrs = &cluster;
  config.numAttrs = 1;
  const cudaError_t error = cudaOccupancyMaxActiveClusters(count, kernel, &config);
  if (error != cudaSuccess) return error;
  *count = std::max(*count, 1);
  known.store(*count, std::memory_order_relaxed);
  return error;
}

template <int kWarps, typename Stream>
cudaError_t launch_with(const HyperArgs& args, cudaStream_t stream) {
  constexpr int kShared = kWarps * kHyperWarpBytes;
  const int groups = (args.tokens + kHyperTokens - 1) / kHyperTokens;
  int most = 0;
  cudaError_t error = most_clusters<kWarps, Stream>(&most);
  if (error != cudaSuccess) return error;
  const auto kernel =
      groups > most ? hyper_connection_kernel<kWarps, Stream, true> : hyper_connection_kernel<kWarps, Stream, false>;
  error = allow_clusters(kernel, kShared);
  if (error != cudaSuccess) return error;
  const dim3 grid(kHyperParts, std::min(groups, most));
  return start(kernel, {grid, (kWarps + 1) * kLanes, kShared, kHyperParts}, follows, stream, args, follows);
}

template <typename Stream>
cudaError_t launch(const HyperArgs& args, cudaStream_t stream) {
  if (args.tokens == 0) return cudaSuccess;
  if (args.width == kFlashWidth) return launch_with<warps_of(kFlashWidth), Stream>(args, stream);
  if (args.width == kProWidth) return launch_with<warps_of(kProWidth), Stream>(args, stream);
  return cudaErrorInvalidValue;
}

// Operands: streams, fn, the vector of norm, base and scale; post, comb and `outputs` outputs if there are any.
// Results: x; but of the head, what the other handler takes, and streams if there are outputs. `bf16_streams`: streams
// and outputs are bfloat16; `bf16`: x is.
ffi::Error hyper_connection(cudaStream_t stream, ffi::RemainingArgs arguments, ffi::RemainingRets returned,
                            int32_t outputs, float hc_eps, float eps, bool head, bool bf16, bool bf16_streams) {
  Operands operands(arguments);
  HyperArgs args = {};
  const ffi::DataType type = bf16_streams ? ffi::BF16 : ffi::F32;
  args.streams = operands.next(type);
  const int64_t tokens = operands.rows(), all = operands.width(), width = all / kStreams;
  const int64_t rows = head ? kStreams : kHyperRows, entries = kStreams * kStreams;
  args.fn = operands.next<float>(ffi::F32, all, rows);
  args.norm = operands.next<float>(ffi::F32);
  if (operands.width() < width + rows + (head ? 1 : 3)) operands.refuse("the vector is too short");
  args.base = args.norm + width;
  args.scale = args.base + rows;
  if (outputs < 0 || outputs > kHyperOutputs) operands.refuse("there must be no, one or two outputs");
  if (width * kStreams != all || (width != kFlashWidth && width != kProWidth))
    operands.refuse("streams must be four of 4096 or 7168 channels");
  if (tokens > kHyperMaxTokens) operands.refuse("more than 131072 tokens");
  if (outputs > 0) {
    args.old_post = operands.next<float>(ffi::F32, kStreams, tokens);
    args.old_comb = operands.next<float>(ffi::F32, entries, tokens);
    for (int i = 0; i < outputs && i < kHyperOutputs; ++i) args.outputs[i] = operands.next(type, width, tokens);
  }
  if (!operands.good()) return refusal("hyper_connection", operands.problem());
  Results results(returned);
  const int64_t filled = (tokens + kHyperTokens - 1) / kHyperTokens * kHyperTokens;
  args.x = results.next(bf16 ? ffi::BF16 : ffi::F32, width, tokens, filled);
  args.x_rows = static_cast<int>(results.rows());
  if (!head) {
    args.back = results.next<float>(ffi::F32, kHyperBack, tokens);
    if (outputs > 0) args.new_streams = results.next(type, all, tokens, tokens);
  }
  if (!results.good()) return refusal("hyper_connection", results.problem());
  args.tokens = static_cast<int>(tokens);
  args.width = static_cast<int>(width);
  args.rows = static_cast<int>(rows);
  args.hc_eps = hc_eps;
  args.eps = eps;
  args.bf16_out = bf16;
  return launched("hyper_connection", bf16_streams ? launch<__nv_bfloat16>(args, stream) : launch<float>(args, stream));
}

using Matrix = ffi::Buffer<ffi::F32, 2>;

ffi::Error hyper_mixing(cudaStream_t stream, Matrix back, ffi::Result<Matrix> post, ffi::Result<Matrix> comb,
                        int32_t iterations, float eps) {
  const int64_t tokens = back.dimensions()[0];
  if (const ffi::Error error = check("hyper_mixing",
                                     {{"back", back, {tokens, kHyperBack}, kElements},
                                      {"post", *post, {tokens, kStreams}, kElements},
                                      {"comb", *comb, {tokens, kStreams * kStreams}, kElements}},
                                     {{tokens <= kHyperMaxTokens, "more than 131072 tokens"}});
      error.failure())
    return error;
  if (tokens == 0) return ffi::Error::Success();
  const HyperMixingArgs args = {back.typed_data(),        post->typed_data(), comb->typed_data(),
                                static_cast<int>(tokens), iterations,         eps};
  const int blocks = (args.tokens + kMixingTokens - 1) / kMixingTokens;
  return launched("hyper_mixing", start(hyper_mixing_kernel, {dim3(blocks), kMixingThreads}, false, stream, args));
}

}  // namespace

DSV4_HANDLER(hyper_connection, dsv4_hyper_connection, hyper_connection,
             on_stream()
                 .RemainingArgs()
                 .RemainingRets()
                 .Attr<int32_t>("outputs")
                 .Attr<float>("hc_eps")
                 .Attr<float>("eps")
                 .Attr<bool>("head")
                 .Attr<bool>("bf16")
                 .Attr<bool>("bf16_streams"));

DSV4_HANDLER(hyper_connection, dsv4_hyper_mixing, hyper_mixing,
             on_stream().Arg<Matrix>().Ret<Matrix>().Ret<Matrix>().Attr<int32_t>("iterations").Attr<float>("eps"));

}  // namespace dsv4
