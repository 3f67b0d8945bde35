// Dense FP8 products as an XLA FFI handler and as a plain C call. One launch, only enqueued: fit for a command buffer.
// Wrapper and argument meaning: dsv4_jax/cuda/dense_fp8.py.
#include <cuda.h>
#include <cuda_runtime.h>

#include <string>
#include <tuple>

#include "built_for.h"
#include "dense_fp8_kernel.cuh"
#include "device.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

// The driver's function, asked of the runtime: nothing is linked against the driver.
using EncodeTiled = decltype(&cuTensorMapEncodeTiled);
EncodeTiled encode_tiled() {
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

// x [rows, groups * columns] in boxes of 64 columns and `box_rows` rows, swizzled; rows beyond the last are zeros.
cudaError_t map_rows(const dsv4::DenseFp8Args& args, int box_rows, CUtensorMap* map) {
  const EncodeTiled encode = encode_tiled();
  if (encode == nullptr) return cudaErrorNotSupported;
  const cuuint64_t width = static_cast<cuuint64_t>(args.groups) * args.columns;
  const cuuint64_t sizes[] = {width, static_cast<cuuint64_t>(args.rows)}, strides[] = {width * sizeof(__nv_bfloat16)};
  const cuuint32_t box[] = {dsv4::kBlockColumns, static_cast<cuuint32_t>(box_rows)}, steps[] = {1, 1};
  const CUresult result = encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<__nv_bfloat16*>(args.x), sizes,
                                 strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// Parts of K: as many as give a hundred and some blocks of 256 of the weights' rows. Of the matrix alone: a row's bits
// depend on it.
int parts_of(int weight_rows, int columns) {
  constexpr int kEnough = 128, kBlockOf = 256;
  const int runs = columns / dsv4::kDenseColumns;
  int parts = 1;
  while (parts < dsv4::kMostParts && weight_rows / kBlockOf * parts < kEnough && runs % (2 * parts) == 0) parts *= 2;
  return parts;
}

template <typename Shape>
cudaError_t launch_with(const dsv4::DenseFp8Args& args, unsigned parts, cudaStream_t stream) {
  if (args.weight_rows / args.groups % Shape::kTileRows != 0) return cudaErrorInvalidValue;
  CUtensorMap map;
  cudaError_t error = map_rows(args, Shape::kRows, &map);
  if (error != cudaSuccess) return error;
  const auto kernel = dsv4::dense_fp8_kernel<Shape>;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kSharedBytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {parts, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(parts, (args.rows + Shape::kRows - 1) / Shape::kRows, args.weight_rows / Shape::kTileRows);
  config.blockDim = dim3(Shape::kThreads);
  config.dynamicSmemBytes = Shape::kSharedBytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, args, map);
}

// Warpgroups, rows of x, stages, blocks an SM.
using Shapes = std::tuple<dsv4::DenseShape<1, 8, 5, 4>, dsv4::DenseShape<2, 8, 6, 2>, dsv4::DenseShape<4, 8, 6, 1>,
                          dsv4::DenseShape<1, 16, 4, 4>, dsv4::DenseShape<2, 16, 5, 2>, dsv4::DenseShape<4, 16, 6, 1>,
                          dsv4::DenseShape<1, 32, 4, 3>, dsv4::DenseShape<2, 32, 4, 2>, dsv4::DenseShape<4, 32, 5, 1>,
                          dsv4::DenseShape<1, 64, 3, 3>, dsv4::DenseShape<2, 64, 3, 2>, dsv4::DenseShape<4, 64, 4, 1>,
                          dsv4::DenseShape<2, 128, 4, 1>>;
constexpr int kShapes = std::tuple_size_v<Shapes>;

template <int kShape = 1>
cudaError_t launch_shape(const dsv4::DenseFp8Args& args, int shape, int parts, cudaStream_t stream) {
  if constexpr (kShape <= kShapes) {
    if (shape == kShape) return launch_with<std::tuple_element_t<kShape - 1, Shapes>>(args, parts, stream);
    return launch_shape<kShape + 1>(args, shape, parts, stream);
  }
  return cudaErrorInvalidValue;
}

int choose_shape(const dsv4::DenseFp8Args& args) {
  int shape = 1;
  for (const int most : {8, 16, 32, 64}) {
    if (args.rows <= most) break;
    shape += 3;
  }
  return shape;
}

// `shape` and `parts` 0: chosen here; others are for timing. Which shape it is changes no bit of the result.
cudaError_t launch(const dsv4::DenseFp8Args& args, int shape, int parts, cudaStream_t stream) {
  if (args.rows == 0 || args.weight_rows == 0) return cudaSuccess;
  if (shape == 0) shape = choose_shape(args);
  if (parts == 0) parts = parts_of(args.weight_rows, args.columns);
  if (parts > dsv4::kMostParts || args.columns / dsv4::kDenseColumns % parts != 0) return cudaErrorInvalidValue;
  return launch_shape(args, shape, parts, stream);
}

using Rows = ffi::Buffer<ffi::BF16, 2>;
using Codes = ffi::Buffer<ffi::U8, 3>;
using Scales = ffi::Buffer<ffi::U8, 2>;

ffi::Error dense_fp8(cudaStream_t stream, Rows x, Codes codes, Scales scales, ffi::Result<ffi::AnyBuffer> out,
                     int32_t groups) {
  const auto rows = x.dimensions(), tiles = codes.dimensions(), blocks = scales.dimensions(),
             results = out->dimensions();
  const int64_t weight_rows = tiles[0] * dsv4::kDenseRows, columns = tiles[1] * dsv4::kDenseColumns;
  constexpr int kTiles = dsv4::kDenseScaleRows / dsv4::kDenseRows;
  const bool floats = out->element_type() == ffi::F32;
  if (tiles[2] != dsv4::kDenseTileBytes || groups < 1 || rows[1] != groups * columns || tiles[0] % groups != 0 ||
      blocks[0] != (tiles[0] + kTiles - 1) / kTiles || blocks[1] != tiles[1] || results.size() != 2 ||
      results[0] != rows[0] || results[1] != weight_rows || (!floats && out->element_type() != ffi::BF16)) {
    return ffi::Error::InvalidArgument("dense_fp8: shapes or types do not agree");
  }
  const dsv4::DenseFp8Args args = {reinterpret_cast<const __nv_bfloat16*>(x.untyped_data()),
                                   codes.typed_data(),
                                   scales.typed_data(),
                                   out->untyped_data(),
                                   static_cast<int>(rows[0]),
                                   static_cast<int>(weight_rows),
                                   static_cast<int>(columns),
                                   groups,
                                   floats};
  const cudaError_t error = launch(args, 0, 0, stream);
  if (error != cudaSuccess) return ffi::Error::Internal(std::string("dense_fp8: ") + cudaGetErrorString(error));
  return ffi::Error::Success();
}

}  // namespace

DSV4_BUILT_FOR(dense_fp8);
DSV4_ARGS_SIZE(dense_fp8, dsv4::DenseFp8Args)

XLA_FFI_DEFINE_HANDLER_SYMBOL(Dsv4DenseFp8, dense_fp8,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<Rows>()
                                  .Arg<Codes>()
                                  .Arg<Scales>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int32_t>("groups"),
                              {ffi::Traits::kCmdBufferCompatible});

// The launch alone, for timing without XLA. Returns a cudaError_t.
extern "C" int dsv4_dense_fp8_launch(const dsv4::DenseFp8Args* args, int shape, int parts, cudaStream_t stream) {
  return static_cast<int>(launch(*args, shape, parts, stream));
}
