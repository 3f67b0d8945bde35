"""Host-side costs of prefix caching on one core: hashing, matching, evicting, admitting, planning. No jax, no device.

    python benchmarks/bench_manager.py [--only hashing,matching,...] [--quick] [--json FILE]

Every number is the best of several runs, except evictions, which are timed over all of a long run (a mean of
CPU time, with the 99th percentile of single calls beside it). `--quick` uses a tree a tenth as large. What is required
is printed beside the numbers; `--json` writes the record of the run (see records/README.md).
"""

from __future__ import annotations

import gc
import platform
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from harness import Recorder, cpu_name, parser

from dsv4_jax import CacheLayout, CacheSize, DSV4Config, KVCacheManager
from dsv4_jax.engine import Core, Drawn, Engine, Prompt, Shapes, Work, shapes_of
from dsv4_jax.manager import CachePolicy, Request
from dsv4_jax.manager.allocator import BlockAllocator
from dsv4_jax.manager.prefix.hashing import BlockHasher, HashSpec, Namespace
from dsv4_jax.manager.prefix.node import Node, Tier
from dsv4_jax.manager.prefix.prefix_tree import PrefixTree
from dsv4_jax.pools import RadixCache, TokenToKVPoolAllocator

Results = dict[tuple[str, str], float]  # by what was measured, and the unit

BLOCK = 128
PROMPT = 100_352  # tokens: 784 blocks
FLASH = CacheLayout(DSV4Config.flash())
REQUIRED = {  # at least (>) or at most (<)
    "hashing, int32 ids": (">", 50.0),
    "the same, admission after hashing": ("<", 5.0),
    "the same, admission of int32 ids, whole": ("<", 2.5),
    "the same, admission of a list of ints, whole": ("<", 4.0),
    "plan_step, 256 decodes, no caching: best": ("<", 300.0),
    "plan_step, 256 decodes, caching: best": ("<", 300.0),
    "a step of 16 decodes": ("<", 100.0),
    "a step of 63 decodes and a chunk of 512": ("<", 430.0),
    "a step of 10,000 decodes": ("<", 5000.0),
    "a chunk of 512 beside 10,000 live requests": ("<", 3000.0),
    "one eviction of 1 M nodes, CPU time: removed": ("<", 20.0),
    "one eviction of 1 M nodes, CPU time: moved to the host": ("<", 20.0),
    "a turn of the Engine, 256 requests": ("<", 2000.0),
    "100 prompts at once that share 20,000 tokens: computed": ("<", 45_000),
    "the same, tokens found of those that can be": (">", 97.0),
    "RadixCache.insert of 100,352 tokens, an array": ("<", 3.0),
    "RadixCache.insert of 100,352 tokens, a list of ints": ("<", 3.0),
}


def best(call: Callable[[], object], runs: int = 15) -> float:
    """Returns the seconds of the fastest run."""
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def hashing() -> Results:
    """Million tokens per second of prompts in several forms; microseconds per generated token."""
    spec = HashSpec(BLOCK, ("weights", "layout"), 129_280)
    ids = np.random.default_rng(0).integers(0, spec.vocab_size, PROMPT).astype(np.int32)
    forms = {"int32 ids": ids, "int64 ids": ids.astype(np.int64), "a list of ints": ids.tolist()}
    rates = {
        (f"hashing, {name}", "M tokens/s"): PROMPT / best(lambda x=x: BlockHasher(spec, x)) / 1e6
        for name, x in forms.items()
    }
    hasher, tokens = BlockHasher(spec, ids), ids[: 32 * BLOCK].tolist()

    def generate() -> None:
        for token in tokens:
            hasher.append(token)
        hasher.truncate(PROMPT)

    return rates | {("hashing, token by token", "us"): best(generate, 5) / len(tokens) * 1e6}


def grow(tree: PrefixTree, parent: Node | None, digests: list[bytes], first_block: int) -> list[Node]:
    """Publishes a path; the caller holds a reference to each node."""
    nodes = []
    for i, digest in enumerate(digests):
        parent = tree.publish(tree.reserve(parent, digest, first_block + i)).node
        nodes.append(parent)
    return nodes


