"""`AsyncStore`: order per key, back-pressure, errors in futures, nothing accepted is lost."""

from __future__ import annotations

import collections
import gc
import re
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest

from dsv4_jax.errors import ShapeError, StoreBusyError, StoreError, StoreFormatError
from dsv4_jax.stores import AsyncStore, MooncakeStore, SlabStore, StoreStats, async_store

from ..clock import PATIENCE
from .samples import FINGERPRINT, RECORD_BYTES, key, keys, read, records


class Gate:
    """A store that does nothing until it is let: every call waits for `open`, and is noted."""

    record_bytes, key_bytes = RECORD_BYTES, 32

    def __init__(self, fail: frozenset[bytes] = frozenset()):
        self.open, self.done, self.running, self.peak, self.fail = threading.Event(), [], 0, 0, fail
        self.closed = False
        self.started = threading.Semaphore(0)
        self.lock = threading.Lock()

    def _call(self, name: str, keys) -> np.ndarray:
        with self.lock:
            self.running += 1
            self.peak = max(self.peak, self.running)
        self.started.release()
        assert self.open.wait(PATIENCE)
        with self.lock:
            self.running -= 1
            self.done.append((name, tuple(keys)))
        if self.fail & set(keys):
            raise StoreError("the disk is on fire")
        return np.ones(len(keys), bool)

    def contains(self, keys):
        return self._call("contains", keys)

    def read_into(self, keys, buffers):
        return self._call("read", keys)

    def write(self, keys, records):
        return self._call("write", keys)

    def delete(self, keys):
        return self._call("delete", keys)

    def stats(self):
        return StoreStats()

    def flush(self):
        pass

    def close(self):
        self.closed = True


def buffers(n: int) -> np.ndarray:
    return np.zeros((n, RECORD_BYTES), np.uint8)


def test_calls_on_a_key_run_in_order_and_others_pass():
    gate = Gate()
    with AsyncStore(gate, workers=4) as store:
        futures = [
            store.write(keys(1), records(1)),
            store.delete(keys(1)),
            store.write(keys(1, 2), records(1, 2)),
            store.read_into(keys(2), buffers(1)),
            store.contains(keys(3)),
            store.delete(keys(2, 1)),
        ]
        assert gate.started.acquire(timeout=PATIENCE) and gate.started.acquire(timeout=PATIENCE)
        assert not any(future.done() for future in futures)
        gate.open.set()
        store.drain(PATIENCE)
        assert all(future.done() for future in futures)
        assert [call for call in gate.done if call[1] != (key(3),)] == [
            ("write", (key(1),)),
            ("delete", (key(1),)),
            ("write", (key(1), key(2))),
            ("read", (key(2),)),
            ("delete", (key(2), key(1))),
        ]
        assert gate.peak == 2  # key 3's call ran beside key 1's; nothing else could


def test_order_per_key_over_a_long_random_trace(tmp_path):
    """What each key holds, and what each call answers, is as if the calls had been made one after another."""
    rng = np.random.default_rng(0)
    present: set[int] = set()
    expected, futures, targets = [], [], []
    inner = SlabStore(tmp_path / "slab", record_bytes=RECORD_BYTES, max_records=16, fingerprint=FINGERPRINT)
    with AsyncStore(inner, workers=4, queue_bytes=10 * RECORD_BYTES) as store:
        for _ in range(2000):
            ids = [int(i) for i in rng.choice(16, rng.integers(1, 4), replace=False)]
            name = ("write", "read", "delete", "contains")[rng.integers(4)]
            known = [i in present for i in ids]
            if name == "read":
                target = buffers(len(ids))
                futures.append(store.read_into(keys(*ids), target))
                targets.append((futures[-1], ids, target))
            elif name == "write":
                futures.append(store.write(keys(*ids), records(*ids)))
                present |= set(ids)
            else:
                futures.append(getattr(store, name)(keys(*ids)))
                present -= set(ids) if name == "delete" else set()
            expected.append([not flag for flag in known] if name == "write" else known)
        assert [future.result(PATIENCE).tolist() for future in futures] == expected
        for future, ids, target in targets:
            good = future.result()
            np.testing.assert_array_equal(target[good], records(*ids)[good])
        assert store.pending_bytes == 0 and read(inner, *sorted(present)) == sorted(present)
        assert inner.stats().corrupted == 0


