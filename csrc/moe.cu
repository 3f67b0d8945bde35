// The experts' products as a plain C call: four launches, each only enqueued: fit for a graph.
#include <cuda_runtime.h>

#include "moe_kernel.cuh"

namespace {

template <typename Kernel, typename... Args>
cudaError_t start(Kernel kernel, dim3 grid, int threads, int shared, bool early, cudaStream_t stream, const Args&... args) {
  if (shared > 48 * 1024) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    if (error != cudaSuccess) return error;
  }
  cudaLaunchAttribute overlap;
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = early;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

int multiprocessors() {
  static const int count = [] {
    int device = 0, n = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, device);
    return n;
  }();
  return count;
}

template <typename Shape>
cudaError_t launch_with(const dsv4::MoeArgs& args, cudaStream_t stream) {
  const int pairs = args.tokens * args.top, per_block = dsv4::kListThreads / 32, sms = multiprocessors();
  if (2 * args.inter % (64 * Shape::kGroups) != 0 || args.hidden % (64 * Shape::kGroups) != 0) return cudaErrorInvalidValue;
  // Few rows are copied by several warps each.
  const bool few = pairs <= dsv4::kFewPairs;
  const int list_blocks = min(2 * sms, (pairs * (few ? 4 : 1) + per_block - 1) / per_block);
  cudaError_t error = start(few ? dsv4::moe_lists_kernel<4> : dsv4::moe_lists_kernel<1>, dim3(list_blocks), dsv4::kListThreads,
                            dsv4::list_bytes(pairs), false, stream, args, Shape::kRows);
  if (error != cudaSuccess) return error;
  const auto product = [&](auto kernel, int row_tiles) {
    const int blocks = min(static_cast<int64_t>(sms) * Shape::kBlocks, static_cast<int64_t>(pairs) * row_tiles);
    return start(kernel, dim3(blocks), Shape::kThreads, Shape::kSharedBytes, true, stream, args);
  };
  error = product(dsv4::moe_kernel<Shape, true>, 2 * args.inter / 64 / Shape::kGroups);
  if (error != cudaSuccess) return error;
  error = product(dsv4::moe_kernel<Shape, false>, args.hidden / 64 / Shape::kGroups);
  if (error != cudaSuccess) return error;
  const dim3 grid((args.hidden / 4 + dsv4::kSumThreads - 1) / dsv4::kSumThreads, args.tokens);
  return start(dsv4::moe_sum_kernel, grid, dsv4::kSumThreads, 0, true, stream, args);
}

}  // namespace

// Bytes of the workspace of a call; its pointers are not looked at.
extern "C" int64_t dsv4_moe_workspace(const dsv4::MoeArgs* args) {
  size_t bytes = 0;
  dsv4::moe_work(*args, &bytes);
  return static_cast<int64_t>(bytes);
}

// Only enqueues. `shape` 0 lets the number of tokens choose, others are for timing; the result is the same, bit for bit.
extern "C" int dsv4_moe_launch(const dsv4::MoeArgs* args, int shape, cudaStream_t stream) {
  const int64_t pairs = static_cast<int64_t>(args->tokens) * args->top;
  if (args->tokens == 0 || args->top == 0) return cudaSuccess;
  if (args->experts > dsv4::kMaxExperts || args->top > dsv4::kMostTop || args->hidden % 256 != 0 || args->inter % 256 != 0 ||
      pairs > 98304) {
    return cudaErrorInvalidValue;
  }
  if (shape == 0) {
    // By the rows that an expert has on average.
    const int64_t rows = pairs / args->experts;
    shape = pairs <= 12 ? 7 : rows <= 3 ? 1 : rows <= 10 ? 13 : rows <= 28 ? 17 : 20;
  }
  if (shape == 1) return launch_with<dsv4::MoeShape<2, 8, 2, 3, 3>>(*args, stream);
  if (shape == 2) return launch_with<dsv4::MoeShape<2, 8, 2, 5, 2>>(*args, stream);
  if (shape == 3) return launch_with<dsv4::MoeShape<2, 8, 2, 2, 4>>(*args, stream);
  if (shape == 4) return launch_with<dsv4::MoeShape<2, 8, 1, 4, 4>>(*args, stream);
  if (shape == 5) return launch_with<dsv4::MoeShape<4, 8, 1, 5, 2>>(*args, stream);
  if (shape == 6) return launch_with<dsv4::MoeShape<4, 8, 2, 2, 2>>(*args, stream);
  if (shape == 7) return launch_with<dsv4::MoeShape<1, 8, 2, 5, 3>>(*args, stream);
  if (shape == 8) return launch_with<dsv4::MoeShape<1, 8, 2, 4, 4>>(*args, stream);
  if (shape == 9) return launch_with<dsv4::MoeShape<1, 8, 2, 3, 5>>(*args, stream);
  if (shape == 10) return launch_with<dsv4::MoeShape<1, 8, 1, 3, 8>>(*args, stream);
  if (shape == 11) return launch_with<dsv4::MoeShape<4, 8, 2, 5, 1>>(*args, stream);
  if (shape == 12) return launch_with<dsv4::MoeShape<2, 16, 1, 5, 3>>(*args, stream);
  if (shape == 13) return launch_with<dsv4::MoeShape<2, 16, 1, 4, 4>>(*args, stream);
  if (shape == 14) return launch_with<dsv4::MoeShape<4, 16, 1, 5, 2>>(*args, stream);
  if (shape == 15) return launch_with<dsv4::MoeShape<4, 16, 2, 2, 2>>(*args, stream);
  if (shape == 16) return launch_with<dsv4::MoeShape<4, 16, 2, 5, 1>>(*args, stream);
  if (shape == 17) return launch_with<dsv4::MoeShape<2, 32, 1, 4, 3>>(*args, stream);
  if (shape == 18) return launch_with<dsv4::MoeShape<4, 32, 2, 4, 1>>(*args, stream);
  if (shape == 19) return launch_with<dsv4::MoeShape<4, 32, 1, 8, 1>>(*args, stream);
  if (shape == 20) return launch_with<dsv4::MoeShape<4, 64, 2, 3, 1>>(*args, stream);
  if (shape == 21) return launch_with<dsv4::MoeShape<2, 32, 1, 3, 4>>(*args, stream);
  if (shape == 22) return launch_with<dsv4::MoeShape<4, 24, 1, 5, 2>>(*args, stream);
  return cudaErrorInvalidValue;
}
