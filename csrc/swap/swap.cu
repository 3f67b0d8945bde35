// swap_out and swap_in as XLA FFI handlers: blocks (or slots) between HBM and pinned host records, one launch a
// direction, and one that clears the slots a state comes to, in place. Only enqueues: fit for a command buffer. CPU
// twin: csrc/swap/swap.cc.
#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "common/built_for.h"
#include "swap/swap.h"

namespace {

namespace ffi = xla::ffi;

constexpr int kThreads = 256;
constexpr int kUnroll = 4;       // words a thread has in flight
constexpr int kMaxBlocks = 128;  // 2 MiB in flight: enough for PCIe, which 32 blocks of one word each already saturate.
                                 // Hardly more than the SMs: registers are not scarce, spills are not needed
constexpr int64_t kChunk = kThreads * kUnroll;  // words of a record that a block moves at a time

template <dsv4::Swap kWay>
__global__ void __launch_bounds__(kThreads, 1) swap_kernel(const __grid_constant__ dsv4::SwapArgs args) {
  const int64_t chunks = (args.words + kChunk - 1) / kChunk;
  for (int64_t task = blockIdx.x; task < args.pairs * chunks; task += gridDim.x) {
    const int64_t pair = task / chunks;
    const uint32_t first = static_cast<uint32_t>((task - pair * chunks) * kChunk) + threadIdx.x;
    dsv4::SwapPlace places[kUnroll];
    dsv4::SwapWord words[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const uint32_t word = first + u * kThreads;
      if (word >= args.words) continue;
      places[u] = dsv4::locate<kWay>(args, pair, word);
      words[u] = dsv4::load_word<kWay>(places[u]);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (first + u * kThreads < args.words) dsv4::store_word<kWay>(places[u], words[u]);
    }
  }
}

template <dsv4::Swap kWay>
void launch(cudaStream_t stream, const dsv4::SwapArgs& args) {
  const int64_t tasks = args.pairs * ((args.words + kChunk - 1) / kChunk);
  if (tasks == 0) return;
  swap_kernel<kWay><<<static_cast<unsigned>(std::min<int64_t>(tasks, kMaxBlocks)), kThreads, 0, stream>>>(args);
}

template <bool kOut>
ffi::Error swap(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results,
                ffi::Span<const int64_t> pieces, int64_t first_unit, int64_t first_record) {
  dsv4::SwapArgs args = {};
  const ffi::Error wrong = dsv4::read_swap<kOut>(operands, results, {pieces, first_unit, first_record}, &args);
  if (wrong.failure()) return wrong;
  if (!kOut) launch<dsv4::Swap::kClear>(stream, dsv4::clearing(args));
  launch<kOut ? dsv4::Swap::kOut : dsv4::Swap::kIn>(stream, args);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return ffi::Error::Internal(std::string("swap: ") + cudaGetErrorString(error));
  return ffi::Error::Success();
}

// What both directions are called with.
auto binding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .RemainingArgs()
      .RemainingRets()
      .Attr<ffi::Span<const int64_t>>("pieces")
      .Attr<int64_t>("first_unit")
      .Attr<int64_t>("first_record");
}

}  // namespace

DSV4_BUILT_FOR(swap);
DSV4_ARGS_SIZE(swap, dsv4::SwapArgs)

XLA_FFI_DEFINE_HANDLER_SYMBOL(Dsv4SwapOut, swap<true>, binding(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(Dsv4SwapIn, swap<false>, binding(), {ffi::Traits::kCmdBufferCompatible});
