// attend as an XLA FFI handler and as a plain C call. One launch, or two for runs with clusters of their own; only
// enqueues: fit for a command buffer. Wrapper, argument meaning and fallbacks: dsv4_jax/cuda/attend.py.
#include <cuda_runtime.h>

#include <string>

#include "attend/kernel.cuh"
#include "attend/wide_kernel.cuh"
#include "common/alignment.h"
#include "common/built_for.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

// `blocks` share a run: one; four of each of two runs, in a cluster; or eight, a run then having its own cluster.
cudaError_t launch(const dsv4::AttendArgs& args, int splits, int blocks, dsv4::Cut cut, cudaStream_t stream) {
  if (args.tokens == 0 || args.heads == 0) return cudaSuccess;
  const int head_blocks = (args.heads + dsv4::kHeads - 1) / dsv4::kHeads;
  const unsigned units = static_cast<unsigned>(args.tokens) * head_blocks;
  const auto wide = [&](auto kernel, int shared, unsigned clusters) {
    return dsv4::start(kernel, {{dsv4::kMaxCluster, clusters, units}, dsv4::kWideThreads, shared, dsv4::kMaxCluster},
                       dsv4::follows, stream, args, cut, head_blocks);
  };
  if (blocks == 4) return wide(dsv4::attend_wide_kernel<4, false>, sizeof(dsv4::WideShared<4>), 1);
  constexpr int kEight = sizeof(dsv4::WideShared<8>);
  if (blocks == 8 && splits == 1) return wide(dsv4::attend_wide_kernel<8, false>, kEight, 1);
  if (blocks == 8) {
    const cudaError_t error = wide(dsv4::attend_wide_kernel<8, true>, kEight, splits);
    if (error != cudaSuccess) return error;
    const dim3 grid(dsv4::kSliceCount * dsv4::kSliceVectors, units);
    return dsv4::start(dsv4::attend_wide_runs_kernel, {grid, dsv4::kWarpgroup}, true, stream, args, splits,
                       head_blocks);
  }
  const unsigned cluster = splits;
  const dim3 grid(units * cluster);
  return dsv4::start(dsv4::attend_kernel, {grid, dsv4::kThreads, sizeof(dsv4::Shared), cluster}, dsv4::follows, stream,
                     args, splits, cut, head_blocks);
}

using Bytes = ffi::Buffer<ffi::U8, 2>;
using Halves = ffi::Buffer<ffi::U16, 2>;
using Ids = ffi::Buffer<ffi::S32, 2>;
using Counts = ffi::Buffer<ffi::S32, 1>;
using Flags = ffi::Buffer<ffi::PRED, 2>;
using Queries = ffi::Buffer<ffi::BF16, 3>;
using Sink = ffi::Buffer<ffi::F32, 1>;
using Angles = ffi::Buffer<ffi::F32, 2>;
using Lse = ffi::Buffer<ffi::F32, 2>;
using Sums = ffi::Buffer<ffi::U32, 3>;

dsv4::Rows rows_of(const Bytes& nope, const Halves& rope, const Bytes& scale) {
  return {nope.typed_data(), rope.typed_data(), scale.typed_data(), static_cast<int>(nope.dimensions()[0])};
}

bool has_v4_widths(const Bytes& nope, const Halves& rope, const Bytes& scale) {
  const auto rows = nope.dimensions()[0];
  return nope.dimensions()[1] == dsv4::kNope && rope.dimensions()[1] == dsv4::kRope &&
         scale.dimensions()[1] == dsv4::kScales && rope.dimensions()[0] == rows && scale.dimensions()[0] == rows;
}

