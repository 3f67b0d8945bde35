"""What a `RecordTransport` looks at before anything moves: pages, ids of both sides, checksums. Imports no jax."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from ...checks import check_integer, shown
from ...errors import ShapeError, TransferError
from ...layout import CacheLayout
from ...records import block_record, page_bytes, snapshot_record, state_pages

__all__ = ["CHECKSUM_BYTES", "Paired", "RecordKind", "check_ids", "check_pages", "check_pairs", "pair_snapshots"]

CHECKSUM_BYTES = 16
RecordKind = Literal["block", "snapshot"]
_POOL = "a HostCache is published by publish_host(host), never as a view or a copy of its pages"


def check_pages(layout: CacheLayout, pages: Any) -> list[np.ndarray]:
    """Returns the memories, of each rank. Raises `ShapeError` unless they are [1 + n, page_bytes(layout)], as many
    each, and an engine can write to them."""
    memories = [*pages] if isinstance(pages, list | tuple) else [pages]
    if not memories:
        raise ShapeError("pages are of no rank")
    for memory in memories:
        if not isinstance(memory, np.ndarray) or memory.dtype != np.uint8 or memory.ndim != 2:
            raise ShapeError(f"pages must be a NumPy array of uint8 [1 + n, page bytes], or one of each rank; {_POOL}")
        if memory.shape[1] != page_bytes(layout) or len(memory) < 2:
            raise ShapeError(f"pages have shape {memory.shape}, expected (1 + n, {page_bytes(layout)}) with n >= 1")
        if memory.shape != memories[0].shape:
            raise ShapeError(f"pages of ranks have shapes {memories[0].shape} and {memory.shape}, expected the same")
        if not memory.flags.c_contiguous or not memory.flags.writeable:
            raise ShapeError(f"pages must be contiguous and writable; {_POOL}")
    return memories


def check_ids(
    layout: CacheLayout, kind: RecordKind, side: str, ids: Sequence[int] | np.ndarray, num_pages: int
) -> list[int]:
    """Returns the ids as integers. Raises `TransferError`: one is no page of that side, or they are no whole
    records."""
    if kind not in get_args(RecordKind):
        raise TransferError(f"kind must be 'block' or 'snapshot', got {shown(kind)}")
    if kind == "block" and not block_record(layout).bytes:
        raise TransferError("this layout has no blocks")
    checked = [
        check_integer(f"the {side} page at index {i}", value, 1, num_pages, error=TransferError)
        for i, value in enumerate(ids)
    ]
    if kind == "snapshot" and len(checked) % state_pages(layout, 0):
        problem = f"{len(checked)} {side} pages are no whole snapshots, which have {state_pages(layout, 0)}"
        raise TransferError(problem)
    return checked


class Paired(NamedTuple):
    """Pages that are read, in pairs, and what is made zeros once they are there: bytes of a page from one on."""

    source: list[int]
    destination: list[int]
    sums: Sequence[bytes] | None
    blank: list[tuple[int, int]]


def pair_snapshots(
    theirs: CacheLayout, ours: CacheLayout, source: list[int], destination: list[int], sums: Sequence[bytes] | None
) -> Paired:
    """The pages of snapshots that are longer on one side: the shorter record begins the longer one, and what that has
    more is left there, or is zeros here. Raises `TransferError` unless there is one source for each destination."""
    there, here, width = state_pages(theirs, 0), state_pages(ours, 0), page_bytes(ours)
    if len(source) // there != len(destination) // here or (sums is not None and len(sums) != len(source)):
        given = f"{len(source)} source pages ({there} each)", f"{len(destination)} destinations ({here} each)"
        raise TransferError(f"{given[0]} for {given[1]}, and {0 if sums is None else len(sums)} checksums")
    common, cut = min(there, here), min(snapshot_record(each).bytes for each in (theirs, ours))
    first = [i * there + j for i in range(len(source) // there) for j in range(common)]
    places = [destination[i : i + here] for i in range(0, len(destination), here)]
    return Paired(
        [source[i] for i in first],
        [page for place in places for page in place[:common]],
        None if sums is None else [sums[i] for i in first],
        [(page, max(0, cut - i * width)) for place in places for i, page in enumerate(place) if (i + 1) * width > cut],
    )


def check_pairs(
    source: Sequence[int], destination: Sequence[int], sums: Sequence[bytes] | None, written: Collection[int]
) -> None:
    """Raises `TransferError` for unequal numbers, or a destination that is there twice or `written` by another read."""
    if len(source) != len(destination):
        raise TransferError(f"{len(source)} source pages for {len(destination)} destinations")
    seen: set[int] = set()
    for i, page in enumerate(destination):
        if page in seen or page in written:
            problem = "is there twice" if page in seen else "is written by another read"
            raise TransferError(f"the destination page {page} at index {i} {problem}")
        seen.add(page)
    if sums is None:
        return
    if len(sums) != len(source):
        raise TransferError(f"{len(sums)} checksums for {len(source)} pages")
    for i, each in enumerate(sums):
        if not isinstance(each, bytes) or len(each) != CHECKSUM_BYTES:
            raise TransferError(f"checksum at index {i} is no {CHECKSUM_BYTES} bytes")
