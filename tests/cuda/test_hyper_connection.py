"""The kernel of hyper-connections: its lowering on the CPU; on a GPU float64, and a token's bits alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.cuda import hyper_connection as kernel
from dsv4_jax.errors import ImplementationError
from dsv4_jax.ops import hyper_connection

from ..ops.test_hyper_connection import EPS, ROUNDED, Case, HyperConnectionTest, jit_connection, jit_head, near
from ..oracle import residual as oracle
from .test_widths import CSRC


def lowered(case: Case, head: bool = False, **options) -> str:
    options = EPS | {"implementation": "cuda"} | options
    call = jit_head if head else jit_connection
    specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), case.given())
    return (
        call.trace(*specs, **(options if head else options | {"iterations": 20}))
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )


@pytest.mark.usefixtures("assumed_library")
@pytest.mark.parametrize("outputs", [0, 1, 2])
def test_lowers_to_two_ffi_calls(outputs: int) -> None:
    text = lowered(Case.random((3, 4, 4096), outputs), dtype=jnp.bfloat16)
    assert text.count("@dsv4_hyper_connection") == 1 and f"outputs = {outputs} : i32" in text
    assert text.count("@dsv4_hyper_mixing") == 1 and "iterations = 20 : i32" in text
    assert "head = false" in text and "tensor<3x4096xbf16>" in text
    assert ("output_operand_alias" in text) == (outputs > 0)  # streams in place


@pytest.mark.usefixtures("assumed_library")
def test_bfloat16_streams_lower_to_the_same_calls() -> None:
    text = lowered(Case.random((3, 4, 4096), 1, dtype=jnp.bfloat16), dtype=jnp.bfloat16)
    assert text.count("@dsv4_hyper_connection") == 1 and "bf16_streams = true" in text
    assert "tensor<3x16384xbf16>" in text and "output_operand_alias" in text
    text = lowered(Case.random((3, 4, 7168), 1, head=True, dtype=jnp.bfloat16), head=True)
    assert text.count("@dsv4_hyper_connection") == 1 and "bf16_streams = true" in text


@pytest.mark.usefixtures("assumed_library")
def test_head_lowers_to_one_ffi_call() -> None:
    text = lowered(Case.random((3, 4, 7168), 2, head=True), head=True)
    assert text.count("@dsv4_hyper_connection") == 1 and "head = true" in text and "output_operand_alias" not in text


@pytest.mark.usefixtures("assumed_library")
@pytest.mark.parametrize(("n", "width"), [(2, 4096), (4, 64)])
def test_other_sizes_are_for_the_reference(n: int, width: int) -> None:
    case = Case.random((1, n, width))
    with pytest.raises(ImplementationError, match=f"it takes 4 streams of 4096 or 7168 channels, not {n} of {width}"):
        hyper_connection(*case.given(), **EPS, iterations=20, implementation="cuda")


def test_sizes_are_those_of_the_source() -> None:
    source, header = ((CSRC / f"residual/hyper_connection{end}").read_text() for end in (".cu", "_kernel.cuh"))
    assert f"kStreams = {kernel.STREAMS};" in (CSRC / "residual/hyper_mixing.cuh").read_text()
    assert "kFlashWidth = {}, kProWidth = {};".format(*kernel.WIDTHS) in source
    assert "kHyperMaxTokens = 1 << 17;" in header and kernel.MAX_TOKENS == 1 << 17


@pytest.mark.gpu
class TestHyperConnectionOnTheGpu(HyperConnectionTest):
    implementation = "cuda"

    def takes(self, size: tuple[int, int, int]) -> bool:
        return size[1] == kernel.STREAMS and size[2] in kernel.WIDTHS

    @pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
    @pytest.mark.parametrize(("outputs", "width", "tokens"), [(2, 4096, 70), (1, 4096, 4096), (1, 7168, 600)])
    def test_alone_and_among_others(self, dtype: type, outputs: int, width: int, tokens: int) -> None:
        """Also of so many tokens that a cluster takes several eights."""
        case = Case.random((tokens, 4, width), outputs, dtype=dtype)
        among = self.run(case)
        for size in (1, 2, 8, 9, 33, 64, 65, 255, 1023):
            for first in {0, (tokens - size) // 2 | 1, tokens - size} if size < tokens - 1 else ():
                alone = self.run(case.part(slice(first, first + size)))
                for got, want in zip(alone, among, strict=True):
                    np.testing.assert_array_equal(got, want[first : first + size])

    @pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
    def test_head_alone_and_among_others(self, dtype: type) -> None:
        case = Case.random((1100, 4, 4096), 1, head=True, dtype=dtype)
        among = np.asarray(jit_head(*case.given(), **EPS, implementation="cuda"))
        for first, size in ((0, 1), (5, 2), (1091, 9), (77, 300)):
            part = case.part(slice(first, first + size))
            alone = jit_head(*part.given(), **EPS, implementation="cuda")
            np.testing.assert_array_equal(alone, among[first : first + size])

    @pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
    def test_many_tokens_are_those_of_float64(self, dtype: type) -> None:
        """Of those at both ends and in the middle of a step in which a cluster takes several eights."""
        case = Case.random((1003, 4, 4096), 1, dtype=dtype)
        few = [0, 7, 8, 500, 995, 1000, 1002]
        x, streams, *_ = (got[few] for got in self.run(case))
        part = case.part(few)
        assert near(streams, oracle.widened(part.arrays, part.outputs), ROUNDED)
        want, *_ = oracle.connection(part.arrays | {"streams": streams}, (), iterations=20, **EPS)
        assert near(x, want, ROUNDED)
