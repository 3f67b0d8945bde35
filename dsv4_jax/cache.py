"""The cache on the device: a pytree of flat arrays, and a typed view of one layer of it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from .config import AttentionType, LayerSpec
from .errors import LayoutError, ShapeError
from .formats import RowFormat
from .layout import CacheLayout, CacheSize, LeafSpec
from .ops.append import Rows, append, encode, exists, pin, store, window_rows, window_view
from .ops.attend import attend
from .ops.columns import Values
from .ops.compress import CompressorGeometry, CompressorInputs, compress_csa, compress_hca
from .ops.copy import copy_units
from .ops.dispatch import Implementation
from .ops.epilogue import Epilogue
from .ops.gather import gather_rows
from .ops.index_scores import index_scores
from .ops.queries import finish_queries
from .ops.top_k import top_k
from .plan import CacheFacts, PackedPlan, StepPlan, register_pytrees

__all__ = ["KVCache", "LayerCacheHandle", "init_cache"]


@dataclasses.dataclass(frozen=True)
class KVCache:
    """All cache bytes of one model instance. A pytree: jit it, donate it, shard it.

    Attributes:
        arrays: leaf name -> array, in the order and shapes of `layout.leaves`.
        layout: static.
    """

    arrays: dict[str, jax.Array]
    layout: CacheLayout

    def pool(self, name: str) -> Rows:
        """The parts of a pool ("swa", "csa", "hca", "index", "csa_state", ...)."""
        return tuple(self.arrays[leaf.name] for leaf in self.layout.leaves if leaf.pool == name)

    def with_pool(self, name: str, parts: Rows) -> KVCache:
        """This cache with a pool replaced."""
        names = [leaf.name for leaf in self.layout.leaves if leaf.pool == name]
        return dataclasses.replace(self, arrays=self.arrays | dict(zip(names, parts, strict=True)))

    @property
    def block_table(self) -> jax.Array:
        """[slots, max_blocks_per_request] int32."""
        return self.arrays["block_table.ids"]

    @property
    def slot_units(self) -> int:
        """Slots of this (possibly per-shard) cache, the null slot included."""
        return self.block_table.shape[0]

    @property
    def block_units(self) -> int:
        """Blocks of this (possibly per-shard) cache, the null block included."""
        for leaf in self.layout.leaves:
            if leaf.scope == "block":
                return self.arrays[leaf.name].shape[0] // (leaf.layers * leaf.rows)
        return 1

    @property
    def facts(self) -> CacheFacts:
        """What a plan of this cache knows of it."""
        paged = any(leaf.scope == "block" for leaf in self.layout.leaves)
        blocks = self.block_units if paged else None
        return CacheFacts(self.layout.fingerprint, self.slot_units, blocks, self.block_table.shape[1])

    def begin(self, plan: StepPlan | PackedPlan) -> KVCache:
        """Carries out the plan's copies and block-table entries. Call once per step, before the layers.

        Raises:
            ForeignPlanError: the plan was made for another layout or size.
        """
        plan = self._own(plan)
        arrays = dict(self.arrays)
        for leaf in self.layout.leaves:
            if leaf.scope == "table":
                continue
            block = leaf.scope == "block"
            arrays[leaf.name] = copy_units(
                arrays[leaf.name],
                plan.copy_block_src if block else plan.copy_slot_src,
                plan.copy_block_dst if block else plan.copy_slot_dst,
                layers=leaf.layers,
                units=self.block_units if block else self.slot_units,
                rows=leaf.rows,
            )
        table = arrays["block_table.ids"]
        arrays["block_table.ids"] = table.at[plan.table_slot, plan.table_index].set(
            jnp.asarray(plan.table_block), mode="drop", wrap_negative_indices=False
        )
        return dataclasses.replace(self, arrays=arrays)

    def layer(
        self, layer_idx: int, plan: StepPlan | PackedPlan, *, implementation: Implementation = None
    ) -> LayerCacheHandle:
        """The view of one layer for one step. Creates no array.

        Args:
            layer_idx: the layer, as in `build_schedule`.
            plan: the step, already begun with `begin`. A packed one is unpacked in every call: do it once before.
            implementation: of the ops the handle calls (see `dsv4_jax.ops`).

        Raises:
            LayoutError: there is no such layer.
            ForeignPlanError: the plan was made for another layout or size.
        """
        plan = self._own(plan)
        return LayerCacheHandle(self, plan, self.layout.layer(layer_idx), implementation=implementation)

    def _own(self, plan: StepPlan | PackedPlan) -> StepPlan:
        """The plan, unpacked. Raises `ForeignPlanError`."""
        if plan.facts is not None:
            plan.facts.check(self.facts)
        return plan.unpack()


jax.tree_util.register_dataclass(KVCache, data_fields=["arrays"], meta_fields=["layout"])
register_pytrees()


def init_cache(layout: CacheLayout, size: CacheSize, *, sharding: Any = None) -> KVCache:
    """An empty cache, all zeros.

    Args:
        layout: what to hold.
        size: how much of it (per shard, when sharded along a data axis).
        sharding: None for the default device, or the `KVCache` of shardings that
            `cache_sharding` returns: the leading axis of every leaf is then multiplied by its
            number of data shards, each holding a self-contained cache with its own unit ids.

    Raises:
        LayoutError: more rows than int32 has numbers (see `CacheLayout.check_size`); nothing was allocated.
    """
    layout.check_size(size)

    # Committed to its device, as what `swap_in` returns is: or a step would compile again after the first of those.
    device = None
    if sharding is None and not isinstance(zero := jnp.zeros(()), jax.core.Tracer):
        (device,) = zero.devices()

    def allocate(leaf: LeafSpec) -> jax.Array:
        rows, width = layout.leaf_shape(leaf, size)
        if sharding is None:
            return jnp.zeros((rows, width), leaf.dtype, device=device)
        placement = sharding.arrays[leaf.name]
        local = placement.shard_shape((1 << 40, width))[0]
        shape = (rows * ((1 << 40) // local), width)
        return jax.jit(functools.partial(jnp.zeros, shape, leaf.dtype), out_shardings=placement)()

    return KVCache({leaf.name: allocate(leaf) for leaf in layout.leaves}, layout)


@dataclasses.dataclass(frozen=True)
class LayerCacheHandle:
    """One layer of the cache in one step: what model code talks to.

    Every method is traceable; those that write return a new handle, whose `cache` holds the
    result. Order within a layer: `append`, the compressors, then reads. `Values` are arrays or
    `Columns` of a stacked product, which kernels that can read in place.

    Attributes:
        cache: the whole cache as updated so far.
        plan: the step.
        spec: the layer.
        window: where each token's window lies, once `append` was called.
        implementation: of the ops, see `dsv4_jax.ops`.
    """

    cache: KVCache
    plan: StepPlan
    spec: LayerSpec
    window: tuple[Rows, jax.Array, jax.Array] | None = None
    implementation: Implementation = None

    @property
    def layout(self) -> CacheLayout:
        return self.cache.layout

    # Writes

    def append(self, kv: Values, epilogue: Epilogue | None = None) -> LayerCacheHandle:
        """Stores the step's KV rows in the sliding window.

        Args:
            kv: [T, head_dim] float.
            epilogue: the rows' norm and RoPE, done while they are stored; None if `kv` has them.
        """
        cfg, fmt, plan = self.layout.cfg, self.layout.kv_row, self.plan
        self._check("kv", kv, (plan.num_tokens, cfg.head_dim))
        pool = self.cache.pool("swa")
        place = dict(ordinal=self.spec.layer_idx, slots=self.cache.slot_units, ring=self.layout.window_rows)
        ids = window_rows(plan, rows=pool[0].shape[0], **place)
        done = dict(fmt=fmt, epilogue=epilogue, position=plan.token_position, implementation=self.implementation)
        if plan.history_seqs.shape[0]:
            # The step overruns the ring: take the view before the ring is overwritten.
            chunk = encode(kv, **done)
            window, pool = pin(window_view(pool, chunk, plan, window=cfg.sliding_window, **place), pool)
            pool = store(pool, chunk, ids)
        else:
            pool = append(pool, kv, ids, **done)
            window = window_view(pool, None, plan, window=cfg.sliding_window, **place)
        return dataclasses.replace(self, cache=self.cache.with_pool("swa", pool), window=window)

    def compress(
        self,
        kv: Values,
        score: Values,
        epilogue: Epilogue,
        index: tuple[Any, ...] | None = None,
        *,
        ape: jax.Array | None = None,
    ) -> LayerCacheHandle:
        """Feeds the layer's compressor and stores the entries it completes.

        Args:
            kv, score: [T, 2 * head_dim] (CSA) or [T, head_dim] (HCA) float32.
            epilogue: norm weight and RoPE of the entries.
            index: CSA only: the arguments of `compress_index`, to do both at once.
            ape: [ratio, width of score] float32: the position bias to add to the score of each place in a block;
                None: the score holds it already.
        """
        attn = self.spec.attn
        if attn is AttentionType.SWA:
            raise LayoutError(f"layer {self.spec.layer_idx} is SWA-only: it has no compressor")
        if attn is AttentionType.CSA:
            streams = {"csa": self._stream("csa", kv, score, epilogue, ape)}
            if index is not None:
                streams["index"] = self._stream("index", *index)
            return self._compress_csa(streams)
        if index is not None:
            self._require_csa("indexer")
        stream = self._stream("hca", kv, score, epilogue, ape)
        state, pool = compress_hca(
            stream, self.plan, self.cache.block_table, mode=self.layout.hca_state, implementation=self.implementation
        )
        return dataclasses.replace(self, cache=self.cache.with_pool("hca_state", (state,)).with_pool("hca", pool))

    def compress_index(
        self, kv: Values, score: Values, epilogue: Epilogue, ape: jax.Array | None = None
    ) -> LayerCacheHandle:
        """Feeds a CSA layer's indexer compressor, [T, 2 * index_head_dim] float32 each, and stores its keys."""
        self._require_csa("indexer")
        return self._compress_csa({"index": self._stream("index", kv, score, epilogue, ape)})

    # Queries

    def queries(self, q: Values, inv_freq: jax.Array) -> jax.Array:
        """Queries for `attend` from projected ones [T, heads, head_dim] float32: RMSNorm per head, then RoPE."""
        return self._finish_queries(q, inv_freq, self.layout.kv_row, eps=self.layout.cfg.rms_norm_eps)

    def index_queries(self, q: Values, inv_freq: jax.Array, *, qat: bool) -> jax.Array:
        """Queries for `index_scores` from projected ones [T, index_n_heads, index_head_dim] float32.

        RoPE; with `qat` also the Hadamard rotation and FP4 rounding the model was trained with.
        """
        self._require_csa("indexer")
        return self._finish_queries(q, inv_freq, self.layout.index_row, rotate=qat, round_fp4=qat)

    # Reads

    def gather_swa(self, dtype: jnp.dtype | None = None) -> tuple[jax.Array, jax.Array]:
        """The window of every token: (rows [T, window, head_dim], visible [T, window] bool).

        Row k of token t is position t - window + 1 + k.
        """
        rows, ids, visible = self._window()
        return self._gather(rows, ids, self.layout.kv_row, dtype), visible

    def gather_compressed(self, entries: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
        """Dense rows [T, K, head_dim] of logical entries [T, K] int32 (0 for padding)."""
        pool = self.cache.pool(self._pool_name())
        return self._gather(pool, self.entry_rows(entries), self.layout.kv_row, dtype)

    def gather_all_compressed(self, dtype: jnp.dtype | None = None) -> tuple[jax.Array, jax.Array]:
        """All entries a token's request can have: (rows [T, S, head_dim], visible entries [T] int32)."""
        return self.gather_compressed(self._all_entries(), dtype), self.visible_entries()

    def visible_entries(self) -> jax.Array:
        """[T] int32: entries each token may see, (position + 1) // ratio; 0 for padding.

        Raises:
            LayoutError: the layer is SWA-only; so do all that gather or address entries.
        """
        self._pool_name()
        ratio = np.int32(self.layout.cfg.ratio(self.spec.attn))
        live = exists(self.plan.token_slot, self.cache.slot_units)
        return jnp.where(live, (self.plan.token_position + 1) // ratio, 0)

    def entry_rows(self, entries: jax.Array) -> jax.Array:
        """Pool rows [T, K] of logical entries [T, K], through each token's block table."""
        self._pool_name()
        per_block = np.int32(self.layout.entries_per_block(self.spec.attn))
        block = self.cache.block_table[jnp.asarray(self.plan.token_slot)[:, None], entries // per_block]
        block = lax.clamp(np.int32(0), block, np.int32(self.cache.block_units - 1))  # or the product could leave int32
        return np.int32(self._base()) + block * per_block + entries % per_block

    def index_scores(self, queries: jax.Array, weights: Values, *, scale: float = 1.0) -> jax.Array:
        """Indexer scores [T, S] float32 of all entries (-inf where not visible); CSA only.

        Args:
            queries: [T, index_n_heads, index_head_dim], rotated as the keys are.
            weights: [T, index_n_heads] head weights.
            scale: of the weights: (dim * heads) ** -0.5, if they do not have it already.
        """
        self._require_csa("indexer")
        table = self.cache.block_table[:, : self.plan.table_columns.shape[0]][self.plan.token_slot]
        return index_scores(
            self.cache.pool("index"), queries, weights, table, self.visible_entries(), base=self._base(),
            rows_per_block=self.layout.entries_per_block(AttentionType.CSA), fmt=self.layout.index_row, scale=scale,
            implementation=self.implementation,
        )  # fmt: skip

    def top_k(self, scores: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The entries to attend to: (logical entries [T, K] int32, how many count [T] int32)."""
        k = self.layout.cfg.index_topk
        return top_k(scores, self.visible_entries(), k=k, implementation=self.implementation)

    def attend(
        self,
        queries: jax.Array,
        sink: jax.Array,
        selected: tuple[jax.Array, jax.Array] | None = None,
        *,
        scale: float | None = None,
        inverse_rope: jax.Array | None = None,
        dtype: DTypeLike = jnp.float32,
    ) -> tuple[jax.Array, jax.Array]:
        """One softmax over the window, the layer's entries and the sink.

        Args:
            queries: [T, heads, head_dim].
            sink: [heads] float32.
            selected: for CSA, what `top_k` returned. HCA attends to every visible entry, SWA to none.
            scale: softmax scale, default head_dim ** -0.5.
            inverse_rope: RoPE frequencies [rope_dim / 2] by which `out` is turned back at each token's position.
            dtype: of `out`, float32 or bfloat16.

        Returns:
            (out [T, heads, head_dim] of `dtype`, lse [T, heads] float32 without the sink).
        """
        cfg = self.layout.cfg
        rows, ids, visible = self._window()
        entries = entry_ids = count = None
        if self.spec.attn is AttentionType.CSA:
            if selected is None:
                raise ShapeError(f"layer {self.spec.layer_idx} is CSA: attend needs the selected entries")
            entry_ids, count = self.entry_rows(selected[0]), selected[1]
        elif selected is not None:
            raise ShapeError(f"layer {self.spec.layer_idx} is {self.spec.attn.name}: it selects no entries")
        elif self.spec.attn is AttentionType.HCA:
            entry_ids, count = self.entry_rows(self._all_entries()), self.visible_entries()
        if entry_ids is not None:
            entries = self.cache.pool(self._pool_name())
        return attend(
            queries, sink, rows, ids, visible, entries, entry_ids, count,
            scale=cfg.head_dim**-0.5 if scale is None else scale, fmt=self.layout.kv_row,
            inverse_rope=None if inverse_rope is None else (self.plan.token_position, inverse_rope), dtype=dtype,
            key_split=self.layout.key_split, implementation=self.implementation,
        )  # fmt: skip

    # Plumbing

    def _finish_queries(self, q: Values, inv_freq: jax.Array, fmt: RowFormat, **steps: Any) -> jax.Array:
        # Kernels give bf16, which would waste rows kept in float32.
        implementation = "xla" if fmt.name == "f32" else self.implementation
        return finish_queries(q, self.plan.token_position, inv_freq, **steps, implementation=implementation)

    def _compress_csa(self, streams: dict[str, CompressorInputs]) -> LayerCacheHandle:
        cache = self.cache
        done = compress_csa([*streams.values()], self.plan, cache.block_table, implementation=self.implementation)
        for name, (state, pool) in zip(streams, done, strict=True):
            cache = cache.with_pool(f"{name}_state", (state,)).with_pool(name, pool)
        return dataclasses.replace(self, cache=cache)

    def _stream(
        self, pool: str, kv: Values, score: Values, epilogue: Epilogue, ape: jax.Array | None = None
    ) -> CompressorInputs:
        attn, layout = self.spec.attn, self.layout
        csa, of_index = attn is AttentionType.CSA, pool == "index"
        ratio, fmt = layout.cfg.ratio(attn), layout.index_row if of_index else layout.kv_row
        width, prefix = fmt.dim * (2 if csa else 1), "index " if of_index else ""
        for name, x in (("kv", kv), ("score", score)):
            self._check(prefix + name, x, (self.plan.num_tokens, width))
        if ape is not None:
            self._check(f"{prefix}ape", ape, (ratio, width))
        geometry = CompressorGeometry(
            ratio=ratio, ordinal=layout.ordinal(self.spec.layer_idx), slots=self.cache.slot_units,
            ring=layout.csa_ring_rows if csa else layout.hca_rows, base=self._base(),
            rows_per_block=layout.entries_per_block(attn), fmt=fmt, blocks=self.cache.block_units,
        )  # fmt: skip
        (state,) = self.cache.pool(f"{pool}_state")
        return CompressorInputs(state, self.cache.pool(pool), kv, score, epilogue, geometry, ape)

    def _base(self) -> int:
        """First row of this layer in its pool leaves."""
        rows = self.layout.entries_per_block(self.spec.attn)
        return self.layout.ordinal(self.spec.layer_idx) * self.cache.block_units * rows

    def _pool_name(self) -> str:
        if self.spec.attn is AttentionType.SWA:
            raise LayoutError(f"layer {self.spec.layer_idx} is SWA-only: it has no compressed entries")
        return self.spec.attn.name.lower()

    def _all_entries(self) -> jax.Array:
        total = self.plan.table_columns.shape[0] * self.layout.entries_per_block(self.spec.attn)
        return jnp.broadcast_to(jnp.arange(total, dtype=jnp.int32), (self.plan.num_tokens, total))

    def _window(self) -> tuple[Rows, jax.Array, jax.Array]:
        if self.window is None:
            raise ShapeError(f"layer {self.spec.layer_idx}: append the step's rows before reading the window")
        return self.window

    def _gather(self, pool: Rows, ids: jax.Array, fmt: RowFormat, dtype: jnp.dtype | None) -> jax.Array:
        if dtype is None:
            dtype = jnp.float32 if fmt.name == "f32" else jnp.bfloat16
        return gather_rows(pool, ids, fmt=fmt, dtype=dtype, implementation=self.implementation)

    def _require_csa(self, what: str) -> None:
        if self.spec.attn is not AttentionType.CSA:
            raise LayoutError(f"layer {self.spec.layer_idx} is {self.spec.attn.name}: only CSA layers have an {what}")

    def _check(self, name: str, x: Values, shape: tuple[int, ...]) -> None:
        if x.shape != shape:
            raise ShapeError(f"layer {self.spec.layer_idx}: {name} has shape {x.shape}, expected {shape}")