def matching() -> Results:
    """Milliseconds for a prompt of 784 cached blocks: look up, reference, and give the references back."""
    spec = HashSpec(BLOCK)
    ids = np.random.default_rng(1).integers(0, 2**31, PROMPT).astype(np.int32)
    hasher = BlockHasher(spec, ids, namespace=Namespace("tenant"))
    tree = PrefixTree(BLOCK)
    nodes = grow(tree, None, hasher.digests, 1)
    tree.snapshots.attach(nodes[-1], Tier.DEVICE, 1)
    tree.release(nodes)
    fresh = [bytes(bytearray(digest)) for digest in hasher.digests]  # no cached hash values
    match = tree.match(fresh, PROMPT + 1)
    assert match.hit == 784
    taken: list[list[Node]] = []
    pool = BlockAllocator(1000)
    calls: dict[str, Callable[[], object]] = {
        "match": lambda: tree.match(list(map(bytes, map(bytearray, fresh))), PROMPT + 1),
        "take": lambda: taken.append(tree.take(match)),
        "release": lambda: tree.release(taken.pop()),
        "their ids acquired and released": lambda: pool.release(pool.acquire(784)),
    }
    return {(f"784 cached blocks: {name}", "ms"): best(call) * 1e3 for name, call in calls.items()}


