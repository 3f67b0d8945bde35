// One exchange between the GPUs of a host, one launch on each: every rank writes into slots of every other one over
// NVLink, waits for what the others wrote into its own, and puts it where it belongs, or sums it.
//
// A message is what one rank writes to one other: its operands (parts) one after the other, each from a 16-byte word
// on. Block b of every rank moves the same words of all messages, so it waits for the blocks b of the others only, and
// no block waits for another one of its own device. There are two ways to say that words have come:
//   flags    a block writes its words, then the number of the call to a flag with release; 16 bytes a word
//   packets  each 4 bytes travel with the number of the call, 8 bytes that cannot be torn; 32 bytes a word and no wait
//            between data and flag: for short messages
//
// Calls of a channel are numbered in device memory, so that a launch can be captured and replayed. Call e uses the
// slots and flags of parity e mod 2. They are free then: a rank begins call e when its call e - 1 has ended, which had
// something from every rank's call e - 1, and those began when their calls e - 2 had ended. This needs that calls of a
// channel do not overlap on a device and come in the same order, with the same shapes, on all of them.
//
// A rank that waits longer than the time limit gives up: it fills what did not come with bytes 0xff (NaN, -1), reports
// to the host, and tells all ranks, whose later calls of the channel do the same at once.
#pragma once

#include <cstdint>

namespace dsv4 {

constexpr int kExchangeRanks = 8, kExchangeParts = 4;  // at most
constexpr int kExchangeThreads = 512, kExchangeBlocks = 128;
constexpr uint32_t kExchangeWord = 16;  // bytes
constexpr uint32_t kNobody = ~0u;

// A rank's side of a channel, in its own memory. The others write `broken` and `flags`.
struct ExchangeSide {
  uint32_t calls[kExchangeBlocks];                     // so far, the same number for all blocks: each reads its own
  uint32_t broken;                                     // an earlier call gave up
  uint32_t flags[2][kExchangeRanks][kExchangeBlocks];  // the call whose words are there, by parity, source and block
};

// An operand and its result.
struct ExchangePart {
  const uint8_t* in;
  uint8_t* out;
  int64_t stride;       // bytes of `in` between what goes to a rank and to the next; 0: the same goes to all
  uint32_t bytes;       // that go to a rank
  uint32_t run;         // of these, bytes that stay together in `out`: runs of the ranks alternate there
  uint32_t first_word;  // of the message
};

struct ExchangeArgs {
  ExchangePart parts[kExchangeParts];
  ExchangeSide* sides[kExchangeRanks];  // by rank
  uint8_t* slots[kExchangeRanks];       // by rank: [2 parities, sources, slot_bytes]
  uint64_t* report;                     // this rank's, in host memory
  int64_t slot_bytes;  // of words with flags and of packets there are slots of their own: neither looks like the other
  uint64_t limit_ns;
  uint32_t num_parts;
  uint32_t first, words, block_words;  // of the message: this launch's first one and how many, and of a block's part
  uint32_t rank, ranks, channel;
};

// What the host reads of a call that gave up: not 0.
inline constexpr uint64_t kReported = uint64_t{1} << 63;
inline constexpr int kReportChannel = 40, kReportRank = 32;  // bits

__device__ __forceinline__ void store_release(uint32_t* to, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ uint32_t load_relaxed(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ void store_relaxed(uint32_t* to, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
__device__ __forceinline__ uint4 load_word(const uint8_t* from) {
  uint4 w;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
               : "l"(from));
  return w;
}
__device__ __forceinline__ void store_word(uint8_t* to, uint4 w) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w)
               : "memory");
}
// Two packets, each of 4 bytes and the number of the call.
__device__ __forceinline__ void store_packets(uint8_t* to, uint32_t a, uint32_t b, uint32_t call) {
  const uint64_t high = uint64_t{call} << 32;
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(high | a), "l"(high | b) : "memory");
}
// Whether both packets are of this call.
__device__ __forceinline__ bool load_packets(const uint8_t* from, uint32_t call, uint32_t* a, uint32_t* b) {
  uint64_t first, second;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "l"(from));
  *a = static_cast<uint32_t>(first), *b = static_cast<uint32_t>(second);
  return static_cast<uint32_t>(first >> 32) == call && static_cast<uint32_t>(second >> 32) == call;
}
__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// How long a thread has waited in a call. The clock is not read before it has looked some times in vain.
class Patience {
 public:
  __device__ Patience(const ExchangeArgs& args, const ExchangeSide* side) : args_(args), side_(side) {}
  // After a look in vain: whether to give up, because it took too long or another rank has given up.
  __device__ bool ends() {
    if (++looks_ % kLooks != 0) return false;
    if (since_ == 0) since_ = nanoseconds();
    return nanoseconds() - since_ > args_.limit_ns || load_relaxed(&side_->broken) != 0;
  }

 private:
  static constexpr uint32_t kLooks = 64;
  const ExchangeArgs& args_;
  const ExchangeSide* side_;
  uint64_t since_ = 0;
  uint32_t looks_ = 0;
};

