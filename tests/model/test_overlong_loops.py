"""Loops of more steps than a plan has reserved: what they write and draw is that of a loop that ends where it should.

A request stands one block below a neighbour's: its next table column still names a block that it had before it was
released, and that the neighbour has now.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax import (
    AttentionType,
    CacheLayout,
    CacheSize,
    KVCacheManager,
    cache_sharding,
    init_cache,
    model,
    shard_step,
    stack_plans,
)
from dsv4_jax.cache import KVCache
from dsv4_jax.errors import PlanError, RequestError
from dsv4_jax.manager import Request
from dsv4_jax.testing.live import Held, live_bytes

from ..hostile import wherever
from . import test_mtp

_, CSA, HCA = AttentionType
CFG = dataclasses.replace(test_mtp.CFG, layer_types=(CSA, HCA), num_hash_layers=1)
WIDE = dataclasses.replace(CFG, head_dim=512, rope_dim=64, index_head_dim=128, index_n_heads=4, sliding_window=9)
LAYOUT = CacheLayout(CFG, "f32", "f32", block_tokens=8)
DRAFTING = CacheLayout(CFG, "f32", "f32", block_tokens=8, draft_tokens=2, include_drafts=True)
SIZE = CacheSize(num_blocks=6, num_slots=2, max_blocks_per_request=4)
# RESERVED tokens more fill the block, RUN complete an entry of the next. Few numbers of steps: each is compiled.
START, RESERVED, RUN = 6, 2, 6
WANTED = jnp.full(2, 2, jnp.int32)

prefill = jax.jit(model.prefill, donate_argnames="cache")
decode_step = jax.jit(model.decode_step, donate_argnames="cache")
forward = jax.jit(model.forward, donate_argnames="cache")


def tokens_alone(loop: Any, *static: str) -> Any:
    """The loop jitted, which gives tokens and nothing else of what was drawn."""
    jitted = jax.jit(loop, donate_argnames="cache", static_argnames=static)

    def call(*args: Any, **options: Any) -> tuple[Any, ...]:
        drawn, *others = jitted(*args, **options)
        return drawn.tokens, *others

    return call


decode_loop = tokens_alone(model.decode_loop, "num_steps", "implementation")
draft_loop = tokens_alone(model.draft_loop, "width", "num_steps")


@pytest.fixture(scope="module")
def params() -> model.Params:
    return model.init_params(CFG, seed=1, drafts=True)


@dataclasses.dataclass
class Neighbours:
    """`short` in slot 1 with START tokens and block 1; `other` in slot 2 with blocks that slot 1's table names."""

    params: model.Params
    layout: CacheLayout = LAYOUT

    def __post_init__(self) -> None:
        self.manager, self.cache = KVCacheManager(self.layout, SIZE), init_cache(self.layout, SIZE)
        self.shape = self.manager.pinned_shape(2, 32, history=True)
        before = self.admit(32)
        self.manager.release_request(before)
        self.short, self.other = self.admit(START), self.admit(24)
        assert self.short.slot == before.slot and self.short.blocks == [1]
        table = np.asarray(self.cache.block_table)
        assert set(table[self.short.slot, 1:]) <= {*self.other.blocks}

    def admit(self, tokens: int) -> Request:
        request = self.manager.admit_request((np.arange(tokens) * 7 % 31).tolist())
        plan = self.manager.plan_step([(request, tokens)], shape=self.shape)
        _, self.cache = prefill(self.params, self.cache, plan.pack(), self.manager.plan_tokens(plan))
        return request

    def plan(self, tokens: int = 1, steps: int = RESERVED):
        """Of `short` alone."""
        shape = self.manager.pinned_shape(2, 2 * tokens, steps=4)
        return self.manager.plan_step([(self.short, tokens)], steps=steps, shape=shape)

    def seen(self) -> dict:
        """What the neighbour's next token sees."""
        return live_bytes(self.cache, Held.of(self.other))


FED = jnp.asarray([5, 0], jnp.int32)


