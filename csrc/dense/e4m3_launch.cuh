// The shapes in which products of e4m3 rows and weights are compiled, and which of them a call takes. All give the same
// bits.
#pragma once

#include "common/device.h"
#include "common/shapes.h"
#include "common/tensor_map.h"
#include "dense/e4m3_few.cuh"
#include "dense/e4m3_many.cuh"

namespace dsv4 {

// How a launch is made; 0: as it is best.
struct E4m3Choice {
  int shape = 0;   // of the two lists below, numbered on from 1
  int window = 0;  // stages of weights under way, for few rows
  int band = 0;    // tiles of rows side by side, for many
};

// A shape that no call takes unless it is asked for: compiled for benchmarks/products.cu alone.
template <typename Shape>
struct Timed {};
#ifdef DSV4_E4M3_EVERY_SHAPE
constexpr bool kE4m3EveryShape = true;
#else
constexpr bool kE4m3EveryShape = false;
#endif
// `launch` of what a list has at a place: a shape, or one that may not be compiled.
template <typename Shape, typename Launch>
cudaError_t with_compiled(Shape shape, const Launch& launch) {
  return launch(shape);
}
template <typename Shape, typename Launch>
cudaError_t with_compiled(Timed<Shape>, const Launch& launch) {
  if constexpr (kE4m3EveryShape) return launch(Shape{});
  return cudaErrorInvalidValue;
}

// Tiles of weights, rows of x, blocks of K in a stage, blocks an SM.
using E4m3FewShapes =
    std::tuple<E4m3FewShape<1, 8, 1, 4>, E4m3FewShape<1, 8, 2, 2>, Timed<E4m3FewShape<2, 8, 2, 1>>,
               Timed<E4m3FewShape<1, 8, 4, 1>>, E4m3FewShape<1, 16, 1, 4>, E4m3FewShape<1, 16, 2, 2>,
               Timed<E4m3FewShape<2, 16, 2, 1>>, Timed<E4m3FewShape<1, 16, 4, 1>>, E4m3FewShape<1, 32, 1, 4>,
               E4m3FewShape<1, 32, 2, 2>, Timed<E4m3FewShape<2, 32, 2, 1>>, Timed<E4m3FewShape<1, 32, 4, 1>>,
               E4m3FewShape<1, 64, 1, 3>, E4m3FewShape<1, 64, 2, 2>, Timed<E4m3FewShape<2, 64, 2, 1>>,
               Timed<E4m3FewShape<2, 64, 1, 2>>, E4m3FewShape<1, 128, 1, 2>, Timed<E4m3FewShape<2, 128, 1, 1>>>;
constexpr int kE4m3FewShapes = std::tuple_size_v<E4m3FewShapes>, kE4m3FewKinds = 4;

// Warpgroups, 64s of rows and kN's of weights of each, kN; stages; share, split, parked.
using E4m3ManyShapes =
    std::tuple<Timed<E4m3ManyShape<2, 1, 1, 128, 6, 1, 1, false>>, E4m3ManyShape<2, 1, 1, 128, 6, 2, 1, false>,
               Timed<E4m3ManyShape<2, 1, 2, 128, 4, 1, 1, false>>, E4m3ManyShape<2, 1, 2, 128, 4, 2, 1, false>,
               Timed<E4m3ManyShape<2, 2, 1, 128, 4, 1, 1, false>>, Timed<E4m3ManyShape<2, 2, 1, 128, 4, 2, 1, false>>,
               Timed<E4m3ManyShape<2, 1, 1, 128, 6, 1, 1, true>>, E4m3ManyShape<2, 1, 1, 128, 6, 2, 1, true>,
               Timed<E4m3ManyShape<2, 1, 1, 128, 6, 1, 2, false>>, E4m3ManyShape<2, 1, 1, 128, 6, 2, 2, false>,
               Timed<E4m3ManyShape<2, 1, 1, 128, 6, 1, 4, false>>, E4m3ManyShape<2, 1, 1, 128, 6, 2, 4, false>,
               Timed<E4m3ManyShape<1, 1, 1, 128, 4, 1, 1, false>>, Timed<E4m3ManyShape<1, 1, 1, 128, 4, 1, 2, false>>,
               Timed<E4m3ManyShape<2, 1, 1, 64, 8, 1, 1, false>>, Timed<E4m3ManyShape<2, 1, 1, 64, 8, 1, 1, true>>,
               Timed<E4m3ManyShape<2, 2, 1, 64, 5, 1, 1, false>>, Timed<E4m3ManyShape<2, 1, 1, 64, 8, 1, 2, false>>,
               Timed<E4m3ManyShape<2, 1, 2, 128, 4, 4, 1, false>>>;
constexpr int kE4m3ManyShapes = std::tuple_size_v<E4m3ManyShapes>;

template <typename Shape, int kParts>
cudaError_t launch_e4m3_parts(const E4m3Args& args, const CUtensorMap& map, int window, cudaStream_t stream) {
  const dim3 grid(kParts, (args.rows + Shape::kRows - 1) / Shape::kRows, args.weight_rows / Shape::kTileRows);
  const int stages = window > 0 ? std::min(window, Shape::kStages) : Shape::kStages;
  return start(dense_e4m3_few_kernel<Shape, kParts>, {grid, Shape::kThreads, Shape::kSharedBytes, kParts}, follows,
               stream, args, map, stages);
}

// x: e4m3 codes [rows, groups * columns]. Pairs of them are moved as if they were bf16.
template <typename Shape>
cudaError_t launch_e4m3_few(const E4m3Args& args, const uint8_t* x, int parts, const E4m3Choice& choice,
                            cudaStream_t stream) {
  if (args.out_scales != nullptr) return cudaErrorInvalidValue;
  if (args.weight_rows / args.groups % Shape::kTileRows != 0 ||
      args.columns % (parts * Shape::kRun * kE4m3Columns) != 0)
    return cudaErrorInvalidValue;
  CUtensorMap map;
  const size_t width = static_cast<size_t>(args.groups) * args.columns / 2;
  const cudaError_t error = map_matrix(x, args.rows, width, Shape::kRows, Shape::kRun, &map);
  if (error != cudaSuccess) return error;
  switch (parts) {
    case 1:
      return launch_e4m3_parts<Shape, 1>(args, map, choice.window, stream);
    case 2:
      return launch_e4m3_parts<Shape, 2>(args, map, choice.window, stream);
    case 4:
      return launch_e4m3_parts<Shape, 4>(args, map, choice.window, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

template <typename Shape>
cudaError_t launch_e4m3_many(const E4m3Args& args, const uint8_t* x, int parts, const E4m3Choice& choice,
                             cudaStream_t stream) {
  if (args.weight_rows / args.groups % Shape::kColumns != 0 || args.columns % (parts * kE4m3Columns) != 0 ||
      (!Shape::kParked && parts != Shape::kSplit))
    return cudaErrorInvalidValue;
  E4m3ManyMaps maps = {};
  const size_t width = static_cast<size_t>(args.groups) * args.columns / 2;
  cudaError_t error = map_matrix(x, args.rows, width, Shape::kTokens, 1, &maps.rows);
  const bool rounded = args.out_scales != nullptr;
  if (rounded && (Shape::kSplit > 1 || Shape::kN != kRoundGroup)) return cudaErrorInvalidValue;
  if (error == cudaSuccess && !args.float_out) {
    const int out_columns = rounded ? args.weight_rows / 2 : args.weight_rows;
    error = map_matrices(args.out, 2, 1, args.rows, out_columns, kE4m3Rows, &maps.out);
  }
  if (error != cudaSuccess) return error;
  constexpr int kBand = 16, kPair = Shape::kTokens * Shape::kShare;
  const int pairs = (args.rows + kPair - 1) / kPair;
  const int band = std::max((choice.band > 0 ? choice.band : kBand) / Shape::kShare, 1);
  const E4m3Tiling tiling = {pairs, args.weight_rows / Shape::kColumns, std::min(band, pairs)};
  int clusters = tiling.count();
  if (Shape::kSplit == 1)
    clusters = std::min(clusters, std::max(multiprocessors() * Shape::kBlocks / Shape::kCluster, 1));
  return start(dense_e4m3_many_kernel<Shape>,
               {dim3(clusters * Shape::kCluster), Shape::kThreads, Shape::kSharedBytes, Shape::kCluster}, follows,
               stream, args, maps, tiling, parts);
}

// The number, from 1 on, of the shape for this call.
inline int choose_e4m3(const E4m3Args& args, int parts) {
  const int blocks = args.columns / kE4m3Columns / parts, group_rows = args.weight_rows / args.groups;
  constexpr int kFew = 128, kFewest = 64, kTile = 128, kBlocks = 2;
  // Of twice as many rows blocks of the widest of them still run all at once.
  const int row_tiles = (args.rows + kFew - 1) / kFew, few_blocks = row_tiles * parts * (args.weight_rows / kE4m3Rows);
  const bool at_once = row_tiles == 2 && few_blocks <= kBlocks * multiprocessors();
  const bool rounded = args.out_scales != nullptr;  // which few rows' shapes, and parts that blocks share, have not
  if (!rounded && (row_tiles == 1 || at_once || group_rows % kTile != 0)) {
    if (args.rows > kFewest) return kE4m3FewShapes - 1;
    int kind = blocks % 2 == 0 ? 2 : 1;
    for (const int most : {8, 16, 32}) {
      if (args.rows > most) kind += kE4m3FewKinds;
    }
    return kind;
  }
  // Pairs of tiles of rows share weights in all of these; where they are too few for half of the SMs, blocks share
  // parts.
  constexpr int kSquare = 2, kWide = 4, kParked = 8, kSplitTwo = 10, kSplitFour = 12;
  const int tiles = (args.rows + kTile - 1) / kTile * (args.weight_rows / kTile);
  const bool enough = rounded || 2 * tiles > multiprocessors();
  int kind = enough ? kParked : parts == 2 ? kSplitTwo : kSplitFour;
  if (parts == 1) kind = enough && group_rows % (2 * kTile) == 0 ? kWide : kSquare;
  return kE4m3FewShapes + kind;
}

inline cudaError_t launch_e4m3(const E4m3Args& args, const uint8_t* x, int parts, const E4m3Choice& choice,
                               cudaStream_t stream) {
  const int shape = choice.shape > 0 ? choice.shape : choose_e4m3(args, parts);
  if (shape <= kE4m3FewShapes) {
    const auto few = [&](auto of) { return launch_e4m3_few<decltype(of)>(args, x, parts, choice, stream); };
    return with_shape<E4m3FewShapes>(shape, [&](auto of) { return with_compiled(of, few); });
  }
  const auto many = [&](auto of) { return launch_e4m3_many<decltype(of)>(args, x, parts, choice, stream); };
  return with_shape<E4m3ManyShapes>(shape - kE4m3FewShapes, [&](auto of) { return with_compiled(of, many); });
}

}  // namespace dsv4
