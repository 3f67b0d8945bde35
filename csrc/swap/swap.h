// The swap between cache leaves and host records: what the CUDA kernel and its CPU twin share, address arithmetic
// included. Wrapper and argument meaning: dsv4_jax/tiers/record_copy.py; record format: dsv4_jax/records.py.
//
// A leaf is [layers, units, ring, row_bytes] in device memory. A record holds pieces, one after the other: of a leaf
// the columns [column, column + width) of some rows, layer after layer, each layer from a 16-byte boundary. So a record
// is a row of 16-byte words and a word lies in one layer of one piece: threads walk records, which keeps the side that
// crosses PCIe contiguous. The host has a record in pages of one size: page i is that of its words i * page_words on.
//
// Which rows: those of the positions n / ratio * ratio - before + 0, 1, 2, ... of a request of n tokens, at position
// mod ring; with ratio 0 the first ones. A row is dead if its position is not in [0, n), or if `unfinished` is not 0
// and divides n: dead rows are zeros in a record, and a unit whose rows are named by position is cleared before they
// come.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <string>

#include "xla/ffi/api/ffi.h"

#ifdef __CUDACC__
#define DSV4_BOTH __host__ __device__ __forceinline__
#else
#define DSV4_BOTH inline
#endif

namespace dsv4 {

constexpr int kMaxSwapLeaves = 24, kMaxSwapPieces = 40;
constexpr uint32_t kWordBytes = 16;

// From units to records, back, and zeros to whole units.
enum class Swap { kOut, kIn, kClear };

struct SwapPiece {
  uint8_t* data;         // the leaf's
  int64_t layer_stride;  // bytes from layer to layer
  uint32_t layers;
  uint32_t first_word;   // of the piece in a record
  uint32_t layer_words;  // words of a layer in a record, the last one padded
  uint32_t layer_bytes;  // rows * width
  uint32_t unit_bytes;   // ring * row_bytes
  uint32_t ring, row_bytes, column, width;
  uint32_t ratio, before, unfinished;
  uint32_t granule;  // bytes of an access to the unit: 16, 4, 2 or 1
};

struct SwapArgs {
  SwapPiece pieces[kMaxSwapPieces];
  int num_pieces;
  uint8_t* records;  // [num_records, page_words] words
  int64_t num_records, units, pairs;
  int64_t first_record, first_unit;  // ids below these are padding
  uint32_t page_words;
  uint32_t pages;             // of a record, at most
  uint32_t words;             // to go through: of all pages, or of what is cleared
  const int32_t* unit_ids;    // [pairs]
  const int32_t* record_ids;  // [pairs, pages]
  const int32_t* num_tokens;  // [pairs]
  bool by_position;           // whether any piece has positions: without, num_tokens is not read

