// The handlers of a library, which enter themselves into its list when it is loaded: there is no other list of them.
#pragma once

#include <string_view>

#include "xla/ffi/api/ffi.h"

namespace dsv4 {

// A handler. `_Handler` of dsv4_jax/ffi.py mirrors it.
struct Handler {
  const char* op;  // whose code it is: what dsv4_jax/ffi.py is asked for
  const char* target;
  XLA_FFI_Handler* call;
  const int* built_for;  // its source's architectures as in __CUDA_ARCH__ (900: compute capability 9.0), then 0
  const Handler* next;
};

// The one that was entered last. Each library that a process opens has a list of its own.
extern const Handler* handlers __attribute__((visibility("hidden")));

inline bool enter(Handler& handler) {
  handler.next = handlers;
  handlers = &handler;
  return true;
}

// Null: the library has none, or not for lack of an architecture that can run it.
inline const Handler* find_handler(std::string_view target) {
  const Handler* handler = handlers;
  while (handler != nullptr && target != handler->target) handler = handler->next;
  return handler;
}

}  // namespace dsv4

#ifdef __CUDACC__
#define DSV4_ARCHITECTURES __CUDA_ARCH_LIST__, 0
#else
#define DSV4_ARCHITECTURES 0
#endif

// Defines the handler `target` of an op as a C function of that name, and enters it. All of ours only enqueue work, so
// that command buffers can hold them.
#define DSV4_HANDLER(op, target, function, ...)                                                             \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(target, function, (__VA_ARGS__), {xla::ffi::Traits::kCmdBufferCompatible}); \
  static const int target##_built_for[] = {DSV4_ARCHITECTURES};                                             \
  static dsv4::Handler target##_entry = {#op, #target, target, target##_built_for, nullptr};                \
  [[maybe_unused]] static const bool target##_entered = dsv4::enter(target##_entry)
