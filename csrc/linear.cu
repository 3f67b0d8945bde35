// linear as an XLA FFI handler and as a plain C call. One launch, no scratch memory, only enqueues: fit for a command
// buffer. Wrapper, argument meaning and fallbacks: dsv4_jax/cuda/linear.py.
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <string>

#include "built_for.h"
#include "linear_kernel.cuh"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

constexpr int kMaxTokens = 256;
constexpr int kMultiprocessors = 132;  // the split is planned for, whatever the device: results must not depend on it

// The most parts of K with which a cluster's rows still make one tile.
int split_of(const dsv4::LinearArgs& args) {
  int split = 1;
  while (split < dsv4::kLinearMaxSplit && args.depth % (2 * split * dsv4::kLinearDepth) == 0 &&
         static_cast<int64_t>(args.rows) * 2 * split <= 304 * kMultiprocessors) {
    split *= 2;
  }
  return split;
}

template <int kBlocks, int kHalves, int kN>
cudaLaunchConfig_t config_of(int clusters, int split, cudaLaunchAttribute* cluster, cudaStream_t stream) {
  cluster->id = cudaLaunchAttributeClusterDimension;
  cluster->val.clusterDim = {static_cast<unsigned>(split), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(clusters) * split);
  config.blockDim = dim3(dsv4::LinearShape<kBlocks, kHalves, kN>::kThreads);
  config.dynamicSmemBytes = dsv4::kLinearShared;
  config.stream = stream;
  config.attrs = cluster;
  config.numAttrs = 1;
  return config;
}

// Clusters of `split` blocks that run at once: depends on how the device's multiprocessors are grouped. Asked once.
cudaError_t clusters_of(int split, int* clusters) {
  static std::atomic<int> known[dsv4::kLinearMaxSplit + 1] = {};
  *clusters = known[split].load();
  if (*clusters > 0) return cudaSuccess;
  const auto kernel = dsv4::linear_kernel<1, 2, 160>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, dsv4::kLinearShared);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute cluster;
  const cudaLaunchConfig_t config = config_of<1, 2, 160>(1, split, &cluster, nullptr);
  error = cudaOccupancyMaxActiveClusters(clusters, kernel, &config);
  if (error != cudaSuccess) return error;
  if (*clusters < 1) return cudaErrorInvalidConfiguration;
  known[split].store(*clusters);
  return cudaSuccess;
}

template <int kBlocks, int kHalves, int kN>
cudaError_t launch_with(dsv4::LinearArgs args, int clusters, cudaStream_t stream) {
  const int stage = (args.tile_rows + kBlocks * 64) * 128;
  const int most = std::min(dsv4::kLinearMaxStages, dsv4::kLinearRing / stage);
  args.stages = args.stages == 0 ? most : std::min(args.stages, most);
  const auto kernel = dsv4::linear_kernel<kBlocks, kHalves, kN>;
  // Set on every launch: the attribute belongs to the current device and costs no device work.
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, dsv4::kLinearShared);
  if (error != cudaSuccess) return error;
  clusters = std::min(clusters, args.groups * args.group_tiles);
  cudaLaunchAttribute cluster;
  const cudaLaunchConfig_t config = config_of<kBlocks, kHalves, kN>(clusters, args.split, &cluster, stream);
  return cudaLaunchKernelEx(&config, kernel, args);
}

// `split`, `tile_rows` (the most) and `stages` are as planned here where they are zero.
cudaError_t launch(dsv4::LinearArgs args, cudaStream_t stream) {
  if (args.tokens == 0) return cudaSuccess;
  if (args.tokens > kMaxTokens) return cudaErrorInvalidValue;
  if (args.split == 0) args.split = split_of(args);
  int clusters;
  const cudaError_t error = clusters_of(args.split, &clusters);
  if (error != cudaSuccess) return error;
  // Tiles of equal size, one for each cluster, or as many more as it takes to make them small enough.
  int most = args.tokens <= 64 ? 320 : args.tokens <= 128 ? 256 : 128;
  if (args.tile_rows > 0) most = std::min(most, args.tile_rows);
  const int group_rows = args.rows / args.groups;
  for (int rounds = 1;; ++rounds) {
    const int tiles = std::max(clusters * rounds / args.groups, 1);
    args.tile_rows = ((group_rows + tiles - 1) / tiles + 7) / 8 * 8;
    if (args.tile_rows <= most) break;
  }
  args.group_tiles = (group_rows + args.tile_rows - 1) / args.tile_rows;
  if (args.tokens > 128) return launch_with<4, 1, 128>(args, clusters, stream);
  if (args.tokens > 64) return launch_with<2, 2, 128>(args, clusters, stream);
  if (args.tile_rows > 128) return launch_with<1, 2, 160>(args, clusters, stream);
  return launch_with<1, 2, 64>(args, clusters, stream);
}

