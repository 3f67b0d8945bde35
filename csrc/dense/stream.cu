// Dense products of few rows with bf16 weights as an XLA FFI handler. One launch, only enqueued: fit for a command
// buffer. Wrapper and argument meaning: dsv4_jax/cuda/dense_bf16.py.
#include <cuda_runtime.h>

#include <string>
#include <tuple>

#include "common/alignment.h"
#include "common/built_for.h"
#include "dense/launch.cuh"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

// Tiles of weights, parts of K, rows of x; columns of a stage, stages, those under way, blocks an SM.
template <int... kNumbers>
using Shape = dsv4::DenseShape<kNumbers..., 2>;
using Shapes = std::tuple<Shape<1, 1, 8, 64, 10, 4, 2>, Shape<2, 1, 8, 64, 6, 4, 2>, Shape<1, 2, 8, 64, 5, 4, 2>,
                          Shape<1, 4, 8, 64, 6, 4, 1>, Shape<1, 1, 16, 64, 10, 4, 2>, Shape<2, 1, 16, 64, 6, 4, 2>,
                          Shape<1, 2, 16, 64, 5, 4, 2>, Shape<1, 4, 16, 64, 5, 3, 1>>;
constexpr int kShapes = std::tuple_size_v<Shapes>, kKinds = 4;

template <int kShape = 1>
cudaError_t launch_shape(const dsv4::DenseFp8Args& args, int shape, int parts, cudaStream_t stream) {
  if constexpr (kShape <= kShapes) {
    if (shape == kShape) return dsv4::launch_with<std::tuple_element_t<kShape - 1, Shapes>>(args, parts, 0, stream);
    return launch_shape<kShape + 1>(args, shape, parts, stream);
  }
  return cudaErrorInvalidValue;
}

// The number, from 1 on, of the shape for this call.
int choose_shape(const dsv4::DenseFp8Args& args, int parts) {
  constexpr int kTwoTiles = 2, kTwoParts = 3, kFourParts = 4;
  constexpr int kEnough = 96;  // blocks of which an SM has one
  const int tiles = args.weight_rows / dsv4::kDenseRows;
  const bool even = tiles / args.groups % 2 == 0;
  const int kind = parts == 1                                  ? even ? kTwoTiles : 1
                   : parts > 2 && tiles * parts / 4 >= kEnough ? kFourParts
                                                               : kTwoParts;
  return args.rows <= 8 ? kind : kind + kKinds;
}

cudaError_t launch(const dsv4::DenseFp8Args& args, cudaStream_t stream) {
  if (args.rows == 0 || args.weight_rows == 0) return cudaSuccess;
  const int parts = dsv4::parts_of(args.weight_rows, args.columns);
  return launch_shape(args, choose_shape(args, parts), parts, stream);
}

using Rows = ffi::Buffer<ffi::BF16, 2>;

ffi::Error dense_stream(cudaStream_t stream, Rows x, Rows weights, ffi::Result<ffi::AnyBuffer> out, int32_t groups) {
  const auto rows = x.dimensions(), matrix = weights.dimensions(), results = out->dimensions();
  const int64_t weight_rows = matrix[0], columns = matrix[1];
  const bool floats = out->element_type() == ffi::F32;
  if (columns == 0 || groups < 1 || rows[1] != groups * columns || weight_rows % (groups * dsv4::kDenseRows) != 0 ||
      columns % dsv4::kDenseColumns != 0 || results.size() != 2 || results[0] != rows[0] || results[1] != weight_rows ||
      (!floats && out->element_type() != ffi::BF16)) {
    return ffi::Error::InvalidArgument("dense_stream: shapes or types do not agree");
  }
  const dsv4::DenseFp8Args args = {reinterpret_cast<const __nv_bfloat16*>(x.untyped_data()),
                                   static_cast<const uint8_t*>(weights.untyped_data()),
                                   nullptr,
                                   out->untyped_data(),
                                   static_cast<int>(rows[0]),
                                   static_cast<int>(weight_rows),
                                   static_cast<int>(columns),
                                   groups,
                                   floats};
  if (const std::string problem =
          dsv4::misaligned("dense_stream", {{"x", args.x}, {"weights", args.codes}, {"out", args.out}});
      !problem.empty())
    return ffi::Error::InvalidArgument(problem);
  const cudaError_t error = launch(args, stream);
  if (error != cudaSuccess) return ffi::Error::Internal(std::string("dense_stream: ") + cudaGetErrorString(error));
  return ffi::Error::Success();
}

}  // namespace

DSV4_BUILT_FOR(dense_stream);

XLA_FFI_DEFINE_HANDLER_SYMBOL(Dsv4DenseStream, dense_stream,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<Rows>()
                                  .Arg<Rows>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int32_t>("groups"),
                              {ffi::Traits::kCmdBufferCompatible});
