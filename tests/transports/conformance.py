"""What every engine under a `RecordTransport` must do: one class, subclassed for each. Two processes, or one."""

from __future__ import annotations

import base64
import os
import signal
import threading
import time

import numpy as np
import pytest

from dsv4_jax.config import DSV4Config
from dsv4_jax.errors import (
    LayoutError,
    PeerError,
    RecordMismatchError,
    TransferError,
)
from dsv4_jax.layout import CacheLayout
from dsv4_jax.records import state_pages
from dsv4_jax.tiers.remote import Pages
from dsv4_jax.tiers.remote.transport import MAX_NOTICE

from ..clock import PATIENCE, FakeClock
from .peer import host
from .samples import LAYOUT, PAGES, open_transport, pool

THEIRS = pool(1)


def wait_for_notices(transport, count):
    notices, until = [], time.monotonic() + PATIENCE
    while len(notices) < count and time.monotonic() < until:
        notices += transport.notices()
        time.sleep(0.001)
    return notices


def files_and_threads() -> tuple[int, int]:
    """Of this process; threads of Python's alone, since the runtime of jax starts its own when it likes."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()


class TransportConformance:
    engine: str  # name

    @pytest.fixture(scope="class")
    @classmethod
    def other(cls):
        with host(cls.engine) as started:
            yield started

    @pytest.fixture(scope="class")
    @classmethod
    def shared(cls):
        """A transport and its pages: making one takes some engines a while."""
        pages = pool()
        with open_transport(cls.engine, timeout=PATIENCE) as transport:
            transport.metadata = transport.publish(LAYOUT, pages)
            yield transport, pages

    @pytest.fixture
    def transport(self, shared):
        shared[1][:] = 0
        return shared[0]

    @pytest.fixture
    def peer(self, transport, other):
        return transport.connect(other.metadata)

    @pytest.fixture
    def ours(self, request):
        return request.getfixturevalue("shared")[1] if "transport" in request.fixturenames else pool()

    def test_pages_of_another_process_arrive_where_they_should_and_nowhere_else(self, transport, peer, other, ours):
        rng, expected = np.random.default_rng(0), ours.copy()
        assert (peer.num_pages, peer.error) == (PAGES, None)
        for count in (0, 1, 7, PAGES):
            source = rng.integers(1, PAGES + 1, count)  # some repeat
            destination = 1 + rng.permutation(PAGES)[:count]
            handle = transport.read(peer, "block", source, destination, other.checksums("block", source.tolist()))
            assert handle.wait(PATIENCE) is None and handle.is_ready() and handle.error is None
            expected[destination] = THEIRS[source]
            np.testing.assert_array_equal(ours, expected)

    def test_reads_under_way_together_and_a_snapshot(self, transport, peer, other, ours):
        pages = state_pages(LAYOUT, 0)
        sets = [("block", [5, 6]), ("snapshot", list(range(10, 10 + pages))), ("block", [1])]
        handles = [transport.read(peer, kind, ids, ids, other.checksums(kind, ids)) for kind, ids in sets]
        for handle, (_, ids) in reversed(list(zip(handles, sets, strict=True))):
            handle.wait(PATIENCE)
            np.testing.assert_array_equal(ours[ids], THEIRS[ids])

    def test_pages_that_changed_since_are_named_and_the_others_are_good(self, transport, peer, other, ours):
        ids = [2, 3, 9]
        sums = other.checksums("block", ids)
        other.ask("overwrite", 3)
        handle = transport.read(peer, "block", ids, [12, 13, 14], sums)
        with pytest.raises(RecordMismatchError, match=r"3 -> 13") as caught:
            handle.wait(PATIENCE)
        assert (caught.value.sources, caught.value.destinations) == ([3], [13])
        np.testing.assert_array_equal(ours[[12, 14]], THEIRS[[2, 9]])
        other.ask("overwrite", 3)  # as it was
        transport.read(peer, "block", ids, [12, 13, 14], sums).wait(PATIENCE)

    def test_notices_go_both_ways_in_their_order(self, transport, peer, other):
        messages = [b"", b"a record is free", bytes(range(256)) * 400]
        for message in messages:
            transport.notify(peer, message)
        heard = other.ask("notices", len(messages))
        assert heard == [[transport.name, message.hex()] for message in messages]
        me = other.ask("connect", base64.b64encode(transport.metadata).decode())
        assert me == transport.name
        for message in messages:
            other.ask("notify", me, message.hex())
        assert wait_for_notices(transport, 3) == [(peer.name, message) for message in messages]
        assert transport.notices() == []
        for wrong in ("text", b"x" * (MAX_NOTICE + 1)):
            with pytest.raises(TransferError, match="notice must be at most"):
                transport.notify(peer, wrong)

    def test_two_transports_of_one_process_read_from_each_other(self, transport, ours):
        """And one's pages lie in the memories of two pool ranks."""
        mine = pool(5)
        ranks = [np.concatenate([mine[:1], mine[1 + rank :: 2]]) for rank in (0, 1)]
        with open_transport(self.engine, timeout=PATIENCE) as second:
            there, here = transport.connect(second.publish(LAYOUT, ranks)), second.connect(transport.metadata)
            assert there.num_pages == PAGES
            transport.read(there, "block", [4, 5], [1, 2], second.checksums("block", [4, 5])).wait(PATIENCE)
            second.read(here, "block", [2], [9], transport.checksums("block", [2])).wait(PATIENCE)
        np.testing.assert_array_equal(ours[[1, 2]], mine[[4, 5]])
        np.testing.assert_array_equal(Pages(ranks)[9], mine[5])

    def test_ids_are_checked_against_both_pools_before_anything_moves(self, transport, peer, other, ours):
        cases = [
            (([0], [1]), "source page at index 0 must be an integer"),
            (([1, PAGES + 1], [1, 2]), f"source page at index 1 must be an integer from 1 to {PAGES}, got {PAGES + 1}"),
            (([1], [-1]), "destination page at index 0 must be .* got -1"),
            (([1], [True]), "destination page at index 0 must be .* got True"),
            (([1, 2], [3, 3]), "destination page 3 at index 1 is there twice"),
            (([1, 2], [3]), "2 source pages for 1 destinations"),
            (([1], [1], [b"short"]), "checksum at index 0"),
            (([1], [1], []), "0 checksums for 1 pages"),
        ]
        for arguments, problem in cases:
            source, destination, sums = (*arguments, None)[:3]
            with pytest.raises(TransferError, match=problem):
                transport.read(peer, "block", source, destination, sums)
        for kind, problem in (("snapshot", "no whole snapshots"), ("slot", "kind must be")):
            with pytest.raises(TransferError, match=problem):
                transport.read(
                    peer, kind, [1] * (state_pages(LAYOUT, 0) + 1), range(1, state_pages(LAYOUT, 0) + 2), None
                )
        assert not ours.any()

    def test_records_that_mean_something_else_are_refused_at_connect(self, other):
        unlike = {
            "blocks": CacheLayout(DSV4Config.tiny(), index_format="fp8"),
            "snapshots": CacheLayout(DSV4Config.tiny(sliding_window=64)),
        }
        for what, layout in unlike.items():
            with open_transport(self.engine) as transport:
                transport.publish(layout, pool(None, layout, 2))
                with pytest.raises(LayoutError, match=what):
                    transport.connect(other.metadata)
        drafts = CacheLayout(DSV4Config.tiny(), draft_tokens=2)
        with open_transport(self.engine) as transport:
            transport.publish(drafts, pool(None, drafts, 2))
            assert transport.connect(other.metadata).num_pages == PAGES

    def test_a_peer_that_is_killed_ends_its_reads_and_takes_no_more(self, ours):
        clock = FakeClock()
        with open_transport(self.engine, clock=clock) as transport, host(self.engine, seed=2) as dying:
            transport.publish(LAYOUT, ours)
            peer = transport.connect(dying.metadata)
            transport.read(peer, "block", [1], [1], dying.checksums("block", [1])).wait(PATIENCE)
            dying.process.kill()
            dying.process.wait()
            try:
                handle = transport.read(peer, "block", [1, 2], [2, 3], None)
            except PeerError:
                pass  # it has been seen already
            else:
                self.pass_deadline(clock, handle)
                assert isinstance(handle.error, PeerError)
            assert peer.error is not None
            for again in (lambda: transport.read(peer, "block", [1], [1], None), lambda: transport.notify(peer, b"")):
                with pytest.raises(PeerError, match="gone"):
                    again()
            transport.disconnect(peer)  # nothing left to do
        assert not ours[2:].any()

    def test_a_peer_that_hangs_is_lost_at_the_deadline_and_may_come_back(self, ours):
        clock, every = FakeClock(), list(range(1, PAGES + 1))
        with open_transport(self.engine, clock=clock) as transport, host(self.engine, seed=3) as stuck:
            transport.publish(LAYOUT, ours)
            sums, expected = stuck.checksums("block", every), pool(3)
            peer = transport.connect(stuck.metadata)
            stuck.process.send_signal(signal.SIGSTOP)
            handle = transport.read(peer, "block", every, every, sums)
            self.pass_deadline(clock, handle)
            # Memory of a process that stands still can be read by some engines.
            assert isinstance(handle.error, PeerError) if handle.error else (ours == expected).all()
            ours[1:] = 0
            stuck.process.send_signal(signal.SIGCONT)
            if peer.error:
                peer = transport.connect(stuck.metadata)
            handle = transport.read(peer, "block", every, every, sums)
            handle.wait(PATIENCE)
            np.testing.assert_array_equal(ours, expected)

    def pass_deadline(self, clock, handle):
        until = time.monotonic() + PATIENCE
        while not handle.is_ready() and time.monotonic() < until:
            clock.advance(1)
            time.sleep(0.01)
        assert handle.is_ready()

    def test_disconnect_and_close_end_reads_and_let_go_of_everything(self, other, ours):
        self.connect_and_close(other, ours)  # what an engine keeps for the process
        before = files_and_threads()
        for _ in range(2):
            self.connect_and_close(other, ours)
        until = time.monotonic() + PATIENCE
        while any(map(int.__gt__, files_and_threads(), before)) and time.monotonic() < until:
            time.sleep(0.01)  # jax's sockets are closed by and by
        assert not any(map(int.__gt__, files_and_threads(), before))

    def connect_and_close(self, other, ours):
        transport = open_transport(self.engine, timeout=PATIENCE)
        with pytest.raises(TransferError, match="publish"):
            transport.connect(other.metadata)
        transport.publish(LAYOUT, ours)
        with pytest.raises(TransferError, match="once"):
            transport.publish(LAYOUT, ours)
        peer = transport.connect(other.metadata)
        handle = transport.read(peer, "block", [1, 2], [1, 2], None)
        transport.disconnect(peer)
        transport.disconnect(peer)
        assert handle.is_ready() and isinstance(handle.error, PeerError | None)
        with pytest.raises(PeerError, match="disconnected"):
            transport.read(peer, "block", [1], [1], None)
        peer = transport.connect(other.metadata)
        handle = transport.read(peer, "block", [1, 2], [1, 2], None)
        transport.close()
        transport.close()
        assert handle.is_ready() and isinstance(handle.error, TransferError | None)
        for call in (transport.notices, lambda: transport.connect(other.metadata), lambda: transport.notify(peer, b"")):
            with pytest.raises(TransferError):
                call()
