"""The host records as an array: where they lie, what they cost, what is refused; and whole requests through them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax import (
    CacheLayout,
    CacheSize,
    DSV4Config,
    KVCacheManager,
    init_cache,
    init_host_cache,
    model,
    run_transfers,
)
from dsv4_jax.cache import KVCache
from dsv4_jax.config import AttentionType
from dsv4_jax.errors import CapacityError
from dsv4_jax.manager import HostSize, Request, StepShape
from dsv4_jax.plan import StateSwapPlan, SwapPlan
from dsv4_jax.records import page_bytes, state_pages
from dsv4_jax.testing.live import Held, assert_same_bytes, live_bytes
from dsv4_jax.tiers.host_cache import HostCache
from dsv4_jax.tiers.swap_plan import plan_state_swap, plan_swap

from .. import native
from ..harness import Driver, pinned_shape, random_stream
from .swapping import jitted

CSA, HCA = AttentionType.CSA, AttentionType.HCA
CFG = DSV4Config.tiny(layer_types=(CSA, HCA))
SIZE = CacheSize(num_blocks=5, num_slots=2, max_blocks_per_request=2)
PAGES = 50  # of the host


@pytest.fixture(autouse=True, scope="module")
def library() -> None:
    native.load_cpu()


def test_records_are_pinned_zeros_updated_in_place():
    layout = CacheLayout(CFG)
    for pages in (1, 3, 64):
        host = init_host_cache(layout, pages)
        assert host.num_pages == pages and host.pages.sharding.memory_kind == "pinned_host"
        assert host.pages.shape == (1 + pages, page_bytes(layout)) and not np.asarray(host.pages).any()
        # The very first donated call updates them where they are.
        where = host.pages.unsafe_buffer_pointer()
        plan = SwapPlan(np.ones(1, np.int32), np.ones(1, np.int32))
        after = jitted("swap_out")(init_cache(layout, SIZE), host, plan)
        assert after.pages.unsafe_buffer_pointer() == where and host.pages.is_deleted()
    assert init_host_cache(layout, 1, device=jax.devices()[1]).pages.devices() == {jax.devices()[1]}


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "2"])
def test_impossible_counts(count):
    with pytest.raises(CapacityError, match="num_pages must be an integer of at least 1"):
        init_host_cache(CacheLayout(CFG), count)


@pytest.mark.parametrize("count", [2**52, 2**62])
def test_more_pages_than_a_process_can_address(count):
    with pytest.raises(CapacityError, match=rf"{count + 1} host pages of .* bytes are not available"):
        init_host_cache(CacheLayout(CFG), count)


# Whole requests


def empty(layout: CacheLayout, size: CacheSize = SIZE) -> KVCache:
    """Committed to its device, as the records are: or a step would compile again for what comes back from them."""
    return jax.device_put(init_cache(layout, size), jax.devices()[0])


def out(cache: KVCache, host: HostCache, blocks: list[int], slot: int, tokens: int) -> HostCache:
    """A request's blocks to pages 1.., its state to those behind."""
    sizes = dict(num_device=cache.block_units - 1, num_host=host.num_pages, length=len(blocks))
    host = jitted("swap_out")(cache, host, plan_swap("out", blocks, range(1, len(blocks) + 1), **sizes))
    return jitted("snapshot")(cache, host, state("out", cache, slot, tokens))


def state(direction: str, cache: KVCache, slot: int, tokens: int) -> StateSwapPlan:
    """Of a slot and the host's pages 9 and on."""
    records = [*range(9, 9 + state_pages(cache.layout, tokens))]
    sizes = dict(num_device=cache.slot_units - 1, num_host=PAGES)
    return plan_state_swap(direction, cache.layout, [slot], [records], [tokens], **sizes)


def back(cache: KVCache, host: HostCache, blocks: list[int], slot: int, tokens: int) -> KVCache:
    """The reverse of `out`, to these blocks and this slot; the table is set as a next step would set it."""
    sizes = dict(num_device=cache.block_units - 1, num_host=host.num_pages, length=len(blocks))
    cache = jitted("swap_in")(cache, host, plan_swap("in", blocks, range(1, len(blocks) + 1), **sizes))
    cache = jitted("restore")(cache, host, state("in", cache, slot, tokens))
    table = cache.block_table.at[slot, : len(blocks)].set(jnp.array(blocks, jnp.int32))
    return cache.with_pool("block_table", (table,))


