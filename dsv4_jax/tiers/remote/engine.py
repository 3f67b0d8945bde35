"""What moves the bytes under a `RecordTransport`: `TransportEngine`, the contract of `dsv4_jax.transports`. No jax.

An engine trusts its caller: ids, sizes and fingerprints have been checked, calls come one at a time.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from .pages import Pages

__all__ = ["EngineRead", "TransportEngine"]


class EngineRead(Protocol):
    """Pages that are on their way from a peer."""

    def is_done(self) -> bool:
        """Whether all have arrived. Returns at once; raises, again and again, once they cannot any more."""
        ...

    def release(self) -> None:
        """What the engine keeps for it is let go. Once, after `is_done` said so or raised, or the link was cut."""
        ...


class TransportEngine(Protocol):
    """One host's end of a transport.

    Attributes:
        name: of the engine; both ends must have the same.

    It may have three more: `identity`, in which the name of this end is to end, as it proves to others that it is its
    own; `counts`, a `Counter` that `RecordTransport.stats` tells; and `is_up(link)`: whether a link is made, as far as
    this end knows, which returns at once and raises if it is broken.
    """

    name: str

    def register(self, host: str, pages: Pages) -> bytes:
        """Makes `pages` what others read from and reads write to. Comes first, and once.

        Args:
            host: this end's name, unlike all others'.

        Returns:
            What `connect` of another host needs: at most 128 KiB.
        """
        ...

    def connect(self, host: str, metadata: bytes, num_pages: int) -> Any:
        """A link to the host that registered 1 + `num_pages` pages under this name. Raises any error."""
        ...

    def start(self, link: Any, source: np.ndarray, destination: np.ndarray) -> EngineRead:
        """Starts to copy the other host's pages `source` [n] int32 into ours, `destination` [n] int32."""
        ...

    def send(self, link: Any, message: bytes) -> None:
        """Sends the host a message, without waiting for it to arrive."""
        ...

    def received(self) -> list[tuple[str, bytes]]:
        """Messages that have come, each with the name of the host that sent it: no more at once than a caller should be
        busy with. What nobody takes is bounded, for each sender."""
        ...

    def disconnect(self, link: Any) -> None:
        """Cuts the link. When this returns nothing of it is written into our pages any more."""
        ...

    def close(self) -> None:
        """Lets go of memory, threads, sockets and files. All links have been cut; other hosts may still have theirs."""
        ...
