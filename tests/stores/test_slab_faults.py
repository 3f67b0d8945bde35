"""`SlabStore` while things fail: bad sectors, a disk that lost its cache, interrupts, forks, close at any moment."""

from __future__ import annotations

import errno
import os
import pathlib
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest

from dsv4_jax.errors import StoreError
from dsv4_jax.stores import SlabStore
from dsv4_jax.stores.slab.index import SlabIndex

from .. import native
from ..clock import PATIENCE
from .samples import FINGERPRINT, RECORD_BYTES, key, keys, make_slab, read, records

PREADV, PWRITEV = os.preadv, os.pwritev
RECORD = 4096 + 4096  # where records begin in a slab of 8
STRIDE = 8192


@pytest.fixture
def path(tmp_path) -> pathlib.Path:
    return tmp_path / "slab"


class BadSectors:
    """Reads that touch one of these slots fail, in the middle of what they move; `heal`: only reads of several."""

    def __init__(self, *slots: int, code: int = errno.EIO, heal: bool = False):
        self.slots, self.code, self.heal, self.alone = slots, code, heal, []

    def __call__(self, file, views, offset):
        size, slot = sum(len(view) for view in views), (offset - RECORD) // STRIDE
        touched = [
            bad for bad in self.slots if offset < RECORD + (bad + 1) * STRIDE and RECORD + bad * STRIDE < offset + size
        ]
        if offset >= RECORD and size <= STRIDE:
            self.alone.append(slot)
        if not touched or (self.heal and size <= STRIDE):
            return PREADV(file, views, offset)
        if before := RECORD + touched[0] * STRIDE - offset:
            data = os.pread(file, before, offset)
            for view in views:
                view[: len(data[: len(view)])], data = data[: len(view)], data[len(view) :]
            return before
        raise OSError(self.code, os.strerror(self.code))


@pytest.mark.parametrize("code", [errno.EIO, errno.ENODATA, errno.EBADMSG, errno.EILSEQ], ids=errno.errorcode.get)
def test_a_bad_sector_costs_its_own_record(path, monkeypatch, code):
    """Neighbours in one system call are served; the record is tried alone, then forgotten."""
    with make_slab(path) as store:
        store.write(keys(*range(8)), records(*range(8)))
        bad = BadSectors(2, 5, code=code)
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", bad)
            assert read(store, *range(8)) == [0, 1, 3, 4, 6, 7]
            assert {2, 5} <= set(bad.alone)
            assert store.stats().corrupted == 2 and store.stats().missed == 2
            assert store.contains(keys(1, 2, 5)).tolist() == [True, False, False]
            bad.alone.clear()
            assert read(store, *range(8)) == [0, 1, 3, 4, 6, 7] and not {2, 5} & set(bad.alone)
        assert store.write(keys(2, 5), records(2, 5)).all()  # the disk has remapped it
        assert read(store, *range(8)) == list(range(8)) and store.stats().evicted == 0


def test_what_can_be_read_alone_is_not_forgotten(path, monkeypatch):
    with make_slab(path) as store:
        store.write(keys(*range(8)), records(*range(8)))
        monkeypatch.setattr(os, "preadv", BadSectors(2, heal=True))
        assert read(store, *range(8)) == list(range(8)) and store.stats().corrupted == 0


def test_a_bad_sector_on_a_disk_that_cannot_be_written(path, monkeypatch):
    """The header cannot be blanked either; the record is a miss all the same, and the others are served."""

    def refuse(*call):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with make_slab(path) as store:
        store.write(keys(*range(4)), records(*range(4)))
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", BadSectors(1))
            patch.setattr(os, "pwritev", refuse)
            assert read(store, 0, 1, 2) == [0, 2] and not store.contains(keys(1)).any()
            with pytest.raises(StoreError, match="Read-only"):
                store.delete(keys(0))
            with pytest.raises(StoreError, match="Read-only"):
                store.write(keys(5), records(5))
        assert read(store, 0, 1, 2, 3) == [0, 2, 3]
        store.write(keys(5, 6, 7, 8), records(5, 6, 7, 8))
        assert read(store, 0, 2, 3, 5, 6, 7, 8) == [0, 2, 3, 5, 6, 7, 8]


