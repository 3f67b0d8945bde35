// What the handlers of dense products with FP8 and with bf16 weights (dense/fp8.cu, dense/stream.cu) have in common.
#pragma once

#include "common/handler.h"
#include "common/shapes.h"
#include "common/tensor_map.h"
#include "dense/stream_kernel.cuh"

namespace dsv4 {

// Parts of K: up to eight of 512 columns or more, so that tiles of 64 rows of the weights and a part of K are 384. Of
// the matrix alone: a row's bits depend on it.
inline int parts_of(int weight_rows, int columns) {
  constexpr int kEnough = 384, kMaxParts = 8, kLeastColumns = 512;
  int parts = 1;
  while (parts < kMaxParts && weight_rows / kDenseRows * parts < kEnough &&
         columns % (2 * parts * kDenseColumns) == 0 && columns / (2 * parts) >= kLeastColumns) {
    parts *= 2;
  }
  return parts;
}

template <typename Shape, unsigned kCluster>
cudaError_t launch_cluster(const DenseFp8Args& args, cudaStream_t stream) {
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
               stream, args, maps, Shape::kWindow);
}

template <typename Shape>
cudaError_t launch_stream(const DenseFp8Args& args, int parts, cudaStream_t stream) {
  if (args.weight_rows / args.groups % Shape::kTileRows != 0 || args.columns % (parts * Shape::kColumns) != 0)
    return cudaErrorInvalidValue;
  if (parts == Shape::kSplit) return launch_cluster<Shape, 1>(args, stream);
  if constexpr (Shape::kSplit > 1) {
    if (parts == 2 * Shape::kSplit) return launch_cluster<Shape, 2>(args, stream);
    if (parts == 4 * Shape::kSplit) return launch_cluster<Shape, 4>(args, stream);
  }
  return cudaErrorInvalidValue;
}

using DenseRows = xla::ffi::Buffer<xla::ffi::BF16, 2>;
using DenseOut = xla::ffi::Result<xla::ffi::AnyBuffer>;

// Checks what both handlers have, and fills `args`.
inline xla::ffi::Error read_dense(const char* target, const DenseRows& x, const void* weights, const uint8_t* scales,
                                  DenseOut& out, int64_t weight_rows, int64_t columns, int32_t groups,
                                  DenseFp8Args& args) {
  const int64_t rows = x.dimensions()[0];
  args = {reinterpret_cast<const __nv_bfloat16*>(x.untyped_data()),
          static_cast<const uint8_t*>(weights),
          scales,
          out->untyped_data(),
          static_cast<int>(rows),
          static_cast<int>(weight_rows),
          static_cast<int>(columns),
          groups,
          out->element_type() == xla::ffi::F32};
  return check(
      target,
      {{"x", x, {rows, groups * columns}},
       {"out", *out, {rows, weight_rows}, kVectors, {xla::ffi::BF16, xla::ffi::F32}}},
      {{groups >= 1 && weight_rows % (groups * kDenseRows) == 0, "weights must have rows in 64s, of each group"},
       {columns > 0 && columns % kDenseColumns == 0, "weights must have columns in 128s"}});
}

}  // namespace dsv4
