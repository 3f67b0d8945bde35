"""What one layer keeps in the cache: the source of every leaf, ring and address. Imports no jax.

Rings of a slot are addressed by absolute position: row = position mod R. With `draft_tokens = n` a
verify step writes 1 + n positions of which any prefix may be kept, so R >= needed history + n
(docs/model.md, State): W + n for the window, 2 m + n for a CSA compressor of ratio m, r + n for the raw ring of an HCA
compressor of ratio r, 2 + n for the residual that an MTP layer takes of the token before. (The stages of DSpark, whose
block sees the W tokens before it, have no query among these tokens, and W + n suffices.) The online state of an HCA
compressor keeps n + 2 banks (without drafts one), so that the state before the step survives every rejection.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, get_args

from .checks import INT32_MAX, as_int, check_integer, shown
from .config import AttentionType, DSV4Config, LayerSpec
from .errors import LayoutError

__all__ = ["HcaState", "LayerCacheSchema", "PoolSchema", "build_schema", "checked_block_tokens"]

HcaState = Literal["online", "raw"]


@dataclasses.dataclass(frozen=True)
class PoolSchema:
    """The rows of one layer in one pool.

    Attributes:
        pool: its name.
        scope: whose rows they are: of a block, or of a slot.
        row: how one is stored: in the layout's format of "kv" or of "index" rows, or as float32 "state".
        width: values of a row.
        rows: of the layer in one block or slot.
        ordinal: of the layer among the layers of the pool.
    """

    pool: str
    scope: Literal["block", "slot"]
    row: Literal["kv", "index", "state"]
    width: int
    rows: int
    ordinal: int

    def base(self, units: int) -> int:
        """First row of the layer in leaves of this many blocks or slots, null ones included."""
        return self.ordinal * units * self.rows


@dataclasses.dataclass(frozen=True)
class LayerCacheSchema:
    """What one layer keeps in the cache, and whose entries it reads.

    Attributes:
        layer_idx, attn: the layer and its attention kind.
        owner: the layer whose compressed entries this one reads (and whose index keys, if it selects). In V4 every
            layer is its own.
        selector: the layer whose selection among them it attends to. In V4 every layer is its own.
        block_tokens: original tokens per block.
        ratio: tokens per entry; 0: there are no entries (SWA).
        overlap_rows: tokens before an entry's own that it also pools (CSA: its ratio).
        selected_entries: how many entries a token attends to at most (CSA); 0: to all it may see.
        swa_window_size: tokens of the sliding window, the token itself included.
        window: the ring of the window's rows; of DSpark's stages in a pool of their own.
        first_position: of the tokens whose rows the window shows: 1 in MTP layers (docs/model.md, MTP), else 0.
        entries, index_keys: the owner's entries and index keys; None: it has none.
        entry_state, index_state: what the compressors that write these keep of a request; None: none, or another
            layer's do.
        residual: of an MTP layer, the backbone's residual streams after its last layer, a row a token.
    """

    layer_idx: int
    attn: AttentionType
    owner: int
    selector: int
    block_tokens: int
    ratio: int
    overlap_rows: int
    selected_entries: int
    swa_window_size: int
    window: PoolSchema
    entries: PoolSchema | None = None
    index_keys: PoolSchema | None = None
    entry_state: PoolSchema | None = None
    index_state: PoolSchema | None = None
    residual: PoolSchema | None = None
    first_position: int = 0

    @property
    def entries_per_block(self) -> int:
        """Compressed entries of a block (0 for SWA)."""
        return 0 if self.entries is None else self.entries.rows

    @property
    def indexer_entries_per_block(self) -> int:
        """Index keys of a block (0 unless CSA)."""
        return 0 if self.index_keys is None else self.index_keys.rows

    @property
    def tail_buffer_size(self) -> int:
        """Pending tokens that can wait for their entry, ratio - 1 (0 for SWA)."""
        return max(self.ratio - 1, 0)

    @property
    def entry_head_dim(self) -> int:
        """Width of a KV row."""
        return self.window.width

    @property
    def pools(self) -> tuple[PoolSchema, ...]:
        """The rows that the layer itself writes: what the leaves are made of."""
        shared = () if self.owner == self.layer_idx else (self.entries, self.index_keys)
        mine = (self.window, self.entries, self.index_keys, self.entry_state, self.index_state, self.residual)
        return tuple(pool for pool in mine if pool is not None and pool not in shared)


def build_schema(
    cfg: DSV4Config,
    layer: LayerSpec,
    *,
    block_tokens: int | None = None,
    draft_tokens: int = 0,
    hca_state: HcaState = "online",
) -> LayerCacheSchema:
    """What a layer keeps in the cache, per block and per request: `schema(layer.layer_idx)` of the `CacheLayout`.

    Args:
        cfg: the model.
        layer: one of its layers (`build_schedule`).
        block_tokens, draft_tokens, hca_state: as for `CacheLayout`, with the same defaults.

    Raises:
        LayoutError: the model has no such layer; or as `CacheLayout`.
    """
    index, kind = layer.layer_idx, layer.attn
    kinds = cfg.layer_types + (AttentionType.SWA,) * cfg.num_draft_layers
    if not 0 <= index < len(kinds) or kinds[index] is not kind:
        raise LayoutError(f"layer {index} of kind {kind.name} is none of this model's {len(kinds)}")
    tokens = checked_block_tokens(block_tokens, cfg)
    drafts = check_integer("draft_tokens", draft_tokens, high=INT32_MAX, error=LayoutError)
    if hca_state not in get_args(HcaState):
        raise LayoutError(f"hca_state must be 'online' or 'raw', got {shown(hca_state)}")
    ratio, ordinal = cfg.ratio(kind), kinds[:index].count(kind)
    csa = kind is AttentionType.CSA
    beyond = index - cfg.num_layers
    is_stage = beyond >= 0 and cfg.dspark is not None
    place = ("draft", beyond) if is_stage else ("swa", index)
    pools = {"window": PoolSchema(place[0], "slot", "kv", cfg.head_dim, cfg.sliding_window + drafts, place[1])}
    is_mtp = beyond >= 0 and not is_stage
    if is_mtp:
        width = cfg.hc_mult * cfg.hidden_size
        pools["residual"] = PoolSchema("residual", "slot", "state", width, 2 + drafts, beyond)
    if ratio:
        name, entries = kind.name.lower(), tokens // ratio
        pools["entries"] = PoolSchema(name, "block", "kv", cfg.head_dim, entries, ordinal)
        if csa:
            # A row is [kv 2e | score 2e]: the first e of each belong to the next entry, the last e to its own.
            rows, wide = 2 * ratio + drafts, 4
            pools["index_keys"] = PoolSchema("index", "block", "index", cfg.index_head_dim, entries, ordinal)
            pools["index_state"] = PoolSchema("index_state", "slot", "state", 4 * cfg.index_head_dim, rows, ordinal)
        elif hca_state == "raw":
            rows, wide = ratio + drafts, 2  # [kv | score] of a position
        else:
            rows, wide = drafts + 2 if drafts else 1, 3  # [max | sum | acc] of a bank
        pools["entry_state"] = PoolSchema(f"{name}_state", "slot", "state", wide * cfg.head_dim, rows, ordinal)
    return LayerCacheSchema(
        layer_idx=index,
        attn=kind,
        owner=index,
        selector=index,
        block_tokens=tokens,
        ratio=ratio,
        overlap_rows=ratio if csa else 0,
        selected_entries=cfg.index_topk if csa else 0,
        swa_window_size=cfg.sliding_window,
        first_position=int(is_mtp),
        **pools,
    )


def checked_block_tokens(value: Any, cfg: DSV4Config) -> int:
    """Returns tokens per block: a multiple of the lcm of the ratios that the model's layers have.

    None: the smallest multiple that is at least 128. Raises `LayoutError`.
    """
    multiple = math.lcm(*(ratio for ratio in map(cfg.ratio, set(cfg.layer_types)) if ratio))
    if value is None:
        return -(-128 // multiple) * multiple
    number = as_int(value)
    if number is None or not 1 <= number <= INT32_MAX or number % multiple:
        raise LayoutError(f"block_tokens must be a positive multiple of {multiple}, got {shown(value)}")
    return number