  DSV4_BOTH bool has_unit(int64_t unit) const { return unit >= first_unit && unit < units; }
  DSV4_BOTH bool has_record(int64_t record) const { return record >= first_record && record < num_records; }
};

constexpr uint32_t kPartBytes = sizeof(uint32_t), kByteBits = 8;
struct alignas(kWordBytes) SwapWord {
  uint32_t x[kWordBytes / kPartBytes];
};

// Where a word of a record lies on either side.
struct SwapPlace {
  const SwapPiece* piece;
  uint8_t* unit;    // the layer's rows of the unit
  uint8_t* record;  // 16-byte aligned; null: the pair has no such page
  uint32_t byte;    // of the layer's bytes in the record
  uint32_t bytes;   // of the word that belong to the piece; 0: none, a tail, or the pair has no such unit
  uint32_t tokens;
};

template <Swap kWay>
DSV4_BOTH SwapPlace locate(const SwapArgs& args, int64_t pair, uint32_t word) {
  int i = 0;
  while (i + 1 < args.num_pieces && word >= args.pieces[i + 1].first_word) ++i;
  const SwapPiece& piece = args.pieces[i];
  const uint32_t layer = (word - piece.first_word) / piece.layer_words;
  const int64_t unit = args.unit_ids[pair];
  SwapPlace place = {};
  if (!args.has_unit(unit) || !args.has_record(args.record_ids[pair * args.pages])) return place;
  place.piece = &piece;
  place.byte = (word - piece.first_word - layer * piece.layer_words) * kWordBytes;
  if (layer < piece.layers) {
    const uint32_t left = piece.layer_bytes - place.byte;
    place.bytes = left < kWordBytes ? left : kWordBytes;
    place.unit = piece.data + layer * piece.layer_stride + unit * piece.unit_bytes;
  }
  if (args.by_position && args.num_tokens[pair] > 0) place.tokens = static_cast<uint32_t>(args.num_tokens[pair]);
  if (kWay != Swap::kClear) {
    const uint32_t page = word / args.page_words;
    const int64_t record = args.record_ids[pair * args.pages + page];
    if (args.has_record(record))
      place.record = args.records + (record * args.page_words + word - page * args.page_words) * kWordBytes;
  }
  return place;
}

// Where a byte of the layer lies in the unit; null: nowhere, its row is dead.
DSV4_BOTH uint8_t* address(const SwapPlace& place, uint32_t byte) {
  const SwapPiece& piece = *place.piece;
  const uint32_t number = byte / piece.width;
  uint32_t row = number;
  if (piece.ratio != 0) {
    const uint32_t end = place.tokens / piece.ratio * piece.ratio + number;
    const bool dead = end < piece.before || end - piece.before >= place.tokens ||
                      (piece.unfinished != 0 && place.tokens % piece.unfinished == 0);
    if (dead) return nullptr;
    row = (end - piece.before) % piece.ring;
  }
  return place.unit + static_cast<int64_t>(row) * piece.row_bytes + piece.column + (byte - number * piece.width);
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

// The piece's bytes of a word in accesses of T; the rest, and dead rows, are zero.
template <typename T>
DSV4_BOTH SwapWord load_part(const SwapPlace& place) {
  SwapWord word = {};
  for (uint32_t i = 0; i < kWordBytes; i += sizeof(T)) {
    const uint8_t* from = i < place.bytes ? address(place, place.byte + i) : nullptr;
    if (from != nullptr)
      word.x[i / kPartBytes] |= static_cast<uint32_t>(load_as<T>(from)) << (i % kPartBytes * kByteBits);
  }
  return word;
}

template <typename T>
DSV4_BOTH void store_part(const SwapPlace& place, const SwapWord& word) {
  for (uint32_t i = 0; i < kWordBytes; i += sizeof(T)) {
    uint8_t* to = i < place.bytes ? address(place, place.byte + i) : nullptr;
    if (to != nullptr) store_as<T>(to, static_cast<T>(word.x[i / kPartBytes] >> (i % kPartBytes * kByteBits)));
  }
}

// The unit's side of a word, with the widest accesses that all of its bytes allow.
DSV4_BOTH SwapWord load_unit(const SwapPlace& place) {
  if (place.bytes == 0) return {};
  if (place.piece->granule == kWordBytes) {
    const uint8_t* from = address(place, place.byte);
    return from == nullptr ? SwapWord{} : load_as<SwapWord>(from);
  }
  if (place.piece->granule == sizeof(uint32_t)) return load_part<uint32_t>(place);
  if (place.piece->granule == sizeof(uint16_t)) return load_part<uint16_t>(place);
  return load_part<uint8_t>(place);
}

DSV4_BOTH void store_unit(const SwapPlace& place, const SwapWord& word) {
  if (place.bytes == 0) return;
  if (place.piece->granule == kWordBytes) {
    uint8_t* to = address(place, place.byte);
    if (to != nullptr) store_as<SwapWord>(to, word);
  } else if (place.piece->granule == sizeof(uint32_t)) {
    store_part<uint32_t>(place, word);
  } else if (place.piece->granule == sizeof(uint16_t)) {
    store_part<uint16_t>(place, word);
  } else {
    store_part<uint8_t>(place, word);
  }
}

// Half a copy each. A pair without the unit or the first page moves nothing, nor does a word of a page that it lacks.
template <Swap kWay>
DSV4_BOTH SwapWord load_word(const SwapPlace& place) {
  if (kWay == Swap::kClear || place.record == nullptr) return {};
  return kWay == Swap::kOut ? load_unit(place) : load_as<SwapWord>(place.record);
}

template <Swap kWay>
DSV4_BOTH void store_word(const SwapPlace& place, const SwapWord& word) {
  if (kWay == Swap::kClear) return store_unit(place, word);
  if (place.record == nullptr) return;
  if (kWay == Swap::kOut) {
    store_as<SwapWord>(place.record, word);
  } else {
    store_unit(place, word);
  }
}

inline uint32_t granule_of(std::initializer_list<uint32_t> sizes) {
  uint32_t bits = kWordBytes;
  for (const uint32_t size : sizes) bits |= size;
  const uint32_t power = bits & (~bits + 1);            // the lowest bit that any of them has
  return power == 2 * kPartBytes ? kPartBytes : power;  // no access of 8 bytes
}

// The whole units that a swap in clears first: none if all of their bytes are about to be written.
inline SwapArgs clearing(const SwapArgs& swap) {
  SwapArgs args = swap;
  args.num_pieces = 0;
  args.words = 0;
  args.by_position = false;
  for (int i = 0; swap.by_position && i < swap.num_pieces; ++i) {
    SwapPiece piece = swap.pieces[i];
    bool listed = false;
    for (int j = 0; j < args.num_pieces; ++j) listed = listed || args.pieces[j].data == piece.data;
    if (listed) continue;
    piece.first_word = args.words;
    piece.layer_bytes = piece.row_bytes = piece.width = piece.unit_bytes;
    piece.layer_words = (piece.unit_bytes + kWordBytes - 1) / kWordBytes;
    piece.ring = 1;
    piece.column = piece.ratio = piece.before = piece.unfinished = 0;
    piece.granule = granule_of({piece.unit_bytes});
    args.words += piece.layers * piece.layer_words;
    args.pieces[args.num_pieces++] = piece;
  }
  return args;
}

// A piece as the attributes have it.
struct PieceNumbers {
  int64_t leaf, layers, ring, row_bytes, column, rows, width, offset, ratio, before, unfinished;
};
constexpr size_t kPieceNumbers = sizeof(PieceNumbers) / sizeof(int64_t);

struct SwapAttributes {
  xla::ffi::Span<const int64_t> pieces;  // kPieceNumbers of each
  int64_t first_unit, first_record;
};

// What is wrong with a piece of a leaf of `size` bytes, or nothing.
inline std::string wrong_numbers(const PieceNumbers& n, int64_t size) {
  for (const int64_t x : {n.layers, n.ring, n.row_bytes, n.rows, n.width}) {
    if (x < 1 || x > INT32_MAX) return " has impossible sizes";
  }
  for (const int64_t x : {n.column, n.offset, n.ratio, n.before, n.unfinished}) {
    if (x < 0 || x > INT32_MAX) return " has impossible numbers";
  }
  if (n.ring * n.row_bytes > INT32_MAX || n.rows * n.width > INT32_MAX) return " has impossible sizes";
  if (n.column + n.width > n.row_bytes || n.rows > n.ring) return " does not lie in its rows";
  if (size % (n.layers * (n.ring * n.row_bytes)) != 0) return " is not of a whole number of units";
  return "";
}

// Reads the operands (leaves, records, unit ids, record ids, and tokens if any piece has positions) and checks that
// everything a valid pair can name lies in them. Results must be their aliased operands.
template <bool kOut>
xla::ffi::Error read_swap(xla::ffi::RemainingArgs operands, xla::ffi::RemainingRets results,
                          const SwapAttributes& attributes, SwapArgs* args) {
  namespace ffi = xla::ffi;
  const auto wrong = [](const std::string& what) {
    return ffi::Error::InvalidArgument(std::string(kOut ? "swap_out: " : "swap_in: ") + what);
  };
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % kWordBytes == 0; };
  const auto [numbers, first_unit, first_record] = attributes;
  const size_t num_pieces = numbers.size() / kPieceNumbers;
  if (num_pieces == 0 || num_pieces > kMaxSwapPieces || numbers.size() % kPieceNumbers != 0)
    return wrong("needs 1 to 40 pieces, eleven numbers each");
  PieceNumbers pieces[kMaxSwapPieces];
  std::memcpy(pieces, numbers.begin(), numbers.size() * sizeof(int64_t));
  size_t leaves = 0;
  for (size_t i = 0; i < num_pieces; ++i) {
    if (pieces[i].leaf < 0 || pieces[i].leaf >= kMaxSwapLeaves) return wrong("a piece of no leaf");
    leaves = std::max(leaves, static_cast<size_t>(pieces[i].leaf) + 1);
    args->by_position = args->by_position || pieces[i].ratio != 0;
  }
  const size_t others = args->by_position ? 4 : 3;
  if (operands.size() != leaves + others)
    return wrong(std::to_string(operands.size()) + " operands for " + std::to_string(leaves) + " leaves and " +
                 std::to_string(others) + " more");
  if (results.size() != (kOut ? 1 : leaves)) return wrong("another number of results");
  if (first_unit < 0 || first_record < 0) return wrong("negative first id");

  const auto records = operands.get<ffi::AnyBuffer>(leaves);
  if (!records.has_value() || records->dimensions().size() != 2 || records->element_type() != ffi::U8)
    return wrong("records are not uint8[n, bytes]");
  const int64_t page_bytes = records->dimensions()[1];
  const auto unit_ids = operands.get<ffi::AnyBuffer>(leaves + 1), record_ids = operands.get<ffi::AnyBuffer>(leaves + 2);
  const auto tokens = operands.get<ffi::AnyBuffer>(leaves + others - 1);  // the record ids again without positions
  for (const auto& ids : {unit_ids, record_ids, tokens}) {
    if (!ids.has_value() || ids->element_type() != ffi::S32) return wrong("ids are not int32");
  }
  const auto pairs = static_cast<int64_t>(unit_ids->element_count());
  const auto named = static_cast<int64_t>(record_ids->element_count());
  const auto shape = record_ids->dimensions();
  if (unit_ids->dimensions().size() != 1 || shape.size() < 1 || shape.size() > 2 || shape[0] != pairs ||
      (args->by_position && (tokens->dimensions().size() != 1 || tokens->dimensions()[0] != pairs)))
    return wrong("id lists of unequal lengths");
  const int64_t pages = shape.size() == 2 ? shape[1] : 1;
  if (page_bytes < kWordBytes || page_bytes % kWordBytes != 0 || page_bytes / kWordBytes * pages > INT32_MAX)
    return wrong("impossible record size");
  args->num_pieces = static_cast<int>(num_pieces);
  args->records = static_cast<uint8_t*>(records->untyped_data());
  args->num_records = records->dimensions()[0];
  args->page_words = static_cast<uint32_t>(page_bytes / kWordBytes);
  args->pages = static_cast<uint32_t>(pages);
  args->words = args->page_words * args->pages;
  args->unit_ids = static_cast<const int32_t*>(unit_ids->untyped_data());
  args->record_ids = static_cast<const int32_t*>(record_ids->untyped_data());
  args->num_tokens = static_cast<const int32_t*>(tokens->untyped_data());
  args->pairs = named == 0 ? 0 : pairs;
  args->first_unit = first_unit;
  args->first_record = first_record;
  if (!aligned(args->records)) return wrong("records are not 16-byte aligned");

  int64_t end = 0;  // of the pieces so far, in words
  for (size_t i = 0; i < num_pieces; ++i) {
    const PieceNumbers& n = pieces[i];
    const std::string name = "piece " + std::to_string(i);
    const auto leaf = operands.get<ffi::AnyBuffer>(static_cast<size_t>(n.leaf));
    if (!leaf.has_value()) return wrong(name + " is of no array");
    const auto size = static_cast<int64_t>(leaf->size_bytes());
    if (const std::string what = wrong_numbers(n, size); !what.empty()) return wrong(name + what);
    const int64_t unit_bytes = n.ring * n.row_bytes, units = size / (n.layers * unit_bytes);
    if (i > 0 && units != args->units) return wrong(name + " is of another number of units");
    if (n.offset % kWordBytes != 0 || n.offset / kWordBytes < end)
      return wrong(name + " does not follow the piece before it in the record");
    const int64_t words = (n.rows * n.width + kWordBytes - 1) / kWordBytes;
    end = n.offset / kWordBytes + n.layers * words;
    // A state may end with pages that the swap does not have: what it has there is dead.
    if (end > INT32_MAX || (!args->by_position && end * kWordBytes > page_bytes * pages))
      return wrong(name + " does not fit the record");
    args->units = units;
    SwapPiece& piece = args->pieces[i];
    piece.data = static_cast<uint8_t*>(leaf->untyped_data());
    piece.layer_stride = units * unit_bytes;
    piece.layers = static_cast<uint32_t>(n.layers);
    piece.first_word = static_cast<uint32_t>(n.offset / kWordBytes);
    piece.layer_words = static_cast<uint32_t>(words);
    piece.layer_bytes = static_cast<uint32_t>(n.rows * n.width);
    piece.unit_bytes = static_cast<uint32_t>(unit_bytes);
    piece.ring = static_cast<uint32_t>(n.ring);
    piece.row_bytes = static_cast<uint32_t>(n.row_bytes);
    piece.column = static_cast<uint32_t>(n.column);
    piece.width = static_cast<uint32_t>(n.width);
    piece.ratio = static_cast<uint32_t>(n.ratio);
    piece.before = static_cast<uint32_t>(n.before);
    piece.unfinished = static_cast<uint32_t>(n.unfinished);
    piece.granule = granule_of({piece.row_bytes, piece.column, piece.width});
    if (!aligned(piece.data)) return wrong(name + " is not 16-byte aligned");
    if (kOut) continue;
    auto result = results.get<ffi::AnyBuffer>(static_cast<size_t>(n.leaf));
    if (!result.has_value() || (*result)->untyped_data() != piece.data) return wrong(name + " is not updated in place");
  }
  if (kOut) {
    auto result = results.get<ffi::AnyBuffer>(0);
    if (!result.has_value() || (*result)->untyped_data() != args->records)
      return wrong("records are not updated in place");
  }
  return ffi::Error::Success();
}

// `bound`: what the handler takes before. Both directions are called alike.
template <typename Binding>
auto swap_binding(Binding bound) {
  return std::move(bound)
      .RemainingArgs()
      .RemainingRets()
      .template Attr<xla::ffi::Span<const int64_t>>("pieces")
      .template Attr<int64_t>("first_unit")
      .template Attr<int64_t>("first_record");
}

}  // namespace dsv4
