"""`DeviceExecutor`: steps on the devices, fed from the call before without a word of the host's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..cache import KVCache
from ..checks import check_boolean, check_integer, shown
from ..errors import EngineError, PlanError, RequestError
from ..manager import KVCacheManager
from ..manager.transfers import Transfers
from ..model import forward
from ..model.compiled_steps import CompiledSteps, stacked
from ..model.draft_steps import draft_loop, draft_step
from ..model.sampling import GREEDY, Sampled, Sampling, SamplingRows, sample
from ..model.weights.params import Params, has_mtp
from ..ops.exchange_buffers import Exchange
from ..ops.registry import Choice, frozen
from ..plan import PackedPlan
from ..tiers import HostCache, run_transfers, stack_transfers
from .executor import Drawn, Shapes, Work
from .prompt import Prompt

__all__ = ["DeviceExecutor"]

MAX_TOP = 20  # likeliest tokens of a place that an answer may come with


@dataclasses.dataclass(frozen=True)
class Renew:
    """Makes the state of an executor again after it was lost: `cache()`, and `host()` where there is a host tier."""

    cache: Callable[[], KVCache]
    host: Callable[[], HostCache] | None = None


class DeviceExecutor:
    """The model, its cache and the host tier, on one device or a mesh.

    Args:
        params: over a mesh those of `shard_params`.
        cache: of the managers; donated: `cache` has it.
        shapes: of the steps (see `shapes_of`).
        host: the host tier's arrays; None: there is none.
        renew: makes both again after a failure or a sleep; None: neither is possible.
        exchanges: of the mesh's axes, checked after every call.
        drivers: of each data shard, for storage: a `StorageDriver`.
        top: the most likeliest tokens of a place that a request may ask for.
        implementation: of the ops.

    Attributes:
        params, cache, host: as they are now.

    Raises:
        PlanError: drafts that these parameters or this layout cannot do.
    """

    def __init__(
        self,
        params: Params,
        cache: KVCache,
        shapes: Shapes,
        *,
        host: HostCache | None = None,
        renew: Renew | None = None,
        exchanges: Sequence[Exchange] = (),
        drivers: Sequence[Any] = (),
        top: int = MAX_TOP,
        implementation: Choice = None,
    ):
        self.params, self.cache, self.host, self.shapes = params, cache, host, shapes
        self._renew, self._exchanges, self._drivers = renew, [*exchanges], [*drivers]
        self._top = check_integer("top", top, 0, cache.layout.cfg.vocab_size, error=PlanError)
        self._implementation = frozen(implementation)
        self._placement = CompiledSteps(cache, [exchange.peers for exchange in exchanges])
        self._words = -(-cache.layout.cfg.vocab_size // 32)
        self._layout = cache.layout
        if shapes.drafts:
            check_drafts(params, cache, shapes.drafts)
        rows = self._placement.shards * shapes.mixed.sequences
        self._before = jax.device_put(np.zeros(rows, np.int32), self._placement.rows)

    @property
    def shards(self) -> int:
        """Data shards of the cache: each has a manager."""
        return self._placement.shards

    def check_managers(self, managers: Sequence[KVCacheManager]) -> None:
        """Raises `PlanError` unless there is one for each data shard of the cache."""
        if len(managers) != self.shards:
            raise PlanError(f"{len(managers)} managers for the {self.shards} data shards of the cache")

    def check(self, prompt: Prompt) -> None:
        if prompt.sampling is not None and not isinstance(prompt.sampling, Sampling):
            raise RequestError(f"sampling must be a Sampling or None, got {shown(prompt.sampling)}")
        if prompt.logprobs is not None and prompt.logprobs > self._top:
            raise RequestError(f"logprobs is {prompt.logprobs}: this executor tells the {self._top} likeliest")

    def send(self, work: Work) -> _Call:
        self.move(work.transfers)
        shape = self.shapes.decode if work.kind == "decode" else self.shapes.mixed
        sampling = self._sampling(work, shape.sequences)
        asked = [row.prompt.logprobs for rows in work.rows for row in rows if row.prompt.logprobs is not None]
        options: dict[str, Any] = dict(
            logprobs=bool(asked), top=self._top if any(asked) else 0, implementation=self._implementation
        )
        plan = stacked(work.plans)
        # Tokens of the call before as negative numbers: one array to send.
        tokens = np.where(work.source >= 0, -1 - work.source, work.tokens).astype(np.int32)
        xla = forward.GPU_DECODE_OPTIONS if work.kind == "decode" else None
        if self.shapes.drafts:
            drafts = np.zeros((len(work.rows), shape.sequences), np.int32)
            for i, rows in enumerate(work.rows):
                drafts[i, : len(rows)] = [row.drafts for row in rows]
            step = self._placement.compiled(_verify, xla, width=self.shapes.drafts, steps=work.steps, **options)
            arrays = (tokens, drafts.reshape(-1), self._before, *sampling)
        elif work.kind == "decode":
            step = self._placement.compiled(_decode, xla, steps=work.steps, **options)
            arrays = (tokens, self._before, *sampling)
        else:
            step = self._placement.compiled(_mixed, xla, **options)
            arrays = (tokens, self._before, *sampling)
        sampled, kept, self._before, self.cache = step(self.params, self.cache, plan, *arrays)
        return _Call(sampled, kept, [len(rows) for rows in work.rows], self._exchanges)

    def _sampling(self, work: Work, rows: int) -> tuple[Any, ...]:
        """How each row samples, and the masks of those that have one."""
        each = [
            (row.prompt.sampling or GREEDY, row.seed) if row is not None else (GREEDY, 0)
            for some in work.rows
            for row in [*some, *[None] * (rows - len(some))]
        ]
        packed = SamplingRows.pack([how for how, _ in each], [seed for _, seed in each])
        if not work.masks:
            return (packed,)
        masks = np.full((len(each), self._words), 0xFFFFFFFF, np.uint32)
        for row, words in work.masks.items():
            masks[row] = words
        return packed, masks

    def move(self, transfers: Sequence[Transfers]) -> None:
        if self.host is None or not any(transfers):
            return
        stages: Any = transfers[0] if len(transfers) == 1 else stack_transfers(transfers)
        self.cache, self.host = run_transfers(self.cache, self.host, stages)

    def poll(self, *, idle: bool) -> bool:
        """Goes on with storage, beside the steps. Whether something is under way there."""
        busy = False
        for driver in self._drivers:
            assert self.host is not None
            self.host = driver.poll(self.host)
            driver.save(self.host)
            busy |= driver.busy
        return busy

    def recover(self) -> None:
        if self._renew is None:
            raise EngineError("a step has failed, and nothing says how to make the cache again (renew)")
        self._drop()
        self._make()

    def _make(self) -> None:
        assert self._renew is not None
        self.cache = self._renew.cache()
        if self.host is not None and self._renew.host is not None and self.host.pages.is_deleted():
            self.host = self._renew.host()
        rows = self._placement.shards * self.shapes.mixed.sequences
        self._before = jax.device_put(np.zeros(rows, np.int32), self._placement.rows)

    def _drop(self) -> None:
        for array in self.cache.arrays.values():
            if not array.is_deleted():
                array.delete()

    def sleep(self, transfers: Sequence[Transfers]) -> None:
        """Runs what has to leave the device, then gives up the cache's memory. Raises `EngineError` without `renew`."""
        if self._renew is None:
            raise EngineError("nothing says how to make the cache again (renew)")
        self.move(transfers)
        if self.host is not None:
            jax.block_until_ready(self.host.pages)
        self._drop()

    def wakeup(self) -> None:
        """Takes memory for an empty cache."""
        self._make()

    def update(self, params: Params, donate: bool, fits: Callable[[], object]) -> None:
        """Other weights from now on; `fits` is called when it is sure that they fit, before anything changes.

        Raises `RequestError` if they do not.
        """
        donate = check_boolean("donate", donate, error=RequestError)
        old, tree = jax.tree.flatten(self.params)
        new, other = jax.tree.flatten(params)
        if tree != other:
            raise RequestError("params are not of the structure of those in use")
        names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(self.params)]
        for name, a, b in zip(names, old, new, strict=True):
            if not hasattr(b, "shape") or (a.shape, a.dtype) != (b.shape, b.dtype):
                raise RequestError(f"params{name} is {_described(b)}, expected {_described(a)}")
        fits()
        placed = []
        for a, b in zip(old, new, strict=True):
            placed.append(jax.device_put(b, a.sharding))
            if donate and a is not b and not a.is_deleted():
                jax.block_until_ready(placed[-1])
                a.delete()
        self.params = jax.tree.unflatten(tree, placed)


