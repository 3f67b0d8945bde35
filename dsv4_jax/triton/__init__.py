"""Kernels in Triton proper, called through `jax-triton` (optional extra `triton`). Never chosen by default."""
