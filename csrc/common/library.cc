// What a library says of itself: what it was built from and with, and which handlers it has. dsv4_jax/libraries.py asks
// for the digest before anything else is called.
#include "dsv4_source_digest.h"  // made by CMakeLists.txt

#include "common/registry.h"

namespace dsv4 {

const Handler* handlers = nullptr;

}  // namespace dsv4

extern "C" const char* dsv4_source_digest() { return DSV4_SOURCE_DIGEST; }

// The first of its handlers, each of which names the next.
extern "C" const dsv4::Handler* dsv4_handlers() { return dsv4::handlers; }

#ifdef DSV4_CUDA_VERSION
// Of the toolkit, as CUDART_VERSION: 13000 is 13.0.
extern "C" int dsv4_cuda_version() { return DSV4_CUDA_VERSION; }
#endif
