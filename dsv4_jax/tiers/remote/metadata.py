"""What a host publishes of its records, as bounded JSON that its reader checks field by field. Imports no jax."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from typing import Any

from ...checks import INT32_MAX, check_integer, shown
from ...errors import LayoutError, TransferError
from ...layout import CacheLayout
from ...records import page_bytes, snapshot_layouts
from ...untrusted import parse_json

__all__ = ["MAX_METADATA", "PoolMetadata"]

MAX_METADATA = 256 * 1024  # bytes of JSON
_FORMAT = "dsv4_jax records 1"
_LONGEST_NAME = 128


@dataclasses.dataclass(frozen=True)
class PoolMetadata:
    """Whose pages, how many, of what, and how to reach them.

    Attributes:
        engine: name of the engine.
        host: name of the host's transport.
        num_pages: ids 1..num_pages.
        page_bytes: of one.
        block_fingerprint, snapshot_fingerprint: of the layout (`CacheLayout`).
        reach: what the engine needs to connect.
    """

    engine: str
    host: str
    num_pages: int
    page_bytes: int
    block_fingerprint: str
    snapshot_fingerprint: str
    reach: bytes

    def layout_of(self, layout: CacheLayout) -> CacheLayout:
        """The layout of its records: this one, or one with whose snapshots this one's can do.

        Raises:
            LayoutError: both kinds of records do not mean the same in it; says what differs.
        """
        theirs, others = self.snapshot_fingerprint, snapshot_layouts(layout)[1:]
        there = next((each for each in (layout, *others) if each.snapshot_fingerprint == theirs), layout)
        pairs = {
            "blocks": (self.block_fingerprint, layout.block_fingerprint),
            "snapshots": (self.snapshot_fingerprint, there.snapshot_fingerprint),
            "bytes of a page": (self.page_bytes, page_bytes(layout)),
        }
        if unlike := {what: pair for what, pair in pairs.items() if pair[0] != pair[1]}:
            each = "; ".join(f"{what}: theirs {_short(a)}, ours {_short(b)}" for what, (a, b) in unlike.items())
            raise LayoutError(f"records of {self.host!r} mean something else here ({each})")
        return there

    def pack(self) -> bytes:
        fields = {**dataclasses.asdict(self), "reach": base64.b64encode(self.reach).decode()}
        data = json.dumps({"format": _FORMAT, **fields, "digest": _digest(fields)}).encode()
        if len(data) > MAX_METADATA:
            raise TransferError(f"{len(data)} bytes, at most {MAX_METADATA} can be published")
        return data

    @staticmethod
    def unpack(data: bytes) -> PoolMetadata:
        """Returns what `pack` made. Raises `TransferError`, which says in one line what is wrong, for anything else."""
        if not isinstance(data, bytes):
            raise TransferError(f"a peer's metadata must be bytes, got {type(data).__name__}")
        if len(data) > MAX_METADATA:
            raise TransferError(f"a peer's metadata: {len(data)} bytes, at most {MAX_METADATA} are read")
        try:
            fields = _checked(parse_json(data, unique_keys=True))
        except ValueError as error:
            raise TransferError(f"a peer's metadata: {error}") from None
        return PoolMetadata(**fields)


def _checked(value: Any) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(PoolMetadata)]
    if not isinstance(value, dict) or sorted(value) != sorted(("format", *names, "digest")):
        raise ValueError("not an object of the expected fields")
    if value["format"] != _FORMAT:
        raise ValueError(f"its format is {shown(value['format'])}, only {_FORMAT!r} can be read")
    fields = {name: value[name] for name in names}
    for name in ("num_pages", "page_bytes"):
        check_integer(name, fields[name], 1, INT32_MAX, error=ValueError)
    for name in ("engine", "host", "block_fingerprint", "snapshot_fingerprint", "reach"):
        if not isinstance(fields[name], str):
            raise ValueError(f"{name} must be a string, got {shown(fields[name])}")
    for name in ("engine", "host"):
        if not (0 < len(fields[name]) <= _LONGEST_NAME and fields[name].isprintable() and fields[name].isascii()):
            raise ValueError(f"{name} is no printable name of 1..{_LONGEST_NAME} characters")
    for name in ("block_fingerprint", "snapshot_fingerprint"):
        if len(fields[name]) != 64 or not set(fields[name]) <= set("0123456789abcdef"):
            raise ValueError(f"{name} is no fingerprint: {shown(fields[name])}")
    if value["digest"] != _digest(fields):
        raise ValueError("its digest does not match: it was cut or changed on its way")
    return {**fields, "reach": base64.b64decode(fields["reach"], validate=True)}


def _digest(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _short(value: str | int) -> str:
    return value[:12] if isinstance(value, str) else str(value)
