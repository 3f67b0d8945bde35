"""Transfers of their own and their handles; staged transfers equal direct ones."""

from __future__ import annotations

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.errors import ShapeError, TransferError, TransferTimeoutError
from dsv4_jax.layout import CacheLayout
from dsv4_jax.plan import SwapPlan
from dsv4_jax.tiers import staging, transfer
from dsv4_jax.tiers.transfer import TransferHandle

from . import native
from .swapping import CFG, assert_image, image, model_in, model_out, random_cache, random_host

LAYOUT = CacheLayout(CFG)
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
OUT = SwapPlan(np.array([7, 2, 5, 0], np.int32), np.array([1, 6, 3, 0], np.int32))
IN = SwapPlan(np.array([1, 3, 4, 0], np.int32), np.array([6, 6, 2, 0], np.int32))


@pytest.fixture(autouse=True, scope="module")
def library() -> None:
    native.load_cpu()


def test_transfers_of_their_own():
    cache, host = random_cache(LAYOUT, 1), random_host(LAYOUT, 2)
    want, pool = image(cache), np.array(host.blocks)
    given, (host, handle) = host, transfer.swap_out_async(cache, host, OUT)
    handle.wait(60)
    assert handle.is_ready() and handle.error is None and given.blocks.is_deleted()
    assert 0 < handle.duration < 60
    model_out(LAYOUT, want, pool, OUT)
    # The pool may be read now, and goes on being donated: the handle does not hold it.
    assert np.array_equal(host.blocks, pool)
    given, (cache, handle) = cache, transfer.swap_in_async(cache, host, IN)
    handle.wait()
    model_in(LAYOUT, want, pool, IN)
    assert_image(cache, want)
    assert all(x.is_deleted() for x in given.arrays.values())
    slots = SwapPlan(np.array([2], np.int32), np.array([1], np.int32))
    host, first = transfer.snapshot_async(cache, host, slots)
    cache, second = transfer.restore_async(cache, host, SwapPlan(slots.device_ids + np.int32(1), slots.host_ids))
    first.wait(60), second.wait(60)
    model_out(LAYOUT, want, states := np.zeros(host.snapshots.shape, np.uint8), slots, "slot")
    model_in(LAYOUT, want, states, SwapPlan(slots.device_ids + 1, slots.host_ids), "slot")
    assert_image(cache, want)


class Token:
    """Stands for an array whose computation ends when told to."""

    def __init__(self, error: Exception | None = None):
        self.ended, self.failure = threading.Event(), error

    def is_ready(self) -> bool:
        return self.ended.is_set()

    def block_until_ready(self) -> None:
        assert self.ended.wait(60)
        if self.failure:
            raise self.failure


def test_waiting():
    token = Token()
    handle = TransferHandle(token)
    assert not handle.is_ready() and handle.error is None
    before = time.monotonic()
    with pytest.raises(TransferTimeoutError, match=r"within 0\.02 s"):
        handle.wait(0.02)
    with pytest.raises(TimeoutError):
        handle.wait(0)
    assert 0.02 <= time.monotonic() - before < 5
    threading.Timer(0.02, token.ended.set).start()
    handle.wait(60)
    assert handle.is_ready() and handle.error is None
    handle.wait(0), handle.wait()


def test_a_handle_knows_how_long_its_transfer_took():
    token = Token()
    before = time.monotonic()
    handle = TransferHandle(token)
    assert handle.duration is None
    with pytest.raises(TransferTimeoutError):
        handle.wait(0.02)
    assert handle.duration is None
    token.ended.set()
    took = handle.duration  # looking at it is a look
    assert 0.02 <= took <= time.monotonic() - before
    time.sleep(0.01)
    handle.wait(60)
    assert handle.duration == took and handle.is_ready()


@pytest.mark.parametrize("look", ["wait", "wait_long", "is_ready", "error"])
def test_the_first_look_that_finds_a_transfer_ended_ends_its_duration(look):
    token = Token()
    started = time.monotonic() - 5
    handle = TransferHandle(token, started=started)
    token.ended.set()
    {
        "wait": handle.wait,
        "wait_long": lambda: handle.wait(60),
        "is_ready": handle.is_ready,
        "error": lambda: handle.error,
    }[look]()
    looked = time.monotonic()
    time.sleep(0.01)
    assert 5 <= handle.duration <= looked - started


def test_a_failed_transfer_has_a_duration_too():
    token = Token(RuntimeError("the link is down"))
    token.ended.set()
    handle = TransferHandle(token)
    with pytest.raises(TransferError):
        handle.wait()
    assert 0 <= handle.duration < 60


@pytest.mark.parametrize("timeout", [None, 60])
def test_a_failed_transfer_says_so_to_everybody_who_asks(timeout):
    token = Token(RuntimeError("the link is down"))
    handle = TransferHandle(token)
    threading.Timer(0.02, token.ended.set).start()
    for _ in range(2):
        with pytest.raises(TransferError, match="the link is down") as caught:
            handle.wait(timeout)
        assert caught.value.__cause__ is handle.error is token.failure and handle.is_ready()


@pytest.mark.parametrize("implementation", ["xla", "ffi"])
class TestStaged:
    def test_out_beside_a_step(self, implementation):
        """The step returns what it staged, in host memory; committing it equals a swap of the blocks."""

        def step(cache, plan, x):
            staged = staging.stage_out(cache, plan, implementation=implementation)
            return x @ x, jax.device_put(staged, HOST)

        cache, host = random_cache(LAYOUT, 3), random_host(LAYOUT, 4)
        pool = np.array(host.blocks)
        _, staged = jax.jit(step)(cache, OUT, jnp.ones((8, 8)))
        assert staged.sharding.memory_kind == "pinned_host" and not np.asarray(staged)[3].any()
        commit = jax.jit(staging.commit_staged, donate_argnums=0, static_argnames="implementation")
        host = commit(host, staged, OUT, implementation=implementation)
        model_out(LAYOUT, image(cache), pool, OUT)
        assert np.array_equal(host.blocks, pool) and host.blocks.sharding.memory_kind == "pinned_host"

    def test_in_beside_a_step(self, implementation):
        def step(cache, staged, plan, x):
            return x @ x, staging.land(cache, jax.device_put(staged, DEVICE), plan, implementation=implementation)

        cache, host = random_cache(LAYOUT, 5), random_host(LAYOUT, 6)
        want = image(cache)
        staged = jax.jit(staging.prefetch_in, static_argnames="implementation")(host, IN, implementation=implementation)
        assert staged.sharding.memory_kind == "pinned_host" and not np.asarray(staged)[3].any()
        _, cache = jax.jit(step, donate_argnums=0)(cache, staged, IN, jnp.ones((8, 8)))
        model_in(LAYOUT, want, np.array(host.blocks), IN)
        assert_image(cache, want)


def test_nothing_staged_and_wrong_sizes():
    cache, host = random_cache(LAYOUT, 7), random_host(LAYOUT, 8)
    nothing = SwapPlan(np.zeros(0, np.int32), np.zeros(0, np.int32))
    staged = staging.stage_out(cache, nothing)
    assert staged.shape == staging.prefetch_in(host, nothing).shape == (0, host.blocks.shape[1])
    assert staging.commit_staged(host, staged, nothing) is host and staging.land(cache, staged, nothing) is cache
    with pytest.raises(ShapeError, match="staged records are uint8"):
        staging.commit_staged(host, staged, OUT)
    with pytest.raises(ShapeError, match="expected uint8"):
        staging.land(cache, staged, OUT)
