"""An engine without a model, in NumPy: every byte a token leaves depends on its history, and what is drawn on all bytes
that it sees. So one wrong byte, in a block or a state, is a wrong answer. No jax: a process of it starts in an instant.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dsv4_jax import AttentionType, CacheLayout, CacheSize, DSV4Config
from dsv4_jax.manager import CachePolicy, HostSize, KVCacheManager, Namespace, Request
from dsv4_jax.manager.transfers import TransferStage
from dsv4_jax.plan import StateSwapPlan, StepPlan
from dsv4_jax.records import page_bytes, state_pages
from dsv4_jax.tiers.remote import Pages

__all__ = ["BLOCK", "VOCAB", "ByteEngine", "answer", "layout"]

BLOCK, VOCAB, WIDTH = 8, 16, 16
CFG = DSV4Config.tiny(hca_ratio=8, layer_types=(AttentionType.CSA,), num_hash_layers=0, vocab_size=VOCAB)


def layout(drafts: int) -> CacheLayout:
    return CacheLayout(CFG, block_tokens=BLOCK, draft_tokens=drafts)


def _chain(before: bytes, token: int) -> bytes:
    return hashlib.sha256(before + bytes([token])).digest()


def _root(space: Namespace | None) -> bytes:
    return hashlib.sha256(repr(space).encode()).digest()


def _row(state: bytes) -> np.ndarray:
    """What a token leaves in its block."""
    return np.frombuffer(hashlib.sha256(b"row" + state).digest()[:WIDTH], np.uint8)


def _draw(state: bytes, rows: bytes) -> int:
    return hashlib.sha256(state + rows).digest()[0] % VOCAB


def answer(space: Namespace | None, prompt: Sequence[int], count: int) -> list[int]:
    """What a request is answered with, by nobody's cache."""
    tokens, state, rows = list(prompt), _root(space), b""
    for i in range(len(prompt) + count - 1):
        state = _chain(state, tokens[i])
        rows += _row(state).tobytes()
        if i >= len(prompt) - 1:
            tokens.append(_draw(state, rows))
    return tokens[len(prompt) :]


class Shard(NamedTuple):
    index: tuple[slice, ...]
    data: Memory


class Memory:
    """Host pages, as `RemoteDriver` looks at them: of all ranks, or of one."""

    def __init__(self, *memories: np.ndarray):
        self.memories = memories

    def is_ready(self) -> bool:
        return True

    def is_deleted(self) -> bool:
        return False

    @property
    def addressable_shards(self) -> list[Memory]:
        return [Shard((slice(i * len(memory), None),), Memory(memory)) for i, memory in enumerate(self.memories)]

    def block_until_ready(self) -> Memory:
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        return self.memories[0].shape

    @property
    def nbytes(self) -> int:
        return self.memories[0].nbytes

    def unsafe_buffer_pointer(self) -> int:
        return self.memories[0].ctypes.data


class Host:
    """Stands for a `HostCache`, and with no arrays of its own for a `KVCache`."""

    def __init__(self, pages: Pages, layout: CacheLayout):
        self.pages, self.layout, self.arrays = Memory(*pages.memories), layout, dict[str, Memory]()


