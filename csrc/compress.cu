// compress_csa and compress_hca as XLA FFI handlers. One launch each, only enqueue: fit for a command buffer. State and
// pools are aliased operands. Wrapper, argument meaning and fallbacks: dsv4_jax/cuda/compress.py.
#include <cuda_runtime.h>

#include <string>

#include "built_for.h"
#include "compress_kernel.cuh"
#include "operands.h"

namespace {

namespace ffi = xla::ffi;

constexpr int kFields = 10, kColumns = 2;  // of a stream's integers: see `read_stream`

dsv4::CompressPlan read_plan(dsv4::Operands& operands) {
  dsv4::CompressPlan plan = {};
  plan.token_slot = operands.ids();
  plan.tokens = static_cast<int>(operands.rows());
  plan.token_position = operands.ids(plan.tokens);
  plan.token_seq = operands.ids(plan.tokens);
  plan.seq_start = operands.ids();
  plan.rows = static_cast<int>(operands.rows());
  plan.seq_count = operands.ids(plan.rows);
  plan.seq_first = operands.ids(plan.rows);
  plan.table = operands.next<int32_t>(ffi::S32);
  plan.slots = static_cast<int>(operands.rows());
  plan.columns = static_cast<int>(operands.width());
  return plan;
}

// `parts`: rows of state per channel (4 in CSA, 3 in HCA); `halves`: of kv and score (2 and 1); `behind`: old rows of state
// that a row of the plan brings in its history.
dsv4::CompressStream read_stream(dsv4::Operands& operands, const dsv4::CompressPlan& plan, const int32_t* fields,
                                 const int32_t* columns, float eps, bool history, int parts, int halves, int behind) {
  dsv4::CompressStream s = {};
  s.ratio = fields[0], s.ordinal = fields[1], s.slots = fields[2], s.ring = fields[3];
  s.base = fields[4], s.rows_per_block = fields[5], s.finish.hadamard = fields[7], s.blocks = fields[9];
  s.finish.eps = eps;
  const bool wide = fields[6] == static_cast<int>(dsv4::Format::kFp8);
  const int channels = wide ? 512 : 128;
  s.kv = operands.columns(columns[0], halves * channels, &s.kv_stride, plan.tokens);
  s.score = operands.columns(columns[1], halves * channels, &s.score_stride, plan.tokens);
  if (fields[8] != 0) s.ape = operands.next<float>(ffi::F32, halves * channels, s.ratio);
  s.finish.norm = operands.next<float>(ffi::F32, channels);
  s.finish.cosine = operands.next<float>(ffi::F32, 32, plan.tokens);
  s.finish.sine = operands.next<float>(ffi::F32, 32, plan.tokens);
  if (history) s.history = operands.next<float>(ffi::F32, parts * channels, static_cast<int64_t>(plan.rows) * behind);
  s.state = operands.next<float>(ffi::F32, parts * channels);
  const int64_t state_rows = operands.rows();
  s.pool = dsv4::read_pool(operands, fields[6]);
  // Every id that the kernels take for valid must lie in the operands: the rest of that is theirs.
  const int64_t layer = static_cast<int64_t>(s.slots) * s.ring, blocks = static_cast<int64_t>(s.blocks) * s.rows_per_block;
  const bool sizes = s.ratio > 0 && s.ordinal >= 0 && s.slots > 0 && s.ring > 0 && s.base >= 0 && s.rows_per_block > 0 && s.blocks > 0;
  const bool fits = plan.rows > 0 && plan.columns > 0 && plan.slots >= s.slots && (s.ordinal + 1) * layer <= state_rows &&
                    s.base + blocks <= s.pool.rows;
  if (plan.tokens > 0 && (!sizes || !fits)) {
    operands.refuse("the layer's slots and blocks do not fit the block table, the state or the pool");
  }
  return s;
}

ffi::Error finished(const char* name) {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return ffi::Error::Internal(std::string(name) + ": " + cudaGetErrorString(error));
  return ffi::Error::Success();
}

ffi::Error compress_csa(cudaStream_t stream, ffi::RemainingArgs arguments, ffi::RemainingRets, ffi::Span<const int32_t> fields,
                        ffi::Span<const int32_t> columns, ffi::Span<const float> eps, bool history) {
  dsv4::Operands operands(arguments);
  dsv4::CsaArgs args = {};
  args.plan = read_plan(operands);
  const int tokens = args.plan.tokens;
  if (fields.size() != eps.size() * kFields || columns.size() != eps.size() * kColumns) {
    return ffi::Error::InvalidArgument("compress_csa: takes ten fields and two columns a stream");
  }
  for (size_t i = 0; i < eps.size(); ++i) {
    const auto s = read_stream(operands, args.plan, fields.begin() + i * kFields, columns.begin() + i * kColumns, eps[i], history, 4,
                               2, dsv4::kCsaBehind);
    if (s.ratio != dsv4::kCsaRatio || s.ring < dsv4::kCsaRows) {
      return ffi::Error::InvalidArgument("compress_csa: the ratio must be 4, the ring at least 8 rows");
    }
    (s.pool.format == static_cast<int>(dsv4::Format::kFp8) ? args.main : args.index) = s;
  }
  if (!operands.good()) return ffi::Error::InvalidArgument("compress_csa: " + operands.problem());
  if (tokens == 0) return ffi::Error::Success();
  constexpr int kWarps = dsv4::kCompressThreads / 32;
  const int some = tokens > 1024 ? dsv4::kCsaRatio : 1;  // a long chunk: about one entry a block or warp
  const int blocks = (tokens + some - 1) / some;
  if (args.main.state != nullptr) args.main_blocks = blocks;
  const int index_blocks = args.index.state != nullptr ? (blocks + kWarps - 1) / kWarps : 0;
  const auto kernel = some == 1 ? dsv4::csa_kernel<1> : dsv4::csa_kernel<dsv4::kCsaRatio>;
  kernel<<<args.main_blocks + index_blocks, dsv4::kCompressThreads, 0, stream>>>(args);
  return finished("compress_csa");
}

ffi::Error compress_hca(cudaStream_t stream, ffi::RemainingArgs arguments, ffi::RemainingRets, ffi::Span<const int32_t> fields,
                        ffi::Span<const int32_t> columns, ffi::Span<const float> eps, bool history) {
  dsv4::Operands operands(arguments);
  dsv4::HcaArgs args = {};
  args.plan = read_plan(operands);
  args.plan.groups = operands.next<int32_t>(ffi::S32);
  args.plan.group_count = static_cast<int>(operands.rows());
  args.plan.group_length = static_cast<int>(operands.width());
  if (eps.size() != 1 || fields.size() != kFields || columns.size() != kColumns) {
    return ffi::Error::InvalidArgument("compress_hca: takes one stream");
  }
  args.stream = read_stream(operands, args.plan, fields.begin(), columns.begin(), eps[0], history, 3, 1, 1);
  if (!operands.good()) return ffi::Error::InvalidArgument("compress_hca: " + operands.problem());
  if (args.stream.pool.format != static_cast<int>(dsv4::Format::kFp8)) {
    return ffi::Error::InvalidArgument("compress_hca: rows must be fp8 rows of 448 + 64 dims");
  }
  if (args.plan.group_count == 0 || args.plan.group_length == 0 || args.plan.tokens == 0) return ffi::Error::Success();
  dsv4::hca_kernel<<<args.plan.group_count, dsv4::kCompressThreads, 0, stream>>>(args);
  return finished("compress_hca");
}

}  // namespace

#define DSV4_COMPRESS_HANDLER(name, function)                      \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, function,                    \
                                ffi::Ffi::Bind()                   \
                                    .Ctx<ffi::PlatformStream<cudaStream_t>>() \
                                    .RemainingArgs()               \
                                    .RemainingRets()               \
                                    .Attr<ffi::Span<const int32_t>>("fields") \
                                    .Attr<ffi::Span<const int32_t>>("columns") \
                                    .Attr<ffi::Span<const float>>("eps") \
                                    .Attr<bool>("history"),        \
                                {ffi::Traits::kCmdBufferCompatible})

DSV4_BUILT_FOR(compress);

DSV4_COMPRESS_HANDLER(Dsv4CompressCsa, compress_csa);
DSV4_COMPRESS_HANDLER(Dsv4CompressHca, compress_hca);
