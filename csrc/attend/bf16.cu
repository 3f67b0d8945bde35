// attend over bf16 rows as an XLA FFI handler. One launch, only enqueues: fit for a command
// buffer. Wrapper, argument meaning and fallbacks: dsv4_jax/cuda/attend.py.
#include <cuda_runtime.h>

#include <algorithm>
#include "attend/bf16_kernel.cuh"
#include "attend/operands.h"
#include "common/tensor_map.h"

namespace dsv4 {
namespace {

namespace ffi = xla::ffi;

cudaError_t launch(const AttendRowsArgs& args, int blocks, int splits, Cut cut, cudaStream_t stream) {
  const AttendArgs& a = args.attend;
  if (a.tokens == 0 || a.heads == 0) return cudaSuccess;
  RowsWork work;
  work.head_blocks = (a.heads + kHeads - 1) / kHeads;
  work.units = a.tokens * work.head_blocks;
  work.window_tiles = (a.window_keys + kTile - 1) / kTile;
  work.splits = splits;
  work.cut = cut;
  RowsMaps maps = {};
  const auto pool = [](const Rows& rows, CUtensorMap& map) {
    return map_matrices(rows.nope, 2, 1, rows.rows, kDim, kWarpRows, &map);
  };
  cudaError_t error = map_matrices(a.queries, 3, a.tokens, a.heads, kDim, kWarpRows, &maps.queries);
  if (error == cudaSuccess) error = pool(a.window, maps.window);
  if (error == cudaSuccess) error = pool(a.entries, maps.entries);
  if (error != cudaSuccess) return error;
  const dim3 grid(std::min(blocks, work.units));
  return start(args.scales != nullptr ? attend_rows_kernel<true> : attend_rows_kernel<false>,
               {grid, kRowsThreads, sizeof(RowsShared)}, follows, stream, args, maps, work);
}

using Scales = ffi::Buffer<ffi::F32, 2>;
using Pool = ffi::AnyBuffer;  // [rows, 512] of bf16, or their bits

Rows rows_of(const Pool& pool) {
  return {static_cast<const uint8_t*>(pool.untyped_data()), nullptr, nullptr, static_cast<int>(pool.dimensions()[0])};
}

ffi::Error attend_rows(cudaStream_t stream, Queries queries, Sink sink, Pool window, Ids window_ids,
                       Flags window_visible, Pool entries, Ids entry_ids, Counts entry_count, Angles cosine,
                       Angles sine, Out out, Lse lse, SumsResult sums, ffi::Result<Scales> scales, float scale,
                       int32_t splits, int32_t most, int32_t least) {
  AttendRowsArgs args = {};
  const Cut cut = {most, least};
  ffi::Error error = read_attend(
      "attend_rows", {queries, sink, window_ids, window_visible, entry_ids, entry_count, cosine, sine, out, lse, sums},
      scale, splits, cut, args.attend);
  const int64_t blocks = sums->dimensions()[0];
  const bool rounded = out->element_type() == ffi::U8;
  constexpr int64_t kPitchStep = 4;
  const int64_t pitch = (int64_t{args.attend.tokens} + kPitchStep - 1) / kPitchStep * kPitchStep;
  if (error.success())
    error = check("attend_rows",
                  {{"window", window, {kAny, kDim}, kVectors, {ffi::BF16, ffi::U16}},
                   {"entries", entries, {kAny, kDim}, kVectors, {ffi::BF16, ffi::U16}},
                   {"out", *out, {kAny, kAny, kDim}, kVectors, {ffi::BF16, ffi::F32, ffi::U8}},
                   {"sums", *sums, {blocks, splits - 1, kSplitBytes / static_cast<int64_t>(sizeof(uint32_t))}},
                   {"scales", *scales, {rounded ? args.attend.heads * (kDim / kRoundGroup) : 0, pitch}, kElements}},
                  {{blocks >= 1, "sums must have room for a block"}});
  if (error.success())
    error = check("attend_rows", {},
                  {{window.dimensions()[0] <= INT32_MAX && entries.dimensions()[0] <= INT32_MAX, "2^31 rows or more"}});
  if (error.failure()) return error;
  args.attend.window = rows_of(window);
  args.attend.entries = rows_of(entries);
  args.sums = reinterpret_cast<uint4*>(sums->untyped_data());
  args.scales = rounded ? scales->typed_data() : nullptr;
  args.pitch = static_cast<int>(pitch);
  return launched("attend_rows", launch(args, static_cast<int>(blocks), splits, cut, stream));
}

}  // namespace

DSV4_HANDLER(attend_rows, dsv4_attend_rows, attend_rows,
             on_stream()
                 .Arg<Queries>()
                 .Arg<Sink>()
                 .Arg<Pool>()
                 .Arg<Ids>()
                 .Arg<Flags>()
                 .Arg<Pool>()
                 .Arg<Ids>()
                 .Arg<Counts>()
                 .Arg<Angles>()
                 .Arg<Angles>()
                 .Ret<ffi::AnyBuffer>()
                 .Ret<LseBuffer>()
                 .Ret<SumsBuffer>()
                 .Ret<Scales>()
                 .Attr<float>("scale")
                 .Attr<int32_t>("splits")
                 .Attr<int32_t>("most")
                 .Attr<int32_t>("least"));

}  // namespace dsv4
