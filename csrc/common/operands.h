// Reading the operands and results of handlers that take a variable number of them.
#pragma once

#include <string>

#include "common/handler.h"
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
    return static_cast<const float*>(columns_of(xla::ffi::F32, start, width, stride, rows));
  }
  // The same of a matrix that may be bf16; `bf16` says whether it is.
  const void* columns(int64_t start, int64_t width, int* stride, bool* bf16) {
    const auto buffer = args_.get<xla::ffi::AnyBuffer>(index_);
    *bf16 = buffer.has_value() && buffer->element_type() == xla::ffi::BF16;
    return columns_of(*bf16 ? xla::ffi::BF16 : xla::ffi::F32, start, width, stride, -1);
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
  const void* columns_of(xla::ffi::DataType type, int64_t start, int64_t width, int* stride, int64_t rows) {
    const auto* matrix = next<uint8_t>(type, -1, rows);
    if (matrix == nullptr) return nullptr;
    *stride = static_cast<int>(width_);
    const int64_t size = type == xla::ffi::BF16 ? sizeof(uint16_t) : sizeof(float), step = kAlignment / size;
    if (start < 0 || start + width > width_ || start % step != 0 || width_ % step != 0) return fail();
    return matrix + start * size;
  }
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

// Reads the results that follow each other in the same way.
class Results {
 public:
  explicit Results(xla::ffi::RemainingRets results) : results_(results) {}
  // The next result, a matrix of this type and width, of `rows` to `max_rows` rows.
  void* next(xla::ffi::DataType type, int64_t width, int64_t rows, int64_t max_rows) {
    auto buffer = results_.get<xla::ffi::AnyBuffer>(index_++);
    if (!buffer.has_value()) return fail();
    const auto sizes = (*buffer)->dimensions();
    if ((*buffer)->element_type() != type || sizes.size() != 2 || sizes[0] < rows || sizes[0] > max_rows ||
        sizes[1] != width)
      return fail();
    rows_ = sizes[0];
    return (*buffer)->untyped_data();
  }
  template <typename T>
  T* next(xla::ffi::DataType type, int64_t width, int64_t rows) {
    return static_cast<T*>(next(type, width, rows, rows));
  }
  int64_t rows() const { return rows_; }  // of the result read last
  bool good() const { return wrong_ < 0 && index_ == results_.size(); }
  std::string problem() const {
    return wrong_ < 0 ? "too many results" : "result " + std::to_string(wrong_) + " has another type or shape";
  }

 private:
  void* fail() {
    if (wrong_ < 0) wrong_ = static_cast<int>(index_) - 1;
    return nullptr;
  }
  xla::ffi::RemainingRets results_;
  size_t index_ = 0;
  int wrong_ = -1;
  int64_t rows_ = 0;
};

}  // namespace dsv4
