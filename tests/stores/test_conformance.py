"""Every store under `StoreConformance`, and together: what they import, and that they answer alike."""

from __future__ import annotations

import inspect
import itertools
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from dsv4_jax import stores
from dsv4_jax.errors import StoreError
from dsv4_jax.stores import AsyncStore, MooncakeStore, ObjectStore, RecordStore, SlabStore

from . import mooncake
from .conformance import ROOT, StoreConformance
from .samples import FINGERPRINT, RECORD_BYTES, keys, read, records


class TestSlab(StoreConformance):
    tested = SlabStore

    def open(self, path):
        return SlabStore(path / "slab", record_bytes=RECORD_BYTES, max_records=64, fingerprint=FINGERPRINT)


class TestSlabDirect(StoreConformance):
    tested = SlabStore

    def open(self, path):
        return SlabStore(
            path / "slab", record_bytes=RECORD_BYTES, max_records=64, fingerprint=FINGERPRINT, sync="write", direct=True
        )


class ObjectConformance(StoreConformance):
    tested = ObjectStore

    def spec(self, path):
        raise NotImplementedError

    def open(self, path):
        pytest.importorskip("tensorstore")
        return ObjectStore(self.spec(path), record_bytes=RECORD_BYTES, fingerprint=FINGERPRINT, in_flight=7)


class TestObjectsMemory(ObjectConformance):
    persistent = False

    def spec(self, path):
        return {"driver": "memory"}


class TestObjectsFile(ObjectConformance):
    def spec(self, path):
        return {"driver": "file", "path": f"{path}/kv/"}


class TestObjectsOcdbt(ObjectConformance):
    def spec(self, path):
        return {"driver": "ocdbt", "base": f"file://{path}/ocdbt/"}


class TestMooncake(StoreConformance):
    tested = MooncakeStore
    persistent = False

    def open(self, path):
        client = mooncake.client()
        client.remove_all(True)
        return MooncakeStore(client, record_bytes=RECORD_BYTES, fingerprint=FINGERPRINT, in_flight=7)

    def test_an_object_that_is_damaged_or_of_another_length_is_refused_and_gives_way(self, store):
        client, names = mooncake.client(), store._names(keys(0, 1, 2, 3))
        store.write(keys(0, 1, 2, 3), records(0, 1, 2, 3))
        whole = client.get(names[0])
        for name, data in zip(names, (whole[:-1], whole + b"x", whole[:200] + b"?" + whole[201:]), strict=False):
            assert client.remove(name, True) == 0 and client.put(name, data) == 0
        assert read(store, 0, 1, 2, 3) == [3] and store.stats().corrupted == 3
        assert store.write(keys(0, 1, 2, 3), records(0, 1, 2, 3)).tolist() == [True] * 3 + [False]
        assert read(store, 0, 1, 2, 3) == [0, 1, 2, 3]

    def test_another_machine_reads_what_this_one_wrote(self, store):
        assert store.write(keys(5, 6), records(5, 6)).all()
        with MooncakeStore(mooncake.another(), record_bytes=RECORD_BYTES, fingerprint=FINGERPRINT) as other:
            assert read(other, 5, 6, 7) == [5, 6] and other.delete(keys(5)).all() and not store.contains(keys(5)).any()

    def test_what_finds_no_room_is_said(self, store):
        large = MooncakeStore(mooncake.client(), record_bytes=9 << 20, fingerprint="large", in_flight=8)
        with large, pytest.raises(StoreError, match="of 8 records: -200"):
            large.write(keys(*range(8)), np.zeros((8, 9 << 20), np.uint8))


class Unsound:
    """A client that answers one call with something else, or raises."""

    def __init__(self, call: str, answer: object):
        self.call, self.answer = call, answer

    def __getattr__(self, name):
        whole = {"batch_is_exist": 0, "batch_get_into": -704, "batch_put_from": 0, "batch_remove": 0}

        def called(names, *_):
            if name == self.call and isinstance(self.answer, Exception):
                raise self.answer
            return self.answer if name == self.call else [whole[name]] * len(names) if name in whole else 0

        return called


