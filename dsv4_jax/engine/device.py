"""`DeviceExecutor`: steps on the devices, fed from the call before without a word of the host's."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from ..cache import KVCache
from ..checks import check_boolean, check_integer, check_iterable, check_share, shown
from ..errors import EngineError, PlanError, RequestError, TransferError
from ..manager import KVCacheManager
from ..manager.transfers import Transfers
from ..model.compiled_steps import CompiledSteps, stacked
from ..model.draft_steps import draft_loop, draft_step
from ..model.forward import GPU_DECODE_OPTIONS, decode_loop, sample_step, score_step
from ..model.released import form_of, is_released
from ..model.sampling import GREEDY, Sampled, Sampling, SamplingRows, bias_rows, mask_words, token_counts
from ..model.speculative import check_acceptance
from ..model.weights.params import Params, has_mtp
from ..ops.exchange_buffers import Exchange
from ..ops.registry import Choice, frozen
from ..plan import PackedPlan
from ..tiers.host_cache import HostCache
from ..tiers.remote import RemoteDriver
from ..tiers.transfers import run_transfers, stack_transfers
from .executor import Drawn, Shapes, Work
from .prompt import Prompt

__all__ = ["DeviceExecutor", "Renew", "check_drafts"]

MAX_TOP = 20  # likeliest tokens of a place that an answer may come with


@dataclasses.dataclass(frozen=True)
class Renew:
    """Makes the state of an executor again after it was lost: `cache()`, and `host()` where there is a host tier."""

    cache: Callable[[], KVCache]
    host: Callable[[], HostCache] | None = None


class DeviceExecutor:
    """The model, its cache and the host tier, on one device or a mesh.

    Args:
        params: over a mesh those of `shard_params`; what is elsewhere is copied to each device whole.
        cache: of the managers; donated: `cache` has it.
        shapes: of the steps (see `shapes_of`).
        host: the host tier's arrays; None: there is none.
        renew: makes both again after a failure or a sleep; None: neither is possible.
        exchanges: of the mesh's axes, checked after every call.
        drivers: of each data shard, for storage: a `StorageDriver`.
        remote: for hand-offs, on whose transport `host` is published. Should that host pool be lost, hand-offs end.
        top: the most likeliest tokens of a place that a request may ask for; no more than the vocabulary has.
        acceptance, least_confidence: as of `draft_step`.
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
        remote: RemoteDriver | None = None,
        top: int = MAX_TOP,
        acceptance: str = "coupled",
        least_confidence: float = 0.0,
        implementation: Choice = None,
    ):
        self.cache, self.host, self.shapes = cache, host, shapes
        self._exchanges = [*check_iterable("exchanges", exchanges, error=PlanError)]
        if wrong := [each for each in self._exchanges if not hasattr(each, "peers")]:
            raise PlanError(f"exchanges must be of Exchange, got {shown(wrong[0])}")
        self._renew, self._drivers = renew, [*drivers]
        self._remote, self._asleep = remote, False
        self._remote_error: TransferError | None = None
        self._fence: Any = None  # of the call sent last
        self._top = min(check_integer("top", top, 0, error=PlanError), cache.layout.cfg.vocab_size)
        self._implementation = frozen(implementation)
        self._placement = CompiledSteps(cache, [exchange.peers for exchange in self._exchanges])
        # On their devices for good, as others will be: else nothing that was compiled for these serves those.
        self.params = jax.tree.map(functools.partial(_settled, whole=self._placement.whole), params)
        self._words = mask_words(cache.layout.cfg.vocab_size)
        self._layout = cache.layout
        check_acceptance(acceptance, PlanError)
        self._acceptance = acceptance
        self._least = check_share("least_confidence", least_confidence, error=PlanError)
        if shapes.drafts:
            check_drafts(params, cache, shapes.drafts)
        if is_released(params) != (cache.layout.numerics == "released"):
            held = "plain" if cache.layout.numerics == "released" else "released"
            raise PlanError(f"params have {held} numerics, the cache's layout says {cache.layout.numerics!r}")
        if self._least and not (shapes.drafts and self._layout.cfg.dspark):
            raise PlanError(f"least_confidence={self._least}: it is of drafts that DSpark's stages make")
        self._begin()

    def _begin(self) -> None:
        """What the devices keep beside the cache: the last token of each row, and counts for penalties."""
        rows = self._placement.shards * self.shapes.mixed.sequences
        self._before = jax.device_put(np.zeros(rows, np.int32), self._placement.rows)
        self._lengths: jax.Array | None = None
        if self.shapes.drafts:  # tokens of each row after the last call, which the host does not know yet
            self._lengths = jax.device_put(np.zeros(rows, np.int32), self._placement.rows)
        self._counts: jax.Array | None = None

    @property
    def shards(self) -> int:
        """Data shards of the cache: each has a manager."""
        return self._placement.shards

    @property
    def weights_form(self) -> str:
        """The form of `params`, as `load_hf` is told of it."""
        return form_of(self.params)

    def check_managers(self, managers: Sequence[KVCacheManager]) -> None:
        """Raises `PlanError` unless there is one for each data shard of the cache."""
        if len(managers) != self.shards:
            raise PlanError(f"{len(managers)} managers for the {self.shards} data shards of the cache")

    def check(self, prompt: Prompt) -> None:
        if prompt.sampling is not None and not isinstance(prompt.sampling, Sampling):
            raise RequestError(f"sampling must be a Sampling or None, got {shown(prompt.sampling)}")
        if prompt.logprobs is not None and prompt.logprobs > self._top:
            raise RequestError(f"logprobs is {prompt.logprobs}: this executor tells the {self._top} likeliest")
        if self._remote_error is not None and not (prompt.peer is None and prompt.export is None):
            raise RequestError(f"there are no hand-offs any more: {self._remote_error}")

    def send(self, work: Work) -> _Call:
        self.move(work.transfers)
        if work.targets is not None:
            return self._score(work)
        sequences = work.plans[0].num_seqs
        rows = [row for some in work.rows for row in some]
        asked = [row.prompt.logprobs for row in rows if row.prompt.logprobs is not None]
        masks, counts = self._masks(work, sequences), self._counted(work)
        options: dict[str, Any] = dict(
            logprobs=bool(asked),
            top=self._top if any(asked) else 0,
            routed_experts=any(row.prompt.routed_experts for row in rows),
            masked=len(masks) > 0,
            implementation=self._implementation,
        )
        # Tokens of the call before as negative numbers: one array to send.
        tokens = np.where(work.source >= 0, -1 - work.source, work.tokens).astype(np.int32)
        arrays = [tokens, self._before]
        biases = list[np.ndarray]()
        if draws := work.draws or any(row.sampling is not None and not _is_plain(row.sampling) for row in rows):
            each = self._samplings(work, sequences)
            arrays.append(SamplingRows.of(each))
            if any(row.sampling is not None and row.sampling.logit_bias for row in rows):
                biases.append(bias_rows(each))
        if self.shapes.drafts:
            drafts = np.zeros((len(work.rows), sequences), np.int32)
            for i, some in enumerate(work.rows):
                drafts[i, : len(some)] = [row.drafts for row in some]
            arrays[2:2] = [drafts.reshape(-1), self._lengths]
            steps = work.steps if work.kind == "decode" else 0
            function, more = _verify, dict(width=self.shapes.drafts, steps=steps)
            more |= dict(acceptance=self._acceptance, least_confidence=self._least)
        elif work.kind == "decode":
            function, more = _decode, dict(steps=work.steps)
        else:
            function, more = _mixed, {}
        options |= dict(draws=draws, biased=len(biases) > 0)
        arrays += [*masks, *biases, *counts]
        step = self._placement.compiled(
            function,
            GPU_DECODE_OPTIONS if work.kind == "decode" else None,
            donated=(len(arrays) - 1,) if counts else (),
            **options,
            **more,
        )
        sampled, kept, self._before, self._lengths, self.cache = step(
            self.params, self.cache, stacked(work.plans), *arrays
        )
        if counts:
            self._counts = sampled.counts
        self._fence = sampled.tokens
        return _Call(sampled, kept, work, self._exchanges)

    def _score(self, work: Work) -> _Call:
        tops = [row.prompt.logprobs for some in work.rows for row in some]
        experts = any(row.prompt.routed_experts for some in work.rows for row in some)
        options: dict[str, Any] = dict(
            # The head's products are those of decode steps.
            rows=self.shapes.decode.sequences,
            top=self._top if any(tops) else 0,
            routed_experts=experts,
            implementation=self._implementation,
        )
        step = self._placement.compiled(score_step, **options)
        scored, self.cache = step(self.params, self.cache, stacked(work.plans), work.tokens, work.targets)
        return _Call(scored, None, work, self._exchanges)

    def _samplings(self, work: Work, rows: int) -> list[Sampling | None]:
        """How each row of all shards samples."""
        each: list[Sampling | None] = []
        for some in work.rows:
            each += [(row.sampling or GREEDY) if row.samples else None for row in some]
            each += [None] * (rows - len(some))
        return each

    def _masks(self, work: Work, rows: int) -> list[np.ndarray]:
        """The masks of all rows, if one of them has any."""
        if not work.masks:
            return []
        masks = np.full((len(work.rows) * rows, self._words), 0xFFFFFFFF, np.uint32)
        for row, words in work.masks.items():
            masks[row] = words
        if not self.shapes.drafts:
            return [masks]
        # Behind a draft nothing is masked: a row with a mask has none.
        every = np.full((len(masks), 1 + self.shapes.drafts, self._words), 0xFFFFFFFF, np.uint32)
        every[:, 0] = masks
        return [every]

    def _counted(self, work: Work) -> list[jax.Array]:
        """How often each token was in each slot's text, for penalties, if a row has any."""
        if not any(row.sampling is not None and row.sampling.penalised for some in work.rows for row in some):
            return []
        vocab = self._layout.cfg.vocab_size
        if self._counts is None:
            rows = self.cache.slot_units
            self._counts = jax.device_put(np.zeros((rows, vocab), np.int32), self._placement.rows)
        slots = self.cache.slot_units // self.shards
        for shard, some in enumerate(work.rows):
            for row in some:
                if row.text is not None and row.sampling is not None and row.sampling.penalised:
                    known = len(row.prompt.tokens)
                    counts = token_counts(row.text[:known], row.text[known:], vocab)
                    self._counts = _put_row(self._counts, shard * slots + row.slot, counts)
        return [self._counts]

    def move(self, transfers: Sequence[Transfers]) -> None:
        if not any(transfers):
            return
        stages: Any = transfers[0] if len(transfers) == 1 else stack_transfers(transfers)
        if self.host is None:  # between slots and blocks
            self.cache, _ = run_transfers(self.cache, None, stages)
        else:
            self.cache, self.host = run_transfers(self.cache, self.host, stages)

    def poll(self, *, idle: bool) -> bool:
        """Goes on with storage and hand-offs, beside the steps. Whether something is under way there."""
        busy = False
        for driver in self._drivers:
            assert self.host is not None
            self.host = driver.poll(self.host)
            driver.save(self.host)
            busy |= driver.busy
        if self._remote is not None and self._remote_error is None and not self._asleep:
            busy |= self._hand_over(self._remote, idle)
        return busy

    def _hand_over(self, driver: RemoteDriver, idle: bool) -> bool:
        """Goes on with hand-offs. Whether something is under way, or others may read here."""
        manager = driver.manager
        assert self.host is not None
        if idle:  # no step takes along what waits to be copied
            manager.flush()
            self.move([manager.take_transfers()])
        try:
            driver.poll(self.cache, self.host, fence=None if idle else self._fence)
        except TransferError as error:  # the pool is another, or the transport was closed
            self._remote_error = error
            return False
        driver.take_messages()  # of nobody that is known here
        return driver.busy or len(manager.leases) > 0

    def drain(self) -> None:
        """Waits until storage has what it was given, or its deadlines are over."""
        while self.poll(idle=True):
            time.sleep(1e-3)

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
        self._begin()

    def _drop(self) -> None:
        for array in self.cache.arrays.values():
            if not array.is_deleted():
                array.delete()

    def sleep(self, leave: Callable[[], Sequence[Transfers]]) -> None:
        """Runs what has to leave the device (`leave` plans it), then gives up the cache's memory.

        Raises `EngineError` without `renew`, before anything changes.
        """
        if self._renew is None:
            raise EngineError("nothing says how to make the cache again (renew)")
        self.move(leave())
        if self.host is not None:
            jax.block_until_ready(self.host.pages)
        self._asleep = True
        self._drop()

    def wakeup(self) -> None:
        """Takes memory for an empty cache."""
        self._make()
        self._asleep = False

    def update(self, params: Params, donate: bool, fits: Callable[[], object]) -> None:
        """Other weights from now on; `fits` is called when it is sure that they fit, before anything changes.

        Raises `RequestError` if they do not. What the devices raise of them has changed nothing either, unless an old
        array was given up by then (`donate`): no step runs until others have come.
        """
        donate = check_boolean("donate", donate, error=RequestError)
        old, tree = jax.tree.flatten(self.params)
        new, other = jax.tree.flatten(params)
        if tree != other:
            raise RequestError("params are not of the structure of those in use")
        names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(self.params)]
        for name, a, b in zip(names, old, new, strict=True):
            if not isinstance(b, jax.Array | np.ndarray) or (a.shape, a.dtype) != (b.shape, b.dtype):
                raise RequestError(f"params{name} is {_described(b)}, expected {_described(a)}")
            if isinstance(b, jax.Array) and b.is_deleted():
                raise RequestError(f"params{name} was deleted: its memory was given up")
        placed, changed = [], False
        kept = {place for b in new if donate and isinstance(b, jax.Array) for place in _memory(b)}
        for a, b in zip(old, new, strict=True):
            placed.append(_put(b, a.sharding))
            if donate and not a.is_deleted() and kept.isdisjoint(_memory(a)):
                jax.block_until_ready(placed[-1])
                if not changed:
                    fits()
                    changed = True
                a.delete()
        if not changed:
            jax.block_until_ready(placed)
            fits()
        self.params = jax.tree.unflatten(tree, placed)