class ByteEngine:
    """A manager, its blocks, slots and host pages."""

    def __init__(self, *, drafts: int, size: CacheSize, host: HostSize, seed: int = 0):
        self.layout, self.size = layout(drafts), size
        assert page_bytes(self.layout) == BLOCK * WIDTH
        self.manager = KVCacheManager(self.layout, size, policy=CachePolicy(), host=host, weights_id="bytes")
        memory = np.zeros((size.pool_ranks, 1 + host.num_pages, BLOCK * WIDTH), np.uint8)
        self.pages = Pages([*memory])
        self.host = Host(self.pages, self.layout)
        self.blocks = np.random.default_rng(seed).integers(0, 256, (1 + size.total_blocks, BLOCK, WIDTH), np.uint8)
        self.table = np.zeros((1 + size.num_slots + size.num_snapshots, size.max_blocks_per_request), int)
        self.states: dict[int, dict[int, bytes]] = {}  # of a slot: by tokens, as far back as drafts are rejected
        self.spaces: dict[int, Namespace | None] = {}

    def transfer(self) -> None:
        for stage in self.manager.take_transfers():
            self.move(stage)

    def move(self, stage: TransferStage) -> None:
        for plan, into in ((stage.swap_out, False), (stage.swap_in, True)):
            for device, page in zip(plan.device_ids.tolist(), plan.host_ids.tolist(), strict=True) if plan else ():
                if into and device:
                    self.blocks[device] = self.pages[page].reshape(BLOCK, WIDTH)
                elif device:
                    self.pages[page][:] = self.blocks[device].ravel()
            if not into:
                self._states(stage.snapshot, False)
        self._states(stage.restore, True)

    def _states(self, plan: StateSwapPlan | None, into: bool) -> None:
        for device, pages, count in zip(plan.device_ids, plan.host_ids, plan.num_tokens, strict=True) if plan else ():
            if not device:
                continue
            pages, tokens = [page for page in pages.tolist() if page], int(count)
            assert len(pages) == state_pages(self.layout, tokens)
            if into:
                record = b"".join(self.pages[page].tobytes() for page in pages)
                whole = record == record[:32] * (len(record) // 32)
                self.states[int(device)] = {tokens: record[:32] if whole else hashlib.sha256(record).digest()}
            else:
                state = self.states[int(device)].get(tokens, b"?" * 32)
                for page in pages:
                    self.pages[page][:] = np.frombuffer(state * (BLOCK * WIDTH // 32), np.uint8)

    def step(self, scheduled: list[tuple[Request, int]]) -> dict[Request, list[int]]:
        """Plans and runs one step: what is drawn after each of its tokens."""
        plan = self.manager.plan_step(scheduled)
        self.transfer()
        ids = self.manager.plan_tokens(plan).tolist()
        self.copy(plan)
        drawn, first = dict[Request, list[int]](), 0
        for request, count in scheduled:
            start, space = request.num_cached - count, self.spaces.get(request.id)
            drawn[request] = [self.feed(request.slot, space, start + i, ids[first + i]) for i in range(count)]
            first += count
        return drawn

    def copy(self, plan: StepPlan) -> None:
        copies = zip(plan.copy_slot_src.tolist(), plan.copy_slot_dst.tolist(), strict=True)
        self.states.update([(target, dict(self.states.get(source, {}))) for source, target in copies if target])
        pairs = [(s, t) for s, t in zip(plan.copy_block_src, plan.copy_block_dst, strict=True) if t]
        for (_, target), data in zip(pairs, [self.blocks[source].copy() for source, _ in pairs], strict=True):
            self.blocks[target] = data
        for slot, column, block in zip(plan.table_slot, plan.table_index, plan.table_block, strict=True):
            if slot:
                self.table[slot, column] = block

    def feed(self, slot: int, space: Namespace | None, position: int, token: int) -> int:
        states = self.states.setdefault(slot, {}) if position else {0: _root(space)}
        state = _chain(states.get(position, b"!" * 32), token)
        kept = range(position - self.layout.draft_tokens, position + 1)
        self.states[slot] = {n: s for n, s in states.items() if n in kept} | {position + 1: state}
        self.blocks[self.table[slot, position // BLOCK], position % BLOCK] = _row(state)
        rows = self.blocks[self.table[slot, : position // BLOCK + 1]].reshape(-1, WIDTH)[: position + 1]
        return _draw(state, rows.tobytes())

    def held(self) -> dict[str, int]:
        """What somebody still holds: all zeros once nothing is under way."""
        manager, cache = self.manager, self.manager.cache
        manager.check_integrity()
        stats = manager.stats().cache.pools
        return {
            "requests": len(manager.requests) + len(manager.preempted),
            "leases": len(manager.leases),
            "holds": len(cache.tree.holds.active),
            "reading": len(cache.reading) + len(cache.landed),
            "device": stats["device"].private,
            "host": stats["host"].private,
        }
