// index_scores as an XLA FFI handler and as a plain C call. One launch, only enqueues: fit for a command buffer.
// Wrapper, argument meaning and fallbacks: dsv4_jax/cuda/index_scores.py.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "built_for.h"
#include "device.h"
#include "index_scores_kernel.cuh"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

constexpr int kShortestRun = 4, kLongestRun = 64;  // tiles, where the launch chooses
constexpr int kMostTokens = 65535;                 // the second dimension of a grid

cudaError_t launch(dsv4::ScoreArgs args, int fp8, cudaStream_t stream) {
  const int64_t total = static_cast<int64_t>(args.columns) * args.rows_per_block;
  if (args.tokens == 0 || total == 0) return cudaSuccess;
  const int tiles = static_cast<int>((total + dsv4::kScoreTile - 1) / dsv4::kScoreTile);
  if (args.run_tiles == 0) {
    // As many blocks as run at a time, so that their preparation is spread over long runs; not so long, though, that
    // tokens of very different counts leave SMs idle.
    const int runs = std::max(dsv4::multiprocessors() * dsv4::kScoreBlocks / args.tokens, 1);
    args.run_tiles = std::min(std::max((tiles + runs - 1) / runs, kShortestRun), kLongestRun);
  }
  args.run_tiles = std::min(args.run_tiles, dsv4::kMaxRunTiles);
  const dim3 grid((tiles + args.run_tiles - 1) / args.run_tiles, args.tokens);
  const auto kernel = fp8 ? dsv4::index_scores_kernel<dsv4::Fp8Key> : dsv4::index_scores_kernel<dsv4::Fp4Key>;
  kernel<<<grid, dsv4::kScoreThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

using Codes = ffi::Buffer<ffi::U8, 2>;
using Queries = ffi::Buffer<ffi::BF16, 3>;
using Weights = ffi::Buffer<ffi::F32, 2>;
using Table = ffi::Buffer<ffi::S32, 2>;
using Counts = ffi::Buffer<ffi::S32, 1>;
using Scores = ffi::Buffer<ffi::F32, 2>;

ffi::Error index_scores(cudaStream_t stream, Codes codes, ffi::AnyBuffer scale, Queries queries, Weights weights,
                        Table table, Counts count, ffi::Result<Scores> scores, int32_t base, int32_t rows_per_block,
                        int32_t first_weight, float weight_scale) {
  const auto q = queries.dimensions();
  const int64_t rows = codes.dimensions()[0], width = codes.dimensions()[1];
  const bool fp8 = width == dsv4::kIndexDim;
  const auto s = scale.dimensions();
  if (q[2] != dsv4::kIndexDim || q[1] > dsv4::kScoreHeads || (width != dsv4::kFp4Bytes && !fp8) || s.size() != 2 ||
      s[0] != rows || s[1] != (fp8 ? 1 : dsv4::kFp4Scales) || scale.element_type() != (fp8 ? ffi::F32 : ffi::U8)) {
    return ffi::Error::InvalidArgument(
        "index_scores: keys must be fp4 or fp8 rows of 128 dims, queries at most 64 heads");
  }
  if (rows_per_block < 1 || rows_per_block % dsv4::kGroupKeys != 0) {
    return ffi::Error::InvalidArgument("index_scores: rows per block must be a multiple of 16");
  }
  if (base < 0 || rows - base < rows_per_block || rows > INT32_MAX) {
    return ffi::Error::InvalidArgument(
        "index_scores: less than a block of keys from the base on, or 2^31 rows or more");
  }
  const auto w = weights.dimensions();
  const int64_t total = table.dimensions()[1] * rows_per_block;
  if (w[0] != q[0] || first_weight < 0 || first_weight + q[1] > w[1] || table.dimensions()[0] != q[0] ||
      count.dimensions()[0] != q[0] || scores->dimensions()[0] != q[0] || scores->dimensions()[1] != total ||
      q[0] > kMostTokens) {
    return ffi::Error::InvalidArgument("index_scores: shapes of queries, weights, table, counts and scores disagree");
  }
  if (total > INT32_MAX - dsv4::kMaxRunTiles * dsv4::kScoreTile) {
    return ffi::Error::InvalidArgument("index_scores: 2^31 scores of a token");
  }
  dsv4::ScoreArgs args = {};
  args.codes = codes.typed_data();
  args.scale = scale.untyped_data();
  args.queries = reinterpret_cast<const __nv_bfloat16*>(queries.untyped_data());
  args.weights = weights.typed_data() + first_weight;
  args.weight_stride = static_cast<int>(w[1]);
  args.weight_scale = weight_scale;
  args.table = table.typed_data();
  args.count = count.typed_data();
  args.scores = scores->typed_data();
  args.tokens = static_cast<int>(q[0]);
  args.heads = static_cast<int>(q[1]);
  args.columns = static_cast<int>(table.dimensions()[1]);
  args.base = base;
  args.rows_per_block = rows_per_block;
  args.blocks = static_cast<int>((rows - base) / rows_per_block);
  const cudaError_t error = launch(args, fp8, stream);
  if (error != cudaSuccess) return ffi::Error::Internal(std::string("index_scores: ") + cudaGetErrorString(error));
  return ffi::Error::Success();
}

}  // namespace

DSV4_BUILT_FOR(index_scores);
DSV4_ARGS_SIZE(index_scores, dsv4::ScoreArgs)

XLA_FFI_DEFINE_HANDLER_SYMBOL(Dsv4IndexScores, index_scores,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<Codes>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Queries>()
                                  .Arg<Weights>()
                                  .Arg<Table>()
                                  .Arg<Counts>()
                                  .Ret<Scores>()
                                  .Attr<int32_t>("base")
                                  .Attr<int32_t>("rows_per_block")
                                  .Attr<int32_t>("first_weight")
                                  .Attr<float>("weight_scale"),
                              {ffi::Traits::kCmdBufferCompatible});

// The launch alone, for timing without XLA. Returns a cudaError_t.
extern "C" int dsv4_index_scores_launch(const dsv4::ScoreArgs* args, int fp8, cudaStream_t stream) {
  return static_cast<int>(launch(*args, fp8, stream));
}
