// sample_tokens as an XLA FFI handler: two launches, which only enqueue. Wrapper and argument meaning:
// dsv4_jax/cuda/sample_tokens.py.
#include <cuda_runtime.h>

#include "common/handler.h"
#include "sampling/sample_tokens_kernel.cuh"

namespace dsv4 {
namespace {

namespace ffi = xla::ffi;

cudaError_t launch(const SampleArgs& args, int rows, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(args.chunks), static_cast<unsigned>(rows));
  if (const cudaError_t error = start(race_kernel, {grid, kRaceThreads}, false, stream, args); error != cudaSuccess)
    return error;
  constexpr int kFew = 1, kSome = 8;  // tokens of a thread
  constexpr int kThreads = kFilterBlocks * kFilterThreads;
  const auto kernel = args.vocab <= kFew * kThreads    ? filter_kernel<kFew>
                      : args.vocab <= kSome * kThreads ? filter_kernel<kSome>
                                                       : filter_kernel<kFilterOwn>;
  const dim3 clusters(static_cast<unsigned>(rows) * kFilterBlocks);
  return start(kernel, {clusters, kFilterThreads, 0, kFilterBlocks}, true, stream, args);
}

using Logits = ffi::Buffer<ffi::F32, 2>;
using Settings = ffi::Buffer<ffi::U32, 2>;
using Numbers = ffi::Buffer<ffi::S32, 1>;
using Winners = ffi::Buffer<ffi::U32, 3>;

constexpr int64_t kMaxRows = 65535;  // of a grid

ffi::Error sample_tokens(cudaStream_t stream, Logits logits, Settings settings, Numbers position,
                         ffi::Result<Numbers> tokens, ffi::Result<Winners> winners) {
  const int64_t rows = logits.dimensions()[0], vocab = logits.dimensions()[1];
  const int64_t chunks = (vocab + kRaceChunk - 1) / kRaceChunk;
  if (const ffi::Error error = check(
          "sample_tokens",
          {{"logits", logits, {rows, vocab}, kElements},
           {"settings", settings, {rows, kSettingWords}, kElements},
           {"position", position, {rows}, kElements},
           {"tokens", *tokens, {rows}, kElements},
           {"winners", *winners, {rows, chunks, 2}}},
          {{rows <= kMaxRows && vocab <= kMostTokens, "at most 65535 rows of vocabularies of at most 131072 tokens"}});
      error.failure())
    return error;
  if (rows == 0 || vocab == 0) return ffi::Error::Success();
  const SampleArgs args = {logits.typed_data(),
                           reinterpret_cast<const SampleSettings*>(settings.typed_data()),
                           position.typed_data(),
                           tokens->typed_data(),
                           reinterpret_cast<uint64_t*>(winners->typed_data()),
                           static_cast<int>(vocab),
                           static_cast<int>(chunks)};
  return launched("sample_tokens", launch(args, static_cast<int>(rows), stream));
}

}  // namespace

DSV4_HANDLER(sample_tokens, dsv4_sample_tokens, sample_tokens,
             on_stream().Arg<Logits>().Arg<Settings>().Arg<Numbers>().Ret<Numbers>().Ret<Winners>());

}  // namespace dsv4
