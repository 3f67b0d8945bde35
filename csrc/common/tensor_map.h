// Maps of matrices for the copy engine (common/bulk_copy.cuh), made on the host.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace dsv4 {

// The driver's function, asked of the runtime: nothing is linked against the driver.
using EncodeTiled = decltype(&cuTensorMapEncodeTiled);
inline EncodeTiled encode_tiled() {
  static const EncodeTiled found = [] {
    constexpr unsigned kSince = 12000;  // CUDA 12.0
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, kSince, cudaEnableDefault, &result);
    return error == cudaSuccess ? reinterpret_cast<EncodeTiled>(function) : nullptr;
  }();
  return found;
}

// A map of bf16 of `axes` axes, swizzled as the matrix units want blocks (common/hopper.cuh). `strides`: bytes, of all
// axes but the first.
inline cudaError_t map_boxes(const void* first, int axes, const cuuint64_t* sizes, const cuuint64_t* strides,
                             const cuuint32_t* box, CUtensorMapL2promotion promotion, CUtensorMap* map) {
  const EncodeTiled encode = encode_tiled();
  if (encode == nullptr) return cudaErrorNotSupported;
  constexpr cuuint32_t kSteps[] = {1, 1, 1};
  const CUresult result =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, axes, const_cast<void*>(first), sizes, strides, box, kSteps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

constexpr cuuint32_t kMapColumns = 64;  // of a box: a row of a block

// A matrix [rows, width] of bf16 in boxes of 64 columns and `box_rows` rows, `boxes` at a time.
inline cudaError_t map_matrix(const void* matrix, int rows, size_t width, unsigned box_rows, unsigned boxes,
                              CUtensorMap* map) {
  const cuuint64_t sizes[] = {kMapColumns, static_cast<cuuint64_t>(rows), width / kMapColumns};
  const cuuint64_t strides[] = {width * sizeof(__nv_bfloat16), kMapColumns * sizeof(__nv_bfloat16)};
  const cuuint32_t box[] = {kMapColumns, box_rows, boxes};
  return map_boxes(matrix, 3, sizes, strides, box, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, map);
}

// Matrices [matrices, rows, columns] of bf16, one behind the other, in boxes of 64 columns and `box_rows` rows of one
// of them. `axes`: 3, or 2 for a single matrix.
inline cudaError_t map_matrices(const void* first, int axes, int64_t matrices, int64_t rows, int64_t columns,
                                unsigned box_rows, CUtensorMap* map) {
  const cuuint64_t row_bytes = columns * sizeof(__nv_bfloat16);
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows),
                              static_cast<cuuint64_t>(matrices)};
  const cuuint64_t strides[] = {row_bytes, rows * row_bytes};
  const cuuint32_t box[] = {kMapColumns, box_rows, 1};
  return map_boxes(first, axes, sizes, strides, box, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, map);
}

}  // namespace dsv4
