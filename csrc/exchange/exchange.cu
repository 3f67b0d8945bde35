// The exchange between the GPUs of a host as an XLA FFI handler, and the buffers that it needs as plain C calls. One
// launch, several of a message that is more than a slot holds; only enqueued: fit for a command buffer. Wrapper and
// argument meaning: dsv4_jax/cuda/exchange.py and ops/exchange.py.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/handler.h"
#include "exchange/kernel.cuh"

namespace dsv4 {

using ExchangeKernel = void (*)(ExchangeArgs);
template <bool kSum, bool kPackets>
constexpr ExchangeKernel kExchangeBy[] = {exchange_kernel<kSum, kPackets, 16>, exchange_kernel<kSum, kPackets, 4>,
                                          exchange_kernel<kSum, kPackets, kSum ? 4 : 2>};
constexpr const ExchangeKernel* kExchangeKernels[2][2] = {{kExchangeBy<false, false>, kExchangeBy<false, true>},
                                                          {kExchangeBy<true, false>, kExchangeBy<true, true>}};

// Blocks of a short message, at most, and words of each of them.
constexpr uint32_t kFewBlocks = kExchangeBlocks / 2, kFewWords = kExchangeThreads / 4;

constexpr int kGranules = 3;
// Of an access that fits all parts: 16 bytes, 4 or 2, as an index.
inline int granule_of(const ExchangeArgs& args) {
  uint64_t bits = 0;
  for (uint32_t i = 0; i < args.num_parts; ++i) {
    const ExchangePart& part = args.parts[i];
    bits |= reinterpret_cast<uint64_t>(part.in) | reinterpret_cast<uint64_t>(part.out) |
            static_cast<uint64_t>(part.stride) | part.bytes | part.run;
  }
  return bits % 16 == 0 ? 0 : bits % 4 == 0 ? 1 : 2;
}

// Makes `device` the thread's current one while it lives.
class OnDevice {
 public:
  explicit OnDevice(int device) { cudaGetDevice(&before_), error_ = cudaSetDevice(device); }
  ~OnDevice() { cudaSetDevice(before_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  cudaError_t error() const { return error_; }

 private:
  int before_ = 0;
  cudaError_t error_;
};

// The buffers of groups of devices, each of `ranks` ranks: every device has, for each channel, a side, slots and slots
// for packets, which the others of its group write.
class Exchange {
 public:
  Exchange(const int32_t* devices, int groups, int ranks, int channels, int64_t slot_bytes, int64_t packet_bytes,
           uint64_t limit_ns)
      : devices_(devices, devices + groups * ranks),
        memory_(groups * ranks),
        ranks_(ranks),
        channels_(channels),
        slot_bytes_(slot_bytes),
        packet_bytes_(packet_bytes),
        limit_ns_(limit_ns) {}
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;
  ~Exchange() {
    for (size_t i = 0; i < memory_.size(); ++i) {
      const OnDevice current(devices_[i]);
      if (memory_[i] != nullptr) cudaFree(memory_[i]);
    }
    if (reports_ != nullptr) cudaFreeHost(reports_);
  }

  // Empty: all is there. Else what is in the way.
  std::string open() {
    for (size_t i = 0; i < devices_.size(); ++i) {
      const std::string problem = open_on(i);
      cudaGetLastError();
      if (!problem.empty()) return problem;
    }
    const cudaError_t error = cudaHostAlloc(reinterpret_cast<void**>(&reports_), devices_.size() * sizeof(uint64_t),
                                            cudaHostAllocPortable | cudaHostAllocMapped);
    if (error != cudaSuccess) return std::string("no pinned memory: ") + cudaGetErrorString(error);
    std::fill_n(reports_, devices_.size(), uint64_t{0});
    return "";
  }

  // As after `open`. Nothing may be under way.
  cudaError_t reset() {
    for (size_t i = 0; i < devices_.size(); ++i) {
      const OnDevice current(devices_[i]);
      cudaError_t error = cudaDeviceSynchronize();
      if (error == cudaSuccess) error = cudaMemset(memory_[i], 0, bytes());
      if (error == cudaSuccess) error = cudaDeviceSynchronize();
      if (error != cudaSuccess) return error;
    }
    std::fill_n(reports_, devices_.size(), uint64_t{0});
    return cudaSuccess;
  }

  // What the ranks reported, group by group; 0: nothing.
  void copy_reports(uint64_t* to) const {
    for (size_t i = 0; i < devices_.size(); ++i) to[i] = report(i);
  }

  // The launches of a call on this device, whose parts are in `args`. Empty: they are enqueued.
  std::string launch(ExchangeArgs args, int device, int channel, bool sum, cudaStream_t stream) const {
    const auto found = std::find(devices_.begin(), devices_.end(), device);
    if (found == devices_.end()) return "device " + std::to_string(device) + " takes no part in it";
    if (channel < 0 || channel >= channels_) return "there is no channel " + std::to_string(channel);
    const size_t index = found - devices_.begin(), first = index / ranks_ * ranks_;
    for (size_t rank = first; rank < first + ranks_; ++rank) {
      const uint64_t word = report(rank);
      if (word == 0) continue;
      return "rank " + std::to_string(word >> kReportRank & 0xff) + " did not come to an earlier call on channel " +
             std::to_string(word >> kReportChannel & 0xff) + " in time";
    }
    const bool packets = int64_t{args.words} * kExchangeWord <= packet_bytes_;
    for (int rank = 0; rank < ranks_; ++rank) {
      uint8_t* memory = memory_[first + rank] + channel * channel_bytes();
      args.sides[rank] = reinterpret_cast<ExchangeSide*>(memory);
      args.slots[rank] = memory + side_bytes() + (packets ? 2 * ranks_ * slot_bytes_ : 0);
    }
    args.slot_bytes = packets ? 2 * packet_bytes_ : slot_bytes_;
    args.report = reports_ + index;
    args.limit_ns = limit_ns_;
    args.rank = static_cast<uint32_t>(index - first), args.ranks = ranks_, args.channel = channel;
    // What is more than a slot holds goes in several launches, of equal parts.
    const uint32_t all = args.words, held = static_cast<uint32_t>(slot_bytes_ / kExchangeWord);
    const uint32_t launches = packets ? 1 : (all + held - 1) / held, words = (all + launches - 1) / launches;
    for (args.first = 0; args.first < all; args.first += words) {
      args.words = std::min(words, all - args.first);
      // As measured: short messages over more SMs than they fill, long ones a word or more a thread.
      const uint32_t few = std::min<uint32_t>(kFewBlocks, (args.words + kFewWords - 1) / kFewWords);
      const uint32_t many = std::min<uint32_t>(kExchangeBlocks, args.words / kExchangeThreads);
      const uint32_t most = std::max(few, many);
      args.block_words = (args.words + most - 1) / most;
      const unsigned blocks = (args.words + args.block_words - 1) / args.block_words;
      kExchangeKernels[sum][packets][granule_of(args)]<<<blocks, kExchangeThreads, 0, stream>>>(args);
      const cudaError_t error = cudaGetLastError();
      if (error != cudaSuccess) return cudaGetErrorString(error);
    }
    return "";
  }
  int ranks() const { return ranks_; }

 private:
  static constexpr int64_t side_bytes() { return (sizeof(ExchangeSide) + 255) / 256 * 256; }
  int64_t channel_bytes() const { return side_bytes() + 2 * ranks_ * (slot_bytes_ + 2 * packet_bytes_); }
  size_t bytes() const { return static_cast<size_t>(channels_ * channel_bytes()); }
  uint64_t report(size_t index) const { return *static_cast<volatile const uint64_t*>(reports_ + index); }

  std::string open_on(size_t index) {
    const int device = devices_[index];
    const std::string name = "device " + std::to_string(device);
    const OnDevice current(device);
    cudaError_t error = current.error();
    const size_t first = index / ranks_ * ranks_;
    for (size_t other = first; other < first + ranks_ && error == cudaSuccess; ++other) {
      if (other == index) continue;
      int can = 0;
      error = cudaDeviceCanAccessPeer(&can, device, devices_[other]);
      if (error == cudaSuccess && can == 0)
        return name + " cannot reach the memory of device " + std::to_string(devices_[other]);
      if (error == cudaSuccess) error = cudaDeviceEnablePeerAccess(devices_[other], 0);
      if (error == cudaErrorPeerAccessAlreadyEnabled) error = cudaSuccess;  // by jax
    }
    cudaGetLastError();
    if (error == cudaSuccess) error = cudaMalloc(reinterpret_cast<void**>(&memory_[index]), bytes());
    if (error == cudaSuccess) error = cudaMemset(memory_[index], 0, bytes());
    // Loaded here, not by the first launch: nothing else happens on a device while another one waits for it.
    for (int i = 0; i < 2 * 2 * kGranules; ++i) {
      cudaFuncAttributes attributes;
      const ExchangeKernel kernel = kExchangeKernels[i / kGranules / 2][i / kGranules % 2][i % kGranules];
      if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, kernel);
    }
    if (error == cudaSuccess) error = cudaDeviceSynchronize();
    return error == cudaSuccess ? "" : name + ": " + cudaGetErrorString(error);
  }

  std::vector<int> devices_;  // CUDA's ordinals, group by group in the order of ranks
  std::vector<uint8_t*> memory_;
  uint64_t* reports_ = nullptr;
  const int ranks_, channels_;
  const int64_t slot_bytes_, packet_bytes_;  // of a message: at most, and at most in packets
  const uint64_t limit_ns_;
};

// Those that are open, by the numbers that calls name them with. Numbers are not used again.
class OpenExchanges {
 public:
  int64_t add(std::shared_ptr<Exchange> exchange) {
    const std::lock_guard<std::mutex> lock(mutex_);
    open_[next_] = std::move(exchange);
    return next_++;
  }
  std::shared_ptr<Exchange> find(int64_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = open_.find(number);
    return found == open_.end() ? nullptr : found->second;
  }
  std::shared_ptr<Exchange> remove(int64_t number) {
    auto found = find(number);
    const std::lock_guard<std::mutex> lock(mutex_);
    open_.erase(number);
    return found;
  }

