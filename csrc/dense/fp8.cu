// Dense FP8 products as an XLA FFI handler. One launch, only enqueued: fit for a command buffer.
// Wrapper and argument meaning: dsv4_jax/cuda/dense_fp8.py.
#include <cuda_runtime.h>

#include "common/device.h"
#include "dense/fp8_many.cuh"
#include "dense/launch.cuh"

namespace dsv4 {
namespace {

namespace ffi = xla::ffi;

// Tiles of 128 of the weights' rows by 128 rows of x.
int64_t many_tiles(const DenseFp8Args& args) {
  constexpr int kTile = 128;
  return static_cast<int64_t>(args.weight_rows / kTile) * ((args.rows + kTile - 1) / kTile);
}

template <typename Shape>
cudaError_t launch_many(const DenseFp8Args& args, int parts, cudaStream_t stream) {
  if (parts != Shape::kInTurn * Shape::kParts || args.weight_rows / args.groups % Shape::kTileRows != 0 ||
      args.columns % (parts * Shape::kColumns) != 0)
    return cudaErrorInvalidValue;
  CUtensorMap map;
  const cudaError_t error =
      map_matrix(args.x, args.rows, static_cast<size_t>(args.groups) * args.columns, Shape::kRows, Shape::kBoxes, &map);
  if (error != cudaSuccess) return error;
  const dim3 grid(Shape::kParts, (args.rows + Shape::kRows - 1) / Shape::kRows, args.weight_rows / Shape::kTileRows);
  return start(dense_fp8_many_kernel<Shape>, {grid, Shape::kThreads, Shape::kSharedBytes, Shape::kParts}, follows,
               stream, args, map);
}

// Tiles of weights, parts of K, rows of x; columns of a stage, stages, those under way, blocks an SM. Five kinds for
// each number of rows, then one for many.
template <int... kNumbers>
using Shape = DenseShape<kNumbers...>;
using Shapes = std::tuple<Shape<1, 1, 8, 128, 5, 2, 4>, Shape<2, 1, 8, 128, 6, 2, 2>, Shape<1, 2, 8, 128, 5, 3, 2>,
                          Shape<1, 4, 8, 64, 9, 4, 1>, Shape<2, 2, 8, 128, 5, 3, 1>, Shape<1, 1, 16, 128, 4, 2, 4>,
                          Shape<2, 1, 16, 128, 5, 2, 2>, Shape<1, 2, 16, 128, 4, 3, 2>, Shape<1, 4, 16, 128, 4, 3, 1>,
                          Shape<2, 2, 16, 128, 5, 3, 1>, Shape<1, 1, 32, 128, 4, 2, 3>, Shape<2, 1, 32, 128, 4, 2, 2>,
                          Shape<1, 2, 32, 128, 3, 3, 2>, Shape<1, 4, 32, 64, 6, 4, 1>, Shape<2, 2, 32, 128, 4, 3, 1>,
                          Shape<1, 1, 64, 128, 3, 2, 3>, Shape<2, 1, 64, 128, 3, 3, 2>, Shape<1, 2, 64, 64, 4, 4, 2>,
                          Shape<1, 4, 64, 64, 4, 4, 1>, Shape<2, 2, 64, 128, 3, 3, 1>, Shape<2, 1, 128, 128, 4, 2, 1>>;
constexpr int kShapes = std::tuple_size_v<Shapes>, kKinds = 5;
// Of the kernel for many rows: parts of K in turn, and blocks of a cluster. Numbered on.
using ManyShapes =
    std::tuple<ManyShape<1, 1>, ManyShape<2, 1>, ManyShape<4, 1>, ManyShape<2, 2>, ManyShape<4, 2>, ManyShape<2, 4>>;

// The number of the shape for more than 128 rows; 0: none takes the matrix.
int choose_many(const DenseFp8Args& args, int parts) {
  constexpr int kOne = 1, kTwo = 2, kFour = 3, kTwoByTwo = 4, kFourByTwo = 5, kTwoByFour = 6;
  if (args.weight_rows / args.groups % (2 * kDenseRows) != 0) return 0;
  // With too few tiles for half of the SMs, more blocks share a tile's parts.
  const bool few = 2 * many_tiles(args) * std::max(parts / 4, 1) <= multiprocessors();
  const int kind = parts == 1   ? kOne
                   : parts == 2 ? kTwo
                   : parts == 4 ? (few ? kTwoByTwo : kFour)
                                : (few ? kTwoByFour : kFourByTwo);
  return kShapes + kind;
}

// The number, from 1 on, of the shape for this call.
int choose_shape(const DenseFp8Args& args, int parts) {
  if (constexpr int kFew = 128; args.rows > kFew) {
    if (const int many = choose_many(args, parts); many != 0) return many;
  }
  constexpr int kTwoTiles = 2, kTwoParts = 3, kFourParts = 4, kTwoByTwo = 5, kManyRows = kShapes;
  constexpr int kEnough = 96;  // blocks of which an SM has one
  const int tiles = args.weight_rows / kDenseRows;
  const bool even = tiles / args.groups % 2 == 0;
  int kind = parts == 1 ? even ? kTwoTiles : 1 : kTwoParts;
  if (parts > 2 && tiles * parts / 4 >= kEnough) {
    // Two tiles share the rows of x, for the price of a cluster: that long parts are worth.
    const bool shared = even && parts == 4 && args.columns / parts > 1024 && (args.rows <= 8 || args.rows > 32);
    kind = shared ? kTwoByTwo : kFourParts;
  }
  if (kind == kTwoTiles && args.rows > 64) return kManyRows;
  for (const int most : {8, 16, 32}) {
    if (args.rows > most) kind += kKinds;
  }
  return kind;
}

cudaError_t launch(const DenseFp8Args& args, int parts, cudaStream_t stream) {
  const int shape = choose_shape(args, parts);
  if (shape <= kShapes)
    return with_shape<Shapes>(shape, [&](auto of) { return launch_stream<decltype(of)>(args, parts, stream); });
  return with_shape<ManyShapes>(shape - kShapes,
                                [&](auto of) { return launch_many<decltype(of)>(args, parts, stream); });
}

using Codes = ffi::Buffer<ffi::U8, 3>;
using Scales = ffi::Buffer<ffi::U8, 2>;

ffi::Error dense_fp8(cudaStream_t stream, DenseRows x, Codes codes, Scales scales, DenseOut out, int32_t groups,
                     int32_t whole_rows) {
  const int64_t tiles = codes.dimensions()[0], blocks = codes.dimensions()[1];
  constexpr int kTiles = kDenseScaleRows / kDenseRows;  // that share a row of scales
  DenseFp8Args args = {};
  ffi::Error error = read_dense("dense_fp8", x, codes.typed_data(), scales.typed_data(), out, tiles * kDenseRows,
                                blocks * kDenseColumns, groups, args);
  if (error.success())
    error = check("dense_fp8",
                  {{"codes", codes, {tiles, blocks, kDenseTileBytes}},
                   {"scales", scales, {(tiles + kTiles - 1) / kTiles, blocks}, kElements}},
                  {{whole_rows >= tiles * kDenseRows, "the whole matrix must not have fewer rows"}});
  if (error.failure() || args.rows == 0 || args.weight_rows == 0) return error;
  // A share of a matrix's rows is cut along K as the whole is: the same bits on any number of devices.
  return launched("dense_fp8", launch(args, parts_of(whole_rows, args.columns), stream));
}

}  // namespace

DSV4_HANDLER(
    dense_fp8, dsv4_dense_fp8, dense_fp8,
    on_stream().Arg<DenseRows>().Arg<Codes>().Arg<Scales>().Ret<ffi::AnyBuffer>().Attr<int32_t>("groups").Attr<int32_t>(
        "whole_rows"));

}  // namespace dsv4
