"""Servers of different draft widths: what one has stored, or handed over, continues in the other as its own would."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import dsv4_jax as dsv4
from dsv4_jax.manager import CachePolicy, HostSize, Request, SnapshotPlacement
from dsv4_jax.records import block_record, snapshot_record
from dsv4_jax.stores import AsyncStore, ObjectStore, SlabStore
from dsv4_jax.testing import StepRunner
from dsv4_jax.testing.live import assert_same_bytes
from dsv4_jax.tiers.storage_driver import StorageDriver

from ..model import test_dspark
from .engine import CFG, runner
from .handed import HandedMixes, Prefill

HOST = HostSize.of(dsv4.CacheLayout(CFG, "f32", "f32", block_tokens=8), 12, 6)
PROMPT = np.random.default_rng(3).integers(0, 32, 29).tolist()  # three blocks and a half


def slab(path: pathlib.Path, **what: Any) -> SlabStore:
    return SlabStore(path, max_records=32, **what)


def objects(path: pathlib.Path, **what: Any) -> ObjectStore:
    pytest.importorskip("tensorstore")
    return ObjectStore({"driver": "file", "path": f"{path}/"}, **what)


class Server:
    """A manager, its cache and host records, and stores in a folder."""

    def __init__(
        self, runner: StepRunner, folder: pathlib.Path, make: Callable[..., Any], stored: dsv4.CacheLayout | None = None
    ):
        """`stored`: the layout whose records the stores have; default: the runner's."""
        layout, self.runner = runner.layout, runner
        stored = stored or layout
        policy = CachePolicy(snapshots=SnapshotPlacement(every=1))
        self.manager = dsv4.KVCacheManager(layout, runner.size, policy=policy, host=HOST, weights_id="weights")
        self.cache = dsv4.init_cache(layout, runner.size)
        self.host = dsv4.init_host_cache(layout, HOST.num_pages)
        self.stores = [
            AsyncStore(make(folder / name, record_bytes=record.bytes, fingerprint=fingerprint))
            for name, record, fingerprint in (
                ("blocks", block_record(stored), stored.block_fingerprint),
                ("snapshots", snapshot_record(stored), stored.snapshot_fingerprint),
            )
        ]
        self.driver = StorageDriver(self.manager, *self.stores)

    def step(self, request: Request, count: int) -> np.ndarray:
        """Logits [count, vocab]."""
        plan = self.manager.plan_step([(request, count)], shape=self.runner.shape)
        self.transfer()
        logits, self.cache = self.runner.run(self.cache, self.manager, plan)
        return logits[:count]

    def transfer(self) -> None:
        self.cache, self.host = dsv4.run_transfers(self.cache, self.host, self.manager.take_transfers())
        self.host = self.driver.poll(self.host)

    def store(self) -> None:
        """Everything that is cached goes to the host, and from there to storage."""
        self.manager.sleep()
        self.transfer()
        while self.driver.save(self.host):
            self.host = self.driver.drain(self.host)

    def fetch(self, tokens: list[int]) -> None:
        prefetch = self.driver.prefetch(tokens)
        while not prefetch.done:
            self.host = self.driver.poll(self.host)

    def close(self) -> None:
        for store in self.stores:
            store.close()


@pytest.mark.parametrize("make", [slab, objects])
@pytest.mark.parametrize(("written", "read"), [(0, 3), (3, 0)])
def test_what_one_has_stored_the_other_continues_as_its_own(tmp_path, written, read, make):
    first = Server(runner(drafts=written), tmp_path, make)
    request = first.manager.admit_request(PROMPT)
    for count in (8, 8, 8, 5):
        first.step(request, count)
    first.manager.release_request(request)
    first.store()
    assert [store.store.stats().written for store in first.stores] == [3, 3]
    first.close()

    second = Server(runner(drafts=read), tmp_path, make)
    tokens = PROMPT + PROMPT[:9]
    second.fetch(tokens)
    request = second.manager.admit_request(tokens)
    assert request.num_hit == 24
    cold = second.runner.alone(tokens)
    logits = np.concatenate([second.step(request, count) for count in (1, 4, 9)])
    np.testing.assert_array_equal(logits.view(np.uint32), cold.logits[24:].view(np.uint32))
    assert_same_bytes(second.runner.live(second.cache, request), cold.live)
    assert [store.store.stats().foreign for store in second.stores] == [0, 0]
    second.close()


