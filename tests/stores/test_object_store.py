"""`ObjectStore` beyond the contract: damaged, foreign and misplaced objects, several owners, errors."""

from __future__ import annotations

import hashlib
import http.server
import os
import pathlib
import subprocess
import sys
import threading
import time
import tracemalloc

import numpy as np
import pytest

from dsv4_jax.errors import StoreBusyError, StoreError, StoreFormatError
from dsv4_jax.stores import ObjectStore
from dsv4_jax.stores.record_header import HEADER_BYTES

from ..clock import PATIENCE, FakeClock
from .conformance import ROOT
from .samples import FINGERPRINT, RECORD_BYTES, key, keys, of_version, read, records

tensorstore = pytest.importorskip("tensorstore")


def make(path, fingerprint: str = FINGERPRINT, **options) -> ObjectStore:
    spec = {"driver": "file", "path": f"{path}/kv/"}
    return ObjectStore(spec, **{"record_bytes": RECORD_BYTES, "fingerprint": fingerprint, **options})


def damage_flip(value: bytearray) -> bytes:
    value[3000] ^= 1
    return value


DAMAGE = {
    "a flipped bit": damage_flip,
    "cut short": lambda value: value[:-1],
    "cut within the header": lambda value: value[:100],
    "empty": lambda value: b"",
    "too long": lambda value: value + b"x",
    "a damaged header": lambda value: b"X" + value[1:],
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_object_is_refused_counted_and_replaced(tmp_path, how):
    with make(tmp_path) as store:
        store.write(keys(0, 1), records(0, 1))
        file = tmp_path / "kv" / key(0).hex()
        file.write_bytes(DAMAGE[how](bytearray(file.read_bytes())))
        assert read(store, 0, 1) == [1]
        assert store.stats().corrupted == 1 and store.stats().foreign == 0
        assert not file.exists() and store.contains(keys(0, 1)).tolist() == [False, True]
        assert store.write(keys(0), records(0)).all() and read(store, 0, 1) == [0, 1]


def test_an_object_under_another_name_is_refused(tmp_path):
    with make(tmp_path) as store:
        store.write(keys(0), records(0))
        (tmp_path / "kv" / key(1).hex()).write_bytes((tmp_path / "kv" / key(0).hex()).read_bytes())
        assert store.contains(keys(0, 1)).tolist() == [True, False]
        assert read(store, 0, 1) == [0] and store.stats().corrupted == 1


def test_another_layouts_object_is_refused_counted_and_left_until_replaced(tmp_path):
    with make(tmp_path) as mine, make(tmp_path, "layout B") as theirs:
        theirs.write(keys(0, 1), records(0, 1))
        assert mine.contains(keys(0)).tolist() == [False]
        assert read(mine, 0, 1) == [] and mine.stats().foreign == 2 and mine.stats().corrupted == 0
        assert read(theirs, 0, 1) == [0, 1]
        assert mine.write(keys(0), records(0)).all()
        assert read(mine, 0) == [0] and read(theirs, 0, 1) == [1] and theirs.stats().foreign == 1


@pytest.mark.parametrize("size", [24, RECORD_BYTES - 8, RECORD_BYTES + 8, 3 * RECORD_BYTES])
def test_another_layouts_object_of_another_size_is_foreign_too(tmp_path, size):
    with make(tmp_path) as mine, make(tmp_path, "layout B", record_bytes=size) as theirs:
        theirs.write(keys(0), records(0, record_bytes=size))
        mine.write(keys(1), records(1))
        assert read(mine, 0, 1) == [1] and (mine.stats().foreign, mine.stats().corrupted) == (1, 0)
        assert read(theirs, 0) == [0]


@pytest.mark.parametrize("more", [0, 1000], ids=["of this size", "of a longer record"])
def test_objects_of_another_version_are_refused_with_one_warning_and_left_until_replaced(tmp_path, more):
    with make(tmp_path) as mine, make(tmp_path, record_bytes=RECORD_BYTES + more) as theirs:
        theirs.write(keys(0, 1), records(0, 1, record_bytes=RECORD_BYTES + more))
        for i in (0, 1):
            file = tmp_path / "kv" / key(i).hex()
            value = file.read_bytes()
            file.write_bytes(of_version(value[:HEADER_BYTES], 0) + value[HEADER_BYTES:])
        assert not mine.contains(keys(0, 1)).any()
        with pytest.warns(RuntimeWarning, match="objects of version 1, only version 2 can be read") as warned:
            assert read(mine, 0) == [] and read(mine, 0, 1) == []
        assert len(warned) == 1 and "\n" not in str(warned[0].message)
        assert (mine.stats().foreign, mine.stats().corrupted) == (3, 0) and (tmp_path / "kv" / key(1).hex()).exists()
        assert mine.write(keys(0), records(0)).all() and read(mine, 0) == [0]


def test_several_owners_of_one_place(tmp_path):
    with make(tmp_path) as a, make(tmp_path) as b:
        a.write(keys(0), records(0))
        assert b.write(keys(0, 1), records(0, 1)).tolist() == [False, True]
        assert read(a, 0, 1) == [0, 1] and a.stats().records == -1
        b.delete(keys(0))
        assert read(a, 0, 1) == [1]


def test_errors_are_typed(tmp_path):
    with pytest.raises(StoreError, match="cannot open the key-value store"):
        ObjectStore({"driver": "no such driver"}, record_bytes=8, fingerprint="x")
    (tmp_path / "kv").write_text("in the way")
    store = make(tmp_path)
    with pytest.raises(StoreError, match="failed"):
        store.write(keys(0), records(0))
    (tmp_path / "kv").unlink()
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / key(0).hex()).symlink_to(key(0).hex())  # a loop
    for call in (
        lambda: store.read_into(keys(0), np.zeros((1, RECORD_BYTES), np.uint8)),
        lambda: store.contains(keys(0)),
    ):
        with pytest.raises(StoreError, match="read failed"):
            call()
    for bad in ({"record_bytes": 0}, {"key_bytes": 49}, {"in_flight": 0}):
        with pytest.raises(StoreFormatError):
            make(tmp_path, **bad)


