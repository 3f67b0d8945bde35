// swap_out and swap_in on the CPU: the twins of csrc/swap/swap.cu under the same names. The kernel's own address
// arithmetic and accesses, word by word, so that it is tested where there is no GPU.
#include "swap/swap.h"

#include "common/registry.h"

namespace dsv4 {
namespace {

namespace ffi = xla::ffi;

template <Swap kWay>
void run(const SwapArgs& args) {
  for (int64_t pair = 0; pair < args.pairs; ++pair) {
    for (uint32_t word = 0; word < args.words; ++word) {
      const SwapPlace place = locate<kWay>(args, pair, word);
      store_word<kWay>(place, load_word<kWay>(place));
    }
  }
}

template <bool kOut>
ffi::Error swap(ffi::RemainingArgs operands, ffi::RemainingRets results, ffi::Span<const int64_t> pieces,
                int64_t first_unit, int64_t first_record) {
  SwapArgs args = {};
  const ffi::Error error = read_swap<kOut>(operands, results, {pieces, first_unit, first_record}, &args);
  if (error.failure()) return error;
  if (!kOut) run<Swap::kClear>(clearing(args));
  run<kOut ? Swap::kOut : Swap::kIn>(args);
  return ffi::Error::Success();
}

}  // namespace

DSV4_HANDLER(swap, dsv4_swap_out, swap<true>, swap_binding(ffi::Ffi::Bind()));
DSV4_HANDLER(swap, dsv4_swap_in, swap<false>, swap_binding(ffi::Ffi::Bind()));

}  // namespace dsv4
