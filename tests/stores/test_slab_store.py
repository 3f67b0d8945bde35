"""`SlabStore` beyond the contract: eviction, restart, damage, other layouts, full disks, many readers."""

from __future__ import annotations

import collections
import concurrent.futures
import errno
import mmap
import os
import pathlib
import struct
import subprocess
import sys
import threading
import zlib

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from dsv4_jax.errors import StoreBusyError, StoreError, StoreFormatError
from dsv4_jax.stores.record_header import HEADER_BYTES
from dsv4_jax.stores.slab.file import SlabFile

from ..clock import PATIENCE
from .samples import RECORD_BYTES, key, keys, read, records
from .samples import make_slab as make


@pytest.fixture
def path(tmp_path):
    return tmp_path / "slab"


def flip(path: pathlib.Path, offset: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def where(path: pathlib.Path, i: int) -> tuple[int, int]:
    """File offsets of the header and of the bytes of record i."""
    data = path.read_bytes()
    return data.index(key(i)) - 80, data.index(records(i).tobytes())


def test_the_least_recently_used_gives_way(path):
    with make(path, 4) as store:
        store.write(keys(0, 1, 2, 3), records(0, 1, 2, 3))
        assert read(store, 0) == [0]  # a use
        assert store.contains(keys(1)).all()  # not a use
        store.write(keys(2), records(2))  # a use
        store.write(keys(4, 5), records(4, 5))
        assert read(store, 0, 1, 2, 3, 4, 5) == [0, 2, 4, 5]
        assert store.stats().evicted == 2 and store.stats().records == 4


def test_a_batch_does_not_evict_itself(path):
    with make(path, 4) as store:
        store.write(keys(0, 1, 2), records(0, 1, 2))
        store.write(keys(0, 3, 4), records(0, 3, 4))
        assert read(store, 0, 1, 2, 3, 4) == [0, 2, 3, 4]
        with pytest.raises(StoreError, match="5 records into a store of 4"):
            store.write(keys(0, 5, 6, 7, 8), records(0, 5, 6, 7, 8))
        assert read(store, 0, 1, 2, 3, 4) == [0, 2, 3, 4]
        store.write(keys(5, 6, 7, 8, 5), records(5, 6, 7, 8, 5))
        assert read(store, *range(9)) == [5, 6, 7, 8]


def test_order_of_writing_survives_a_restart(path):
    with make(path, 4) as store:
        store.write(keys(3, 2, 1, 0), records(3, 2, 1, 0))
        store.delete(keys(1))
        store.write(keys(1), records(1))
    with make(path, 4) as store:
        store.write(keys(4, 5), records(4, 5))
        assert read(store, *range(6)) == [0, 1, 4, 5]


@hypothesis.given(
    capacity=st.integers(1, 6),
    steps=st.lists(
        st.tuples(st.sampled_from("wwrrdco"), st.lists(st.integers(0, 11), max_size=6, unique=True)), max_size=40
    ),
)
@hypothesis.settings(max_examples=60)
def test_any_trace_equals_a_dict_with_least_recently_used_eviction(tmp_path_factory, capacity, steps):
    path = tmp_path_factory.mktemp("trace") / "slab"
    small = {"record_bytes": 24}
    model: collections.OrderedDict[int, int] = collections.OrderedDict()  # id -> clock of its writing
    store, clock = make(path, capacity, **small), 0
    try:
        for op, ids in steps:
            ids = ids[:capacity] if op == "w" else ids
            known = [i in model for i in ids]
            if op == "w":
                added = store.write(keys(*ids), records(*ids, record_bytes=24))
                assert added.tolist() == [not flag for flag in known]
                for i in (i for i in ids if i in model):
                    model.move_to_end(i)
                for i in (i for i in ids if i not in model):
                    if len(model) == capacity:
                        del model[next(k for k in model if k not in ids)]
                    clock += 1
                    model[i] = clock
            elif op == "r":
                assert read(store, *ids) == [i for i in ids if i in model]
                for i in (i for i in ids if i in model):
                    model.move_to_end(i)
            elif op == "d":
                assert store.delete(keys(*ids)).tolist() == known
                for i in ids:
                    model.pop(i, None)
            elif op == "c":
                assert store.contains(keys(*ids)).tolist() == known
            else:
                store.close()
                store = make(path, capacity, **small)
                model = collections.OrderedDict(sorted(model.items(), key=lambda item: item[1]))
            assert store.stats().records == len(model)
            assert store.stats().corrupted == 0
    finally:
        store.close()


def test_a_flipped_bit_is_refused_and_counted(path):
    """Anywhere in the record while it is open; anywhere in the header before it is opened."""
    rng = np.random.default_rng(0)
    with make(path) as store:
        store.write(keys(0, 1), records(0, 1))
        _, offset = where(path, 0)
        positions = [0, 1, RECORD_BYTES - 1, *rng.integers(0, RECORD_BYTES, 60).tolist()]
        for n, position in enumerate(positions, 1):
            flip(path, offset + position, int(rng.integers(8)))
            assert read(store, 0, 1) == [1]
            assert store.stats().corrupted == n and store.contains(keys(0, 1)).tolist() == [False, True]
            store.write(keys(0), records(0))  # it can be stored again, in the same slot
            assert where(path, 0)[1] == offset
        assert read(store, 0, 1) == [0, 1]
    for position in range(0, HEADER_BYTES, 3):
        header, _ = where(path, 0)
        flip(path, header + position, int(rng.integers(8)))
        with make(path) as store:
            assert read(store, 0, 1) == [1]
            assert store.stats().corrupted == 1
            store.write(keys(0), records(0))


def test_a_damaged_record_found_after_a_restart(path):
    """What a power cut can leave: a header on the disk, its record not."""
    with make(path) as store:
        store.write(keys(0, 1, 2), records(0, 1, 2))
    _, offset = where(path, 1)
    with path.open("r+b") as file:
        file.seek(offset + 4096)
        file.write(bytes(RECORD_BYTES - 4096))
    with make(path) as store:
        assert store.contains(keys(1)).all()  # only a hint
        assert read(store, 0, 1, 2) == [0, 2]
        assert store.stats().corrupted == 1 and not store.contains(keys(1)).any()
    with make(path) as store:
        assert read(store, 0, 1, 2) == [0, 2] and store.stats().corrupted == 0


def test_another_layouts_records_are_refused_and_their_slots_reused(path):
    with make(path, 4, fingerprint="layout B") as store:
        store.write(keys(0, 1, 2), records(0, 1, 2))
    with make(path, 4) as store:
        assert read(store, 0, 1, 2) == [] and store.stats().foreign == 3 and store.stats().corrupted == 0
        store.write(keys(0, 5, 6, 7), records(0, 5, 6, 7))
        assert store.stats().evicted == 0
    with make(path, 4) as store:
        assert read(store, 0, 1, 2, 5, 6, 7) == [0, 5, 6, 7] and store.stats().foreign == 0


def test_a_header_copied_to_another_slot_serves_nothing_wrong(path):
    with make(path) as store:
        store.write(keys(0, 1), records(0, 1))
    (a, _), (b, _) = where(path, 0), where(path, 1)
    data = bytearray(path.read_bytes())
    data[b : b + HEADER_BYTES] = data[a : a + HEADER_BYTES]
    path.write_bytes(data)
    with make(path) as store:
        assert set(read(store, 0, 1)) <= {0}
        assert store.stats().records <= 1


def test_one_owner(path):
    with make(path) as store:
        with pytest.raises(StoreBusyError, match="one owner"):
            make(path)
        code = (
            "import sys; from dsv4_jax.errors import StoreBusyError; from dsv4_jax.stores import SlabStore\n"
            f"try: SlabStore({str(path)!r}, record_bytes={RECORD_BYTES}, max_records=8, fingerprint='x')\n"
            "except StoreBusyError: print('locked')"
        )
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert result.stdout == "locked\n"
        assert store.write(keys(0), records(0)).all()
    make(path).close()


@pytest.mark.parametrize(
    "change", [{"record_bytes": RECORD_BYTES + 1}, {"max_records": 9}, {"key_bytes": 16}], ids=lambda c: next(iter(c))
)
def test_other_sizes_are_an_error_and_harm_nothing(path, change):
    with make(path) as store:
        store.write(keys(0), records(0))
    with pytest.raises(StoreFormatError, match="has 8 records of 5000 bytes, keys of 32 bytes"):
        make(path, **{"max_records": 8, **change})
    with make(path) as store:
        assert read(store, 0) == [0]


def test_files_of_the_old_version_are_refused_with_one_line_and_stay_as_they_are(path):
    with make(path) as store:
        store.write(keys(0), records(0))
    old = struct.pack("<8sIIQQ", b"dsv4slab", 1, 32, RECORD_BYTES, 8)
    content = old + struct.pack("<I", zlib.crc32(old)) + path.read_bytes()[len(old) + 4 :]
    path.write_bytes(content)
    with pytest.raises(StoreFormatError, match="is a slab file of version 1, only version 2 can be read") as caught:
        make(path)
    assert "\n" not in str(caught.value) and path.read_bytes() == content


def test_other_files_are_an_error_and_stay_as_they_are(path):
    for content in (b"a diary", bytes(100), bytes(1 << 20), os.urandom(8192)):
        path.write_bytes(content)
        with pytest.raises(StoreFormatError, match="is not a slab file"):
            make(path, 1)
        assert path.read_bytes() == content
    with pytest.raises(StoreError, match="cannot open"):
        make(path.parent / "no" / "slab")


@pytest.mark.parametrize(
    "bad", [{"record_bytes": 0}, {"max_records": 0}, {"key_bytes": 49}, {"key_bytes": 0}, {"sync": "often"}]
)
def test_impossible_settings(path, bad):
    with pytest.raises(StoreFormatError):
        make(path, **{"max_records": 8, **bad})
    assert not path.exists()


def test_a_full_disk_is_found_when_the_file_is_made(path, monkeypatch):
    def full(file, offset, size):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StoreError, match=r"cannot open .*: No space left"):
        make(path)
    with make(path, preallocate=False) as store:
        assert path.stat().st_blocks * 512 < 2 * RECORD_BYTES < path.stat().st_size
        store.write(keys(0), records(0))
    with make(path) as store:
        assert read(store, 0) == [0]