def test_back_pressure():
    gate = Gate()
    store = AsyncStore(gate, workers=1, queue_bytes=3 * RECORD_BYTES)
    first = store.write(keys(1, 2), records(1, 2))
    with pytest.raises(StoreBusyError, match=r"10000 bytes did not fit within 0.01 s: 10000 of 15000"):
        store.write(keys(3, 4), records(3, 4), timeout=0.01)
    assert store.pending_bytes == 2 * RECORD_BYTES
    store.read_into(keys(5), buffers(1), timeout=0)  # this fits
    store.delete(keys(6), timeout=0)  # and this has no bytes
    with pytest.raises(StoreBusyError, match="3 calls not done"):
        store.drain(0.01)
    waiting = threading.Thread(target=lambda: store.write(keys(7), records(7)))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    gate.open.set()
    waiting.join(PATIENCE)
    assert first.result(PATIENCE).all()
    store.drain(PATIENCE)
    assert (
        store.write(keys(*range(8)), records(*range(8)), timeout=0).result(PATIENCE).all()
    )  # larger than the queue, alone
    store.close()
    assert ("write", tuple(keys(3, 4))) not in gate.done and ("write", tuple(keys(7))) in gate.done


def test_errors_belong_to_their_call():
    gate = Gate(fail=frozenset(keys(1)))
    gate.open.set()
    with AsyncStore(gate) as store:
        bad, good = store.write(keys(1), records(1)), store.write(keys(2), records(2))
        later = store.delete(keys(2))
        with pytest.raises(StoreError, match="on fire"):
            bad.result(PATIENCE)
        assert good.result(PATIENCE).all() and later.result(PATIENCE).all()
        with pytest.raises(StoreError, match="on fire"):  # the worker lives, and so does the key
            store.delete(keys(1, 3)).result(PATIENCE)
        with pytest.raises(StoreFormatError):
            store.write([b"short"], records(1))
        with pytest.raises(ShapeError):
            store.read_into(keys(1), [bytes(RECORD_BYTES)])
        assert store.pending_bytes == 0


def test_a_call_that_failed_keeps_its_records_no_longer_than_its_future():
    """Not until the collector of cycles comes by: they may be most of the memory."""
    gate = Gate(fail=frozenset([key(1)]))
    gate.open.set()
    with AsyncStore(gate, workers=1) as store:
        given = records(1).copy()
        kept = weakref.ref(given)
        future = store.write([key(1)], given)
        assert "on fire" in str(future.exception(PATIENCE))
        store.drain(PATIENCE)
        gc.disable()
        try:
            del given, future
            assert kept() is None
        finally:
            gc.enable()


def test_close_finishes_what_was_accepted_and_accepts_no_more():
    gate = Gate()
    store = AsyncStore(gate, workers=2, queue_bytes=RECORD_BYTES)
    futures = [store.write(keys(1), records(1))] + [store.delete(keys(1)) for _ in range(20)]
    assert not futures[-1].cancel()
    refused = []

    def too_late() -> None:
        try:
            store.write(keys(2), records(2))  # waits for room, and is told that none will come
        except StoreError as error:
            refused.append(error)

    waiting, closing = threading.Thread(target=too_late), threading.Thread(target=store.close)
    waiting.start()
    closing.start()
    waiting.join(PATIENCE)
    assert refused and closing.is_alive() and not gate.closed
    gate.open.set()
    closing.join(PATIENCE)
    assert gate.closed and all(future.result(0).all() for future in futures) and len(gate.done) == 21
    with pytest.raises(StoreError):
        store.contains(keys(1))
    store.close()


def test_a_callback_may_make_calls():
    gate = Gate()
    gate.open.set()
    made = []
    with AsyncStore(gate, workers=1, queue_bytes=RECORD_BYTES) as store:
        again = threading.Event()

        def callback(_):
            made.append(store.write(keys(2), records(2)))
            again.set()

        gate.open.clear()
        store.write(keys(1), records(1)).add_done_callback(callback)
        gate.open.set()
        assert again.wait(PATIENCE)
    assert made[0].result(0).all()


