"""GPU kernels in Pallas: one file per op, named as in `ops/`, each with the function of the reference it replaces."""
