// Sequences of kernels as an XLA FFI handler: those that need nothing of one another run side by side, on streams of
// their own, and each may start while the one before it on its stream ends (common/overlap.cuh), which XLA's command
// buffers allow within one custom call and not from one to the next.
#include <array>
#include <map>

#include "common/handler.h"
#include "common/overlap.cuh"
#include "fusion/sequence.h"

namespace dsv4 {
namespace {

namespace ffi = xla::ffi;

// What a thread keeps for the sequences of a device. Lane 0 is XLA's stream.
struct Kept {
  std::array<cudaStream_t, kLanes> streams = {};
  std::vector<cudaEvent_t> events;  // one for the start, then two for each call
};

thread_local cudaStream_t stream_of_call = nullptr;

XLA_FFI_Error* give_stream(XLA_FFI_Stream_Get_Args* args) {
  args->stream = stream_of_call;
  return nullptr;
}

// Calls on streams of their own. Whatever went wrong, all are joined in the end: a capture could not end else.
class Streams {
 public:
  explicit Streams(cudaStream_t stream) {
    // XLA may be capturing, and streams and events are no part of what it captures.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    check(cudaThreadExchangeStreamCaptureMode(&mode));
    int device = 0;
    check(cudaGetDevice(&device));
    thread_local std::map<int, Kept> kept;
    kept_ = &kept[device];
    streams_ = kept_->streams;
    streams_[0] = stream;
    mode_ = mode;
  }
  ~Streams() {
    follows = false;
    announced = nullptr;
    cudaThreadExchangeStreamCaptureMode(&mode_);
  }

  const XLA_FFI_Api* before(int64_t i, const CallPlace& place, const XLA_FFI_Api* api) {
    if (i == 0) record(event(0), 0);
    if (place.lane > 0 && !used_[place.lane]) open(place.lane, place.waits.size() == 0);
    const bool beside = place.early == kBehindAwaited;
    for (const int64_t call : place.waits)
      check(cudaStreamWaitEvent(streams_[place.lane], beside ? start_of(call) : end_of(call), 0));
    follows = place.early == kBehindLane;
    announced = (place.awaited & kStartAwaited) != 0 ? start_of(i) : nullptr;
    if (place.lane == 0) return api;
    api_ = *api;
    api_.XLA_FFI_Stream_Get = give_stream;
    stream_of_call = streams_[place.lane];
    return &api_;
  }
  // An event between two kernels of a stream would keep the second from starting early where nothing is captured.
  void after(int64_t i, const CallPlace& place) {
    if ((place.awaited & kEndAwaited) != 0) record(end_of(i), place.lane);
  }
  cudaError_t join() {
    for (int lane = 1; lane < kLanes; ++lane) {
      if (!used_[lane]) continue;
      record(event(0), lane);
      check(cudaStreamWaitEvent(streams_[0], event(0), 0));
    }
    return error_;
  }

 private:
  void check(cudaError_t error) {
    if (error_ == cudaSuccess) error_ = error;
  }
  void record(cudaEvent_t at, int64_t lane) { check(cudaEventRecord(at, streams_[lane])); }
  cudaEvent_t end_of(size_t call) { return event(1 + 2 * call); }
  cudaEvent_t start_of(size_t call) { return event(2 + 2 * call); }
  cudaEvent_t event(size_t i) {
    while (kept_->events.size() <= i) {
      kept_->events.push_back(nullptr);
      check(cudaEventCreateWithFlags(&kept_->events.back(), cudaEventDisableTiming));
    }
    return kept_->events[i];
  }
  void open(int64_t lane, bool at_start) {
    if (streams_[lane] == nullptr) {
      check(cudaStreamCreateWithFlags(&kept_->streams[lane], cudaStreamNonBlocking));
      streams_[lane] = kept_->streams[lane];
    }
    if (at_start) check(cudaStreamWaitEvent(streams_[lane], event(0), 0));
    used_[lane] = true;
  }

  Kept* kept_;
  std::array<cudaStream_t, kLanes> streams_;
  std::array<bool, kLanes> used_ = {};
  cudaStreamCaptureMode mode_;
  cudaError_t error_ = cudaSuccess;
  XLA_FFI_Api api_;
};

ffi::Error sequence(cudaStream_t stream, CallContext context, ffi::RemainingArgs operands, ffi::RemainingRets results,
                    ffi::Dictionary attributes) {
  Streams streams(stream);
  const ffi::Error error = run_sequence(context, operands, results, attributes, streams);
  const cudaError_t joined = streams.join();
  return error.failure() ? error : launched("sequence", joined);
}

}  // namespace

DSV4_HANDLER(sequence, dsv4_sequence, sequence, sequence_binding(on_stream()));

}  // namespace dsv4
