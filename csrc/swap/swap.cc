// swap_out and swap_in on the CPU: the twins of csrc/swap/swap.cu under the same names. The kernel's own address
// arithmetic and accesses, word by word, so that it is tested where there is no GPU.
#include "swap/swap.h"

namespace {

namespace ffi = xla::ffi;

template <dsv4::Swap kWay>
void run(const dsv4::SwapArgs& args) {
  for (int64_t pair = 0; pair < args.pairs; ++pair) {
    for (uint32_t word = 0; word < args.words; ++word) {
      const dsv4::SwapPlace place = dsv4::locate<kWay>(args, pair, word);
      dsv4::store_word<kWay>(place, dsv4::load_word<kWay>(place));
    }
  }
}

template <bool kOut>
ffi::Error swap(ffi::RemainingArgs operands, ffi::RemainingRets results, ffi::Span<const int64_t> pieces,
                int64_t first_unit, int64_t first_record) {
  dsv4::SwapArgs args = {};
  const ffi::Error error = dsv4::read_swap<kOut>(operands, results, {pieces, first_unit, first_record}, &args);
  if (error.failure()) return error;
  if (!kOut) run<dsv4::Swap::kClear>(dsv4::clearing(args));
  run<kOut ? dsv4::Swap::kOut : dsv4::Swap::kIn>(args);
  return ffi::Error::Success();
}

// What both directions are called with.
auto binding() {
  return ffi::Ffi::Bind()
      .RemainingArgs()
      .RemainingRets()
      .Attr<ffi::Span<const int64_t>>("pieces")
      .Attr<int64_t>("first_unit")
      .Attr<int64_t>("first_record");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(Dsv4SwapOut, swap<true>, binding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(Dsv4SwapIn, swap<false>, binding());

// Bytes of what the kernel's twin and the kernel work on: equal in both libraries, or the two disagree about the
// layout.
extern "C" int dsv4_swap_args_size() { return static_cast<int>(sizeof(dsv4::SwapArgs)); }
