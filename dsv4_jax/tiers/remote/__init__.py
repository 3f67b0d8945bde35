"""Host records of other machines, read into ours, and prompts handed from host to host. Imports no jax.

| | |
| --- | --- |
| `transport` | `RecordTransport`: publish pages, connect, read, notify |
| `engine` | `TransportEngine`: what moves the bytes under it, the contract of `dsv4_jax.transports` |
| `driver` | `RemoteDriver`: exports and arrivals of a manager, over a transport |
| `pages` | `Pages`: the host pool's pages by their ids, of one device or of several pool ranks |
| `metadata`, `checks`, `read` | what is published; what is looked at before a read; one read, piece by piece |
"""

from .driver import RemoteDriver
from .engine import EngineRead, TransportEngine
from .pages import Pages
from .transport import Notice, Peer, RecordTransport

__all__ = [
    "EngineRead",
    "Notice",
    "Pages",
    "Peer",
    "RecordTransport",
    "RemoteDriver",
    "TransportEngine",
]