@pytest.mark.parametrize("answer", [[0], [], [0, 0, 0], [0, None], None, RuntimeError("gone")])
def test_a_client_that_does_not_answer_for_every_record_is_an_error(answer):
    """Above all no answer is taken for that of another record."""
    calls = {
        "is_exist": lambda store: store.contains(keys(0, 1)),
        "get_into": lambda store: read(store, 0, 1),
        "put_from": lambda store: store.write(keys(0, 1), records(0, 1)),
        "remove": lambda store: store.delete(keys(0, 1)),
    }
    for name, call in calls.items():
        client = Unsound(f"batch_{name}", answer)
        with (
            MooncakeStore(client, record_bytes=RECORD_BYTES, fingerprint=FINGERPRINT) as store,
            pytest.raises(StoreError, match=rf"batch_{name} of 2 records"),
        ):
            call(store)
    with pytest.raises(StoreError, match="cannot register"):
        open_and_close(Unsound("register_buffer", answer if isinstance(answer, Exception) else -1))
    if isinstance(answer, Exception):
        with pytest.raises(StoreError, match="cannot let go"):
            open_and_close(Unsound("unregister_buffer", answer))


def open_and_close(client: object) -> None:
    MooncakeStore(client, record_bytes=RECORD_BYTES, fingerprint=FINGERPRINT).close()


class Waiting:
    """An `AsyncStore` whose calls are waited for, to be held against the same contract."""

    def __init__(self, store: RecordStore):
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


class TestAsync(StoreConformance):
    tested = AsyncStore

    def open(self, path):
        return Waiting(TestSlab().open(path))


def subclasses(cls: type) -> set[type]:
    return {cls}.union(*map(subclasses, cls.__subclasses__()))


def test_every_store_is_tested() -> None:
    offered = {getattr(stores, name) for name in stores.__all__}
    offered = {x for x in offered if inspect.isclass(x) and hasattr(x, "read_into")} - {RecordStore}
    tested = {getattr(x, "tested", None) for x in subclasses(StoreConformance) if x.__name__.startswith("Test")}
    assert offered <= tested and len(offered) > 2


def test_imports_neither_jax_nor_tensorstore():
    """No module of the room does, whatever it is imported for."""
    room = pathlib.Path(stores.__file__).parent
    names = [path.relative_to(room).with_suffix("").parts for path in sorted(room.rglob("*.py"))]
    modules = [".".join(("dsv4_jax", "stores", *parts)).removesuffix(".__init__") for parts in names]
    assert "dsv4_jax.stores.slab.file" in modules
    code = f"import sys, {', '.join(modules)}; print(sorted({{'jax', 'tensorstore'}} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert result.stdout == "[]\n"


def test_object_store_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with pytest.raises(OSError, match=r"pip install 'dsv4_jax\[storage\]'"):
        ObjectStore({"driver": "memory"}, record_bytes=8, fingerprint="x")


def test_implementations_agree_on_a_trace(tmp_path):
    """The same random calls give the same answers from all of them."""
    pytest.importorskip("tensorstore")
    both = [TestSlab().open(tmp_path), TestObjectsMemory().open(tmp_path)]
    rng = np.random.default_rng(0)
    for step in range(200):
        ids = [int(i) for i in rng.integers(0, 24, rng.integers(1, 5))]
        name = ("write", "read", "delete", "contains")[rng.integers(4)]
        answers = []
        for store in both:
            if name == "read":
                answers.append(read(store, *ids))
            else:
                args = (keys(*ids), records(*ids))[: 1 + (name == "write")]
                answers.append(getattr(store, name)(*args).tolist())
        assert all(a == b for a, b in itertools.pairwise(answers)), (step, name, ids)
    for store in both:
        store.close()
