"""What a host record holds: a block, or the state of a slot, over all layers, as contiguous bytes. Imports no jax.

A block record is one block: its CSA, HCA and index rows, leaf after leaf in the layout's order, a leaf's layers in
theirs.

A *state* is what a request of n tokens needs of its slot for the next one, row by row in the order of positions. Where
rows lie in their rings is no part of it, nor are the rows that drafts add, so slots of every draft width have the same:

1. the last `sliding_window` window rows;
2. of the compressors whose entries overlap (CSA), what the next entry pools of the tokens before it: the first halves
   of kv and score of `overlap_rows` rows; and of the layers that draft the residual of the last token (MTP), or the
   last `sliding_window` rows of each stage (DSpark);
3. what the unfinished entries have pooled: the whole rows of their tokens (CSA, raw HCA state), the triple of the
   last token (online HCA state).

At a block boundary no entry is unfinished and 3 is dead. So a *snapshot*, which is a state there, is 1 and 2 alone. A
state anywhere else begins with the same bytes. Rows that are dead at n (3 at a boundary, positions before 0) are zeros
in a record, and whatever of a slot no record holds becomes zero when a state is restored there.

Each *piece* (rows of one leaf) starts at a multiple of 16 bytes in every layer; what a piece leaves of its last 16
bytes, and the tails of 2 and of the record, are zeros. So equal blocks and equal states have equal bytes, and a record
can be hashed, stored and sent as it is.

The host's memory is one array of *pages* as long as a block record. A state is cut into as many as it takes, which may
lie anywhere; what the last one has left is zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

from .former_names import former_name
from .layout import CacheLayout, LeafSpec
from .record_format import ALIGNMENT, DensePiece, Piece, Positions, RecordFormat, RecordScope
from .schema import LayerCacheSchema

__all__ = [
    "block_bytes",
    "block_record",
    "page_bytes",
    "record_format",
    "snapshot_layouts",
    "snapshot_record",
    "state_blocks",
    "state_pages",
    "state_record",
]


@functools.lru_cache(maxsize=64)
def block_record(layout: CacheLayout) -> RecordFormat:
    """Returns the record of one block."""
    whole = (Piece(leaf, leaf.rows, 0, leaf.row_bytes, 0) for leaf in layout.leaves if leaf.scope == "block")
    return RecordFormat("block", *_laid_out(whole))


@functools.lru_cache(maxsize=64)
def snapshot_record(layout: CacheLayout) -> RecordFormat:
    """Returns the record of a state at a block boundary."""
    return RecordFormat("slot", *_laid_out(_carried(layout)))


@functools.lru_cache(maxsize=64)
def snapshot_layouts(layout: CacheLayout) -> tuple[CacheLayout, ...]:
    """Returns the layouts with whose snapshot records this one's can do, itself first.

    A model with DSpark's stages has a second one, that with their windows or without: they are the last piece, so the
    shorter record begins the longer one, and what it lacks is zeros, rows that nobody has stored.
    """
    if layout.cfg.dspark is None:
        return (layout,)
    rows = layout.kv_row.name, layout.index_row.name
    sizes = dict(block_tokens=layout.block_tokens, draft_tokens=layout.draft_tokens)
    choices: dict[str, Any] = dict(hca_state=layout.hca_state, key_split=layout.key_split, numerics=layout.numerics)
    return layout, CacheLayout(layout.cfg, *rows, **sizes, **choices, include_drafts=not layout.include_drafts)


@functools.lru_cache(maxsize=64)
def state_record(layout: CacheLayout) -> RecordFormat:
    """Returns the record of a state anywhere: a `snapshot_record`, then what the unfinished entries have pooled."""
    snapshot = snapshot_record(layout)
    pieces, end = _laid_out(_unfinished(layout), snapshot.bytes)
    return RecordFormat("slot", snapshot.pieces + pieces, end)


def record_format(layout: CacheLayout, scope: RecordScope) -> RecordFormat:
    """What swaps move of a scope: `block_record` or `state_record`."""
    return block_record(layout) if scope == "block" else state_record(layout)


def page_bytes(layout: CacheLayout) -> int:
    """Returns bytes of a page of the host's memory: a block record's, or a snapshot's if there are no blocks (SWA
    only)."""
    return block_record(layout).bytes or snapshot_record(layout).bytes


def state_pages(layout: CacheLayout, tokens: int) -> int:
    """Host pages that the state of a request of so many tokens takes: at a block boundary those of a snapshot."""
    record = state_record(layout) if tokens % layout.block_tokens else snapshot_record(layout)
    return -(-record.bytes // page_bytes(layout))


@functools.lru_cache(maxsize=64)
def block_bytes(layout: CacheLayout) -> RecordFormat:
    """Returns all bytes of a block on the device, without gaps: where a state lies there that no slot holds."""
    pieces, end = list[Piece](), 0
    for piece in block_record(layout).pieces:
        pieces.append(DensePiece(*piece._replace(offset=end)))
        end += piece.layers * piece.bytes
    return RecordFormat("block", tuple(pieces), end)


def state_blocks(layout: CacheLayout) -> int:
    """Blocks of the device that the state at a block boundary takes; 0 if the layout has no blocks (SWA only)."""
    room = block_bytes(layout).bytes
    return -(-snapshot_record(layout).bytes // room) if room else 0


def _laid_out(pieces: Iterable[Piece], end: int = 0) -> tuple[tuple[Piece, ...], int]:
    """The pieces one after the other from `end` on, and where the record ends then."""
    placed = []
    for piece in pieces:
        placed.append(piece._replace(offset=end))
        end += piece.layers * piece.stride
    return tuple(placed), -(-end // ALIGNMENT) * ALIGNMENT


def _carried(layout: CacheLayout) -> Iterator[Piece]:
    """The pieces of a slot that outlive a block boundary."""
    for leaf, schema in _slot_leaves(layout):
        if leaf.pool == schema.window.pool:
            positions = Positions(1, schema.swa_window_size)
            yield Piece(leaf, schema.swa_window_size, 0, leaf.row_bytes, 0, positions)
        elif schema.residual is not None:
            yield Piece(leaf, 1, 0, leaf.row_bytes, 0, Positions(1, 1))
        elif schema.overlap_rows:  # [kv | score], and of each the half that the next entry takes
            positions, quarter = Positions(schema.ratio, schema.overlap_rows), leaf.row_bytes // 4
            for column in (0, 2 * quarter):
                yield Piece(leaf, schema.overlap_rows, column, quarter, 0, positions)


def _unfinished(layout: CacheLayout) -> Iterator[Piece]:
    """The pieces of a slot that do not outlive a block boundary: the compressors' state of unfinished entries."""
    for leaf, schema in _slot_leaves(layout):
        if leaf.pool == schema.window.pool or schema.residual is not None:
            continue
        if layout.hca_state == "online" and not schema.overlap_rows:
            yield Piece(leaf, 1, 0, leaf.row_bytes, 0, Positions(1, 1, schema.ratio))
        elif schema.tail_buffer_size:
            yield Piece(leaf, schema.tail_buffer_size, 0, leaf.row_bytes, 0, Positions(schema.ratio, 0))


def _slot_leaves(layout: CacheLayout) -> Iterator[tuple[LeafSpec, LayerCacheSchema]]:
    """The leaves of slots, each with the schema of one of its layers, which all have the same of it."""
    schemas = {pool.pool: schema for schema in layout.schemas for pool in schema.pools}
    return ((leaf, schemas[leaf.pool]) for leaf in layout.leaves if leaf.scope == "slot")


_FORMER = {"whole_rows": "dsv4_jax.tiers.host_records.whole_rows"}  # for one release


def __getattr__(name: str) -> Any:
    return former_name(__name__, _FORMER, name)
