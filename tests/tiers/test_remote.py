"""`RecordTransport` over an engine of the test's own: pieces, deadlines, errors. And what is published, fuzzed."""

from __future__ import annotations

import contextlib
import gc
import json
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dsv4_jax as dsv4
from dsv4_jax.config import DSparkHead, DSV4Config
from dsv4_jax.errors import (
    LayoutError,
    PeerError,
    RecordMismatchError,
    ShapeError,
    StoreFormatError,
    TransferError,
)
from dsv4_jax.layout import CacheLayout
from dsv4_jax.records import page_bytes, snapshot_record, state_pages
from dsv4_jax.stores.checksum import checksums
from dsv4_jax.tiers.host_cache import HostCache
from dsv4_jax.tiers.host_memory import host_memory
from dsv4_jax.tiers.remote import RecordTransport
from dsv4_jax.tiers.remote.metadata import MAX_METADATA, PoolMetadata

from ..clock import FakeClock
from ..transports.samples import LAYOUT, PAGES, pool
from .swapping import random_host

THEIRS = pool(1)


class Engine:
    """Pages of THEIRS arrive when the test says so."""

    name = "test"

    def __init__(self):
        self.reads, self.cut, self.closed, self.failure = [], [], 0, None

    def register(self, host, pages):
        self.pages = pages
        return b"here"

    def connect(self, host, metadata, num_pages):
        if self.failure:
            raise self.failure
        return host

    def start(self, link, source, destination):
        if self.failure:
            raise self.failure
        self.reads.append(Read(self.pages, source, destination))
        return self.reads[-1]

    def send(self, link, message):
        raise OSError("the line is dead")

    def received(self):
        if self.failure:
            raise self.failure
        return [("them", b"hello")]

    def disconnect(self, link):
        self.cut.append(link)

    def close(self):
        self.closed += 1


class Read:
    def __init__(self, pages, source, destination):
        self.pages, self.ids, self.done, self.released, self.failure = pages, (source, destination), False, 0, None

    def arrive(self):
        for theirs, ours in zip(*self.ids, strict=True):
            self.pages[ours][:] = THEIRS[theirs]
        self.done = True

    def is_done(self):
        if self.failure:
            raise self.failure
        return self.done

    def release(self):
        self.released += 1


@pytest.fixture
def made(monkeypatch):
    monkeypatch.setattr("dsv4_jax.tiers.remote.transport.PIECE_BYTES", 2 * LAYOUT_BYTES)
    engine, clock, ours = Engine(), FakeClock(), pool()
    transport = RecordTransport(engine, timeout=10, clock=clock)
    transport.publish(LAYOUT, ours)
    peer = transport.connect(metadata())
    return engine, clock, ours, transport, peer


LAYOUT_BYTES = THEIRS.shape[1]


def metadata(**changes) -> bytes:
    prints = LAYOUT.block_fingerprint, LAYOUT.snapshot_fingerprint
    fields = PoolMetadata("test", "them", PAGES, LAYOUT_BYTES, *prints, b"there")
    return PoolMetadata(**{**vars(fields), **changes}).pack()


def their_checksums(kind, ids):
    with RecordTransport(Engine()) as other:
        other.publish(LAYOUT, THEIRS.copy())
        return other.checksums(kind, ids)


def test_a_read_goes_in_pieces_two_at_once_each_verified(made):
    engine, clock, ours, transport, peer = made
    ids = [1, 2, 3, 4, 5, 6, 7]
    sums = their_checksums("block", ids)
    sums[4] = bytes(16)
    handle = transport.read(peer, "block", ids, ids, sums)
    assert not handle.is_ready() and len(engine.reads) == 2
    for started in (3, 4, 4, 4):
        engine.reads[started - 3 if started < 4 else [r.done for r in engine.reads].index(False)].arrive()
        handle.is_ready()
        assert len(engine.reads) == started
    assert handle.is_ready() and [each.released for each in engine.reads] == [1] * 4
    assert isinstance(handle.error, RecordMismatchError) and (handle.error.sources, peer.error) == ([5], None)
    np.testing.assert_array_equal(ours[ids], THEIRS[ids])
    with pytest.raises(RecordMismatchError, match=r"1 pages .*5 -> 5"):
        handle.wait()
    clock.advance(100)  # it is over
    assert isinstance(handle.error, RecordMismatchError)


