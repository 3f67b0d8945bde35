"""The Triton kernel of gather. Imports triton: only for `dsv4_jax.triton.gather`, when it is called."""

import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]

__all__ = ["gather_fp8"]


@triton.jit
def gather_fp8(
    nope_ptr,
    rope_ptr,
    scale_ptr,
    ids_ptr,
    out_ptr,
    pool_rows: tl.constexpr,
    count: tl.constexpr,
    rows_per_program: tl.constexpr,
    nope_dim: tl.constexpr,
    rope_dim: tl.constexpr,
    scales: tl.constexpr,
    group_dims: tl.constexpr,
    padded_groups: tl.constexpr,
    padded_rope: tl.constexpr,
):
    """Dense rows [count, nope_dim + rope_dim]: nope [pool_rows, nope_dim] e4m3, rope bf16, scale [., scales] ue8m0.

    A program takes a few rows. The NoPE dims are seen as groups, of those that share a scale, padded to a power of two
    of them; the bits of the RoPE dims are copied.
    """
    place = tl.program_id(0) * rows_per_program + tl.arange(0, rows_per_program)
    live = place < count
    row = tl.load(ids_ptr + place, mask=live, other=0)
    row = tl.minimum(tl.maximum(row, 0), pool_rows - 1).to(tl.int64)
    place = place.to(tl.int64)
    group = tl.arange(0, padded_groups)
    dim = tl.arange(0, group_dims)

    mask = live[:, None] & (group < scales)[None, :]
    scale = tl.load(scale_ptr + row[:, None] * scales + group[None, :], mask=mask, other=0)
    factor = (scale.to(tl.uint32) << 23).to(tl.float32, bitcast=True)  # 2^(scale - 127), and 0 for 0
    column = group[None, :, None] * group_dims + dim[None, None, :]
    mask = live[:, None, None] & (column < nope_dim)
    codes = tl.load(nope_ptr + row[:, None, None] * nope_dim + column, mask=mask, other=0)
    values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32) * factor[:, :, None]
    out_type = out_ptr.dtype.element_ty
    tl.store(out_ptr + place[:, None, None] * (nope_dim + rope_dim) + column, values.to(out_type), mask=mask)

    dim = tl.arange(0, padded_rope)
    mask = live[:, None] & (dim < rope_dim)[None, :]
    bits = tl.load(rope_ptr + row[:, None] * rope_dim + dim[None, :], mask=mask, other=0)
    rope = bits.to(tl.bfloat16, bitcast=True).to(out_type)
    tl.store(out_ptr + place[:, None] * (nope_dim + rope_dim) + nope_dim + dim[None, :], rope, mask=mask)