 private:
  std::mutex mutex_;
  std::map<int64_t, std::shared_ptr<Exchange>> open_;
  int64_t next_ = 0;
};

OpenExchanges& exchanges() {
  static auto* all = new OpenExchanges;  // never destroyed: CUDA may be gone before it would be
  return *all;
}

namespace {

namespace ffi = xla::ffi;

// As dsv4_jax.ops.exchange names them.
constexpr int kGather = 0, kSumToOwner = 1, kAllToAll = 3;

ffi::Error exchange(cudaStream_t stream, int32_t device, ffi::RemainingArgs operands, ffi::RemainingRets results,
                    int32_t number, int32_t channel, int32_t kind, ffi::Span<const int64_t> runs) {
  const auto found = exchanges().find(number);
  if (found == nullptr) return refusal("exchange", "its buffers are closed");
  if (operands.size() == 0 || operands.size() > kExchangeParts || operands.size() != results.size() ||
      operands.size() != runs.size())
    return refusal("exchange", "1 to 4 operands, as many results and runs");
  ExchangeArgs args = {};
  const size_t ranks = found->ranks();
  const bool sums = kind != kGather && kind != kAllToAll;
  for (size_t i = 0; i < operands.size(); ++i) {
    const auto in = operands.get<ffi::AnyBuffer>(i);
    const auto result = results.get<ffi::AnyBuffer>(i);
    if (!in.has_value() || !result.has_value()) return refusal("exchange", "no such operand");
    ffi::Result<ffi::AnyBuffer> out = *result;
    const size_t given = in->size_bytes(), made = out->size_bytes();
    const size_t bytes = kind == kSumToOwner ? made : kind == kAllToAll ? given / ranks : given;
    const bool fits = kind == kGather       ? made == given * ranks
                      : kind == kSumToOwner ? given == made * ranks
                      : kind == kAllToAll   ? given == made && given % ranks == 0
                                            : given == made;
    if (!fits || (sums && in->element_type() != ffi::F32) || in->element_type() != out->element_type() || bytes == 0 ||
        bytes > UINT32_MAX / 2 || bytes % 2 != 0 || runs[i] <= 0 || bytes % runs[i] != 0)
      return refusal("exchange", "shapes or types do not agree");
    ExchangePart& part = args.parts[args.num_parts++];
    part.in = static_cast<const uint8_t*>(in->untyped_data());
    part.out = static_cast<uint8_t*>(out->untyped_data());
    part.stride = kind == kSumToOwner || kind == kAllToAll ? static_cast<int64_t>(bytes) : 0;
    part.bytes = static_cast<uint32_t>(bytes);
    part.run = static_cast<uint32_t>(runs[i]);
    part.first_word = args.words;
    if (part.run != part.bytes && part.run % kExchangeWord != 0) return refusal("exchange", "runs are whole words");
    args.words += static_cast<uint32_t>((bytes + kExchangeWord - 1) / kExchangeWord);
  }
  const std::string problem = found->launch(args, device, channel, sums, stream);
  return problem.empty() ? ffi::Error::Success() : ffi::Error::Internal("exchange: " + problem);
}

}  // namespace

DSV4_HANDLER(exchange, dsv4_exchange, exchange,
             on_stream()
                 .Ctx<ffi::DeviceOrdinal>()
                 .RemainingArgs()
                 .RemainingRets()
                 .Attr<int32_t>("exchange")
                 .Attr<int32_t>("channel")
                 .Attr<int32_t>("kind")
                 .Attr<ffi::Span<const int64_t>>("runs"));

// Its number; or -1, and why in `problem` (of `length` bytes). `devices`: [groups, ranks].
extern "C" int64_t dsv4_exchange_open(const int32_t* devices, int groups, int ranks, int channels, int64_t slot_bytes,
                                      int64_t packet_bytes, uint64_t limit_ns, char* problem, int64_t length) {
  const auto wrong = [&](const std::string& why) {
    std::snprintf(problem, length, "%s", why.c_str());
    return int64_t{-1};
  };
  if (groups < 1 || ranks < 2 || ranks > kExchangeRanks || channels < 1 || channels > 256 || slot_bytes < 256 ||
      slot_bytes % 256 != 0 || packet_bytes < 0 || packet_bytes % 256 != 0 || packet_bytes > slot_bytes)
    return wrong("2 to 8 ranks, 1 to 256 channels, and sizes that are multiples of 256 bytes");
  auto made = std::make_shared<Exchange>(devices, groups, ranks, channels, slot_bytes, packet_bytes, limit_ns);
  if (const std::string why = made->open(); !why.empty()) return wrong(why);
  return exchanges().add(std::move(made));
}

// The ranks' reports, [groups, ranks]. These return a cudaError_t.
extern "C" int dsv4_exchange_reports(int64_t number, uint64_t* reports) {
  const auto found = exchanges().find(number);
  if (found == nullptr) return cudaErrorInvalidResourceHandle;
  found->copy_reports(reports);
  return cudaSuccess;
}

extern "C" int dsv4_exchange_reset(int64_t number) {
  const auto found = exchanges().find(number);
  return found == nullptr ? cudaErrorInvalidResourceHandle : found->reset();
}

extern "C" void dsv4_exchange_close(int64_t number) { exchanges().remove(number); }

}  // namespace dsv4
