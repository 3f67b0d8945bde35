// What the handlers of attention over fp8 rows and over bf16 rows (attend/fp8.cu, attend/bf16.cu) have in common.
#pragma once

#include "attend/block.cuh"
#include "common/handler.h"

namespace dsv4 {

using Queries = xla::ffi::Buffer<xla::ffi::BF16, 3>;
using Sink = xla::ffi::Buffer<xla::ffi::F32, 1>;
using Ids = xla::ffi::Buffer<xla::ffi::S32, 2>;
using Flags = xla::ffi::Buffer<xla::ffi::PRED, 2>;
using Counts = xla::ffi::Buffer<xla::ffi::S32, 1>;
using Angles = xla::ffi::Buffer<xla::ffi::F32, 2>;
using Out = xla::ffi::Result<xla::ffi::AnyBuffer>;
using LseBuffer = xla::ffi::Buffer<xla::ffi::F32, 2>;
using SumsBuffer = xla::ffi::Buffer<xla::ffi::U32, 3>;
using Lse = xla::ffi::Result<LseBuffer>;
using SumsResult = xla::ffi::Result<SumsBuffer>;

// All operands and results but the rows.
struct AttendOperands {
  Queries& queries;
  Sink& sink;
  Ids& window_ids;
  Flags& window_visible;
  Ids& entry_ids;
  Counts& entry_count;
  Angles &cosine, &sine;
  Out& out;
  Lse& lse;
  SumsResult& sums;
};

// Checks what is no row, but for the output's element type, and fills `args` but for the rows.
inline xla::ffi::Error read_attend(const char* target, const AttendOperands& of, float scale, int32_t splits, Cut cut,
                                   AttendArgs& args) {
  const auto q = of.queries.dimensions();
  const int64_t tokens = q[0], heads = q[1], window = of.window_ids.dimensions()[1];
  const int64_t angles = of.cosine.element_count() != 0 ? tokens : 0;
  args.queries = reinterpret_cast<const __nv_bfloat16*>(of.queries.untyped_data());
  args.sink = of.sink.typed_data();
  args.window_ids = of.window_ids.typed_data();
  args.window_visible = static_cast<const uint8_t*>(of.window_visible.untyped_data());
  args.entry_ids = of.entry_ids.typed_data();
  args.entry_count = of.entry_count.typed_data();
  args.out = of.out->untyped_data();
  args.lse = of.lse->typed_data();
  args.tokens = static_cast<int>(tokens);
  args.heads = static_cast<int>(heads);
  args.window_keys = static_cast<int>(window);
  args.entry_keys = static_cast<int>(of.entry_ids.dimensions()[1]);
  args.scale_log2 = scale * kLog2e;
  args.cosine = angles != 0 ? of.cosine.typed_data() : nullptr;
  args.sine = angles != 0 ? of.sine.typed_data() : nullptr;
  args.bf16_out = of.out->element_type() == xla::ffi::BF16;
  return check(target,
               {{"queries", of.queries, {tokens, heads, kDim}},
                {"sink", of.sink, {heads}, kElements},
                {"window_ids", of.window_ids, {tokens, window}, kElements},
                {"window_visible", of.window_visible, {tokens, window}, kElements},
                {"entry_ids", of.entry_ids, {tokens, kAny}, kElements},
                {"entry_count", of.entry_count, {tokens}, kElements},
                {"cosine", of.cosine, {angles, angles != 0 ? kRopePairs : kAny}},
                {"sine", of.sine, {angles, angles != 0 ? kRopePairs : kAny}},
                {"out", *of.out, {tokens, heads, kDim}},
                {"lse", *of.lse, {tokens, heads}, kElements},
                {"sums", *of.sums, {kAny, kAny, kAny}}},
               {{splits >= 1 && splits <= kMaxCluster, "splits must be 1 to 8"},
                {cut.most >= 1 && cut.least >= 1, "splits of no tiles, or no splits"}});
}

}  // namespace dsv4
