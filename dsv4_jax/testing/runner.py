"""The tiny model behind the serving tests: one executable for everything, and requests that run alone in a cold cache.

Rounding may differ between executables, so mixed and lone runs share one: one `StepShape`, one size of arrays.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import numpy as np

from dsv4_jax import AttentionType, CacheLayout, CacheSize, DSV4Config, KVCacheManager, init_cache, model
from dsv4_jax.cache import KVCache
from dsv4_jax.manager import Request, StepShape
from dsv4_jax.plan import StepPlan

from ..oracle.live import live_bytes

SWA, CSA, HCA = AttentionType
CFG = DSV4Config.tiny(
    vocab_size=32, hidden_size=32, layer_types=(SWA, CSA, HCA), num_attention_heads=2, q_lora_rank=16, o_lora_rank=8,
    sliding_window=6, index_n_heads=2, index_topk=3, hca_ratio=8, moe_intermediate_size=16, max_position_embeddings=64,
)  # fmt: skip
# Of the arrays; a manager may be told of fewer units, so that pools are tight and the executable the same.
SIZE = CacheSize(num_blocks=20, num_slots=4, max_blocks_per_request=8, num_snapshots=4)


@functools.partial(jax.jit, donate_argnames="cache")
def step(params, cache, plan, tokens):
    """A function of its own: jax.jit shares the executables of one function, wherever it is jitted."""
    return model.forward(params, cache, plan, tokens)


class Lone(NamedTuple):
    """What a request has that nobody ran beside, from a cache of zeros.

    Attributes:
        logits: [N, vocab] float32 of its tokens.
        live: see `live_bytes`.
    """

    logits: np.ndarray
    live: dict[str, list[np.ndarray]]


class Model:
    """Parameters and the one executable.

    Attributes:
        layout: two drafts, blocks of 8 tokens. Rows in float32 by default: then no rounding hides a difference.
        shape: of every step.
    """

    def __init__(self, kv_format: str = "f32", index_format: str = "f32") -> None:
        self.params = model.init_params(CFG, seed=1)
        self.layout = CacheLayout(CFG, kv_format, index_format, block_tokens=8, draft_tokens=2)
        columns = SIZE.max_blocks_per_request
        shape = StepShape.bound(
            self.layout, SIZE.num_slots, 16, columns=columns, history=True, slot_copies=8, block_copies=24
        )
        # As `pinned_shape` has it, and one for every row that gets drafts.
        self.shape = dataclasses.replace(shape, table_entries=shape.table_entries + columns + SIZE.num_slots)

    def run(self, cache: KVCache, manager: KVCacheManager, plan: StepPlan) -> tuple[np.ndarray, KVCache]:
        """One step of the requests' known tokens: (logits [T, vocab], cache)."""
        logits, cache = step(self.params, cache, plan.pack(), manager.plan_tokens(plan))
        return np.asarray(logits), cache

    def alone(self, tokens: list[int]) -> Lone:
        """These tokens in full chunks, with no cache of prefixes."""
        manager, cache, logits = KVCacheManager(self.layout, SIZE), init_cache(self.layout, SIZE), []
        request = manager.admit_request(tokens)
        while count := min(request.num_pending, self.shape.tokens):
            plan = manager.plan_step([(request, count)], shape=self.shape)
            out, cache = self.run(cache, manager, plan)
            logits.append(out[:count])
        return Lone(np.concatenate(logits), self.live(cache, request))

    def live(self, cache: KVCache, request: Request) -> dict[str, list[np.ndarray]]:
        """All bytes that the request's next tokens can see."""
        return live_bytes(cache, self.layout, request.slot, request.num_cached, request.blocks)


def with_garbage(cache: KVCache, rng: np.random.Generator) -> KVCache:
    """The same arrays with random bytes, NaNs among them, and random block ids in the table."""

    def garbage(leaf: jax.Array) -> jax.Array:
        if leaf.dtype == np.int32:
            data = rng.integers(0, SIZE.block_units, leaf.shape, dtype=np.int32)
        else:
            data = np.frombuffer(rng.bytes(leaf.nbytes), leaf.dtype).reshape(leaf.shape)
        return jax.device_put(data, leaf.sharding)

    return jax.tree.map(garbage, cache)