WRITER = """
import sys
from dsv4_jax.stores import ObjectStore
from tests.stores.samples import FINGERPRINT, keys, records

size = 1 << 24
store = ObjectStore({"driver": "file", "path": sys.argv[1]}, record_bytes=size, fingerprint=FINGERPRINT)
while True:
    store.write(keys(0), records(0, record_bytes=size))
    store.delete(keys(0))
"""


def locks(folder) -> set[str]:
    return {path.name for path in folder.rglob("*.__lock")}


def test_what_a_killed_writer_left_is_removed_when_the_place_is_opened_again(tmp_path):
    folder = tmp_path / "kv"
    folder.mkdir()
    until = time.monotonic() + PATIENCE
    while not locks(folder) and time.monotonic() < until:
        writer = subprocess.Popen([sys.executable, "-c", WRITER, f"{folder}/"], cwd=ROOT)
        while not locks(folder) and time.monotonic() < until:
            time.sleep(1e-3)
        writer.kill()
        writer.wait()
    assert locks(folder) == {f"{key(0).hex()}.__lock"}
    with make(tmp_path):
        assert locks(folder)  # it may be of somebody who is writing
    os.utime(folder / f"{key(0).hex()}.__lock", (0, 0))
    with make(tmp_path):
        assert not locks(folder)


@pytest.mark.parametrize("slash", ["/", ""])
@pytest.mark.parametrize("driver", ["file", "ocdbt"])
def test_only_what_writers_left_is_removed(tmp_path, driver, slash):
    """Not what they wrote, nor what others have there. In OCDBT it lies under names of its own."""
    path = f"{tmp_path}/kv{slash}"
    spec = {"driver": "file", "path": path} if driver == "file" else {"driver": "ocdbt", "base": f"file://{path}/"}
    options = {"record_bytes": RECORD_BYTES, "fingerprint": FINGERPRINT}
    with ObjectStore(spec, **options) as store:
        store.write(keys(0), records(0))
    left = [f"{path}{key(i).hex()}.__lock" for i in (0, 1)]
    if driver == "ocdbt":
        folder = tmp_path / "kv"
        left = [f"{folder}/manifest.ocdbt.__lock", f"{folder}/d/{'0' * 32}.__lock"]
    others = [tmp_path / "another.__lock", tmp_path / "kv" / "notes.__lock", tmp_path / "kv" / "d" / "notes.__lock"]
    for other in others:
        other.parent.mkdir(exist_ok=True)
    for name in [*left, *others]:
        pathlib.Path(name).write_bytes(b"half a record")
        os.utime(name, (0, 0))
    with ObjectStore(spec, **options) as store:
        assert read(store, 0, 1) == [0]
        assert not any(os.path.exists(name) for name in left) and all(map(os.path.exists, others))