def _described(x: Any) -> str:
    return f"{x.dtype}{[*x.shape]}" if hasattr(x, "shape") and hasattr(x, "dtype") else shown(x)


def check_drafts(params: Params, cache: KVCache, drafts: int) -> None:
    """Raises `PlanError` if these parameters in this cache cannot guess so many tokens ahead."""
    layout = cache.layout
    if not has_mtp(params):
        raise PlanError(f"drafts={drafts}: the parameters have no MTP layer, load them with mtp=True")
    if not layout.include_mtp or layout.draft_tokens < drafts:
        has = f"include_mtp={layout.include_mtp} and draft_tokens={layout.draft_tokens}"
        raise PlanError(f"drafts={drafts}: the layout has {has}")


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call that is under way."""

    sampled: Sampled  # [B, steps, 1 or 1 + drafts]
    kept: jax.Array | None  # [B, steps] int32: how many of each; None: all
    rows: list[int]  # of each data shard
    exchanges: list[Exchange]

    def get(self) -> Drawn:
        tokens, kept = np.asarray(self.sampled.tokens), None if self.kept is None else np.asarray(self.kept)
        for exchange in self.exchanges:
            exchange.check()
        shards = len(self.rows)

        def listed(values: Any) -> list[Any]:
            """By shard and row, one after the other what was kept of each step."""
            if kept is None:
                rows = np.asarray(values).reshape(len(tokens), -1, *values.shape[3:]).tolist()
            else:
                rows = [
                    [x for step, count in zip(row, counts, strict=True) for x in step[:count]]
                    for row, counts in zip(np.asarray(values).tolist(), kept.tolist(), strict=True)
                ]
            each = len(rows) // shards
            return [rows[i * each : i * each + self.rows[i]] for i in range(shards)]

        logprobs, top = self.sampled.logprobs, None
        if self.sampled.top_ids is not None:
            pairs = zip(listed(self.sampled.top_ids), listed(self.sampled.top_logprobs), strict=True)
            top = [[[*zip(i, p, strict=True)] for i, p in zip(ids, probs, strict=True)] for ids, probs in pairs]
        return Drawn(listed(tokens), None if logprobs is None else listed(logprobs), top)


def _fed(tokens: jax.Array, before: jax.Array) -> jax.Array:
    """Ids of [T] int32 tokens, of which those below 0 are of a row of the call before: -1 - row."""
    return jnp.where(tokens < 0, before[jnp.maximum(-1 - tokens, 0)], tokens)


def _mixed(
    params: Params,
    cache: KVCache,
    plan: PackedPlan,
    tokens: jax.Array,
    before: jax.Array,
    packed: jax.Array,
    mask: jax.Array | None = None,
    *,
    logprobs: bool,
    top: int,
    implementation: Choice,
) -> tuple[Sampled, None, jax.Array, KVCache]:
    """One step, and each row's next token."""
    step, rows = plan.unpack(), SamplingRows.unpack(packed, mask)
    logits, cache = forward.prefill(params, cache, step, _fed(tokens, before), implementation=implementation)
    last = jnp.maximum(step.seq_start + step.seq_count - np.int32(1), 0)
    sampled = sample(logits, rows, last, logprobs=logprobs, top=top)
    return jax.tree.map(lambda x: x[:, None, None], sampled), None, sampled.tokens, cache


