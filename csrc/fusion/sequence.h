// Several calls of handlers of the library as one call of XLA's: each is given its part of the operands and results,
// and runs when those that it waits for have. dsv4_jax/ops/sequence.py makes such calls; their attributes are
//
//   targets   names of the handlers, joined by ';'
//   wiring    numbers. Of each call: its lane; whether it may start early (common/overlap.cuh), 1 behind the one before
//   it on
//             its lane, 2 behind the one that it waits for; whether others wait for it, 1 for its end, 2 to start early
//             behind it, or 3; how many calls of other lanes it waits for, and which; how many operands and results it
//             has; then, of each of these, which operand of the sequence it is (results counted on behind the
//             operands), the element it begins with, how many axes it has, and their lengths
//   call0 ..  the attributes of each call
//
// Calls of a lane run in order. A result may be the operand of a later call, of another shape.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/registry.h"
#include "xla/ffi/api/ffi.h"

namespace dsv4 {

// What XLA gave the sequence, for the frames of its calls.
struct CallContext {
  const XLA_FFI_Api* api;
  XLA_FFI_ExecutionContext* ctx;
};
struct CallAttributes {
  XLA_FFI_Attrs* attrs;  // of a call, as its handler reads them
};

// When and where a call runs.
struct CallPlace {
  int64_t lane;
  int64_t early, awaited;
  xla::ffi::Span<const int64_t> waits;  // for these calls
};
constexpr char kSequence[] = "dsv4_sequence";  // which is none of its own calls
constexpr int64_t kLanes = 4;                  // of a sequence, at most
// Of CallPlace::early, and bits of CallPlace::awaited.
constexpr int64_t kBehindLane = 1, kBehindAwaited = 2, kEndAwaited = 1, kStartAwaited = 2;

}  // namespace dsv4

namespace xla::ffi {

template <>
struct CtxDecoding<dsv4::CallContext> {
  using Type = dsv4::CallContext;
  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* ctx, DiagnosticEngine&) {
    return dsv4::CallContext{api, ctx};
  }
};

template <>
struct AttrDecoding<dsv4::CallAttributes> {
  using Type = dsv4::CallAttributes;
  static std::optional<Type> Decode(XLA_FFI_AttrType type, void* attr, DiagnosticEngine& diagnostic) {
    if (type != XLA_FFI_AttrType_DICTIONARY) return diagnostic.Emit("a call's attributes are not a dictionary");
    return Type{static_cast<XLA_FFI_Attrs*>(attr)};
  }
};

}  // namespace xla::ffi

