// Whether operands begin where kernels can load and copy 16 bytes at a time: XLA gives a custom call the address of a
// slice wherever it begins, and a kernel would fault there.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

namespace dsv4 {

constexpr uintptr_t kAlignment = 16;

inline bool aligned_to(const void* data, uintptr_t bytes = kAlignment) {
  return reinterpret_cast<uintptr_t>(data) % bytes == 0;
}

struct Named {
  const char* name;
  const void* data;  // null: not given
};

// What is wrong with the first of an op's operands that begins elsewhere; empty: nothing.
inline std::string misaligned(const char* op, std::initializer_list<Named> operands) {
  for (const Named& operand : operands) {
    if (!aligned_to(operand.data)) return std::string(op) + ": " + operand.name + " is not 16-byte aligned";
  }
  return {};
}

}  // namespace dsv4