def _settled(x: Any, whole: Sharding) -> Any:
    """A parameter where it is, for good; one that is not on the devices of `whole` goes there."""
    if isinstance(x, jax.Array) and x.sharding.device_set == whole.device_set:
        return _put(x, x.sharding)
    return _put(x, whole) if isinstance(x, jax.Array | np.ndarray) else x


def _put(x: jax.Array | np.ndarray, where: Sharding) -> jax.Array:
    """An array there. What the host may change is copied: a CPU would take that very memory."""
    return jax.device_put(x.copy() if isinstance(x, np.ndarray) else x, where)


def _memory(x: jax.Array) -> set[tuple[int, int]]:
    """Where this process holds the array: devices and addresses."""
    return {(shard.device.id, shard.data.unsafe_buffer_pointer()) for shard in x.addressable_shards}


def _described(x: Any) -> str:
    return f"{x.dtype}{[*x.shape]}" if hasattr(x, "shape") and hasattr(x, "dtype") else shown(x)


def check_drafts(params: Params, cache: KVCache, drafts: int) -> None:
    """Raises `PlanError` if these parameters in this cache cannot guess so many tokens ahead."""
    layout, spark = cache.layout, cache.layout.cfg.dspark
    if not has_mtp(params):
        what = "MTP layer" if spark is None else "DSpark stages"
        raise PlanError(f"drafts={drafts}: the parameters have no {what}, load them with drafts=True")
    if spark is not None and drafts > spark.block_size:
        raise PlanError(f"drafts={drafts}: a block of the model's DSpark stages has {spark.block_size}")
    if not layout.include_drafts or layout.draft_tokens < drafts:
        has = f"include_drafts={layout.include_drafts} and draft_tokens={layout.draft_tokens}"
        raise PlanError(f"drafts={drafts}: the layout has {has}")


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call that is under way."""

    sampled: Sampled  # [shards * B, steps, 1 or 1 + drafts]; experts by token
    kept: jax.Array | None  # [shards * B, steps] int32: how many of each; None: all
    work: Work
    exchanges: list[Exchange]

    def __post_init__(self) -> None:
        """Begins to copy what will be read, so that nobody waits for a copy behind the next call."""
        for array in jax.tree.leaves((self.sampled._replace(counts=None), self.kept)):
            array.copy_to_host_async()

    def get(self) -> Drawn:
        sampled = self.sampled
        tokens, kept = np.asarray(sampled.tokens), None if self.kept is None else np.asarray(self.kept)
        for exchange in self.exchanges:
            exchange.check()
        work, shards = self.work, len(self.work.rows)

        def listed(values: Any) -> list[Any]:
            """By shard and row, one after the other what was kept of each step; of a score its row's tokens."""
            values = np.asarray(values)
            each = len(values) // shards
            if work.targets is not None:
                firsts = [plan.seq_first.tolist() for plan in work.plans]
                return [
                    [values[(at := i * each + firsts[i][j]) : at + row.count].tolist() for j, row in enumerate(some)]
                    for i, some in enumerate(work.rows)
                ]
            if kept is None:
                rows = values.reshape(len(values), -1, *values.shape[3:]).tolist()
            else:
                rows = [
                    [x for step, count in zip(row, counts, strict=True) for x in step[:count]]
                    for row, counts in zip(values.tolist(), kept.tolist(), strict=True)
                ]
            return [rows[i * each : i * each + len(some)] for i, some in enumerate(work.rows)]

        top = None
        if sampled.top_ids is not None:
            pairs = zip(listed(sampled.top_ids), listed(sampled.top_logprobs), strict=True)
            top = [[[*zip(i, p, strict=True)] for i, p in zip(ids, probs, strict=True)] for ids, probs in pairs]
        logprobs = None if sampled.logprobs is None else listed(sampled.logprobs)
        experts = None if sampled.experts is None else self._experts(np.asarray(sampled.experts), kept, shards)
        return Drawn(listed(tokens), logprobs, top, experts)

    def _experts(self, experts: np.ndarray, kept: np.ndarray | None, shards: int) -> list[list[np.ndarray]]:
        """Of each row [layers, tokens, k], of the tokens that it keeps.

        Args:
            experts: [shards * T, layers, k] of one step, [shards * T, steps, layers, k] of a loop.
        """
        work, out = self.work, list[list[np.ndarray]]()
        experts = experts.reshape(shards, -1, *experts.shape[1:])
        for shard, (plan, rows) in enumerate(zip(work.plans, work.rows, strict=True)):
            out.append([])
            for i, row in enumerate(rows):
                first = int(plan.seq_first[i])
                mine = experts[shard, first : first + row.count + row.drafts]  # [n, (steps,) layers, k]
                if kept is not None:
                    counts = kept[shard * len(kept) // shards + i]
                    if mine.ndim == 4:
                        mine = np.concatenate([mine[: counts[s], s] for s in range(mine.shape[1])])
                    elif row.drafts:
                        mine = mine[: counts[0]]
                elif mine.ndim == 4:
                    mine = mine[0]
                out[-1].append(mine.swapaxes(0, 1))
        return out


@functools.partial(jax.jit, donate_argnums=0)
def _put_row(counts: jax.Array, row: int, values: np.ndarray) -> jax.Array:
    return counts.at[row].set(values)


def _fed(tokens: jax.Array, before: jax.Array) -> jax.Array:
    """Ids of [T] int32 tokens, of which those below 0 are of a row of the call before: -1 - row."""
    return jnp.where(tokens < 0, before[jnp.maximum(-1 - tokens, 0)], tokens)


def _is_plain(sampling: Sampling) -> bool:
    """Whether it takes the likeliest token, by the logits as they are."""
    return sampling.greedy and not sampling.penalised and not sampling.logit_bias


def _how(rest: Sequence[jax.Array], draws: bool, masked: bool, biased: bool, asked: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `sample_step` and those like it: `rest` has settings, masks, biases, counts, those there are."""
    left = [*rest]
    sampling = left.pop(0) if draws else None
    masks = left.pop(0) if masked else None
    biases = left.pop(0) if biased else None
    return dict(sampling=sampling, masks=masks, biases=biases, counts=left.pop(0) if left else None, **asked)


def _mixed(
    params: Params,
    cache: KVCache,
    plan: PackedPlan,
    tokens: jax.Array,
    before: jax.Array,
    *rest: jax.Array,
    draws: bool,
    masked: bool,
    biased: bool,
    **asked: Any,
) -> tuple[Sampled, None, jax.Array, None, KVCache]:
    """One step, and each row's next token."""
    how = _how(rest, draws, masked, biased, asked)
    sampled, cache = sample_step(params, cache, plan, _fed(tokens, before), **how)
    return _shaped(sampled, lambda x: x[:, None, None]), None, sampled.tokens, None, cache


def _decode(
    params: Params,
    cache: KVCache,
    plan: PackedPlan,
    tokens: jax.Array,
    before: jax.Array,
    *rest: jax.Array,
    steps: int,
    draws: bool,
    masked: bool,
    biased: bool,
    **asked: Any,
) -> tuple[Sampled, None, jax.Array, None, KVCache]:
    """K decode steps."""
    how = _how(rest, draws, masked, biased, asked)
    sampled, cache = decode_loop(params, cache, plan, _fed(tokens, before), steps, **how)
    last = _padded(sampled.tokens[-1], before)
    sampled = sampled._replace(experts=_first(sampled.experts))
    return _shaped(sampled, lambda x: x.swapaxes(0, 1)[:, :, None]), None, last, None, cache


def _verify(
    params: Params,
    cache: KVCache,
    plan: PackedPlan,
    tokens: jax.Array,
    before: jax.Array,
    drafts: jax.Array,
    lengths: jax.Array,
    *rest: jax.Array,
    width: int,
    steps: int,
    draws: bool,
    masked: bool,
    biased: bool,
    **asked: Any,
) -> tuple[Sampled, jax.Array, jax.Array, jax.Array, KVCache]:
    """K steps of decodes with drafts, [B, K, 1 + width] tokens, of which [B, K] are kept; or, for `steps` = 0, one
    step of any kind. `lengths`: [B], of the rows of the call before, where the decodes fed from there begin."""
    how, given, tokens = _how(rest, draws, masked, biased, asked), tokens, _fed(tokens, before)
    step = plan.unpack()
    start = jnp.asarray(step.seq_start)
    if steps:
        known = given[step.seq_first]
        start = jnp.where(known < 0, lengths[jnp.maximum(-1 - known, 0)], start)
        step = step._replace(seq_start=start)
        sampled, kept, cache = draft_loop(params, cache, step, tokens[step.seq_first], drafts, width, steps, **how)
        sampled = sampled._replace(experts=_first(sampled.experts))
        sampled, kept = _shaped(sampled, lambda x: x.swapaxes(0, 1)), kept.swapaxes(0, 1)
    else:
        sampled, kept, cache = draft_step(params, cache, step, tokens, drafts, width, **how)
        sampled, kept = _shaped(sampled, lambda x: x[:, None]), kept[:, None]
    last = jnp.take_along_axis(sampled.tokens[:, -1], jnp.maximum(kept[:, -1:] - np.int32(1), 0), 1)[:, 0]
    after = start + step.seq_count - drafts - np.int32(1) + kept.sum(1, dtype=jnp.int32)
    return sampled, kept, _padded(last, before), _padded(after, lengths), cache


def _padded(values: jax.Array, like: jax.Array) -> jax.Array:
    """As many rows as the widest call has, whose executables read them: what stands behind its own is never read."""
    return jnp.pad(values, (0, like.shape[0] - values.shape[0]))


def _first(experts: jax.Array | None) -> jax.Array | None:
    """Of a loop, with the tokens first."""
    return None if experts is None else experts.swapaxes(0, 1)


def _shaped(sampled: Sampled, shape: Callable[[jax.Array], jax.Array]) -> Sampled:
    """All that is of rows in another shape; experts are of tokens, counts of slots."""
    beside = sampled._replace(experts=None, counts=None)
    return jax.tree.map(shape, beside)._replace(experts=sampled.experts, counts=sampled.counts)
