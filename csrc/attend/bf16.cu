// attend over bf16 rows as an XLA FFI handler and as a plain C call. One launch, only enqueues: fit for a command
// buffer. Wrapper, argument meaning and fallbacks: dsv4_jax/cuda/attend.py.
#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "attend/bf16_kernel.cuh"
#include "common/alignment.h"
#include "common/built_for.h"
#include "common/tensor_map.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

cudaError_t launch(const dsv4::AttendRowsArgs& args, int blocks, int splits, dsv4::Cut cut, cudaStream_t stream) {
  const dsv4::AttendArgs& a = args.attend;
  if (a.tokens == 0 || a.heads == 0) return cudaSuccess;
  dsv4::RowsWork work;
  work.head_blocks = (a.heads + dsv4::kHeads - 1) / dsv4::kHeads;
  work.units = a.tokens * work.head_blocks;
  work.window_tiles = (a.window_keys + dsv4::kTile - 1) / dsv4::kTile;
  work.splits = splits;
  work.cut = cut;
  dsv4::RowsMaps maps = {};
  const auto pool = [](const dsv4::Rows& rows, CUtensorMap& map) {
    return dsv4::map_matrices(rows.nope, 2, 1, rows.rows, dsv4::kDim, dsv4::kWarpRows, &map);
  };
  cudaError_t error = dsv4::map_matrices(a.queries, 3, a.tokens, a.heads, dsv4::kDim, dsv4::kWarpRows, &maps.queries);
  if (error == cudaSuccess) error = pool(a.window, maps.window);
  if (error == cudaSuccess) error = pool(a.entries, maps.entries);
  if (error != cudaSuccess) return error;
  const dim3 grid(std::min(blocks, work.units));
  return dsv4::start(dsv4::attend_rows_kernel, {grid, dsv4::kRowsThreads, sizeof(dsv4::RowsShared)}, dsv4::follows,
                     stream, args, maps, work);
}

using Pool = ffi::AnyBuffer;  // [rows, 512] of bf16, or their bits
using Ids = ffi::Buffer<ffi::S32, 2>;
using Counts = ffi::Buffer<ffi::S32, 1>;
using Flags = ffi::Buffer<ffi::PRED, 2>;
using Queries = ffi::Buffer<ffi::BF16, 3>;
using Sink = ffi::Buffer<ffi::F32, 1>;
using Angles = ffi::Buffer<ffi::F32, 2>;
using Lse = ffi::Buffer<ffi::F32, 2>;
using Sums = ffi::Buffer<ffi::U32, 3>;

dsv4::Rows rows_of(const Pool& pool) {
  return {static_cast<const uint8_t*>(pool.untyped_data()), nullptr, nullptr, static_cast<int>(pool.dimensions()[0])};
}

bool has_bf16_rows(const Pool& pool) {
  const bool bf16 = pool.element_type() == ffi::BF16 || pool.element_type() == ffi::U16;
  return bf16 && pool.dimensions().size() == 2 && pool.dimensions()[1] == dsv4::kDim;
}