@pytest.mark.parametrize("fail_at", [0, 1, 2])
def test_a_full_disk_is_an_error_and_loses_nothing(path, monkeypatch, fail_at):
    """The disk fills up in the middle of a write of records (0, 1: the second call) or of headers (2)."""
    with make(path, 4) as store:
        store.write(keys(0, 1), records(0, 1))
        store.delete(keys(0))
        calls, whole = [0], os.pwritev

        def full(file, views, offset):
            calls[0] += 1
            if calls[0] == fail_at:  # half of it still fits
                return os.pwrite(file, b"".join(views)[:3000], offset)
            if calls[0] > fail_at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return whole(file, views, offset)

        monkeypatch.setattr(os, "pwritev", full)
        with pytest.raises(StoreError, match="No space left") as caught:
            store.write(keys(2, 3), records(2, 3))
        assert isinstance(caught.value.__cause__, OSError)
        monkeypatch.undo()
        assert read(store, 1, 2, 3) == [1] and store.stats().written == 2
        store.write(keys(2, 3, 4), records(2, 3, 4))
        assert read(store, 1, 2, 3, 4) == [1, 2, 3, 4]


def test_short_reads_and_writes_are_continued(path, monkeypatch):
    """The kernel may move less than it was asked to, at any byte."""
    rng = np.random.default_rng(0)

    def some(views):
        joined = sum(len(view) for view in views)
        return int(rng.integers(1, joined + 1))

    def pwritev(file, views, offset):
        return os.pwrite(file, b"".join(views)[: some(views)], offset)

    def preadv(file, views, offset):
        data = os.pread(file, some(views), offset)
        left = data
        for view in views:
            view[: len(left[: len(view)])] = left[: len(view)]
            left = left[len(view) :]
        return len(data)

    monkeypatch.setattr(os, "pwritev", pwritev)
    monkeypatch.setattr(os, "preadv", preadv)
    with make(path) as store:
        store.write(keys(*range(8)), records(*range(8)))
        assert read(store, *range(8)) == list(range(8))
    with make(path) as store:
        assert read(store, *range(8)) == list(range(8))