def test_a_bad_sector_among_the_headers_costs_its_own_slots(path, monkeypatch):
    """A page of headers is 32 slots: they rest, the others serve."""
    small, bad = {"record_bytes": 24}, []

    def preadv(file, views, offset):
        if any(offset < end and start < offset + sum(map(len, views)) for start, end in bad):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return PREADV(file, views, offset)

    with make_slab(path, 96, **small) as store:
        store.write(keys(*range(80)), records(*range(80), record_bytes=24))
        kept = [i for i in range(80) if not 32 <= store.index.entries[key(i)].slot < 64]
    monkeypatch.setattr(os, "preadv", preadv)
    bad.append((4096 + 4096, 4096 + 8192))
    with make_slab(path, 96, **small) as store:
        assert read(store, *range(80)) == kept and store.stats().records == 48
        store.write(keys(*range(100, 164)), records(*range(100, 164), record_bytes=24))
        assert read(store, *range(100, 164)) == list(range(100, 164)) and store.stats().records == 64
    bad[:] = [(4096, 4 * 4096)]  # all of them: that is no bad sector
    with pytest.raises(StoreError, match=r"cannot open .*Input/output"):
        make_slab(path, 96, **small)
    bad.clear()
    with make_slab(path, 96, **small) as store:
        assert read(store, *range(100, 164)) == list(range(100, 164)) and store.stats().corrupted == 0


def test_other_errors_of_reading_are_the_callers(path, monkeypatch):
    def fail(*call):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with make_slab(path) as store:
        store.write(keys(0), records(0))
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", fail)
            with pytest.raises(StoreError, match=r"reading .* failed: Cannot allocate"):
                read(store, 0)
        assert read(store, 0) == [0]


def slots_of(store: SlabStore) -> list[int]:
    """Those of records, then the free ones."""
    return [entry.slot for entry in store.index.entries.values()] + store.index.free


def calls_of(store: SlabStore, i: int) -> list:
    return [
        lambda: store.contains(keys(i)),
        lambda: store.read_into(keys(i), np.zeros((1, RECORD_BYTES), np.uint8)),
        lambda: store.write(keys(i), records(i)),
        lambda: store.delete(keys(i)),
        lambda: store.flush(),
    ]


@pytest.mark.parametrize("sync", ["close", "write"])
def test_after_a_failed_sync_a_store_stays_failed_until_it_is_opened_again(path, monkeypatch, sync):
    """The kernel tells of lost writes once, and calls the pages clean: a second fsync would say that all is well."""

    def fail(file):
        monkeypatch.undo()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    store = make_slab(path, sync=sync)
    store.write(keys(0), records(0))
    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(StoreError, match=r"fdatasync of .* failed"):
        store.flush() if sync == "close" else store.write(keys(1), records(1))
    for call in calls_of(store, 0):
        with pytest.raises(StoreError, match=r"must be opened again.*fdatasync of .* failed"):
            call()
    with pytest.raises(StoreError, match="must be opened again"):
        store.close()  # what it promises did not come true
    store.close()
    with make_slab(path, sync=sync) as store:
        assert set(read(store, 0, 1)) >= {0}
        assert store.write(keys(2), records(2)).all()


def test_a_sync_that_overlaps_a_failed_one_fails_too(path, monkeypatch):
    """The kernel tells one caller only."""
    meet, told = threading.Barrier(2, timeout=PATIENCE), []

    def fail_once(file):
        if not told:
            told.append(1)
            meet.wait()  # the other thread is on its way
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def flush():
        try:
            store.flush()
        except StoreError as error:
            errors.append(str(error))

    errors: list[str] = []
    store = make_slab(path)
    monkeypatch.setattr(os, "fdatasync", fail_once)
    threads = [threading.Thread(target=flush) for _ in range(2)]
    for thread in threads:
        thread.start()
    meet.wait()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(errors) == 2
    with pytest.raises(StoreError):
        store.close()


