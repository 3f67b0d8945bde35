"""What a frontend is told when it begins, as plain data."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

__all__ = ["Config"]


@dataclasses.dataclass(frozen=True)
class Config:
    """Of a frontend.

    Attributes:
        socket: path of the engine's socket.
        checkpoint: folder with a tokenizer.
        models: names under which the model is known; the first is told.
        encoding: of conversations (`dsv4_jax.chat`); None: as the checkpoint says.
        thinking: whether conversations reason if they do not say.
        end_tokens: ids that end an answer.
        keys: name -> API key; none: nobody needs one.
        cors: origins whose pages may ask.
        loopback: whether it is reached from this machine only, and so by a name of this machine.
        names: other names of it then.
        admin, page: whether there are routes of administration, and a page.
        body_bytes, head_bytes: most bytes of a body, and of headers. A body has a value for each 8 of these at most.
        bodies_bytes: most bytes of all bodies that are being read or worked on, and 96 more for each of their values.
        head_s, body_s: seconds in which the head of a request has to be there, and its body.
        stall_s: seconds for which a client may leave what is written to it unread.
        connections: most at once.
        certificate, key: files of TLS; None: none.
        linger_s: seconds for which it goes on saying that the engine has ended, when that process has.
        drain_s: seconds that answers have to end, when it is told to end.
    """

    socket: str
    checkpoint: str
    models: list[str]
    encoding: str | None = None
    thinking: bool = True
    end_tokens: list[int] = dataclasses.field(default_factory=list)
    keys: dict[str, str] = dataclasses.field(default_factory=dict)
    cors: list[str] = dataclasses.field(default_factory=list)
    loopback: bool = True
    names: list[str] = dataclasses.field(default_factory=list)
    admin: bool = False
    page: bool = True
    body_bytes: int = 16 << 20
    bodies_bytes: int = 256 << 20
    head_bytes: int = 32 << 10
    head_s: float = 10.0
    body_s: float = 60.0
    stall_s: float = 60.0
    connections: int = 10_000
    certificate: str | None = None
    key: str | None = None
    linger_s: float = 30.0
    drain_s: float = 30.0

    def dump(self) -> bytes:
        """As a line of JSON."""
        return json.dumps(dataclasses.asdict(self)).encode() + b"\n"

    @classmethod
    def load(cls, line: bytes | str) -> Config:
        """What `dump` has written."""
        fields: dict[str, Any] = json.loads(line)
        return cls(**fields)
