"""`generate`: continues a list of prompts, on a cache and managers of the caller's. For a server see `Engine`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from ..cache import KVCache
from ..checks import check_integer, check_iterable, shown
from ..errors import ContextLimitError, ManagerInterruptedError, PlanError
from ..manager import KVCacheManager
from ..manager.prefix.token_ids import token_ids
from ..model.sampling import GREEDY, Sampling
from ..model.weights.params import Params
from ..ops.exchange_buffers import Exchange
from ..ops.registry import Choice
from .core import Core, Limits, listed, shapes_of
from .device import DeviceExecutor
from .loop import Turn, drive
from .prompt import Prompt, stop_ids

__all__ = ["StepOutput", "generate"]


class StepOutput(NamedTuple):
    """What a call of the device brought: a step, or the steps of a loop.

    Attributes:
        fed: tokens of prompts that it computed; 0: it decoded and did nothing else.
        tokens: prompt index -> tokens newly sampled for it, stop token left out.
        ended: indices of the prompts for which nothing more is sampled.
    """

    fed: int
    tokens: dict[int, list[int]]
    ended: tuple[int, ...]


def generate(
    params: Params,
    cache: KVCache,
    manager: KVCacheManager | Sequence[KVCacheManager],
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 64,
    stop_tokens: Iterable[int] = (),
    sampling: Sampling = GREEDY,
    seed: int = 0,
    chunk_tokens: int = 256,
    decode_steps: int = 1,
    drafts: int = 0,
    acceptance: str = "coupled",
    least_confidence: float = 0.0,
    implementation: Choice = None,
    exchanges: Sequence[Exchange] = (),
    on_step: Callable[[StepOutput], Collection[int] | None] | None = None,
) -> tuple[list[list[int]], KVCache]:
    """Continues every prompt: an engine's loop (`Core`) without its thread.

    Prompts are admitted in order as slots and blocks come free. Each step feeds every live request:
    one token of those that are decoding, and prompt chunks of the others; once all are decoding and none waits,
    `decode_steps` steps run per call, and what a request samples beyond its last token is dropped. Two
    executables in all, whatever the prompts; a third, of single steps, where K more go beyond the context
    limit. While a call runs, the next is planned and sent after it. If blocks run out, the last requests wait for
    theirs (`KVCacheManager.preempt`). If the manager has a policy, prompts start at what is cached of them, and leave
    behind what it wants cached.

    With `drafts` every request that decodes may get 1 + drafts tokens from a step, as many of them as the MTP layer,
    or DSpark's stages, guess (`draft_step`). The text is what it is without drafts.

    Over a mesh (docs/devices.md) all data shards run one executable a step. A prompt goes to the shard that has most of
    it cached, of those to the one with the fewest requests. What it samples is what it samples on one device.

    A request's tokens depend on its prompt, its index and the seed, up to float32 rounding: not on
    what else runs. The random numbers of one request differ from those of another with the same prompt.

    Args:
        params: over a mesh those of `shard_params`.
        cache: donated: use the returned one. If a step or `on_step` raises, it is gone: `manager.reset()`.
        manager: of this cache, without a host tier; its other requests are left alone. Of a cache over a mesh one for
            each data shard, in their order, all alike.
        prompts: token ids, at least one each.
        max_new_tokens: to sample for each prompt.
        stop_tokens: a request ends before the first of these it samples.
        sampling: how to sample, for all.
        seed: of the random numbers, unless `sampling` is greedy or has one: each prompt gets one of its own from it.
        chunk_tokens: most tokens of a step, all requests of a data shard together.
        decode_steps: K of `decode_loop` or `draft_loop`. Requests take the blocks of up to K * (1 + drafts) - 1 tokens
            more than they keep; where the context limit forbids that, single steps run.
        drafts: the most drafts of a request in one step; needs parameters with the layers that draft, a layout
            with `include_drafts` and at least so many `draft_tokens`.
        acceptance: as of `draft_step`. By the standard rule a sampled text depends on the drafts, its distribution not.
        least_confidence: as of `draft_step`, of DSpark. The text is the same, unless that rule samples it.
        exchanges: of the mesh's axes, for exchanges in the project's own CUDA; checked after every call.
        on_step: called after every call of the device with what it brought, on the host. The prompts whose indices it
            returns end there, those that still wait for a slot, too.

    Returns:
        (the tokens sampled for each prompt, stop token left out; the cache).

    Raises:
        PlanError: an empty prompt, a count that is out of range or no integer, stop tokens or a `sampling` of a wrong
            type, a manager with a host tier, for which nobody runs transfers (`Engine` does), drafts that are not
            possible, or managers that are not one for each data shard, or not alike.
        RequestError: a token of a prompt is no id of the model's vocabulary.
        ContextLimitError: a prompt and its continuation exceed the context limit, or all blocks together. Like the two
            above it is raised before anything runs.
        NoFreeSlotError, OutOfBlocksError: a prompt cannot be admitted even with none of the others live.
        ExchangeError: a device did not come to an exchange.
    """
    max_new_tokens = check_integer("max_new_tokens", max_new_tokens, 1, error=PlanError)
    chunk_tokens = check_integer("chunk_tokens", chunk_tokens, error=PlanError)
    decode_steps = check_integer("decode_steps", decode_steps, 1, error=PlanError)
    drafts = check_integer("drafts", drafts, error=PlanError)
    seed = check_integer("seed", seed, -(2**63), error=PlanError)
    if not isinstance(sampling, Sampling):
        raise PlanError(f"sampling must be a Sampling, got {shown(sampling)}")
    stops = stop_ids(stop_tokens, PlanError)
    managers, asked_for = listed("manager", manager), [*check_iterable("prompts", prompts, error=PlanError)]
    shapes = shapes_of(managers, chunk_tokens, steps=decode_steps, drafts=drafts)
    if any(any(one.host_size) for one in managers):
        raise PlanError("generate moves nothing between tiers: its manager must have no host tier (see Engine)")
    rules = dict(acceptance=acceptance, least_confidence=least_confidence)
    executor = DeviceExecutor(params, cache, shapes, exchanges=exchanges, **rules, implementation=implementation)
    executor.check_managers(managers)
    if sampling.seed is not None:  # of all of them: each draws from a seed of its own
        seed, sampling = sampling.seed, dataclasses.replace(sampling, seed=None)
    core = Core(managers, shapes, seed=seed, limits=Limits(queued=max(len(asked_for), 1)))
    asked = []
    for i, prompt in enumerate(asked_for):
        ids = token_ids(prompt, core.layout.cfg.vocab_size)
        if not len(ids):
            raise PlanError(f"prompt {i} is empty")
        one = Prompt(tokens=ids, max_new_tokens=max_new_tokens, sampling=sampling, stop_tokens=stops, id=i)
        try:
            core.check(one)
        except ContextLimitError as error:
            raise ContextLimitError(f"of prompt {i}", error.tokens, error.limit) from None
        asked.append(one)
    for one in asked:
        core.add(one, 0.0)
    drawn: list[list[int]] = [[] for _ in asked]
    try:
        for turn in drive(core, executor):
            step = _brought(turn, drawn)
            if on_step is not None:
                also = on_step(step)
                for index in also if also is not None else ():
                    core.abort(int(index))
                core.drain()
    finally:
        _leave(core)
    return drawn, executor.cache


def _brought(turn: Turn, drawn: list[list[int]]) -> StepOutput:
    """Takes up what a call has brought. Raises the error that a request has ended in."""
    tokens, ended = dict[int, list[int]](), list[int]()
    for output in turn.outputs:
        index = output.id
        assert isinstance(index, int)
        if output.error is not None:
            raise output.error
        tokens.setdefault(index, []).extend(output.tokens)
        drawn[index] += output.tokens
        if output.finish is not None:
            ended.append(index)
    return StepOutput(turn.fed, tokens, tuple(sorted(ended)))


def _leave(core: Core) -> None:
    """Ends all that has not, in managers that can still do that."""
    with contextlib.suppress(ManagerInterruptedError):  # what broke off a call of a manager is on its way
        core.abort_all()
