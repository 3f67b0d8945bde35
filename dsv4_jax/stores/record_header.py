"""The 128 bytes that vouch for a record: whose it is, which layout wrote it, and the checksum of its bytes.

    offset  size  field
         0     4  magic "dsv4"
         4     4  crc32 of the other 124 bytes
         8     8  generation: the store's write counter, so age and the newer of two copies are known
        16     8  record bytes
        24     2  key bytes
        26     2  version of the stored formats (0 before it was written here), then 4 zero bytes
        32    32  digest of the layout's fingerprint
        64    16  checksum of the record
        80    48  key, zero padded

Little-endian. Part of the formats of the slab file and of the objects of `ObjectStore`: where the version is and what
the crc32 covers must never change.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
import zlib

from ..errors import StoreFormatError

__all__ = [
    "HEADER_BYTES",
    "MAX_KEY_BYTES",
    "VERSION",
    "RecordHeader",
    "fingerprint_digest",
    "header_version",
    "pack_header",
    "unpack_header",
]

HEADER_BYTES = 128
MAX_KEY_BYTES = 48
# Of what records are stored in, and of what a record holds. 2: a snapshot record has what is live at a block boundary,
# by position.
VERSION = 2
_MAGIC = b"dsv4"
_BODY = struct.Struct("<QQHH4x32s16s48s")


@dataclasses.dataclass(frozen=True, slots=True)
class RecordHeader:
    """What a record says about itself. `fingerprint` is a `fingerprint_digest`, `digest` a `checksum`."""

    key: bytes
    generation: int
    record_bytes: int
    fingerprint: bytes
    digest: bytes


def pack_header(header: RecordHeader) -> bytes:
    """Returns the header as `HEADER_BYTES` bytes."""
    key = header.key
    body = _BODY.pack(header.generation, header.record_bytes, len(key), VERSION, header.fingerprint, header.digest, key)
    return _MAGIC + struct.pack("<I", zlib.crc32(_MAGIC + body)) + body


def unpack_header(data: bytes) -> RecordHeader | None:
    """The header in these bytes, or None if they are not a whole, unharmed header of this version."""
    if header_version(data) != VERSION:
        return None
    generation, record_bytes, key_bytes, _, fingerprint, digest, key = _BODY.unpack(data[8:HEADER_BYTES])
    if key_bytes > MAX_KEY_BYTES:
        return None
    return RecordHeader(key[:key_bytes], generation, record_bytes, fingerprint, digest)


def header_version(data: bytes) -> int | None:
    """Which version the header in these bytes is of, or None if they are not a whole, unharmed header."""
    magic, body = data[:4], data[8:HEADER_BYTES]
    if len(data) < HEADER_BYTES or magic != _MAGIC or struct.pack("<I", zlib.crc32(magic + body)) != data[4:8]:
        return None
    return max(_BODY.unpack(body)[3], 1)


def fingerprint_digest(fingerprint: str | bytes) -> bytes:
    """32 bytes that stand for a layout's fingerprint (`block_fingerprint`, ..., or any other name of a format)."""
    try:
        data = fingerprint.encode() if isinstance(fingerprint, str) else fingerprint
    except UnicodeEncodeError as error:
        raise StoreFormatError(f"fingerprint must be text that UTF-8 can encode: {error}") from None
    if not isinstance(data, bytes | bytearray):
        raise StoreFormatError(f"fingerprint must be str or bytes, got {type(fingerprint).__name__}")
    return hashlib.sha256(data).digest()
