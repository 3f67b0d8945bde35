"""What the device can do at most, measured now: the yardsticks of every record."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .timing import seconds

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
    copy = 2 * x.nbytes / _seconds_each(lambda x: x + np.int32(1), x)
    n = 256 if quick else 8192
    a = jax.random.normal(jax.random.key(0), (n, n), jnp.bfloat16)
    scale = jnp.bfloat16(n**-0.5)  # so that products of products stay of one size
    return Ceilings(copy, 2 * n**3 / _seconds_each(lambda b: (a * scale) @ b, a))


def _seconds_each(step: Callable[[jax.Array], jax.Array], x: jax.Array) -> float:
    """Time of a step within a chain of them: what an execution costs by itself drops out."""

    def chain(x: jax.Array, steps: int) -> jax.Array:
        for _ in range(steps):
            x = jax.lax.optimization_barrier(step(x))
        return x

    few, many = (jax.jit(partial(chain, steps=n)) for n in (2, 10))
    each = (seconds(many, x, repeats=6) - seconds(few, x, repeats=6)) / 8
    return each if each > 0 else seconds(many, x, repeats=6) / 10  # too short for the clock: an upper bound
