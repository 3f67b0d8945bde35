// Reading the operands of handlers that take a variable number of them.
#pragma once

#include <string>

#include "emit_row.cuh"
#include "xla/ffi/api/ffi.h"

namespace dsv4 {

// Reads the operands that follow each other, and remembers the first that was not as expected.
class Operands {
 public:
  explicit Operands(xla::ffi::RemainingArgs args) : args_(args) {}

  // The next operand, which must have this element type and (where given) width.
  void* next(xla::ffi::DataType type, int64_t width = -1) {
    const auto buffer = args_.get<xla::ffi::AnyBuffer>(index_++);
    if (!buffer.has_value()) return fail();
    const auto dimensions = buffer->dimensions();
    rows_ = dimensions.size() > 0 ? dimensions[0] : 0;
    width_ = dimensions.size() > 0 ? dimensions[dimensions.size() - 1] : 0;  // of a vector too: a norm is [512]
    if (buffer->element_type() != type || (width >= 0 && width_ != width)) return fail();
    return buffer->untyped_data();
  }
  template <typename T>
  T* next(xla::ffi::DataType type, int64_t width = -1) {
    return static_cast<T*>(next(type, width));
  }
  // Columns `start` .. `start + width - 1` of the next operand, float32 rows `stride` apart: fit for loads of 16 bytes.
  const float* columns(int64_t start, int64_t width, int* stride) {
    const auto* matrix = next<float>(xla::ffi::F32);
    if (matrix == nullptr) return nullptr;
    *stride = static_cast<int>(width_);
    if (start < 0 || start + width > width_ || start % 4 != 0 || width_ % 4 != 0) return static_cast<float*>(fail());
    return matrix + start;
  }
  int64_t rows() const { return rows_; }  // of the operand read last
  int64_t width() const { return width_; }
  bool good() const { return wrong_ < 0 && index_ == args_.size(); }
  std::string problem() const { return wrong_ < 0 ? "too many operands" : "operand " + std::to_string(wrong_) + " has another type or shape"; }

 private:
  void* fail() {
    if (wrong_ < 0) wrong_ = static_cast<int>(index_) - 1;
    return nullptr;
  }
  xla::ffi::RemainingArgs args_;
  size_t index_ = 0;
  int wrong_ = -1;
  int64_t rows_ = 0, width_ = 0;
};

// The parts of a pool of rows of this format.
inline RowPool read_pool(Operands& operands, int format) {
  namespace ffi = xla::ffi;
  RowPool pool = {};
  pool.format = format;
  if (format == static_cast<int>(Format::kFp8)) {
    pool.codes = operands.next<uint8_t>(ffi::U8, 448);
    pool.rope = operands.next<uint16_t>(ffi::U16, 64);
    pool.scale = operands.next(ffi::U8, 8);
  } else if (format == static_cast<int>(Format::kIndexFp4)) {
    pool.codes = operands.next<uint8_t>(ffi::U8, 64);
    pool.scale = operands.next(ffi::U8, 4);
  } else {
    pool.codes = operands.next<uint8_t>(ffi::U8, 128);
    pool.scale = operands.next(ffi::F32, 1);
  }
  pool.rows = operands.rows();
  return pool;
}

}  // namespace dsv4
