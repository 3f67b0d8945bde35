// Sequences of kernels as an XLA FFI handler: those that need nothing of one another run side by side, on streams of
// their own, and each may start while the one before it on its stream ends (common/overlap.cuh), which XLA's command
// buffers allow within one custom call and not from one to the next.
#include <array>
#include <map>

#include "common/built_for.h"
#include "common/overlap.cuh"
#include "fusion/sequence.h"

// Of those left out for lack of a capability there is none.
#define DSV4_HANDLER(NAME) extern "C" __attribute__((weak)) XLA_FFI_Error* NAME(XLA_FFI_CallFrame*);
DSV4_HANDLER(Dsv4Append)
DSV4_HANDLER(Dsv4Attend)
DSV4_HANDLER(Dsv4AttendRows)
DSV4_HANDLER(Dsv4CompressCsa)
DSV4_HANDLER(Dsv4CompressHca)
DSV4_HANDLER(Dsv4DenseBf16)
DSV4_HANDLER(Dsv4DenseFp8)
DSV4_HANDLER(Dsv4DenseStream)
DSV4_HANDLER(Dsv4EntryRows)
DSV4_HANDLER(Dsv4FinishQueries)
DSV4_HANDLER(Dsv4HyperConnection)
DSV4_HANDLER(Dsv4HyperMixing)
DSV4_HANDLER(Dsv4IndexScores)
DSV4_HANDLER(Dsv4Moe)
DSV4_HANDLER(Dsv4Normalise)
DSV4_HANDLER(Dsv4Route)
DSV4_HANDLER(Dsv4Swiglu)
DSV4_HANDLER(Dsv4TopK)

namespace {

namespace ffi = xla::ffi;

// What a thread keeps for the sequences of a device. Lane 0 is XLA's stream.
struct Kept {
  std::array<cudaStream_t, dsv4::kLanes> streams = {};
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
    dsv4::follows = false;
    dsv4::announced = nullptr;
    cudaThreadExchangeStreamCaptureMode(&mode_);
  }

  const XLA_FFI_Api* before(int64_t i, const dsv4::CallPlace& place, const XLA_FFI_Api* api) {
    if (i == 0) record(event(0), 0);
    if (place.lane > 0 && !used_[place.lane]) open(place.lane, place.waits.size() == 0);
    const bool beside = place.early == dsv4::kBehindAwaited;
    for (const int64_t call : place.waits)
      check(cudaStreamWaitEvent(streams_[place.lane], beside ? start_of(call) : end_of(call), 0));
    dsv4::follows = place.early == dsv4::kBehindLane;
    dsv4::announced = (place.awaited & dsv4::kStartAwaited) != 0 ? start_of(i) : nullptr;
    if (place.lane == 0) return api;
    api_ = *api;
    api_.XLA_FFI_Stream_Get = give_stream;
    stream_of_call = streams_[place.lane];
    return &api_;
  }
  // An event between two kernels of a stream would keep the second from starting early where nothing is captured.
  void after(int64_t i, const dsv4::CallPlace& place) {
    if ((place.awaited & dsv4::kEndAwaited) != 0) record(end_of(i), place.lane);
  }
  cudaError_t join() {
    for (int lane = 1; lane < dsv4::kLanes; ++lane) {
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
  std::array<cudaStream_t, dsv4::kLanes> streams_;
  std::array<bool, dsv4::kLanes> used_ = {};
  cudaStreamCaptureMode mode_;
  cudaError_t error_ = cudaSuccess;
  XLA_FFI_Api api_;
};

ffi::Error sequence(cudaStream_t stream, dsv4::CallContext context, ffi::RemainingArgs operands,
                    ffi::RemainingRets results, ffi::Dictionary attributes) {
  static const std::vector<dsv4::Handler> handlers = {
      {"dsv4_append", Dsv4Append},
      {"dsv4_attend", Dsv4Attend},
      {"dsv4_attend_rows", Dsv4AttendRows},
      {"dsv4_compress_csa", Dsv4CompressCsa},
      {"dsv4_compress_hca", Dsv4CompressHca},
      {"dsv4_dense_bf16", Dsv4DenseBf16},
      {"dsv4_dense_fp8", Dsv4DenseFp8},
      {"dsv4_dense_stream", Dsv4DenseStream},
      {"dsv4_entry_rows", Dsv4EntryRows},
      {"dsv4_finish_queries", Dsv4FinishQueries},
      {"dsv4_hyper_connection", Dsv4HyperConnection},
      {"dsv4_hyper_mixing", Dsv4HyperMixing},
      {"dsv4_index_scores", Dsv4IndexScores},
      {"dsv4_moe", Dsv4Moe},
      {"dsv4_normalise", Dsv4Normalise},
      {"dsv4_route", Dsv4Route},
      {"dsv4_swiglu", Dsv4Swiglu},
      {"dsv4_top_k", Dsv4TopK},
  };
  Streams streams(stream);
  const ffi::Error error = dsv4::run_sequence(handlers, context, operands, results, attributes, streams);
  const cudaError_t joined = streams.join();
  if (error.failure() || joined == cudaSuccess) return error;
  return ffi::Error::Internal(std::string("sequence: ") + cudaGetErrorString(joined));
}

}  // namespace

DSV4_BUILT_FOR(sequence);

XLA_FFI_DEFINE_HANDLER_SYMBOL(Dsv4Sequence, sequence,
                              dsv4::sequence_binding(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>()),
                              {ffi::Traits::kCmdBufferCompatible});
