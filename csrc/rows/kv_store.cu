// The store of `KVPool` in fp8 as an XLA FFI handler and as a plain C call. One launch, only enqueues; the pools are
// aliased operands. Wrapper and argument meaning: dsv4_jax/cuda/kv_store.py.
#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "common/alignment.h"
#include "common/built_for.h"
#include "rows/kv_store_kernel.cuh"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

template <int kSteps = 1>
cudaError_t launch(const dsv4::KVStoreArgs& args, cudaStream_t stream) {
  constexpr int kWarps = dsv4::kStoreThreads / dsv4::kLanes;
  if constexpr (kSteps <= dsv4::kStoreMostSteps) {
    if (std::max(args.k.width, args.v.width) > kSteps * dsv4::kStoreStep) return launch<2 * kSteps>(args, stream);
    const int64_t blocks = (2 * args.tokens + kWarps - 1) / kWarps;
    if (blocks == 0) return cudaSuccess;
    dsv4::kv_store_kernel<kSteps><<<static_cast<unsigned>(blocks), dsv4::kStoreThreads, 0, stream>>>(args);
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
  const int64_t tokens = ids.dimensions()[0], pool_rows = k_codes.dimensions()[0];
  dsv4::KVStoreArgs args = {{}, {}, ids.typed_data(), tokens, pool_rows};
  const struct {
    Values& values;
    Codes& codes;
    Scale& scale;
    dsv4::KVRows& rows;
  } kinds[] = {{k, k_codes, k_scale, args.k}, {v, v_codes, v_scale, args.v}};
  for (const auto& kind : kinds) {
    const int64_t width = kind.values.dimensions()[1];
    if (kind.values.dimensions()[0] != tokens || kind.codes.dimensions()[0] != pool_rows ||
        kind.scale.dimensions()[0] != pool_rows || kind.codes.dimensions()[1] != width ||
        kind.scale.dimensions()[1] != 1 || width % dsv4::kStoreOwn != 0 || width > dsv4::kStoreMostWidth ||
        tokens > INT32_MAX) {
      return ffi::Error::InvalidArgument("kv_store: shapes do not agree, or rows are none that the kernel takes");
    }
    kind.rows = {reinterpret_cast<const uint16_t*>(kind.values.untyped_data()), kind.codes.typed_data(),
                 kind.scale.typed_data(), static_cast<int>(width)};
  }
  if (const std::string problem = dsv4::misaligned(
          "kv_store", {{"k", args.k.values}, {"v", args.v.values}, {"k pool", args.k.codes}, {"v pool", args.v.codes}});
      !problem.empty())
    return ffi::Error::InvalidArgument(problem);
  const cudaError_t error = launch(args, stream);
  if (error != cudaSuccess) return ffi::Error::Internal(std::string("kv_store: ") + cudaGetErrorString(error));
  return ffi::Error::Success();
}

}  // namespace

DSV4_BUILT_FOR(kv_store);
DSV4_ARGS_SIZE(kv_store, dsv4::KVStoreArgs)

XLA_FFI_DEFINE_HANDLER_SYMBOL(Dsv4KvStore, kv_store,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
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
                                  .Ret<Scale>(),
                              {ffi::Traits::kCmdBufferCompatible});

// The launch alone, for timing without XLA. Returns a cudaError_t.
extern "C" int dsv4_kv_store_launch(const dsv4::KVStoreArgs* args, cudaStream_t stream) {
  return static_cast<int>(launch(*args, stream));
}
