"""Host-side costs of prefix caching on one core: hashing, matching, evicting, admitting, planning. No jax, no device.

    python benchmarks/bench_manager.py [--quick] [--json]

Every number is the best of several runs, except evictions, which are timed over all of a long run (a mean of
CPU time, with the 99th percentile of single calls beside it). `--quick` uses a tree a tenth as large. Targets are
printed beside the numbers that have one.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable

import numpy as np

from dsv4_jax import CacheLayout, CacheSize, DSV4Config, KVCacheManager
from dsv4_jax.manager import CachePolicy
from dsv4_jax.manager.block_pool import BlockPool
from dsv4_jax.manager.prefix.hashing import BlockHasher, HashSpec, Namespace
from dsv4_jax.manager.prefix.node import Node, Tier
from dsv4_jax.manager.prefix.prefix_tree import PrefixTree

BLOCK = 128
PROMPT = 100_352  # tokens: 784 blocks
FLASH = CacheLayout(DSV4Config.flash())
TARGETS = {  # at least (>) or at most (<)
    "hash int32 Mtokens/s": (">", 50.0),
    "admit 100,353 tokens, after hashing ms": ("<", 5.0),
    "plan_step, 256 decodes, no caching us": ("<", 300.0),
    "plan_step, 256 decodes, caching us": ("<", 300.0),
    "evict, 1000000 nodes, remove us": ("<", 20.0),
    "evict, 1000000 nodes, write_back us": ("<", 20.0),
}


def best(call: Callable[[], object], runs: int = 15) -> float:
    """Seconds of the fastest run."""
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def hashing() -> dict[str, float]:
    """Million tokens per second of prompts in several forms; microseconds per generated token."""
    spec = HashSpec(BLOCK, ("weights", "layout"), 129_280)
    ids = np.random.default_rng(0).integers(0, spec.vocab_size, PROMPT).astype(np.int32)
    forms = {"int32": ids, "int64": ids.astype(np.int64), "list": ids.tolist()}
    rates = {
        f"hash {name} Mtokens/s": PROMPT / best(lambda x=x: BlockHasher(spec, x)) / 1e6 for name, x in forms.items()
    }
    hasher, tokens = BlockHasher(spec, ids), forms["list"][: 32 * BLOCK]

    def generate() -> None:
        for token in tokens:
            hasher.append(token)
        hasher.truncate(PROMPT)

    return rates | {"hash generated us/token": best(generate, 5) / len(tokens) * 1e6}


def grow(tree: PrefixTree, parent: Node | None, digests: list[bytes], first_block: int) -> list[Node]:
    """Publishes a path; the caller holds a reference to each node."""
    nodes = []
    for i, digest in enumerate(digests):
        parent = tree.publish(tree.reserve(parent, digest, first_block + i)).node
        nodes.append(parent)
    return nodes


def matching() -> dict[str, float]:
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
    results = {
        "match 784 blocks ms": best(lambda: tree.match(list(map(bytes, map(bytearray, fresh))), PROMPT + 1)) * 1e3
    }
    results["take ms"] = best(lambda: taken.append(tree.take(match))) * 1e3
    results["release ms"] = best(lambda: tree.release(taken.pop())) * 1e3
    pool = BlockPool(1000)
    results["acquire + release 784 ids ms"] = best(lambda: pool.release(pool.acquire(784))) * 1e3
    return results


def evicting(nodes: int, policy: str) -> dict[str, float]:
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
    name = f"{nodes} nodes, {policy}"
    return {
        f"build, {name} us/node": built / nodes * 1e6,
        f"evict, {name} us": mean * 1e6,
        f"evict, {name} p99 us": float(np.quantile(times, 0.99)) * 1e6,
        f"evict 64 at once, {name} us each": batch * 1e6,
    }


def admitting() -> dict[str, float]:
    """Milliseconds to admit a prompt of 100,353 int32 ids, all but the last one cached, and to release it."""
    manager = KVCacheManager(FLASH, CacheSize(1000, 4, 800, 64), policy=CachePolicy())
    ids = np.random.default_rng(3).integers(0, FLASH.cfg.vocab_size, PROMPT + 1).astype(np.int32)
    request = manager.admit_request(ids)
    while scheduled := manager.schedule(8192):
        manager.plan_step(scheduled)
    manager.release_request(request)
    spec = HashSpec(BLOCK, (FLASH.fingerprint, None), FLASH.cfg.vocab_size)

    def run() -> tuple[float, float]:
        start = time.perf_counter()
        request = manager.admit_request(ids)
        admitted = time.perf_counter()
        assert request.num_hit == PROMPT
        manager.abort_request(request)
        return admitted - start, time.perf_counter() - admitted

    whole, release = (min(times) for times in zip(*(run() for _ in range(25)), strict=True))
    hashing = best(lambda: BlockHasher(spec, ids), 25)
    hashers = [BlockHasher(spec, ids) for _ in range(25)]
    manager._new_hasher = lambda *_args, **_space: hashers.pop()  # hashed before the clock starts
    rest = min(run()[0] for _ in range(25))
    return {
        "admit 100,353 tokens, hashing ms": hashing * 1e3,
        "admit 100,353 tokens, after hashing ms": rest * 1e3,
        "admit 100,353 tokens, whole ms": whole * 1e3,
        "release it ms": release * 1e3,
    }


def planning(caching: bool, steps: int = 512) -> dict[str, float]:
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
    results = {f"{name}, {kind} us": min(times) * 1e6 for name, times in parts.items()}
    return results | {f"plan_step, {kind} median us": float(np.median(parts["plan_step"])) * 1e6}


def verdict(name: str, value: float) -> str:
    """The target of a number, and whether it is met; empty without one."""
    if name not in TARGETS:
        return ""
    sign, bound = TARGETS[name]
    met = value >= bound if sign == ">" else value <= bound
    return f"{sign}= {bound:g} {'met' if met else 'MISSED'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tree of 100,000 nodes instead of a million")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    nodes = 100_000 if args.quick else 1_000_000
    results = hashing() | matching() | admitting() | planning(False) | planning(True)
    for policy in ("remove", "write_back"):
        results |= evicting(nodes, policy)
    if args.json:
        targets = {name: {"sign": f"{sign}=", "value": bound} for name, (sign, bound) in TARGETS.items()}
        print(json.dumps(results | {"targets": targets}))
        return
    for name, value in results.items():
        print(f"{name:48s} {value:10.3f}  {verdict(name, value)}".rstrip())


if __name__ == "__main__":
    main()
