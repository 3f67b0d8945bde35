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

What a layer has in which leaf is its schema (`schema.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterator
from typing import Any, Literal, get_args

import numpy as np

from . import formats
from .checks import INT32_MAX, as_int, check_boolean, check_integer, shown
from .config import AttentionType, DSV4Config, LayerSpec, Numerics, build_schedule
from .errors import LayoutError
from .formats import Part, RowFormat
from .former_names import former_keywords
from .schema import HcaState, LayerCacheSchema, PoolSchema, build_schema, checked_block_tokens

__all__ = ["CacheLayout", "CacheSize", "KeySplit", "LeafSpec", "check_layout"]

KeySplit = Literal["throughput", "latency", "context"]
Scope = Literal["block", "slot", "table"]
MAX_LEAVES = 24
# The order of the leaves, and so of the parts of a stored record.
_POOLS = ("swa", "csa", "hca", "index", "csa_state", "index_state", "hca_state", "residual", "draft")
_WINDOWS = ("swa", "draft")
_MAX_UNITS = INT32_MAX - 1  # of a scope, the null unit not counted


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
        num_blocks: blocks that can be allocated (ids 1..num_blocks), on each of the ranks.
        num_slots: requests that can be live at once (slots 1..num_slots).
        max_blocks_per_request: width of the block table.
        num_snapshots: extra slots (after the request slots) that hold state snapshots.
        pool_ranks: n devices that share each request's blocks, block i on rank i mod n; slots and tables are on all
            of them. Ids 1..total_blocks are dealt out in turn: id g is on rank (g - 1) mod n.

    Raises:
        LayoutError: a number is no integer, too small, or such that ids of blocks or slots do not fit int32. How
            many rows that makes is up to the layout: see `CacheLayout.check_size`.
    """

    num_blocks: int
    num_slots: int
    max_blocks_per_request: int
    num_snapshots: int = 0
    pool_ranks: int = 1

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            low, value = int(field.name != "num_snapshots"), getattr(self, field.name)
            number = check_integer(f"CacheSize.{field.name}", value, low, _MAX_UNITS, error=LayoutError)
            object.__setattr__(self, field.name, number)
        if self.total_blocks > _MAX_UNITS:
            raise LayoutError(f"CacheSize: num_blocks of all pool_ranks must be at most {_MAX_UNITS}")
        if self.num_slots + self.num_snapshots > _MAX_UNITS:
            raise LayoutError(f"CacheSize: num_slots and num_snapshots must be at most {_MAX_UNITS} together")

    @property
    def total_blocks(self) -> int:
        """Blocks of all pool ranks together, null blocks left out."""
        return self.num_blocks * self.pool_ranks

    @property
    def block_units(self) -> int:
        """Blocks of each pool rank, the null block included."""
        return self.num_blocks + 1

    @property
    def slot_units(self) -> int:
        return self.num_slots + self.num_snapshots + 1

    def holds(self, other: CacheSize) -> bool:
        """Whether every unit of a cache of the other size has its place in one of this."""
        mine, others = ((size.block_units, size.slot_units, size.max_blocks_per_request) for size in (self, other))
        fits = all(have >= want for have, want in zip(mine, others, strict=True))
        return fits and self.pool_ranks == other.pool_ranks


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
        include_drafts: also hold what the layers that draft keep: an MTP layer's window and the backbone's residual of
            the last token, or the windows of DSpark's stages.
        key_split: how finely attention kernels may cut a token's keys: for "throughput" (large batches) or for the
            "latency" of one or a few requests. "context" cuts them by their blocks, into the shares of eight ranks: a
            token's bits are then the same over 1, 2, 4 or 8 ranks of a pool axis. No array depends on it. It is a fact
            of the deployment, like the formats: a token's bits are the same in every batch under each, but not the
            same under all.
        numerics: what the model that fills the cache rounds: "plain", or "released" (`model.released`), whose rows are
            others. No array depends on it; all fingerprints do, so that what one stored is never a hit of the other.

    Raises:
        LayoutError: unknown format, key split or numerics, impossible block size or draft count, formats of too many
            parts, or `cfg` is none.
    """

    @former_keywords(include_mtp="include_drafts")
    def __init__(
        self,
        cfg: DSV4Config,
        kv_format: str = "fp8",
        index_format: str = "fp4",
        block_tokens: int | None = None,
        draft_tokens: int = 0,
        *,
        hca_state: HcaState = "online",
        include_drafts: bool = False,
        key_split: KeySplit = "throughput",
        numerics: Numerics = "plain",
    ):
        if not isinstance(cfg, DSV4Config):
            raise LayoutError(f"cfg must be a DSV4Config, got {shown(cfg)}")
        self.cfg, self.include_drafts = cfg, check_boolean("include_drafts", include_drafts, error=LayoutError)
        self.schedule = build_schedule(cfg, include_drafts=self.include_drafts)
        self.block_tokens = checked_block_tokens(block_tokens, cfg)
        self.draft_tokens = check_integer("draft_tokens", draft_tokens, high=INT32_MAX, error=LayoutError)
        for name, value, known in (("key_split", key_split, KeySplit), ("numerics", numerics, Numerics)):
            if value not in get_args(known):
                raise LayoutError(f"{name} must be {', '.join(map(repr, get_args(known)))}, got {value!r}")
        self.hca_state: HcaState = hca_state
        self.key_split: KeySplit = key_split
        self.numerics: Numerics = numerics
        self.kv_row: RowFormat = formats.kv_format(kv_format, cfg.head_dim, cfg.rope_dim)
        self.index_row: RowFormat = formats.index_format(index_format, cfg.index_head_dim)
        sizes = dict(block_tokens=self.block_tokens, draft_tokens=self.draft_tokens, hca_state=hca_state)
        self.schemas: tuple[LayerCacheSchema, ...] = tuple(build_schema(cfg, spec, **sizes) for spec in self.schedule)
        # What a plan lists: `flush_tokens`, which may complete an entry of a layer whose entries overlap, and
        # `group_tokens`, those of one entry of the others. A model without such layers has the numbers of its config.
        overlap = {schema.ratio: bool(schema.overlap_rows) for schema in self.schemas if schema.ratio}
        self.flush_ratio = next((ratio for ratio, overlaps in overlap.items() if overlaps), cfg.csa_ratio)
        self.group_ratio = next((ratio for ratio, overlaps in overlap.items() if not overlaps), cfg.hca_ratio)
        self.leaves: tuple[LeafSpec, ...] = tuple(self._leaves())
        if len(self.leaves) > MAX_LEAVES:  # a step is to stay cheap to dispatch
            raise LayoutError(f"{len(self.leaves)} arrays, at most {MAX_LEAVES}: the row formats have too many parts")
        # With the key split: compiled steps are found by their layout, and each split is another computation.
        choices = (self.draft_tokens, hca_state, include_drafts, key_split, numerics)
        self._key = (cfg, self.kv_row, self.index_row, self.block_tokens, *choices)
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
            f"draft_tokens={self.draft_tokens}, hca_state={self.hca_state!r}, key_split={self.key_split!r}, "
            f"numerics={self.numerics!r})"
        )

    def layer(self, layer_idx: int) -> LayerSpec:
        """Returns the schedule entry of a layer. Raises `LayoutError` if there is no such layer."""
        index = as_int(layer_idx)
        if index is None or not 0 <= index < len(self.schedule):
            last = len(self.schedule) - 1
            raise LayoutError(f"layer {shown(layer_idx)} out of range: this layout has layers 0..{last}")
        return self.schedule[index]

    def schema(self, layer_idx: int) -> LayerCacheSchema:
        """What a layer keeps, where, and whose entries it reads. Raises `LayoutError` if there is no such layer."""
        return self.schemas[self.layer(layer_idx).layer_idx]

    def row_format(self, pool: PoolSchema) -> RowFormat:
        """How the pool's rows are stored. Raises `LayoutError` for compressor state, whose rows are plain float32."""
        if pool.row == "state":
            raise LayoutError(f"pool '{pool.pool}' holds state, not rows of a format")
        return self.kv_row if pool.row == "kv" else self.index_row

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-tokens // self.block_tokens)

    def check_size(self, size: CacheSize) -> None:
        """Refuses sizes whose rows or positions have no int32 number. `init_cache` and the managers call it.

        Raises:
            LayoutError: a leaf would have more than 2^31 - 1 rows (layers * units * rows of a unit, null units
                included), which are as many blocks as 409 million tokens of V4-Flash fill. Or a request could
                have as many tokens. Or it is no `CacheSize`.
        """
        if not isinstance(size, CacheSize):
            raise LayoutError(f"the size of a cache must be a CacheSize, got {shown(size)}")
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
        """Returns bytes `init_cache` allocates for this size, null units included."""
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
        return sum(leaf.unit_bytes for leaf in self.leaves if leaf.pool in _WINDOWS)

    @property
    def state_bytes_per_request(self) -> int:
        """Compressor state of one slot (window not counted)."""
        return sum(leaf.unit_bytes for leaf in self.leaves if leaf.scope == "slot" and leaf.pool not in _WINDOWS)

    @property
    def bytes_per_slot(self) -> int:
        """Window and compressor state of one slot, over all layers."""
        return self.window_bytes_per_request + self.state_bytes_per_request

    def request_bytes(self, tokens: int) -> int:
        """Returns what a request of this many tokens occupies: its slot and its blocks."""
        return self.bytes_per_slot + self.blocks_for(tokens) * self.bytes_per_block

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hex digest that two caches share exactly if their arrays mean the same: what a plan and a layout are for.

        It names a format and the model's `numerics`, not who computed the values: kernels, devices and `key_split`,
        which decide their last bits, are no part of it, nor of the two below, so stored records outlive a change of
        these.
        """
        facts: list[Any] = [dataclasses.astuple(leaf) for leaf in self.leaves]
        facts.append((self.kv_row.name, self.index_row.name, self.block_tokens, self.cfg.csa_ratio, self.cfg.hca_ratio))
        facts.append([spec.attn.value for spec in self.schedule])
        return _digest(facts + self._numerics_facts)

    @functools.cached_property
    def block_fingerprint(self) -> str:
        """Hex digest that two layouts share exactly if block records of one can be read as those of the other.

        `draft_tokens` and `include_drafts` are no part of it. `hca_state` is, where there are HCA layers: it decides
        how their entries are computed.
        """
        facts: list[Any] = [dataclasses.astuple(leaf) for leaf in self.leaves if leaf.scope == "block"]
        facts += self._record_facts
        facts.append((self.kv_row.name, self.index_row.name, self.block_tokens))
        return _digest(["block", *facts, [kind.value for kind in self.cfg.layer_types]])

    @functools.cached_property
    def snapshot_fingerprint(self) -> str:
        """Hex digest that two layouts share exactly if snapshot records of one can be read as those of the other.

        And the records of whole states (`dsv4_jax.records`). Neither `draft_tokens` nor `block_tokens` nor the index
        format is part of it.
        """
        facts: list[Any] = [
            (leaf.pool, leaf.part, leaf.layers, leaf.width, leaf.dtype) for leaf in self.leaves if leaf.scope == "slot"
        ]
        facts += self._record_facts
        facts.append((self.kv_row.name, self.cfg.sliding_window))
        return _digest(["snapshot", *facts, [spec.attn.value for spec in self.schedule]])

    @property
    def _record_facts(self) -> list[Any]:
        """Returns the facts by which records of blocks, and those of snapshots, are told apart."""
        has_hca = AttentionType.HCA in self.cfg.layer_types
        return [(self.cfg.csa_ratio, self.cfg.hca_ratio), self.hca_state if has_hca else None, *self._numerics_facts]

    @property
    def _numerics_facts(self) -> list[Any]:
        """Returns the facts by which numerics are told apart: none of plain ones, which had no name once."""
        return [] if self.numerics == "plain" else ["numerics", self.numerics]

    def _leaves(self) -> Iterator[LeafSpec]:
        pools: dict[str, list[PoolSchema]] = {name: [] for name in _POOLS}
        for pool in (pool for schema in self.schemas for pool in schema.pools):
            pools[pool.pool].append(pool)
        for name, layers in pools.items():
            if not layers:
                continue
            pool, states = layers[0], (Part("rows", "float32", layers[0].width),)
            assert [dataclasses.replace(pool, ordinal=i) for i in range(len(layers))] == layers, f"ragged pool {name}"
            for part in states if pool.row == "state" else self.row_format(pool).parts:
                yield LeafSpec(name, part.name, pool.scope, len(layers), pool.rows, part.width, part.dtype)
        yield LeafSpec("block_table", "ids", "table", 1, 1, 0, "int32")


def check_layout(layout: Any) -> None:
    """Raises `LayoutError` unless it is a `CacheLayout`: arguments of two kinds are easily swapped."""
    if not isinstance(layout, CacheLayout):
        raise LayoutError(f"the layout of a cache must be a CacheLayout, got {shown(layout)}")


def _digest(facts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