def test_nothing_accepted_is_lost_at_interpreter_exit(tmp_path):
    code = f"""
import numpy as np
from dsv4_jax.stores import AsyncStore, SlabStore
from tests.stores.samples import *
inner = SlabStore({str(tmp_path / "slab")!r}, record_bytes=RECORD_BYTES, max_records=64, fingerprint=FINGERPRINT)
store = AsyncStore(inner)
for i in range(64):
    store.write(keys(i), records(i))
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)
    with SlabStore(tmp_path / "slab", record_bytes=RECORD_BYTES, max_records=64, fingerprint=FINGERPRINT) as store:
        assert read(store, *range(64)) == list(range(64))


HANGS = {
    "a store": """
class Hangs:
    record_bytes, key_bytes = RECORD_BYTES, 32
    def write(self, *_):
        threading.Event().wait()
inner = Hangs()
""",
    "Mooncake's client": """
class Client:
    def register_buffer(self, *_):
        return 0
    def batch_is_exist(self, *_):
        threading.Event().wait()
inner = MooncakeStore(Client(), record_bytes=RECORD_BYTES, fingerprint=FINGERPRINT)
""",
    "a bucket": """
import socket
silent = socket.create_server(("127.0.0.1", 0))  # which takes connections and says nothing
url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
inner = ObjectStore({"driver": "http", "base_url": url}, record_bytes=RECORD_BYTES, fingerprint=FINGERPRINT)
""",
}


@pytest.mark.parametrize("what", HANGS)
def test_the_interpreter_ends_though_it_hangs(what):
    """Within the time that was given, and it says that something is lost."""
    if what == "a bucket":
        pytest.importorskip("tensorstore")
    code = f"""
import threading
from dsv4_jax.stores import AsyncStore, MooncakeStore, ObjectStore
from tests.stores.samples import *
{HANGS[what]}
store, other = AsyncStore(inner, exit_timeout=0.3), AsyncStore(inner, exit_timeout=0.3)
for i in range(20):
    store.write(keys(i), records(i))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=25)
    assert re.search(r"hangs: \d+ calls are lost at exit", done.stderr), done.stderr


def test_a_call_that_hangs_holds_up_its_own_keys_only(monkeypatch):
    monkeypatch.setattr(async_store, "_STUCK", 0.02)
    gate, hanging = Gate(), threading.Event()
    gate.open.set()
    answer = gate._call

    def call(name, some):
        assert key(0) not in some or hanging.wait(PATIENCE)
        return answer(name, some)

    gate._call = call
    with AsyncStore(gate, workers=2) as store:
        stuck = [store.contains(keys(0, i)) for i in (0, 1)] + [store.read_into(keys(0), buffers(1))]
        more = [store.contains([key(0)]) for _ in range(20)]  # behind it, in no thread
        for i in range(2, 30):
            assert store.contains(keys(i)).result(PATIENCE).all()
        assert not any(each.done() for each in (*stuck, *more))
        with pytest.raises(StoreBusyError, match="23 calls not done"):
            store.drain(0.01)
        hanging.set()
        store.drain(PATIENCE)


@pytest.mark.parametrize("name", ["flush", "close"])
def test_what_ends_a_store_has_a_time(name):
    gate, goes_on = Gate(), threading.Event()
    setattr(gate, name, lambda: goes_on.wait(PATIENCE))
    store = AsyncStore(gate)
    gate.open.set()
    store.contains(keys(1)).result(PATIENCE)
    with pytest.raises(StoreBusyError, match=f"{name} has not ended after"):
        getattr(store, name)(0.02)
    goes_on.set()
    store.close(PATIENCE)


def test_stores_close_in_time(tmp_path):
    """Behind a call that hangs; when it has ended, the next close does it."""
    slab = SlabStore(tmp_path / "slab", record_bytes=RECORD_BYTES, max_records=4, fingerprint=FINGERPRINT)

    class Client:
        def register_buffer(self, *_):
            return 0

        unregister_buffer = register_buffer

    mooncake = MooncakeStore(Client(), record_bytes=RECORD_BYTES, fingerprint=FINGERPRINT)
    for store in (slab, mooncake):
        with store._lock, pytest.raises(StoreBusyError, match="has not ended after"):
            store.close(0.02)
        store.close(PATIENCE)
        with pytest.raises(StoreError, match="closed"):
            store.contains(keys(0))


