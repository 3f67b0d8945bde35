"""The `BlockStore` contract, once for every implementation."""

from __future__ import annotations

import concurrent.futures
import itertools
import subprocess
import sys

import numpy as np
import pytest

from dsv4_jax.errors import ShapeError, StoreClosedError, StoreFormatError
from dsv4_jax.tiers.async_store import AsyncStore
from dsv4_jax.tiers.kv_store import KvBlockStore
from dsv4_jax.tiers.slab import SlabStore
from dsv4_jax.tiers.store import BlockStore

from .stores import FINGERPRINT, RECORD_BYTES, key, keys, read, records


class Contract:
    """Subclasses give `open(path)`; the store holds at least 64 records."""

    persistent = True

    def open(self, path) -> BlockStore:
        raise NotImplementedError

    @pytest.fixture
    def store(self, tmp_path):
        store = self.open(tmp_path)
        yield store
        store.close()

    def test_is_a_block_store(self, store):
        assert isinstance(store, BlockStore)
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
        assert read(store, 1, 2) == [1] and store.stats().written == 1

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
            with pytest.raises(StoreClosedError):
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


class TestSlab(Contract):
    def open(self, path):
        return SlabStore(path / "slab", record_bytes=RECORD_BYTES, max_records=64, fingerprint=FINGERPRINT)


class TestSlabDirect(Contract):
    def open(self, path):
        return SlabStore(
            path / "slab", record_bytes=RECORD_BYTES, max_records=64, fingerprint=FINGERPRINT, sync="write", direct=True
        )


class Kv(Contract):
    def spec(self, path):
        raise NotImplementedError

    def open(self, path):
        pytest.importorskip("tensorstore")
        return KvBlockStore(self.spec(path), record_bytes=RECORD_BYTES, fingerprint=FINGERPRINT, in_flight=7)


class TestKvMemory(Kv):
    persistent = False

    def spec(self, path):
        return {"driver": "memory"}


class TestKvFile(Kv):
    def spec(self, path):
        return {"driver": "file", "path": f"{path}/kv/"}


class TestKvOcdbt(Kv):
    def spec(self, path):
        return {"driver": "ocdbt", "base": f"file://{path}/ocdbt/"}


class Waiting:
    """An `AsyncStore` whose calls are waited for, to be held against the same contract."""

    def __init__(self, store: BlockStore):
        self.calls = AsyncStore(store, workers=3, queue_bytes=3 * RECORD_BYTES)
        self.record_bytes, self.key_bytes = store.record_bytes, store.key_bytes
        self.stats, self.flush, self.close = store.stats, self.calls.flush, self.calls.close

    def contains(self, keys):
        return self.calls.contains(keys).result()

    def read_into(self, keys, buffers):
        return self.calls.read_into(keys, buffers).result()

    def write(self, keys, records):
        return self.calls.write(keys, records).result()

    def delete(self, keys):
        return self.calls.delete(keys).result()


class TestAsync(Contract):
    def open(self, path):
        return Waiting(TestSlab().open(path))


def test_imports_neither_jax_nor_tensorstore():
    code = (
        "import sys, dsv4_jax.tiers.slab, dsv4_jax.tiers.kv_store, dsv4_jax.tiers.async_store;"
        "print(sorted({'jax', 'tensorstore'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_kv_store_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with pytest.raises(OSError, match=r"pip install 'dsv4_jax\[storage\]'"):
        KvBlockStore({"driver": "memory"}, record_bytes=8, fingerprint="x")


def test_implementations_agree_on_a_trace(tmp_path):
    """The same random calls give the same answers from all of them."""
    pytest.importorskip("tensorstore")
    stores = [TestSlab().open(tmp_path), TestKvMemory().open(tmp_path)]
    rng = np.random.default_rng(0)
    for step in range(200):
        ids = [int(i) for i in rng.integers(0, 24, rng.integers(1, 5))]
        name = ("write", "read", "delete", "contains")[rng.integers(4)]
        answers = []
        for store in stores:
            if name == "read":
                answers.append(read(store, *ids))
            else:
                args = (keys(*ids), records(*ids))[: 1 + (name == "write")]
                answers.append(getattr(store, name)(*args).tolist())
        assert all(a == b for a, b in itertools.pairwise(answers)), (step, name, ids)
    for store in stores:
        store.close()
