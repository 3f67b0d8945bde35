// Dense products with bf16 weights as an XLA FFI handler. One launch, only enqueued: fit for a command buffer. Made for
// few rows, and of many with the same bits. Wrapper and argument meaning: dsv4_jax/cuda/dense_bf16.py.
#include <cuda_runtime.h>

#include "dense/launch.cuh"

namespace dsv4 {
namespace {

namespace ffi = xla::ffi;

// Tiles of weights, parts of K, rows of x; columns of a stage, stages, those under way, blocks an SM. Four kinds for
// each number of rows.
template <int... kNumbers>
using Shape = DenseShape<kNumbers..., 2>;
using Shapes = std::tuple<Shape<1, 1, 8, 64, 10, 4, 2>, Shape<2, 1, 8, 64, 6, 4, 2>, Shape<1, 2, 8, 64, 5, 4, 2>,
                          Shape<1, 4, 8, 64, 6, 4, 1>, Shape<1, 1, 16, 64, 10, 4, 2>, Shape<2, 1, 16, 64, 6, 4, 2>,
                          Shape<1, 2, 16, 64, 5, 4, 2>, Shape<1, 4, 16, 64, 5, 3, 1>, Shape<1, 1, 64, 64, 6, 4, 2>,
                          Shape<2, 1, 64, 64, 4, 3, 2>, Shape<1, 2, 64, 64, 6, 4, 1>, Shape<1, 4, 64, 64, 3, 3, 1>,
                          Shape<1, 1, 128, 64, 4, 3, 2>, Shape<2, 1, 128, 64, 5, 4, 1>, Shape<1, 2, 128, 64, 4, 4, 1>,
                          Shape<2, 2, 128, 64, 3, 3, 1>>;
constexpr int kKinds = 4;

// The number, from 1 on, of the shape for this call.
int choose_shape(const DenseFp8Args& args, int parts) {
  constexpr int kTwoTiles = 2, kTwoParts = 3, kFourParts = 4, kTwoByTwo = 4;  // the last one of most rows
  constexpr int kEnough = 96;                                                 // blocks of which an SM has one
  const int tiles = args.weight_rows / kDenseRows;
  const bool even = tiles / args.groups % 2 == 0;
  if (args.rows > 64) {
    const int kind = parts == 1 ? even ? kTwoTiles : 1 : even ? kTwoByTwo : kTwoParts;
    return kind + 3 * kKinds;
  }
  const int kind = parts == 1                                  ? even ? kTwoTiles : 1
                   : parts > 2 && tiles * parts / 4 >= kEnough ? kFourParts
                                                               : kTwoParts;
  return kind + (args.rows <= 8 ? 0 : args.rows <= 16 ? kKinds : 2 * kKinds);
}

ffi::Error dense_stream(cudaStream_t stream, DenseRows x, DenseRows weights, DenseOut out, int32_t groups) {
  const int64_t weight_rows = weights.dimensions()[0], columns = weights.dimensions()[1];
  DenseFp8Args args = {};
  ffi::Error error =
      read_dense("dense_stream", x, weights.untyped_data(), nullptr, out, weight_rows, columns, groups, args);
  if (error.success()) error = check("dense_stream", {{"weights", weights, {weight_rows, columns}}});
  if (error.failure() || args.rows == 0 || args.weight_rows == 0) return error;
  const int parts = parts_of(args.weight_rows, args.columns);
  return launched("dense_stream", with_shape<Shapes>(choose_shape(args, parts), [&](auto shape) {
                    return launch_stream<decltype(shape)>(args, parts, stream);
                  }));
}

}  // namespace

DSV4_HANDLER(dense_stream, dsv4_dense_stream, dense_stream,
             on_stream().Arg<DenseRows>().Arg<DenseRows>().Ret<ffi::AnyBuffer>().Attr<int32_t>("groups"));

}  // namespace dsv4
