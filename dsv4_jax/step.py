"""A step of the cache, and the view of one layer in it: what model code talks to."""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
from typing import Any, Generic, Protocol, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .checks import INT32_MAX
from .config import LayerSpec
from .errors import LayoutError, ShapeError, StepError
from .formats import RowFormat
from .layout import CacheLayout
from .ops.append import AppendArguments, Rows, WindowView, exists, load, pin, ring_row, store, window_rows, window_view
from .ops.arguments import Check
from .ops.attend import CHUNK, AttendArguments, SharedEntries
from .ops.attend_parts import PARTS, attend_parts
from .ops.columns import Values
from .ops.compress import CompressArguments, CompressorGeometry, CompressorInputs
from .ops.entry_rows import EntryRowsArguments
from .ops.epilogue import Epilogue, check_epilogue
from .ops.exchange import all_gather
from .ops.gather import GatherArguments
from .ops.index_scores import IndexScoresArguments
from .ops.merge import merge_candidates
from .ops.no_gradient import without_gradient
from .ops.pool_axis import PoolAxis
from .ops.queries import QueriesArguments
from .ops.registry import Choice, offered, run
from .ops.residual import carry_residual, last_residual
from .ops.rounded_rows import RoundedRows
from .ops.top_k import TopKArguments
from .plan import StepPlan
from .schema import LayerCacheSchema, PoolSchema

__all__ = ["CacheStep", "LayerCacheHandle", "LayerWrites", "Pools"]


class Pools(Protocol):
    """What a step must know of a cache. `KVCache` is one."""

    @property
    def layout(self) -> CacheLayout: ...

    @property
    def block_table(self) -> jax.Array: ...

    @property
    def slot_units(self) -> int: ...

    @property
    def block_units(self) -> int: ...

    @property
    def pool_axis(self) -> PoolAxis: ...

    def pool(self, name: str) -> Rows: ...

    def with_pool(self, name: str, parts: Rows) -> Self: ...

    def stepped(self, plan: StepPlan) -> Self: ...

    def check_order(self) -> None: ...


Cache = TypeVar("Cache", bound=Pools)


class LayerWrites(enum.Flag):
    """What a step has written of a layer."""

    APPENDED = enum.auto()
    COMPRESSED = enum.auto()
    INDEXED = enum.auto()
    CARRIED = enum.auto()


_CALLS = {
    LayerWrites.APPENDED: "append",
    LayerWrites.COMPRESSED: "compress",
    LayerWrites.INDEXED: "compress_index",
    LayerWrites.CARRIED: "carry_residual",
}
_ORDER = "the order of a layer in a step is append and compress (with its index), once each, then reads"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class CacheStep(Generic[Cache]):
    """One step of a cache, begun: `KVCache.begin` makes it. A pytree, and immutable: writes give new ones.

    Attributes:
        cache: as the layers written so far left it. `finish` gives it back.
        plan: what the step does, unpacked.
        implementation: of the ops its layers call, see `dsv4_jax.ops`. Static.
        written: of every layer. Static.
    """

    cache: Cache
    plan: StepPlan
    implementation: Choice
    written: tuple[LayerWrites, ...]

    def __repr__(self) -> str:
        done = sum(bool(writes) for writes in self.written)
        return f"CacheStep({self.plan.num_tokens} tokens, {done} of {len(self.written)} layers written)"

    @property
    def layout(self) -> CacheLayout:
        return self.cache.layout

    def layer(self, layer_idx: int) -> LayerCacheHandle[Cache]:
        """Returns the view of one layer. Creates no array.

        Layers may be taken in any order. What is written through the view is in its `step`, not in this one:
        take the next layer from there.

        Raises:
            LayoutError: there is no such layer.
        """
        return LayerCacheHandle(self, self.layout.layer(layer_idx), self.layout.schema(layer_idx))

    def finish(self, *, partial: bool = False) -> Cache:
        """Returns the cache after the step.

        Args:
            partial: layers of the backbone may have been left out, or written in part. (Those of MTP always may:
                who makes no drafts does not run them.)

        Raises:
            StepError: a layer's writes are missing. They were not made, or through another step than this:
                the writes of `step.layer(0)` are in the `step` of the view that `append` and `compress` returned.
            StepError: the cache is checked, nothing is traced, and the step began elsewhere than the last ended.
        """
        layers = zip(self.layout.schedule, self.layout.schemas, self.written, strict=True)
        backbone = [(spec.layer_idx, _written_by(schema), done) for spec, schema, done in layers if not spec.is_mtp]
        missing = [(layer, left) for layer, all_of_it, done in backbone if (left := all_of_it & ~done)]
        if missing and not partial:
            layer, left = missing[0]
            others = f" (and without those of {len(missing) - 1} more layers)" if len(missing) > 1 else ""
            raise StepError(
                layer,
                f"the step ends without its {_calls(left)}{others}: take the next layer from `layer.step`, or say "
                f"`finish(partial=True)` ({_ORDER})",
            )
        if not any(done for *_, done in backbone):
            return self.cache  # of copies and table entries, or of drafts alone: the sequences stand where they stood
        cache = self.cache.stepped(self.plan)
        cache.check_order()
        return cache

    def _wrote(self, layer_idx: int, what: LayerWrites, cache: Cache) -> CacheStep[Cache]:
        written = list(self.written)
        written[layer_idx] |= what
        return dataclasses.replace(self, cache=cache, written=tuple(written))