def _decode(
    params: Params,
    cache: KVCache,
    plan: PackedPlan,
    tokens: jax.Array,
    before: jax.Array,
    packed: jax.Array,
    mask: jax.Array | None = None,
    *,
    steps: int,
    logprobs: bool,
    top: int,
    implementation: Choice,
) -> tuple[Sampled, None, jax.Array, KVCache]:
    """K decode steps."""
    sampled, cache = forward.decode_loop(
        params,
        cache,
        plan,
        _fed(tokens, before),
        steps,
        sampling=SamplingRows.unpack(packed, mask),
        logprobs=logprobs,
        top=top,
        implementation=implementation,
    )
    return jax.tree.map(lambda x: x.swapaxes(0, 1)[:, :, None], sampled), None, sampled.tokens[-1], cache


def _verify(
    params: Params,
    cache: KVCache,
    plan: PackedPlan,
    tokens: jax.Array,
    drafts: jax.Array,
    before: jax.Array,
    packed: jax.Array,
    mask: jax.Array | None = None,
    *,
    width: int,
    steps: int,
    logprobs: bool,
    top: int,
    implementation: Choice,
) -> tuple[Sampled, jax.Array, jax.Array, KVCache]:
    """A step with drafts, or K of them: [B, K, 1 + width] tokens, of which [B, K] are kept."""
    how: dict[str, Any] = dict(
        sampling=SamplingRows.unpack(packed, mask), logprobs=logprobs, top=top, implementation=implementation
    )
    tokens = _fed(tokens, before)
    if steps > 1:
        step = plan.unpack()
        sampled, kept, cache = draft_loop(params, cache, step, tokens[step.seq_first], drafts, width, steps, **how)
        sampled, kept = jax.tree.map(lambda x: x.swapaxes(0, 1), (sampled, kept))
    else:
        sampled, kept, cache = draft_step(params, cache, plan, tokens, drafts, width, **how)
        sampled, kept = jax.tree.map(lambda x: x[:, None], (sampled, kept))
    last = jnp.take_along_axis(sampled.tokens[:, -1], jnp.maximum(kept[:, -1:] - 1, 0), 1)[:, 0]
    return sampled, kept, last, cache
