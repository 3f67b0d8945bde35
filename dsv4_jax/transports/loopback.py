"""`LoopbackEngine`: the engine of sockets on one machine, in one process or between several. For tests, and for trying
things out. No jax, no dependency."""

from __future__ import annotations

from .sockets import SocketEngine, problem

__all__ = ["LoopbackEngine", "problem"]


class LoopbackEngine(SocketEngine):
    """The `TransportEngine` between hosts of one machine."""

    name = "loopback"

    def __init__(self) -> None:
        super().__init__("127.0.0.1")