@functools.cache
def stages(drafts: bool) -> StepRunner:
    """A model with DSpark's stages, whose rows are kept or not."""
    layout = dsv4.CacheLayout(test_dspark.CFG, "f32", "f32", block_tokens=8, draft_tokens=2, include_drafts=drafts)
    step = test_dspark.fed if drafts else dsv4.model.forward
    return StepRunner(step, dsv4.model.init_params(test_dspark.CFG, 1, drafts=True), layout)


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("written", [False, True])
def test_states_without_rows_of_stages_are_hits_of_who_drafts(tmp_path, written, stored):
    """And the reverse. After a window of tokens the rows are those of a request that always had them."""
    of_stores = stages(stored).layout
    first = Server(stages(written), tmp_path, slab, of_stores)
    request = first.manager.admit_request(PROMPT)
    for count in (8, 8, 8, 5):
        first.step(request, count)
    first.manager.release_request(request)
    first.store()
    assert [store.store.stats().written for store in first.stores] == [3, 3]
    first.close()
    second = Server(stages(not written), tmp_path, slab, of_stores)
    tokens = PROMPT + PROMPT[:9]
    second.fetch(tokens)
    request = second.manager.admit_request(tokens)
    assert request.num_hit == 24
    cold = second.runner.alone(tokens)
    logits = [second.step(request, 1)]
    if not written:  # of the rows of 25 tokens the last alone is there
        (rows,) = second.runner.live(second.cache, request)["draft"]
        assert rows.any(-1).tolist() == [[False] * 5 + [True]] * 3
    logits = np.concatenate([*logits, *(second.step(request, count) for count in (4, 9))])
    np.testing.assert_array_equal(logits.view(np.uint32), cold.logits[24:].view(np.uint32))
    assert_same_bytes(second.runner.live(second.cache, request), cold.live)
    second.close()


@pytest.mark.parametrize("drafts", [False, True])
def test_what_a_host_hands_over_is_a_hit_of_one_that_drafts_and_the_reverse(drafts):
    """`drafts`: whether the host that goes on does."""
    sender, taker = Prefill(stages(not drafts)), Prefill(stages(drafts))
    tokens = PROMPT + PROMPT[:9]
    with sender.transport, taker.transport:
        for each in (sender, taker):
            each.begin("weights")
        taker.transport._pages.memories[0][1:] = 0xEE  # of what was there before
        request = sender.manager.admit_request(PROMPT)
        assert all(sender.step(request, 8) for _ in range(3))
        sender.driver.export(request)
        sender.manager.release_request(request)
        ((_, data),) = sender.send()
        arrival = taker.driver.receive(data, taker.transport.connect(sender.metadata), tokens)
        while not arrival.is_over:
            taker.send()
        assert arrival.failure is None and arrival.records == 4
        # What the longer record has more is zeros here, or was left there.
        (state,) = [node.snapshot.host for node in taker.manager.cache.tree.nodes.published.values() if node.snapshot]
        record, pages = snapshot_record(stages(False).layout).bytes, np.asarray(taker.host.pages)[list(state)]
        assert not pages.ravel()[record:].any() and pages.ravel()[:record].any()
        request = taker.manager.admit_remote(arrival)
        assert request.num_hit == 24
        cold = taker.runner.alone(tokens)
        for start, count in ((24, 1), (25, 4), (29, 9)):
            plan = taker.manager.plan_step([(request, count)], shape=taker.runner.shape)
            taker.transfer()
            logits, taker.cache = taker.runner.run(taker.cache, taker.manager, plan)
            np.testing.assert_array_equal(
                logits[:count].view(np.uint32), cold.logits[start : start + count].view(np.uint32)
            )
        assert_same_bytes(taker.runner.live(taker.cache, request), cold.live)


def test_without_the_snapshot_there_is_no_hit(tmp_path):
    """What the test above relies on: blocks alone are nothing."""
    first = Server(runner(drafts=0), tmp_path, slab)
    request = first.manager.admit_request(PROMPT)
    first.step(request, 16)
    first.manager.release_request(request)
    first.store()
    first.close()
    (tmp_path / "snapshots").unlink()
    second = Server(runner(drafts=3), tmp_path, slab)
    second.fetch(PROMPT)
    assert second.manager.admit_request(PROMPT).num_hit == 0
    second.close()


def test_mixes_whose_prompts_another_host_computes_equal_lone_cold_runs():
    """More: python -m tests.serving.check --handed --mixes 200"""
    mixes = HandedMixes(runner(drafts=3), runner(drafts=0))
    try:
        for seed in range(3):
            mixes.run(seed)
    finally:
        mixes.close()
    for name in ("hits from another host", "records from another host", "streamed parts", "logits compared"):
        assert mixes.seen[name], name
    assert mixes.runner.executables == 1, "mixed and lone runs must share one executable"
