// compress_csa and compress_hca as XLA FFI handlers. One launch each, only enqueue: fit for a command buffer. State and
// pools are aliased operands. Wrapper, argument meaning and fallbacks: dsv4_jax/cuda/compress.py.
#include <cuda_runtime.h>

#include "rows/compress_kernel.cuh"
#include "rows/operands.h"

namespace dsv4 {

// What a call says of a compressor: attributes by these names, a dictionary for each compressor.
struct CompressorAttributes {
  int32_t ratio, ordinal, slots, ring;
  int32_t base, rows_per_block, blocks;
  int32_t format;  // of its pool, a number of `Format`
  bool hadamard, bias;
  int32_t kv_column, score_column;  // the first of theirs
  float eps;
};

}  // namespace dsv4

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(dsv4::CompressorAttributes, StructMember<int32_t>("ratio"),
                                      StructMember<int32_t>("ordinal"), StructMember<int32_t>("slots"),
                                      StructMember<int32_t>("ring"), StructMember<int32_t>("base"),
                                      StructMember<int32_t>("rows_per_block"), StructMember<int32_t>("blocks"),
                                      StructMember<int32_t>("format"), StructMember<bool>("hadamard"),
                                      StructMember<bool>("bias"), StructMember<int32_t>("kv_column"),
                                      StructMember<int32_t>("score_column"), StructMember<float>("eps"));