ffi::Error attend(cudaStream_t stream, Queries queries, Sink sink, Bytes window_nope, Halves window_rope,
                  Bytes window_scale, Ids window_ids, Flags window_visible, Bytes entry_nope, Halves entry_rope,
                  Bytes entry_scale, Ids entry_ids, Counts entry_count, Angles cosine, Angles sine,
                  ffi::Result<ffi::AnyBuffer> out, ffi::Result<Lse> lse, ffi::Result<Sums> sums, float scale,
                  int32_t splits, int32_t blocks, int32_t most, int32_t least) {
  const auto q = queries.dimensions();
  const auto w = window_ids.dimensions(), e = entry_ids.dimensions();
  if (q[2] != dsv4::kDim || !has_v4_widths(window_nope, window_rope, window_scale) ||
      !has_v4_widths(entry_nope, entry_rope, entry_scale)) {
    return ffi::Error::InvalidArgument("attend: rows must be fp8 rows of 448 + 64 dims");
  }
  if (w[0] != q[0] || e[0] != q[0] || entry_count.dimensions()[0] != q[0] || sink.dimensions()[0] != q[1] ||
      window_visible.dimensions()[0] != w[0] || window_visible.dimensions()[1] != w[1]) {
    return ffi::Error::InvalidArgument("attend: shapes of queries, ids, counts and sink disagree");
  }
  const bool turn_back = cosine.element_count() != 0;
  for (const auto& angles : {cosine, sine}) {
    const auto a = angles.dimensions();
    if (turn_back ? a[0] != q[0] || a[1] != dsv4::kRopePairs : angles.element_count() != 0) {
      return ffi::Error::InvalidArgument("attend: cosine and sine must be [tokens, 32], or both empty");
    }
  }
  if (window_nope.dimensions()[0] > INT32_MAX || entry_nope.dimensions()[0] > INT32_MAX ||
      lse->dimensions()[0] != q[0] || lse->dimensions()[1] != q[1]) {
    return ffi::Error::InvalidArgument("attend: 2^31 rows or more, or lse is not [tokens, heads]");
  }
  const int64_t units = q[0] * ((q[1] + dsv4::kHeads - 1) / dsv4::kHeads);
  const auto r = sums->dimensions();
  if (blocks == 8 && splits > 1 && (r[0] != units || r[1] != splits || r[2] != dsv4::kRunWords))
    return ffi::Error::InvalidArgument("attend: no room for the sums of runs");
  if (blocks > 1 && units > dsv4::kMostUnits) return ffi::Error::InvalidArgument("attend: too many tokens for this");
  const bool bf16_out = out->element_type() == ffi::BF16;
  if ((!bf16_out && out->element_type() != ffi::F32) || out->element_count() != queries.element_count()) {
    return ffi::Error::InvalidArgument("attend: the output must have the shape of the queries, as float32 or bfloat16");
  }
  if (splits < 1 || splits > dsv4::kMaxCluster) return ffi::Error::InvalidArgument("attend: splits must be 1 to 8");
  if (blocks != 1 && blocks != 8 && (blocks != 4 || splits != 2))
    return ffi::Error::InvalidArgument("attend: a run has one block or eight, or each of two runs four");
  if (most < 1 || least < 1) return ffi::Error::InvalidArgument("attend: runs of no tiles, or no runs");
  dsv4::AttendArgs args;
  args.queries = reinterpret_cast<const __nv_bfloat16*>(queries.untyped_data());
  args.sink = sink.typed_data();
  args.window = rows_of(window_nope, window_rope, window_scale);
  args.entries = rows_of(entry_nope, entry_rope, entry_scale);
  args.window_ids = window_ids.typed_data();
  args.window_visible = static_cast<const uint8_t*>(window_visible.untyped_data());
  args.entry_ids = entry_ids.typed_data();
  args.entry_count = entry_count.typed_data();
  args.out = out->untyped_data();
  args.lse = lse->typed_data();
  args.tokens = static_cast<int>(q[0]);
  args.heads = static_cast<int>(q[1]);
  args.window_keys = static_cast<int>(w[1]);
  args.entry_keys = static_cast<int>(e[1]);
  args.scale_log2 = scale * dsv4::kLog2e;
  args.cosine = turn_back ? cosine.typed_data() : nullptr;
  args.sine = turn_back ? sine.typed_data() : nullptr;
  args.bf16_out = bf16_out;
  args.sums = reinterpret_cast<uint4*>(sums->untyped_data());
  if (const std::string problem = dsv4::misaligned("attend", {{"queries", args.queries},
                                                              {"window_nope", args.window.nope},
                                                              {"window_rope", args.window.rope},
                                                              {"window_scale", args.window.scale},
                                                              {"entry_nope", args.entries.nope},
                                                              {"entry_rope", args.entries.rope},
                                                              {"entry_scale", args.entries.scale},
                                                              {"cosine", args.cosine},
                                                              {"sine", args.sine},
                                                              {"out", args.out},
                                                              {"sums", args.sums}});
      !problem.empty())
    return ffi::Error::InvalidArgument(problem);
  const cudaError_t error = launch(args, splits, blocks, {most, least}, stream);
  if (error != cudaSuccess) return ffi::Error::Internal(std::string("attend: ") + cudaGetErrorString(error));
  return ffi::Error::Success();
}

}  // namespace

DSV4_BUILT_FOR(attend);
DSV4_ARGS_SIZE(attend, dsv4::AttendArgs)

XLA_FFI_DEFINE_HANDLER_SYMBOL(Dsv4Attend, attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<Queries>()
                                  .Arg<Sink>()
                                  .Arg<Bytes>()
                                  .Arg<Halves>()
                                  .Arg<Bytes>()
                                  .Arg<Ids>()
                                  .Arg<Flags>()
                                  .Arg<Bytes>()
                                  .Arg<Halves>()
                                  .Arg<Bytes>()
                                  .Arg<Ids>()
                                  .Arg<Counts>()
                                  .Arg<Angles>()
                                  .Arg<Angles>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<Lse>()
                                  .Ret<Sums>()
                                  .Attr<float>("scale")
                                  .Attr<int32_t>("splits")
                                  .Attr<int32_t>("blocks")
                                  .Attr<int32_t>("most")
                                  .Attr<int32_t>("least"),
                              {ffi::Traits::kCmdBufferCompatible});

// The launch alone, for timing without XLA. Returns a cudaError_t.
extern "C" int dsv4_attend_launch(const dsv4::AttendArgs* args, int splits, int blocks, int most, int least,
                                  cudaStream_t stream) {
  return static_cast<int>(launch(*args, splits, blocks, {most, least}, stream));
}
