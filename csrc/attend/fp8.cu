// attend as an XLA FFI handler. One launch, or two for splits with clusters of their own; only
// enqueues: fit for a command buffer. Wrapper, argument meaning and fallbacks: dsv4_jax/cuda/attend.py.
#include <cuda_runtime.h>

#include "attend/kernel.cuh"
#include "attend/operands.h"
#include "attend/wide_kernel.cuh"

namespace dsv4 {
namespace {

namespace ffi = xla::ffi;

// `blocks` share a split: one; four of each of two splits, in a cluster; or eight, a split then having its own cluster.
cudaError_t launch(const AttendArgs& args, int splits, int blocks, Cut cut, cudaStream_t stream) {
  if (args.tokens == 0 || args.heads == 0) return cudaSuccess;
  const int head_blocks = (args.heads + kHeads - 1) / kHeads;
  const unsigned units = static_cast<unsigned>(args.tokens) * head_blocks;
  const auto wide = [&](auto kernel, int shared, unsigned clusters) {
    return start(kernel, {{kMaxCluster, clusters, units}, kWideThreads, shared, kMaxCluster}, follows, stream, args,
                 cut, head_blocks);
  };
  if (blocks == 4) return wide(attend_wide_kernel<4, false>, sizeof(WideShared<4>), 1);
  constexpr int kEight = sizeof(WideShared<8>);
  if (blocks == 8 && splits == 1) return wide(attend_wide_kernel<8, false>, kEight, 1);
  if (blocks == 8) {
    const cudaError_t error = wide(attend_wide_kernel<8, true>, kEight, splits);
    if (error != cudaSuccess) return error;
    const dim3 grid(kSliceCount * kSliceVectors, units);
    return start(attend_wide_runs_kernel, {grid, kWarpgroup}, true, stream, args, splits, head_blocks);
  }
  const unsigned cluster = splits;
  const dim3 grid(units * cluster);
  return start(attend_kernel, {grid, kThreads, sizeof(Shared), cluster}, follows, stream, args, splits, cut,
               head_blocks);
}

using Bytes = ffi::Buffer<ffi::U8, 2>;
using Halves = ffi::Buffer<ffi::U16, 2>;

ffi::Error check_rows(const char* nope_name, const char* rope_name, const char* scale_name, const Bytes& nope,
                      const Halves& rope, const Bytes& scale, Rows& rows) {
  const int64_t count = nope.dimensions()[0];
  rows = {nope.typed_data(), rope.typed_data(), scale.typed_data(), static_cast<int>(count)};
  return check(
      "attend",
      {{nope_name, nope, {count, kNope}}, {rope_name, rope, {count, kRope}}, {scale_name, scale, {count, kScales}}},
      {{count <= INT32_MAX, "2^31 rows or more"}});
}

ffi::Error attend(cudaStream_t stream, Queries queries, Sink sink, Bytes window_nope, Halves window_rope,
                  Bytes window_scale, Ids window_ids, Flags window_visible, Bytes entry_nope, Halves entry_rope,
                  Bytes entry_scale, Ids entry_ids, Counts entry_count, Angles cosine, Angles sine, Out out, Lse lse,
                  SumsResult sums, float scale, int32_t splits, int32_t blocks, int32_t most, int32_t least) {
  AttendArgs args = {};
  const Cut cut = {most, least};
  ffi::Error error = read_attend(
      "attend", {queries, sink, window_ids, window_visible, entry_ids, entry_count, cosine, sine, out, lse, sums},
      scale, splits, cut, args);
  if (error.success())
    error =
        check_rows("window_nope", "window_rope", "window_scale", window_nope, window_rope, window_scale, args.window);
  if (error.success())
    error = check_rows("entry_nope", "entry_rope", "entry_scale", entry_nope, entry_rope, entry_scale, args.entries);
  if (error.failure()) return error;
  const int64_t units = int64_t{args.tokens} * ((args.heads + kHeads - 1) / kHeads);
  if (blocks == 8 && splits > 1) error = check("attend", {{"sums", *sums, {units, splits, kSplitWords}}});
  if (error.success())
    error = check("attend", {{"out", *out, {kAny, kAny, kDim}, kVectors, {ffi::BF16, ffi::F32}}},
                  {{blocks == 1 || blocks == 8 || (blocks == 4 && splits == 2),
                    "a split has one block or eight, or each of two splits four"},
                   {blocks == 1 || units <= kMaxUnits, "too many tokens for several blocks a split"}});
  if (error.failure()) return error;
  args.sums = reinterpret_cast<uint4*>(sums->untyped_data());
  return launched("attend", launch(args, splits, blocks, cut, stream));
}

}  // namespace

DSV4_HANDLER(attend, dsv4_attend, attend,
             on_stream()
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
                 .Ret<LseBuffer>()
                 .Ret<SumsBuffer>()
                 .Attr<float>("scale")
                 .Attr<int32_t>("splits")
                 .Attr<int32_t>("blocks")
                 .Attr<int32_t>("most")
                 .Attr<int32_t>("least"));

}  // namespace dsv4
