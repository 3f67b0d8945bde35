// The swap between cache leaves and host records: what the CUDA kernel and its CPU twin share, address arithmetic
// included. Wrapper and argument meaning: dsv4_jax/tiers/record_copy.py; record format: dsv4_jax/records.py.
//
// A leaf is [layers, units, piece_bytes] in device memory; a record holds one unit (a block or a slot) of every leaf
// and layer, leaf after leaf, layer after layer, each piece from a 16-byte boundary. So a record is a row of 16-byte
// words and a word lies in one piece: threads walk records, which keeps the side that crosses PCIe contiguous.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>

#include "xla/ffi/api/ffi.h"

#ifdef __CUDACC__
#define DSV4_BOTH __host__ __device__ __forceinline__
#else
#define DSV4_BOTH inline
#endif

namespace dsv4 {

constexpr int kMaxSwapLeaves = 24;
constexpr uint32_t kWordBytes = 16;

struct SwapLeaf {
  uint8_t* data;         // [layers, units, piece_bytes]
  int64_t layer_stride;  // bytes from layer to layer
  uint32_t layers;
  uint32_t first_word;   // of the leaf in a record
  uint32_t piece_words;  // words of a piece in a record, the last one padded
  uint32_t piece_bytes;
};

struct SwapArgs {
  SwapLeaf leaves[kMaxSwapLeaves];
  int num_leaves;
  uint8_t* records;  // [num_records, record_words] words
  int64_t num_records, units, pairs;
  int64_t first_record, first_unit;  // ids below these are padding
  uint32_t record_words;
  const int32_t* unit_ids;    // [pairs]
  const int32_t* record_ids;  // [pairs]

  // Whether a pair names a unit and a record that exist.
  DSV4_BOTH bool valid(int64_t unit, int64_t record) const {
    return unit >= first_unit && unit < units && record >= first_record && record < num_records;
  }
};

constexpr uint32_t kPartBytes = sizeof(uint32_t), kByteBits = 8;
struct alignas(kWordBytes) SwapWord {
  uint32_t x[kWordBytes / kPartBytes];
};

// Where a word of a record lies on either side.
struct SwapPlace {
  uint8_t* unit;    // aligned to the greatest power of two that divides piece_bytes, at most 16
  uint8_t* record;  // 16-byte aligned
  uint32_t bytes;   // of the word that belong to the piece; 0: none, the record's tail
  uint32_t piece_bytes;
};

DSV4_BOTH SwapPlace locate(const SwapArgs& args, int64_t unit, int64_t record, uint32_t word) {
  int i = 0;
  while (i + 1 < args.num_leaves && word >= args.leaves[i + 1].first_word) ++i;
  const SwapLeaf& leaf = args.leaves[i];
  const uint32_t layer = (word - leaf.first_word) / leaf.piece_words;
  const uint32_t byte = (word - leaf.first_word - layer * leaf.piece_words) * kWordBytes;
  SwapPlace place;
  place.record = args.records + (record * args.record_words + word) * kWordBytes;
  place.unit = leaf.data + layer * leaf.layer_stride + unit * leaf.piece_bytes + byte;
  place.bytes = layer >= leaf.layers ? 0 : leaf.piece_bytes - byte < kWordBytes ? leaf.piece_bytes - byte : kWordBytes;
  place.piece_bytes = leaf.piece_bytes;
  return place;
}

template <typename T>
DSV4_BOTH T load_as(const uint8_t* from) {
#ifdef __CUDA_ARCH__
  return *reinterpret_cast<const T*>(from);
#else
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
#endif
}

template <typename T>
DSV4_BOTH void store_as(uint8_t* to, const T& value) {
#ifdef __CUDA_ARCH__
  *reinterpret_cast<T*>(to) = value;
#else
  std::memcpy(to, &value, sizeof(T));
#endif
}

// A word's first `bytes` bytes in accesses of T; the rest is zero.
template <typename T>
DSV4_BOTH SwapWord load_part(const uint8_t* from, uint32_t bytes) {
  SwapWord word = {};
  for (uint32_t i = 0; i < kWordBytes; i += sizeof(T)) {
    if (i < bytes)
      word.x[i / kPartBytes] |= static_cast<uint32_t>(load_as<T>(from + i)) << (i % kPartBytes * kByteBits);
  }
  return word;
}

template <typename T>
DSV4_BOTH void store_part(uint8_t* to, const SwapWord& word, uint32_t bytes) {
  for (uint32_t i = 0; i < kWordBytes; i += sizeof(T)) {
    if (i < bytes) store_as<T>(to + i, static_cast<T>(word.x[i / kPartBytes] >> (i % kPartBytes * kByteBits)));
  }
}

// The unit's side of a word, with the widest accesses its alignment allows.
DSV4_BOTH SwapWord load_unit(const SwapPlace& place) {
  if (place.piece_bytes % kWordBytes == 0 && place.bytes == kWordBytes) return load_as<SwapWord>(place.unit);
  if (place.piece_bytes % sizeof(uint32_t) == 0) return load_part<uint32_t>(place.unit, place.bytes);
  if (place.piece_bytes % sizeof(uint16_t) == 0) return load_part<uint16_t>(place.unit, place.bytes);
  return load_part<uint8_t>(place.unit, place.bytes);
}

DSV4_BOTH void store_unit(const SwapPlace& place, const SwapWord& word) {
  if (place.piece_bytes % kWordBytes == 0 && place.bytes == kWordBytes) return store_as<SwapWord>(place.unit, word);
  if (place.piece_bytes % sizeof(uint32_t) == 0) return store_part<uint32_t>(place.unit, word, place.bytes);
  if (place.piece_bytes % sizeof(uint16_t) == 0) return store_part<uint16_t>(place.unit, word, place.bytes);
  return store_part<uint8_t>(place.unit, word, place.bytes);
}

// Half a copy each; kOut: from the units to the records.
template <bool kOut>
DSV4_BOTH SwapWord load_word(const SwapPlace& place) {
  return kOut ? load_unit(place) : load_as<SwapWord>(place.record);
}

template <bool kOut>
DSV4_BOTH void store_word(const SwapPlace& place, const SwapWord& word) {
  if (kOut) {
    store_as<SwapWord>(place.record, word);
  } else {
    store_unit(place, word);
  }
}

// The attributes of a call: of each leaf its layers, the bytes of a piece and where in a record its pieces start.
struct SwapAttributes {
  xla::ffi::Span<const int64_t> layers, piece_bytes, offsets;
  int64_t first_unit, first_record;
};

// Reads the operands (leaves, records, unit ids, record ids) and checks that everything a valid pair can name lies in
// them. Results must be their aliased operands.
template <bool kOut>
xla::ffi::Error read_swap(xla::ffi::RemainingArgs operands, xla::ffi::RemainingRets results,
                          const SwapAttributes& attributes, SwapArgs* args) {
  namespace ffi = xla::ffi;
  const auto wrong = [](const std::string& what) {
    return ffi::Error::InvalidArgument(std::string(kOut ? "swap_out: " : "swap_in: ") + what);
  };
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % kWordBytes == 0; };
  const auto [layers_of, bytes_of, offsets, first_unit, first_record] = attributes;
  const size_t n = layers_of.size();
  if (n == 0 || n > kMaxSwapLeaves || bytes_of.size() != n || offsets.size() != n) {
    return wrong("needs 1 to 24 leaves, three numbers each");
  }
  constexpr size_t kOthers = 3;  // operands: records, unit ids, record ids
  if (operands.size() != n + kOthers)
    return wrong(std::to_string(operands.size()) + " operands for " + std::to_string(n) + " leaves");
  if (results.size() != (kOut ? 1 : n)) return wrong("another number of results");
  if (first_unit < 0 || first_record < 0) return wrong("negative first id");