def test_a_writer_that_hangs_does_not_keep_others_from_opening(tmp_path, monkeypatch):
    clock, kv = FakeClock(), tmp_path / "kv"
    kv.mkdir()
    (kv / f"{key(0).hex()}.__lock").touch()
    os.utime(kv / f"{key(0).hex()}.__lock", (0, 0))
    opened = tensorstore.KvStore.open({"driver": "file", "path": f"{kv}/"}).result()
    stuck = Hanging(clock)
    monkeypatch.setattr(stuck, "read", opened.read), monkeypatch.setattr(stuck, "spec", opened.spec, raising=False)
    promise, future = tensorstore.Promise.new()
    promise.set_result(stuck)
    monkeypatch.setattr(tensorstore.KvStore, "open", lambda spec: future)
    make(tmp_path, deadline=PATIENCE, clock=clock).close()
    assert len(stuck.futures) == 1 and stuck.futures[0].cancelled


class Hanging:
    """A KvStore that never answers. Whoever waits for it finds that the time has passed."""

    def __init__(self, clock: FakeClock):
        self.clock, self.futures = clock, []

    def _never(self, *_, **__):
        self.futures.append(Unanswered(self.clock))
        return self.futures[-1]

    read = write = _never


class Unanswered:
    def __init__(self, clock: FakeClock):
        self.clock, self.cancelled = clock, False

    def result(self, timeout: float):
        self.clock.advance(timeout)
        raise TimeoutError

    def cancel(self) -> None:
        self.cancelled = True


def calls_of(store: ObjectStore) -> dict:
    return {
        "contains": lambda: store.contains(keys(0, 1)),
        "read": lambda: read(store, 0, 1),
        "write": lambda: store.write(keys(0, 1), records(0, 1)),
        "delete": lambda: store.delete(keys(0, 1)),
    }


@pytest.mark.parametrize("name", ["contains", "read", "write", "delete"])
def test_calls_have_a_deadline(tmp_path, name):
    clock = FakeClock()
    with make(tmp_path, deadline=PATIENCE, clock=clock) as store:
        store.write(keys(0), records(0))
        there, store.kv = store.kv, Hanging(clock)
        before = clock()
        with pytest.raises(StoreBusyError, match=rf"did not answer within {PATIENCE}\.0 s") as caught:
            calls_of(store)[name]()
        assert clock() - before == PATIENCE and isinstance(caught.value, TimeoutError)
        assert len(store.kv.futures) == 2 and all(future.cancelled for future in store.kv.futures)
        store.kv = there
        assert read(store, 0) == [0]


class Half(Hanging):
    """Each answer takes half of the deadline."""

    def __init__(self, clock: FakeClock, kv):
        self.clock, self.kv, self.waits = clock, kv, []

    def read(self, *args, **options):
        return Late(self, self.kv.read(*args, **options))


class Late:
    def __init__(self, owner: Half, future):
        self.owner, self.future = owner, future

    def result(self, timeout: float):
        self.owner.waits.append(timeout)
        self.owner.clock.advance(min(timeout, PATIENCE / 2))
        if timeout <= 0:
            raise TimeoutError
        return self.future.result()

    def cancel(self) -> None:
        self.future.cancel()


