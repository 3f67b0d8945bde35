"""The Triton kernel of gather. Imports triton: only for `dsv4_jax.triton.gather`, when it is called."""

import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]

__all__ = ["gather_fp8"]


@triton.jit
def gather_fp8(
    nope_ptr, rope_ptr, scale_ptr, ids_ptr, out_ptr,
    pool_rows: tl.constexpr, count: tl.constexpr, rows_per_program: tl.constexpr,
):  # fmt: skip
    """Dense rows [count, 512] of fp8 rows: nope [pool_rows, 448] e4m3, rope [., 64] bf16, scale [., 8] ue8m0.

    A program takes a few rows. The 448 NoPE dims are seen as 7 groups (padded to 8) of the 64 dims that
    share a scale; the eighth group of the output is the RoPE dims, whose bits are copied.
    """
    place = tl.program_id(0) * rows_per_program + tl.arange(0, rows_per_program)
    live = place < count
    row = tl.load(ids_ptr + place, mask=live, other=0)
    row = tl.minimum(tl.maximum(row, 0), pool_rows - 1).to(tl.int64)
    place = place.to(tl.int64)
    group = tl.arange(0, 8)
    dim = tl.arange(0, 64)

    scale = tl.load(scale_ptr + row[:, None] * 8 + group[None, :], mask=live[:, None], other=0)
    factor = (scale.to(tl.uint32) << 23).to(tl.float32, bitcast=True)  # 2^(scale - 127), and 0 for 0
    column = group[None, :, None] * 64 + dim[None, None, :]
    mask = live[:, None, None] & (group < 7)[None, :, None]
    codes = tl.load(nope_ptr + row[:, None, None] * 448 + column, mask=mask, other=0)
    values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32) * factor[:, :, None]
    out_type = out_ptr.dtype.element_ty
    tl.store(out_ptr + place[:, None, None] * 512 + column, values.to(out_type), mask=mask)

    bits = tl.load(rope_ptr + row[:, None] * 64 + dim[None, :], mask=live[:, None], other=0)
    rope = bits.to(tl.bfloat16, bitcast=True).to(out_type)
    tl.store(out_ptr + place[:, None] * 512 + 448 + dim[None, :], rope, mask=live[:, None])
