// The experts' products as an XLA FFI handler. Four launches (three for a single token), only
// enqueued: fit for a command buffer. Wrapper and argument meaning: dsv4_jax/cuda/moe.py.
#include <cuda_runtime.h>

#include <algorithm>
#include "common/device.h"
#include "common/shapes.h"
#include "moe/experts_kernel.cuh"
#include "moe/operands.h"

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
  return sum_parts<FloatParts>(args, moe_work(args, nullptr).parts, stream);
}

// Warpgroups, rows of an item, tiles of a stage, stages, blocks an SM, window, products by warp: from the fewest rows
// to the most.
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

ffi::Error moe(cudaStream_t stream, decltype(MoeOperands::x) x, decltype(MoeOperands::chosen) chosen,
               decltype(MoeOperands::share) share, decltype(MoeOperands::gate_up) gate_up,
               decltype(MoeOperands::down) down, decltype(MoeOperands::out) out, decltype(MoeOperands::work) work,
               int32_t first, int32_t routed, float limit) {
  MoeArgs args = {};
  MoeOperands given = {x, chosen, share, gate_up, down, out, work};
  const ffi::Error error = read_moe("moe", given, first, routed, limit, moe_work, args);
  if (out->element_type() != ffi::F32) return refusal("moe", "out must be float32");
  const int64_t pairs = int64_t{args.tokens} * args.top;
  if (error.failure() || pairs == 0) return error;
  const int shape = choose_shape(pairs, pairs / std::max(args.routed, 1));
  return launched("moe", with_shape<Shapes>(shape, [&](auto of) { return launch_with<decltype(of)>(args, stream); }));
}

}  // namespace

DSV4_HANDLER(moe, dsv4_moe, moe, on_experts());

}  // namespace dsv4
