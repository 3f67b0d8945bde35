// The frame of a handler: its operands are checked by a table, and what is wrong with the first that does not fit is
// said by its name, before anything is launched.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "common/registry.h"
#include "xla/ffi/api/ffi.h"

namespace dsv4 {

// XLA gives a custom call the address of a slice wherever it begins. A kernel that loads or copies 16 bytes at a time
// would fault there.
constexpr uintptr_t kAlignment = 16;

inline bool aligned_to(const void* data, uintptr_t bytes = kAlignment) {
  return reinterpret_cast<uintptr_t>(data) % bytes == 0;
}

// How a kernel reads an operand: 16 bytes at a time, or single elements, wherever they begin.
enum Reads { kVectors, kElements };

constexpr int64_t kAny = -1;  // a length that is not checked

// An operand or result, and what it must be. Those whose type XLA knows already (ffi::Buffer) name none.
class Operand {
 public:
  template <typename Buffer>
  Operand(const char* name, const Buffer& buffer, std::initializer_list<int64_t> shape, Reads reads = kVectors,
          std::initializer_list<xla::ffi::DataType> types = {})
      : name_(name),
        data_(buffer.untyped_data()),
        elements_(buffer.element_count()),
        has_(buffer.dimensions()),
        type_(buffer.element_type()),
        axes_(shape.size()),
        reads_(reads),
        types_(types.size()) {
    std::copy(shape.begin(), shape.end(), shape_.begin());
    std::copy(types.begin(), types.end(), type_list_.begin());
  }

  // What is wrong with it; empty: nothing.
  std::string problem() const {
    bool fits = has_.size() == axes_;
    for (size_t i = 0; fits && i < axes_; ++i) fits = shape_[i] == kAny || shape_[i] == has_[i];
    if (!fits) return spelled(has_.begin(), has_.size()) + ", expected " + spelled(shape_.begin(), axes_);
    const auto end = type_list_.begin() + types_;
    if (types_ > 0 && std::find(type_list_.begin(), end, type_) == end) return "of another element type than expected";
    if (reads_ == kVectors && elements_ > 0 && !aligned_to(data_)) return "not 16-byte aligned";
    return {};
  }
  const char* name() const { return name_; }

 private:
  static constexpr size_t kMaxAxes = 4, kMaxTypes = 3;
  template <typename Lengths>
  static std::string spelled(Lengths lengths, size_t axes) {
    std::string text;
    for (size_t i = 0; i < axes; ++i)
      text += (i > 0 ? ", " : "") + (lengths[i] == kAny ? std::string("any") : std::to_string(lengths[i]));
    return "[" + text + "]";
  }

  const char* name_;
  const void* data_;
  size_t elements_;
  xla::ffi::Span<const int64_t> has_;
  xla::ffi::DataType type_;
  std::array<int64_t, kMaxAxes> shape_ = {};
  size_t axes_;
  Reads reads_;
  std::array<xla::ffi::DataType, kMaxTypes> type_list_ = {};
  size_t types_;
};

// Something else that must hold, and what to say if it does not.
struct Requirement {
  bool holds;
  const char* text;
};

inline xla::ffi::Error refusal(const char* target, const std::string& problem) {
  return xla::ffi::Error::InvalidArgument(std::string(target) + ": " + problem);
}

// Success, or the first of the operands and requirements that does not fit.
inline xla::ffi::Error check(const char* target, std::initializer_list<Operand> operands,
                             std::initializer_list<Requirement> requirements = {}) {
  for (const Operand& operand : operands) {
    if (const std::string problem = operand.problem(); !problem.empty())
      return refusal(target, std::string(operand.name()) + " is " + problem);
  }
  for (const Requirement& requirement : requirements) {
    if (!requirement.holds) return refusal(target, requirement.text);
  }
  return xla::ffi::Error::Success();
}

#ifdef __CUDACC__
// What every handler of kernels is given first.
inline auto on_stream() { return xla::ffi::Ffi::Bind().Ctx<xla::ffi::PlatformStream<cudaStream_t>>(); }

// What a handler returns that has launched its kernels.
inline xla::ffi::Error launched(const char* target, cudaError_t error) {
  if (error == cudaSuccess) return xla::ffi::Error::Success();
  return xla::ffi::Error::Internal(std::string(target) + ": " + cudaGetErrorString(error));
}
#endif

}  // namespace dsv4