def test_checksums_tell_kinds_apart(made):
    engine, _, _, transport, peer = made
    handle = transport.read(peer, "snapshot", [1, 2, 3], [1, 2, 3], their_checksums("block", [1, 2, 3]))
    for _ in range(2):
        engine.reads[-1].arrive(), engine.reads[0].arrive(), handle.is_ready()
    assert isinstance(handle.error, RecordMismatchError) and handle.error.destinations == [1, 2, 3]


@pytest.mark.parametrize("drafts", [False, True])
def test_snapshots_of_a_host_that_drafts_and_of_one_that_does_not(drafts):
    """`drafts`: whether theirs have the windows of stages. Pages are read as far as both have them."""
    config = DSV4Config.tiny(dspark=DSparkHead(5, 3, (0, 1), 8))
    theirs, ours = (CacheLayout(config, include_drafts=each) for each in (drafts, not drafts))
    there, here, short = state_pages(theirs, 0), state_pages(ours, 0), snapshot_record(theirs if not drafts else ours)
    common, width, pages = min(there, here), page_bytes(ours), pool(2, ours)
    engine = Engine()
    with RecordTransport(engine) as transport:
        transport.publish(ours, pages)
        prints = theirs.block_fingerprint, theirs.snapshot_fingerprint
        peer = transport.connect(PoolMetadata("test", "them", PAGES, width, *prints, b"there").pack())
        record = [pages[i] for i in range(1, 1 + there)]
        sums = checksums(record, [b"snapshot"] * there, bytes.fromhex(prints[1]), [0] * there)
        for destination in (range(1, 2 * here + 1), [5] * here):
            with pytest.raises(TransferError, match=r"source pages|there twice"):
                transport.read(peer, "snapshot", range(1, 1 + there), destination, None)
        with pytest.raises(TransferError, match="checksums"):
            transport.read(peer, "snapshot", range(1, there + 1), range(1, here + 1), sums[1:])
        into = [*range(20, 20 + here)]
        handle = transport.read(peer, "snapshot", range(1, there + 1), into, sums)
        with pytest.raises(TransferError, match="written by another read"):
            transport.read(peer, "block", [1], [into[-1]], None)
        (read,) = engine.reads
        assert read.ids[0].tolist() == [*range(1, common + 1)] and read.ids[1].tolist() == into[:common]
        pages[into[:common]], read.done = pages[1 : common + 1], True
        handle.wait()
        record = pages[into].ravel()
        assert (record[: short.bytes] == pages[1 : common + 1].ravel()[: short.bytes]).all()
        assert not record[short.bytes :].any() and there != here


def test_a_page_belongs_to_one_read_at_a_time(made):
    engine, _, _, transport, peer = made
    first = transport.read(peer, "block", [1], [9], None)
    with pytest.raises(TransferError, match="page 9 at index 1 is written by another read"):
        transport.read(peer, "block", [1, 2], [8, 9], None)
    engine.reads[0].arrive()
    first.wait()
    transport.read(peer, "block", [1, 2], [8, 9], None)


def test_a_deadline_ends_all_reads_of_the_peer_once_it_is_cut_off(made):
    engine, clock, _, transport, peer = made
    slow = transport.read(peer, "block", [1], [1], None)
    other = transport.read(peer, "block", [2], [2], None, timeout=1000)
    clock.advance(9)
    assert not slow.is_ready() and engine.cut == []
    clock.advance(1)
    assert slow.is_ready() and other.is_ready() and engine.cut == ["them"]
    for handle in (slow, other):
        with pytest.raises(PeerError, match="did not end in time"):
            handle.wait()
    assert [each.released for each in engine.reads] == [1, 1]
    with pytest.raises(PeerError, match=r"gone: .*did not end in time"):
        transport.read(peer, "block", [1], [1], None)
    again = transport.connect(metadata())
    assert again is peer and peer.error is None and transport.connect(metadata()) is again
    transport.read(again, "block", [1, 2], [1, 2], None)


