// What a library was built from and with; dsv4_jax/libraries.py asks before anything else is called.
#include "dsv4_source_digest.h"  // made by CMakeLists.txt

extern "C" const char* dsv4_source_digest() { return DSV4_SOURCE_DIGEST; }

#ifdef DSV4_CUDA_VERSION
// Of the toolkit, as CUDART_VERSION: 13000 is 13.0.
extern "C" int dsv4_cuda_version() { return DSV4_CUDA_VERSION; }
#endif
