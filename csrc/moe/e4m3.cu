// The experts' products with rows rounded to e4m3 as an XLA FFI handler. Five launches, only enqueued: fit for a
// command buffer. Wrapper and argument meaning: dsv4_jax/cuda/moe_e4m3.py.
#include <cuda_runtime.h>

#include <algorithm>

#include "common/device.h"
#include "common/shapes.h"
#include "moe/e4m3_kernel.cuh"
#include "moe/operands.h"

namespace dsv4 {
namespace {

namespace ffi = xla::ffi;

template <typename Shape>
cudaError_t launch_e4m3_with(const MoeArgs& args, cudaStream_t stream) {
  const int pairs = args.tokens * args.top, sms = multiprocessors();
  if (args.hidden % (Shape::kRun * kE4m3Columns) != 0 || args.inter % (Shape::kRun * kE4m3Columns) != 0)
    return cudaErrorInvalidValue;
  const MoeE4m3Work work = moe_e4m3_work(args, nullptr);
  const bool one = pairs <= kPlacePairs;  // block that places them
  const int blocks = one ? 1 : kMaxCluster, warps = one ? (pairs + kLanes - 1) / kLanes : kPlaceWarps;
  cudaError_t error =
      start(moe_e4m3_places_kernel,
            {dim3(blocks), warps * kLanes, place_bytes(pairs, blocks, warps), static_cast<unsigned>(blocks)}, follows,
            stream, args, work, Shape::kRows);
  if (error != cudaSuccess) return error;
  const auto list = [&](auto kernel, int tokens) {
    const dim3 grid((args.hidden + kListedThreads * kRoundOwn - 1) / (kListedThreads * kRoundOwn),
                    (args.tokens + tokens - 1) / tokens);
    return start(kernel, {grid, kListedThreads}, true, stream, args, work);
  };
  error = args.tokens <= kListedFew ? list(moe_e4m3_rows_kernel<1>, 1)
                                    : list(moe_e4m3_rows_kernel<kListedTokens>, kListedTokens);
  if (error != cudaSuccess) return error;
  const auto product = [&](auto kernel, int row_tiles) {
    const int blocks = std::min(static_cast<int64_t>(sms) * Shape::kBlocks, static_cast<int64_t>(pairs) * row_tiles);
    return start(kernel, {dim3(blocks), Shape::kThreads, Shape::kSharedBytes}, true, stream, args);
  };
  error = product(moe_e4m3_kernel<Shape, true>, 2 * args.inter / kItemRows);
  if (error != cudaSuccess) return error;
  error = product(moe_e4m3_kernel<Shape, false>, args.hidden / kItemRows);
  if (error != cudaSuccess) return error;
  return args.beside != nullptr ? sum_parts<RoundedParts, true>(args, work.parts, stream)
                                : sum_parts<RoundedParts>(args, work.parts, stream);
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

ffi::Error moe_e4m3(cudaStream_t stream, decltype(MoeOperands::x) x, decltype(MoeOperands::chosen) chosen,
                    decltype(MoeOperands::share) share, decltype(MoeOperands::gate_up) gate_up,
                    decltype(MoeOperands::down) down, decltype(MoeOperands::out) out, decltype(MoeOperands::work) work,
                    int32_t first, int32_t routed, float limit, ffi::Buffer<ffi::BF16, 2> beside, int32_t shape) {
  if (shape < 0 || shape > static_cast<int>(std::tuple_size_v<E4m3Shapes>)) return refusal("moe_e4m3", "no such shape");
  MoeArgs args = {};
  MoeOperands given = {x, chosen, share, gate_up, down, out, work};
  const ffi::Error error = read_moe("moe_e4m3", given, first, routed, limit, moe_e4m3_work, args);
  if (error.failure()) return error;
  const bool rounded = out->element_type() == ffi::BF16;
  const int64_t pairs = int64_t{args.tokens} * args.top;
  if (const ffi::Error wrong = check("moe_e4m3", {{"beside", beside, {rounded ? args.tokens : 0, args.hidden}}});
      wrong.failure() || pairs == 0)
    return wrong;
  if (rounded) args.beside = reinterpret_cast<const __nv_bfloat16*>(beside.untyped_data());
  const int taken = shape > 0 ? shape : choose_e4m3_shape(pairs / std::max(args.routed, 1));
  return launched("moe_e4m3",
                  with_shape<E4m3Shapes>(taken, [&](auto of) { return launch_e4m3_with<decltype(of)>(args, stream); }));
}

}  // namespace

DSV4_HANDLER(moe_e4m3, dsv4_moe_e4m3, moe_e4m3, on_experts().Arg<ffi::Buffer<ffi::BF16, 2>>().Attr<int32_t>("shape"));

}  // namespace dsv4