def test_close_that_was_interrupted_can_be_finished(path, monkeypatch):
    def interrupt(*call):
        raise KeyboardInterrupt

    store = make_slab(path)
    store.write(keys(0), records(0))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Condition, "wait_for", interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.close()
        for call in calls_of(store, 0):
            with pytest.raises(StoreError):
                call()
    store.close()
    store = make_slab(path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.close()
    store.close()
    with make_slab(path) as store:
        assert read(store, 0) == [0]


def test_every_close_returns_when_the_file_is_let_go(path, monkeypatch):
    """Of two, the second too: whoever closed may open again."""
    started, go = threading.Event(), threading.Event()

    def slow(file):
        started.set()
        assert go.wait(PATIENCE)

    store = make_slab(path)
    monkeypatch.setattr(os, "fdatasync", slow)
    closers = [threading.Thread(target=store.close) for _ in range(2)]
    for closer in closers:
        closer.start()
    assert started.wait(PATIENCE)
    closers[0].join(0.05), closers[1].join(0.05)
    assert closers[0].is_alive() and closers[1].is_alive()
    go.set()
    for closer in closers:
        closer.join(PATIENCE)
    make_slab(path).close()


def test_close_in_the_middle_of_calls(path):
    """Every call ends as it should or is refused; nothing that a call reported is lost."""
    store, done, errors = make_slab(path, 64), set(), []
    started = threading.Barrier(4, timeout=PATIENCE)

    def work(worker: int) -> None:
        started.wait()
        try:
            for i in range(worker * 1000, worker * 1000 + 16):
                store.write(keys(i), records(i))
                done.add(i)
                assert read(store, i) == [i]
        except StoreError:
            pass
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    started.wait()
    store.close()
    for thread in threads:
        thread.join(PATIENCE)
    assert not errors
    with make_slab(path, 64) as again:
        assert set(read(again, *sorted(done))) == done and again.stats().corrupted == 0


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt, MemoryError, OSError(errno.EIO, "no"), OSError(errno.ENOSPC, "no")]
)
def test_faults_at_any_system_call(path, monkeypatch, error):
    """A thousand calls, of which a part is cut off in a system call. The books stay whole, nothing wrong is served."""
    rng = np.random.default_rng(0)
    small = {"record_bytes": 24}
    store, failed = make_slab(path, 6, **small), 0

    def faulty(call):
        def run(file, views, offset):
            if rng.random() < 0.1:
                if rng.random() < 0.5:
                    call(file, [views[0][: len(views[0]) // 2]], offset)
                raise error
            return call(file, views, offset)

        return run

    for _ in range(1000):
        ids = [int(i) for i in rng.choice(12, rng.integers(1, 5), replace=False)]
        name = ("write", "write", "read", "delete")[rng.integers(4)]
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", faulty(PREADV))
            patch.setattr(os, "pwritev", faulty(PWRITEV))
            try:
                if name == "write":
                    store.write(keys(*ids), records(*ids, record_bytes=24))
                else:
                    read(store, *ids) if name == "read" else store.delete(keys(*ids))
            except (KeyboardInterrupt, MemoryError, StoreError):
                failed += 1
        slots = slots_of(store)
        assert len(slots) == len(set(slots)) and store.active_calls == 0
        lost = 6 - len(slots)  # a slot whose header could not be blanked rests until the file is opened again
        assert lost == 0 or isinstance(error, OSError)
        if rng.random() < 0.05:
            store.close()
            store = make_slab(path, 6, **small)
            assert len(slots_of(store)) == 6
    assert failed > 100
    read(store, *range(12))
    store.close()


class FailsAt:
    """A `pwritev` whose n-th call, and all after it, fails; of the n-th a part may be written."""

    def __init__(self, n: int, error: BaseException, part: float = 0.0):
        self.left, self.error, self.part = n, error, part

    def __call__(self, file, views, offset):
        self.left -= 1
        if self.left >= 0:
            return PWRITEV(file, views, offset)
        if self.left == -1 and (data := b"".join(views)[: int(self.part * sum(map(len, views)))]):
            return os.pwrite(file, data, offset)
        raise self.error


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def on_reopening(store: SlabStore, path: pathlib.Path) -> set[bytes]:
    """What a store that is opened on this file now would have: of the process that goes on, or of a killed one."""
    copy = path.with_name("copy")
    shutil.copyfile(path, copy)
    with SlabStore(copy, record_bytes=24, max_records=store.max_records, fingerprint=FINGERPRINT) as again:
        shown = list(again.index.entries)
        assert again.read_into(shown, np.empty((len(shown), 24), np.uint8)).all()
    return set(shown)


@pytest.mark.parametrize("part", [0.0, 0.5])
@pytest.mark.parametrize("fail_at", range(6))
def test_a_record_whose_delete_failed_is_written_again_or_was_never_gone(path, monkeypatch, fail_at, part):
    """The headers of some are blank by then: nobody may be told that those are there."""
    ids = range(0, 12, 2)  # no neighbours: a call for each header
    with make_slab(path, 12, record_bytes=24) as store:
        store.write(keys(*range(12)), records(*range(12), record_bytes=24))
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", FailsAt(fail_at, FULL, part))
            with pytest.raises(StoreError):
                store.delete(keys(*ids))
        assert set(store.index.entries) == on_reopening(store, path) >= set(keys(*range(1, 12, 2)))
        assert len(store.index.entries) == 12 - fail_at - (part > 0)
        store.write(keys(*ids), records(*ids, record_bytes=24))
        assert sorted(slots_of(store)) == list(range(12))
    with make_slab(path, 12, record_bytes=24) as store:
        assert read(store, *range(12)) == list(range(12)) and store.stats().corrupted == 0


def test_a_write_that_finds_no_room_in_the_file_pushes_nothing_out(path, monkeypatch):
    """Its new slots come first, while what is to give way still has its header."""
    small = {"record_bytes": 24, "preallocate": False}
    with make_slab(path, 8, **small) as store:
        store.write(keys(*range(6)), records(*range(6), record_bytes=24))
        before = list(store.index.entries)
        for part in (0.0, 0.5):
            with monkeypatch.context() as patch:
                patch.setattr(os, "pwritev", FailsAt(0, FULL, part))
                with pytest.raises(StoreError, match="No space left"):
                    store.write(keys(*range(10, 18)), records(*range(10, 18), record_bytes=24))
            assert list(store.index.entries) == before and store.stats().evicted == 0
            assert on_reopening(store, path) == set(before)
        store.write(keys(10, 11, 12), records(10, 11, 12, record_bytes=24))
        assert read(store, *range(6), 10, 11, 12) == [1, 2, 3, 4, 5, 10, 11, 12] and store.stats().evicted == 1


@pytest.mark.parametrize("error", [FULL, OSError(errno.EIO, "no"), KeyboardInterrupt()], ids=["full", "EIO", "Ctrl-C"])
def test_whatever_has_failed_the_file_has_what_the_index_shows(path, monkeypatch, error):
    """And of what no call named nothing is gone but what gave way to records of that call."""
    rng, failed = np.random.default_rng(1), 0
    with make_slab(path, 12, record_bytes=24) as store:
        for _ in range(100):
            ids = [int(i) for i in rng.choice(24, rng.integers(1, 7), replace=False)]
            before = set(store.index.entries)
            with monkeypatch.context() as patch:
                patch.setattr(os, "pwritev", FailsAt(int(rng.integers(0, 7)), error, float(rng.integers(0, 3)) / 2))
                try:
                    if rng.random() < 0.6:
                        store.write(keys(*ids), records(*ids, record_bytes=24))
                        assert set(keys(*ids)) <= set(store.index.entries)
                    else:
                        store.delete(keys(*ids))
                        assert not set(keys(*ids)) & set(store.index.entries)
                except (KeyboardInterrupt, StoreError):
                    failed += 1
            shown = set(store.index.entries)
            assert shown <= on_reopening(store, path)
            assert len(before - shown - set(keys(*ids))) <= len(ids)
            assert sorted(slots_of(store)) == list(range(12))
    assert failed > 30


def test_headers_that_cannot_be_blanked_when_a_store_is_opened_are_when_their_slots_are_used(path, monkeypatch):
    with make_slab(path, 4, record_bytes=24) as store:
        store.write(keys(0, 1, 2, 3), records(0, 1, 2, 3, record_bytes=24))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", FailsAt(0, FULL))
        store = make_slab(path, 4, record_bytes=24, fingerprint="layout B")
    with store:
        assert store.stats().foreign == 4 and read(store, 0) == [] and store.index.stale == {0, 1, 2, 3}
        store.write(keys(0), records(0, record_bytes=24))
        assert len(store.index.stale) == 3
    with make_slab(path, 4, record_bytes=24, fingerprint="layout B") as store:
        assert read(store, 0) == [0] and store.stats().foreign == 3
    with make_slab(path, 4, record_bytes=24, fingerprint="layout B") as store:
        assert read(store, 0) == [0] and store.stats().foreign == 0  # blank since


def test_an_interrupt_while_slots_are_taken_loses_none(path):
    """At every line of `SlabIndex.take`: what it has taken by then is free again, or still in the index."""

    def interrupt_at(line: int):
        def trace(frame, event, arg):
            if frame.f_code is not SlabIndex.take.__code__:
                return None

            def count(frame, event, arg):
                nonlocal line
                line -= event == "line"
                if not line and event == "line":
                    raise KeyboardInterrupt
                return count

            return count

        return trace

    small, before, line = {"record_bytes": 24}, sys.gettrace(), 0
    interrupted = True
    while interrupted:
        line += 1
        with make_slab(path, 4, **small) as store:
            store.write(keys(0, 1, 2), records(0, 1, 2, record_bytes=24))
            sys.settrace(interrupt_at(line))
            try:
                store.write(keys(1, 7, 8), records(1, 7, 8, record_bytes=24))  # one free slot, one eviction
                interrupted = False
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(before)
            slots = sorted(slots_of(store))
            assert slots == [0, 1, 2, 3], line
        path.unlink()
    assert line > 8


FORK = """
import os, signal, sys, time
import numpy as np
from dsv4_jax.errors import StoreBusyError
from dsv4_jax.stores import AsyncStore, ObjectStore
from tests.stores.samples import *

path = sys.argv[1]
slab = make_slab(path)
slab.write(keys(0), records(0))
stores = [slab, AsyncStore(make_slab(path + "2"))]
if sys.argv[2] == "objects":
    stores.append(ObjectStore({"driver": "memory"}, record_bytes=RECORD_BYTES, fingerprint=FINGERPRINT))
slab._lock.acquire()  # as if another thread were in the middle of a call
stores[1]._change.acquire()
up, down = os.pipe(), os.pipe()
child = os.fork()
if not child:
    signal.alarm(300)
    buffer = np.zeros((1, RECORD_BYTES), np.uint8)
    for store in stores:
        for call in (lambda: store.contains(keys(0)), lambda: store.read_into(keys(0), buffer),
                     lambda: store.write(keys(1), records(1)), lambda: store.delete(keys(0)), lambda: store.flush()):
            try:
                call()
            except StoreBusyError as error:
                assert "fork" in str(error), error
            else:
                raise SystemExit(3)
        store.close()
    os.write(up[1], b"x")
    os.read(down[0], 1)
    sys.exit(0)  # with what runs at exit
slab._lock.release()
stores[1]._change.release()
assert os.read(up[0], 1) == b"x"
assert read(slab, 0) == [0] and slab.write(keys(1), records(1)).all() and slab.contains(keys(0)).all()
assert stores[1].write(keys(1), records(1)).result().all()
try:
    make_slab(path)  # the child's close let nothing go
except StoreBusyError:
    pass
else:
    raise SystemExit(4)
for store in stores:
    store.close()
make_slab(path).close()  # with the child still there
os.write(down[1], b"x")
assert os.waitpid(child, 0)[1] == 0
print("ok")
"""


@pytest.mark.parametrize("which", ["slab", "objects"])
def test_a_forked_child_is_refused_and_harms_nothing(path, which):
    if which == "objects":
        pytest.importorskip("tensorstore")
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK, str(path), which]
    result = subprocess.run(command, cwd=native.ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert (result.returncode, result.stdout) == (0, "ok\n"), result.stderr


def test_a_killed_parents_file_is_free_though_its_child_lives(path):
    """A child has the parent's open files, and with them its lock."""
    code = """
import os, signal, sys
from tests.stores.samples import *
store = make_slab(sys.argv[1])
store.write(keys(0), records(0))
if not os.fork():
    print(os.getpid(), flush=True)
    os.close(1)
    signal.pause()
os.kill(os.getpid(), signal.SIGKILL)
"""
    result = subprocess.run(
        [sys.executable, "-c", code, str(path)], cwd=native.ROOT, stdout=subprocess.PIPE, timeout=PATIENCE
    )
    child = int(result.stdout)
    try:
        with make_slab(path) as store:
            assert read(store, 0) == [0]
    finally:
        os.kill(child, 9)


def test_a_store_that_is_dropped_lets_go_of_its_file(path):
    make_slab(path).write(keys(0), records(0))
    with make_slab(path) as store:
        assert read(store, 0) == [0] and store.contains([key(0)]).all()
