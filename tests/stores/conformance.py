"""`StoreConformance`: what every `RecordStore` is held to. test_conformance.py runs it for each store."""

from __future__ import annotations

import concurrent.futures
import pathlib
import subprocess
import sys
from typing import Any, ClassVar

import numpy as np
import pytest

from dsv4_jax.errors import ShapeError, StoreError, StoreFormatError
from dsv4_jax.stores import RecordStore

from ..clock import PATIENCE
from .samples import RECORD_BYTES, key, keys, read, records

__all__ = ["ROOT", "StoreConformance"]

ROOT = pathlib.Path(__file__).parents[2]
# The child reports the calls that were not refused.
FORK = """
import importlib, os, pathlib, sys
import numpy as np
from dsv4_jax.errors import StoreBusyError
from tests.stores.samples import RECORD_BYTES, key, keys, read, records

test = getattr(importlib.import_module(sys.argv[1]), sys.argv[2])()
store = test.open(pathlib.Path(sys.argv[3]))
store.write(keys(0), records(0))
down, up = os.pipe()
if not os.fork():
    calls = {
        "contains": lambda: store.contains(keys(0)),
        "read_into": lambda: store.read_into(keys(0), np.zeros((1, RECORD_BYTES), np.uint8)),
        "write": lambda: store.write(keys(1), records(1)),
        "delete": lambda: store.delete(keys(0)),
        "flush": store.flush,
    }
    for name, call in calls.items():
        try:
            call()
        except StoreBusyError:
            continue
        os.write(up, name.encode() + b" ")
    store.close()
    os._exit(0)
os.close(up)
print(os.read(down, 1000).decode())
assert os.wait()[1] == 0
assert read(store, 0, 1) == [0] and store.write(keys(1), records(1)).all()
store.close()
"""