@pytest.mark.parametrize("options", [{}, dict(kv_format="bf16", index_format="fp8", hca_state="raw", draft_tokens=2)])
def test_cold_prefill_equals_round_trip_equals_preemption(options):
    """137 tokens, elsewhere for a while, 20 more: the bytes of a run that never left the device."""
    layout = CacheLayout(CFG, **options)
    # One shape for prefill and decoding: one compile.
    shape, stream = pinned_shape(layout, 1, 24, 2, history=True), random_stream(layout, 160, 1)

    def prefill(driver: Driver, slot: int) -> None:
        for count in (24, 24, 24, 24, 24, 17):
            driver.step([(slot, count)], shape)

    def start() -> Driver:
        driver = Driver(layout, SIZE)
        driver.cache = empty(layout)
        driver.admit(2, stream)
        prefill(driver, 2)
        return driver

    def finish(driver: Driver, slot: int) -> None:
        for _ in range(20):
            driver.step([(slot, 1)], shape)

    cold, swapped, preempted = start(), start(), start()
    finish(cold, 2)

    # Out, zero, in: the same request.
    host = out(swapped.cache, init_host_cache(layout, PAGES), swapped.blocks[2], 2, 137)
    swapped.cache = back(empty(layout), host, swapped.blocks[2], 2, 137)
    finish(swapped, 2)
    assert_same_bytes(swapped.live(2), cold.live(2))

    # Out; another request takes slot and blocks; in again elsewhere: its own bytes are the same.
    host = out(preempted.cache, init_host_cache(layout, PAGES), preempted.blocks[2], 2, 137)
    was = preempted.blocks[2]
    preempted.release(2)
    preempted.free = [b for b in preempted.free if b not in was] + was
    preempted.admit(2, random_stream(layout, 160, 2))
    prefill(preempted, 2)
    assert sorted(preempted.blocks[2]) == sorted(was)
    preempted.blocks[1] = [int(preempted.free.pop()) for _ in was]
    preempted.length[1], preempted.streams[1] = 137, stream
    preempted.cache = back(preempted.cache, host, preempted.blocks[1], 1, 137)
    finish(preempted, 1)
    assert not set(preempted.blocks[1]) & set(was)
    assert_same_bytes(preempted.live(1), cold.live(2))


def check_next_tokens(
    cfg: DSV4Config,
    prefill: Callable,
    decode: Callable,
    chunk: int,
    prompt: int,
    decoded: int,
    *,
    one_shape: bool = False,
    **options: str,
) -> None:
    """A model's cold run, one whose cache went out and came back, one preempted and resumed: bytes and logits.

    Args:
        prefill, decode: steps (params, cache, plan, tokens) -> (logits, cache) of up to `chunk` tokens and of one.
        prompt, decoded: tokens fed before and after the interruption.
        one_shape: decode in the shape of the chunks.
    """
    layout, params = CacheLayout(cfg), model.init_params(cfg, seed=0, **options)
    columns = layout.blocks_for(prompt + decoded + 1)
    size = CacheSize(2 * columns, 2, columns)
    mine, other = np.random.default_rng(0).integers(0, cfg.vocab_size, (2, prompt + decoded + 1)).tolist()

    class Run:
        """A manager, its cache and its records."""

        def __init__(self) -> None:
            self.manager = KVCacheManager(layout, size, host=HostSize.of(layout, columns, 2))
            self.host = init_host_cache(layout, PAGES)
            # What a resumed request brings to its first step: all its table entries.
            bounds = (StepShape.bound(layout, 1, tokens, columns=columns) for tokens in (chunk, 1))
            first, then = (dataclasses.replace(b, table_entries=b.table_entries + columns) for b in bounds)
            self.shapes = first, first if one_shape else then
            self.cache = empty(layout, size)
            self.request = self.start(mine)

        def start(self, text: list[int]) -> Request:
            """Prefills all but the last token: that is the next step's."""
            request = self.manager.admit_request(text[: prompt + 1], max_tokens=len(text))
            while request.num_pending > 1:
                self.step(request, min(chunk, request.num_pending - 1), prefill, self.shapes[0])
            return request

        def step(self, request: Request, count: int, step: Callable, shape: StepShape) -> np.ndarray:
            plan = self.manager.plan_step([(request, count)], shape=shape)
            self.cache, self.host = run_transfers(self.cache, self.host, self.manager.take_transfers())
            logits, self.cache = step(params, self.cache, plan.pack(), self.manager.plan_tokens(plan))
            return np.asarray(logits)[0]

        def finish(self) -> np.ndarray:
            """Logits [decoded, vocab] of the given text."""
            out = []
            for token in mine[prompt + 1 :]:
                out.append(self.step(self.request, 1, decode, self.shapes[1]))
                self.request.tokens.append(token)
            return np.stack(out)

        def live(self) -> dict[str, list[np.ndarray]]:
            return live_bytes(self.cache, Held.of(self.request))

    cold = Run()
    expected = cold.finish()
    assert np.isfinite(expected).all() and np.ptp(expected) > 0.1

    swapped = Run()
    slot, blocks = swapped.request.slot, list(swapped.request.blocks)
    before, host = swapped.live(), out(swapped.cache, swapped.host, blocks, slot, prompt)
    swapped.cache = back(empty(layout, size), host, blocks, slot, prompt)
    assert_same_bytes(swapped.live(), before)
    swapped.host = host
    np.testing.assert_array_equal(swapped.finish(), expected)
    assert_same_bytes(swapped.live(), cold.live())

    preempted = Run()
    slot, blocks = preempted.request.slot, set(preempted.request.blocks)
    preempted.manager.preempt(preempted.request)
    assert preempted.request.parked is not None
    taker = preempted.start(other)
    assert taker.slot == slot and set(taker.blocks) == blocks
    preempted.manager.resume(preempted.request)
    assert preempted.request.slot != slot and not set(preempted.request.blocks) & blocks
    assert preempted.request.num_cached == prompt, "nothing is computed again"
    np.testing.assert_array_equal(preempted.finish(), expected)
    assert_same_bytes(preempted.live(), cold.live())


@pytest.mark.slow
def test_next_tokens_after_a_round_trip_and_after_preemption() -> None:
    # Without LLVM's optimisations, which are most of the test's time.
    forward = jax.jit(model.forward, donate_argnames="cache", compiler_options={"xla_backend_optimization_level": 0})
    check_next_tokens(CFG, forward, forward, chunk=32, prompt=139, decoded=3, one_shape=True)