def test_a_decode_loop_ends_where_its_plan_does(params) -> None:
    exact, over = Neighbours(params), Neighbours(params)
    want, exact.cache = decode_loop(params, exact.cache, exact.plan().pack(), FED, num_steps=RESERVED)
    got, over.cache = decode_loop(params, over.cache, over.plan().pack(), FED, num_steps=RUN)
    got = np.asarray(got)
    np.testing.assert_array_equal(got[:RESERVED], want)
    assert (got[:RESERVED, 0] >= 0).all() and (got[RESERVED:] == -1).all() and (got[:, 1] == -1).all()
    chex.assert_trees_all_equal(over.cache.arrays, exact.cache.arrays)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", [None, "pallas"])
def test_on_a_gpu(implementation) -> None:
    """As above with the widths that its kernels take."""
    layout = CacheLayout(WIDE, block_tokens=8)
    params, ops = model.init_params(WIDE, seed=1), None if implementation is None else wherever(implementation)
    exact, over = Neighbours(params, layout), Neighbours(params, layout)
    want, exact.cache = decode_loop(
        params, exact.cache, exact.plan(steps=4).pack(), FED, num_steps=4, implementation=ops
    )
    got, over.cache = decode_loop(params, over.cache, over.plan(steps=4).pack(), FED, num_steps=11, implementation=ops)
    np.testing.assert_array_equal(np.asarray(got)[:4], want)
    assert (np.asarray(got)[4:] == -1).all()
    chex.assert_trees_all_equal(over.cache.arrays, exact.cache.arrays)


def test_without_its_end_the_plan_would_reach_the_neighbours_blocks(params) -> None:
    """What the other tests rely on."""
    pair = Neighbours(params)
    before, plan = pair.seen(), pair.plan()
    forever = plan._replace(seq_stop=plan.seq_stop + 99)
    _, pair.cache = decode_loop(params, pair.cache, forever.pack(), FED, num_steps=RUN)
    with pytest.raises(AssertionError):
        chex.assert_trees_all_equal(pair.seen(), before)


def test_a_loop_in_several_calls(params) -> None:
    """The plan of a later call is the first one's, so many steps further; its end stays."""
    exact, parts = Neighbours(params), Neighbours(params)
    want, exact.cache = decode_loop(params, exact.cache, exact.plan(steps=RUN).pack(), FED, num_steps=RUN)
    plan, tokens, got = parts.plan(steps=RUN), FED, []
    for steps in (3, 3, 3):
        drawn, parts.cache = decode_loop(params, parts.cache, plan.pack(), tokens, num_steps=steps)
        plan, tokens = plan.advance(steps), drawn[-1]
        got += np.asarray(drawn).tolist()
    np.testing.assert_array_equal(got[:RUN], want)
    assert (np.array(got[RUN:]) == -1).all() and not plan.seq_slot.any()
    chex.assert_trees_all_equal(parts.cache.arrays, exact.cache.arrays)


@pytest.mark.parametrize("carried", [False, True], ids=["from the first plan", "carried"])
@pytest.mark.slow
def test_a_loop_of_ones_own(params, carried) -> None:
    """Traced, and step by step on the host."""
    exact, own, steps = Neighbours(params), Neighbours(params), Neighbours(params)
    want, exact.cache = decode_loop(params, exact.cache, exact.plan().pack(), FED, num_steps=RESERVED)

    def looped(params, cache: KVCache, plan, tokens):
        plan = jax.tree.map(jnp.asarray, plan.unpack())
        cache, plan = cache.begin(plan).finish(partial=True), plan.settled()

        def body(carry, i):
            cache, tokens, here = carry
            here = here if carried else plan.advance(i)
            logits, cache = model.forward(params, cache, here, tokens)
            tokens = logits.argmax(-1).astype(jnp.int32)
            return (cache, tokens, here.advance() if carried else plan), tokens

        (cache, *_), drawn = jax.lax.scan(body, (cache, tokens, plan), jnp.arange(RUN, dtype=jnp.int32))
        return drawn, cache

    got, own.cache = jax.jit(looped, donate_argnums=1)(params, own.cache, own.plan().pack(), FED)
    np.testing.assert_array_equal(np.asarray(got)[:RESERVED, 0], np.asarray(want)[:, 0])
    chex.assert_trees_all_equal(own.cache.arrays, exact.cache.arrays)

    plan, tokens = steps.plan(), FED
    for i in range(RUN):
        logits, steps.cache = decode_step(params, steps.cache, plan.pack(), tokens)
        tokens, plan = logits.argmax(-1).astype(jnp.int32), plan.advance()
        assert plan.seq_slot.tolist() == [1 if i + 1 < RESERVED else 0, 0]
    chex.assert_trees_all_equal(steps.cache.arrays, exact.cache.arrays)


