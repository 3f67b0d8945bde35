"""The prefix tree against a model of dictionaries, over random histories, its books checked after every step.

The model knows nodes by their path (a tuple of symbols, the first one the namespace) and finds
everything by looking at all of them.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Collection

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dsv4_jax.errors import CacheError, IntegrityError, OutOfBlocksError
from dsv4_jax.events import EventLog
from dsv4_jax.manager.allocator import BlockAllocator
from dsv4_jax.manager.prefix.eviction import Freed
from dsv4_jax.manager.prefix.eviction_policies import EVICTION_POLICIES
from dsv4_jax.manager.prefix.node import Node, Tier
from dsv4_jax.manager.prefix.prefix_tree import PrefixTree
from dsv4_jax.manager.prefix.worth import UNIT, snapshot_worth

BLOCK = 4
LEVEL = {
    "device": 3,
    "backing_up": 3,
    "offloading": 2,
    "host": 2,
    "loading": 2,
    "persisting": 2,
    "storage": 1,
    "fetching": 1,
}
MATCHABLE = ("device", "backing_up", "host", "persisting", "storage")
SETTLED = ("device", "host", "storage")
DONE = {"backing_up": "device", "offloading": "host", "loading": "device", "persisting": "host", "fetching": "host"}
UNDONE = {
    "backing_up": "device",
    "offloading": "device",
    "loading": "host",
    "persisting": "host",
    "fetching": "storage",
}
Path = tuple[int, ...]
pick = st.integers(0, 999)
paths = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple)


@functools.cache
def digest_of(path: Path) -> bytes:
    return hashlib.md5(repr(path).encode()).digest()


def prefixes(path: Path) -> list[Path]:
    """Of a namespace and blocks: one prefix per block."""
    return [path[:i] for i in range(2, len(path) + 1)]


@dataclasses.dataclass
class Record:
    state: str
    number: int
    block: int = 0
    host: int = 0
    stored: bool = False
    refs: int = 0
    last: int = 0
    hits: int = 0
    level: int = 0  # of worth, when it was last referenced
    snapshot: int = 0  # device copy
    pins: int = 0
    used: int = 0


@dataclasses.dataclass
class User:
    """A live request: nodes it references, nodes it writes with their blocks, blocks of its own."""

    path: Path
    nodes: list[Node]
    writing: list[tuple[Node, Path, int, int]]  # with its block and number
    spare: list[int]


class TreeMachine(RuleBasedStateMachine):
    @initialize(
        threshold=st.sampled_from([None, 0, 1, 2]),
        order=st.sampled_from(["worth", "lru", "lfu", "worth"]),
        last=st.sampled_from(["device", "host"]),
        moves_down=st.booleans(),
    )
    def start(self, threshold: int | None, order: str, last: str, moves_down: bool) -> None:
        self.log, self.order, self.last, self.moves = EventLog(capacity=10_000), order, last, moves_down
        self.tree = PrefixTree(
            BLOCK,
            eviction=EVICTION_POLICIES[order],
            host=last == "host",
            moves_down=moves_down,
            backup_after=threshold,
            events=self.log,
        )
        self.device, self.host, self.slots = (
            BlockAllocator(14),
            BlockAllocator(8, "host"),
            BlockAllocator(3, "snapshot"),
        )
        self.records: dict[Path, Record] = {}
        self.users: list[User] = []
        self.old: list[Node] = []
        self.now = self.number = self.seen = self.worst = 0
        self.copies: set[tuple[bytes, Tier]] = set()
        for symbols in ((0, 1, 0), (0, 0), (1, 0, 0, 1)):
            self.compute(len(symbols), symbols)
            self.attach(len(self.records) - 1)

    def compute(self, lookup: int, symbols: Path) -> None:
        """A request from admission to its end."""
        self.admit(0, symbols, 1, bool(lookup % 2))
        for _ in symbols:
            self.write(len(self.users) - 1)
        writing = len(self.users[-1].writing)
        for _ in range(writing):
            self.publish_next(self.users[-1], 0)
        self.finish(len(self.users) - 1)

    # The model

    def children(self, path: Path) -> list[Path]:
        return [p for p in self.records if len(p) == len(path) + 1 and p[:-1] == path]

    def below(self, path: Path) -> list[Path]:
        return [p for p in self.records if p[: len(path)] == path]

    def level(self, path: Path) -> int:
        return 3 if len(path) < 2 else LEVEL[self.records[path].state]

    def may_go(self, path: Path, state: str) -> bool:
        """Whether tiers and references allow the change; the table is the caller's to respect."""
        old, new = self.level(path), LEVEL[state]
        if new > old:
            return self.level(path[:-1]) >= new
        return new == old or (not self.records[path].refs and all(self.level(p) <= new for p in self.children(path)))

    def node(self, path: Path) -> Node:
        found = self.tree.get(digest_of(path))
        assert found is not None
        return found

    def any_path(self, seed: int, *states: str) -> Path | None:
        found = sorted(p for p, r in self.records.items() if not states or r.state in states)
        return found[seed % len(found)] if found else None

    def access(self, path: Path) -> int:
        return self.records[path[:-1]].last if len(path) > 2 else self.now

    def touch(self, path: Path, refs: int) -> None:
        for p in prefixes(path):
            self.records[p].refs += refs
            self.records[p].last = self.now
            if refs > 0:
                self.records[p].level = self.worst

    def forget(self, path: Path) -> None:
        """Removes the subtree; gives its units back in the model's own accounts."""
        for p in self.below(path):
            del self.records[p]

    def take_back(self, freed: Freed) -> None:
        self.device.release(freed.blocks)
        self.host.release(freed.pages)
        self.slots.release(freed.snapshots)

    def attempt(self, legal: bool, call: Callable[[], object]) -> bool:
        """Calls; the outcome must be as the model says. If illegal, nothing changes: the invariants see to it."""
        try:
            result = call()
        except CacheError as error:
            assert not legal, error
            return False
        assert legal, "an illegal call was accepted"
        if isinstance(result, Freed):
            self.take_back(result)
        return True

    # Requests

    @rule(namespace=st.integers(0, 1), symbols=paths, extra=st.integers(0, 1), beyond=st.booleans())
    def admit(self, namespace: int, symbols: Path, extra: int, beyond: bool) -> None:
        path = (namespace, *symbols)
        names = prefixes(path)
        tokens = len(symbols) * BLOCK + extra
        match = self.tree.match([digest_of(p) for p in names], tokens)
        found = []
        for p in names[: (tokens - 1) // BLOCK]:
            if p not in self.records or self.records[p].state not in MATCHABLE:
                break
            found.append(p)
        hit = max((i + 1 for i, p in enumerate(found) if self.records[p].snapshot), default=0)
        assert [n.digest for n in match.path] == [digest_of(p) for p in found]
        assert match.hit == hit
        assert match.hit * BLOCK < tokens
        levels = [self.level(p) for p in found]
        assert levels == sorted(levels, reverse=True)
        if len(self.users) == 4:
            return
        nodes = self.tree.take(match, len(match.path) if beyond else None)
        self.now += 1
        if nodes:
            self.touch(found[len(nodes) - 1], 1)
            for p in found[: len(nodes)]:
                self.records[p].hits += 1
            if self.records[found[len(nodes) - 1]].snapshot:
                self.records[found[len(nodes) - 1]].used = self.now
        self.users.append(User(path, nodes, [], []))

    @precondition(lambda self: len(self.users) < 4)
    @rule(namespace=st.integers(0, 1), symbols=paths, beyond=st.booleans(), blocks=st.integers(0, 5))
    def run(self, namespace: int, symbols: Path, beyond: bool, blocks: int) -> None:
        """A request that is admitted and has its first blocks computed at once."""
        self.admit(namespace, symbols, 1, beyond)
        for _ in range(blocks):
            self.write(len(self.users) - 1)
        for _ in range(len(self.users[-1].writing)):
            self.publish_next(self.users[-1], 0)

    @precondition(lambda self: self.users)
    @rule(who=pick)
    def write(self, who: int) -> None:
        user = self.users[who % len(self.users)]
        done = len(user.nodes) + len(user.writing)
        if done == len(user.path) - 1 or not self.device.num_free:
            return
        path = user.path[: done + 2]
        (block,) = self.device.acquire(1)
        parent = user.writing[-1][0] if user.writing else user.nodes[-1] if user.nodes else None
        on_device = bool(user.writing) or self.level(path[:-1]) == 3
        try:
            node = self.tree.reserve(parent, digest_of(path), block)
        except IntegrityError:
            assert not on_device
            self.device.release([block])
            return
        assert on_device
        self.number += 1
        user.writing.append((node, path, block, self.number))

    @precondition(lambda self: any(u.writing for u in self.users))
    @rule(who=pick, last=st.booleans())
    def publish(self, who: int, last: bool) -> None:
        users = [u for u in self.users if u.writing]
        self.publish_next(users[who % len(users)], -1 if last else 0)

    def publish_next(self, user: User, at: int) -> None:
        node, path, block, number = user.writing[at]
        result = self.tree.publish(node)
        other = self.records.get(path)
        if (at and len(user.writing) > 1) or (other and other.state not in (*SETTLED, "backing_up")):
            assert result == (node, 0)
            assert node.state.value == "writing"
            return
        self.now += 1
        if other is None:
            assert result == (node, 0)
            other = self.records[path] = Record("device", number, block, level=node.level)
        elif other.block:
            assert result == (self.node(path), block)
            user.spare.append(block)
        else:
            assert result == (self.node(path), 0)
            other.state, other.block = "device", block
        if result.node is not node:
            other.level = self.records[path[:-1]].level if len(path) > 2 else self.worst
        other.refs += 1
        other.last = self.access(path)
        user.nodes.append(result.node)
        del user.writing[0]

    @precondition(lambda self: any(u.writing for u in self.users))
    @rule(who=pick, last=st.booleans())
    def give_up(self, who: int, last: bool) -> None:
        users = [u for u in self.users if u.writing]
        user = users[who % len(users)]
        at = len(user.writing) - 1 if last else 0
        node = user.writing[at][0]
        if self.attempt(at == len(user.writing) - 1, lambda: self.tree.moves.abort(node)):
            del user.writing[at]
            self.old.append(node)

    @precondition(lambda self: self.users)
    @rule(who=pick)
    def finish(self, who: int) -> None:
        user = self.users.pop(who % len(self.users))
        for node, _, _, _ in reversed(user.writing):
            self.take_back(self.tree.moves.abort(node))
        self.tree.release(user.nodes)
        self.now += 1
        self.touch(user.path[: len(user.nodes) + 1], -1)
        self.device.release(user.spare)

    @precondition(lambda self: any(u.nodes and not u.writing for u in self.users))
    @rule(who=pick, count=st.integers(1, 3))
    def roll_back(self, who: int, count: int) -> None:
        users = [u for u in self.users if u.nodes and not u.writing]
        user = users[who % len(users)]
        tail = user.nodes[-count:]
        self.tree.release(tail)
        self.now += 1
        gone = prefixes(user.path[: len(user.nodes) + 1])[-count:]
        access = self.access(gone[0])
        for path in gone:
            self.records[path].refs -= 1
            self.records[path].last = access
        del user.nodes[-count:]

    @precondition(lambda self: self.users and len(self.users) < 4)
    @rule(who=pick)
    def fork(self, who: int) -> None:
        user = self.users[who % len(self.users)]
        path = user.path[: len(user.nodes) + 1]
        legal = all(self.records[p].state in MATCHABLE for p in prefixes(path))
        if self.attempt(legal, lambda: self.tree.acquire(user.nodes)):
            self.now += 1
            self.touch(path, 1)
            self.users.append(User(user.path, list(user.nodes), [], []))

    # Tiers

    def worth(self, path: Path) -> int:
        return self.records[path].level + UNIT * (1 + self.records[path].hits)

    def goes_for_good(self, path: Path, tier: str, room: int) -> bool:
        record = self.records[path]
        if tier == "device":
            return not (room or record.host or record.stored)
        return tier == "storage" or (record.state == "host" and not record.stored)

    def key(self, path: Path, tier: str, gone: set[Path]) -> tuple[int, ...]:
        """Who leaves first, when these have left."""
        record = self.records[path]
        age = record.last, -len(path), record.number
        if self.order == "lru":
            return age
        if self.order == "lfu":
            return record.hits, *age
        needed = record.snapshot or record.refs or any(p not in gone for p in self.children(path))
        moves = self.moves and self.last == "host"
        if moves and tier == "device":
            return bool(needed), *age
        if moves and tier == "host" and record.state == "device":
            return 0, *age
        return self.worth(path) if needed else 0, *age

    def eligible(self, path: Path, tier: str, gone: set[Path]) -> bool:
        record = self.records[path]
        if path in gone or (tier == "host" and record.state == "device" and not record.host):
            return False
        if tier == "host" and record.state == "device":
            return True
        same = [p for p in self.children(path) if p not in gone and self.level(p) >= LEVEL[tier]]
        return record.state == tier and not record.refs and not same

    def stuck(self, path: Path, tier: str, going: Collection[Path] = ()) -> bool:
        """`going`: other blocks that leave the tier before."""
        record = self.records[path]
        if record.state != tier or (tier == "device" and record.host):
            return False
        if tier == "host" and record.stored:
            return any(self.records[p].state == "fetching" for p in self.children(path))
        lower = [p for p in self.below(path) if p == path or p in going or self.level(p) < LEVEL[tier]]
        return any(self.records[p].pins or (p != path and self.records[p].state not in SETTLED) for p in lower)

    @rule(
        tier=st.sampled_from(["device", "host", "device", "storage"]),
        count=st.sampled_from([2, 1, 3, 5, 0]),
        room=st.integers(0, 5),
    )
    def evict(self, tier: str, count: int, room: int) -> None:
        room = min(room, self.host.num_free) if tier == "device" else 0
        chosen: list[Path] = []
        while len(chosen) < count:
            left = [
                p
                for p in self.records
                if self.eligible(p, tier, set(chosen)) and not (room < count and self.stuck(p, tier, chosen))
            ]
            if not left:
                break
            gone = {p for p in chosen if self.goes_for_good(p, tier, room)}
            chosen.append(min(left, key=lambda p: self.key(p, tier, gone)))
        spots = self.host.acquire(room)
        try:
            result = self.tree.evictor.evict(Tier[tier.upper()], count, spots)
        except OutOfBlocksError as error:
            assert len(chosen) < count
            assert (error.requested, error.available) == (count, len(chosen))
            self.host.release(spots)
            return
        assert len(chosen) == count
        self.take_back(result)
        self.host.release(result.unused)
        homeless = [p for p in chosen if not self.records[p].host]
        moving = homeless[-room:] if room else []
        assert [(m.node.digest, m.source) for m in result.moves] == [
            (digest_of(p), self.records[p].block) for p in moving
        ]
        targets = [m.destination for m in result.moves]
        assert sorted(targets + result.unused) == sorted(spots)
        for path in chosen:
            record = self.records[path]
            lost = path not in moving and (tier == "device" or record.state == "host")
            if tier == self.last and lost and (self.children(path) or record.snapshot):
                self.worst = max(self.worst, self.worth(path))
            if path in moving:
                record.state, record.host = "offloading", targets[moving.index(path)]
            elif tier == "device" and record.host:
                record.state, record.block = "host", 0
            elif tier == "device" and record.stored and all(self.level(p) < 2 for p in self.children(path)):
                record.state, record.block = "storage", 0
            elif tier == "host" and record.state == "device":
                record.host = 0
            elif tier == "host" and record.stored:
                record.state, record.host = "storage", 0
            else:
                self.forget(path)

    @rule(seed=pick, wrong=st.booleans())
    def back_up(self, seed: int, wrong: bool) -> None:
        if (path := self.any_path(seed) if wrong else self.any_path(seed, "device")) and self.host.num_free:
            self.begin(path, "device", "backing_up", self.tree.moves.begin_backup, not self.records[path].host)

    @rule(seed=pick)
    def load(self, seed: int) -> None:
        if (path := self.any_path(seed, "host")) and self.device.num_free:
            above = path[:-1]
            legal = self.level(above) == 3 or self.records[above].state == "loading"
            (block,) = self.device.acquire(1)
            if self.attempt(legal, lambda: self.tree.moves.begin_load(self.node(path), block)):
                self.records[path].state, self.records[path].block = "loading", block
            else:
                self.device.release([block])

    @rule(seed=pick, wrong=st.booleans())
    def persist(self, seed: int, wrong: bool) -> None:
        if path := self.any_path(seed) if wrong else self.any_path(seed, "host"):
            record = self.records[path]
            legal = record.state == "host" and not record.stored
            if self.attempt(legal, lambda: self.tree.moves.begin_persist(self.node(path))):
                record.state = "persisting"

    @rule(seed=pick)
    def fetch(self, seed: int) -> None:
        if (path := self.any_path(seed, "storage", "host")) and self.host.num_free:
            above = path[:-1]
            legal = self.level(above) >= 2 or self.records[above].state == "fetching"
            self.begin(path, "storage", "fetching", self.tree.moves.begin_fetch, legal)

    def begin(self, path: Path, source: str, state: str, call: Callable[[Node, int], None], legal: bool) -> None:
        """A move that takes a host block."""
        record = self.records[path]
        (host,) = self.host.acquire(1)
        if self.attempt(legal and record.state == source, lambda: call(self.node(path), host)):
            record.state, record.host = state, host
        else:
            self.host.release([host])

    @rule(seed=pick, well=st.booleans())
    def end_move(self, seed: int, well: bool) -> None:
        if path := self.any_path(seed, *DONE) or self.any_path(seed):
            self.end(path, well)

    @rule(well=st.booleans())
    def end_moves(self, well: bool) -> None:
        for path in sorted(self.records):
            if self.records[path].state in DONE:
                self.end(path, well)

    @rule(down=st.booleans())
    def store(self, down: bool) -> None:
        """Persists all that the host has; perhaps empties the host."""
        for path in sorted(self.records):
            if self.records[path].state == "host" and not self.records[path].stored:
                self.tree.moves.begin_persist(self.node(path))
                self.records[path].state = "persisting"
        self.end_moves(True)
        if down:
            self.evict("host", sum(self.eligible(p, "host", set()) for p in self.records), 0)

    def end(self, path: Path, well: bool) -> None:
        record, node = self.records[path], self.node(path)
        state = (DONE if well else UNDONE).get(record.state)
        legal = state is not None and self.may_go(path, state)
        if not self.attempt(legal, lambda: self.tree.moves.complete(node) if well else self.tree.moves.abort(node)):
            return
        if well:
            record.stored |= record.state == "persisting"
            record.block *= record.state != "offloading"
        else:
            record.block *= record.state != "loading"
            record.host *= record.state in ("loading", "persisting")
        record.state = state

    @rule(
        seed=pick,
        which=st.sampled_from(["stored", "found", "lost", "pin", "unpin", "late", "late", "discard", "reset"]),
    )
    def seldom(self, seed: int, which: str) -> None:
        {
            "stored": self.lose_stored,
            "found": self.find_in_storage,
            "lost": self.discard,
            "pin": lambda seed: self.pin(seed, True),
            "unpin": lambda seed: self.pin(seed, False),
            "late": self.late_events_are_refused,
            "discard": self.discard,
            "reset": self.reset,
        }[which](seed)

    def discard(self, seed: int) -> None:
        if path := self.any_path(seed, "storage", *DONE) or self.any_path(seed):
            all_below = [self.records[p] for p in self.below(path)]
            legal = (
                not any(r.refs or r.pins for r in all_below)
                and all(p == path or self.records[p].state in SETTLED for p in self.below(path))
                and self.records[path].state not in ("backing_up", "persisting")
            )
            node = self.node(path)
            if self.attempt(legal, lambda: self.tree.moves.discard(node)):
                self.forget(path)
                self.old.append(node)

    def find_in_storage(self, seed: int) -> None:
        start = self.any_path(seed) or (0,)
        path = (*start, seed % 2)
        parent = self.node(start) if len(start) > 1 else None
        node = self.tree.add_stored(parent, digest_of(path))
        if path not in self.records:
            self.number += 1
            self.records[path] = Record("storage", self.number)
            self.records[path].last = self.access(path)
            self.records[path].level = node.level
        self.records[path].stored = True
        assert node is self.node(path)

    def lose_stored(self, seed: int) -> None:
        if path := self.any_path(seed):
            record = self.records[path]
            legal = record.stored and record.state not in ("storage", "fetching", "persisting")
            if self.attempt(legal, lambda: self.tree.moves.drop_stored(self.node(path))):
                record.stored = False

    # Snapshots

    @rule(seed=pick)
    def attach(self, seed: int) -> None:
        if (path := self.any_path(seed)) and self.slots.num_free:
            (slot,) = self.slots.acquire(1)
            record = self.records[path]
            if self.attempt(
                not record.snapshot, lambda: self.tree.snapshots.attach(self.node(path), Tier.DEVICE, slot)
            ):
                self.now += 1
                record.snapshot, record.used = slot, self.now
            else:
                self.slots.release([slot])

    def pin(self, seed: int, pin: bool) -> None:
        if path := self.any_path(seed):
            record, call = self.records[path], self.tree.snapshots.pin if pin else self.tree.snapshots.unpin
            if self.attempt(bool(record.snapshot and (pin or record.pins)), lambda: call(self.node(path))):
                record.pins += 1 if pin else -1

    @rule(count=st.integers(0, 2))
    def evict_snapshots(self, count: int) -> None:
        states = {p: self.node(p).snapshot for p, r in self.records.items() if r.snapshot and not r.pins}
        keys = {
            "worth": lambda p: (snapshot_worth(states[p]), self.records[p].used),
            "lru": lambda p: self.records[p].used,
            "lfu": lambda p: (states[p].hits, self.records[p].used),
        }
        order = sorted(states, key=keys[self.order])
        lost = order[:count] if self.last == "device" else []
        worst = max([self.worst, *(snapshot_worth(states[p]) for p in lost)])
        loose = [self.records[p] for p in order]
        slots: list[int] = []
        if self.attempt(len(loose) >= count, lambda: slots.extend(self.tree.snapshots.evict(Tier.DEVICE, count).slots)):
            assert slots == [r.snapshot for r in loose[:count]]
            self.slots.release(slots)
            for record in loose[:count]:
                record.snapshot = 0
            self.worst = worst

    # The rest

    def reset(self, seed: int) -> None:
        if seed % 7 != 3:
            return
        self.old += [self.node(p) for p in self.records] + [w[0] for u in self.users for w in u.writing]
        self.tree.reset()
        for pool in (self.device, self.host, self.slots):
            pool.reset()
        self.records, self.users, self.worst = {}, [], 0

    def late_events_are_refused(self, seed: int) -> None:
        if not self.old:
            return
        node = self.old[seed % len(self.old)]
        assert not self.tree.is_current(node)
        calls = (self.tree.publish, self.tree.moves.complete, self.tree.moves.abort, self.tree.moves.discard)
        self.attempt(False, lambda: calls[seed % 4](node))
        self.attempt(False, lambda: self.tree.release([node]))

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "tree"):
            return
        self.tree.check_integrity()
        assert len(self.tree) == len(self.records)
        users = collections.Counter(p for u in self.users for p in prefixes(u.path[: len(u.nodes) + 1]))
        for path, r in self.records.items():
            n = self.node(path)
            slot, pins = (n.snapshot.device, n.snapshot.pins) if n.snapshot else (0, 0)
            assert (n.state.value, n.block, n.host, n.stored, n.refs, slot, pins) == (
                r.state,
                r.block,
                r.host,
                r.stored,
                r.refs,
                r.snapshot,
                r.pins,
            )
            assert r.refs == users[path]
            assert (n.hits, n.level) == (r.hits, r.level)
        for pool, units in (
            (
                self.device,
                [r.block for r in self.records.values()]
                + [b for u in self.users for b in u.spare]
                + [w[2] for u in self.users for w in u.writing],
            ),
            (self.host, [r.host for r in self.records.values()]),
            (self.slots, [r.snapshot for r in self.records.values()]),
        ):
            pool.check_integrity()
            held = sorted(unit for unit in units if unit)
            assert held == [i for i in range(1, pool.num_total + 1) if pool.is_held(i)]

    @invariant()
    def events_tell_where_every_copy_is(self) -> None:
        if not hasattr(self, "tree"):
            return
        fresh, missed = self.log.since(self.seen)
        assert not missed
        self.seen = self.log.last
        for event in fresh:
            if event.kind == "cleared":
                self.copies.clear()
            elif event.kind == "stored":
                assert (event.digest, event.tier) not in self.copies
                self.copies.add((event.digest, event.tier))
            else:
                self.copies.remove((event.digest, event.tier))
        expected = set()
        for path, r in self.records.items():
            where = {
                Tier.DEVICE: r.state in ("device", "backing_up", "offloading"),
                Tier.HOST: r.host and r.state not in ("backing_up", "offloading", "fetching"),
                Tier.STORAGE: r.stored,
            }
            expected |= {(digest_of(path), tier) for tier, there in where.items() if there}
        assert self.copies == expected


TreeMachine.TestCase.settings = settings(max_examples=170, stateful_step_count=80, deadline=None)
TestTree = pytest.mark.slow(TreeMachine.TestCase)
