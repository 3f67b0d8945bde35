"""A mesh under load for thousands of steps: the tokens and bytes of one device, and memory that does not grow.

    python -m tests.model.soak_mesh --steps 2000 --data 2 --tensor 1                      fake devices, tiny model
    python -m tests.model.soak_mesh --steps 2000 --data 1 --tensor 2 --pool               blocks dealt out to two ranks
    python -m tests.model.soak_mesh --steps 2000 --data 2 --model flash --layers 4        two GPUs

Every data shard has a manager with prefix caching and a host tier, tight pools, and users who join, go on with what was
said before, leave and are preempted; drafts are guessed and mostly rejected. Every step runs over the mesh and, of each
shard by itself, on one device: what they draw is compared at once, caches and host records now and then.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import gc
import json
import pathlib
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax import (
    AttentionType,
    CacheLayout,
    CacheSize,
    DSV4Config,
    KVCacheManager,
    cache_sharding,
    init_cache,
    init_host_cache,
    model,
    run_transfers,
    shard_step,
    stack_plans,
    stack_transfers,
)
from dsv4_jax.errors import NoFreeSlotError, OutOfBlocksError
from dsv4_jax.manager import CachePolicy, HostSize, Request, SnapshotPlacement, StepShape
from dsv4_jax.manager.prefix.node import T
from dsv4_jax.manager.transfers import Transfers
from dsv4_jax.ops.exchange_buffers import open_exchanges
from dsv4_jax.plan import StepPlan

from .feeding import SMALL_WIDTHS

SWA, CSA, HCA = AttentionType
# Blocks of 8 tokens, so that few steps fill many; heads, groups and experts divide by four devices.
TINY = DSV4Config.tiny(
    **(SMALL_WIDTHS | dict(num_attention_heads=4)),
    layer_types=(CSA, HCA),
    o_groups=4,
    n_routed_experts=8,
    num_experts_per_tok=3,
    max_position_embeddings=64,
    hc_sinkhorn_iters=1,
)
SEEN = (
    "joined",
    "ended",
    "left",
    "preempted",
    "resumed",
    "drafts accepted",
    "drafts rejected",
    "hits on the device",
    "hits on the host",
    "blocks out",
    "states out",
    "blocks in",
    "states in",
)
# Of a stage of transfers, and what they are called above.
COPIES = {"swap_out": "blocks out", "snapshot": "states out", "swap_in": "blocks in", "restore": "states in"}


@dataclasses.dataclass
class Load:
    """A data shard: its manager, and its users, who want at most `size.max_blocks_per_request` blocks each."""

    manager: KVCacheManager
    shape: StepShape
    rng: np.random.Generator
    said: list[list[int]] = dataclasses.field(default_factory=list)
    seen: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def text(self, most: int) -> list[int]:
        return self.rng.integers(0, self.manager.layout.cfg.vocab_size, self.rng.integers(1, most + 1)).tolist()

    def come_and_go(self) -> None:
        """Between two steps."""
        manager, limit = self.manager, self.manager.context_limit
        for request in list(manager.requests):
            if len(request.tokens) >= request.max_tokens:
                self.end(request, "ended")
            elif self.chance(0.01):
                self.end(request, "left")
            elif self.chance(0.02):
                manager.preempt(request)
                self.seen["preempted"] += 1
        with contextlib.suppress(NoFreeSlotError, OutOfBlocksError):
            if manager.preempted and (not manager.requests or self.chance(0.3)):
                manager.resume(manager.preempted[0])
                self.seen["resumed"] += 1
        with contextlib.suppress(NoFreeSlotError):
            if not manager.preempted and (not manager.requests or self.chance(0.3)):
                tokens = list(self.said[self.rng.integers(len(self.said))]) if self.said and self.chance(0.7) else []
                if self.chance(0.3):
                    del tokens[-6:]  # to be said again
                if not tokens or self.chance(0.6):
                    tokens += self.text(limit // 3)
                tokens = tokens[: limit - 2]
                manager.admit_request(tokens, max_tokens=min(limit, len(tokens) + int(self.rng.integers(1, 16))))
                self.seen["joined"] += 1

    def end(self, request: Request, how: str) -> None:
        self.said = [*self.said, list(request.tokens)][-6:]
        self.manager.release_request(request)
        self.seen[how] += 1

    def plan(self) -> tuple[StepPlan, list[tuple[Request, int, int]]]:
        """The next step: its plan, and (request, tokens, drafts among them) of its rows."""
        manager, chunk = self.manager, int(self.rng.integers(1, self.shape.tokens + 1))
        while not (scheduled := manager.schedule(self.shape.tokens, max_chunk=chunk, shape=self.shape)):
            if not manager.requests:
                break
            assert len(manager.requests) > 1, "one request alone must fit"
            manager.preempt(manager.requests[-1])
            self.seen["preempted"] += 1
        room, rows = self.shape.tokens - sum(count for _, count in scheduled), []
        for request, count in scheduled:
            drafts = []
            if request.num_pending == 1 and len(request.tokens) > request.num_prompt and self.chance(0.5):
                most = min(manager.layout.draft_tokens, room, request.max_tokens - len(request.tokens))
                drafts = self.guess(request.tokens, most)
            request.tokens += drafts
            room -= len(drafts)
            rows.append((request, count + len(drafts), len(drafts)))
        try:
            return manager.plan_step([row[:2] for row in rows], shape=self.shape), rows
        except OutOfBlocksError:  # for drafts: what was scheduled fits
            for request, _, drafts in rows:
                del request.tokens[len(request.tokens) - drafts :]
            return manager.plan_step(scheduled, shape=self.shape), [(*pair, 0) for pair in scheduled]

    def guess(self, tokens: list[int], most: int) -> list[int]:
        """What was said before after these tokens, or anything."""
        if most < 1:
            return []
        same = next((said for said in self.said if said[: len(tokens)] == tokens), [])
        drafts = [*same[len(tokens) :], *self.text(2)][:most]
        return self.text(most) if self.chance(0.2) else drafts

    def take(self, rows: list[tuple[Request, int, int]], drawn: np.ndarray) -> None:
        """What followed each token of the plan."""
        at = 0
        for request, count, drafts in rows:
            after = drawn[at : at + count].tolist()
            at += count
            if drafts:
                ahead = [*request.tokens[-drafts:], -1]
                right = next(i for i in range(drafts + 1) if ahead[i] != after[i])
                self.manager.accept(request, 1 + right)
                self.seen["drafts accepted"] += right
                self.seen["drafts rejected"] += drafts - right
                after = after[: 1 + right]
            if not request.num_pending:
                request.tokens.append(after[-1])

    def note(self, transfers: Transfers) -> None:
        for stage in list(transfers):
            for field, name in COPIES.items():
                plan = getattr(stage, field)
                self.seen[name] += 0 if plan is None else int((plan.device_ids > 0).sum())


class Devices:
    """A cache, its host records and a step, over a mesh or on one device."""

    def __init__(self, params: Any, loads: list[Load], mesh: Any = None, peers: Any = ()):
        layout, size = loads[0].manager.layout, loads[0].manager.size
        self.params, pages, ranks = params, loads[0].manager.host_size.num_pages, size.pool_ranks
        placed = None if mesh is None else cache_sharding(layout, mesh, pool_axis="tensor" if ranks > 1 else None)
        if mesh is None:  # the ids of all ranks are those of one
            size, pages = dataclasses.replace(size, num_blocks=size.total_blocks, pool_ranks=1), pages * ranks
        self.cache = init_cache(layout, size, sharding=placed)
        blocks = next(leaf.name for leaf in layout.leaves if leaf.scope == "block")
        where: Any = None if placed is None else placed.arrays[blocks]
        self.host = init_host_cache(layout, pages, sharding=where)
        self._step = jax.jit(drawn, donate_argnums=1) if mesh is None else shard_step(drawn, mesh, peers=peers)

    def run(self, transfers: list[Transfers], plans: list[StepPlan], tokens: np.ndarray) -> np.ndarray:
        self.cache, self.host = run_transfers(self.cache, self.host, stack_transfers(transfers))
        out, self.cache = self._step(self.params, self.cache, stack_plans(plans), tokens)
        return np.asarray(out)

    def parts(self) -> dict[str, jax.Array]:
        return {**self.cache.arrays, "host records": self.host.pages}


def drawn(params: Any, cache: Any, plan: Any, tokens: jax.Array) -> Any:
    """The likeliest token after each of the plan's, [T]."""
    logits, cache = model.forward(params, cache, plan, tokens)
    return logits.argmax(-1).astype(jnp.int32), cache