def evicting(nodes: int, policy: str) -> Results:
    """Microseconds per eviction, one per call, from a tree of many nodes: paths of 1..64 blocks off shared ones."""
    rng = np.random.default_rng(2)
    tree = PrefixTree(BLOCK)
    roots: list[list[Node]] = []
    lengths = rng.integers(1, 65, nodes)
    made = 0
    gc.disable()
    start = time.process_time()
    for length in lengths.tolist():
        if made >= nodes:
            break
        length = min(length, nodes - made)
        stem: list[Node] = []
        if roots and rng.random() < 0.7:
            path = roots[int(rng.integers(len(roots)))]
            stem = tree.acquire(path[: int(rng.integers(len(path))) + 1])
        digests = [made.to_bytes(16, "little") + i.to_bytes(16, "little") for i in range(length)]
        path = stem + grow(tree, stem[-1] if stem else None, digests, made + 1)
        tree.release(path)
        made += length
        if len(roots) < 1000:
            roots.append(path)
    built = time.process_time() - start
    for path in roots[::2]:  # touched since: their queue entries are out of date
        tree.release(tree.acquire(path))
    count, times = nodes // 2, []
    start = time.process_time()
    for i in range(count):
        before = time.perf_counter()
        evicted = tree.evictor.evict(Tier.DEVICE, 1, [i + 1] if policy == "write_back" else ())
        for move in evicted.moves:
            tree.moves.complete(move.node)
        times.append(time.perf_counter() - before)
    mean = (time.process_time() - start) / count
    start = time.process_time()
    for _ in range(count // 2 // 64):
        tree.evictor.evict(Tier.DEVICE, 64)
    batch = (time.process_time() - start) / (count // 2 // 64 * 64)
    gc.enable()
    size = "1 M" if nodes == 1_000_000 else f"{nodes:,}"
    kind = "removed" if policy == "remove" else "moved to the host"
    return {
        (f"one node of {size} built", "us"): built / nodes * 1e6,
        (f"one eviction of {size} nodes, CPU time: {kind}", "us"): mean * 1e6,
        (f"the same, 99 % are faster: {kind}", "us"): float(np.quantile(times, 0.99)) * 1e6,
        (f"the same, 64 at once, each: {kind}", "us"): batch * 1e6,
    }


def admitting() -> Results:
    """Milliseconds to admit a prompt of 100,353 ids, all but the last one cached, and to release it."""
    manager = KVCacheManager(FLASH, CacheSize(1000, 4, 800, 64), policy=CachePolicy())
    ids = np.random.default_rng(3).integers(0, FLASH.cfg.vocab_size, PROMPT + 1).astype(np.int32)
    request = manager.admit_request(ids)
    while scheduled := manager.schedule(8192):
        manager.plan_step(scheduled)
    manager.release_request(request)

    def run(make: Callable[[], np.ndarray | list[int]]) -> tuple[float, float]:
        tokens = make()
        start = time.perf_counter()
        request = manager.admit_request(tokens)
        admitted = time.perf_counter()
        assert request.num_hit == PROMPT
        manager.abort_request(request)
        return admitted - start, time.perf_counter() - admitted

    forms = {"int32 ids": lambda: ids, "a list of ints": ids.tolist}  # of new ints each time, as requests bring it
    whole = {kind: [run(make) for _ in range(25)] for kind, make in forms.items()}
    hashing = best(lambda: BlockHasher(manager.hash_spec, ids), 25)
    hashers = [BlockHasher(manager.hash_spec, ids) for _ in range(25)]
    manager._new_hasher = lambda *_args, **_space: hashers.pop()  # hashed before the clock starts
    rest = min(run(lambda: ids)[0] for _ in range(25))
    return {
        ("a prompt of 100,353 tokens, all but the last cached: hashing", "ms"): hashing * 1e3,
        ("the same, admission after hashing", "ms"): rest * 1e3,
        **{(f"the same, admission of {kind}, whole", "ms"): min(a for a, _ in t) * 1e3 for kind, t in whole.items()},
        ("the same, releasing it", "ms"): min(r for _, r in whole["int32 ids"]) * 1e3,
    }


def sharing() -> Results:
    """Prompt tokens that 100 requests compute which come at once, and share all but their last 200 tokens."""
    manager = KVCacheManager(FLASH, CacheSize(6000, 128, 256, 256), policy=CachePolicy())
    draw = np.random.default_rng(6)
    common, vocabulary = draw.integers(0, FLASH.cfg.vocab_size, 20_000), FLASH.cfg.vocab_size
    prompts = [np.concatenate([common, draw.integers(0, vocabulary, 200)]) for _ in range(100)]
    requests = [manager.admit_request(prompt) for prompt in prompts]
    computed, slowest = 0, 0.0
    while True:
        start = time.perf_counter()
        if not (scheduled := manager.schedule(8192)):
            break
        manager.plan_step(scheduled)
        slowest = max(slowest, time.perf_counter() - start)
        computed += sum(count for _, count in scheduled)
    possible = 99 * (len(common) // BLOCK * BLOCK)
    what = "100 prompts at once that share 20,000 tokens"
    return {
        (f"{what}: computed", "tokens"): computed,
        ("the same, tokens found of those that can be", "%"): 100 * sum(r.num_hit for r in requests) / possible,
        ("the same, scheduling and planning the slowest step", "ms"): slowest * 1e3,
    }


def pooling() -> Results:
    """Milliseconds of calls of a `RadixCache` of single tokens with 100,352 of them."""
    times: dict[str, list[float]] = {}
    ids = np.random.default_rng(5).integers(0, FLASH.cfg.vocab_size, PROMPT)

    def timed(name: str, call: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = call()
        times.setdefault(name, []).append(time.perf_counter() - start)
        return result

    for _ in range(15):
        for kind, tokens in (("an array", ids), ("a list of ints", ids.tolist())):
            pool = TokenToKVPoolAllocator(1 << 20)
            cache = RadixCache(pool)
            slots = pool.alloc(PROMPT)
            timed(f"insert of 100,352 tokens, {kind}", lambda c=cache, t=tokens, s=slots: c.insert(t, s))
            match = timed(f"match of them, {kind}", lambda c=cache, t=tokens: c.match(t))
            assert match.length == PROMPT
            timed("lock and unlock", lambda c=cache, n=match.node: c.unlock(c.lock(n)))
            slots = pool.alloc(PROMPT)
            again = timed(f"insert of them again, {kind}", lambda c=cache, t=tokens, s=slots: c.insert(t, s))
            timed("free of their slots", lambda p=pool, s=again.kept: p.free(s))
            timed("evict of all", lambda c=cache: c.evict(PROMPT))
    return {(f"RadixCache.{name}", "ms"): min(t) * 1e3 for name, t in times.items()}


def planning(caching: bool, steps: int = 512) -> Results:
    """Microseconds to plan a step of 256 decodes. Exactly two of them begin a block in every step: all are alike."""
    requests = 256
    size = CacheSize(requests * 16, requests, 16, 2 * requests)
    manager = KVCacheManager(FLASH, size, policy=CachePolicy() if caching else None)
    draw = np.random.default_rng(4)
    for i in range(requests):
        manager.admit_request(draw.integers(0, FLASH.cfg.vocab_size, 512 + i % BLOCK))
    while scheduled := manager.schedule(8192):
        manager.plan_step(scheduled)
    shape = manager.pinned_shape(requests)
    parts: dict[str, list[float]] = {"schedule": [], "plan_step": [], "take_transfers": [], "plan_tokens": []}
    for token in range(steps):
        for request in manager.requests:
            request.tokens.append(token)
        clock = [time.perf_counter()]
        scheduled = manager.schedule(requests, shape=shape)
        clock.append(time.perf_counter())
        plan = manager.plan_step(scheduled, shape=shape)
        clock.append(time.perf_counter())
        manager.take_transfers()
        clock.append(time.perf_counter())
        manager.plan_tokens(plan)
        clock.append(time.perf_counter())
        assert len(scheduled) == requests
        for name, start, end in zip(parts, clock, clock[1:], strict=False):
            parts[name].append(end - start)
    kind = f"256 decodes, {'caching' if caching else 'no caching'}"
    results = {(f"{name}, {kind}: best", "us"): min(times) * 1e6 for name, times in parts.items()}
    return results | {(f"plan_step, {kind}: median", "us"): float(np.median(parts["plan_step"])) * 1e6}


def serving() -> Results:
    """What a whole step costs, from `schedule` to `plan_tokens`: of few decodes, with a chunk beside, and of many.

    CPU time: with ten thousand requests a step takes long enough to be interrupted.
    """

    def step(decodes: int, chunk: int, live: int, runs: int) -> float:
        size = CacheSize(2 * max(decodes, live) + 2000, max(decodes, live) + 1, 64, 100)
        manager = KVCacheManager(FLASH, size, policy=CachePolicy())
        for i in range(max(decodes, live)):
            manager.admit_request([i % 1000, i // 1000, *range(18)])
        while scheduled := manager.schedule(8192):
            manager.plan_step(scheduled)
        prompt: Request | None = None
        shape = manager.pinned_shape(decodes + 1, max(decodes + 1, 2048) if chunk else None)
        times = []
        gc.disable()
        for token in range(runs):
            for request in manager.requests[:decodes]:
                request.tokens.append(token)
            if chunk and (prompt is None or not prompt.num_pending):
                if prompt is not None:
                    manager.release_request(prompt)
                prompt = manager.admit_request([token] * 4000)
            start = time.thread_time()
            scheduled = manager.schedule(decodes + chunk, shape=shape, max_chunk=chunk or None)
            plan = manager.plan_step(scheduled, shape=shape)
            manager.take_transfers()
            manager.plan_tokens(plan)
            times.append(time.thread_time() - start)
            assert len(scheduled) == decodes + bool(chunk)
        gc.enable()
        return min(times) * 1e6

    return {
        ("a step of 16 decodes", "us"): step(16, 0, 0, 200),
        ("a step of 63 decodes and a chunk of 512", "us"): step(63, 512, 0, 100),
        ("a step of 256 decodes", "us"): step(256, 0, 0, 60),
        ("a step of 10,000 decodes", "us"): step(10_000, 0, 0, 10),
        ("a chunk of 512 beside 10,000 live requests", "us"): step(0, 512, 10_000, 20),
    }


def turning(requests: int = 256) -> Results:
    """What a turn of the `Engine` costs its thread while all requests decode, a step ahead: CPU time, readers told."""
    times: list[float] = []

    class Known:
        """An executor whose steps take no time."""

        def __init__(self, shapes: Shapes):
            self.shapes = shapes

        def check(self, prompt: Prompt) -> None: ...

        def move(self, transfers: object) -> None: ...

        def recover(self) -> None: ...

        def send(self, work: Work) -> Any:
            drawn = Drawn([[[7] for _ in rows] for rows in work.rows])
            return SimpleNamespace(get=lambda: drawn)

    class Timed(Engine):
        def _turn(self) -> None:
            start, before = time.thread_time(), self._core.counts["computed_tokens"]
            super()._turn()
            if self._core.counts["computed_tokens"] - before == requests:
                times.append(time.thread_time() - start)

    manager = KVCacheManager(FLASH, CacheSize(16 * requests, requests, 16), policy=CachePolicy(states="blocks"))
    shapes, draw = shapes_of([manager], 2 * requests), np.random.default_rng(7)
    with Timed(Core(manager, shapes), Known(shapes), freeze=True) as engine:
        lengths = [100 + i % BLOCK for i in range(requests)]
        engine.run(Prompt(tokens=draw.integers(0, FLASH.cfg.vocab_size, n), max_new_tokens=600) for n in lengths)
    what = f"a turn of the Engine, {requests} requests"
    return {(what, "us"): min(times) * 1e6, (f"{what}: median", "us"): float(np.median(times)) * 1e6}


def main() -> None:
    """Runs the command line."""
    command = parser(__doc__)
    command.add_argument("--quick", action="store_true", help="a tree of 100,000 nodes instead of a million")
    command.add_argument("--only", type=lambda text: text.split(","), metavar="NAME,...", help="some of the parts")
    args = command.parse_args()
    nodes = 100_000 if args.quick else 1_000_000
    parts: dict[str, Callable[[], Results]] = {
        "hashing": hashing,
        "matching": matching,
        "admitting": admitting,
        "sharing": sharing,
        "pooling": pooling,
        "serving": serving,
        "turning": turning,
        "planning": lambda: planning(False) | planning(True),
        "evicting": lambda: evicting(nodes, "remove") | evicting(nodes, "write_back"),
    }
    if unknown := set(args.only or ()) - set(parts):
        command.error(f"there are {', '.join(parts)}, not {', '.join(sorted(unknown))}")
    device = f"one core of {cpu_name()}, Python {platform.python_version()}"
    recorder = Recorder(args.json, device=device, software={"numpy": np.__version__}, quick=args.quick)
    for name in args.only or parts:
        for (what, unit), measured in parts[name]().items():
            sign, bound = REQUIRED.get(what, ("", 0.0))
            bounds = {">": {"at_least": bound}, "<": {"at_most": bound}}.get(sign, {})
            recorder.fact("manager", what, float(f"{measured:.3g}"), unit, **bounds)


if __name__ == "__main__":
    main()
