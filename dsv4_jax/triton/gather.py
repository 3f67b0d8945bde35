"""gather as a Triton kernel: e4m3 codes with a ue8m0 scale per group and bf16 RoPE dims, to bf16 or float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..formats import Codes, RowFormat, Scales
from ..ops.gather import GatherArguments
from ..ops.registry import Implementation

__all__ = ["IMPLEMENTATION", "call", "problem", "supports", "unsupported_rows"]

ROWS_PER_PROGRAM = 4
NUM_WARPS = 4


def problem() -> str | None:
    """Why the kernel cannot be used in this process, None if it can."""
    try:
        import jax_triton  # noqa: F401  # pyrefly: ignore[missing-import]
    except ImportError as error:
        return f"it needs jax-triton, install dsv4_jax[triton] ({error})"
    backend = jax.default_backend()
    return None if backend == "gpu" else f"the backend is {backend}"


def unsupported_rows(fmt: RowFormat) -> str | None:
    """Why rows of a format are not read by the kernel, or None."""
    match fmt.holds:
        case Codes("e4m3"), Codes("bf16"), Scales("ue8m0", group) if group & (group - 1) == 0:
            return None
    return f"it does not read rows of {fmt.contents}"


def supports(arguments: GatherArguments) -> str | None:
    """Why the kernel cannot take these arguments, None if it can."""
    if reason := unsupported_rows(arguments.fmt):
        return reason
    dtype = jnp.dtype(arguments.dtype)
    return None if dtype in (jnp.bfloat16, jnp.float32) else f"it gives bfloat16 or float32, not {dtype}"


def call(arguments: GatherArguments) -> jax.Array:
    """Gathers rows as `ops.gather.reference` does."""
    import jax_triton  # pyrefly: ignore[missing-import]

    from .gather_kernel import gather_fp8

    row_ids, fmt, dtype = arguments.row_ids, arguments.fmt, arguments.dtype
    (scales,), (nope, rope, scale) = fmt.scales, arguments.pool
    result = jax.ShapeDtypeStruct((row_ids.size, fmt.dim), dtype)
    # The argument was renamed in 0.4; 0.3 is what works with the Triton 3.6 that torch brings.
    renamed = jax_triton.__version_info__ >= (0, 4)
    out = jax_triton.triton_call(
        nope,
        rope,
        scale,
        row_ids.reshape(-1),
        kernel=gather_fp8,
        **{"out_type" if renamed else "out_shape": result},
        grid=(-(-row_ids.size // ROWS_PER_PROGRAM),),
        num_warps=NUM_WARPS,
        pool_rows=nope.shape[0],
        count=row_ids.size,
        rows_per_program=ROWS_PER_PROGRAM,
        nope_dim=nope.shape[1],
        rope_dim=rope.shape[1],
        scales=scale.shape[1],
        group_dims=scales.group,
        padded_groups=_power_of_two(fmt.groups(scales)),
        padded_rope=_power_of_two(rope.shape[1]),
    )
    return out.reshape(*row_ids.shape, fmt.dim)


IMPLEMENTATION = Implementation("gather", "triton", call, supports, problem)


def _power_of_two(n: int) -> int:
    """The least that is no smaller."""
    return 1 << (n - 1).bit_length()
