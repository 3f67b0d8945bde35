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
from dsv4_jax.stores import AsyncStore, ObjectStore, RecordStore, SlabStore

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