using Matrix = ffi::Buffer<ffi::BF16, 2>;

// Weights [rows, depth] or [groups, rows of a group, depth].
ffi::Error linear(cudaStream_t stream, Matrix x, ffi::AnyBuffer weights, ffi::RemainingRets results) {
  const auto t = x.dimensions(), w = weights.dimensions();
  dsv4::LinearArgs args = {};
  if (weights.element_type() != ffi::BF16 || w.size() < 2 || w.size() > 3) {
    return ffi::Error::InvalidArgument("linear: weights must be a bfloat16 matrix or one for each group");
  }
  const int64_t groups = w.size() == 3 ? w[0] : 1, rows = w[w.size() - 2], depth = w[w.size() - 1];
  if (t[0] > kMaxTokens || t[1] != groups * depth || depth < 1 || depth % dsv4::kLinearDepth != 0 || rows * groups < 1 ||
      rows % 8 != 0 || results.size() > dsv4::kLinearSections) {
    return ffi::Error::InvalidArgument(
        "linear: at most 256 tokens and 8 results, columns a multiple of 64, a group's rows one of 8");
  }
  int64_t end = 0;
  for (size_t i = 0; i < results.size(); ++i) {
    const auto result = results.get<ffi::AnyBuffer>(i);
    if (!result.has_value()) return ffi::Error::InvalidArgument("linear: results must be buffers");
    const auto d = (*result)->dimensions();
    const auto type = (*result)->element_type();
    if (i == 0) args.rounded = type == ffi::BF16;
    if (d.size() != 2 || d[0] != t[0] || d[1] % 8 != 0 || type != (args.rounded ? ffi::BF16 : ffi::F32)) {
      return ffi::Error::InvalidArgument("linear: results must be float32, or all bfloat16, and widths multiples of 8");
    }
    end += d[1];
    args.out[i] = (*result)->untyped_data();
    args.end[i] = static_cast<int>(end);
  }
  if (end != groups * rows) return ffi::Error::InvalidArgument("linear: the results' widths must add up to the rows of the weights");
  args.x = reinterpret_cast<const __nv_bfloat16*>(x.untyped_data());
  args.weights = reinterpret_cast<const __nv_bfloat16*>(weights.untyped_data());
  args.sections = static_cast<int>(results.size());
  args.tokens = static_cast<int>(t[0]);
  args.rows = static_cast<int>(groups * rows);
  args.depth = static_cast<int>(depth);
  args.groups = static_cast<int>(groups);
  args.stream = 1;
  const cudaError_t error = launch(args, stream);
  if (error != cudaSuccess) return ffi::Error::Internal(std::string("linear: ") + cudaGetErrorString(error));
  return ffi::Error::Success();
}

}  // namespace

DSV4_BUILT_FOR(linear);

XLA_FFI_DEFINE_HANDLER_SYMBOL(Dsv4Linear, linear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<Matrix>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingRets(),
                              {ffi::Traits::kCmdBufferCompatible});

// The launch alone, for timing without XLA, with the plan's numbers or zeros. Returns a cudaError_t.
extern "C" int dsv4_linear_launch(const dsv4::LinearArgs* args, cudaStream_t stream) {
  return static_cast<int>(launch(*args, stream));
}

// Clusters of `split` blocks that run at once, or the negative cudaError_t.
extern "C" int dsv4_linear_clusters(int split) {
  int clusters = 0;
  const cudaError_t error = clusters_of(split, &clusters);
  return error == cudaSuccess ? clusters : -static_cast<int>(error);
}
