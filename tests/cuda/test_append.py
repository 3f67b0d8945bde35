"""The CUDA append: its lowering and what it refuses on the CPU, the op's test classes on a GPU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.errors import ImplementationError
from dsv4_jax.formats import RowFormat, kv_format
from dsv4_jax.ops import append
from dsv4_jax.ops.append import encode

from ..pallas.test_append import TestAppendOnTheGpu as OnTheGpu
from ..pallas.test_append import check_epilogue, random_epilogue

FMT = kv_format("fp8", 512, 64)


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.usefixtures("assumed_library")
def test_lowers_to_one_ffi_call_in_place(finished: bool) -> None:
    pool = tuple(jax.ShapeDtypeStruct((1000, p.width), p.dtype) for p in FMT.parts)
    ids = jax.ShapeDtypeStruct((64,), jnp.int32)
    epilogue = None if finished else random_epilogue(np.random.default_rng(0), FMT)
    values = jax.ShapeDtypeStruct((64, 512), jnp.bfloat16)

    def stored(pool, values, ids, position):
        return append(pool, values, ids, fmt=FMT, epilogue=epilogue, position=position, implementation="cuda")

    text = jax.jit(stored).trace(pool, values, ids, ids).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@dsv4_append") == 1 and text.count("output_operand_alias<") == 3
    call = functools.partial(encode, epilogue=epilogue, fmt=FMT, implementation="cuda")
    traced = jax.jit(lambda values, ids: call(values, position=ids)).trace(values, ids)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@dsv4_append") == 1 and "tensor<64x448xui8>" in text


@pytest.mark.usefixtures("assumed_library")
def test_the_kernel_gets_the_angles_of_the_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    monkeypatch.setattr(jax.ffi, "ffi_call", lambda *_, **__: lambda *operands, **__: given.extend(operands) or (0,))
    epilogue = random_epilogue(np.random.default_rng(0), FMT)
    position = np.array([0, 3, 1_000_000], np.int32)
    encode(jnp.zeros((3, 512)), fmt=FMT, epilogue=epilogue, position=position, implementation="cuda")
    angles = position.astype(np.float32)[:, None] * np.asarray(epilogue.inv_freq)
    cosine, sine = given[2:]
    np.testing.assert_allclose(cosine, np.cos(angles.astype(np.float64)), atol=1e-6)
    np.testing.assert_allclose(sine, np.sin(angles.astype(np.float64)), atol=1e-6)


@pytest.mark.parametrize(("name", "dim", "rope"), [("fp8", 232, 24), ("bf16", 40, 8)])
@pytest.mark.usefixtures("assumed_library")
def test_what_the_kernel_cannot_take_is_refused(name: str, dim: int, rope: int) -> None:
    with pytest.raises(ImplementationError, match=r"append: .*'cuda' cannot run: .*built for rows of .*, not of"):
        check_epilogue(kv_format(name, dim, rope), 3, "cuda")


class TestAppendOnTheGpu(OnTheGpu):
    implementation = "cuda"

    def takes(self, *, fmt: RowFormat) -> bool:
        return fmt == FMT


del OnTheGpu  # its own tests run where it stands