def test_a_loop_of_fewer_steps_goes_on_where_it_ended(params) -> None:
    """Once the manager knows how many ran, its next plan is that of a loop that was planned so."""
    exact, ended = Neighbours(params), Neighbours(params)
    for pair, steps in ((exact, 2), (ended, 4)):
        drawn, pair.cache = decode_loop(params, pair.cache, pair.plan(steps=steps).pack(), FED, num_steps=2)
        pair.manager.accept(pair.short, 2, steps=2)
        assert pair.short.num_cached == START + 2 and pair.short.blocks == [1]
        drawn, pair.cache = decode_loop(params, pair.cache, pair.plan(steps=3).pack(), drawn[-1], num_steps=3)
        assert (np.asarray(drawn)[:, 0] >= 0).all()
        pair.manager.check_integrity()
    chex.assert_trees_all_equal(*(live_bytes(pair.cache, Held.of(pair.short)) for pair in (ended, exact)))
    chex.assert_trees_all_equal(ended.seen(), exact.seen())


def test_what_a_plan_does_once_is_not_lost(params) -> None:
    """Its table entries: a loop that moves the plan itself would never make them."""
    pair = Neighbours(params)
    with pytest.raises(PlanError, match="begin it once before the loop"):
        jax.eval_shape(lambda plan, i: plan.advance(i), pair.plan(), np.int32(0))


@pytest.mark.slow
def test_a_draft_loop_ends_where_no_whole_step_is_left(params) -> None:
    """Each keeps what proves right: how many steps fit is known on the device alone."""
    over, exact = (Neighbours(params, DRAFTING) for _ in range(2))
    foreign = over.seen()
    drawn, kept, over.cache = draft_loop(params, over.cache, over.plan(3).pack(), FED, WANTED, width=2, num_steps=RUN)
    drawn, kept = np.asarray(drawn), np.asarray(kept)
    ran, total = int((kept[:, 0] > 0).sum()), int(kept.sum())
    assert RESERVED <= ran < RUN and not kept[ran:].any() and not kept[:, 1].any()
    assert 3 * RESERVED - 2 <= total <= 3 * RESERVED and (drawn[ran:] == -1).all() and (drawn[:ran, 0] >= 0).all()
    *_, exact.cache = draft_loop(params, exact.cache, exact.plan(3).pack(), FED, WANTED, width=2, num_steps=ran)
    chex.assert_trees_all_equal(over.cache.arrays, exact.cache.arrays)
    chex.assert_trees_all_equal(over.seen(), foreign)
    over.manager.accept(over.short, total)  # as many as the cache holds, though of more steps than were planned
    assert over.short.num_cached == START + total
    over.manager.check_integrity()