namespace dsv4 {

// What a handler's error says, which ends here. Later versions of XLA's interface say more, and under another name.
inline std::string message_of(const XLA_FFI_Api* api, XLA_FFI_Error* error) {
#if XLA_FFI_API_MINOR >= 4
  using Said = XLA_FFI_Error_GetDetails_Args;
#else
  using Said = XLA_FFI_Error_GetMessage_Args;
#endif
  struct {
    Said args;
    uint64_t more[2];
  } said = {};
  said.args.struct_size = sizeof(said);
  said.args.error = error;
#if XLA_FFI_API_MINOR >= 4
  api->XLA_FFI_Error_GetDetails(&said.args);
#else
  api->XLA_FFI_Error_GetMessage(&said.args);
#endif
  const std::string message = said.args.message;
  XLA_FFI_Error_Destroy_Args destroyed = {XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, nullptr, error};
  api->XLA_FFI_Error_Destroy(&destroyed);
  return message;
}

// Where calls run one after the other: what there is without a GPU.
struct OneLane {
  const XLA_FFI_Api* before(int64_t, const CallPlace&, const XLA_FFI_Api* api) { return api; }
  void after(int64_t, const CallPlace&) {}
};

// Runs the calls. `lanes.before` gives the interface that call i sees, and `lanes.after` follows it.
template <typename Lanes>
xla::ffi::Error run_sequence(CallContext context, xla::ffi::RemainingArgs operands, xla::ffi::RemainingRets results,
                             xla::ffi::Dictionary attributes, Lanes& lanes) {
  namespace ffi = xla::ffi;
  const auto wrong = [](const std::string& what) { return ffi::Error::InvalidArgument("sequence: " + what); };
  const auto targets = attributes.get<std::string_view>("targets");
  const auto wiring = attributes.get<ffi::Span<const int64_t>>("wiring");
  if (!targets.has_value() || !wiring.has_value()) return wrong("targets or wiring are missing");
  const int64_t *at = wiring->begin(), *end = wiring->end(), given = operands.size(), all = given + results.size();
  std::vector<XLA_FFI_Buffer> whole(all);
  std::vector<size_t> held(all);
  for (int64_t b = 0; b < all; ++b) {
    whole[b] = {XLA_FFI_Buffer_STRUCT_SIZE, nullptr};
    const auto keep = [&](const ffi::AnyBuffer& buffer) {
      whole[b].dtype = static_cast<XLA_FFI_DataType>(buffer.element_type());
      whole[b].data = buffer.untyped_data(), held[b] = buffer.element_count();
    };
    if (b < given) {
      const auto operand = operands.get<ffi::AnyBuffer>(b);
      if (!operand.has_value()) return wrong("an operand is no array");
      keep(*operand);
    } else {
      auto result = results.get<ffi::AnyBuffer>(b - given);
      if (!result.has_value()) return wrong("a result is no array");
      keep(**result);
    }
  }
  std::string_view left = *targets;
  std::vector<XLA_FFI_Buffer> buffers;
  std::vector<void*> pointers;
  std::vector<XLA_FFI_ArgType> arguments;
  std::vector<XLA_FFI_RetType> returned;
  for (int64_t i = 0; !left.empty(); ++i) {
    const std::string target(left.substr(0, left.find(';')));
    left.remove_prefix(std::min(left.size(), target.size() + 1));
    const Handler* handler = find_handler(target);
    if (handler == nullptr || target == kSequence) return wrong("there is no handler of " + target);
    const auto attrs = attributes.get<CallAttributes>("call" + std::to_string(i));
    if (!attrs.has_value() || end - at < 4 || at[3] < 0 || end - at - 6 < at[3])
      return wrong("attributes or wiring of " + target + " are missing");
    const CallPlace place = {at[0], at[1], at[2], {at + 4, static_cast<size_t>(at[3])}};
    at += 4 + at[3];
    bool odd = place.lane < 0 || place.lane >= kLanes;
    for (const int64_t call : place.waits) odd = odd || call < 0 || call >= i;
    if (odd) return wrong("the lane of " + target + ", or what it waits for, is none");
    const int64_t counts[2] = {at[0], at[1]};
    at += 2;
    buffers.clear();
    for (int64_t b = 0; b < counts[0] + counts[1]; ++b) {
      if (end - at < 3 || at[0] < 0 || at[0] >= all || at[1] < 0 || at[2] < 0 || end - at - 3 < at[2])
        return wrong("wiring of " + target + " points nowhere");
      XLA_FFI_Buffer buffer = whole[at[0]];
      size_t elements = 1;
      buffer.rank = at[2];
      buffer.dims = const_cast<int64_t*>(at + 3);
      for (int64_t axis = 0; axis < buffer.rank; ++axis) elements *= buffer.dims[axis];
      const size_t first = at[1], has = held[at[0]];
      if (first > has || elements > has - first) return wrong("a view of " + target + " is larger than its array");
      buffer.data = static_cast<char*>(buffer.data) + first * ffi::ByteWidth(static_cast<ffi::DataType>(buffer.dtype));
      at += 3 + buffer.rank;
      buffers.push_back(buffer);
    }
    pointers.clear();
    for (XLA_FFI_Buffer& buffer : buffers) pointers.push_back(&buffer);
    arguments.assign(counts[0], XLA_FFI_ArgType_BUFFER);
    returned.assign(counts[1], XLA_FFI_RetType_BUFFER);
    XLA_FFI_CallFrame frame = {XLA_FFI_CallFrame_STRUCT_SIZE, nullptr};
    frame.api = lanes.before(i, place, context.api);
    frame.ctx = context.ctx;
    frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
    frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, counts[0], arguments.data(), pointers.data()};
    frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, counts[1], returned.data(), pointers.data() + counts[0]};
    frame.attrs = *attrs->attrs;
    if (XLA_FFI_Error* error = handler->call(&frame)) return wrong(message_of(context.api, error));
    lanes.after(i, place);
  }
  if (at != end) return wrong("there is more wiring than calls");
  return ffi::Error::Success();
}

// `bound`: what the handler takes before.
template <typename Binding>
auto sequence_binding(Binding bound) {
  return std::move(bound).template Ctx<CallContext>().RemainingArgs().RemainingRets().Attrs();
}

}  // namespace dsv4
