"""Handles of transfers: whether they have ended, how, how long they took, and how long somebody waits."""

from __future__ import annotations

import pytest

from dsv4_jax.errors import TransferError, TransferTimeoutError
from dsv4_jax.tiers.transfer_handle import TransferHandle

from ..clock import FakeClock


class Token:
    """Stands for an array whose computation has ended after so many looks at it; each look takes a quarter second."""

    def __init__(self, clock: FakeClock, looks: int | None = None, error: Exception | None = None):
        self.clock, self.looks, self.failure = clock, looks, error

    def is_ready(self) -> bool:
        self.clock.advance(0.25)
        if self.looks:
            self.looks -= 1
        return self.looks == 0

    def block_until_ready(self) -> None:
        assert self.looks is not None, "waits for ever"
        while not self.is_ready():
            pass
        if self.failure:
            raise self.failure


def handle_of(token: Token, **started: float) -> TransferHandle:
    return TransferHandle(token, clock=token.clock, **started)


@pytest.mark.parametrize("timeout", [0.75, 0])
def test_a_wait_ends_at_its_timeout_and_the_transfer_goes_on(timeout):
    token = Token(FakeClock())
    handle, before = handle_of(token), token.clock()
    assert not handle.is_ready() and handle.error is None
    before = token.clock()
    with pytest.raises(TransferTimeoutError, match=rf"within {timeout} s") as caught:
        handle.wait(timeout)
    assert token.clock() - before == max(timeout, 0.25) and isinstance(caught.value, TimeoutError)
    token.looks = 5
    handle.wait(60)
    assert handle.is_ready() and handle.error is None
    handle.wait(0), handle.wait()


def test_a_handle_knows_how_long_its_transfer_took():
    token = Token(FakeClock())
    handle, started = handle_of(token), token.clock()
    assert handle.duration is None
    with pytest.raises(TransferTimeoutError):
        handle.wait(1)
    assert handle.duration is None
    token.looks = 1
    took = handle.duration  # looking at it is a look
    assert took == token.clock() - started > 1
    token.clock.advance(10)
    handle.wait(60)
    assert handle.duration == took and handle.is_ready()


@pytest.mark.parametrize("look", ["wait", "wait_long", "is_ready", "error"])
def test_the_first_look_that_finds_a_transfer_ended_ends_its_duration(look):
    clock = FakeClock()
    handle = handle_of(Token(clock, looks=1), started=clock() - 5)
    {
        "wait": handle.wait,
        "wait_long": lambda: handle.wait(60),
        "is_ready": handle.is_ready,
        "error": lambda: handle.error,
    }[look]()
    looked = clock()
    clock.advance(10)
    assert 5 < handle.duration <= looked - (FakeClock()() - 5)


def test_a_failed_transfer_has_a_duration_too():
    handle = handle_of(Token(FakeClock(), looks=2, error=RuntimeError("the link is down")))
    with pytest.raises(TransferError):
        handle.wait()
    assert handle.duration > 0


@pytest.mark.parametrize("timeout", [None, 60])
def test_a_failed_transfer_says_so_to_everybody_who_asks(timeout):
    token = Token(FakeClock(), looks=3, error=RuntimeError("the link is down"))
    handle = handle_of(token)
    for _ in range(2):
        with pytest.raises(TransferError, match="the link is down") as caught:
            handle.wait(timeout)
        assert caught.value.__cause__ is handle.error is token.failure and handle.is_ready()