def test_readers_of_what_is_being_evicted(path):
    """4 slots for 12 keys: reads race with the reuse of their slots, and are right or missed, never 'corrupted'."""
    stop = threading.Event()

    def write(store) -> None:
        rng = np.random.default_rng(0)
        while not stop.is_set():
            ids = [int(i) for i in rng.choice(12, 2, replace=False)]
            store.write(keys(*ids), records(*ids))

    def reader(store, seed: int) -> int:
        rng = np.random.default_rng(seed)
        return sum(len(read(store, *[int(i) for i in rng.integers(0, 12, 6)])) for _ in range(150))

    with make(path, 4) as store, concurrent.futures.ThreadPoolExecutor(4) as pool:
        store.write(keys(0, 1), records(0, 1))  # or readers may be done before the writer begins
        writer = pool.submit(write, store)
        served = list(pool.map(lambda seed: reader(store, seed), range(3)))
        stop.set()
        writer.result()
        assert min(served) > 0 and store.stats().evicted > 0
        assert store.stats().corrupted == 0


def test_two_threads_write_the_same_key(path, monkeypatch):
    """Both have written their headers before either comes to the index: one copy stays, the other's slot is free."""
    both = threading.Barrier(2, timeout=PATIENCE)
    write_headers = SlabFile.write_headers

    def meet(file, headers):
        write_headers(file, headers)
        if any(any(header) for header in headers.values()):
            both.wait()

    with make(path, 4) as store:
        with monkeypatch.context() as patch, concurrent.futures.ThreadPoolExecutor(2) as pool:
            patch.setattr(SlabFile, "write_headers", meet)
            calls = [pool.submit(store.write, keys(0, other), records(0, other)) for other in (1, 2)]
            added = [call.result(PATIENCE).tolist() for call in calls]
        assert sorted(added) == [[False, True], [True, True]]
        assert store.stats().written == store.stats().records == 3
        assert path.read_bytes().count(key(0)) == 1
        assert read(store, 0, 1, 2) == [0, 1, 2]
        store.write(keys(3, 4), records(3, 4))  # into the slot that was given back, and one more
        assert store.stats().evicted == 1
    with make(path, 4) as store:
        assert store.stats().records == 4 and store.stats().corrupted == 0