class Soak:
    """See the module. `params`: as `init_params` gives them, neither stacked nor packed; `spread`: over the mesh."""

    def __init__(
        self, layout: CacheLayout, mesh: Any, spread: Any, whole: Any, peers: Any = (), seed: int = 0, ranks: int = 1
    ):
        size = CacheSize(-(-10 // ranks), num_slots=4, max_blocks_per_request=6, num_snapshots=2, pool_ranks=ranks)
        host = HostSize.of(layout, -(-6 // ranks), 3)
        self.ranks = ranks
        policy = CachePolicy(snapshots=SnapshotPlacement(every=1))
        self.layout, self.loads = layout, list[Load]()
        for shard in range(mesh.shape["data"]):
            manager = KVCacheManager(layout, size, policy=policy, host=host)
            shape = manager.pinned_shape(size.num_slots, 2 * layout.block_tokens, history=True)
            shape = dataclasses.replace(shape, table_entries=shape.table_entries + size.num_slots)
            self.loads.append(Load(manager, shape, np.random.default_rng((seed, shard))))
        self.mesh = Devices(spread, self.loads, mesh, peers)
        self.alone = [Devices(whole, [load]) for load in self.loads]
        self.steps = self.tokens = 0

    def step(self) -> None:
        """Raises `AssertionError` if the mesh draws what one device does not."""
        for load in self.loads:
            load.come_and_go()
        plans, rows = zip(*(load.plan() for load in self.loads), strict=True)
        tokens = [load.manager.plan_tokens(plan) for load, plan in zip(self.loads, plans, strict=True)]
        transfers = [load.manager.take_transfers() for load in self.loads]
        for load, stages in zip(self.loads, transfers, strict=True):
            load.note(stages)
        together = self.mesh.run(transfers, list(plans), np.concatenate(tokens)).reshape(len(plans), -1)
        for i, load in enumerate(self.loads):
            lone, live = self.alone[i].run([transfers[i][:]], [plans[i]], tokens[i]), plans[i].token_slot > 0
            where = f"step {self.steps}, shard {i}"
            np.testing.assert_array_equal(together[i][live], lone[live], err_msg=where)
            load.take(rows[i], lone)
            self.tokens += int(live.sum())
        self.steps += 1

    def compare(self, exact: bool = True) -> None:
        """Raises `AssertionError` unless every device of the mesh has the bytes of the one that ran its shard alone.

        On a CPU XLA rounds the products of a quarter of the heads otherwise: bytes are not `exact` then, tokens are.
        """
        for load in self.loads:
            load.manager.check_integrity()
        if not exact:
            return
        lone = [devices.parts() for devices in self.alone]
        for name, whole in self.mesh.parts().items():
            leaf = next((leaf for leaf in self.layout.leaves if leaf.name == name), None)
            ranks = self.ranks if leaf is None or leaf.scope == "block" else 1
            for shard in whole.addressable_shards:
                which, rank = divmod((shard.index[0].start or 0) // shard.data.shape[0], ranks)
                expected = lone[which][name]
                if ranks > 1:  # every ranks-th block or page, from the rank's first one on
                    units = np.asarray(expected).reshape(
                        leaf.layers if leaf else 1, -1, leaf.rows if leaf else 1, whole.shape[1]
                    )
                    own = np.arange(rank + 1, units.shape[1], ranks)
                    expected = units[:, np.insert(own, 0, 0)].reshape(-1, whole.shape[1])
                np.testing.assert_array_equal(shard.data, expected, err_msg=f"{name} after step {self.steps}")

    @property
    def seen(self) -> collections.Counter[str]:
        """What has happened in all shards."""
        total = sum((load.seen for load in self.loads), collections.Counter[str]())
        for load in self.loads:
            hits = load.manager.stats().cache.counters.hit_tokens
            total.update({"hits on the device": hits[T.DEVICE], "hits on the host": hits[T.HOST]})
        return total


def held() -> dict[str, float]:
    """Memory of this process: live arrays, their bytes, and what is resident, MiB."""
    gc.collect()  # handles of transfers wait for it
    live = jax.live_arrays()
    status = pathlib.Path("/proc/self/status").read_text()
    resident = int(status.partition("VmRSS:")[2].split()[0]) / 1024
    found: dict[str, float] = {"arrays": len(live), "bytes": sum(x.nbytes for x in live), "rss_mib": round(resident, 1)}
    stats = jax.devices()[0].memory_stats() or {}
    return found | ({"device_bytes": stats["bytes_in_use"]} if "bytes_in_use" in stats else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--data", type=int, default=2, help="data shards")
    parser.add_argument("--tensor", type=int, default=1, help="devices of each")
    parser.add_argument("--pool", action="store_true", help="the devices of --tensor share each request's blocks")
    parser.add_argument("--model", default="tiny", help="tiny, in float32, or flash or pro, as released")
    parser.add_argument("--layers", type=int, default=4, help="of flash or pro")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=200, help="steps between looks at caches and memory")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", args.data * args.tensor)
    mesh = model.Split(args.data, args.tensor).mesh()
    split: Any = "context" if args.pool else "throughput"
    if args.model == "tiny":
        cfg, weights = TINY, "float32"
        layout = CacheLayout(TINY, "f32", "f32", block_tokens=8, draft_tokens=2, key_split=split)
    else:
        cfg = getattr(DSV4Config, args.model)()
        cfg = dataclasses.replace(cfg, layer_types=cfg.layer_types[: args.layers])
        weights, layout = "released", CacheLayout(cfg, draft_tokens=2, key_split=split)
    form: Any = jnp.float32 if weights == "float32" else weights
    spread = model.init_params(cfg, args.seed, form, mesh=mesh)
    whole = model.init_params(cfg, args.seed, form, packed=True)
    exact = args.tensor <= 2 or jax.default_backend() == "gpu"
    begun, looks = time.perf_counter(), list[dict[str, float]]()
    with open_exchanges(mesh) as exchanges:
        peers, ranks = [exchange.peers for exchange in exchanges], args.tensor if args.pool else 1
        soak = Soak(layout, mesh, spread, whole, peers, args.seed, ranks)
        while soak.steps < args.steps:
            soak.step()
            for exchange in exchanges:
                exchange.check()
            if soak.steps % args.every == 0 or soak.steps == args.steps:
                soak.compare(exact)
                looks.append({"step": soak.steps, "tokens": soak.tokens, **held()})
                print(f"{time.perf_counter() - begun:.0f} s {looks[-1]}", flush=True)
    seen, settled = soak.seen, looks[len(looks) // 2 :]
    same = "every token and every byte" if exact else "every token"
    print(f"{soak.steps} steps over {dict(mesh.shape)}: {same} is one device's; {dict(seen)}")
    report = {"mesh": dict(mesh.shape), "exchange": "cuda" if exchanges else "xla", "seen": seen, "looks": looks}
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    if missing := [name for name in SEEN if not seen[name]]:
        sys.exit(f"never happened: {', '.join(missing)}")
    for name in ("arrays", "bytes"):  # a look may find what a call has just left behind; what stays shows in all
        if min(look[name] for look in settled) > max(look[name] for look in looks[: len(looks) // 2] or looks):
            sys.exit(f"live {name} grow: {[look[name] for look in looks]}")
    if (grown := settled[-1]["rss_mib"] - settled[0]["rss_mib"]) > 32:
        sys.exit(f"the process grew by {grown:.0f} MiB in its second half")


if __name__ == "__main__":
    main()
