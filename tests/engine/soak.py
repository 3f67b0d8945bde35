"""The engine on the real model, small, under everything that users and machines do to it: every answer is checked.

    python -m tests.engine.soak --requests 2000 --seed 0        on the CPU: five engines, a fifth of the requests each

The engines: one device with a host tier, stores and loops of steps; one that drafts with an MTP layer, and one with
DSpark's stages; two data shards on two devices; one that goes on with prompts of another host, whose hand-offs are
lost, torn and given up, scores texts between its requests, and says which experts each token went to.
Each has a pool for few of its requests. Threads add prompts in bursts (of tenants, priorities, samplings, masks, stops,
deadlines), read them in several ways, leave, and abort; the engine is paused, put to sleep and given other weights; its
steps fail, before their transfers, behind them, and when they are read; its stores fail and hang. Of every answer, each
token is what `sample` draws from the logits of `forward_uncached` with its seed, position, mask and penalties, and each
log-probability is theirs. A draw that differs counts as a near tie if the uncached model draws the same with the two
logits moved by `NEAR`; their share is bounded.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import functools
import itertools
import os
import queue
import random
import sys
import threading
import time
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax import AttentionType, CacheLayout, CacheSize, DSV4Config, model
from dsv4_jax.config import DSparkHead
from dsv4_jax.engine import Completion, Engine, Limits, Prompt
from dsv4_jax.engine.build import build
from dsv4_jax.engine.prompt import derived_seed
from dsv4_jax.errors import EngineError, HandoffError, PeerError, QueueFullError, RequestError, StoreError
from dsv4_jax.manager import CachePolicy, HostSize, Namespace, SnapshotPlacement
from dsv4_jax.model import uncached
from dsv4_jax.model.moe import moe
from dsv4_jax.model.sampling import SamplingRows, bias_rows, sample, token_counts
from dsv4_jax.records import block_record, snapshot_record
from dsv4_jax.stores import AsyncStore
from dsv4_jax.tiers.remote import RecordTransport
from dsv4_jax.transports import open_engine

from ..model.feeding import SMALL_WIDTHS

SWA, CSA, HCA = AttentionType
LIMIT = 64  # tokens of a request
CFG = DSV4Config.tiny(
    **(SMALL_WIDTHS | dict(num_attention_heads=4)),
    layer_types=(CSA, HCA),
    num_mtp_layers=1,
    o_groups=4,
    max_position_embeddings=LIMIT,
    hc_sinkhorn_iters=1,
)
# The same backbone, whose draft head is DSpark's.
STAGES = dataclasses.replace(CFG, num_mtp_layers=0, dspark=DSparkHead(5, 31, (0, 1), 8))
VOCAB = CFG.vocab_size
NEAR = 2e-4  # of logits: what the rounding of other orders of summation may move
BOUND = 5e-5  # of log-probabilities
PATIENCE = 300.0  # seconds without an answer: somebody is forgotten


@dataclasses.dataclass(frozen=True)
class Scene:
    """An engine, and what is done to it."""

    name: str
    steps: int = 4
    drafts: int = 0
    cfg: DSV4Config = CFG
    shards: int = 1
    stores: bool = False
    hosts: bool = False  # prompts come from another one, texts are scored, and experts told
    all_kinds: bool = True  # masks, penalties with biases, plain outputs among others: executables of their own
    faults: float = 0.01  # of calls
    every: int = 12  # answers between pauses, sleeps and other weights
    rows: tuple[int, ...] = ()  # of decodes of fewer requests than there are slots
    tokens: tuple[int, ...] = ()  # of steps of fewer tokens than the widest


SCENES = (
    Scene("one device", stores=True),
    Scene("drafts", steps=2, drafts=2, all_kinds=False, rows=(1, 2), tokens=(15,)),
    Scene("stages", steps=2, drafts=4, cfg=STAGES, stores=True, all_kinds=False),
    Scene("two shards", shards=2, stores=True, all_kinds=False, rows=(1,), tokens=(10,)),
    Scene("two hosts", steps=2, hosts=True, all_kinds=False, tokens=(8,)),
)


class MemoryStore:
    """Records in memory; calls fail, or wait for a while, as often as `trouble` says."""

    def __init__(self, record_bytes: int, rng: random.Random, trouble: float):
        self.record_bytes, self.key_bytes, self._records = record_bytes, 32, dict[bytes, bytes]()
        self._rng, self._trouble, self.reads = rng, trouble, 0

    def _meet(self) -> None:
        if self._rng.random() < self._trouble:
            if self._rng.random() < 0.5:
                raise StoreError("the disk is gone")
            time.sleep(self._rng.random() * 0.3)

    def contains(self, keys: Any) -> np.ndarray:
        self._meet()
        return np.array([key in self._records for key in keys])

    def read_into(self, keys: Any, buffers: Any) -> np.ndarray:
        self._meet()
        found = [self._records.get(key) for key in keys]
        for buffer, record in zip(buffers, found, strict=True):
            if record is not None:
                np.asarray(buffer)[:] = np.frombuffer(record, np.uint8)
                self.reads += 1
        return np.array([record is not None for record in found])

    def write(self, keys: Any, records: Any) -> np.ndarray:
        self._meet()
        new = [key not in self._records for key in keys]
        self._records.update((key, bytes(memoryview(record))) for key, record in zip(keys, records, strict=True))
        return np.array(new)

    def delete(self, keys: Any) -> np.ndarray:
        return np.array([self._records.pop(key, None) is not None for key in keys])

    def flush(self) -> None: ...

    def close(self) -> None: ...


class Faulty:
    """An executor whose calls fail now and then: before their transfers, behind them, or when they are read."""

    def __init__(self, executor: Any, rng: random.Random, share: float):
        self._executor, self._rng, self._share, self.failed = executor, rng, share, collections.Counter[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def _fail(self, how: str) -> None:
        self.failed[how] += 1
        raise OSError(how)

    def send(self, work: Any) -> Any:
        if self._rng.random() >= self._share:
            return self._executor.send(work)
        how = self._rng.choice(["before its transfers", "behind its transfers", "when it is read"])
        if how == "before its transfers":
            self._fail(how)
        if how == "behind its transfers":
            self._executor.move(work.transfers)
            self._fail(how)
        self._executor.send(work)
        return _Lost(functools.partial(self._fail, how))


@dataclasses.dataclass(frozen=True)
class _Lost:
    get: Any


@functools.cache
def params(weights: int, cfg: DSV4Config = CFG) -> model.Params:
    return model.init_params(cfg, seed=1 + weights, drafts=True)


@functools.partial(jax.jit, static_argnums=0)
def _logits(cfg: DSV4Config, weights: model.Params, tokens: jax.Array) -> jax.Array:
    return model.forward_uncached(cfg, weights, tokens)


@functools.partial(jax.jit, static_argnums=0)
def _experts(cfg: DSV4Config, weights: model.Params, tokens: jax.Array) -> jax.Array:
    """[layers, T, k], in rising order, as `forward_uncached` picks them."""
    picked: list[jax.Array] = []

    def noting(*given: Any) -> Any:
        out = moe(*given)
        picked.append(out[1])
        return out

    with mock.patch.object(uncached, "moe", noting):
        model.forward_uncached.__wrapped__(cfg, weights, tokens)
    return jnp.sort(jnp.stack(picked), -1)


_sample = jax.jit(functools.partial(sample, logprobs=True, top=5))


class Oracle:
    """What the uncached model says of answers. Counts of what it was asked: `tokens`, `near`; `worst` difference."""

    def __init__(self) -> None:
        self.tokens = self.near = self.logprobs = self.scored = self.experts = 0
        self.worst = 0.0

    def check_experts(self, prompt: Prompt, one: Completion) -> None:
        """Raises `AssertionError` unless the experts of a request that was computed once are the uncached model's."""
        told = np.sort(np.concatenate([np.zeros((CFG.num_layers, 0, CFG.num_experts_per_tok), int), *one.experts], 1))
        assert ((told >= 0) & (told < CFG.n_routed_experts)).all()
        whole = [*np.asarray(prompt.tokens).tolist(), *one.tokens]
        if one.finish != "length" or len(one.weights) != 1 or told.shape[1] != len(whole) - 1 - one.cached:
            return  # it began anew, or ended before its experts were told
        text = np.zeros(LIMIT, np.int32)
        text[: len(whole) - 1] = whole[:-1]
        true = np.asarray(_experts(CFG, params(one.weights_id), text))[:, one.cached : len(whole) - 1]
        self.near += int((told != true).any((0, 2)).sum())  # a score beside another
        self.experts += told.shape[1]

    def check_score(self, prompt: Prompt, one: Completion) -> None:
        """Raises `AssertionError` unless a text's log-probabilities are those of the weights that it names."""
        asked = np.asarray(prompt.tokens).tolist()
        if one.finish != "length":
            assert not one.tokens and not one.logprobs
            return
        text = np.zeros(LIMIT, np.int32)
        text[: len(asked)] = asked
        everything = np.asarray(jax.nn.log_softmax(_logits(CFG, params(one.weights_id), text)))
        assert one.tokens == asked[1:] and len(one.logprobs) == len(one.tokens)
        for i, (token, value) in enumerate(zip(one.tokens, one.logprobs, strict=True)):
            self._same(value, everything[i, token], one)
        self.scored += len(one.tokens)

    def check(self, prompt: Prompt, one: Completion) -> None:
        """Raises `AssertionError` unless each token and log-probability is that of the weights that it names."""
        if prompt.score:
            return self.check_score(prompt, one)
        if prompt.routed_experts:
            self.check_experts(prompt, one)
        asked, out = np.asarray(prompt.tokens).tolist(), one.tokens
        first, seen = len(asked) - 1, 0
        assert len(one.logprobs) == (len(out) if prompt.logprobs is not None else 0), one
        ends = [start for start, _ in one.weights[1:]] + [len(out)]
        parts = [(begin, end, name) for (begin, name), end in zip(one.weights, ends, strict=True)] if out else []
        if prompt.stop_tokens and one.finish == "stop" and prompt.stop_after is None:
            parts.append((len(out), len(out) + 1, one.weights_id))  # the token that was left out
        for begin, end, name in parts:
            stops = begin == len(out)
            text = np.zeros(LIMIT, np.int32)
            known = (asked + out)[:LIMIT]  # the very last token is never fed
            text[: len(known)] = known
            logits = np.asarray(_logits(CFG, params(name), text))
            rows = np.zeros((LIMIT, VOCAB), np.float32)
            count = end - begin
            rows[:count] = logits[first + begin : first + end][:count]
            drawn = self._draws(prompt, one, rows, begin, count)
            tokens, probs = np.asarray(drawn.tokens), np.asarray(drawn.top_logprobs)
            everything = np.asarray(jax.nn.log_softmax(rows))
            for j in range(count):
                at, expected = begin + j, int(tokens[j])
                if stops:
                    if expected not in prompt.stop_tokens:
                        self._close(prompt, one, rows, begin, j, expected, sorted(prompt.stop_tokens))
                    continue
                seen += 1
                if expected != out[at]:
                    self._close(prompt, one, rows, begin, j, expected, [out[at]])
                if prompt.logprobs is not None:
                    self._same(one.logprobs[at], everything[j, out[at]], one)
                if prompt.logprobs:
                    ids, values = one.top[at]
                    assert len(ids) == prompt.logprobs
                    for token, value in zip(ids, values, strict=True):
                        self._same(value, everything[j, token], one)
                    self._same(values[0], probs[j, 0], one)
        assert seen == len(out), (seen, one)
        self.tokens += seen

    def _draws(self, prompt: Prompt, one: Completion, rows: np.ndarray, begin: int, count: int) -> Any:
        asked, vocab = np.asarray(prompt.tokens).tolist(), VOCAB
        how = prompt.sampling or model.Sampling()
        seed = derived_seed(how.seed, one.index) if one.index else how.seed
        how = dataclasses.replace(how, seed=seed)
        masks = np.full((LIMIT, -(-vocab // 32)), 0xFFFFFFFF, np.uint32)
        counts = np.zeros((LIMIT, vocab), np.int32)
        for j in range(count):
            before = one.tokens[: begin + j]
            if prompt.mask is not None:
                masks[j] = 0
                prompt.mask(before, masks[j])
            counts[j] = token_counts(asked, before, vocab)
        packed = SamplingRows.of([how] * LIMIT)
        place = (np.arange(LIMIT) + len(asked) - 1 + begin).astype(np.int32)
        return _sample(rows, packed, place, masks=masks, biases=bias_rows([how] * LIMIT), counts=counts)

    def _close(
        self, prompt: Prompt, one: Completion, rows: np.ndarray, begin: int, j: int, expected: int, drawn: list[int]
    ) -> None:
        """The draw at row j is another one: only rounding may be to blame."""
        for token in drawn:
            moved = rows.copy()
            moved[j, token] += NEAR
            moved[j, expected] -= NEAR
            if int(self._draws(prompt, one, moved, begin, j + 1).tokens[j]) == token:
                self.near += 1
                return
        raise AssertionError(f"token {begin + j} should be {expected}, not {drawn}: {prompt} {one}")

    def _same(self, value: float, expected: float, one: Completion) -> None:
        self.logprobs += 1
        self.worst = max(self.worst, abs(value - float(expected)))
        assert abs(value - expected) <= BOUND, (value, expected, one)


def _mask(salt: int, ids: Any, row: np.ndarray) -> None:
    """About two thirds of the tokens, others at each place."""
    allowed = [token for token in range(VOCAB) if (token * 7 + len(ids) + salt) % 3]
    for token in allowed:
        row[token // 32] |= np.uint32(1 << token % 32)


@dataclasses.dataclass(eq=False)
class Asked:
    """A request: its prompt, how it is read, and what may become of it."""

    prompt: Prompt
    reader: str  # "results", "thread", "leaves", "asyncio", "aborts", "vanishes"
    may: set[str]
    handle: Any = None
    outputs: list[Any] = dataclasses.field(default_factory=list)


class Users:
    """Who asks an engine for answers, and reads them."""

    def __init__(self, scene: Scene, requests: int, seed: int):
        self.scene, self.rng, self.left = scene, random.Random(f"{scene.name} {seed}"), requests
        rng = self.rng
        layout = CacheLayout(
            scene.cfg, "f32", "f32", block_tokens=8, draft_tokens=scene.drafts, include_drafts=scene.drafts > 0
        )
        self.stores: list[AsyncStore] = []
        if scene.stores:
            sizes = block_record(layout).bytes, snapshot_record(layout).bytes
            self.stores = [AsyncStore(MemoryStore(size, random.Random(rng.random()), 0.05)) for size in sizes]
        mesh = model.Split(scene.shards, 1).mesh() if scene.shards > 1 else None
        each = [params(i, scene.cfg) for i in range(2)]
        self.placed = each if mesh is None else [model.shard_params(scene.cfg, one, mesh) for one in each]
        self.sender = self.peer = transport = None
        if scene.hosts:
            transport, there = (RecordTransport(open_engine("loopback"), timeout=PATIENCE) for _ in range(2))
            sizes = CacheSize(14, 3, 8, num_snapshots=3), HostSize.of(layout, 24, 6)
            options: Any = dict(transport=there, weights_id=0, chunk_tokens=16, limits=Limits(patience=0.5, lease=2.0))
            self.sender = Engine.of(self.placed[0], layout, sizes[0], host=sizes[1], **options)
            self.sender.warm_up()
        self.parts: queue.SimpleQueue[Any] = queue.SimpleQueue()
        core, executor = build(
            self.placed[0],
            layout,
            CacheSize(11, 4, 8, num_snapshots=3),
            host=HostSize.of(layout, 18 if scene.hosts else 9, 4),
            transport=transport,
            stores=tuple(self.stores) or None,
            policy=CachePolicy(snapshots=SnapshotPlacement(every=1)),
            weights_id=0,
            mesh=mesh,
            chunk_tokens=24,
            decode_steps=scene.steps,
            decode_rows=scene.rows,
            prefill_tokens=scene.tokens,
            drafts=scene.drafts,
            limits=Limits(queued=48, aging=0.2, patience=0.5 if not scene.hosts else 2.0),
            top=5,
        )
        if transport is not None:
            self.peer = transport.connect(there.published)
        self.executor = Faulty(executor, random.Random(rng.random()), 0.0)
        self.engine, self.core = Engine(core, self.executor), core  # type: ignore[arg-type]
        self.compile()
        self.bases = [[rng.randrange(VOCAB) for _ in range(LIMIT)] for _ in range(4)]
        self.asked: list[Asked] = []
        self.judging, self.judged = threading.Lock(), 0
        self.lock, self.wrong = threading.Lock(), list[BaseException]()
        self.oracle, self.seen = Oracle(), collections.Counter[str]()
        self.dropping = False  # whether requests were told to end by `resume(keep=False)`

    def compile(self) -> None:
        """All executables, before deadlines count and what is done to the engine hits them."""
        asked: list[dict[str, Any]] = [dict(logprobs=1, routed_experts=self.scene.hosts)]
        if self.scene.hosts:
            self.engine.score([[1, 2, 3]])
        if self.scene.all_kinds:  # else nobody asks for less
            self.engine.warm_up()
            warm, strict = (
                dict(sampling=model.Sampling(presence_penalty=1.0, logit_bias={1: 1.0})),
                dict(mask=functools.partial(_mask, 0)),
            )
            asked = [a | b | c for a in ({}, *asked) for b in ({}, warm) for c in ({}, strict)]
        for options in asked:  # alone: its own kind, in chunks, loops and single steps
            for count in (2, 2 + 3 * self.scene.steps * (1 + self.scene.drafts)):
                self.engine.run([Prompt(tokens=[1, 2, 3], max_new_tokens=count, **options)])

    def request(self, number: int) -> Asked:
        rng, kinds = self.rng, self.scene.all_kinds
        base = rng.choice(self.bases)
        text = base[: rng.randrange(0, 40)] + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12))]
        most = LIMIT - len(text) + 1  # the last token is never fed
        count = min(rng.choice([1, 2, 5, 9, 20, most]), most)
        how = dict(seed=rng.randrange(-(2**63), 2**64))
        if rng.random() < 0.7:
            how |= dict(temperature=rng.choice([0.3, 0.9, 2.0]))
            how |= rng.choice([{}, dict(top_k=rng.choice([1, 5, 50])), dict(top_p=0.8), dict(min_p=0.05)])
            how |= rng.choice([{}, {}, dict(top_k=9, top_p=0.7, min_p=0.01)])
        if kinds and rng.random() < 0.15:
            how |= dict(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=-0.3)
            how |= dict(logit_bias={rng.randrange(VOCAB): rng.uniform(-3, 3) for _ in range(rng.randrange(1, 9))})
        options: dict[str, Any] = dict(sampling=model.Sampling(**how))
        options |= dict(logprobs=rng.choice([0, 3, None, None, None] if kinds else [1]))
        if self.scene.hosts and len(text) > 1 and rng.random() < 0.15:
            reader = rng.choice(["results", "thread", "aborts"])
            may = {"length", "abort"} if reader == "aborts" else {"length"}
            return Asked(Prompt(tokens=text, score=True, logprobs=0, priority=rng.randint(-2, 2)), reader, may)
        if self.scene.hosts:
            options |= dict(routed_experts=True, peer=self.peer if rng.random() < 0.6 else None)
        if kinds and rng.random() < 0.1:
            options["mask"] = functools.partial(_mask, rng.randrange(3))
        if rng.random() < 0.4:
            options["stop_tokens"] = rng.sample(range(VOCAB), 2)
        may = {"length"} | ({"stop"} if "stop_tokens" in options else set())
        if rng.random() < 0.15:
            options["deadline"] = rng.choice([1e-9, 0.02, 0.2])
            may.add("deadline")
        if rng.random() < 0.1:
            options["n"] = rng.randint(2, 4)
        if rng.random() < 0.1:
            options["stop_after"] = self.meddle(rng.random())
            may |= {"stop", "error"}
        reader = rng.choice(["results", "thread", "thread", "asyncio", "leaves", "aborts", "vanishes"])
        if reader in ("leaves", "aborts"):
            may.add("abort")
        prompt = Prompt(
            tokens=np.array(text, rng.choice([np.int32, np.int64, np.uint16])),
            max_new_tokens=count,
            namespace=rng.choice([None, None, Namespace("a"), Namespace("b", "adapter")]),
            priority=rng.randint(-2, 2),
            reuse=rng.choice(["output", "prompt"]),
            id=rng.choice([None, ("request", number), f"request {number}"]),
            **options,
        )
        return Asked(prompt, reader, may)

    def meddle(self, what: float) -> Any:
        """A callback that stops, raises, aborts another one, or itself."""
        seen: list[int] = []

        def stop_after(ids: list[int]) -> bool:
            seen.extend(ids)
            if len(seen) < 4:
                return False
            if what < 0.3:
                return True
            if what < 0.5:
                raise ZeroDivisionError("a callback's own")
            if what < 0.8:
                with self.lock:
                    other = self.asked[int(what * 1e6) % len(self.asked)]
                    other.may.add("abort")
                if other.handle is not None:
                    other.handle.abort()
            return False

        return stop_after

    def user(self) -> None:
        """Adds bursts of requests, and reads them."""
        try:
            while not self.wrong:
                with self.lock:
                    count = min(self.left, self.rng.choice([1, 1, 3, 8]))
                    first, self.left = self.left, self.left - count
                    burst = [self.request(first - i) for i in range(count)]
                    self.asked += burst
                if not burst:
                    return
                for one in burst:
                    self.add(one)
                for one in burst:
                    self.read(one)
                for one in burst:
                    if one.reader != "vanishes":
                        self.judge(one)
        except BaseException as error:
            self.wrong.append(error)

    def add(self, one: Asked) -> None:
        while one.handle is None:
            try:
                one.handle = self.engine.add(one.prompt)
                if one.prompt.peer is not None:
                    self.compute_there(one)
            except QueueFullError:
                self.seen["queue full"] += 1
                time.sleep(0.005)

    def compute_there(self, one: Asked) -> None:
        """The other host computes its prompt."""
        assert self.sender is not None
        name, given = one.handle.id, dict(tokens=one.prompt.tokens, namespace=one.prompt.namespace)
        with contextlib.suppress(QueueFullError):  # then this one waits in vain, and goes on alone
            handle = self.sender.add(Prompt(export=lambda part: self.parts.put((name, part)), **given))
            if hash(name) % 9 == 0:
                handle.abort()

    def forward(self) -> None:
        """Gives on what the other host tells; some of it is lost, torn, or told twice."""
        rng = random.Random(self.scene.name)
        try:
            while (told := self.parts.get()) is not None:
                name, part = told
                what = rng.choice(["lost", "torn", "twice", *["given on"] * 17])
                self.seen[f"parts {what}"] += 1
                if what == "torn":
                    part = part[: rng.randrange(len(part))]
                for _ in range({"lost": 0, "twice": 2}.get(what, 1)):
                    with contextlib.suppress(HandoffError, PeerError, RequestError):
                        self.seen["parts of use"] += self.engine.receive(name, part)
        except BaseException as error:
            self.wrong.append(error)

    def read(self, one: Asked) -> None:
        handle, rng = one.handle, random.Random(id(one))
        if one.reader == "aborts":
            time.sleep(rng.random() * 0.05)
            handle.abort()
        elif one.reader in ("thread", "leaves"):
            for output in handle:
                one.outputs.append(output)
                if one.reader == "leaves" and rng.random() < 0.5:
                    break
        elif one.reader == "asyncio":

            async def listen() -> None:
                async for output in handle:
                    one.outputs.append(output)

            asyncio.run(asyncio.wait_for(listen(), PATIENCE))
        elif one.reader == "vanishes":
            return
        handle.results(PATIENCE)

    def administer(self, over: threading.Event) -> None:
        """Pauses, sleeps, other weights."""
        rng, engine, weights = random.Random(self.scene.name), self.engine, itertools.count(1)
        try:
            last = 0
            while not over.wait(0.01):
                ended = sum(count for name, count in engine.stats().counts.items() if name.startswith("ended"))
                if ended < last + self.scene.every:
                    continue
                last = ended
                what = rng.choice(["pause", "pause", "drop", "sleep", "sleep", "weights", "weights", "weights"])
                self.seen[what] += 1
                if what in ("pause", "drop"):
                    engine.pause()
                    time.sleep(rng.random() * 0.05)
                    self.dropping |= what == "drop"
                    engine.resume(keep=what == "pause")
                elif what == "sleep":
                    engine.sleep()
                    time.sleep(rng.random() * 0.05)
                    engine.wakeup()
                else:
                    name = next(weights) % 2
                    with contextlib.suppress(EngineError):
                        engine.update_weights(self.placed[name], name)
                    if self.sender is not None:
                        self.sender.update_weights(self.placed[name], name)
        except BaseException as error:
            self.wrong.append(error)

    def run(self, threads: int = 4) -> None:
        """Until all are answered; then everything is looked at."""
        self.executor._share, over = self.scene.faults, threading.Event()
        users = [threading.Thread(target=self.user) for _ in range(threads)]
        users.append(threading.Thread(target=self.administer, args=(over,)))
        users += [threading.Thread(target=self.forward)] if self.sender is not None else []
        for thread in users:
            thread.start()
        for thread in users[:threads]:
            thread.join()
        over.set()
        self.parts.put(None)
        for thread in users:
            thread.join()
        for one in self.asked:
            if one.handle is not None and not self.wrong:
                one.handle.results(PATIENCE)
        if self.sender is not None:
            self.end_hand_offs(self.sender)
        self.engine.close(drain=True)
        if self.wrong:
            raise self.wrong[0]
        for one in self.asked:
            if one.reader == "vanishes":
                self.judge(one)
        self.check_empty()

    def end_hand_offs(self, sender: Engine) -> None:
        """Waits until the other host holds nothing any more, and ends it."""
        manager, until = sender.managers[0], time.monotonic() + PATIENCE
        self.seen["hand-offs sent"] = manager.handoffs.begun["sent"]
        self.seen["hand-offs whole"] = self.core.managers[0].handoffs.ended["received", "done"]
        while len(manager.leases) and time.monotonic() < until:
            time.sleep(0.05)
        sender.close(drain=True)
        manager.check_integrity()
        assert not len(manager.leases) and not manager.requests and not manager.preempted
        assert manager.cache.num_available == manager.size.num_blocks, "the other host holds blocks"

    def judge(self, one: Asked) -> None:
        """Raises `AssertionError` unless a request was answered once, wholly and rightly."""
        with self.judging:
            self._judge(one)
            self.judged += 1
            if self.judged % 50 == 0:
                print(f"{self.scene.name}: {self.judged} requests are right so far", flush=True)

    def _judge(self, one: Asked) -> None:
        failures = sum(self.executor.failed.values())
        for sample_of in one.handle.results(0.1):
            self.seen[f"ended: {sample_of.finish}"] += 1
            fine = one.may | ({"error"} if failures else set()) | ({"abort"} if self.dropping else set())
            assert sample_of.finish in fine, (one, sample_of)
            if sample_of.finish == "error":
                assert isinstance(sample_of.error, OSError | ZeroDivisionError), sample_of
            if sample_of.finish == "length" and not one.prompt.score:
                assert len(sample_of.tokens) == one.prompt.max_new_tokens
            self.oracle.check(one.prompt, sample_of)
            if one.reader in ("thread", "asyncio"):  # nothing lost, nothing twice, one end
                mine = [output for output in one.outputs if output.index == sample_of.index]
                assert [token for output in mine for token in output.tokens] == sample_of.tokens
                assert [x for output in mine for x in output.logprobs] == sample_of.logprobs
                assert [output.finish for output in mine if output.finish is not None] == [sample_of.finish]
                assert mine[-1].finish is not None
                told = [(output.weights_id, len(output.tokens)) for output in mine if output.tokens]
                named = [name for name, count in told for _ in range(count)]
                assert named == [sample_of.weights_of(i) for i in range(len(sample_of.tokens))]

    def check_empty(self) -> None:
        """Nothing is held by anybody."""
        core, engine = self.core, self.engine
        assert core.idle and not engine._handles and not engine._entering and not engine._under_way
        assert (core.queued, core.live, core.preempted, core.fetching) == (0, 0, 0, 0)
        self.seen.update({name: core.counts[name] for name in ("preemptions", "failures", "cached_tokens")})
        for manager in core.managers:
            manager.commit()
            manager.check_integrity()
            assert not manager.requests and not manager.preempted and not len(manager.leases)
            assert manager.cache.num_available == manager.size.num_blocks, "somebody holds blocks"
            manager.reset()
            manager.check_integrity()
            assert manager.stats().blocks_free == manager.size.num_blocks
        for store in self.stores:
            self.seen["records read"] += store.store.reads  # type: ignore[attr-defined]
            store.close(10.0)
        self.seen.update({f"failed {how}": count for how, count in self.executor.failed.items()})


def soak(scene: Scene, requests: int, seed: int) -> Users:
    """Runs a scene. Raises `AssertionError` if an answer is wrong, or something is held at the end."""
    users = Users(scene, requests, seed)
    users.run()
    assert users.oracle.near <= 2 + users.oracle.tokens // 500, f"{users.oracle.near} of {users.oracle.tokens} near"
    return users


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scene", choices=[scene.name for scene in SCENES], help="only this one")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 2)
    quickly = "--xla_backend_optimization_level=0 --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
    os.environ.setdefault("XLA_FLAGS", quickly)  # what takes time is compiling
    scenes = [scene for scene in SCENES if args.scene in (None, scene.name)]
    for scene in scenes:
        begun = time.perf_counter()
        users = soak(scene, -(-args.requests // len(scenes)), args.seed)
        oracle = users.oracle
        print(
            f"{scene.name}: {len(users.asked)} requests in {time.perf_counter() - begun:.0f} s; "
            f"{oracle.tokens} tokens, {oracle.near} near ties; "
            f"{oracle.logprobs} log-probabilities, the worst {oracle.worst:.1e} off; "
            f"{oracle.scored} tokens scored, experts of {oracle.experts}; {dict(users.seen)}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
