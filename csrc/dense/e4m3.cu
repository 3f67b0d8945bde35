// Products of rows rounded to e4m3 with FP8 weights, and the rounding, as XLA FFI handlers. A launch each, only
// enqueued: fit for a command buffer. Wrapper and argument meaning: dsv4_jax/cuda/dense_e4m3.py.
#include <cuda_runtime.h>

#include "common/handler.h"
#include "dense/e4m3_launch.cuh"
#include "dense/round_rows.cuh"

namespace dsv4 {
namespace {

namespace ffi = xla::ffi;

// Rows of scales next to each other, in whole 16 bytes.
int64_t pitch_of(int64_t rows) {
  constexpr int64_t kStep = 4;
  return (rows + kStep - 1) / kStep * kStep;
}

using Codes = ffi::Buffer<ffi::U8, 2>;
using RowScales = ffi::Buffer<ffi::F32, 2>;

ffi::Error round_rows_of(cudaStream_t stream, ffi::Buffer<ffi::BF16, 2> x, ffi::Result<Codes> codes,
                         ffi::Result<RowScales> scales) {
  const int64_t rows = x.dimensions()[0], columns = x.dimensions()[1], pitch = pitch_of(rows);
  ffi::Error error = check("round_rows",
                           {{"x", x, {rows, columns}},
                            {"codes", *codes, {rows, columns}},
                            {"scales", *scales, {columns / kRoundGroup, pitch}, kElements}},
                           {{columns % kRoundGroup == 0, "x must have columns in 128s"}});
  if (error.failure() || rows == 0 || columns == 0) return error;
  const RoundRowsArgs args = {reinterpret_cast<const __nv_bfloat16*>(x.untyped_data()),
                              codes->typed_data(),
                              scales->typed_data(),
                              static_cast<int>(rows),
                              static_cast<int>(pitch),
                              static_cast<int>(columns)};
  return launched("round_rows", round_rows(args, stream));
}

ffi::Error dense_e4m3(cudaStream_t stream, Codes x, RowScales row_scales, ffi::Buffer<ffi::U8, 3> weights,
                      ffi::Buffer<ffi::U8, 2> scales, ffi::Result<ffi::AnyBuffer> out,
                      ffi::Result<RowScales> out_scales, int32_t groups, int32_t whole_rows, int32_t shape) {
  const int64_t rows = x.dimensions()[0], tiles = weights.dimensions()[0], blocks = weights.dimensions()[1];
  const int64_t weight_rows = tiles * kE4m3Rows, columns = blocks * kE4m3Columns, pitch = pitch_of(rows);
  constexpr int kTiles = kE4m3ScaleRows / kE4m3Rows;  // that share a row of scales
  const bool rounded = out->element_type() == ffi::U8;
  ffi::Error error =
      check("dense_e4m3",
            {{"x", x, {rows, groups * columns}},
             {"row_scales", row_scales, {groups * blocks, pitch}},
             {"weights", weights, {tiles, blocks, kE4m3Tile}},
             {"scales", scales, {(tiles + kTiles - 1) / kTiles, blocks}, kElements},
             {"out", *out, {rows, weight_rows}, kVectors, {ffi::BF16, ffi::F32, ffi::U8}},
             {"out_scales", *out_scales, {rounded ? weight_rows / kRoundGroup : 0, pitch}, kElements}},
            {{groups >= 1 && weight_rows % (groups * kE4m3Rows) == 0, "weights must have rows in 64s, of each group"},
             {!rounded || weight_rows % (groups * kRoundGroup) == 0, "rounded results must be 128s, of each group"},
             {whole_rows >= weight_rows, "the whole matrix must not have fewer rows"}});
  if (error.failure() || rows == 0 || weight_rows == 0 || columns == 0) return error;
  const E4m3Args args = {row_scales.typed_data(),
                         weights.typed_data(),
                         scales.typed_data(),
                         out->untyped_data(),
                         static_cast<int>(rows),
                         static_cast<int>(pitch),
                         static_cast<int>(weight_rows),
                         static_cast<int>(columns),
                         groups,
                         out->element_type() == ffi::F32,
                         rounded ? out_scales->typed_data() : nullptr};
  // A share of a matrix's rows is cut along K as the whole is: the same bits on any number of devices.
  E4m3Choice choice;
  choice.shape = shape;
  return launched("dense_e4m3",
                  launch_e4m3(args, x.typed_data(), e4m3_parts(whole_rows, args.columns), choice, stream));
}

}  // namespace

DSV4_HANDLER(dense_e4m3, dsv4_round_rows, round_rows_of,
             on_stream().Arg<ffi::Buffer<ffi::BF16, 2>>().Ret<Codes>().Ret<RowScales>());
DSV4_HANDLER(dense_e4m3, dsv4_dense_e4m3, dense_e4m3,
             on_stream()
                 .Arg<Codes>()
                 .Arg<RowScales>()
                 .Arg<ffi::Buffer<ffi::U8, 3>>()
                 .Arg<ffi::Buffer<ffi::U8, 2>>()
                 .Ret<ffi::AnyBuffer>()
                 .Ret<RowScales>()
                 .Attr<int32_t>("groups")
                 .Attr<int32_t>("whole_rows")
                 .Attr<int32_t>("shape"));

}  // namespace dsv4