  const auto records = operands.get<ffi::AnyBuffer>(n);
  const auto unit_ids = operands.get<ffi::AnyBuffer>(n + 1), record_ids = operands.get<ffi::AnyBuffer>(n + 2);
  if (!records.has_value() || !unit_ids.has_value() || !record_ids.has_value()) return wrong("an operand is no array");
  if (records->dimensions().size() != 2 || records->element_type() != ffi::U8)
    return wrong("records are not uint8[n, bytes]");
  const int64_t record_bytes = records->dimensions()[1];
  if (record_bytes % kWordBytes != 0 || record_bytes / kWordBytes > INT32_MAX) return wrong("impossible record size");
  for (const auto& ids : {*unit_ids, *record_ids}) {
    if (ids.dimensions().size() != 1 || ids.element_type() != ffi::S32) return wrong("ids are not int32[n]");
  }
  if (unit_ids->element_count() != record_ids->element_count()) return wrong("id lists of unequal lengths");
  args->num_leaves = static_cast<int>(n);
  args->records = static_cast<uint8_t*>(records->untyped_data());
  args->num_records = records->dimensions()[0];
  args->record_words = static_cast<uint32_t>(record_bytes / kWordBytes);
  args->unit_ids = static_cast<const int32_t*>(unit_ids->untyped_data());
  args->record_ids = static_cast<const int32_t*>(record_ids->untyped_data());
  args->pairs = static_cast<int64_t>(unit_ids->element_count());
  args->first_unit = first_unit;
  args->first_record = first_record;
  if (!aligned(args->records)) return wrong("records are not 16-byte aligned");

  int64_t end = 0;  // of the leaves so far, in words
  for (size_t i = 0; i < n; ++i) {
    const auto leaf = operands.get<ffi::AnyBuffer>(i);
    const int64_t layers = layers_of[i], bytes = bytes_of[i], offset = offsets[i];
    const std::string name = "leaf " + std::to_string(i);
    if (!leaf.has_value()) return wrong(name + " is no array");
    if (layers < 1 || bytes < 1 || layers > INT32_MAX || bytes > INT32_MAX)
      return wrong(name + " has impossible pieces");
    const int64_t size = static_cast<int64_t>(leaf->size_bytes()), words = (bytes + kWordBytes - 1) / kWordBytes;
    if (size % (layers * bytes) != 0) return wrong(name + " is not a whole number of units");
    const int64_t units = size / (layers * bytes);
    if (i > 0 && units != args->units) return wrong(name + " has another number of units");
    if (offset != end * kWordBytes) return wrong(name + " does not follow the leaf before it in the record");
    end += layers * words;
    if (end * kWordBytes > record_bytes) return wrong(name + " does not fit the record");
    args->units = units;
    args->leaves[i] = {static_cast<uint8_t*>(leaf->untyped_data()),
                       units * bytes,
                       static_cast<uint32_t>(layers),
                       static_cast<uint32_t>(offset / kWordBytes),
                       static_cast<uint32_t>(words),
                       static_cast<uint32_t>(bytes)};
    if (!aligned(args->leaves[i].data)) return wrong(name + " is not 16-byte aligned");
    if (kOut) continue;
    auto result = results.get<ffi::AnyBuffer>(i);
    if (!result.has_value() || (*result)->untyped_data() != args->leaves[i].data)
      return wrong(name + " is not updated in place");
  }
  if (kOut) {
    auto result = results.get<ffi::AnyBuffer>(0);
    if (!result.has_value() || (*result)->untyped_data() != args->records)
      return wrong("records are not updated in place");
  }
  return ffi::Error::Success();
}

}  // namespace dsv4
