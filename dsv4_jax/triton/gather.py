"""gather as a Triton kernel: fp8 rows of V4 widths to bf16 or float32. Everything else takes the reference."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..errors import ImplementationError
from ..formats import RowFormat
from ..ops.append import Rows
from ..ops.gather import _gather_rows as _reference

__all__ = ["has_kernel"]

ROWS_PER_PROGRAM = 4
NUM_WARPS = 4


def has_kernel(fmt: RowFormat, dtype: jnp.dtype) -> bool:
    """Whether the kernel reads rows of this format into this type."""
    return fmt.name == "fp8" and (fmt.nope_dim, fmt.rope_dim) == (448, 64) and dtype in (jnp.bfloat16, jnp.float32)


def _gather_rows(pool: Rows, row_ids: jax.Array, fmt: RowFormat, dtype: jnp.dtype) -> jax.Array:
    """As `ops.gather._gather_rows`.

    Raises:
        ImplementationError: jax-triton cannot be imported.
    """
    if not has_kernel(fmt, dtype) or row_ids.size == 0:
        return _reference(pool, row_ids, fmt, dtype)
    try:
        import jax_triton  # pyrefly: ignore[missing-import]

        from .gather_kernel import gather_fp8
    except ImportError as error:
        raise ImplementationError(
            f"gather: the Triton kernel needs jax-triton, install dsv4_jax[triton] ({error})"
        ) from error
    nope, rope, scale = pool
    result = jax.ShapeDtypeStruct((row_ids.size, fmt.dim), dtype)
    # The argument was renamed in 0.4; 0.3 is what works with the Triton 3.6 that torch brings.
    renamed = jax_triton.__version_info__ >= (0, 4)
    out = jax_triton.triton_call(
        nope, rope, scale, row_ids.reshape(-1),
        kernel=gather_fp8,
        **{"out_type" if renamed else "out_shape": result},
        grid=(-(-row_ids.size // ROWS_PER_PROGRAM),),
        num_warps=NUM_WARPS,
        pool_rows=nope.shape[0], count=row_ids.size, rows_per_program=ROWS_PER_PROGRAM,
    )  # fmt: skip
    return out.reshape(*row_ids.shape, fmt.dim)
