"""gather as a Triton kernel: e4m3 codes with a ue8m0 scale per group and bf16 RoPE dims, to bf16 or float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..errors import ImplementationError
from ..formats import Codes, RowFormat, Scales
from ..ops.append import Rows
from ..ops.gather import _gather_rows as _reference

__all__ = ["unsupported_rows"]

ROWS_PER_PROGRAM = 4
NUM_WARPS = 4


def unsupported_rows(fmt: RowFormat) -> str | None:
    """Why rows of a format are not read by the kernel, or None."""
    match fmt.holds:
        case Codes("e4m3"), Codes("bf16"), Scales("ue8m0", group) if group & (group - 1) == 0:
            return None
    return f"it does not read rows of {fmt.contents}"


def _gather_rows(pool: Rows, row_ids: jax.Array, fmt: RowFormat, dtype: jnp.dtype) -> jax.Array:
    """As `ops.gather._gather_rows`.

    Raises:
        ImplementationError: jax-triton cannot be imported.
    """
    if unsupported_rows(fmt) or dtype not in (jnp.bfloat16, jnp.float32) or row_ids.size == 0:
        return _reference(pool, row_ids, fmt, dtype)
    try:
        import jax_triton  # pyrefly: ignore[missing-import]

        from .gather_kernel import gather_fp8
    except ImportError as error:
        raise ImplementationError(
            f"gather: the Triton kernel needs jax-triton, install dsv4_jax[triton] ({error})"
        ) from error
    (scales,), (nope, rope, scale) = fmt.scales, pool
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
        nope_dim=nope.shape[1], rope_dim=rope.shape[1], scales=scale.shape[1], group_dims=scales.group,
        padded_groups=_power_of_two(fmt.groups(scales)), padded_rope=_power_of_two(rope.shape[1]),
    )  # fmt: skip
    return out.reshape(*row_ids.shape, fmt.dim)


def _power_of_two(n: int) -> int:
    """The least that is no smaller."""
    return 1 << (n - 1).bit_length()
