// Reading the operands of handlers that take a variable number of them.
#pragma once

#include <string>

#include "common/alignment.h"
#include "rows/emit.cuh"
#include "xla/ffi/api/ffi.h"

namespace dsv4 {

// Reads the operands that follow each other, and remembers the first that was not as expected.
class Operands {
 public:
  explicit Operands(xla::ffi::RemainingArgs args) : args_(args) {}

  // The next operand, a vector or matrix, which must have this element type and (where given) width and number of rows.
  // All but ids, which are read one by one, must be 16-byte aligned.
  void* next(xla::ffi::DataType type, int64_t width = -1, int64_t rows = -1) {
    const auto buffer = args_.get<xla::ffi::AnyBuffer>(index_++);
    if (!buffer.has_value()) return fail();
    const auto dimensions = buffer->dimensions();
    if (dimensions.size() < 1 || dimensions.size() > 2) return fail();
    rows_ = dimensions[0], width_ = dimensions[dimensions.size() - 1];  // of a vector both: a norm is [512]
    if (buffer->element_type() != type || (width >= 0 && width_ != width) || (rows >= 0 && rows_ != rows))
      return fail();
    void* data = buffer->untyped_data();
    if (type != xla::ffi::S32 && buffer->element_count() > 0 && !aligned_to(data))
      refuse("operand " + std::to_string(index_ - 1) + " is not 16-byte aligned");
    return data;
  }
  template <typename T>
  T* next(xla::ffi::DataType type, int64_t width = -1, int64_t rows = -1) {
    return static_cast<T*>(next(type, width, rows));
  }
  // The next operand, an int32 vector (of this length, where given).
  const int32_t* ids(int64_t length = -1) { return next<int32_t>(xla::ffi::S32, length, length); }
  // Columns `start` .. `start + width - 1` of the next operand, float32 rows `stride` apart: fit for loads of 16 bytes.
  const float* columns(int64_t start, int64_t width, int* stride, int64_t rows = -1) {
    const auto* matrix = next<float>(xla::ffi::F32, -1, rows);
    if (matrix == nullptr) return nullptr;
    *stride = static_cast<int>(width_);
    constexpr int kStep = 4;  // floats of a load
    if (start < 0 || start + width > width_ || start % kStep != 0 || width_ % kStep != 0)
      return static_cast<float*>(fail());
    return matrix + start;
  }
  int64_t rows() const { return rows_; }  // of the operand read last
  int64_t width() const { return width_; }
  // The operands disagree with something else. What was wrong first is what `problem` says.
  void refuse(const std::string& reason) {
    if (wrong_ < 0 && refused_.empty()) refused_ = reason;
  }
  bool good() const { return wrong_ < 0 && refused_.empty() && index_ == args_.size(); }
  std::string problem() const {
    if (!refused_.empty()) return refused_;
    return wrong_ < 0 ? "too many operands" : "operand " + std::to_string(wrong_) + " has another type or shape";
  }

 private:
  void* fail() {
    if (wrong_ < 0) wrong_ = static_cast<int>(index_) - 1;
    return nullptr;
  }
  xla::ffi::RemainingArgs args_;
  size_t index_ = 0;
  int wrong_ = -1;
  std::string refused_;
  int64_t rows_ = 0, width_ = 0;
};

// What the epilogue of rows of `channels` needs beside them.
inline void read_epilogue(Operands& operands, EpilogueArgs& args, int channels, int64_t tokens) {
  args.norm = operands.next<float>(xla::ffi::F32, channels);
  args.cosine = operands.next<float>(xla::ffi::F32, kRopePairs, tokens);
  args.sine = operands.next<float>(xla::ffi::F32, kRopePairs, tokens);
}

// The parts of a pool of rows of this format, of equally many rows.
inline RowPool read_pool(Operands& operands, int format) {
  namespace ffi = xla::ffi;
  RowPool pool = {};
  pool.format = format;
  if (format == static_cast<int>(Format::kFp8)) {
    pool.codes = operands.next<uint8_t>(ffi::U8, kNope);
    pool.rows = operands.rows();
    pool.rope = operands.next<uint16_t>(ffi::U16, kRope, pool.rows);
    pool.scale = operands.next(ffi::U8, kScales, pool.rows);
  } else if (format == static_cast<int>(Format::kIndexFp4)) {
    pool.codes = operands.next<uint8_t>(ffi::U8, kFp4Bytes);
    pool.rows = operands.rows();
    pool.scale = operands.next(ffi::U8, kFp4Scales, pool.rows);
  } else {
    pool.codes = operands.next<uint8_t>(ffi::U8, kIndexDim);
    pool.rows = operands.rows();
    pool.scale = operands.next(ffi::F32, 1, pool.rows);
  }
  return pool;
}

}  // namespace dsv4
