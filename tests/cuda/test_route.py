"""The router's kernel: its lowering on the CPU; on a GPU what the reference is held to."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.errors import ImplementationError
from dsv4_jax.ops import route

from ..ops.test_route import RouteTest


@pytest.mark.usefixtures("assumed_library")
@pytest.mark.parametrize("hashed", [False, True])
def test_lowers_to_one_ffi_call(hashed: bool) -> None:
    given, bias = jax.ShapeDtypeStruct((3, 6), jnp.int32), jax.ShapeDtypeStruct((256,), jnp.float32)
    call = jax.jit(functools.partial(route, top=6, implementation="cuda"))
    traced = call.trace(
        jax.ShapeDtypeStruct((3, 256), jnp.float32), **({"chosen": given} if hashed else {"bias": bias})
    )
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@dsv4_route") == 1 and f"hashed = {str(hashed).lower()}" in text


@pytest.mark.usefixtures("assumed_library")
def test_more_experts_are_for_the_reference() -> None:
    with pytest.raises(ImplementationError, match="'cuda' cannot run: it takes up to 512 experts and 8 of them"):
        route(np.zeros((1, 513), np.float32), bias=np.zeros(513, np.float32), top=6, implementation="cuda")


@pytest.mark.gpu
class TestRouteOnTheGpu(RouteTest):
    implementation = "cuda"
