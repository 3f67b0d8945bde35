"""The CUDA swap: its lowering on the CPU; on a GPU the op's own tests, its memory, and the sanitizer."""

from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax import CacheLayout, CacheSize, DSV4Config, init_cache, init_host_cache
from dsv4_jax.plan import StateSwapPlan, SwapPlan
from dsv4_jax.records import block_record, state_record
from dsv4_jax.tiers import record_copy, swap
from dsv4_jax.tiers.host_cache import HostCache

from ..model.feeding import CSA, HCA, SWA, V4_WIDTHS, decode_step, prefill
from ..native import run_sanitized
from ..tiers.test_host_cache import check_next_tokens
from ..tiers.test_swap import TestFfi as Swaps

ROOT = pathlib.Path(__file__).parents[2]


def in_host_memory(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    return jax.ShapeDtypeStruct(shape, jnp.uint8, sharding=sharding)


@pytest.mark.parametrize("operation", ["swap_out", "swap_in", "snapshot", "restore"])
def test_lowers_to_one_ffi_call_in_place(monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    """Full V4-Flash, abstract: every leaf an operand of one call, every destination aliased."""
    monkeypatch.setattr(swap, "choose_implementation", lambda _: "ffi")
    layout = CacheLayout(DSV4Config.flash())
    cache = jax.eval_shape(lambda: init_cache(layout, CacheSize(2000, 64, 1024)))
    blocks = block_record(layout)
    host = HostCache(in_host_memory((1001, blocks.bytes)), layout)
    ids = jax.ShapeDtypeStruct((16,), jnp.int32)
    out = operation in ("swap_out", "snapshot")
    call = jax.jit(getattr(swap, operation), donate_argnums=1 if out else 0)
    of_blocks = operation.startswith("swap")
    plan = SwapPlan(ids, ids) if of_blocks else StateSwapPlan(ids, jax.ShapeDtypeStruct((16, 10), jnp.int32), ids)
    text = call.trace(cache, host, plan).lower(lowering_platforms=("cuda",)).as_text()
    record = blocks if of_blocks else state_record(layout)
    assert text.count("custom_call @dsv4_swap_" + ("out" if out else "in")) == 1
    assert text.count("output_operand_alias<") == (1 if out else len(record.leaves))
    assert "gather" not in text and "scatter" not in text and "dynamic_update_slice" not in text


@pytest.mark.gpu
class TestSwapOnTheGpu(Swaps):
    pass


del Swaps  # its own tests run where it stands


@pytest.mark.gpu
def test_next_tokens_after_a_round_trip_and_after_preemption_on_the_gpu() -> None:
    """V4's attention widths, so that every kernel takes part; three blocks, two HCA entries, tokens in the window."""
    assert record_copy.choose_implementation(None) == "ffi"
    cfg = DSV4Config.tiny(
        layer_types=(SWA, CSA, HCA),
        **V4_WIDTHS,
    )
    check_next_tokens(cfg, prefill, decode_step, chunk=64, prompt=300, decoded=6, weights="bfloat16")


@pytest.mark.gpu
def test_pinned_records_take_no_device_memory() -> None:
    layout = CacheLayout(DSV4Config.flash())
    before = jax.devices()[0].memory_stats()["peak_bytes_in_use"]
    host = init_host_cache(layout, 2000)
    assert host.pages.nbytes > 2**29
    assert jax.devices()[0].memory_stats()["peak_bytes_in_use"] - before < 2**20
    host = jax.jit(swap.swap_out, donate_argnums=1)(
        init_cache(layout, CacheSize(4, 1, 4)), host, SwapPlan(np.ones(1, np.int32), np.ones(1, np.int32))
    )
    assert host.pages.sharding.memory_kind == "pinned_host"


@pytest.mark.gpu
@pytest.mark.slow
def test_sanitizer_finds_nothing() -> None:
    """No access outside of an allocation, whatever the ids hold."""
    run_sanitized(f"{pathlib.Path(__file__)}::TestSwapOnTheGpu::test_any_ids_stay_inside")
