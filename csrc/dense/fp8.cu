// Dense FP8 products as an XLA FFI handler and as a plain C call. One launch, only enqueued: fit for a command buffer.
// Wrapper and argument meaning: dsv4_jax/cuda/dense_fp8.py.
#include <cuda_runtime.h>

#include <string>
#include <tuple>

#include "common/alignment.h"
#include "common/built_for.h"
#include "common/device.h"
#include "dense/fp8_many.cuh"
#include "dense/launch.cuh"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

// Tiles of 128 of the weights' rows by 128 rows of x.
int64_t many_tiles(const dsv4::DenseFp8Args& args) {
  constexpr int kTile = 128;
  return static_cast<int64_t>(args.weight_rows / kTile) * ((args.rows + kTile - 1) / kTile);
}

template <typename Shape>
cudaError_t launch_many(const dsv4::DenseFp8Args& args, int parts, cudaStream_t stream) {
  if (parts != Shape::kInTurn * Shape::kParts || args.weight_rows / args.groups % Shape::kTileRows != 0 ||
      args.columns % (parts * Shape::kColumns) != 0)
    return cudaErrorInvalidValue;
  CUtensorMap map;
  const cudaError_t error = dsv4::map_matrix(args.x, args.rows, static_cast<size_t>(args.groups) * args.columns,
                                             Shape::kRows, Shape::kBoxes, &map);
  if (error != cudaSuccess) return error;
  const dim3 grid(Shape::kParts, (args.rows + Shape::kRows - 1) / Shape::kRows, args.weight_rows / Shape::kTileRows);
  return dsv4::start(dsv4::dense_fp8_many_kernel<Shape>, {grid, Shape::kThreads, Shape::kSharedBytes, Shape::kParts},
                     dsv4::follows, stream, args, map);
}

// Tiles of weights, parts of K, rows of x; columns of a stage, stages, those under way, blocks an SM. Five kinds for
// each number of rows, then one for many.
template <int... kNumbers>
using Shape = dsv4::DenseShape<kNumbers...>;
using Shapes = std::tuple<Shape<1, 1, 8, 128, 5, 2, 4>, Shape<2, 1, 8, 128, 6, 2, 2>, Shape<1, 2, 8, 128, 5, 3, 2>,
                          Shape<1, 4, 8, 64, 9, 4, 1>, Shape<2, 2, 8, 128, 5, 3, 1>, Shape<1, 1, 16, 128, 4, 2, 4>,
                          Shape<2, 1, 16, 128, 5, 2, 2>, Shape<1, 2, 16, 128, 4, 3, 2>, Shape<1, 4, 16, 128, 4, 3, 1>,
                          Shape<2, 2, 16, 128, 5, 3, 1>, Shape<1, 1, 32, 128, 4, 2, 3>, Shape<2, 1, 32, 128, 4, 2, 2>,
                          Shape<1, 2, 32, 128, 3, 3, 2>, Shape<1, 4, 32, 64, 6, 4, 1>, Shape<2, 2, 32, 128, 4, 3, 1>,
                          Shape<1, 1, 64, 128, 3, 2, 3>, Shape<2, 1, 64, 128, 3, 3, 2>, Shape<1, 2, 64, 64, 4, 4, 2>,
                          Shape<1, 4, 64, 64, 4, 4, 1>, Shape<2, 2, 64, 128, 3, 3, 1>, Shape<2, 1, 128, 128, 4, 2, 1>>;
constexpr int kShapes = std::tuple_size_v<Shapes>, kKinds = 5;
// Of the kernel for many rows: parts of K in turn, and blocks of a cluster. Numbered on.
using ManyShapes = std::tuple<dsv4::ManyShape<1, 1>, dsv4::ManyShape<2, 1>, dsv4::ManyShape<4, 1>,
                              dsv4::ManyShape<2, 2>, dsv4::ManyShape<4, 2>, dsv4::ManyShape<2, 4>>;
constexpr int kManyShapes = std::tuple_size_v<ManyShapes>;

template <int kShape = 1>
cudaError_t launch_shape(const dsv4::DenseFp8Args& args, int shape, int parts, int window, cudaStream_t stream) {
  if constexpr (kShape <= kShapes) {
    if (shape == kShape)
      return dsv4::launch_with<std::tuple_element_t<kShape - 1, Shapes>>(args, parts, window, stream);
    return launch_shape<kShape + 1>(args, shape, parts, window, stream);
  } else if constexpr (kShape <= kShapes + kManyShapes) {
    using Many = std::tuple_element_t<kShape - kShapes - 1, ManyShapes>;
    if (shape == kShape) return launch_many<Many>(args, parts, stream);
    return launch_shape<kShape + 1>(args, shape, parts, window, stream);
  }
  return cudaErrorInvalidValue;
}

