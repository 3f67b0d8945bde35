// index_scores as an XLA FFI handler and as a plain C call. One launch, only enqueues: fit for a command buffer.
// Wrapper, argument meaning and fallbacks: dsv4_jax/cuda/index_scores.py.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "common/alignment.h"
#include "common/built_for.h"
#include "common/device.h"
#include "index/scores_kernel.cuh"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

constexpr int kMostTokens = 65535;  // the second dimension of a grid
constexpr int kManyTokens = 512;    // from which on neighbours are asked whether they share their keys
constexpr int kSharing = 8;         // tokens of a block then
constexpr int kStartTiles = 8;      // what a block does before its first tile, in tiles
constexpr int kLongestRun = 256;    // tiles: not so long that tokens of very different counts leave SMs idle
constexpr int kWideRun = 64;        // tiles of a narrow block, from which on wide ones are better for fp4 keys

// Tiles of a run: as few waves of blocks as possible, each of them full, and runs long enough for what each costs.
template <typename Shape>
int run_tiles(int64_t sets, int tiles) {
  const int64_t at_once = static_cast<int64_t>(dsv4::multiprocessors()) * Shape::kBlocks;
  const int64_t fewest = (tiles + kLongestRun - 1) / kLongestRun;
  const int64_t most = std::min<int64_t>(std::max(4 * at_once / sets, fewest), tiles);
  int best = tiles;
  int64_t least = INT64_MAX;
  for (int64_t runs = fewest; runs <= most; ++runs) {
    const int length = std::max(static_cast<int>((tiles + runs - 1) / runs), Shape::kGroups);
    const int64_t waves = (sets * ((tiles + length - 1) / length) + at_once - 1) / at_once;
    const int64_t steps = (length + Shape::kGroups - 1) / Shape::kGroups * Shape::kGroups + kStartTiles;
    if (waves * steps < least) least = waves * steps, best = length;
  }
  return best;
}

template <typename Key, int kTokens, typename Shape>
cudaError_t launch_with(dsv4::ScoreArgs args, int tiles, cudaStream_t stream) {
  constexpr int kShared = sizeof(dsv4::ScoreShared<Key, kTokens, Shape>), kOwn = 1024;  // the system's, a block
  static_assert((kShared + kOwn) * Shape::kBlocks <= dsv4::kSharedLimit + kOwn);
  const auto kernel = dsv4::index_scores_kernel<Key, kTokens, Shape>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  if (error != cudaSuccess) return error;
  const int sets = (args.tokens + kTokens - 1) / kTokens;
  if (args.run_tiles == 0) args.run_tiles = run_tiles<Shape>(sets, tiles);
  const dim3 grid((tiles + args.run_tiles - 1) / args.run_tiles, sets);
  kernel<<<grid, Shape::kAllThreads, kShared, stream>>>(args);
  return cudaGetLastError();
}

template <typename Key>
cudaError_t launch_keys(const dsv4::ScoreArgs& args, int tiles, cudaStream_t stream) {
  using dsv4::NarrowShape, dsv4::WideShape;
  if (args.tokens >= kManyTokens) return launch_with<Key, kSharing, WideShape>(args, tiles, stream);
  if constexpr (Key::kTable) {  // fp8 keys wait for memory in either
    const int64_t narrow = static_cast<int64_t>(dsv4::multiprocessors()) * NarrowShape::kBlocks;
    if (int64_t{args.tokens} * tiles >= narrow * kWideRun) return launch_with<Key, 1, WideShape>(args, tiles, stream);
  }
  return launch_with<Key, 1, NarrowShape>(args, tiles, stream);
}

cudaError_t launch(dsv4::ScoreArgs args, int fp8, cudaStream_t stream) {
  const int64_t total = static_cast<int64_t>(args.columns) * args.rows_per_block;
  if (args.tokens == 0 || total == 0) return cudaSuccess;
  const int tiles = static_cast<int>((total + dsv4::kScoreTile - 1) / dsv4::kScoreTile);
  return fp8 ? launch_keys<dsv4::Fp8Key>(args, tiles, stream) : launch_keys<dsv4::Fp4Key>(args, tiles, stream);
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
  if (base % dsv4::kScaleAlignment != 0) {
    return ffi::Error::InvalidArgument("index_scores: the base must be a multiple of 4");
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
  if (total > INT32_MAX / 2) {
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
  if (const std::string problem = dsv4::misaligned(
          "index_scores",
          {{"codes", args.codes}, {"scale", args.scale}, {"queries", args.queries}, {"scores", args.scores}});
      !problem.empty())
    return ffi::Error::InvalidArgument(problem);
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
