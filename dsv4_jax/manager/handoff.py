"""What one host tells another of a prompt that it has computed: bounded JSON, checked field by field. Pure Python.

It names bytes and holds none: pages of the sender's host pool, to be read while its lease lasts. Nor does it hold
tokens. The receiver has them from whoever sent it the request, makes the digests itself, and compares: so a hand-off
can give bytes to the blocks of that prompt, and to no others.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any

from ..checks import INT32_MAX, check_boolean, check_integer, check_seconds, shown
from ..errors import HandoffError
from ..untrusted import parse_json

__all__ = ["MAX_BLOCKS", "MAX_BYTES", "SUM_BYTES", "Handoff", "check_lease_seconds", "check_peer"]

MAX_BLOCKS = 16384  # announced in one hand-off; further ones go on
MAX_BYTES = 2 << 20  # of its JSON
_MAX_SECONDS = 86400.0
SUM_BYTES = 16
_FORMAT = "dsv4_jax hand-off 1"
_HEX = frozenset("0123456789abcdef")
_PRINTS = ("root", "block_fingerprint", "snapshot_fingerprint", "digest")


@dataclasses.dataclass(frozen=True)
class Handoff:
    """A part of a prompt, or all of it. Parts of one lease follow each other: streaming.

    Attributes:
        lease: its name, for `KVCacheManager.acknowledge`.
        seconds: it lasts from when this was made.
        root: of the digests: block size, weights, layout of the blocks, and namespace (`HashSpec.root`), in hex.
        block_fingerprint, snapshot_fingerprint: of the layout.
        total: blocks that all parts together tell of.
        first: blocks announced before this part.
        digest: of the last block announced, which names all before it; the root if there is none.
        blocks: the page of each block announced here.
        state: the pages of the state after the last block of all, in order; none: not here.
        last: whether nothing more follows.
        sums: 16 bytes for each page of `blocks`, then of `state`, that vouch for its bytes (`vouched`). None as the
            manager makes it, which does not see bytes.
    """

    lease: str
    seconds: float
    root: str
    block_fingerprint: str
    snapshot_fingerprint: str
    total: int
    first: int
    digest: str
    blocks: tuple[int, ...]
    state: tuple[int, ...]
    last: bool
    sums: tuple[bytes, ...] = ()

    @property
    def end(self) -> int:
        """How many blocks this message and those before it tell of."""
        return self.first + len(self.blocks)

    def vouched(self, blocks: Sequence[bytes], state: Sequence[bytes]) -> Handoff:
        """Returns this hand-off with the checksums of its pages. Raises `HandoffError` unless each has one of 16
        bytes."""
        sums = (*blocks, *state)
        if (len(blocks), len(state)) != (len(self.blocks), len(self.state)) or any(len(s) != SUM_BYTES for s in sums):
            raise HandoffError("sums", f"expected one of {SUM_BYTES} bytes for each page")
        return dataclasses.replace(self, sums=sums)

    def to_json(self) -> bytes:
        """The JSON that `from_json` reads. Raises `HandoffError` without checksums: nobody could tell a torn record."""
        if len(self.sums) != len(self.blocks) + len(self.state):
            raise HandoffError("sums", "no checksums yet (see Handoff.vouched)")
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["sums"] = b"".join(self.sums).hex()
        return json.dumps({"format": _FORMAT, **fields}, separators=(",", ":")).encode()

    @staticmethod
    def from_json(data: bytes) -> Handoff:
        """Returns what `to_json` made.

        Raises:
            HandoffError: anything else; names the field, and says in one line what is wrong.
        """
        if not isinstance(data, bytes) or len(data) > MAX_BYTES:
            what = f"{len(data)} bytes" if isinstance(data, bytes) else type(data).__name__
            raise HandoffError(None, f"must be at most {MAX_BYTES} bytes of JSON, got {what}")
        try:
            fields = parse_json(data, unique_keys=True)
        except ValueError as error:
            raise HandoffError(None, str(error)) from None
        names = [field.name for field in dataclasses.fields(Handoff)]
        if not isinstance(fields, dict) or sorted(fields) != sorted(("format", *names)):
            raise HandoffError(None, "not an object of the expected fields")
        if fields.pop("format") != _FORMAT:
            raise HandoffError("format", f"only {_FORMAT!r} can be read")
        return _checked(fields)


def check_lease_seconds(seconds: Any) -> float:
    """Returns how long a lease lasts, as a float. Raises `HandoffError` unless a number above 0, of at most a day."""
    return check_seconds("seconds", seconds, _MAX_SECONDS, error=functools.partial(HandoffError, "seconds"))


def check_peer(peer: Any) -> str | None:
    """Returns the name of a peer, or None. Raises `HandoffError` for what is neither."""
    if peer is not None and not isinstance(peer, str):
        raise HandoffError("peer", f"must be a transport's name or None, got {shown(peer)}")
    return peer


def _checked(fields: dict[str, Any]) -> Handoff:
    for name in _PRINTS:
        if not _is_hex(fields[name], 64):
            raise HandoffError(name, f"must be 64 hexadecimal digits, got {shown(fields[name])}")
    lease = fields["lease"]
    if not isinstance(lease, str) or not 0 < len(lease) <= 64 or not lease.isascii() or not lease.isprintable():
        raise HandoffError("lease", f"must be a name of 1..64 characters, got {shown(lease)}")
    fields["seconds"] = check_lease_seconds(fields["seconds"])
    for name in ("total", "first"):
        check_integer(name, fields[name], 0, INT32_MAX, error=functools.partial(HandoffError, name))
    check_boolean("last", fields["last"], error=functools.partial(HandoffError, "last"))
    for name in ("blocks", "state"):
        fields[name] = _pages(name, fields[name])
    blocks, state = fields["blocks"], fields["state"]
    if len({*blocks, *state}) != len(blocks) + len(state):
        raise HandoffError("blocks", "a page is named twice")
    if fields["first"] + len(blocks) > fields["total"]:
        raise HandoffError("total", f"{fields['total']} blocks in all, {fields['first']} + {len(blocks)} announced")
    complete = fields["first"] + len(blocks) == fields["total"]
    if state and not (fields["last"] and complete and fields["total"]):
        raise HandoffError("state", "a state comes with the last block, or after it")
    if fields["last"] and not complete:
        raise HandoffError("last", "not all blocks are announced")
    sums, pages = fields["sums"], len(blocks) + len(state)
    if not _is_hex(sums, 2 * SUM_BYTES * pages):
        raise HandoffError("sums", f"must be {2 * SUM_BYTES} hexadecimal digits for each of {pages} pages")
    whole = bytes.fromhex(sums)
    fields["sums"] = tuple(whole[i : i + SUM_BYTES] for i in range(0, len(whole), SUM_BYTES))
    return Handoff(**fields)


def _is_hex(value: Any, digits: int) -> bool:
    return isinstance(value, str) and len(value) == digits and _HEX.issuperset(value)


def _pages(name: str, pages: Any) -> tuple[int, ...]:
    if not isinstance(pages, list) or len(pages) > MAX_BLOCKS:
        raise HandoffError(name, f"must be a list of at most {MAX_BLOCKS} pages")
    error = functools.partial(HandoffError, name)
    return tuple(check_integer("a page", page, 1, INT32_MAX, error=error) for page in pages)