def test_what_was_not_drawn_is_not_fed(params) -> None:
    """-1 from the loop before: nothing is computed of it, no other row is any different, and the host refuses it."""
    both, alone = Neighbours(params), Neighbours(params)
    shape = both.manager.pinned_shape(2, steps=4)
    plan = both.manager.plan_step([(both.short, 1), (both.other, 1)], steps=2, shape=shape)
    before = live_bytes(both.cache, Held(both.short.slot, START, both.short.blocks))
    drawn, both.cache = decode_loop(params, both.cache, plan.pack(), jnp.asarray([-1, 7]), num_steps=2)
    chex.assert_trees_all_equal(live_bytes(both.cache, Held(both.short.slot, START, both.short.blocks)), before)
    plan = alone.manager.plan_step([(alone.other, 1)], steps=2, shape=shape)
    want, alone.cache = decode_loop(params, alone.cache, plan.pack(), jnp.asarray([7, 0]), num_steps=2)
    assert (drawn[:, 0] == -1).all()
    np.testing.assert_array_equal(drawn[:, 1], want[:, 0])
    chex.assert_trees_all_equal(both.seen(), alone.seen())
    both.short.tokens += [7, -1, -1]
    with pytest.raises(RequestError, match="-1"):
        both.manager.plan_tokens(both.plan())


@pytest.mark.slow
def test_a_chunk_is_fed_once(params) -> None:
    """A plan of as many tokens as sequences, all of one of these."""
    exact, over = Neighbours(params), Neighbours(params)
    shape = over.manager.pinned_shape(2, 2, history=True)
    for pair in (exact, over):
        plan = pair.manager.plan_step([(pair.short, 2)], shape=shape)
        steps = 1 if pair is exact else RUN
        drawn, pair.cache = decode_loop(params, pair.cache, plan.pack(), jnp.asarray([5, 6]), num_steps=steps)
    assert (np.asarray(drawn[0]) >= 0).all() and (np.asarray(drawn[1:]) == -1).all()
    chex.assert_trees_all_equal(over.cache.arrays, exact.cache.arrays)


@pytest.mark.slow
def test_beside_drafts_a_loop_stores_what_it_does_alone(params) -> None:
    """Its entries, too: in the plan's first step it completes none."""
    alone, beside = Neighbours(params, DRAFTING), Neighbours(params, DRAFTING)
    for pair in (alone, beside):
        drafts = [(pair.other, 2)] if pair is beside else []
        shape = pair.manager.pinned_shape(2, 4, steps=4, history=True)
        plan = pair.manager.plan_step([*drafts, (pair.short, 1)], steps=4, shape=shape)
        tokens = jnp.asarray([3, 4, 5, 0] if drafts else [5, 0, 0, 0], jnp.int32)
        for i in range(4):  # fed the same, whatever is drawn
            _, pair.cache = forward(params, pair.cache, plan.advance(i).pack(), tokens)
    chex.assert_trees_all_equal(*(live_bytes(pair.cache, Held.of(pair.short)) for pair in (alone, beside)))


@pytest.mark.slow
def test_each_data_shard_ends_where_its_own_plan_does(params) -> None:
    mesh, reserved = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2]), (2, 3)
    exact, shards = ([Neighbours(params) for _ in reserved] for _ in range(2))
    want = []
    for pair, steps in zip(exact, reserved, strict=True):
        drawn, pair.cache = decode_loop(params, pair.cache, pair.plan(steps=steps).pack(), FED, num_steps=steps)
        want.append(np.asarray(drawn)[:, 0].tolist())
    placed = cache_sharding(LAYOUT, mesh)
    whole = {
        name: jax.device_put(np.concatenate([pair.cache.arrays[name] for pair in shards]), placement)
        for name, placement in placed.arrays.items()
    }
    plans = stack_plans([pair.plan(steps=steps) for pair, steps in zip(shards, reserved, strict=True)])
    step = shard_step(model.decode_loop, mesh, out_axis=1, num_steps=RUN)
    drawn, cache = step(params, KVCache(whole, LAYOUT), plans, jnp.concatenate([FED, FED]))
    for shard, steps in enumerate(reserved):
        row = np.asarray(drawn.tokens)[:, 2 * shard].tolist()
        assert row == want[shard] + [-1] * (RUN - steps)
        for name, array in cache.arrays.items():
            each = np.split(np.asarray(array), 2)[shard]
            np.testing.assert_array_equal(each, exact[shard].cache.arrays[name], err_msg=name)
