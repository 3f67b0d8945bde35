// index_scores as an XLA FFI handler. One launch, only enqueues: fit for a command buffer.
// Wrapper, argument meaning and fallbacks: dsv4_jax/cuda/index_scores.py.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include "common/device.h"
#include "common/handler.h"
#include "index/scores_kernel.cuh"

namespace dsv4 {
namespace {

namespace ffi = xla::ffi;

constexpr int kMaxTokens = 65535;  // the second dimension of a grid
constexpr int kManyTokens = 512;   // from which on neighbours are asked whether they share their keys
constexpr int kSharing = 8;        // tokens of a block then
constexpr int kStartTiles = 8;     // what a block does before its first tile, in tiles
constexpr int kLongestRun = 256;   // tiles: not so long that tokens of very different counts leave SMs idle
constexpr int kWideRun = 64;       // tiles of a narrow block, from which on wide ones are better for fp4 keys

// Tiles of a run: as few waves of blocks as possible, each of them full, and runs long enough for what each costs.
template <typename Shape>
int run_tiles(int64_t sets, int tiles) {
  const int64_t at_once = static_cast<int64_t>(multiprocessors()) * Shape::kBlocks;
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
cudaError_t launch_with(ScoreArgs args, int tiles, cudaStream_t stream) {
  constexpr int kShared = sizeof(ScoreShared<Key, kTokens, Shape>), kOwn = 1024;  // the system's, a block
  static_assert((kShared + kOwn) * Shape::kBlocks <= kSharedLimit + kOwn);
  const auto kernel = index_scores_kernel<Key, kTokens, Shape>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  if (error != cudaSuccess) return error;
  const int sets = (args.tokens + kTokens - 1) / kTokens;
  args.run_tiles = run_tiles<Shape>(sets, tiles);
  const dim3 grid((tiles + args.run_tiles - 1) / args.run_tiles, sets);
  kernel<<<grid, Shape::kAllThreads, kShared, stream>>>(args);
  return cudaGetLastError();
}

template <typename Key>
cudaError_t launch_keys(const ScoreArgs& args, int tiles, cudaStream_t stream) {
  if (args.tokens >= kManyTokens) return launch_with<Key, kSharing, WideShape>(args, tiles, stream);
  if constexpr (Key::kTable) {  // fp8 keys wait for memory in either
    const int64_t narrow = static_cast<int64_t>(multiprocessors()) * NarrowShape::kBlocks;
    if (int64_t{args.tokens} * tiles >= narrow * kWideRun) return launch_with<Key, 1, WideShape>(args, tiles, stream);
  }
  return launch_with<Key, 1, NarrowShape>(args, tiles, stream);
}

cudaError_t launch(const ScoreArgs& args, bool fp8, cudaStream_t stream) {
  const int64_t total = static_cast<int64_t>(args.columns) * args.rows_per_block;
  if (args.tokens == 0 || total == 0) return cudaSuccess;
  const int tiles = static_cast<int>((total + kScoreTile - 1) / kScoreTile);
  return fp8 ? launch_keys<Fp8Key>(args, tiles, stream) : launch_keys<Fp4Key>(args, tiles, stream);
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
  const int64_t tokens = queries.dimensions()[0], heads = queries.dimensions()[1];
  const int64_t rows = codes.dimensions()[0], columns = table.dimensions()[1], total = columns * rows_per_block;
  const bool fp8 = codes.dimensions()[1] == kIndexDim;
  const Operand of_scale = fp8 ? Operand("scale", scale, {rows, 1}, kVectors, {ffi::F32})
                               : Operand("scale", scale, {rows, kFp4Scales}, kVectors, {ffi::U8});
  if (const ffi::Error error =
          check("index_scores",
                {{"codes", codes, {rows, fp8 ? kIndexDim : kFp4Bytes}},
                 of_scale,
                 {"queries", queries, {tokens, heads, kIndexDim}},
                 {"weights", weights, {tokens, kAny}, kElements},
                 {"table", table, {tokens, columns}, kElements},
                 {"count", count, {tokens}, kElements},
                 {"scores", *scores, {tokens, total}}},
                {{heads <= kScoreHeads && tokens <= kMaxTokens, "queries must be of at most 64 heads and 65535 tokens"},
                 {first_weight >= 0 && first_weight + heads <= weights.dimensions()[1],
                  "weights has not as many columns as heads"},
                 {rows_per_block >= 1 && rows_per_block % kGroupKeys == 0, "rows per block must be a multiple of 16"},
                 {base % kScaleAlignment == 0, "the base must be a multiple of 4"},
                 {base >= 0 && rows - base >= rows_per_block, "less than a block of keys from the base on"},
                 {rows <= INT32_MAX && total <= INT32_MAX / 2, "2^31 rows, or scores of a token"}});
      error.failure())
    return error;
  ScoreArgs args = {};
  args.codes = codes.typed_data();
  args.scale = scale.untyped_data();
  args.queries = reinterpret_cast<const __nv_bfloat16*>(queries.untyped_data());
  args.weights = weights.typed_data() + first_weight;
  args.weight_stride = static_cast<int>(weights.dimensions()[1]);
  args.weight_scale = weight_scale;
  args.table = table.typed_data();
  args.count = count.typed_data();
  args.scores = scores->typed_data();
  args.tokens = static_cast<int>(tokens);
  args.heads = static_cast<int>(heads);
  args.columns = static_cast<int>(columns);
  args.base = base;
  args.rows_per_block = rows_per_block;
  args.blocks = static_cast<int>((rows - base) / rows_per_block);
  return launched("index_scores", launch(args, fp8, stream));
}

}  // namespace

DSV4_HANDLER(index_scores, dsv4_index_scores, index_scores,
             on_stream()
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
                 .Attr<float>("weight_scale"));

}  // namespace dsv4
