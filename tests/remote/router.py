"""The router of a prefill and a decode host, two processes: who computes what, and what if one of them dies. No jax."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import multiprocessing.connection
import time
from collections.abc import Callable
from typing import Any

from dsv4_jax.manager import Namespace

from .byte_engine import answer
from .hosts import LEASE, Faults, decode_host, prefill_host

__all__ = ["Asked", "Child", "Router"]

_SPAWN = multiprocessing.get_context("spawn")
PATIENCE = 60.0  # seconds, after which something hangs


class Child:
    """A process and its end of the pipe."""

    def __init__(self, main: Callable[..., None], seed: int):
        self.pipe, theirs = _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=main, args=(theirs, seed), daemon=True)
        self.process.start()
        theirs.close()
        self.alive = True

    def tell(self, *what: Any) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.pipe.send(what)

    def heard(self) -> list[tuple[Any, ...]]:
        """What it has said, up to its death."""
        messages = []
        try:
            while self.pipe.poll(0):
                messages.append(self.pipe.recv())
        except (EOFError, ConnectionResetError):
            self.alive = False
        return messages

    def wait(self, word: str) -> tuple[Any, ...]:
        """What it says with this word; what it says before is of no interest any more."""
        while self.pipe.poll(PATIENCE):
            if (message := self.pipe.recv())[0] == word:
                return message
        raise TimeoutError(f"a host does not say {word!r}")

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def stop(self) -> None:
        self.tell("stop")
        self.process.join(10)
        self.process.kill()
        self.pipe.close()


@dataclasses.dataclass(eq=False)
class Asked:
    """A request, and what became of it.

    Attributes:
        remote: whether its prompt is being computed by the prefill host.
        hit: whether it started from all that the prefill host had of it.
        failures: why hand-offs of it were given up.
        lives: how often it was given to a decode host.
    """

    number: int
    tokens: list[int]
    count: int
    space: Namespace
    remote: bool = True
    got: list[int] | None = None
    hit: bool = False
    recomputed: bool = False
    failures: list[str] = dataclasses.field(default_factory=list)
    lives: int = 0

    @property
    def is_right(self) -> bool:
        return self.got == answer(self.space, self.tokens, self.count)


class Router:
    """Starts the hosts anew when they die, and gives them again what they had not ended."""

    def __init__(self, seed: int = 0):
        self.seed = seed
        self.asked: dict[int, Asked] = {}
        self.prefill = self.decode = None
        self.metadata = b""
        self.deaths = 0
        self._start_prefill()
        self._start_decode()

    def _start_prefill(self) -> None:
        self.seed += 1
        self.prefill = Child(prefill_host, self.seed)
        _, self.metadata = self.prefill.wait("metadata")

    def _start_decode(self) -> None:
        self.seed += 1
        self.decode = Child(decode_host, self.seed)
        self.decode.wait("metadata")
        self.decode.tell("connect", self.metadata)

    def fail(self, faults: Faults) -> None:
        for child in (self.prefill, self.decode):
            child.tell("fail", faults)

    def ask(self, tokens: list[int], count: int, space: Namespace) -> Asked:
        asked = Asked(len(self.asked), tokens, count, space)
        self.asked[asked.number] = asked
        self._send(asked)
        return asked

    def _send(self, asked: Asked) -> None:
        asked.remote, asked.lives = True, asked.lives + 1
        self.decode.tell("request", asked.number, asked.tokens, asked.count, asked.space, False)
        self.prefill.tell("prompt", asked.number, asked.tokens, asked.space)

    @property
    def open(self) -> list[Asked]:
        return [asked for asked in self.asked.values() if asked.got is None]

    def turn(self) -> None:
        """Hears both, and sees whether they live."""
        multiprocessing.connection.wait([self.prefill.pipe, self.decode.pipe], 0.002)
        for word, *what in self.prefill.heard():
            if word == "handoff":
                self.decode.tell("handoff", *what)
        for word, number, *what in self.decode.heard():
            asked = self.asked[number]
            if word == "started":
                asked.hit |= what[1]
                asked.recomputed |= not what[1]
            elif word == "failure":
                asked.failures.append(what[0])
            elif word == "done":
                asked.got = what[0]
        if not self.prefill.alive:
            self.deaths += 1
            self.prefill.kill()
            self._start_prefill()
            self.decode.tell("connect", self.metadata)
            for asked in self.open:  # computed where they are
                self.decode.tell("alone", asked.number)
        if not self.decode.alive:
            self.deaths += 1
            self.decode.kill()
            self._start_decode()
            for asked in self.open:
                self._send(asked)

    def run(self, at: list[tuple[float, Callable[[], None]]]) -> None:
        """Until everything is answered; `at`: what happens after so many seconds."""
        began, left = time.monotonic(), sorted(at, key=lambda item: item[0])
        while self.open or left or not all(child.process.is_alive() for child in (self.prefill, self.decode)):
            while left and time.monotonic() - began >= left[0][0]:
                left.pop(0)[1]()
            self.turn()
            if time.monotonic() - began > PATIENCE:
                raise TimeoutError(f"{len(self.open)} requests are not answered")

    def held(self) -> dict[str, int]:
        """What the hosts hold once leases are over: units by what and where; {} for nothing."""
        began, held = time.monotonic(), {"all": 1}
        while held and time.monotonic() - began < 20 * LEASE:
            time.sleep(LEASE / 8)
            held = {}
            for name, child in (("prefill", self.prefill), ("decode", self.decode)):
                child.tell("held")
                message = child.wait("held")
                held |= {f"{name} {what}": count for what, count in message[1].items() if count}
        return held

    def close(self) -> None:
        for child in (self.prefill, self.decode):
            child.stop()
