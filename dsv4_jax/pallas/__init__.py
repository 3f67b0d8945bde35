"""GPU kernels in Pallas: one file per op, named as in `ops/`, each declaring its `IMPLEMENTATION`."""
