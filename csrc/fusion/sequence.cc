// Sequences of CPU twins: the kernels' (fusion/sequence.cu) under the same name, so that the wiring is tested without a
// GPU.
#include "fusion/sequence.h"

extern "C" XLA_FFI_Handler Dsv4SwapOut, Dsv4SwapIn;

namespace {

namespace ffi = xla::ffi;

ffi::Error sequence(dsv4::CallContext context, ffi::RemainingArgs operands, ffi::RemainingRets results,
                    ffi::Dictionary attributes) {
  dsv4::OneLane lane;
  return dsv4::run_sequence({{"dsv4_swap_out", Dsv4SwapOut}, {"dsv4_swap_in", Dsv4SwapIn}}, context, operands, results,
                            attributes, lane);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(Dsv4Sequence, sequence, dsv4::sequence_binding(xla::ffi::Ffi::Bind()));
