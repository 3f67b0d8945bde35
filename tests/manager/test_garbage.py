"""Serving leaves no reference cycles: an engine may switch Python's garbage collector off (docs/manager.md)."""

from __future__ import annotations

import gc

from dsv4_jax.manager import HostSize

from .test_caching import LAYOUT, PROMPT, feed, make, serve


def cycles_of(call) -> list[str]:
    """The classes of this package whose objects only the garbage collector can free, after a call."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        call()
        gc.collect()
        return [type(thing).__name__ for thing in gc.garbage if type(thing).__module__.startswith("dsv4_jax")]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_requests_and_evictions_leave_no_cycles() -> None:
    manager = make(host=HostSize.of(LAYOUT, 8, 2))

    def work() -> None:
        for i in range(12):
            serve(manager, [i, *PROMPT])
        request = manager.admit_request([3, *PROMPT])
        feed(manager, request)
        (fork,) = manager.fork(request)
        manager.plan_step([])
        manager.preempt(fork)
        manager.take_transfers()
        manager.resume(fork)
        manager.plan_step([])
        manager.take_transfers()
        manager.abort_request(fork)
        manager.release_request(request)

    work()
    assert cycles_of(work) == []
    manager.check_integrity()


def test_a_reset_leaves_the_old_tree_to_the_collector() -> None:
    manager = make()
    serve(manager)
    assert "Node" in cycles_of(manager.reset)
