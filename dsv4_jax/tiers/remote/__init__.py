"""Host records of other machines, read into ours, and prompts handed from host to host. Imports no jax.

| | |
| --- | --- |
| `transport` | `RecordTransport`: publish pages, connect, read, notify |
| `peer` | `Peer`: another host, lost and found; what is counted |
| `engine` | `TransportEngine`: what moves the bytes under it, the contract of `dsv4_jax.transports` |
| `driver` | `RemoteDriver`: exports and arrivals of a manager, over a transport |
| `pages` | `Pages`: the host pool's pages by their ids, of one device or of several pool ranks |
| `metadata`, `checks`, `read` | what is published; what is looked at before a read; one read, piece by piece |
"""

from typing import Any

from ...former_names import former_name
from .driver import RemoteDriver
from .engine import TransportEngine
from .pages import Pages
from .peer import Peer
from .transport import RecordTransport

__all__ = [
    "Pages",
    "Peer",
    "RecordTransport",
    "RemoteDriver",
    "TransportEngine",
]

_FORMER = {  # names that were here, for one release: where they are now
    "EngineRead": "engine.EngineRead",
    "Notice": "transport.Notice",
}


def __getattr__(name: str) -> Any:
    return former_name(__name__, _FORMER, name)
