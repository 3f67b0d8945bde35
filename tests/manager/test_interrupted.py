"""Out of memory and Ctrl-C at any line of a public call: the books are whole, or the manager refuses all but `reset`.

A trace function raises before the n-th line that runs inside the manager. What goes on afterwards is driven on the
symbolic device, which knows whether a step reads what was written.
"""

from __future__ import annotations

import collections
import pathlib
import random
import sys
from collections.abc import Callable

import pytest

import dsv4_jax.manager
from dsv4_jax import KVCacheManager
from dsv4_jax.errors import ManagerInterruptedError, OutOfBlocksError
from dsv4_jax.manager import HostSize
from dsv4_jax.manager.remote_tier import RemoteTier
from dsv4_jax.manager.storage_tier import StorageTier
from tests.interruption import Fault
from tests.manager.test_caching_stateful import LAYOUT, POLICIES, Trace

ROOT = str(pathlib.Path(dsv4_jax.manager.__file__).parent)
CALLS = (
    "abort_request",
    "accept",
    "admit_request",
    "commit",
    "fork",
    "plan_step",
    "plan_tokens",
    "preempt",
    "release_request",
    "reserve",
    "resize",
    "resume",
    "schedule",
    "sleep",
    "take_transfers",
    "wakeup",
)


# In every step; and those in the midst of one: whoever loses a plan that was made has to start again.
OFTEN = ("plan_step", "plan_tokens", "schedule", "take_transfers")
MIDST = ("accept", "plan_tokens", "take_transfers", "wakeup")


def assert_closed(manager: KVCacheManager) -> None:
    """Every public call but `reset` refuses."""
    tier, remote, calls = StorageTier(manager), RemoteTier(manager), list[Callable]()
    calls += [
        lambda: manager.admit_request([1, 2]),
        lambda: manager.plan_step([]),
        lambda: manager.schedule(4),
        manager.commit,
        manager.flush,
        lambda: manager.acknowledge(""),
        manager.take_transfers,
        manager.stats,
        lambda: manager.export_again(""),
        manager.check_integrity,
        manager.sleep,
        manager.wakeup,
        manager.can_admit,
        lambda: manager.resize(manager.size),
        manager.memory_bytes,
        lambda: manager.pinned_shape(1),
        lambda: tier.plan_writes(1),
        lambda: tier.finish_writes([], []),
        lambda: tier.finish_reads([], []),
        lambda: tier.plan_reads([1] * 99, _nothing, _nothing),
        lambda: remote.expect(b"", []),
        remote.expire,
    ]
    for request in (*manager.requests, *manager.preempted):
        calls += [
            lambda r=request: manager.release_request(r),
            lambda r=request: manager.abort_request(r),
            lambda r=request: manager.preempt(r),
            lambda r=request: manager.resume(r),
            lambda r=request: manager.fork(r),
            lambda r=request: manager.reserve(r, 1),
            lambda r=request: manager.export_request(r),
            lambda r=request: manager.accept(r, 0),
            lambda r=request: manager.find(r.ref),
            lambda r=request: manager.can_resume(r),
        ]
    for call in calls:
        with pytest.raises(ManagerInterruptedError, match=r"injected|broken off"):
            call()


def books(manager: KVCacheManager) -> tuple:
    """All that a call may change."""
    requests = [
        (
            r.id,
            r.slot,
            r.state,
            r.epoch,
            list(r.tokens),
            list(r.history),
            r.num_cached,
            r.num_hit,
            list(r.blocks),
            r.num_tabled,
            r.reserved,
            r.num_scheduled,
            r.step_start,
            r.last_step,
            list(r.nodes),
            r.restores,
            r.rolling,
            r.parked,
        )
        for r in (*manager.requests, *manager.preempted)
    ]
    return manager.stats(), requests, manager.events.last, manager.has_transfers


def _nothing(keys: list[bytes]) -> list[bool]:
    return [False] * len(keys)


class InterruptedTrace(Trace):
    """A random load in which calls are broken off now and then."""

    def __init__(self, seed: int, did: collections.Counter[str], **options):
        super().__init__(seed, **options)
        self.did, self.faults = did, random.Random(seed)
        for name in CALLS:
            setattr(self.manager, name, self._breakable(name, getattr(self.manager, name)))

    def _breakable(self, name: str, function: Callable) -> Callable:
        def call(*args, **options):
            if sys.gettrace() is not None or self.faults.random() > (0.01 if name in OFTEN else 0.05):
                return function(*args, **options)
            error = self.faults.choice([MemoryError, KeyboardInterrupt])
            fault, before = Fault(error, int(10 ** self.faults.uniform(0, 3.2)) - 1), books(self.manager)
            try:
                return fault.call(function, *args, **options)
            except error:
                assert fault.hit
                self.did[f"broke off {name}"] += 1
                try:
                    closed = self.manager.check_integrity() is not None
                except ManagerInterruptedError:
                    closed = True
                assert closed or before == books(self.manager), f"{name} is half done"
                raise Broken(name, closed) from None

        return call

    def run(self, steps: int) -> None:
        calls = (
            [self.step] * 12
            + [self.decode] * 3
            + [self.admit] * 6
            + [self.release] * 2
            + [self.preempt] * 2
            + [self.resume] * 3
            + [self.fork, self.fail, self.sleep, self.resize, self.reserve]
        )
        for _ in range(steps):
            act = self.random.choice(calls)
            try:
                act()
                self.manager.check_integrity()
            except Broken as broken:
                name, closed = broken.args
                self.did["rounds"] += 1
                self.did["closed" if closed else "whole"] += 1
                if closed:
                    assert_closed(self.manager)
                if closed or name in MIDST or act == self.fail:
                    self.manager.reset()
                    self.fed.clear()
                    self.spaces.clear()
                self.manager.check_integrity()

    def resize(self) -> None:
        self.manager.resize(self.manager.size)
        self.device.transfer(self.manager.take_transfers())
        self.device.wipe()

    def reserve(self) -> None:
        if request := self.any_request():
            try:
                self.manager.reserve(request, self.random.randint(0, 90))
            except OutOfBlocksError:
                self.did["out of blocks"] += 1


class Broken(Exception):
    """A call was broken off. Its arguments: which, and whether the manager is closed now."""


@pytest.mark.parametrize(
    "policy", [pytest.param(name, marks=[pytest.mark.slow] if name != "write_back" else []) for name in POLICIES]
)
def test_broken_off_anywhere_nothing_unwritten_is_read(policy: str) -> None:
    did: collections.Counter[str] = collections.Counter()
    seed = 0
    while did["rounds"] < 400:
        host = HostSize(0) if seed % 4 == 0 else HostSize.of(LAYOUT, 3 + 5 * (seed % 3), 1 + seed % 3)
        trace = InterruptedTrace(
            seed, did, policy=policy, drafts=3 * (seed % 2), host=host, blocks=14 + 6 * (seed % 3), snapshots=seed % 4
        )
        trace.run(200)
        seed += 1
    assert did["closed"] > 100 and did["whole"] > 5, did
    assert all(did[f"broke off {name}"] for name in CALLS), did
