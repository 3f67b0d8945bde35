// The experts' products as an XLA FFI handler and as a plain C call. Four launches (three for a single token), only
// enqueued: fit for a command buffer. Wrapper and argument meaning: dsv4_jax/cuda/moe.py.
#include <cuda_runtime.h>

#include <algorithm>
#include <string>
#include <tuple>

#include "common/alignment.h"
#include "common/built_for.h"
#include "common/device.h"
#include "moe/experts_kernel.cuh"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

constexpr int kRowWarps = 4;  // that copy a row, where there are few

template <typename Shape>
cudaError_t launch_with(const dsv4::MoeArgs& args, cudaStream_t stream) {
  constexpr int kGroupRows = dsv4::kWeightRows * Shape::kGroups;  // weights' rows of an item
  const int pairs = args.tokens * args.top, per_block = dsv4::kListWarps, sms = dsv4::multiprocessors();
  if (2 * args.inter % kGroupRows != 0 || args.hidden % kGroupRows != 0) return cudaErrorInvalidValue;
  const bool one = args.tokens == 1;  // needs no lists
  if (!one) {
    // Few rows are copied by several warps each.
    const bool few = pairs <= dsv4::kFewPairs;
    const int list_blocks = min(2 * sms, (pairs * (few ? kRowWarps : 1) + per_block - 1) / per_block);
    const cudaError_t error = dsv4::start(few ? dsv4::moe_lists_kernel<kRowWarps> : dsv4::moe_lists_kernel<1>,
                                          {dim3(list_blocks), dsv4::kListThreads, dsv4::list_bytes(pairs)},
                                          dsv4::follows, stream, args, Shape::kRows);
    if (error != cudaSuccess) return error;
  }
  const auto product = [&](auto kernel, int row_tiles, bool early) {
    const int blocks = min(static_cast<int64_t>(sms) * Shape::kBlocks, static_cast<int64_t>(pairs) * row_tiles);
    return dsv4::start(kernel, {dim3(blocks), Shape::kThreads, Shape::kSharedBytes}, early, stream, args);
  };
  cudaError_t error = product(dsv4::moe_kernel<Shape, true>, 2 * args.inter / kGroupRows, !one || dsv4::follows);
  if (error != cudaSuccess) return error;
  error = product(dsv4::moe_kernel<Shape, false>, args.hidden / kGroupRows, true);
  if (error != cudaSuccess) return error;
  const dim3 grid(args.tokens, (args.hidden / dsv4::kSumColumns + dsv4::kSumThreads - 1) / dsv4::kSumThreads);
  return dsv4::start(dsv4::moe_sum_kernel, {grid, dsv4::kSumThreads}, true, stream, args);
}

// Warpgroups, rows of an item, tiles of a stage, stages, blocks an SM, window, products by warp: from the fewest rows
// to the most.
constexpr int kSizeStep = 256;  // of hidden and inter
using Shapes = std::tuple<dsv4::MoeShape<1, 8, 2, 5, 3, 2, true>, dsv4::MoeShape<4, 8, 2, 5, 1, 2, true>,
                          dsv4::MoeShape<2, 8, 2, 2, 4>, dsv4::MoeShape<4, 16, 2, 2, 2>, dsv4::MoeShape<4, 32, 2, 4, 1>,
                          dsv4::MoeShape<4, 64, 2, 3, 1>>;
constexpr int kShapes = std::tuple_size_v<Shapes>;

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

template <int kShape = 1>
cudaError_t launch_shape(const dsv4::MoeArgs& args, int shape, cudaStream_t stream) {
  if constexpr (kShape <= kShapes) {
    if (shape == kShape) return launch_with<std::tuple_element_t<kShape - 1, Shapes>>(args, stream);
    return launch_shape<kShape + 1>(args, shape, stream);
  }
  return cudaErrorInvalidValue;
}

// `shape` 0: chosen here; the others are for timing. Which it is changes no bit of the result.
cudaError_t launch(const dsv4::MoeArgs& args, int shape, cudaStream_t stream) {
  const int64_t pairs = static_cast<int64_t>(args.tokens) * args.top;
  if (pairs == 0) return cudaSuccess;
  if (args.experts > dsv4::kMaxExperts || args.top > dsv4::kMostTop || pairs > dsv4::kMostPairs ||
      args.hidden % kSizeStep != 0 || args.inter % kSizeStep != 0) {
    return cudaErrorInvalidValue;
  }
  return launch_shape(args, shape == 0 ? choose_shape(pairs, pairs / std::max(args.routed, 1)) : shape, stream);
}

