// The experts' products with rows rounded to e4m3 as an XLA FFI handler. Five launches, only enqueued: fit for a
// command buffer. Wrapper and argument meaning: dsv4_jax/cuda/moe_e4m3.py.
#include <cuda_runtime.h>

#include <algorithm>

#include "common/device.h"
#include "common/handler.h"
#include "common/shapes.h"
#include "moe/e4m3_kernel.cuh"

namespace dsv4 {
namespace {

namespace ffi = xla::ffi;

template <typename Shape>
cudaError_t launch_e4m3_with(const MoeArgs& args, cudaStream_t stream) {
  const int pairs = args.tokens * args.top, sms = multiprocessors();
  if (args.hidden % (Shape::kRun * kE4m3Columns) != 0 || args.inter % (Shape::kRun * kE4m3Columns) != 0)
    return cudaErrorInvalidValue;
  const MoeE4m3Work work = moe_e4m3_work(args, nullptr);
  const RoundRowsArgs rows = {args.x, work.codes, work.scales, args.tokens, scale_pitch(args.tokens), args.hidden};
  cudaError_t error = round_rows(rows, stream);
  if (error != cudaSuccess) return error;
  const int list_blocks = std::min(2 * sms, (pairs + kListWarps - 1) / kListWarps);
  error = start(moe_e4m3_lists_kernel, {dim3(list_blocks), kListThreads}, true, stream, args, Shape::kRows);
  if (error != cudaSuccess) return error;
  const auto product = [&](auto kernel, int row_tiles) {
    const int blocks = std::min(static_cast<int64_t>(sms) * Shape::kBlocks, static_cast<int64_t>(pairs) * row_tiles);
    return start(kernel, {dim3(blocks), Shape::kThreads, Shape::kSharedBytes}, true, stream, args);
  };
  error = product(moe_e4m3_kernel<Shape, true>, 2 * args.inter / kItemRows);
  if (error != cudaSuccess) return error;
  error = product(moe_e4m3_kernel<Shape, false>, args.hidden / kItemRows);
  if (error != cudaSuccess) return error;
  const dim3 grid(args.tokens, (args.hidden / kSumColumns + kSumThreads - 1) / kSumThreads);
  return start(moe_sum_kernel<RoundedParts>, {grid, kSumThreads}, true, stream, args);
}

// Warpgroups, rows of an item, blocks an SM, stages, blocks of K of a stage: from the fewest rows to the most.
using E4m3Shapes = std::tuple<MoeE4m3Shape<4, 8, 1, 5, 2>, MoeE4m3Shape<4, 16, 1, 5, 2>, MoeE4m3Shape<4, 32, 1, 4, 2>,
                              MoeE4m3Shape<4, 64, 1, 3, 2>, MoeE4m3Shape<2, 120, 1, 5, 1>>;

// The number, from 1 on, of the shape for so many rows of an expert on average.
int choose_e4m3_shape(int64_t rows) {
  int shape = 1;
  for (const int64_t most : {4, 10, 24, 48}) {
    if (rows <= most) return shape;
    ++shape;
  }
  return shape;
}

using Rows = ffi::Buffer<ffi::BF16, 2>;
using Chosen = ffi::Buffer<ffi::S32, 2>;
using Matrix = ffi::Buffer<ffi::F32, 2>;
using Weights = ffi::Buffer<ffi::U8, 4>;
using Bytes = ffi::Buffer<ffi::U8, 1>;

ffi::Error moe_e4m3(cudaStream_t stream, Rows x, Chosen chosen, Matrix share, Weights gate_up, Weights down,
                    ffi::Result<Matrix> out, ffi::Result<Bytes> work, int32_t first, int32_t routed, float limit,
                    int32_t shape) {
  constexpr int64_t kSizeStep = 256;  // of hidden and inter
  const int64_t tokens = x.dimensions()[0], hidden = x.dimensions()[1], top = chosen.dimensions()[1];
  const int64_t experts = gate_up.dimensions()[0], inter = down.dimensions()[2] * kWeightColumns;
  const int64_t pairs = tokens * top, tile = kTileBytes, rows = kWeightRows, columns = kWeightColumns;
  const MoeArgs args = {reinterpret_cast<const __nv_bfloat16*>(x.untyped_data()),
                        chosen.typed_data(),
                        share.typed_data(),
                        gate_up.typed_data(),
                        down.typed_data(),
                        out->typed_data(),
                        work->typed_data(),
                        static_cast<int>(tokens),
                        static_cast<int>(top),
                        static_cast<int>(hidden),
                        static_cast<int>(inter),
                        static_cast<int>(experts),
                        first,
                        routed,
                        limit};
  if (const ffi::Error error =
          check("moe_e4m3",
                {{"x", x, {tokens, hidden}},
                 {"chosen", chosen, {tokens, top}, kElements},
                 {"share", share, {tokens, top}, kElements},
                 {"gate_up", gate_up, {experts, 2 * inter / rows, hidden / columns, tile}},
                 {"down", down, {experts, hidden / rows, inter / columns, tile}},
                 {"out", *out, {tokens, hidden}},
                 {"work", *work, {kAny}}},
                {{hidden % kSizeStep == 0 && inter % kSizeStep == 0, "sizes must be in 256s"},
                 {experts <= kMaxExperts, "at most 512 experts"},
                 {top <= kMaxTop && pairs <= kMaxPairs, "at most 16 experts of a token, and 98304 pairs of both"},
                 {shape >= 0 && shape <= static_cast<int>(std::tuple_size_v<E4m3Shapes>), "no such shape"}});
      error.failure())
    return error;
  size_t work_bytes = 0;
  moe_e4m3_work(args, &work_bytes);
  if (work->element_count() < work_bytes) return refusal("moe_e4m3", "work is too small");
  if (pairs == 0) return ffi::Error::Success();
  const int taken = shape > 0 ? shape : choose_e4m3_shape(pairs / std::max(args.routed, 1));
  return launched("moe_e4m3",
                  with_shape<E4m3Shapes>(taken, [&](auto of) { return launch_e4m3_with<decltype(of)>(args, stream); }));
}

}  // namespace

DSV4_HANDLER(moe_e4m3, dsv4_moe_e4m3, moe_e4m3,
             on_stream()
                 .Arg<Rows>()
                 .Arg<Chosen>()
                 .Arg<Matrix>()
                 .Arg<Weights>()
                 .Arg<Weights>()
                 .Ret<Matrix>()
                 .Ret<Bytes>()
                 .Attr<int32_t>("first")
                 .Attr<int32_t>("routed")
                 .Attr<float>("limit")
                 .Attr<int32_t>("shape"));

}  // namespace dsv4