ffi::Error attend_rows(cudaStream_t stream, Queries queries, Sink sink, Pool window, Ids window_ids,
                       Flags window_visible, Pool entries, Ids entry_ids, Counts entry_count, Angles cosine,
                       Angles sine, ffi::Result<ffi::AnyBuffer> out, ffi::Result<Lse> lse, ffi::Result<Sums> sums,
                       float scale, int32_t splits, int32_t most, int32_t least) {
  const auto wrong = [](const char* what) { return ffi::Error::InvalidArgument(std::string("attend_rows: ") + what); };
  const auto q = queries.dimensions(), w = window_ids.dimensions(), e = entry_ids.dimensions();
  if (q[2] != dsv4::kDim || !has_bf16_rows(window) || !has_bf16_rows(entries)) {
    return wrong("rows must be bf16 rows of 512 dims");
  }
  if (w[0] != q[0] || e[0] != q[0] || entry_count.dimensions()[0] != q[0] || sink.dimensions()[0] != q[1] ||
      window_visible.dimensions()[0] != w[0] || window_visible.dimensions()[1] != w[1]) {
    return wrong("shapes of queries, ids, counts and sink disagree");
  }
  const bool turn_back = cosine.element_count() != 0;
  for (const auto& angles : {cosine, sine}) {
    const auto a = angles.dimensions();
    if (turn_back ? a[0] != q[0] || a[1] != dsv4::kRopePairs : angles.element_count() != 0) {
      return wrong("cosine and sine must be [tokens, 32], or both empty");
    }
  }
  if (window.dimensions()[0] > INT32_MAX || entries.dimensions()[0] > INT32_MAX || lse->dimensions()[0] != q[0] ||
      lse->dimensions()[1] != q[1]) {
    return wrong("2^31 rows or more, or lse is not [tokens, heads]");
  }
  const bool bf16_out = out->element_type() == ffi::BF16;
  if ((!bf16_out && out->element_type() != ffi::F32) || out->element_count() != queries.element_count()) {
    return wrong("the output must have the shape of the queries, as float32 or bfloat16");
  }
  if (splits < 1 || splits > dsv4::kMostRuns) return wrong("splits must be 1 to 8");
  if (most < 1 || least < 1) return wrong("runs of no tiles, or no runs");
  const auto kept = sums->dimensions();
  if (kept[0] < 1 || kept[1] != splits - 1 || kept[2] * sizeof(uint32_t) != dsv4::kRunBytes) {
    return wrong("the sums must be uint32 [blocks, splits - 1, 16384]");
  }
  dsv4::AttendRowsArgs args = {};
  dsv4::AttendArgs& a = args.attend;
  a.queries = reinterpret_cast<const __nv_bfloat16*>(queries.untyped_data());
  a.sink = sink.typed_data();
  a.window = rows_of(window);
  a.entries = rows_of(entries);
  a.window_ids = window_ids.typed_data();
  a.window_visible = static_cast<const uint8_t*>(window_visible.untyped_data());
  a.entry_ids = entry_ids.typed_data();
  a.entry_count = entry_count.typed_data();
  a.out = out->untyped_data();
  a.lse = lse->typed_data();
  a.tokens = static_cast<int>(q[0]);
  a.heads = static_cast<int>(q[1]);
  a.window_keys = static_cast<int>(w[1]);
  a.entry_keys = static_cast<int>(e[1]);
  a.scale_log2 = scale * dsv4::kLog2e;
  a.cosine = turn_back ? cosine.typed_data() : nullptr;
  a.sine = turn_back ? sine.typed_data() : nullptr;
  a.bf16_out = bf16_out;
  args.sums = reinterpret_cast<uint4*>(sums->untyped_data());
  if (const std::string problem = dsv4::misaligned("attend_rows", {{"queries", a.queries},
                                                                   {"window", a.window.nope},
                                                                   {"entries", a.entries.nope},
                                                                   {"out", a.out},
                                                                   {"sums", args.sums}});
      !problem.empty())
    return ffi::Error::InvalidArgument(problem);
  const cudaError_t error = launch(args, static_cast<int>(kept[0]), splits, {most, least}, stream);
  if (error != cudaSuccess) return ffi::Error::Internal(std::string("attend_rows: ") + cudaGetErrorString(error));
  return ffi::Error::Success();
}

}  // namespace

DSV4_BUILT_FOR(attend_rows);
DSV4_ARGS_SIZE(attend_rows, dsv4::AttendRowsArgs)

XLA_FFI_DEFINE_HANDLER_SYMBOL(Dsv4AttendRows, attend_rows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
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
                                  .Ret<Lse>()
                                  .Ret<Sums>()
                                  .Attr<float>("scale")
                                  .Attr<int32_t>("splits")
                                  .Attr<int32_t>("most")
                                  .Attr<int32_t>("least"),
                              {ffi::Traits::kCmdBufferCompatible});

// The launch alone, for timing without XLA. Returns a cudaError_t.
extern "C" int dsv4_attend_rows_launch(const dsv4::AttendRowsArgs* args, int blocks, int splits, int most, int least,
                                       cudaStream_t stream) {
  return static_cast<int>(launch(*args, blocks, splits, {most, least}, stream));
}
