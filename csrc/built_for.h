// What a source was compiled for, where the loader (dsv4_jax/ffi.py) can read it without a GPU.
#pragma once

// Defines `dsv4_<op>_built_for`: the source's architectures as in __CUDA_ARCH__ (900 is compute capability 9.0), then 0.
#define DSV4_BUILT_FOR(op) extern "C" const int dsv4_##op##_built_for[] = {__CUDA_ARCH_LIST__, 0}