@pytest.mark.parametrize("when", ["start", "later"])
def test_an_error_of_the_engine_loses_the_peer_and_is_the_cause(made, when):
    engine, _, _, transport, peer = made
    failure = KeyError("no such memory")
    if when == "start":
        engine.failure = failure
    handle = transport.read(peer, "block", [1], [1], None)
    if when == "later":
        engine.reads[0].failure = failure
    with pytest.raises(PeerError, match=r"them.*KeyError: 'no such memory'") as caught:
        handle.wait()
    assert caught.value.__cause__ is failure and str(peer.error) == str(caught.value) and engine.cut == ["them"]


def test_the_error_of_a_lost_peer_keeps_nothing_of_those_who_met_it(made):
    """Neither pages of an engine's call nor what its readers have: no frames, however often they ask."""
    engine, _, _, transport, peer = made
    handles = [transport.read(peer, "block", [i], [i], None) for i in (1, 2)]
    kept: list[weakref.ref] = []

    def fails():
        page = np.zeros(1)
        kept.append(weakref.ref(page))
        raise OSError("the link broke")

    def asks(handle):
        mine = np.zeros(1)
        kept.append(weakref.ref(mine))
        with contextlib.suppress(PeerError):
            handle.wait()

    engine.reads[0].is_done = fails
    for handle in (*handles, *handles):
        asks(handle)
    assert peer.error is not None and [each() for each in kept] == [None] * 5
    assert [each.error.peer for each in handles] == ["them"] * 2 and "the link broke" in str(handles[1].error)


def test_errors_of_other_calls_of_the_engine(made):
    engine, _, _, transport, peer = made
    with pytest.raises(PeerError, match="the line is dead"):
        transport.notify(peer, b"x")
    assert engine.cut == ["them"]
    engine.failure = OSError("no memory")
    for call in (lambda: transport.connect(metadata()), transport.notices):
        with pytest.raises(TransferError, match="no memory"):
            call()
    with pytest.raises(TransferError, match="no peer"):
        transport.read("them", "block", [1], [1], None)


def test_close_ends_reads_lets_go_of_the_pages_and_of_the_engine(made):
    engine, _, _, transport, peer = made
    handle = transport.read(peer, "block", [1], [1], None)
    transport.close()
    transport.close()
    assert engine.cut == ["them"] and engine.closed == 1 and transport.num_pages == 0
    with pytest.raises(TransferError):
        handle.wait()
    with pytest.raises(TransferError):
        transport.checksums("block", [1])


def test_pages_and_settings_are_checked_before_anything_is_registered():
    good = pool()
    read_only = good.copy()
    read_only.flags.writeable = False
    for wrong in (None, good.astype(np.int8), good[:, :-1], good[:1], good[::2], read_only):
        transport = RecordTransport(Engine())
        with pytest.raises(ShapeError, match="pages"):
            transport.publish(LAYOUT, wrong)
        transport.publish(LAYOUT, good)
    for wrong in (0, True, "1", float("nan")):
        with pytest.raises(StoreFormatError, match="timeout"):
            RecordTransport(Engine(), timeout=wrong)


def test_what_differs_is_named(made):
    transport = made[3]
    cases = {
        r"\(blocks: theirs 0000": dict(block_fingerprint="0" * 64),
        r"\(snapshots: theirs 0000": dict(snapshot_fingerprint="0" * 64),
        r"\(bytes of a page: theirs 128": dict(page_bytes=128),
    }
    other = CacheLayout(LAYOUT.cfg, block_tokens=LAYOUT.block_tokens, numerics="released")
    prints = dict(block_fingerprint=other.block_fingerprint, snapshot_fingerprint=other.snapshot_fingerprint)
    cases["blocks: theirs .*; snapshots: theirs"] = prints
    for problem, change in cases.items():
        with pytest.raises(LayoutError, match=problem):
            transport.connect(metadata(**change))
    with pytest.raises(TransferError, match="on engine 'other'"):
        transport.connect(metadata(engine="other"))
    with pytest.raises(TransferError, match="at most"):
        metadata(reach=bytes(MAX_METADATA))


