"""Engines of `dsv4_jax.tiers.remote`: what moves records between machines. The modules load on first use.

| name | engine | takes |
| --- | --- | --- |
| "nixl" | `nixl.NixlEngine`: RDMA, TCP, shared memory, by UCX | the extra `nixl12` or `nixl13`, a trusted network |
| "jax" | `jax_transfer.JaxEngine`: TCP, `jax.experimental.transfer` | a trusted network |
| "sockets" | `sockets.SocketEngine`: TCP, with TLS and a token where nothing is trusted | nothing |
| "loopback" | `loopback.LoopbackEngine`: sockets of one machine, for tests | nothing |

All of them listen where they are told to, and if they are not told, where no other machine reaches them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ..errors import ImplementationError

if TYPE_CHECKING:
    from ..tiers.remote import TransportEngine

__all__ = ["ENGINES", "engine_problem", "open_engine"]

# name -> its module and class
ENGINES = {
    "nixl": ("nixl", "NixlEngine"),
    "jax": ("jax_transfer", "JaxEngine"),
    "sockets": ("sockets", "SocketEngine"),
    "loopback": ("loopback", "LoopbackEngine"),
}


def open_engine(name: str, **options: Any) -> TransportEngine:
    """An engine of this name, for one `RecordTransport`.

    Args:
        name: of `ENGINES`.
        options: of its class.

    Raises:
        ImplementationError: there is none, or it cannot run here; says what to do.
        TransferError: its options cannot be, as an address that no other host could connect to.
    """
    if name not in ENGINES:
        raise ImplementationError(f"unknown transport {name!r}, expected one of {', '.join(map(repr, ENGINES))}")
    if (problem := engine_problem(name)) is not None:
        raise ImplementationError(f"transport {name!r}: {problem}")
    return getattr(_module(name), ENGINES[name][1])(**options)


def engine_problem(name: str) -> str | None:
    """Why an engine cannot run here; None if it can. Starts nothing."""
    return _module(name).problem()


def _module(name: str) -> Any:
    return importlib.import_module(f".{ENGINES[name][0]}", __name__)