namespace dsv4 {
namespace {

namespace ffi = xla::ffi;

// More tokens than this are a long chunk: a block or a warp takes the tokens of about one entry.
constexpr int kFewTokens = 1024;

CompressPlan read_plan(Operands& operands) {
  CompressPlan plan = {};
  plan.token_slot = operands.ids();
  plan.tokens = static_cast<int>(operands.rows());
  plan.token_position = operands.ids(plan.tokens);
  plan.token_seq = operands.ids(plan.tokens);
  plan.seq_start = operands.ids();
  plan.sequences = static_cast<int>(operands.rows());
  plan.seq_count = operands.ids(plan.sequences);
  plan.seq_first = operands.ids(plan.sequences);
  plan.table = operands.next<int32_t>(ffi::S32);
  plan.slots = static_cast<int>(operands.rows());
  plan.columns = static_cast<int>(operands.width());
  return plan;
}

// How a kind of compressor keeps its state.
struct StateShape {
  int parts;   // of E channels, in a row of state
  int halves;  // of E channels, in a token's kv and score
  int behind;  // old rows of state that a sequence of the plan brings in its history
};
constexpr StateShape kCsaState = {kCsaParts, kCsaHalves, kCsaBehind}, kHcaState = {kHcaParts, 1, 1};

Compressor read_compressor(Operands& operands, const CompressPlan& plan, const CompressorAttributes& of, bool history,
                           const StateShape& shape) {
  Compressor c = {};
  c.ratio = of.ratio, c.ordinal = of.ordinal, c.slots = of.slots, c.ring = of.ring;
  c.base = of.base, c.rows_per_block = of.rows_per_block, c.blocks = of.blocks;
  c.epilogue.hadamard = of.hadamard, c.epilogue.eps = of.eps;
  const int channels = of.format == static_cast<int>(Format::kFp8) ? kDim : kIndexDim;
  c.kv = operands.columns(of.kv_column, shape.halves * channels, &c.kv_stride, plan.tokens);
  c.score = operands.columns(of.score_column, shape.halves * channels, &c.score_stride, plan.tokens);
  if (of.bias) c.ape = operands.next<float>(ffi::F32, shape.halves * channels, c.ratio);
  read_epilogue(operands, c.epilogue, channels, plan.tokens);
  if (history) {
    c.history =
        operands.next<float>(ffi::F32, shape.parts * channels, static_cast<int64_t>(plan.sequences) * shape.behind);
  }
  c.state = operands.next<float>(ffi::F32, shape.parts * channels);
  const int64_t state_rows = operands.rows();
  c.pool = read_pool(operands, of.format);
  // Every id that the kernels take for valid must lie in the operands: the rest of that is theirs.
  const int64_t layer = static_cast<int64_t>(c.slots) * c.ring,
                blocks = static_cast<int64_t>(c.blocks) * c.rows_per_block;
  const bool sizes =
      c.ratio > 0 && c.ordinal >= 0 && c.slots > 0 && c.ring > 0 && c.base >= 0 && c.rows_per_block > 0 && c.blocks > 0;
  const bool fits = plan.sequences > 0 && plan.columns > 0 && plan.slots >= c.slots &&
                    (c.ordinal + 1) * layer <= state_rows && c.base + blocks <= c.pool.rows;
  if (plan.tokens > 0 && (!sizes || !fits)) {
    operands.refuse("the layer's slots and blocks do not fit the block table, the state or the pool");
  }
  return c;
}

// Attributes: `history`, and of the compressors that the layer has `main`, `index`, whose operands follow in this
// order.
ffi::Error compress_csa(cudaStream_t stream, ffi::RemainingArgs arguments, ffi::RemainingRets,
                        ffi::Dictionary attributes) {
  Operands operands(arguments);
  CsaArgs args = {};
  args.plan = read_plan(operands);
  const auto history = attributes.get<bool>("history");
  if (history.has_error()) return history.error();
  const struct {
    const char* name;
    Compressor* compressor;
    bool wide;  // KV rows, or index keys
  } kinds[] = {{"main", &args.main, true}, {"index", &args.index, false}};
  for (const auto& kind : kinds) {
    if (!attributes.contains(kind.name)) continue;
    const auto of = attributes.get<CompressorAttributes>(kind.name);
    if (of.has_error()) return of.error();
    const bool wide = of->format == static_cast<int>(Format::kFp8);
    if (of->ratio != kCsaRatio || of->ring < kCsaRows || wide != kind.wide) {
      return refusal("compress_csa",
                     "the ratio must be 4, the ring at least 8 rows, main an fp8 KV pool and index a pool of index "
                     "keys");
    }
    *kind.compressor = read_compressor(operands, args.plan, *of, *history, kCsaState);
  }
  if (!operands.good()) return refusal("compress_csa", operands.problem());
  const int tokens = args.plan.tokens;
  if (tokens == 0) return ffi::Error::Success();
  const int each = tokens > kFewTokens ? kCsaRatio : 1;
  const int blocks = (tokens + each - 1) / each;
  if (args.main.state != nullptr) args.main_blocks = blocks;
  const int warps = each == 1 ? 1 : kCompressWarps;  // of an index block, each with tokens of its own
  const int index_blocks = args.index.state != nullptr ? (blocks + warps - 1) / warps : 0;
  const auto kernel = each == 1 ? csa_kernel<1> : csa_kernel<kCsaRatio>;
  kernel<<<args.main_blocks + index_blocks, kCompressThreads, 0, stream>>>(args);
  return launched("compress_csa", cudaGetLastError());
}

ffi::Error compress_hca(cudaStream_t stream, ffi::RemainingArgs arguments, ffi::RemainingRets,
                        CompressorAttributes main, bool history) {
  Operands operands(arguments);
  HcaArgs args = {};
  args.plan = read_plan(operands);
  args.plan.groups = operands.next<int32_t>(ffi::S32);
  args.plan.group_count = static_cast<int>(operands.rows());
  args.plan.group_length = static_cast<int>(operands.width());
  args.compressor = read_compressor(operands, args.plan, main, history, kHcaState);
  if (!operands.good()) return refusal("compress_hca", operands.problem());
  if (args.compressor.pool.format != static_cast<int>(Format::kFp8))
    return refusal("compress_hca", "rows must be fp8 rows of 448 + 64 dims");
  if (args.plan.group_count == 0 || args.plan.group_length == 0 || args.plan.tokens == 0) return ffi::Error::Success();
  hca_kernel<<<args.plan.group_count, kCompressThreads, 0, stream>>>(args);
  return launched("compress_hca", cudaGetLastError());
}

}  // namespace

DSV4_HANDLER(compress, dsv4_compress_csa, compress_csa, on_stream().RemainingArgs().RemainingRets().Attrs());
DSV4_HANDLER(compress, dsv4_compress_hca, compress_hca,
             on_stream().RemainingArgs().RemainingRets().Attr<CompressorAttributes>("main").Attr<bool>("history"));

}  // namespace dsv4