jax.tree_util.register_dataclass(CacheStep, data_fields=["cache", "plan"], meta_fields=["implementation", "written"])


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class LayerCacheHandle(Generic[Cache]):
    """One layer of the cache in one step: what model code talks to. `CacheStep.layer` makes it.

    Every method is traceable; those that write return a new handle, whose `step` holds the result.
    `Values` are arrays or `Columns` of a stacked product, which kernels that can read in place.

    Order: what is read was written before, and nothing is written twice in a step. `append` and
    `compress` touch different pools: either may be first. `gather_swa` and `attend` need
    `append`, reads of entries need `compress`, `index_scores` needs `compress_index` (or
    `compress` with `index`). Anything else raises `StepError`.

    Whatever is differentiated must not go into a layer: `StepError`.

    Attributes:
        step: with this layer's writes: where the next layer is taken from.
        spec, schema: the layer, and what it keeps.
        window: where each token's window lies, once `append` was called.
        rotated: whether this step's index keys were rotated by a Hadamard matrix, once they were compressed.
    """

    step: CacheStep[Cache]
    spec: LayerSpec
    schema: LayerCacheSchema
    window: WindowView | None = None
    rotated: bool | None = None

    def __repr__(self) -> str:
        return f"LayerCacheHandle(layer {self.spec.layer_idx}, {self.spec.attn.name}, {_calls(self._written) or 'new'})"

    @property
    def cache(self) -> Cache:
        """The whole cache as updated so far."""
        return self.step.cache

    @property
    def plan(self) -> StepPlan:
        return self.step.plan

    @property
    def layout(self) -> CacheLayout:
        return self.step.layout

    @property
    def implementation(self) -> Choice:
        return self.step.implementation

    # Writes

    def append(self, kv: Values, epilogue: Epilogue | None = None) -> LayerCacheHandle[Cache]:
        """Stores the step's KV rows in the sliding window.

        Args:
            kv: [T, head_dim] float.
            epilogue: the rows' norm and RoPE, done while they are stored; None if `kv` has them.

        Raises:
            ShapeError: as all methods, naming the argument.
            StepError: the epilogue rotates the rows, as those of index keys do.
            StepError: the layer was appended to in this step.
        """
        self._once(LayerWrites.APPENDED)
        ring, fmt, plan = self.schema.window, self.layout.row_format(self.schema.window), self.plan
        check = self._check
        kv = check.array("kv", kv, "float", "T", ring.width)
        if epilogue is not None:
            self._check_epilogue(check, "epilogue", epilogue, ring)
        kv, epilogue = without_gradient((kv, epilogue))
        pool = self.cache.pool(ring.pool)
        place = dict(ordinal=ring.ordinal, slots=self.cache.slot_units, ring=ring.rows)
        ids = self._window_rows(ring, pool[0].shape[0])
        shown = dict(window=self.schema.swa_window_size, first=self.schema.first_position)
        arguments = AppendArguments(kv, fmt, epilogue, None if epilogue is None else self._position)
        if plan.history_seqs.shape[0]:
            # The step overruns the ring: take the view before the ring is overwritten.
            chunk = run("append", arguments, self.implementation)
            window, pool = pin(window_view(pool, chunk, plan, **shown, **place), pool)
            pool = store(pool, chunk, ids)
        else:
            arguments = dataclasses.replace(arguments, pool=pool, row_ids=ids)
            pool = run("append", arguments, self.implementation)
            rows, *where = window_view(pool, None, _wide(plan), **shown, **place)
            window = WindowView(rows, *(x[: plan.num_tokens] for x in where))
        return self._wrote(LayerWrites.APPENDED, {ring.pool: pool}, window)

    def keep(self, kv: Values, epilogue: Epilogue) -> LayerCacheHandle[Cache]:
        """Stores the step's KV rows as `append` does, for later steps alone: no token of this one reads the window.

        What a stage of DSpark does with the step's tokens. Raises as `append`.
        """
        self._once(LayerWrites.APPENDED)
        ring, check = self.schema.window, self._check
        kv = check.array("kv", kv, "float", "T", ring.width)
        self._check_epilogue(check, "epilogue", epilogue, ring)
        kv, epilogue = without_gradient((kv, epilogue))
        pool = self.cache.pool(ring.pool)
        ids, fmt = self._window_rows(ring, pool[0].shape[0]), self.layout.row_format(ring)
        pool = run("append", AppendArguments(kv, fmt, epilogue, self._position, pool, ids), self.implementation)
        return self._wrote(LayerWrites.APPENDED, {ring.pool: pool}, None)

    def compress(
        self,
        kv: Values,
        score: Values,
        epilogue: Epilogue,
        index: tuple[Any, ...] | None = None,
        *,
        ape: jax.Array | None = None,
    ) -> LayerCacheHandle[Cache]:
        """Feeds the layer's compressor and stores the entries it completes.

        Args:
            kv, score: [T, 2 * head_dim] (CSA) or [T, head_dim] (HCA) float32.
            epilogue: norm weight and RoPE of the entries.
            index: CSA only: the arguments of `compress_index`, to do both at once.
            ape: [ratio, width of score] float32: the position bias to add to the score of each place in a block;
                None: the score holds it already.

        Raises:
            LayoutError: the layer has no compressor; or `index` was given and it has no indexer.
            StepError: as `append`.
            StepError: the layer was compressed in this step, or its index keys were and `index` was given.
        """
        inputs = {LayerWrites.COMPRESSED: self._inputs(LayerWrites.COMPRESSED, kv, score, epilogue, ape)}
        if index is not None:
            inputs[LayerWrites.INDEXED] = self._inputs(LayerWrites.INDEXED, *index)
        return self._compress(inputs)

    def compress_index(
        self, kv: Values, score: Values, epilogue: Epilogue, ape: jax.Array | None = None
    ) -> LayerCacheHandle[Cache]:
        """Feeds a CSA layer's indexer compressor, [T, 2 * index_head_dim] float32 each, and stores its keys.

        Raises:
            LayoutError: the layer has no indexer.
            StepError: its index keys were compressed in this step.
        """
        return self._compress({LayerWrites.INDEXED: self._inputs(LayerWrites.INDEXED, kv, score, epilogue, ape)})

    # What an MTP layer takes of the backbone

    def last_residual(self) -> jax.Array:
        """Returns the residual of the last token that each sequence had before the step, [B, width] float32; zeros
        without one.

        Raises:
            LayoutError: this is no MTP layer.
            StepError: this step has overwritten them.
        """
        self._once(LayerWrites.CARRIED)
        pool, place = self._residual()
        return last_residual(pool, self.plan, **place)

    def carry_residual(self, x: jax.Array) -> tuple[jax.Array, LayerCacheHandle[Cache]]:
        """Keeps each token's residual for the token after it: (that of the token before, the handle).

        Args:
            x: [T, hc_mult * hidden_size] float32, as the backbone's last layer left it. What is returned has the same
                shape, and zeros for a token at position 0.

        Raises:
            LayoutError: this is no MTP layer.
            StepError: it was called in this step.
        """
        self._once(LayerWrites.CARRIED)
        pool, place = self._residual()
        x = without_gradient(self._check.array("x", x, "float32", "T", pool.shape[1]))
        before, pool = carry_residual(pool, x, self.plan, **place)
        assert self.schema.residual is not None
        return before, self._wrote(LayerWrites.CARRIED, {self.schema.residual.pool: (pool,)}, self.window)

    # Queries

    def queries(self, q: Values, inv_freq: jax.Array) -> jax.Array:
        """Returns queries for `attend` from projected ones [T, heads, head_dim] float32: RMSNorm per head, then RoPE.

        Args:
            inv_freq: [rope_dim / 2] float32: `rope_frequencies(cfg, layer.spec.attn)`.
        """
        q = self._check.array("q", q, "float", "T", "heads", self.schema.window.width)
        fmt = self.layout.row_format(self.schema.window)
        return self._finish_queries(q, inv_freq, fmt, eps=self.layout.cfg.rms_norm_eps)

    def index_queries(self, q: Values, inv_freq: jax.Array, *, qat: bool) -> jax.Array:
        """Returns queries for `index_scores` from projected ones [T, index_n_heads, index_head_dim] float32.

        RoPE; with `qat` also the Hadamard rotation and FP4 rounding the model was trained with.

        Args:
            inv_freq: as of `queries`.
            qat: as the index keys' `Epilogue.hadamard`: True for V4 with its own index formats
                (`dsv4.model.index_qat_default(layout)`; docs/model.md, Index).

        Raises:
            StepError: this layer's index keys of this step were rotated and the queries are not, or the reverse.
            ShapeError: as all methods; or `qat` and `index_head_dim` is no power of two.
        """
        keys, check = self._indexed(), self._check
        q = check.array("q", q, "float", "T", "heads", keys.width)
        if qat and keys.width & (keys.width - 1):
            raise ShapeError(f"{check.op}: q has {keys.width} dims, a Hadamard rotation (qat) needs a power of two")
        if self.rotated is not None and self.rotated != qat:
            problem = f"index keys were stored with Epilogue(hadamard={self.rotated}), index_queries has qat={qat}"
            raise StepError(self.spec.layer_idx, f"{problem}: both or neither")
        fmt = self.layout.row_format(keys)
        return self._finish_queries(q, inv_freq, fmt, rotate=qat, round_fp4=qat)

    # Reads

    def gather_swa(self, dtype: jnp.dtype | None = None) -> tuple[jax.Array, jax.Array]:
        """Returns the window of every token: (rows [T, window, head_dim], visible [T, window] bool).

        Row k of token t is position t - window + 1 + k.
        """
        window = self._window()
        return self._gather(window.rows, window.ids, self.schema.window, dtype), window.visible

    def gather_compressed(self, entries: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
        """Returns dense rows [T, K, head_dim] of logical entries [T, K] int32 (0 for padding).

        Raises:
            LayoutError: the layer is SWA-only; or entries are shared out over a pool axis.
        """
        if self.cache.pool_axis.size > 1:
            raise LayoutError(
                f"{self._name}: {self.cache.pool_axis.size} ranks have its entries: nobody can gather them"
            )
        pool = self._pool(LayerWrites.COMPRESSED)
        return self._gather(pool, self.entry_rows(entries), self._compressed(), dtype)

    def gather_all_compressed(self, dtype: jnp.dtype | None = None) -> tuple[jax.Array, jax.Array]:
        """All entries a token's request can have: (rows [T, S, head_dim], visible entries [T] int32)."""
        return self.gather_compressed(self._all_entries(), dtype), self.visible_entries()

    def visible_entries(self) -> jax.Array:
        """Returns [T] int32: entries each token may see, (position + 1) // ratio; 0 for padding.

        Raises:
            LayoutError: the layer is SWA-only; so do all that gather or address entries.
        """
        self._compressed()
        ratio = np.int32(self.schema.ratio)
        live = exists(self.plan.token_slot, self.cache.slot_units)
        return jnp.where(live, (self.plan.token_position + 1) // ratio, 0)

    def entry_rows(self, entries: jax.Array) -> jax.Array:
        """Returns pool rows [T, K] of logical entries [T, K], through each token's block table.

        Along a pool axis: this rank's rows; those of the null block for other ranks' entries.
        """
        entries = self._check.array("entries", entries, "int32", "T", "K")
        return self._rows_of(jnp.asarray(self.plan.token_slot), entries)

    def _rows_of(self, slots: jax.Array, entries: jax.Array, implementation: Choice = "xla") -> jax.Array:
        pool, blocks = self._compressed(), self.cache.block_units
        arguments = EntryRowsArguments(entries, slots, self._own_table, pool.base(blocks), pool.rows, blocks)
        return run("entry_rows", arguments, implementation)

    def index_scores(self, queries: jax.Array, weights: Values, *, scale: float = 1.0) -> jax.Array:
        """Returns indexer scores [T, S] float32 of all entries (-inf where not visible); CSA only.

        Along a pool axis: of this rank's entries, which `top_k` takes.

        Args:
            queries: [T, index_n_heads, index_head_dim], rotated as the keys are.
            weights: [T, index_n_heads] head weights.
            scale: of the weights: (dim * heads) ** -0.5, if they do not have it already.
        """
        pool, keys, check = self._indexed(), self._pool(LayerWrites.INDEXED), self._check
        queries = check.array("queries", queries, "float", "T", "heads", pool.width)
        weights = check.array("weights", weights, "float", "T", "heads")
        queries, weights = without_gradient((queries, weights))
        axis = self.cache.pool_axis
        table = axis.own_columns(self.cache.block_table[:, : self.plan.table_columns.shape[0]])[self.plan.token_slot]
        count, base = axis.own_visible(self.visible_entries(), pool.rows), pool.base(self.cache.block_units)
        fmt = self.layout.row_format(pool)
        arguments = IndexScoresArguments(keys, queries, weights, table, count, base, pool.rows, fmt, scale)
        return run("index_scores", arguments, self.implementation)

    def top_k(self, scores: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the entries to attend to: (logical entries [T, K] int32, how many count [T] int32).

        Along a pool axis each rank proposes its best, and all have the best of these: the same as one rank would.
        """
        pool, axis, visible = self._indexed(), self.cache.pool_axis, self.visible_entries()
        scores = self._check.array("scores", scores, "float32", "T", "entries")
        k = self.schema.selected_entries
        arguments = TopKArguments(scores, axis.own_visible(visible, pool.rows), min(k, scores.shape[1]))
        own, kept = run("top_k", arguments, self.implementation)
        if axis.name is None:
            return own, kept
        k = min(k, self.plan.table_columns.shape[0] * pool.rows)
        proposed = jnp.arange(own.shape[1], dtype=jnp.int32)[None] < kept[:, None]
        best = jnp.where(proposed, axis.entries_of_all(own, pool.rows), np.int32(INT32_MAX))
        candidates = all_gather((jnp.take_along_axis(scores, own, 1), best), axis.name, dimension=1)
        kept = jnp.clip(visible, 0, np.int32(k))
        listed = jnp.arange(k, dtype=jnp.int32)[None] < kept[:, None]
        return jnp.where(listed, merge_candidates(*candidates, k=k), 0), kept

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
        """Attends: one softmax over the window, the layer's entries and the sink.

        Args:
            queries: [T, heads, head_dim].
            sink: [heads] float32.
            selected: for CSA, what `top_k` returned. HCA attends to every visible entry, SWA to none.
            scale: softmax scale, default head_dim ** -0.5.
            inverse_rope: RoPE frequencies [rope_dim / 2] by which `out` is turned back at each token's position: the
                queries' own. Values carry RoPE, so V4 needs it; None leaves them turned (docs/model.md, Attention).
            dtype: of `out`, float32 or bfloat16.

        Returns:
            (out [T, heads, head_dim] of `dtype`, lse [T, heads] float32 without the sink).
        """
        return self._attend(queries, sink, selected, scale, inverse_rope, dtype, rounds=False)

    def attend_rounding(
        self,
        queries: jax.Array,
        sink: jax.Array,
        selected: tuple[jax.Array, jax.Array] | None = None,
        *,
        inverse_rope: jax.Array,
    ) -> jax.Array | RoundedRows:
        """Attends for products that round rows (`ops.dense_e4m3`), with the bits that they make of `attend`'s output.

        Args:
            queries, sink, selected, inverse_rope: as of `attend`.

        Returns:
            The output's rows, [T, heads * head_dim] bfloat16 or rounded already.
        """
        out, _ = self._attend(queries, sink, selected, None, inverse_rope, jnp.bfloat16, rounds=True)
        return out if isinstance(out, RoundedRows) else out.reshape(out.shape[0], -1)

    def _attend(
        self,
        queries: jax.Array,
        sink: jax.Array,
        selected: tuple[jax.Array, jax.Array] | None,
        scale: float | None,
        inverse_rope: jax.Array | None,
        dtype: DTypeLike,
        *,
        rounds: bool,
    ) -> tuple[Any, jax.Array]:
        window, schema, check = self._window(), self.schema, self._check
        queries = check.array("queries", queries, "float", "T", "heads", schema.entry_head_dim)
        sink = check.array("sink", sink, "float32", "heads")
        turned = None
        if inverse_rope is not None:
            turned = self._position, self._frequencies(check, "inverse_rope", inverse_rope)
        entries = listed = count = None
        if schema.entries is not None:
            entries, count = self._pool(LayerWrites.COMPRESSED), self.visible_entries()
        if schema.selected_entries:
            if selected is None:
                raise ShapeError(f"{self._name}: attend needs the selected entries")
            if not isinstance(selected, tuple | list) or len(selected) != 2:
                raise ShapeError(f"{check.op}: selected is no pair (entries [T, K], count [T]) as `top_k` gives it")
            listed = check.array("selected entries", selected[0], "int32", "T", "K")
            count = check.array("selected count", selected[1], "int32", "T")
        elif selected is not None:
            raise ShapeError(f"{self._name}: it selects no entries")
        queries, sink = without_gradient((queries, sink))
        axis, split = self.cache.pool_axis, self.layout.key_split
        scale = schema.entry_head_dim**-0.5 if scale is None else scale
        fmt, heads = self.layout.row_format(schema.window), self.layout.cfg.num_attention_heads
        key_split = "throughput" if split == "context" else split
        if entries is None or count is None or (axis.name is None and split != "context"):
            entry_ids = shared = None
            if entries is not None:
                logical = self._all_entries() if listed is None else listed
                # Those of all entries are known before the step, and XLA computes them of all layers at once.
                named = "xla" if listed is None else offered("entry_rows", self.implementation)
                entry_ids = self._rows_of(jnp.asarray(self.plan.token_slot), logical, named)
                if self.plan.num_tokens >= max(CHUNK, 2 * self.plan.num_seqs):  # they have entries in common
                    shared = self._shared(logical)
            arguments = AttendArguments(
                queries,
                sink,
                window,
                entries,
                entry_ids,
                count,
                scale,
                fmt,
                inverse_rope=turned,
                dtype=dtype,
                key_split=key_split,
                heads=heads,
                shared=shared,
                rounds=rounds,
            )
            return run("attend", arguments, self.implementation)
        slots = jnp.asarray(self.plan.token_slot)
        return attend_parts(
            queries,
            sink,
            window,
            entries,
            listed,
            count,
            rows_of=lambda t, chosen: self._rows_of(slots[t], chosen),
            axis=axis,
            parts=PARTS if split == "context" else axis.size,
            heads=heads,
            per_block=self._compressed().rows,
            columns=self.plan.table_columns.shape[0],
            inverse_rope=turned,
            dtype=dtype,
            scale=scale,
            fmt=fmt,
            key_split=key_split,
            implementation=self.implementation,
        )

    def attend_block(
        self,
        queries: jax.Array,
        sink: jax.Array,
        kv: Values,
        epilogue: Epilogue,
        *,
        inverse_rope: jax.Array,
        dtype: DTypeLike = jnp.float32,
    ) -> jax.Array:
        """Attends with a block behind each sequence: to the window before it, and to all of the block. Stores nothing.

        What a stage of DSpark does when it drafts (docs/model.md, DSpark). Every sequence of the plan has as many
        tokens, its block, behind what the cache holds. Window rows that nobody has stored are all zeros, and no keys.

        Args:
            queries, sink, inverse_rope, dtype: as of `attend`.
            kv: [T, head_dim] float, the block's own.
            epilogue: of these.

        Returns:
            [T, heads, head_dim] of `dtype`.

        Raises `ShapeError` as all methods, and if a plan has not the same number of tokens for each sequence.
        """
        plan, ring, check, slots = self.plan, self.schema.window, self._check, self.cache.slot_units
        sequences = plan.num_seqs
        rows, rest = divmod(plan.num_tokens, sequences)
        if rest or not rows:
            raise ShapeError(f"{self._name}: {plan.num_tokens} tokens are no blocks of {sequences} sequences")
        queries = check.array("queries", queries, "float", "T", "heads", ring.width)
        sink = check.array("sink", sink, "float32", "heads")
        kv = check.array("kv", kv, "float", "T", ring.width)
        self._check_epilogue(check, "epilogue", epilogue, ring)
        turned = self._position, self._frequencies(check, "inverse_rope", inverse_rope)
        queries, sink, kv, epilogue = without_gradient((queries, sink, kv, epilogue))
        pool, fmt = self.cache.pool(ring.pool), self.layout.row_format(ring)
        before = np.arange(-self.schema.swa_window_size, 0, dtype=np.int32)[None]
        position, slot = plan.seq_start[:, None] + before, plan.seq_slot[:, None]

        def places(ordinal: int) -> jax.Array:
            return ring_row(ordinal, slots, ring.rows, slot, jnp.maximum(position, 0))

        # Of a token all stages' rows are stored together: those of the first tell, which XLA looks up once.
        stored = functools.reduce(operator.or_, ((part != 0).any(-1) for part in load(pool, places(0))))
        visible = stored & (position >= 0) & exists(slot, slots)
        each = np.repeat(np.arange(sequences), rows)
        window = WindowView(pool, jnp.where(visible, places(ring.ordinal), 0)[each], visible[each])
        own = run("append", AppendArguments(kv, fmt, epilogue, self._position), self.implementation)
        ids = jnp.asarray(each[:, None] * rows + np.arange(rows), jnp.int32)
        count = jnp.where(exists(plan.token_slot, slots), np.int32(rows), 0)
        split = "throughput" if self.layout.key_split == "context" else self.layout.key_split
        arguments = AttendArguments(
            queries,
            sink,
            window,
            own,
            ids,
            count,
            ring.width**-0.5,
            fmt,
            inverse_rope=turned,
            dtype=dtype,
            key_split=split,
            heads=self.layout.cfg.num_attention_heads,
        )
        return run("attend", arguments, self.implementation)[0]

    # Plumbing

    def _finish_queries(self, q: Values, inv_freq: jax.Array, fmt: RowFormat, **steps: Any) -> jax.Array:
        inv_freq = self._frequencies(self._check, "inv_freq", inv_freq)
        # Kernels give bf16, which would waste rows kept in float32.
        implementation = "xla" if fmt.dense_dtype == "float32" else self.implementation
        return run("queries", QueriesArguments(q, self._position, inv_freq, **steps), implementation)

    def _inputs(
        self, what: LayerWrites, kv: Values, score: Values, epilogue: Epilogue, ape: jax.Array | None = None
    ) -> CompressorInputs:
        schema, (pool, state), check = self.schema, self._compressor(what), self._check
        self._once(what)
        # An entry that overlaps the one before pools two halves of a row.
        width, prefix = pool.width * (2 if schema.overlap_rows else 1), "index " if pool is schema.index_keys else ""
        kv, score = (check.array(prefix + name, x, "float32", "T", width) for name, x in (("kv", kv), ("score", score)))
        self._check_epilogue(check, f"{prefix}epilogue", epilogue, pool)
        if ape is not None:
            ape = check.array(f"{prefix}ape", ape, "float32", schema.ratio, width)
        blocks = self.cache.block_units
        geometry = CompressorGeometry(
            ratio=schema.ratio,
            ordinal=state.ordinal,
            slots=self.cache.slot_units,
            ring=state.rows,
            base=pool.base(blocks),
            rows_per_block=pool.rows,
            fmt=self.layout.row_format(pool),
            blocks=blocks,
        )
        (states,) = self.cache.pool(state.pool)
        kv, score, epilogue, ape = without_gradient((kv, score, epilogue, ape))
        return CompressorInputs(states, self.cache.pool(pool.pool), kv, score, epilogue, geometry, ape)

    def _compress(self, inputs: dict[LayerWrites, CompressorInputs]) -> LayerCacheHandle[Cache]:
        kind = "csa" if self.schema.overlap_rows else self.layout.hca_state
        arguments = CompressArguments(kind, tuple(inputs.values()), self.plan, self._own_table)
        done = run("compress", arguments, self.implementation)
        wrote, pools = LayerWrites(0), {}
        for what, (states, rows) in zip(inputs, done, strict=True):
            pool, state = self._compressor(what)
            wrote, pools = wrote | what, pools | {state.pool: (states,), pool.pool: rows}
        after = self._wrote(wrote, pools, self.window)
        keys = inputs.get(LayerWrites.INDEXED)
        return after if keys is None else dataclasses.replace(after, rotated=keys.epilogue.hadamard)

    def _compressor(self, what: LayerWrites) -> tuple[PoolSchema, PoolSchema]:
        """Returns what the compressor of entries or of index keys fills, and its state."""
        schema, of_index = self.schema, what is LayerWrites.INDEXED
        pool, state = (schema.index_keys, schema.index_state) if of_index else (schema.entries, schema.entry_state)
        if pool is None or state is None:
            raise LayoutError(f"{self._name}: it has no {'indexer' if of_index else 'compressor'}")
        return pool, state

    def _residual(self) -> tuple[jax.Array, dict[str, int]]:
        ring = self.schema.residual
        if ring is None:
            raise LayoutError(f"{self._name}: only MTP layers keep residuals")
        (pool,) = self.cache.pool(ring.pool)
        return pool, dict(ordinal=ring.ordinal, slots=self.cache.slot_units, ring=ring.rows)

    @property
    def _name(self) -> str:
        return f"layer {self.spec.layer_idx} is {self.spec.attn.name}"

    def _compressed(self) -> PoolSchema:
        if self.schema.entries is None:
            raise LayoutError(f"{self._name}: it has no compressed entries")
        return self.schema.entries

    def _indexed(self) -> PoolSchema:
        if self.schema.index_keys is None:
            raise LayoutError(f"{self._name}: it has no indexer")
        return self.schema.index_keys

    def _pool(self, what: LayerWrites) -> Rows:
        """The entries or index keys that the layer reads, which its owner has written in this step."""
        pool = self._indexed() if what is LayerWrites.INDEXED else self._compressed()
        self._require(what, self.schema.owner)
        return self.cache.pool(pool.pool)

    @property
    def _own_table(self) -> jax.Array:
        """The block table with this rank's ids, and the null block for other ranks'."""
        return self.cache.pool_axis.own_blocks(self.cache.block_table)

    def _shared(self, entries: jax.Array) -> SharedEntries:
        """All that the step's sequences have, and where in them each token's logical entries [T, K] are."""
        columns, per_block = self.plan.table_columns.shape[0], np.int32(self._compressed().rows)
        total = np.int32(columns * per_block)
        every = jnp.broadcast_to(jnp.arange(total, dtype=jnp.int32), (self.plan.num_seqs, total))
        rows = self._rows_of(jnp.asarray(self.plan.seq_slot), every).reshape(-1)
        # As `entry_rows` looks them up: what is no entry of a sequence is none of another one's.
        entries = jnp.maximum(entries, 0)
        entries = jnp.minimum(entries // per_block, np.int32(columns - 1)) * per_block + entries % per_block
        return SharedEntries(rows, jnp.asarray(self.plan.token_seq)[:, None] * total + entries)

    def _all_entries(self) -> jax.Array:
        total = self.plan.table_columns.shape[0] * self._compressed().rows
        return jnp.broadcast_to(jnp.arange(total, dtype=jnp.int32), (self.plan.num_tokens, total))

    def _window_rows(self, ring: PoolSchema, rows: int) -> jax.Array:
        """`window_rows` of this layer: of all layers at once, which XLA computes once in a step."""
        slots = self.cache.slot_units
        first = window_rows(self.plan, rows=rows, ordinal=0, slots=slots, ring=ring.rows)
        each = np.arange(0, rows, slots * ring.rows, dtype=np.int32)[:, None]
        return jnp.where(first[None] < rows, first[None] + each, np.int32(rows))[ring.ordinal]

    def _window(self) -> WindowView:
        self._require(LayerWrites.APPENDED, self.spec.layer_idx)
        if self.window is None:
            problem = f"its window is read through the handle that `append` returned ({_ORDER})"
            raise StepError(self.spec.layer_idx, problem)
        return self.window

    def _gather(self, rows: Rows, ids: jax.Array, pool: PoolSchema, dtype: jnp.dtype | None) -> jax.Array:
        fmt = self.layout.row_format(pool)
        if dtype is None:
            dtype = jnp.dtype(fmt.dense_dtype)
        return run("gather", GatherArguments(rows, ids, fmt, dtype), self.implementation)

    @property
    def _position(self) -> jax.Array:
        return jnp.asarray(self.plan.token_position)

    @property
    def _check(self) -> Check:
        """Checks what a method is given: the only check there is, for ops get it as argument records."""
        return Check(f"layer {self.spec.layer_idx}", {"T": self.plan.num_tokens})

    def _check_epilogue(self, check: Check, name: str, epilogue: Epilogue, pool: PoolSchema) -> None:
        check_epilogue(check, name, epilogue, pool.width, self.layout.cfg.rope_dim // 2)
        if epilogue.hadamard and pool is not self.schema.index_keys:
            problem = f"{name} has hadamard=True, which is for index keys: `queries` and `attend` know of no rotation"
            raise StepError(self.spec.layer_idx, problem)

    def _frequencies(self, check: Check, name: str, inv_freq: Any) -> jax.Array:
        return check.array(name, inv_freq, "float32", self.layout.cfg.rope_dim // 2)

    @property
    def _written(self) -> LayerWrites:
        return self.step.written[self.spec.layer_idx]

    def _wrote(self, what: LayerWrites, pools: dict[str, Rows], window: WindowView | None) -> LayerCacheHandle[Cache]:
        cache = self.cache
        for name, parts in pools.items():
            cache = cache.with_pool(name, parts)
        return dataclasses.replace(self, step=self.step._wrote(self.spec.layer_idx, what, cache), window=window)

    def _once(self, what: LayerWrites) -> None:
        if what in self._written:
            raise StepError(self.spec.layer_idx, f"{_calls(what)} a second time in one step ({_ORDER})")

    def _require(self, what: LayerWrites, owner: int) -> None:
        if what not in self.step.written[owner]:
            of = "" if owner == self.spec.layer_idx else f" of layer {owner}, whose entries it reads,"
            raise StepError(self.spec.layer_idx, f"read before {_calls(what)}{of} ({_ORDER})")


def _written_by(schema: LayerCacheSchema) -> LayerWrites:
    """Returns all that a step writes of a layer."""
    compressed = LayerWrites.COMPRESSED if schema.entry_state else LayerWrites(0)
    indexed = LayerWrites.INDEXED if schema.index_state else LayerWrites(0)
    carried = LayerWrites.CARRIED if schema.residual else LayerWrites(0)
    return LayerWrites.APPENDED | compressed | indexed | carried


def _wide(plan: StepPlan) -> StepPlan:
    """Returns the plan; of a single token with that token twice.

    XLA makes one kernel of what it computes of a plan for all layers, but not where operands have one element.
    """
    if plan.num_tokens != 1:
        return plan
    seq, slot, position = (
        jnp.concatenate([jnp.asarray(x)] * 2) for x in (plan.token_seq, plan.token_slot, plan.token_position)
    )
    return plan._replace(token_seq=seq, token_slot=slot, token_position=position)


def _calls(writes: LayerWrites) -> str:
    """The methods that make these writes."""
    return ", ".join(f"`{call}`" for what, call in _CALLS.items() if what in writes)
