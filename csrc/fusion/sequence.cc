// Sequences of CPU twins: the kernels' (fusion/sequence.cu) under the same name, so that the wiring is tested without a
// GPU.
#include "fusion/sequence.h"

namespace dsv4 {
namespace {

namespace ffi = xla::ffi;

ffi::Error sequence(CallContext context, ffi::RemainingArgs operands, ffi::RemainingRets results,
                    ffi::Dictionary attributes) {
  OneLane lane;
  return run_sequence(context, operands, results, attributes, lane);
}

}  // namespace

DSV4_HANDLER(sequence, dsv4_sequence, sequence, sequence_binding(ffi::Ffi::Bind()));

}  // namespace dsv4