class StoreConformance:
    """Subclass it for a store: give `open`, and say what is tested.

    Attributes:
        tested: the class.
        persistent: whether what was written is there when the store is opened again.
    """

    tested: ClassVar[type]
    persistent = True

    def open(self, path: pathlib.Path) -> Any:
        """A store of at least 64 records of `RECORD_BYTES`, with keys of 32 bytes, in this folder."""
        raise NotImplementedError

    @pytest.fixture
    def store(self, tmp_path):
        store = self.open(tmp_path)
        yield store
        store.close()

    def test_is_a_record_store(self, store):
        assert isinstance(store, RecordStore)
        assert (store.record_bytes, store.key_bytes) == (RECORD_BYTES, 32)

    def test_round_trip(self, store):
        assert store.write(keys(1, 2, 3), records(1, 2, 3)).tolist() == [True] * 3
        assert store.contains(keys(3, 4, 1)).tolist() == [True, False, True]
        assert read(store, 3, 4, 1, 2) == [3, 1, 2]
        stats = store.stats()
        assert (stats.written, stats.read, stats.missed, stats.corrupted, stats.foreign) == (3, 3, 1, 0, 0)

    def test_a_key_is_written_once(self, store):
        assert store.write(keys(1, 2, 1), records(1, 2, 1)).tolist() == [True, True, False]
        assert store.write(keys(2, 3), np.zeros((2, RECORD_BYTES), np.uint8)).tolist() == [False, True]
        assert read(store, 1, 2) == [1, 2]

    def test_a_key_may_be_read_twice_in_a_batch(self, store):
        store.write(keys(1, 2), records(1, 2))
        assert read(store, 1, 2, 1, 1) == [1, 2, 1, 1]

    def test_delete(self, store):
        store.write(keys(1, 2), records(1, 2))
        assert store.delete(keys(1, 9, 1)).tolist() == [True, False, False]
        assert store.contains(keys(1, 2)).tolist() == [False, True]
        assert read(store, 1, 2) == [2]
        assert store.write(keys(1), records(1)).tolist() == [True]
        assert read(store, 1, 2) == [1, 2]
        assert store.stats().deleted == 1

    def test_empty_batches(self, store):
        nothing = np.zeros((0, RECORD_BYTES), np.uint8)
        for result in (store.contains([]), store.read_into([], nothing), store.write([], []), store.delete([])):
            assert result.shape == (0,) and result.dtype == bool

    def test_any_contiguous_buffers(self, store):
        (record,) = records(1)
        store.write(keys(1), [record.tobytes()])
        store.write(keys(2), [memoryview(records(2)[0]).cast("B")])
        wide = np.zeros((3, RECORD_BYTES // 8 * 2), np.uint32)  # rows of other types and widths, some unaligned
        pool = bytearray(1 + 2 * RECORD_BYTES)
        views = [wide[1], memoryview(pool)[1 : 1 + RECORD_BYTES], memoryview(pool)[1 + RECORD_BYTES :]]
        assert store.read_into(keys(1, 2, 1), views).all()
        assert wide[1].tobytes() == record.tobytes() and not wide[0].any() and not wide[2].any()
        assert pool == b"\0" + records(2).tobytes() + record.tobytes()

    @pytest.mark.parametrize("bad", ["short", b"short", b"x" * 33, None])
    def test_bad_keys_change_nothing(self, store, bad):
        for call in (store.contains, store.delete, lambda k: store.write(k, records(1, 2))):
            with pytest.raises(StoreFormatError, match=r"keys\[1\] must be bytes of length 32"):
                call([key(1), bad])
        assert read(store, 1) == []

    def test_bad_buffers_change_nothing(self, store):
        with pytest.raises(ShapeError, match="1 given for 2 keys"):
            store.write(keys(1, 2), records(1))
        with pytest.raises(ShapeError, match=r"records\[1\] has 4999 bytes, a record has 5000"):
            store.write(keys(1, 2), [records(1)[0], records(2)[0, :-1]])
        with pytest.raises(ShapeError, match=r"records\[0\] must be a C-contiguous"):
            store.write(keys(1), [np.zeros(2 * RECORD_BYTES, np.uint8)[::2]])
        store.write(keys(1), records(1))
        with pytest.raises(ShapeError, match=r"buffers\[0\] is read-only"):
            store.read_into(keys(1), [bytes(RECORD_BYTES)])
        store.write(keys(3), records(3))
        memory = np.zeros(3 * RECORD_BYTES, np.uint8)
        rows = memory.reshape(3, RECORD_BYTES)
        for one in (rows[0], memory[1 : 1 + RECORD_BYTES]):  # the record read last would stand for both
            with pytest.raises(ShapeError, match=r"buffers\[0\] and buffers\[2\] overlap"):
                store.read_into(keys(1, 9, 3), [one, rows[2], rows[0]])
        assert not memory.any() and store.stats().corrupted == 0
        assert store.delete(keys(3)).all()
        assert read(store, 1, 2) == [1] and store.stats().written == 2

    def test_closed(self, store):
        store.close()
        store.close()
        for call in (
            lambda: store.contains(keys(1)),
            lambda: store.read_into(keys(1), np.zeros((1, RECORD_BYTES), np.uint8)),
            lambda: store.write(keys(1), records(1)),
            lambda: store.delete(keys(1)),
            lambda: store.flush(),
        ):
            with pytest.raises(StoreError):
                call()

    def test_survives_a_restart(self, store, tmp_path):
        store.write(keys(*range(20)), records(*range(20)))
        store.delete(keys(3))
        store.flush()
        store.close()
        if self.persistent:
            again = self.open(tmp_path)
            assert read(again, *range(22)) == [i for i in range(20) if i != 3]
            again.close()

    def test_a_forked_child_is_refused_and_harms_nothing(self, store, tmp_path):
        folder = tmp_path / "forked"
        folder.mkdir()
        arguments = [type(self).__module__, type(self).__name__, str(folder)]
        command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK, *arguments]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
        assert (result.returncode, result.stdout) == (0, "\n"), result.stderr

    def test_threads(self, store):
        """Readers, writers and deleters at once: what is served is right, and what nobody deletes stays."""
        store.write(keys(*range(8)), records(*range(8)))

        def work(worker: int) -> None:
            rng = np.random.default_rng(worker)
            for _ in range(30):
                ids = [int(i) for i in rng.integers(0, 32, 4)]
                if worker % 2:
                    store.write(keys(*ids), records(*ids))
                    store.delete(keys(*[i for i in ids if i >= 8][:1]))
                served = read(store, *ids)
                assert {i for i in ids if i < 8} <= set(served)

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        assert store.stats().corrupted == 0
        assert read(store, *range(8)) == list(range(8))