// The number of the shape for more than 128 rows; 0: none takes the matrix.
int choose_many(const dsv4::DenseFp8Args& args, int parts) {
  constexpr int kOne = 1, kTwo = 2, kFour = 3, kTwoByTwo = 4, kFourByTwo = 5, kTwoByFour = 6;
  if (args.weight_rows / args.groups % (2 * dsv4::kDenseRows) != 0) return 0;
  // With too few tiles for half of the SMs, more blocks share a tile's parts.
  const bool few = 2 * many_tiles(args) * std::max(parts / 4, 1) <= dsv4::multiprocessors();
  const int kind = parts == 1   ? kOne
                   : parts == 2 ? kTwo
                   : parts == 4 ? (few ? kTwoByTwo : kFour)
                                : (few ? kTwoByFour : kFourByTwo);
  return kShapes + kind;
}

// The number, from 1 on, of the shape for this call.
int choose_shape(const dsv4::DenseFp8Args& args, int parts) {
  if (constexpr int kFew = 128; args.rows > kFew) {
    if (const int many = choose_many(args, parts); many != 0) return many;
  }
  constexpr int kTwoTiles = 2, kTwoParts = 3, kFourParts = 4, kTwoByTwo = 5, kManyRows = kShapes;
  constexpr int kEnough = 96;  // blocks of which an SM has one
  const int tiles = args.weight_rows / dsv4::kDenseRows;
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

// `shape` and `window` 0: chosen here; others are for timing. Only how many parts there are changes bits.
cudaError_t launch(const dsv4::DenseFp8Args& args, int shape, int parts, int window, cudaStream_t stream) {
  if (args.rows == 0 || args.weight_rows == 0) return cudaSuccess;
  if (shape == 0) shape = choose_shape(args, parts);
  return launch_shape(args, shape, parts, window, stream);
}

using Rows = ffi::Buffer<ffi::BF16, 2>;
using Codes = ffi::Buffer<ffi::U8, 3>;
using Scales = ffi::Buffer<ffi::U8, 2>;

ffi::Error dense_fp8(cudaStream_t stream, Rows x, Codes codes, Scales scales, ffi::Result<ffi::AnyBuffer> out,
                     int32_t groups, int32_t whole_rows) {
  const auto rows = x.dimensions(), tiles = codes.dimensions(), blocks = scales.dimensions(),
             results = out->dimensions();
  const int64_t weight_rows = tiles[0] * dsv4::kDenseRows, columns = tiles[1] * dsv4::kDenseColumns;
  constexpr int kTiles = dsv4::kDenseScaleRows / dsv4::kDenseRows;
  const bool floats = out->element_type() == ffi::F32;
  if (tiles[2] != dsv4::kDenseTileBytes || columns == 0 || groups < 1 || rows[1] != groups * columns ||
      tiles[0] % groups != 0 || blocks[0] != (tiles[0] + kTiles - 1) / kTiles || blocks[1] != tiles[1] ||
      results.size() != 2 || results[0] != rows[0] || results[1] != weight_rows || whole_rows < weight_rows ||
      (!floats && out->element_type() != ffi::BF16)) {
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
  if (const std::string problem =
          dsv4::misaligned("dense_fp8", {{"x", args.x}, {"codes", args.codes}, {"out", args.out}});
      !problem.empty())
    return ffi::Error::InvalidArgument(problem);
  // A share of a matrix's rows is cut along K as the whole is: the same bits on any number of devices.
  const cudaError_t error = launch(args, 0, dsv4::parts_of(whole_rows, args.columns), 0, stream);
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
                                  .Attr<int32_t>("groups")
                                  .Attr<int32_t>("whole_rows"),
                              {ffi::Traits::kCmdBufferCompatible});

// Parts of K of a matrix: what the bits of a result depend on.
extern "C" int dsv4_dense_fp8_parts(int weight_rows, int columns) { return dsv4::parts_of(weight_rows, columns); }

// The launch alone, for timing without XLA; `parts` 0: as of a whole matrix. Returns a cudaError_t.
extern "C" int dsv4_dense_fp8_launch(const dsv4::DenseFp8Args* args, int shape, int parts, int window,
                                     cudaStream_t stream) {
  if (parts == 0) parts = dsv4::parts_of(args->weight_rows, args->columns);
  return static_cast<int>(launch(*args, shape, parts, window, stream));
}