FIELDS = json.loads(metadata())
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=4), x, max_size=3),
    max_leaves=5,
)


@given(
    st.one_of(
        st.binary(max_size=64),
        st.builds(
            lambda at, byte: metadata()[:at] + bytes([byte]) + metadata()[at + 1 :],
            st.integers(0, len(metadata()) - 1),
            st.integers(0, 255),
        ),
        st.builds(lambda end: metadata()[:end], st.integers(0, len(metadata()) - 1)),
        st.builds(
            lambda key, value: json.dumps({**FIELDS, key: value}).encode(), st.sampled_from([*FIELDS, "more"]), JSON
        ),
    )
)
def test_metadata_is_read_as_it_was_written_or_refused(data):
    if data == metadata():
        return
    try:
        found = PoolMetadata.unpack(data)
    except TransferError as error:
        assert "\n" not in str(error) and len(str(error)) < 500
    else:
        assert found.pack() == metadata()  # white space, or a value as it was


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"[" * 100_000, "nested too deep"),
        (b" " * (MAX_METADATA + 1), "at most"),
        (b'{"format": 1, "format": 1}', "twice"),
        (json.dumps({**FIELDS, "num_pages": 10**30}).encode(), "num_pages must be an integer"),
        (json.dumps({**FIELDS, "host": "a\nb"}).encode(), "host is no printable name"),
        (json.dumps({**FIELDS, "num_pages": 2}).encode(), "digest does not match"),
        (json.dumps({**FIELDS, "format": "dsv4_jax records 2"}).encode(), "only 'dsv4_jax records 1' can be read"),
        ("{}", "must be bytes"),
    ],
)
def test_metadata_of_other_forms(data, problem):
    with pytest.raises(TransferError, match=problem):
        PoolMetadata.unpack(data)


def test_a_published_pool_is_kept_alive_and_looked_after():
    """From one donation to the next, and until the transport is closed."""
    fill = jax.jit(lambda pages, byte: pages.at[3].set(byte), donate_argnums=0)
    host = dsv4.init_host_cache(LAYOUT, PAGES)
    engine = Engine()
    with RecordTransport(engine) as transport:
        transport.publish_host(host)
        assert engine.pages.memories[0].ctypes.data == host_memory(host).ctypes.data
        alive = weakref.ref(host.pages)
        del host
        gc.collect()
        host = HostCache(alive(), LAYOUT)
        host = HostCache(fill(host.pages, np.uint8(7)), LAYOUT)
        transport.check_host(host)
        assert (engine.pages[3] == 7).all()
        alive = weakref.ref(host.pages)
        stale = host
        host = HostCache(jnp.copy(host.pages), LAYOUT)  # as by a step that it was not donated to
        with pytest.raises(TransferError, match=r"not where pages were published.*copied instead of donated"):
            transport.check_host(host)
        fill(stale.pages, np.uint8(8))
        with pytest.raises(TransferError, match="was donated: give what it was donated for"):
            transport.check_host(stale)
        del stale
        gc.collect()
        assert alive() is not None
    gc.collect()
    assert alive() is None


def test_a_view_of_a_pool_is_refused_and_the_error_says_what_to_call():
    """Not "writable", which a copy is."""
    host = dsv4.init_host_cache(LAYOUT, PAGES)
    with RecordTransport(Engine()) as transport:
        for wrong in (np.asarray(host.pages), host.pages, host):
            with pytest.raises(ShapeError, match="publish_host"):
                transport.publish(LAYOUT, wrong)


def test_host_memory_is_the_pool_itself():
    host = random_host(LAYOUT, 0)
    memory = host_memory(host)
    np.testing.assert_array_equal(memory, np.asarray(host.pages))
    memory[3] = 7
    assert (np.asarray(host.pages)[3] == 7).all() and memory.ctypes.data == host_memory(host).ctypes.data
    with RecordTransport(Engine()) as transport:
        transport.publish(LAYOUT, memory)
