"""The CUDA linear: its lowering and fallback on the CPU, the op's test class and the model's shapes on a GPU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.cuda import linear as kernel

from ..ops.test_linear import LinearTest as OfTheOp
from ..ops.test_linear import jit_linear, operands


def test_lowers_to_one_ffi_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "cuda_target", lambda target: target)
    args = (jax.ShapeDtypeStruct((3, 256), jnp.float32), jax.ShapeDtypeStruct((2, 96, 128), jnp.bfloat16))
    call = functools.partial(kernel._linear_parts, widths=(128, 64), dtype=np.dtype(np.float32))
    text = jax.jit(call).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@dsv4_linear") == 1 and "slice" not in text
    assert "(tensor<3x128xf32>, tensor<3x64xf32>)" in text and "tensor<2x96x128xbf16>" in text


@pytest.mark.parametrize(
    ("tokens", "widths", "depth", "dtype"),
    [
        (257, (8,), 64, jnp.bfloat16),
        (2, (8,), 65, jnp.bfloat16),
        (2, (12, 4), 64, jnp.bfloat16),
        (2, (8,), 64, jnp.float32),
    ],
)
def test_what_the_kernel_cannot_take_goes_to_the_reference(tokens: int, widths, depth: int, dtype) -> None:
    x, weight = operands(tokens, sum(widths), depth, 1, dtype)
    got, want = (jit_linear(x, weight, widths=widths, implementation=i) for i in ("cuda", "xla"))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.gpu
class TestLinearOnTheGpu(OfTheOp):
    implementation = "cuda"

    @pytest.mark.parametrize("tokens", [1, 3, 64, 65, 256])
    @pytest.mark.parametrize(
        ("widths", "depth", "groups"),
        [((1024, 512, 256, 64), 4096, 1), ((32_768, 8192), 1024, 1), ((8192,), 4096, 8), ((520,), 192, 5)],
    )
    def test_models_shapes(self, tokens: int, widths: tuple[int, ...], depth: int, groups: int) -> None:
        self.check(tokens, widths, depth, groups)

    @pytest.mark.parametrize(("rows", "depth", "groups"), [(4160, 4096, 1), (40_960, 1024, 1), (2048, 4096, 8)])
    def test_results_do_not_depend_on_the_other_tokens(self, rows: int, depth: int, groups: int) -> None:
        x, weight = operands(256, rows, depth, groups)
        (want,) = jit_linear(x, weight, implementation="cuda")
        for tokens in (1, 5, 64, 65):
            (got,) = jit_linear(x[-tokens:], weight, implementation="cuda")
            np.testing.assert_array_equal(got, want[-tokens:])
            (rounded,) = jit_linear(x[-tokens:], weight, dtype=jnp.bfloat16, implementation="cuda")
            np.testing.assert_array_equal(rounded, got.astype(jnp.bfloat16))


del OfTheOp  # its own tests run where it stands
