"""Wrappers of the CUDA kernels of `csrc/`: one file per op, named as in `ops/`, each declaring its `IMPLEMENTATION`."""
