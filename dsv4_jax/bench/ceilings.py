"""What the device can do at most, measured now: the yardsticks of every record."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["Ceilings", "measure_ceilings"]


class Ceilings(NamedTuple):
    """copy: bytes read and written per second by an elementwise kernel. matmul: bf16 FLOP per second."""

    copy: float
    matmul: float

    def floor_us(self, bytes_moved: float, flops: float) -> float:
        """No faster than this: the larger of the two times."""
        return 1e6 * max(bytes_moved / self.copy, flops / self.matmul)

    def as_dict(self) -> dict[str, float]:
        return {"copy_gb_per_s": self.copy / 1e9, "matmul_tflop_per_s": self.matmul / 1e12}


def measure_ceilings(*, quick: bool = False) -> Ceilings:
    """2 GiB and 8192 x 8192 (4 MiB and 256 x 256 if quick)."""
    x = jnp.zeros(1 << (20 if quick else 29), jnp.int32)
    copy = 2 * x.nbytes / _seconds_each(jax.jit(lambda x: x + np.int32(1), donate_argnums=0), x)
    n = 256 if quick else 8192
    a = jax.random.normal(jax.random.key(0), (n, n), jnp.bfloat16) * jnp.bfloat16(n**-0.5)  # keeps products' size
    # cuBLAS: searching for the best of XLA's own kernels takes longer than all the rest.
    multiply = jax.jit(jnp.matmul, compiler_options={"xla_gpu_enable_triton_gemm": False})
    return Ceilings(copy, 2 * n**3 / _seconds_each(partial(multiply, a), a))


def _seconds_each(step: Callable[[jax.Array], jax.Array], x: jax.Array, steps: int = 8) -> float:
    """Time of a step, many in a row a synchronisation: a slow host must not lower a ceiling."""
    best = math.inf
    x = jax.block_until_ready(step(x))
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(steps):
            x = step(x)
        jax.block_until_ready(x)
        best = min(best, time.perf_counter() - start)
    return best / steps
