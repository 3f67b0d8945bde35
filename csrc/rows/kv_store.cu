// The store of `KVPool` in fp8 as an XLA FFI handler. One launch, only enqueues; the pools are
// aliased operands. Wrapper and argument meaning: dsv4_jax/cuda/kv_store.py.
#include <cuda_runtime.h>

#include <algorithm>

#include "common/handler.h"
#include "rows/kv_store_kernel.cuh"

namespace dsv4 {
namespace {

namespace ffi = xla::ffi;

template <int kSteps = 1>
cudaError_t launch(const KVStoreArgs& args, cudaStream_t stream) {
  constexpr int kWarps = kStoreThreads / kLanes;
  if constexpr (kSteps <= kStoreMaxSteps) {
    if (std::max(args.k.width, args.v.width) > kSteps * kStoreStep) return launch<2 * kSteps>(args, stream);
    const int64_t blocks = (2 * args.tokens + kWarps - 1) / kWarps;
    if (blocks == 0) return cudaSuccess;
    kv_store_kernel<kSteps><<<static_cast<unsigned>(blocks), kStoreThreads, 0, stream>>>(args);
    return cudaGetLastError();
  }
  return cudaErrorInvalidValue;
}

using Values = ffi::Buffer<ffi::BF16, 2>;
using Ids = ffi::Buffer<ffi::S32, 1>;
using Codes = ffi::Buffer<ffi::U8, 2>;
using Scale = ffi::Buffer<ffi::F32, 2>;

ffi::Error kv_store(cudaStream_t stream, Values k, Values v, Ids ids, Codes k_codes, Scale k_scale, Codes v_codes,
                    Scale v_scale, ffi::Result<Codes>, ffi::Result<Scale>, ffi::Result<Codes>, ffi::Result<Scale>) {
  const int64_t tokens = ids.element_count(), pool_rows = k_codes.dimensions()[0];
  const int64_t k_width = k.dimensions()[1], v_width = v.dimensions()[1];
  const auto fits = [](int64_t width) { return width % kStoreOwn == 0 && width <= kStoreMaxWidth; };
  if (const ffi::Error error = check("kv_store",
                                     {{"k", k, {tokens, k_width}},
                                      {"k's codes", k_codes, {pool_rows, k_width}},
                                      {"k's scale", k_scale, {pool_rows, 1}, kElements},
                                      {"v", v, {tokens, v_width}},
                                      {"v's codes", v_codes, {pool_rows, v_width}},
                                      {"v's scale", v_scale, {pool_rows, 1}, kElements}},
                                     {{fits(k_width) && fits(v_width), "rows must be of up to 2048 values in eights"},
                                      {tokens <= INT32_MAX, "2^31 tokens or more"}});
      error.failure())
    return error;
  const auto rows_of = [](const Values& values, Codes& codes, Scale& scale) {
    return KVRows{reinterpret_cast<const uint16_t*>(values.untyped_data()), codes.typed_data(), scale.typed_data(),
                  static_cast<int>(values.dimensions()[1])};
  };
  const KVStoreArgs args = {rows_of(k, k_codes, k_scale), rows_of(v, v_codes, v_scale), ids.typed_data(), tokens,
                            pool_rows};
  return launched("kv_store", launch(args, stream));
}

}  // namespace

DSV4_HANDLER(kv_store, dsv4_kv_store, kv_store,
             on_stream()
                 .Arg<Values>()
                 .Arg<Values>()
                 .Arg<Ids>()
                 .Arg<Codes>()
                 .Arg<Scale>()
                 .Arg<Codes>()
                 .Arg<Scale>()
                 .Ret<Codes>()
                 .Ret<Scale>()
                 .Ret<Codes>()
                 .Ret<Scale>());

}  // namespace dsv4
