"""`KvBlockStore` beyond the contract: damaged, foreign and misplaced objects, several owners, errors."""

from __future__ import annotations

import numpy as np
import pytest

from dsv4_jax.errors import StoreError, StoreFormatError
from dsv4_jax.tiers.kv_store import KvBlockStore

from .stores import FINGERPRINT, RECORD_BYTES, key, keys, read, records

pytest.importorskip("tensorstore")


def make(path, fingerprint: str = FINGERPRINT, **options) -> KvBlockStore:
    spec = {"driver": "file", "path": f"{path}/kv/"}
    return KvBlockStore(spec, **{"record_bytes": RECORD_BYTES, "fingerprint": fingerprint, **options})


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


def test_several_owners_of_one_place(tmp_path):
    with make(tmp_path) as a, make(tmp_path) as b:
        a.write(keys(0), records(0))
        assert b.write(keys(0, 1), records(0, 1)).tolist() == [False, True]
        assert read(a, 0, 1) == [0, 1] and a.stats().records == -1
        b.delete(keys(0))
        assert read(a, 0, 1) == [1]


def test_errors_are_typed(tmp_path):
    with pytest.raises(StoreError, match="cannot open the key-value store"):
        KvBlockStore({"driver": "no such driver"}, record_bytes=8, fingerprint="x")
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
