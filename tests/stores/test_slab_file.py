"""`SlabStore` and the file system: what it makes and leaves behind, whose file it takes, files that lie."""

from __future__ import annotations

import errno
import hashlib
import os
import pathlib
import socket
import stat

import numpy as np
import pytest

from dsv4_jax.errors import ShapeError, StoreError, StoreFormatError
from dsv4_jax.stores.checksum import checksum
from dsv4_jax.stores.record_header import HEADER_BYTES, RecordHeader, fingerprint_digest, pack_header
from dsv4_jax.stores.slab import owned_file
from dsv4_jax.stores.slab.file import SlabFile

from .samples import FINGERPRINT, RECORD_BYTES, key, keys, make_slab, read, records

FALLOCATE = os.posix_fallocate


@pytest.fixture
def path(tmp_path) -> pathlib.Path:
    return tmp_path / "slab"


def fill_half(file: int, offset: int, size: int) -> None:
    """A disk that fills up on the way."""
    FALLOCATE(file, offset, size // 2)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def interrupted(file: int, offset: int, size: int) -> None:
    FALLOCATE(file, offset, size // 2)
    raise KeyboardInterrupt


@pytest.mark.parametrize(("how", "error"), [(fill_half, StoreError), (interrupted, KeyboardInterrupt)])
@pytest.mark.parametrize("there", ["nothing", "an empty file"])
def test_a_failed_preallocation_leaves_the_disk_as_it_was(path, monkeypatch, how, error, there):
    if there == "an empty file":
        path.touch()
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", how)
        with pytest.raises(error):
            make_slab(path)
    if there == "nothing":
        assert not path.exists()
    else:
        assert path.stat().st_size == path.stat().st_blocks == 0
    with make_slab(path, 4) as store:  # the path is free, for other sizes too
        assert store.write(keys(0), records(0)).all()


def test_room_is_looked_for_before_any_is_taken(path, monkeypatch):
    """Filling a disk to find that it is too small would fail its other users meanwhile."""
    taken = []
    monkeypatch.setattr(os, "posix_fallocate", lambda *call: taken.append(call))
    free = os.statvfs(path.parent)
    little = os.statvfs_result((free.f_bsize, 4096, free.f_blocks, 10, 10, *free[5:]))
    monkeypatch.setattr(os, "fstatvfs", lambda file: little)
    with pytest.raises(StoreError, match=r"needs 73728 bytes, the disk has 40960 free"):
        make_slab(path)
    assert not taken and not path.exists()
    make_slab(path, preallocate=False).close()  # takes room as records come


@pytest.mark.parametrize("call", ["ftruncate", "posix_fallocate", "fsync", "pwritev"])
def test_a_file_is_made_whole_or_not_at_all(path, monkeypatch, call):
    def fail(*args):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(StoreError, match="Input/output"):
            make_slab(path)
    assert not path.exists()
    make_slab(path).close()


def test_a_making_that_was_killed_is_taken_up_whatever_its_size(path):
    with path.open("wb") as file:  # as a kill leaves it: room, but no byte written
        file.truncate(1 << 20)
        FALLOCATE(file.fileno(), 0, 1 << 19)
    with make_slab(path) as store:
        assert store.write(keys(0), records(0)).all() and path.stat().st_size == 73728
    path.write_bytes(bytes(1 << 20))  # but zeros that were written are a file of another kind
    with pytest.raises(StoreFormatError, match="is not a slab file, and not empty"):
        make_slab(path)


def test_the_file_is_its_owners_alone(path):
    mask = os.umask(0)
    try:
        make_slab(path).close()
    finally:
        os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.unlink()
    path.touch(mode=0o666)
    path.chmod(0o666)  # somebody was there first
    make_slab(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_links_are_not_followed(path):
    target = path.parent / "target"
    path.symlink_to(target)
    with pytest.raises(StoreError, match="cannot open"):
        make_slab(path)
    assert not target.exists()
    make_slab(target).close()
    content = target.read_bytes()
    with pytest.raises(StoreError, match="symbolic link"):
        make_slab(path)
    assert target.read_bytes() == content and path.is_symlink()


def test_what_is_no_file_is_refused(path):
    os.mkfifo(path)
    (path.parent / "directory").mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{path.parent}/socket")
        for other in (path, path.parent / "directory", path.parent / "socket", pathlib.Path("/dev/null")):
            with pytest.raises(StoreError, match=r"cannot open|is not a regular file"):
                make_slab(other)
    assert path.is_fifo()


def swap_away(path: pathlib.Path) -> None:
    path.rename(path.with_name("moved"))
    path.write_bytes(b"somebody else's")


def test_headers_and_records_are_of_one_file(path, monkeypatch):
    """The path may come to name another file at any time after it was opened."""
    check = SlabFile.check_geometry

    def check_then_swap(*args):
        check(*args)
        swap_away(path)

    monkeypatch.setattr(SlabFile, "check_geometry", check_then_swap)
    try:
        store = make_slab(path, direct=True)
    except StoreError as error:
        pytest.skip(f"no O_DIRECT here: {error}")
    with store:
        store.write(keys(0), records(0))
        assert read(store, 0) == [0]
    assert path.read_bytes() == b"somebody else's"
    assert records(0).tobytes() in path.with_name("moved").read_bytes()


@pytest.mark.parametrize("how", [swap_away, pathlib.Path.unlink])
def test_a_file_that_lost_its_name_before_it_was_locked_is_refused(path, monkeypatch, how):
    """Records would go to a file that nobody ever opens again."""
    flock = owned_file.fcntl.flock

    def swap_then_lock(file, operation):
        how(path)
        flock(file, operation)

    make_slab(path).close()
    with monkeypatch.context() as patch:
        patch.setattr(owned_file.fcntl, "flock", swap_then_lock)
        with pytest.raises(StoreError, match=r"replaced|No such file"):
            make_slab(path)
    if how is swap_away:
        assert path.read_bytes() == b"somebody else's"


def plant(path: pathlib.Path, slot: int, header: RecordHeader) -> None:
    with path.open("r+b") as file:
        file.seek(4096 + slot * HEADER_BYTES)
        file.write(pack_header(header))


@pytest.mark.parametrize("generation", [2**64 - 1, 2**63, 2**62])
def test_a_header_of_the_last_generation_does_not_end_writing(path, generation):
    make_slab(path).close()
    layout = fingerprint_digest(FINGERPRINT)
    for slot, fingerprint in enumerate((layout, b"f" * 32)):
        digest = checksum(records(slot)[0], key(slot), fingerprint, generation)
        plant(path, slot, RecordHeader(key(slot), generation, RECORD_BYTES, fingerprint, digest))
    with make_slab(path) as store:
        assert store.stats().corrupted == 2
        assert store.write(keys(*range(8)), records(*range(8))).all()
        assert read(store, *range(8)) == list(range(8))
    with make_slab(path) as store:
        assert read(store, *range(8)) == list(range(8)) and store.stats().corrupted == 0


def test_a_header_that_lies_about_sizes_is_refused(path):
    make_slab(path).close()
    layout = fingerprint_digest(FINGERPRINT)
    digest = checksum(records(0)[0], key(0), layout, 1)
    plant(path, 0, RecordHeader(key(0), 1, RECORD_BYTES + 1, layout, digest))
    plant(path, 1, RecordHeader(key(1)[:31], 1, RECORD_BYTES, layout, digest))
    plant(path, 2, RecordHeader(key(2) + b"x", 1, RECORD_BYTES, layout, digest))
    with make_slab(path) as store:
        assert store.stats().corrupted == 3 and store.stats().records == 0
        assert store.write(keys(*range(8)), records(*range(8))).all() and store.stats().evicted == 0


@pytest.mark.parametrize("size", [0, 100, 4096, 5000, 12_388])
def test_a_file_cut_short_while_open_or_closed_is_misses(path, size):
    with make_slab(path) as store:
        store.write(keys(0, 1, 2), records(0, 1, 2))
    whole = path.read_bytes()
    if size:  # an empty file is a new one
        os.truncate(path, size)
        if size > 68:
            with make_slab(path) as store:
                assert read(store, 0, 1, 2) == [] and store.write(keys(0), records(0)).tolist() == [True]
                assert read(store, 0, 1) == [0]
    for direct in (False, True):
        path.write_bytes(whole)
        try:
            store = make_slab(path, direct=direct)
        except StoreError as error:
            pytest.skip(f"no O_DIRECT here: {error}")
        with store:
            os.truncate(path, size)
            assert read(store, 0, 1, 2) == []
            assert store.write(keys(0, 1), records(0, 1)).all() and read(store, 0, 1) == [0, 1]


def test_a_longer_file_keeps_its_tail(path):
    with make_slab(path) as store:
        store.write(keys(0), records(0))
    with path.open("ab") as file:
        file.write(b"tail")
    with make_slab(path) as store:
        assert read(store, 0) == [0]
    assert path.read_bytes().endswith(b"tail")


@pytest.mark.parametrize(
    "bad",
    [
        {"record_bytes": 4096.0},
        {"record_bytes": True},
        {"record_bytes": "4096"},
        {"record_bytes": None},
        {"record_bytes": 2**64},
        {"record_bytes": 10**5000},
        {"record_bytes": 1 << 40, "max_records": 1 << 40},
        {"max_records": 2**64},
        {"max_records": 1.5},
        {"max_records": -(10**5000)},
        {"key_bytes": 32.0},
        {"key_bytes": [32]},
        {"fingerprint": None},
        {"fingerprint": 7},
        {"sync": None},
        {"sync": ["close"]},
        {"direct": "no"},
        {"preallocate": 1.0},
        {"path": None},
        {"path": 3},
        {"path": "slab\0"},
    ],
    ids=lambda bad: f"{next(iter(bad))}-{type(next(iter(bad.values()))).__name__}",
)
def test_settings_of_a_wrong_type_or_size(path, bad):
    settings = {"path": path, "max_records": 8, **bad}
    with pytest.raises(StoreFormatError, match=next(iter(bad))):
        make_slab(settings.pop("path"), settings.pop("max_records"), **settings)
    assert not path.exists()


def test_settings_of_other_fitting_types(path):
    sizes = {"record_bytes": np.int64(RECORD_BYTES), "key_bytes": np.uint8(32), "fingerprint": bytearray(b"layout A")}
    for name in (str(path), os.fsencode(path)):
        with make_slab(name, np.int32(8), **sizes) as store:
            assert type(store.record_bytes) is type(store.max_records) is int
            store.write(keys(0), records(0))
    with make_slab(path) as store:
        assert read(store, 0) == [0]


@pytest.mark.parametrize(
    "bad", [None, 5, "abc", [object()] * 2, np.zeros((2, RECORD_BYTES // 8), object), {}, iter([])]
)
def test_buffers_that_are_none(path, bad):
    """An object array is a buffer of pointers: reading into it would make the interpreter follow them."""
    with make_slab(path) as store:
        store.write(keys(0, 1), records(0, 1))
        for call in (store.read_into, store.write):
            with pytest.raises(ShapeError):
                call(keys(0, 1), bad)
        for call in (store.contains, store.delete):
            with pytest.raises(StoreFormatError):
                call(None)
            with pytest.raises(StoreFormatError):
                call(7)
        times = np.zeros((2, RECORD_BYTES // 8), "datetime64[s]")  # no buffer protocol
        with pytest.raises(ShapeError, match=r"buffers\[0\]"):
            store.read_into(keys(0, 1), times)
        assert read(store, 0, 1) == [0, 1]


def test_the_file_is_part_of_the_format(path):
    """Files outlive versions: these bytes may change only together with the file's version."""
    with make_slab(path) as store:
        store.write(keys(0, 1, 2), records(0, 1, 2))
        store.delete(keys(1))
        store.write(keys(3), records(3))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert digest == "a65080dd728a37c0e9726055549e8a0e311435eea14185ba8d1f60c1abc80876"
