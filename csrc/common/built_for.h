// What the loader (dsv4_jax/ffi.py) and the callers of the plain C entries can ask of a library without a GPU.
#pragma once

// Defines `dsv4_<op>_built_for`: the source's architectures as in __CUDA_ARCH__ (900: compute capability 9.0), then 0.
#define DSV4_BUILT_FOR(op) extern "C" const int dsv4_##op##_built_for[] = {__CUDA_ARCH_LIST__, 0}

// Defines `dsv4_<op>_args_size()`: bytes of what `dsv4_<op>_launch` takes; dsv4_jax/cuda/c_entries.py mirrors it.
#define DSV4_ARGS_SIZE(op, Args) \
  extern "C" int dsv4_##op##_args_size() { return static_cast<int>(sizeof(Args)); }
