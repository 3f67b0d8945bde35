// swap_out and swap_in as XLA FFI handlers: blocks (or slots) between HBM and pinned host records, one launch a
// direction, and one that clears the slots a state comes to, in place. Only enqueues: fit for a command buffer. CPU
// twin: csrc/swap/swap.cc.
#include <cuda_runtime.h>

#include <algorithm>
#include "common/handler.h"
#include "swap/swap.h"

namespace dsv4 {
namespace {

namespace ffi = xla::ffi;

constexpr int kThreads = 256;
constexpr int kUnroll = 4;       // words a thread has in flight
constexpr int kMaxBlocks = 128;  // 2 MiB in flight: enough for PCIe, which 32 blocks of one word each already saturate.
                                 // Hardly more than the SMs: registers are not scarce, spills are not needed
constexpr int64_t kChunk = kThreads * kUnroll;  // words of a record that a block moves at a time

template <Swap kWay>
__global__ void __launch_bounds__(kThreads, 1) swap_kernel(const __grid_constant__ SwapArgs args) {
  const int64_t chunks = (args.words + kChunk - 1) / kChunk;
  for (int64_t task = blockIdx.x; task < args.pairs * chunks; task += gridDim.x) {
    const int64_t pair = task / chunks;
    const uint32_t first = static_cast<uint32_t>((task - pair * chunks) * kChunk) + threadIdx.x;
    SwapPlace places[kUnroll];
    SwapWord words[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const uint32_t word = first + u * kThreads;
      if (word >= args.words) continue;
      places[u] = locate<kWay>(args, pair, word);
      words[u] = load_word<kWay>(places[u]);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (first + u * kThreads < args.words) store_word<kWay>(places[u], words[u]);
    }
  }
}

template <Swap kWay>
void launch(cudaStream_t stream, const SwapArgs& args) {
  const int64_t tasks = args.pairs * ((args.words + kChunk - 1) / kChunk);
  if (tasks == 0) return;
  swap_kernel<kWay><<<static_cast<unsigned>(std::min<int64_t>(tasks, kMaxBlocks)), kThreads, 0, stream>>>(args);
}

template <bool kOut>
ffi::Error swap(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results,
                ffi::Span<const int64_t> pieces, int64_t first_unit, int64_t first_record) {
  SwapArgs args = {};
  const ffi::Error wrong = read_swap<kOut>(operands, results, {pieces, first_unit, first_record}, &args);
  if (wrong.failure()) return wrong;
  if (!kOut) launch<Swap::kClear>(stream, clearing(args));
  launch<kOut ? Swap::kOut : Swap::kIn>(stream, args);
  return launched("swap", cudaGetLastError());
}

}  // namespace

DSV4_HANDLER(swap, dsv4_swap_out, swap<true>, swap_binding(on_stream()));
DSV4_HANDLER(swap, dsv4_swap_in, swap<false>, swap_binding(on_stream()));

}  // namespace dsv4
