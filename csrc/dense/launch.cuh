// How the dense products' kernel (dense/stream_kernel.cuh) is launched.
#pragma once

#include <algorithm>

#include "common/tensor_map.h"
#include "dense/stream_kernel.cuh"

namespace dsv4 {

// Parts of K: up to eight of 512 columns or more, so that tiles of 64 rows of the weights and a part of K are 384. Of
// the matrix alone: a row's bits depend on it.
inline int parts_of(int weight_rows, int columns) {
  constexpr int kEnough = 384, kMost = 8, kLeastColumns = 512;
  int parts = 1;
  while (parts < kMost && weight_rows / kDenseRows * parts < kEnough && columns % (2 * parts * kDenseColumns) == 0 &&
         columns / (2 * parts) >= kLeastColumns) {
    parts *= 2;
  }
  return parts;
}

template <typename Shape, unsigned kCluster>
cudaError_t launch_cluster(const DenseFp8Args& args, int window, cudaStream_t stream) {
  DenseMaps<Shape> maps;
  cudaError_t error = map_matrix(args.x, args.rows, static_cast<size_t>(args.groups) * args.columns, Shape::kRows,
                                 Shape::kBoxes, &maps.of[0]);
  if constexpr (Shape::kBytes == 2) {
    if (error == cudaSuccess)
      error = map_matrix(args.codes, args.weight_rows, args.columns, kDenseRows, Shape::kBoxes, &maps.of[1]);
  }
  if (error != cudaSuccess) return error;
  const dim3 grid(kCluster, (args.rows + Shape::kRows - 1) / Shape::kRows, args.weight_rows / Shape::kTileRows);
  return start(dense_fp8_kernel<Shape, kCluster>, {grid, Shape::kThreads, Shape::kSharedBytes, kCluster}, follows,
               stream, args, maps, window);
}

template <typename Shape>
cudaError_t launch_with(const DenseFp8Args& args, int parts, int window, cudaStream_t stream) {
  if (args.weight_rows / args.groups % Shape::kTileRows != 0 || args.columns % (parts * Shape::kColumns) != 0)
    return cudaErrorInvalidValue;
  window = window == 0 ? Shape::kWindow : std::min(window, Shape::kStages);
  if (parts == Shape::kSplit) return launch_cluster<Shape, 1>(args, window, stream);
  if constexpr (Shape::kSplit > 1) {
    if (parts == 2 * Shape::kSplit) return launch_cluster<Shape, 2>(args, window, stream);
    if (parts == 4 * Shape::kSplit) return launch_cluster<Shape, 4>(args, window, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace dsv4
