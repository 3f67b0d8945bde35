"""The one layout record: shapes, bytes and addresses of every cache array. Imports no jax.

A *leaf* is one device array. Leaves come in three scopes:

* block scope (paged pools):  `[layers * blocks * rows_per_block, width]`
* slot scope (per request):   `[layers * slots * rows_per_slot, width]`
* the block table:            `[slots, max_blocks_per_request]` int32

Row of layer ordinal j (counted among layers of its kind), block or slot u and row r in it:
`(j * units + u) * rows + r`. Unit 0 of either scope is null: never handed out, never read.

Row ids are int32 on the device, and so is every product on the way to one; the number of rows of a
leaf stands for "no row". So no leaf has more than 2^31 - 1 rows (`CacheLayout.check_size`). Bytes
and elements are counted in 64 bits and have no limit of their own.

Slot rings are addressed by absolute position: row = position mod R. With `draft_tokens = n` a
verify step writes 1 + n positions of which any prefix may be kept, so R >= needed history + n
(docs/model.md, State: W + n for the window, 2m + n for the CSA compressor, r + n for the raw HCA ring) and the
online HCA state keeps n + 2 banks (without drafts one), so the state before the step survives
every rejection.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from typing import Any, Literal, get_args

import numpy as np

from .checks import INT32_MAX, as_int, shown
from .config import AttentionType, DSV4Config, LayerSpec, build_schedule
from .errors import LayoutError
from .formats import RowFormat, index_format, kv_format

__all__ = ["CacheLayout", "CacheSize", "KeySplit", "LayerCacheSchema", "LeafSpec", "build_schema"]

KeySplit = Literal["throughput", "latency"]
Scope = Literal["block", "slot", "table"]
MAX_LEAVES = 24
_MAX_UNITS = INT32_MAX - 1  # of a scope, the null unit not counted


@dataclasses.dataclass(frozen=True)
class LayerCacheSchema:
    """What one layer keeps in the cache.

    Attributes:
        attn: the layer's attention kind.
        block_tokens: original tokens per block.
        entries_per_block: compressed entries of a block (0 for SWA).
        indexer_entries_per_block: index keys of a block (0 unless CSA).
        tail_buffer_size: pending tokens that can wait for their entry, ratio - 1 (0 for SWA).
        overlap_rows: rows of the previous entry's tokens that CSA also needs (its ratio).
        swa_window_size: tokens of the sliding window, the token itself included.
        entry_head_dim: width of a KV row.
    """

    attn: AttentionType
    block_tokens: int
    entries_per_block: int
    indexer_entries_per_block: int
    tail_buffer_size: int
    overlap_rows: int
    swa_window_size: int
    entry_head_dim: int


@dataclasses.dataclass(frozen=True)
class LeafSpec:
    """One device array: see the module docstring for the addressing."""

    pool: str
    part: str
    scope: Scope
    layers: int
    rows: int
    width: int
    dtype: str

    @property
    def name(self) -> str:
        return f"{self.pool}.{self.part}"

    @property
    def row_bytes(self) -> int:
        return self.width * np.dtype(self.dtype).itemsize

    @property
    def unit_bytes(self) -> int:
        """Bytes of one block (or slot) over all layers."""
        return self.layers * self.rows * self.row_bytes


@dataclasses.dataclass(frozen=True)
class CacheSize:
    """How much of everything: usable units, the null unit 0 of each scope not counted.

    Attributes:
        num_blocks: blocks that can be allocated (ids 1..num_blocks).
        num_slots: requests that can be live at once (slots 1..num_slots).
        max_blocks_per_request: width of the block table.
        num_snapshots: extra slots (after the request slots) that hold state snapshots.

    Raises:
        LayoutError: a number is no integer, too small, or such that ids of blocks or slots do not fit int32. How
            many rows that makes is up to the layout: see `CacheLayout.check_size`.
    """

    num_blocks: int
    num_slots: int
    max_blocks_per_request: int
    num_snapshots: int = 0

    def __post_init__(self) -> None:
        for name, least in (("num_blocks", 1), ("num_slots", 1), ("max_blocks_per_request", 1), ("num_snapshots", 0)):
            object.__setattr__(self, name, _integer(f"CacheSize.{name}", getattr(self, name), least, _MAX_UNITS))
        if self.num_slots + self.num_snapshots > _MAX_UNITS:
            raise LayoutError(f"CacheSize: num_slots and num_snapshots must be at most {_MAX_UNITS} together")

    @property
    def block_units(self) -> int:
        return self.num_blocks + 1

    @property
    def slot_units(self) -> int:
        return self.num_slots + self.num_snapshots + 1

    def holds(self, other: CacheSize) -> bool:
        """Whether every unit of a cache of the other size has its place in one of this."""
        mine, others = ((size.block_units, size.slot_units, size.max_blocks_per_request) for size in (self, other))
        return all(have >= want for have, want in zip(mine, others, strict=True))


class CacheLayout:
    """Built once from the model and the storage choices; everything else reads it. Immutable, hashable.

    Args:
        cfg: the model.
        kv_format: stored form of SWA, CSA and HCA rows: "fp8", "fp8_per_entry", "bf16", "f32".
        index_format: stored form of index keys: "fp4", "fp8", "bf16", "f32".
        block_tokens: tokens per block, a multiple of the lcm of the ratios of the kinds of layers there are
            (CSA and HCA: 128 for V4). Defaults to the smallest multiple of that lcm that is at least 128.
        draft_tokens: drafts a verify step may carry beside its first token.
        hca_state: "online" (softmax triple, 3 rows of head_dim per layer) or "raw" (ring of rows).
        include_mtp: also hold the SWA windows of the MTP layers.
        key_split: how finely attention kernels may cut a token's keys: for "throughput" (large batches) or for the
            "latency" of one or a few requests. No array depends on it. It is a fact of the deployment, like the
            formats: a token's bits are the same in every batch under either, but not the same under both.

    Raises:
        LayoutError: unknown format or key split, impossible block size or draft count, formats of too many parts.
    """

    def __init__(
        self,
        cfg: DSV4Config,
        kv_format: str = "fp8",
        index_format: str = "fp4",
        block_tokens: int | None = None,
        draft_tokens: int = 0,
        *,
        hca_state: Literal["online", "raw"] = "online",
        include_mtp: bool = False,
        key_split: KeySplit = "throughput",
    ):
        self.cfg = cfg
        self.schedule = build_schedule(cfg, include_mtp=include_mtp)
        lcm = math.lcm(*(cfg.ratio(k) for k in (AttentionType.CSA, AttentionType.HCA) if cfg.count(k)))
        self.block_tokens = _block_tokens(block_tokens, lcm)
        draft_tokens = _integer("draft_tokens", draft_tokens, 0)
        if hca_state not in ("online", "raw"):
            raise LayoutError(f"hca_state must be 'online' or 'raw', got {hca_state!r}")
        if key_split not in get_args(KeySplit):
            raise LayoutError(f"key_split must be 'throughput' or 'latency', got {key_split!r}")
        self.draft_tokens = draft_tokens
        self.hca_state: Literal["online", "raw"] = hca_state
        self.include_mtp = include_mtp
        self.key_split: KeySplit = key_split
        self.kv_row: RowFormat = _kv_row(kv_format, cfg)
        self.index_row: RowFormat = _index_row(index_format, cfg)
        self.window_rows = cfg.sliding_window + draft_tokens
        self.csa_ring_rows = 2 * cfg.csa_ratio + draft_tokens
        self.hca_rows = (
            cfg.hca_ratio + draft_tokens if hca_state == "raw" else (draft_tokens + 2 if draft_tokens else 1)
        )
        counts = {kind: sum(s.attn is kind for s in self.schedule) for kind in AttentionType}
        self.leaves: tuple[LeafSpec, ...] = tuple(_leaves(self, counts))
        if len(self.leaves) > MAX_LEAVES:  # a step is to stay cheap to dispatch
            raise LayoutError(f"{len(self.leaves)} arrays, at most {MAX_LEAVES}: the row formats have too many parts")
        ordinals, seen = [], dict.fromkeys(AttentionType, 0)
        for spec in self.schedule:
            ordinals.append(seen[spec.attn])
            seen[spec.attn] += 1
        self._kind_ordinal = tuple(ordinals)
        # With the key split: compiled steps are found by their layout, and each split is another computation.
        rows = (self.kv_row, self.index_row)
        self._key = (cfg, rows, self.block_tokens, draft_tokens, hca_state, include_mtp, key_split)
        self._hash = hash(self._key)  # the last: from here on nothing can be set

    def __setattr__(self, name: str, value: object) -> None:
        if hasattr(self, "_hash"):
            raise dataclasses.FrozenInstanceError(f"cannot set {name!r}: a layout is immutable")
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot delete {name!r}: a layout is immutable")

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, CacheLayout) and self._key == other._key)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return (
            f"CacheLayout({self.cfg.num_layers} layers, kv_format={self.kv_row.name!r}, "
            f"index_format={self.index_row.name!r}, block_tokens={self.block_tokens}, "
            f"draft_tokens={self.draft_tokens}, hca_state={self.hca_state!r}, key_split={self.key_split!r})"
        )

    def layer(self, layer_idx: int) -> LayerSpec:
        """The schedule entry of a layer. Raises `LayoutError` if there is no such layer."""
        index = as_int(layer_idx)
        if index is None or not 0 <= index < len(self.schedule):
            last = len(self.schedule) - 1
            raise LayoutError(f"layer {shown(layer_idx)} out of range: this layout has layers 0..{last}")
        return self.schedule[index]

    def ordinal(self, layer_idx: int) -> int:
        """Position of a layer among the layers of its kind: its index in CSA and HCA leaves.

        Raises `LayoutError` if there is no such layer.
        """
        self.layer(layer_idx)
        return self._kind_ordinal[layer_idx]

    def entries_per_block(self, attn: AttentionType) -> int:
        ratio = self.cfg.ratio(attn)
        return self.block_tokens // ratio if ratio else 0

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-tokens // self.block_tokens)

    def check_size(self, size: CacheSize) -> None:
        """Refuses sizes whose rows or positions have no int32 number. `init_cache` and the managers call it.

        Raises:
            LayoutError: a leaf would have more than 2^31 - 1 rows (layers * units * rows of a unit, null units
                included), which are as many blocks as 409 million tokens of V4-Flash fill. Or a request could
                have as many tokens.
        """
        for leaf in self.leaves:
            rows, _ = self.leaf_shape(leaf, size)
            if leaf.scope != "table" and rows > INT32_MAX:
                units = f"{size.block_units} blocks" if leaf.scope == "block" else f"{size.slot_units} slots"
                raise LayoutError(
                    f"pool '{leaf.pool}': {leaf.layers} layers of {units} of {leaf.rows} rows are {rows} rows, "
                    f"row ids are int32 and reach {INT32_MAX - 1}"
                )
        context = min(size.max_blocks_per_request * self.block_tokens, self.cfg.max_position_embeddings)
        if context > INT32_MAX:
            raise LayoutError(f"requests of {context} tokens: positions are int32 and reach {INT32_MAX - 1}")

    # Bytes. All are sums over the leaves, so they cannot drift from what is allocated.

    def leaf_shape(self, leaf: LeafSpec, size: CacheSize) -> tuple[int, int]:
        if leaf.scope == "table":
            return size.slot_units, size.max_blocks_per_request
        units = size.block_units if leaf.scope == "block" else size.slot_units
        return leaf.layers * units * leaf.rows, leaf.width

    def leaf_bytes(self, leaf: LeafSpec, size: CacheSize) -> int:
        rows, width = self.leaf_shape(leaf, size)
        return rows * width * np.dtype(leaf.dtype).itemsize

    def total_bytes(self, size: CacheSize) -> int:
        """Bytes `init_cache` allocates for this size, null units included."""
        return sum(self.leaf_bytes(leaf, size) for leaf in self.leaves)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers: its entries and index keys."""
        return sum(leaf.unit_bytes for leaf in self.leaves if leaf.scope == "block")

    @property
    def bytes_per_token(self) -> float:
        """Paged bytes per cached token, exact (a multiple of 1 / block_tokens)."""
        return self.bytes_per_block / self.block_tokens

    @property
    def window_bytes_per_request(self) -> int:
        return sum(leaf.unit_bytes for leaf in self.leaves if leaf.pool == "swa")

    @property
    def state_bytes_per_request(self) -> int:
        """Compressor state of one slot (window not counted)."""
        return sum(leaf.unit_bytes for leaf in self.leaves if leaf.scope == "slot" and leaf.pool != "swa")

    @property
    def bytes_per_slot(self) -> int:
        """Window and compressor state of one slot, over all layers."""
        return self.window_bytes_per_request + self.state_bytes_per_request

    def request_bytes(self, tokens: int) -> int:
        """What a request of this many tokens occupies: its slot and its blocks."""
        return self.bytes_per_slot + self.blocks_for(tokens) * self.bytes_per_block

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hex digest that two caches share exactly if blocks and snapshots of one can be read as those of the other.

        `draft_tokens` and `hca_state` shape snapshots, so caches that differ in these have different ones. It
        names a format, not who computed the values: kernels, devices and `key_split`, which decide their last
        bits, are no part of it, so stored blocks outlive a change of these.
        """
        facts: list[Any] = [dataclasses.astuple(leaf) for leaf in self.leaves]
        facts.append((self.kv_row.name, self.index_row.name, self.block_tokens, self.cfg.csa_ratio, self.cfg.hca_ratio))
        facts.append([spec.attn.value for spec in self.schedule])
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def build_schema(cfg: DSV4Config, layer: LayerSpec, *, block_tokens: int | None = None) -> LayerCacheSchema:
    """What a layer keeps in the cache, per block and per request.

    Args:
        block_tokens: tokens of a block; default: the smallest multiple of both ratios that is at least 128.

    Raises:
        LayoutError: `block_tokens` is not a positive multiple of the layer's ratio.
    """
    ratio = cfg.ratio(layer.attn)
    if block_tokens is None:
        tokens = _block_tokens(None, math.lcm(cfg.csa_ratio, cfg.hca_ratio))
    else:
        tokens = _block_tokens(block_tokens, ratio or 1)
    entries = tokens // ratio if ratio else 0
    csa = layer.attn is AttentionType.CSA
    return LayerCacheSchema(
        attn=layer.attn,
        block_tokens=tokens,
        entries_per_block=entries,
        indexer_entries_per_block=entries if csa else 0,
        tail_buffer_size=ratio - 1 if ratio else 0,
        overlap_rows=ratio if csa else 0,
        swa_window_size=cfg.sliding_window,
        entry_head_dim=cfg.head_dim,
    )


def _integer(name: str, value: Any, least: int, most: int = INT32_MAX) -> int:
    number = as_int(value)
    if number is None or not least <= number <= most:
        raise LayoutError(f"{name} must be an integer >= {least} and at most {most}, got {shown(value)}")
    return number


def _block_tokens(value: Any, multiple: int) -> int:
    """That number of tokens, checked; None: the smallest multiple that is at least 128."""
    if value is None:
        return -(-128 // multiple) * multiple
    number = as_int(value)
    if number is None or not 1 <= number <= INT32_MAX or number % multiple:
        raise LayoutError(f"block_tokens must be a positive multiple of {multiple}, got {shown(value)}")
    return number


def _kv_row(name: str, cfg: DSV4Config) -> RowFormat:
    return kv_format(name, cfg.head_dim, cfg.rope_dim)


def _index_row(name: str, cfg: DSV4Config) -> RowFormat:
    return index_format(name, cfg.index_head_dim)


def _leaves(layout: CacheLayout, counts: dict[AttentionType, int]) -> list[LeafSpec]:
    cfg = layout.cfg
    csa, hca = counts[AttentionType.CSA], counts[AttentionType.HCA]
    leaves: list[LeafSpec] = []

    def pool(name: str, scope: Scope, layers: int, rows: int, row: RowFormat) -> None:
        leaves.extend(LeafSpec(name, p.name, scope, layers, rows, p.width, p.dtype) for p in row.parts if layers)

    pool("swa", "slot", len(layout.schedule), layout.window_rows, layout.kv_row)
    pool("csa", "block", csa, layout.entries_per_block(AttentionType.CSA), layout.kv_row)
    pool("hca", "block", hca, layout.entries_per_block(AttentionType.HCA), layout.kv_row)
    pool("index", "block", csa, layout.entries_per_block(AttentionType.CSA), layout.index_row)
    if csa:
        # Row: [kv 2e | score 2e]; the first e of each belong to the next entry, the last e to its own.
        leaves.append(LeafSpec("csa_state", "rows", "slot", csa, layout.csa_ring_rows, 4 * cfg.head_dim, "float32"))
        leaves.append(
            LeafSpec("index_state", "rows", "slot", csa, layout.csa_ring_rows, 4 * cfg.index_head_dim, "float32")
        )
    if hca:
        # Online: [max | sum | acc] per bank. Raw: [kv | score] per position.
        width = (3 if layout.hca_state == "online" else 2) * cfg.head_dim
        leaves.append(LeafSpec("hca_state", "rows", "slot", hca, layout.hca_rows, width, "float32"))
    leaves.append(LeafSpec("block_table", "ids", "table", 1, 1, 0, "int32"))
    return leaves