// `missing` did not come in time: for the host, then for all ranks, this one included.
__device__ __forceinline__ void give_up(const ExchangeArgs& args, uint32_t missing, uint32_t call) {
  *reinterpret_cast<volatile uint64_t*>(args.report) =
      kReported | uint64_t{args.channel} << kReportChannel | uint64_t{missing} << kReportRank | call;
  __threadfence_system();
#pragma unroll 1
  for (uint32_t rank = 0; rank < args.ranks; ++rank) store_relaxed(&args.sides[rank]->broken, 1);
}

__device__ __forceinline__ const ExchangePart& part_of(const ExchangeArgs& args, uint32_t word) {
  uint32_t i = 0;
  while (i + 1 < args.num_parts && word >= args.parts[i + 1].first_word) ++i;
  return args.parts[i];
}

// A word of an operand or result, of which `left` bytes are there. kGranule: bytes of an access, 16 if all are there.
template <uint32_t kGranule>
__device__ __forceinline__ uint4 read_word(const uint8_t* from, uint32_t left) {
  if constexpr (kGranule == kExchangeWord) return *reinterpret_cast<const uint4*>(from);
  uint32_t lanes[4] = {};
#pragma unroll
  for (uint32_t i = 0; i < kExchangeWord / kGranule; ++i) {
    if (i * kGranule >= left) continue;
    if constexpr (kGranule == 4) {
      lanes[i] = reinterpret_cast<const uint32_t*>(from)[i];
    } else {
      lanes[i / 2] |= uint32_t{reinterpret_cast<const uint16_t*>(from)[i]} << i % 2 * 16;
    }
  }
  return {lanes[0], lanes[1], lanes[2], lanes[3]};
}
template <uint32_t kGranule>
__device__ __forceinline__ void write_word(uint8_t* to, uint4 word, uint32_t left) {
  if constexpr (kGranule == kExchangeWord) {
    *reinterpret_cast<uint4*>(to) = word;
    return;
  }
  const uint32_t lanes[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
  for (uint32_t i = 0; i < kExchangeWord / kGranule; ++i) {
    if (i * kGranule >= left) continue;
    if constexpr (kGranule == 4) {
      reinterpret_cast<uint32_t*>(to)[i] = lanes[i];
    } else {
      reinterpret_cast<uint16_t*>(to)[i] = static_cast<uint16_t>(lanes[i / 2] >> i % 2 * 16);
    }
  }
}

// Neighbours in the order of ranks, then neighbours of these, and so on: the sum of 2, 4 or 8 ranks is that of fewer
// ranks whose operands were summed so before. The first word becomes the sum.
__device__ __forceinline__ uint4 sum_in_pairs(uint4 (&words)[kExchangeRanks], uint32_t ranks) {
#pragma unroll
  for (uint32_t step = 1; step < kExchangeRanks; step *= 2) {
#pragma unroll
    for (uint32_t i = 0; i + step < kExchangeRanks; i += 2 * step) {
      if (i + step >= ranks) continue;
      const uint4 other = words[i + step];
      words[i].x = __float_as_uint(__uint_as_float(words[i].x) + __uint_as_float(other.x));
      words[i].y = __float_as_uint(__uint_as_float(words[i].y) + __uint_as_float(other.y));
      words[i].z = __float_as_uint(__uint_as_float(words[i].z) + __uint_as_float(other.z));
      words[i].w = __float_as_uint(__uint_as_float(words[i].w) + __uint_as_float(other.w));
    }
  }
  return words[0];
}

// A word of one rank's message.
template <uint32_t kGranule>
struct ExchangeWord {
  const ExchangePart& part;
  uint32_t at, left;  // bytes of the part before it, and from it on

  __device__ ExchangeWord(const ExchangeArgs& args, uint32_t word) : part(part_of(args, word)) {
    at = (word - part.first_word) * kExchangeWord;
    left = part.bytes - at;
  }
  // What goes to `rank`.
  __device__ uint4 read(uint32_t rank) const { return read_word<kGranule>(part.in + rank * part.stride + at, left); }
  // Puts it where it belongs in the result if it came from `source`.
  __device__ void place(uint32_t source, uint32_t ranks, uint4 data) const {
    const uint32_t run = part.run == part.bytes ? 0 : at / part.run;
    write_word<kGranule>(part.out + (int64_t{run} * ranks + source) * part.run + (at - run * part.run), data, left);
  }
  __device__ void place_sum(uint4 data) const { write_word<kGranule>(part.out + at, data, left); }
};

// kGranule: the least of the parts'.
template <bool kSum, bool kPackets, uint32_t kGranule>
__global__ void __launch_bounds__(kExchangeThreads, 1) exchange_kernel(const __grid_constant__ ExchangeArgs args) {
  using Word = ExchangeWord<kGranule>;
  constexpr int kBatch = 4;  // words a thread has in flight
  constexpr uint32_t kStep = kBatch * kExchangeThreads;
  __shared__ uint32_t shared_call, shared_missing;
  ExchangeSide* side = args.sides[args.rank];
  const uint32_t begin = args.first + blockIdx.x * args.block_words;
  const uint32_t end = min(begin + args.block_words, args.first + args.words);
  const uint32_t mine = begin + threadIdx.x;  // this thread's words: every kExchangeThreads-th from here on
  if (threadIdx.x == 0) {
    shared_call = load_relaxed(&side->calls[blockIdx.x]) + 1;
    shared_missing = load_relaxed(&side->broken) != 0 ? args.rank : kNobody;
  }
  // The rank so many places after this one.
  const auto after = [&](uint32_t ahead) {
    return args.rank + ahead < args.ranks ? args.rank + ahead : args.rank + ahead - args.ranks;
  };
  uint4 data[kBatch];
  const auto read = [&](uint32_t to, uint32_t first) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const uint32_t word = first + i * kExchangeThreads;
      if (word < end) data[i] = Word(args, word).read(to);
    }
  };
  read(after(1), mine);  // which needs no number
  __syncthreads();
  const uint32_t call = shared_call, parity = call & 1;
  const bool broken = shared_missing != kNobody;
  // Every block's number, whatever the number of blocks of a call.
  for (uint32_t i = blockIdx.x + threadIdx.x * gridDim.x; i < kExchangeBlocks; i += kExchangeThreads * gridDim.x)
    side->calls[i] = call;
  // What `source` writes to `owner`.
  const auto slot_of = [&](uint32_t owner, uint32_t source) {
    return args.slots[owner] + (int64_t{parity} * args.ranks + source) * args.slot_bytes;
  };

  if (!broken && mine < end) {
    uint32_t ahead = 1, first = mine;
    while (true) {
      uint8_t* slot = slot_of(after(ahead), args.rank);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const uint32_t word = first + i * kExchangeThreads;
        if (word >= end) continue;
        uint8_t* at = slot + int64_t{word - args.first} * kExchangeWord;
        if (kPackets) {  // the halves of words apart: neighbouring threads write neighbouring bytes
          store_packets(at, data[i].x, data[i].y, call);
          store_packets(at + args.slot_bytes / 2, data[i].z, data[i].w, call);
        } else {
          store_word(at, data[i]);
        }
      }
      first += kStep;
      if (first >= end) {
        first = mine;
        if (++ahead == args.ranks) break;
      }
      read(after(ahead), first);
    }
  }
  const uint32_t other = threadIdx.x;
  const bool speaks = !kPackets && !broken && other < args.ranks && other != args.rank;  // for the block, with `other`
  if (!kPackets) {
    __syncthreads();
    if (speaks) store_release(&args.sides[other]->flags[parity][args.rank][blockIdx.x], call);
  }
  if (!kSum) {  // what stays here, while the others' words come
#pragma unroll 1
    for (uint32_t first = mine; first < end; first += kStep) {
      read(args.rank, first);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const uint32_t number = first + i * kExchangeThreads;
        if (number < end) Word(args, number).place(args.rank, args.ranks, data[i]);
      }
    }
  }
  if (!kPackets) {
    if (speaks) {
      Patience patience(args, side);
      while (load_acquire(&side->flags[parity][other][blockIdx.x]) != call) {
        if (!patience.ends()) continue;
        give_up(args, other, call);
        shared_missing = other;
        break;
      }
    }
    __syncthreads();
  }

  bool missing = shared_missing != kNobody;
  // The word that `source` sent; packets are waited for.
  const auto receive = [&](uint32_t source, uint32_t word) -> uint4 {
    const uint4 nothing = {~0u, ~0u, ~0u, ~0u};
    if (missing) return nothing;
    const uint8_t* at = slot_of(args.rank, source) + int64_t{word - args.first} * kExchangeWord;
    if (!kPackets) return load_word(at);
    uint4 found;
    Patience patience(args, side);
    while (true) {
      const bool low = load_packets(at, call, &found.x, &found.y);
      const bool high = load_packets(at + args.slot_bytes / 2, call, &found.z, &found.w);
      if (low && high) return found;
      if (!patience.ends()) continue;
      give_up(args, source, call);
      missing = true;
      return nothing;
    }
  };
  if constexpr (kSum) {
#pragma unroll 1
    for (uint32_t number = mine; number < end; number += kExchangeThreads) {
      const Word word(args, number);
      uint4 terms[kExchangeRanks];
#pragma unroll
      for (uint32_t source = 0; source < kExchangeRanks; ++source) {
        if (source >= args.ranks) continue;
        terms[source] = source == args.rank ? word.read(source) : receive(source, number);
      }
      word.place_sum(sum_in_pairs(terms, args.ranks));
    }
  } else {
#pragma unroll 1
    for (uint32_t ahead = args.ranks - 1; ahead > 0; --ahead) {  // the rank before this one wrote first
      const uint32_t source = after(ahead);
#pragma unroll 1
      for (uint32_t first = mine; first < end; first += kStep) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const uint32_t number = first + i * kExchangeThreads;
          if (number < end) data[i] = receive(source, number);
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const uint32_t number = first + i * kExchangeThreads;
          if (number < end) Word(args, number).place(source, args.ranks, data[i]);
        }
      }
    }
  }
}

}  // namespace dsv4
