// swap_out and swap_in on the CPU: the twins of csrc/swap.cu under the same names. The kernel's own address arithmetic
// and accesses, word by word, so that it is tested where there is no GPU.
#include "swap.h"

namespace {

namespace ffi = xla::ffi;

template <bool kOut>
ffi::Error swap(ffi::RemainingArgs operands, ffi::RemainingRets results, ffi::Span<const int64_t> layers,
                ffi::Span<const int64_t> piece_bytes, ffi::Span<const int64_t> offsets, int64_t first_unit,
                int64_t first_record) {
  dsv4::SwapArgs args = {};
  const ffi::Error error =
      dsv4::read_swap<kOut>(operands, results, {layers, piece_bytes, offsets, first_unit, first_record}, &args);
  if (error.failure()) return error;
  for (int64_t pair = 0; pair < args.pairs; ++pair) {
    const int64_t unit = args.unit_ids[pair], record = args.record_ids[pair];
    if (!args.valid(unit, record)) continue;
    for (uint32_t word = 0; word < args.record_words; ++word) {
      const dsv4::SwapPlace place = dsv4::locate(args, unit, record, word);
      dsv4::store_word<kOut>(place, dsv4::load_word<kOut>(place));
    }
  }
  return ffi::Error::Success();
}

// What both directions are called with.
auto binding() {
  return ffi::Ffi::Bind()
      .RemainingArgs()
      .RemainingRets()
      .Attr<ffi::Span<const int64_t>>("layers")
      .Attr<ffi::Span<const int64_t>>("piece_bytes")
      .Attr<ffi::Span<const int64_t>>("offsets")
      .Attr<int64_t>("first_unit")
      .Attr<int64_t>("first_record");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(Dsv4SwapOut, swap<true>, binding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(Dsv4SwapIn, swap<false>, binding());

// Bytes of what the kernel's twin and the kernel work on: equal in both libraries, or the two disagree about the
// layout.
extern "C" int dsv4_swap_args_size() { return static_cast<int>(sizeof(dsv4::SwapArgs)); }
