// What the handlers of the experts' products (moe/experts.cu, moe/e4m3.cu) have in common: their operands.
#pragma once

#include "common/handler.h"
#include "moe/lists.cuh"
#include "moe/weights.cuh"

namespace dsv4 {

struct MoeOperands {
  xla::ffi::Buffer<xla::ffi::BF16, 2> x;
  xla::ffi::Buffer<xla::ffi::S32, 2> chosen;
  xla::ffi::Buffer<xla::ffi::F32, 2> share;
  xla::ffi::Buffer<xla::ffi::U8, 4> gate_up, down;
  xla::ffi::Result<xla::ffi::AnyBuffer> out;  // float32, of moe/e4m3.cu also bf16
  xla::ffi::Result<xla::ffi::Buffer<xla::ffi::U8, 1>> work;
};

// Checks them and fills `args`; `lay_out` says of these where scratch memory has what, and how much is needed.
template <typename LayOut>
xla::ffi::Error read_moe(const char* target, MoeOperands& given, int32_t first, int32_t routed, float limit,
                         const LayOut& lay_out, MoeArgs& args) {
  constexpr int64_t kSizeStep = 256;  // of hidden and inter
  const int64_t tokens = given.x.dimensions()[0], hidden = given.x.dimensions()[1], top = given.chosen.dimensions()[1];
  const int64_t experts = given.gate_up.dimensions()[0], inter = given.down.dimensions()[2] * kWeightColumns;
  const int64_t pairs = tokens * top, tile = kTileBytes, rows = kWeightRows, columns = kWeightColumns;
  args = {reinterpret_cast<const __nv_bfloat16*>(given.x.untyped_data()),
          given.chosen.typed_data(),
          given.share.typed_data(),
          given.gate_up.typed_data(),
          given.down.typed_data(),
          given.out->untyped_data(),
          given.work->typed_data(),
          static_cast<int>(tokens),
          static_cast<int>(top),
          static_cast<int>(hidden),
          static_cast<int>(inter),
          static_cast<int>(experts),
          first,
          routed,
          limit,
          nullptr};
  const xla::ffi::Error error =
      check(target,
            {{"x", given.x, {tokens, hidden}},
             {"chosen", given.chosen, {tokens, top}, kElements},
             {"share", given.share, {tokens, top}, kElements},
             {"gate_up", given.gate_up, {experts, 2 * inter / rows, hidden / columns, tile}},
             {"down", given.down, {experts, hidden / rows, inter / columns, tile}},
             {"out", *given.out, {tokens, hidden}, kVectors, {xla::ffi::F32, xla::ffi::BF16}},
             {"work", *given.work, {kAny}}},
            {{hidden % kSizeStep == 0 && inter % kSizeStep == 0, "sizes must be in 256s"},
             {experts <= kMaxExperts, "at most 512 experts"},
             {top <= kMaxTop && pairs <= kMaxPairs, "at most 16 experts of a token, and 98304 pairs of both"}});
  if (error.failure()) return error;
  size_t bytes = 0;
  lay_out(args, &bytes);
  return given.work->element_count() < bytes ? refusal(target, "work is too small") : error;
}

// A handler's bindings, to which it adds its own attributes.
inline auto on_experts() {
  return on_stream()
      .Arg<decltype(MoeOperands::x)>()
      .Arg<decltype(MoeOperands::chosen)>()
      .Arg<decltype(MoeOperands::share)>()
      .Arg<decltype(MoeOperands::gate_up)>()
      .Arg<decltype(MoeOperands::down)>()
      .Ret<xla::ffi::AnyBuffer>()
      .Ret<xla::ffi::Buffer<xla::ffi::U8, 1>>()
      .Attr<int32_t>("first")
      .Attr<int32_t>("routed")
      .Attr<float>("limit");
}

}  // namespace dsv4