size_t workspace(const dsv4::MoeArgs& args) {
  size_t bytes = 0;
  dsv4::moe_work(args, &bytes);
  return bytes;
}

using Rows = ffi::Buffer<ffi::BF16, 2>;
using Chosen = ffi::Buffer<ffi::S32, 2>;
using Floats = ffi::Buffer<ffi::F32, 2>;
using Weights = ffi::Buffer<ffi::U8, 4>;
using Bytes = ffi::Buffer<ffi::U8, 1>;

ffi::Error moe(cudaStream_t stream, Rows x, Chosen chosen, Floats share, Weights gate_up, Weights down,
               ffi::Result<Floats> out, ffi::Result<Bytes> work, int32_t first, int32_t routed, float limit) {
  const int64_t tokens = x.dimensions()[0], hidden = x.dimensions()[1], top = chosen.dimensions()[1];
  const int64_t experts = gate_up.dimensions()[0], inter = down.dimensions()[2] * dsv4::kWeightColumns;
  const auto is = [](const auto& buffer, auto... sizes) {
    const int64_t want[] = {sizes...};
    for (size_t i = 0; i < sizeof...(sizes); ++i) {
      if (buffer.dimensions()[i] != want[i]) return false;
    }
    return true;
  };
  const int64_t tile = dsv4::kTileBytes, rows = dsv4::kWeightRows, columns = dsv4::kWeightColumns;
  const dsv4::MoeArgs args = {reinterpret_cast<const __nv_bfloat16*>(x.untyped_data()),
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
  if (!is(chosen, tokens, top) || !is(share, tokens, top) || !is(*out, tokens, hidden) || hidden % kSizeStep != 0 ||
      inter % kSizeStep != 0 || !is(gate_up, experts, 2 * inter / rows, hidden / columns, tile) ||
      !is(down, experts, hidden / rows, inter / columns, tile) || experts > dsv4::kMaxExperts || top > dsv4::kMostTop ||
      tokens * top > dsv4::kMostPairs || work->dimensions()[0] < static_cast<int64_t>(workspace(args))) {
    return ffi::Error::InvalidArgument(
        "moe: sizes in 256s, at most 512 experts, 16 of them a token and 98304 pairs of both; shapes must agree");
  }
  if (const std::string problem = dsv4::misaligned(
          "moe",
          {{"x", args.x}, {"gate_up", args.gate_up}, {"down", args.down}, {"out", args.out}, {"work", args.work}});
      !problem.empty())
    return ffi::Error::InvalidArgument(problem);
  const cudaError_t error = launch(args, 0, stream);
  if (error != cudaSuccess) return ffi::Error::Internal(std::string("moe: ") + cudaGetErrorString(error));
  return ffi::Error::Success();
}

}  // namespace

DSV4_BUILT_FOR(moe);
DSV4_ARGS_SIZE(moe, dsv4::MoeArgs)

XLA_FFI_DEFINE_HANDLER_SYMBOL(Dsv4Moe, moe,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<Rows>()
                                  .Arg<Chosen>()
                                  .Arg<Floats>()
                                  .Arg<Weights>()
                                  .Arg<Weights>()
                                  .Ret<Floats>()
                                  .Ret<Bytes>()
                                  .Attr<int32_t>("first")
                                  .Attr<int32_t>("routed")
                                  .Attr<float>("limit"),
                              {ffi::Traits::kCmdBufferCompatible});

// Bytes of the workspace of a call; the pointers are not looked at.
extern "C" int64_t dsv4_moe_workspace(const dsv4::MoeArgs* args) { return static_cast<int64_t>(workspace(*args)); }

// The launch alone, for timing without XLA. Returns a cudaError_t.
extern "C" int dsv4_moe_launch(const dsv4::MoeArgs* args, int shape, cudaStream_t stream) {
  return static_cast<int>(launch(*args, shape, stream));
}
