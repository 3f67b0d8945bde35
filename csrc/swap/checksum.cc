// The sums of records' checksums, in one pass over each. dsv4_jax/stores/checksum.py says what they are for and calls
// this through ctypes, so nothing here knows XLA or Python.
#include <cstdint>
#include <cstring>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the words of a record are little-endian"
#endif

// 64-bit products have an instruction in AVX-512 only; the machine chooses when the library is loaded.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && __GNUC__ >= 12
#define DSV4_CLONES __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define DSV4_CLONES
#endif

namespace {

constexpr int64_t kPieceWords = 65536;
constexpr int64_t kLine = 64, kLinesAtOnce = 8, kAhead = 4096;  // bytes, lines, bytes

uint64_t load(const uint8_t* bytes) {  // from any address
  uint64_t word;
  std::memcpy(&word, bytes, sizeof word);
  return word;
}

// Adds to sums[0] the words at byte 0, and to sums[1] those at byte 4, each times its key, modulo 2^64.
DSV4_CLONES void add_words(const uint8_t* bytes, const uint64_t* keys, int64_t words, uint64_t sums[2]) {
  constexpr int64_t kWordsAtOnce = kLine * kLinesAtOnce / 8;
  uint64_t plain = 0, shifted = 0;
  int64_t i = 0;
  for (; i + kWordsAtOnce <= words; i += kWordsAtOnce) {
    // A third faster from memory: the hardware looks ahead within a page only. May name what is not the record's.
    for (int64_t line = 0; line < kLinesAtOnce; ++line) __builtin_prefetch(bytes + 8 * i + kAhead + kLine * line);
    for (int64_t j = i; j < i + kWordsAtOnce; ++j) {
      plain += load(bytes + 8 * j) * keys[j];
      shifted += load(bytes + 8 * j + 4) * keys[j];
    }
  }
  for (; i < words; ++i) {
    plain += load(bytes + 8 * i) * keys[i];
    shifted += load(bytes + 8 * i + 4) * keys[i];
  }
  sums[0] += plain;
  sums[1] += shifted;
}

// Writes one sum for every piece of the words from byte 0 on, then one for every piece of those from byte 4 on; returns
// the end of what it wrote.
uint64_t* sum_record(const uint8_t* record, int64_t bytes, const uint64_t* keys, uint64_t* sums) {
  const int64_t words = bytes / 8, shifted_words = bytes < 4 ? 0 : (bytes - 4) / 8;
  uint64_t* shifted_sums = sums + (words + kPieceWords - 1) / kPieceWords;
  for (int64_t first = 0; first < words; first += kPieceWords) {
    const int64_t last = words < first + kPieceWords ? words : first + kPieceWords;
    const int64_t shifted_last = shifted_words < last ? shifted_words : last;
    uint64_t piece[2] = {0, 0};
    add_words(record + 8 * first, keys, shifted_last - first, piece);
    // The record's last word has none behind it if fewer than four bytes follow.
    if (shifted_last < last) piece[0] += load(record + 8 * shifted_last) * keys[shifted_last - first];
    *sums++ = piece[0];
    if (shifted_last > first) *shifted_sums++ = piece[1];
  }
  return shifted_sums;
}

}  // namespace

// The sums of `count` records of `bytes` bytes each, one record's after the other's. A record may lie at any address
// and have any number of bytes from 0 on. `keys`: kPieceWords of them.
extern "C" void dsv4_sum_records(const uint8_t* const* records, int64_t count, int64_t bytes, const uint64_t* keys,
                                 uint64_t* sums) {
  for (int64_t i = 0; i < count; ++i) sums = sum_record(records[i], bytes, keys, sums);
}