def test_a_deadline_is_of_the_whole_call(tmp_path):
    """Not of each object, and not of each batch of them."""
    clock = FakeClock()
    with make(tmp_path, deadline=PATIENCE, patience=PATIENCE, clock=clock, in_flight=1) as store:
        store.write(keys(0, 1, 2), records(0, 1, 2))
        store.kv = slow = Half(clock, store.kv)
        assert read(store, 0, 1) == [0, 1]
        slow.waits.clear()
        with pytest.raises(StoreBusyError):
            read(store, 0, 1, 2)
        assert slow.waits == [PATIENCE, PATIENCE / 2, 0]


def test_opening_has_a_deadline(tmp_path, monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(tensorstore.KvStore, "open", Hanging(clock).read)
    with pytest.raises(StoreBusyError, match="cannot open the key-value store"):
        make(tmp_path, deadline=7.5)
    assert clock() == FakeClock()() + 7.5


@pytest.mark.parametrize("driver", ["file", "memory", "ocdbt"])
def test_of_an_object_no_more_is_read_than_a_record_has(tmp_path, driver):
    """Whoever can put an object there could otherwise have any amount of memory taken."""
    path = {"file": {"path": f"{tmp_path}/"}, "ocdbt": {"base": f"file://{tmp_path}/"}, "memory": {}}[driver]
    with ObjectStore({"driver": driver, **path}, record_bytes=RECORD_BYTES, fingerprint=FINGERPRINT) as store:
        store.write(keys(0, 1), records(0, 1))
        value = store.kv.read(key(0).hex()).result().value
        store.kv.write(key(0).hex(), value + bytes(1 << 24)).result()
        tracemalloc.start()
        try:
            assert read(store, 0, 1) == [1]
            store.contains(keys(0, 1))
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()
        assert store.stats().corrupted == 1 and not store.contains(keys(0)).any()
        assert store.write(keys(0), records(0)).all() and read(store, 0, 1) == [0, 1]


@pytest.mark.parametrize("size", [0, 1, 127, 128, 129, 128 + RECORD_BYTES - 1])
def test_a_short_object_that_somebody_replaces_meanwhile_is_not_deleted(tmp_path, size):
    with make(tmp_path) as store:
        store.write(keys(0), records(0))
        file = tmp_path / "kv" / key(0).hex()
        good, kv = file.read_bytes(), store.kv
        file.write_bytes(good[:size])

        class Replaced:
            """Before its n-th read of this object somebody writes it whole."""

            reads = 0

            def read(self, name, **options):
                if self.reads == self.at:
                    file.unlink()
                    file.write_bytes(good)
                self.reads += 1
                return kv.read(name, **options)

            write = kv.write

        for at in (1, 2, 3):
            file.write_bytes(good[:size])
            store.kv = Replaced()
            store.kv.at = at
            assert read(store, 0) == []
            store.kv = kv
            assert read(store, 0) == [0], at
        file.write_bytes(good[:size])
        assert read(store, 0) == [] and not file.exists()


def test_an_object_that_cannot_be_read_costs_its_own_record(tmp_path):
    with make(tmp_path) as store:
        store.write(keys(0, 1), records(0, 1))
        (tmp_path / "kv" / key(2).hex()).symlink_to(key(2).hex())  # a loop
        assert read(store, 0, 2, 1, 3) == [0, 1]
        assert store.stats().missed == 2 and store.stats().corrupted == 0
        assert store.contains(keys(0, 2, 1, 3)).tolist() == [True, False, True, False]
        with pytest.raises(StoreError, match="read failed"):
            read(store, 2)


def test_what_is_no_file_costs_its_own_record(tmp_path):
    """Whoever opened a FIFO would wait for its other end, in a thread that others need."""
    with make(tmp_path, deadline=20) as store:
        store.write(keys(0, 1), records(0, 1))
        for i in range(2, 40):
            os.mkfifo(tmp_path / "kv" / key(i).hex())
        assert read(store, 0, *range(2, 40), 1) == [0, 1]
        assert store.contains(keys(0, 2)).tolist() == [True, False]
        with pytest.raises(StoreError, match="is no file"):
            read(store, 2)
        assert store.write(keys(2), records(2)).all() and read(store, 2, 3) == [2], "a record takes its place"


def test_an_object_that_hangs_costs_its_own_record(tmp_path):
    """Of a bucket that answers for all others: while it is asked for the first time, and not again for a while."""
    with make(tmp_path) as store:
        store.write(keys(*range(6)), records(*range(6)))
    asked, hangs = [], f"/{key(3).hex()}"

    class Bucket(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            asked.append(self.path)
            if self.path == hangs:
                goes_on.wait(PATIENCE)
            try:
                data = (tmp_path / "kv" / self.path[1:]).read_bytes()
            except OSError:
                data = None
            low, _, high = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
            part = b"" if data is None else data[int(low) : int(high or len(data)) + 1] if low else data[-int(high) :]
            self.send_response(404 if data is None else 206)
            if data is not None:
                start = int(low) if low else len(data) - len(part)
                self.send_header("Content-Range", f"bytes {start}-{start + len(part) - 1}/{len(data)}")
            self.send_header("Content-Length", str(len(part)))
            self.end_headers()
            self.wfile.write(part)

        def log_message(self, *_):
            pass

    goes_on = threading.Event()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Bucket)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    spec = {"driver": "http", "base_url": f"http://127.0.0.1:{server.server_port}/"}
    try:
        options = dict(record_bytes=RECORD_BYTES, fingerprint=FINGERPRINT, deadline=PATIENCE, patience=0.3)
        with ObjectStore(spec, **options) as store:
            assert read(store, 3, 0, 1, 2) == [0, 1, 2]
            assert store.contains(keys(4, 3, 5)).tolist() == [True, False, True]
            assert read(store, 0, 3, 4, 5) == [0, 4, 5] and asked.count(hangs) == 1
            with pytest.raises(StoreError, match="has not answered lately"):
                read(store, 3)
    finally:
        goes_on.set()
        server.shutdown()
        server.server_close()


def test_a_damaged_object_that_cannot_be_deleted_is_a_miss(tmp_path):
    with make(tmp_path) as store:
        store.write(keys(0, 1), records(0, 1))
        for i, damage in enumerate((damage_flip, DAMAGE["cut short"])):
            file = tmp_path / "kv" / key(i).hex()
            file.write_bytes(damage(bytearray(file.read_bytes())))
        store.write(keys(2), records(2))

        class ReadOnly:
            read = store.kv.read

            def write(self, *_, **__):
                promise, future = tensorstore.Promise.new()
                promise.set_exception(ValueError("PERMISSION_DENIED"))
                return future

        store.kv = ReadOnly()
        assert read(store, 0, 1, 2) == [2] and store.stats().corrupted == 2
        with pytest.raises(StoreError, match="write failed"):
            store.write(keys(3), records(3))
        with pytest.raises(StoreError, match="delete failed"):
            store.delete(keys(2))


@pytest.mark.parametrize(
    "bad",
    [
        {"record_bytes": 5e3},
        {"record_bytes": 2**64},
        {"key_bytes": None},
        {"in_flight": True},
        {"in_flight": "7"},
        {"deadline": 0},
        {"deadline": -1.0},
        {"deadline": float("nan")},
        {"deadline": None},
        {"deadline": "1"},
        {"patience": 0},
        {"fingerprint": None},
    ],
)
def test_settings_of_a_wrong_type_or_size(tmp_path, bad):
    with pytest.raises(StoreFormatError, match=next(iter(bad))):
        make(tmp_path, **bad)


@pytest.mark.parametrize("spec", [None, 7, "", {}, {"driver": 7}, "no-such-scheme://x", object()])
def test_specs_that_are_none(spec):
    with pytest.raises(StoreError, match="cannot open the key-value store"):
        ObjectStore(spec, record_bytes=8, fingerprint="x")


def test_the_object_is_part_of_the_format(tmp_path):
    """Objects outlive versions."""
    with make(tmp_path) as store:
        store.write(keys(0), records(0))
    digest = hashlib.sha256((tmp_path / "kv" / key(0).hex()).read_bytes()).hexdigest()
    assert digest == "dd83bcbd6fac83199470e8426bf92b992312d0ada1540aa64f720bf99ae1434c"