def test_a_callback_that_ends_threads_ends_none_of_ours(monkeypatch):
    told = []
    monkeypatch.setattr(threading, "excepthook", lambda args: told.append(args.exc_type))
    gate = Gate()
    with AsyncStore(gate, workers=1) as store:

        def leave(_):
            raise SystemExit

        store.delete(keys(1)).add_done_callback(leave)
        gate.open.set()
        store.drain(PATIENCE)
        assert store.delete(keys(1)).result(PATIENCE).all()
    assert told == [SystemExit]


@pytest.mark.parametrize("name", ["drain", "flush", "close"])
def test_a_callback_that_would_wait_for_itself_is_told(name):
    gate, errors = Gate(), []
    with AsyncStore(gate, workers=2) as store:

        def wait(_):
            try:
                getattr(store, name)()
            except StoreError as error:
                errors.append(str(error))

        store.delete(keys(1)).add_done_callback(wait)
        gate.open.set()
        store.drain(PATIENCE)
        assert store.delete(keys(1)).result(PATIENCE).all()
    assert len(errors) == 1 and "would wait for the call" in errors[0] and gate.closed


def test_close_that_was_cut_off_can_be_finished(monkeypatch):
    gate = Gate()
    store = AsyncStore(gate, workers=1)
    last = store.delete(keys(1))
    with pytest.raises(StoreBusyError, match=r"1 calls not done after 0\.01 s"):
        store.close(timeout=0.01)  # the store hangs
    with pytest.raises(StoreError):
        store.delete(keys(1))

    def interrupt(*_):
        raise KeyboardInterrupt

    gate.open.set()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "join", interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.close()
    assert last.result(0).all() and not gate.closed
    store.close()
    assert gate.closed


def test_every_close_returns_when_the_store_is_closed():
    gate = Gate()
    store = AsyncStore(gate, workers=1)
    store.delete(keys(1))
    closers = [threading.Thread(target=store.close) for _ in range(2)]
    for closer in closers:
        closer.start()
    closers[0].join(0.03), closers[1].join(0.03)
    assert closers[0].is_alive() and closers[1].is_alive()
    gate.open.set()
    for closer in closers:
        closer.join(PATIENCE)
    assert gate.closed


@pytest.mark.parametrize("where", ["ready", "last"])
def test_a_call_that_cannot_be_queued_was_not_accepted(where):
    gate = Gate()

    class Deque(collections.deque):
        def append(self, call):
            super().append(call)
            raise MemoryError

    class Dict(dict):
        def update(self, *items):
            super().update(*items)
            raise MemoryError

    with AsyncStore(gate, workers=1) as store:
        first = store.write(keys(1), records(1))
        assert gate.started.acquire(timeout=PATIENCE)
        there = getattr(store.queue, where)
        setattr(store.queue, where, Deque(there) if where == "ready" else Dict(there))
        with pytest.raises(MemoryError):
            store.write(keys(2) if where == "ready" else keys(1, 2), records(1, 2)[: 2 - (where == "ready")])
        setattr(store.queue, where, type(there)(getattr(store.queue, where)))
        assert store.pending_bytes == RECORD_BYTES
        later = store.delete(keys(1, 2))
        gate.open.set()
        assert first.result(PATIENCE).all() and later.result(PATIENCE).all()
        store.drain(PATIENCE)
    assert [name for name, _ in gate.done] == ["write", "delete"]


def test_threads_that_cannot_be_started(monkeypatch):
    start, started = threading.Thread.start, []

    def few(thread):
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        start(thread)
        started.append(thread)

    monkeypatch.setattr(threading.Thread, "start", few)
    with pytest.raises(StoreError, match="cannot start 4 threads"):
        AsyncStore(Gate())
    for thread in started:
        thread.join(PATIENCE)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    "bad",
    [
        {"workers": 0},
        {"queue_bytes": 0},
        {"workers": 10**9},
        {"workers": 2.0},
        {"workers": True},
        {"workers": None},
        {"queue_bytes": "1"},
        {"queue_bytes": 1e9},
        {"queue_bytes": 10**5000},
    ],
)
def test_impossible_settings(bad):
    with pytest.raises(ShapeError, match=next(iter(bad))):
        AsyncStore(Gate(), **bad)