def test_direct_needs_no_copy_of_aligned_memory_and_takes_any(tmp_path):
    pool = np.zeros(7 * 8192, np.uint8)
    start = -pool.ctypes.data % 4096
    pool = pool[start : start + 6 * 8192].reshape(6, 8192)
    pool[:] = records(*range(6), record_bytes=8192)
    try:
        store = make(tmp_path / "slab", record_bytes=8192, direct=True)
    except StoreError as error:
        pytest.skip(f"no O_DIRECT here: {error}")
    with store:
        store.write(keys(0, 1, 2), pool[:3])
        store.write(keys(3, 4, 5), [row.tobytes() for row in pool[3:]])
        assert read(store, *range(6)) == list(range(6))
        expected = pool.copy()
        pool[:] = 0
        assert store.read_into(keys(*range(6)), pool).all()
        np.testing.assert_array_equal(pool, expected)


@pytest.mark.parametrize(
    ("disk", "start", "record_bytes", "copied"),
    [(512, 512, 8704, 0), (512, 0, 8704, 0), (512, 8, 8704, 2), (512, 512, 8700, 2), (4096, 512, 8704, 2)],
)
def test_direct_from_the_callers_memory(tmp_path, monkeypatch, disk, start, record_bytes, copied):
    """Where the disk takes it, also between two pages; what surrounds the records stays as it is."""
    bounces = []
    bounce = SlabFile.bounce_buffer
    monkeypatch.setattr(SlabFile, "bounce_buffer", lambda self: bounces.append(1) or bounce(self))
    if disk == 4096:
        monkeypatch.setattr(SlabFile, "find_alignment", lambda self: 4096)
    try:
        store = make(tmp_path / "slab", record_bytes=record_bytes, direct=True)
    except StoreError as error:
        pytest.skip(f"no O_DIRECT here: {error}")
    with store:
        if store.file.alignment != disk:
            pytest.skip(f"this disk asks for {store.file.alignment}")
        memory = np.frombuffer(mmap.mmap(-1, 1 << 16), np.uint8)
        pool = memory[start : start + 5 * record_bytes].reshape(5, record_bytes)
        pool[:] = expected = records(*range(5), record_bytes=record_bytes)
        store.write(keys(*range(5)), pool)
        memory[:] = 7
        assert store.read_into(keys(*range(5)), pool).all()
        np.testing.assert_array_equal(pool, expected)
        assert (memory[:start] == 7).all() and (memory[start + pool.size :] == 7).all()
    assert len(bounces) == copied
