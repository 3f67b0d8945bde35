// The experts' products as an XLA FFI handler. Four launches (three for a single token), only
// enqueued: fit for a command buffer. Wrapper and argument meaning: dsv4_jax/cuda/moe.py.
#include <cuda_runtime.h>

#include <algorithm>
#include "common/device.h"
#include "common/handler.h"
#include "common/shapes.h"
#include "moe/experts_kernel.cuh"

namespace dsv4 {
namespace {

namespace ffi = xla::ffi;

constexpr int kRowWarps = 4;  // that copy a row, where there are few

template <typename Shape>
cudaError_t launch_with(const MoeArgs& args, cudaStream_t stream) {
  constexpr int kGroupRows = kWeightRows * Shape::kGroups;  // weights' rows of an item
  const int pairs = args.tokens * args.top, per_block = kListWarps, sms = multiprocessors();
  if (2 * args.inter % kGroupRows != 0 || args.hidden % kGroupRows != 0) return cudaErrorInvalidValue;
  const bool one = args.tokens == 1;  // needs no lists
  if (!one) {
    // Few rows are copied by several warps each.
    const bool few = pairs <= kFewPairs;
    const int list_blocks = min(2 * sms, (pairs * (few ? kRowWarps : 1) + per_block - 1) / per_block);
    const cudaError_t error =
        start(few ? moe_lists_kernel<kRowWarps> : moe_lists_kernel<1>,
              {dim3(list_blocks), kListThreads, list_bytes(pairs)}, follows, stream, args, Shape::kRows);
    if (error != cudaSuccess) return error;
  }
  const auto product = [&](auto kernel, int row_tiles, bool early) {
    const int blocks = min(static_cast<int64_t>(sms) * Shape::kBlocks, static_cast<int64_t>(pairs) * row_tiles);
    return start(kernel, {dim3(blocks), Shape::kThreads, Shape::kSharedBytes}, early, stream, args);
  };
  cudaError_t error = product(moe_kernel<Shape, true>, 2 * args.inter / kGroupRows, !one || follows);
  if (error != cudaSuccess) return error;
  error = product(moe_kernel<Shape, false>, args.hidden / kGroupRows, true);
  if (error != cudaSuccess) return error;
  const dim3 grid(args.tokens, (args.hidden / kSumColumns + kSumThreads - 1) / kSumThreads);
  return start(moe_sum_kernel<FloatParts>, {grid, kSumThreads}, true, stream, args);
}

// Warpgroups, rows of an item, tiles of a stage, stages, blocks an SM, window, products by warp: from the fewest rows
// to the most.
constexpr int kSizeStep = 256;  // of hidden and inter
using Shapes = std::tuple<MoeShape<1, 8, 2, 5, 3, 2, true>, MoeShape<4, 8, 2, 5, 1, 2, true>, MoeShape<2, 8, 2, 2, 4>,
                          MoeShape<4, 16, 2, 2, 2>, MoeShape<4, 32, 2, 4, 1>, MoeShape<4, 64, 2, 3, 1>>;

// The number, from 1 on, of the shape for so many pairs and rows of an expert on average; few items are cut smaller.
int choose_shape(int64_t pairs, int64_t rows) {
  constexpr int64_t kPairLimits[] = {12, 48}, kRowLimits[] = {5, 10, 28};
  int shape = 1;
  for (const int64_t most : kPairLimits) {
    if (pairs <= most) return shape;
    ++shape;
  }
  for (const int64_t most : kRowLimits) {
    if (rows <= most) return shape;
    ++shape;
  }
  return shape;
}

using Rows = ffi::Buffer<ffi::BF16, 2>;
using Chosen = ffi::Buffer<ffi::S32, 2>;
using Floats = ffi::Buffer<ffi::F32, 2>;
using Weights = ffi::Buffer<ffi::U8, 4>;
using Bytes = ffi::Buffer<ffi::U8, 1>;

ffi::Error moe(cudaStream_t stream, Rows x, Chosen chosen, Floats share, Weights gate_up, Weights down,
               ffi::Result<Floats> out, ffi::Result<Bytes> work, int32_t first, int32_t routed, float limit) {
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
          check("moe",
                {{"x", x, {tokens, hidden}},
                 {"chosen", chosen, {tokens, top}, kElements},
                 {"share", share, {tokens, top}, kElements},
                 {"gate_up", gate_up, {experts, 2 * inter / rows, hidden / columns, tile}},
                 {"down", down, {experts, hidden / rows, inter / columns, tile}},
                 {"out", *out, {tokens, hidden}},
                 {"work", *work, {kAny}}},
                {{hidden % kSizeStep == 0 && inter % kSizeStep == 0, "sizes must be in 256s"},
                 {experts <= kMaxExperts, "at most 512 experts"},
                 {top <= kMaxTop && pairs <= kMaxPairs, "at most 16 experts of a token, and 98304 pairs of both"}});
      error.failure())
    return error;
  size_t work_bytes = 0;
  moe_work(args, &work_bytes);
  if (work->element_count() < work_bytes) return refusal("moe", "work is too small");
  if (pairs == 0) return ffi::Error::Success();
  const int shape = choose_shape(pairs, pairs / std::max(args.routed, 1));
  return launched("moe", with_shape<Shapes>(shape, [&](auto of) { return launch_with<decltype(of)>(args, stream); }));
}

}  // namespace

DSV4_HANDLER(moe, dsv4_moe, moe,
             on_stream()
                 .Arg<Rows>()
                 .Arg<Chosen>()
                 .Arg<Floats>()
                 .Arg<Weights>()
                 .Arg<Weights>()
                 .Ret<Floats>()
                 .Ret<Bytes>()
                 .Attr<int32_t>("first")
                 .Attr<int32_t>("routed")
                 .Attr<float>("limit"));

}  // namespace dsv4
