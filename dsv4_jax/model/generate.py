"""Text generation for a list of prompts: a small continuous-batching loop around the manager's plans."""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from ..cache import KVCache
from ..checks import as_int, check_integer
from ..errors import ContextLimitError, PlanError
from ..manager import KVCacheManager, Request
from ..manager.prefix.token_ids import token_ids
from ..ops.exchange_buffers import Exchange
from ..ops.registry import Choice
from ..untrusted import brief
from .calls import Call, Caller
from .compiled_steps import CompiledSteps
from .sampling import GREEDY, Sampling
from .shards import Shards
from .weights.params import Params

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
    implementation: Choice = None,
    exchanges: Sequence[Exchange] = (),
    on_step: Callable[[StepOutput], Collection[int] | None] | None = None,
) -> tuple[list[list[int]], KVCache]:
    """Continues every prompt.

    Prompts are admitted in order as slots and blocks come free. Each step feeds every live request:
    one token of those that are decoding, and prompt chunks of the others; once all are decoding,
    `decode_steps` steps run per call, and what a request samples beyond its last token is dropped. Two
    executables in all, whatever the prompts; a third, of single steps, where K more go beyond the context
    limit. While a call runs, the next is planned and sent after it, as long as the same requests go on.
    If the manager has a policy, prompts start at what is cached of them, and leave behind what
    it wants cached.

    With `drafts` every request that decodes may get 1 + drafts tokens from a step, as many of them as the MTP layer
    guesses (`draft_step`). Greedy output is what it is without drafts; sampled output has the same distribution, from
    other random numbers, which `decode_steps` does not change.

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
        seed: of the random numbers, unless `sampling` is greedy.
        chunk_tokens: most tokens of a step, all requests of a data shard together.
        decode_steps: K of `decode_loop` or `draft_loop`. Requests take the blocks of up to K * (1 + drafts) - 1 tokens
            more than they keep; where the context limit forbids that, single steps run.
        drafts: the most drafts of a request in one step; needs parameters with the MTP layer, a layout with
            `include_mtp` and at least so many `draft_tokens`.
        exchanges: of the mesh's axes, for exchanges in the project's own CUDA; checked after every call.
        on_step: called after every call of the device with what it brought, on the host. The prompts whose indices it
            returns end there, those that still wait for a slot, too.

    Returns:
        (the tokens sampled for each prompt, stop token left out; the cache).

    Raises:
        PlanError: an empty prompt, a count that is out of range or no integer, stop tokens or a `sampling` of a wrong
            type, a manager with a host tier, for which nobody runs transfers, drafts that are not possible, or managers
            that are not one for each data shard, or not alike.
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
    placement = CompiledSteps(cache, [exchange.peers for exchange in exchanges])
    shards = Shards(manager, placement.shards)
    first = shards.managers[0]
    if chunk_tokens < first.size.num_slots * (1 + drafts):
        each = f", times {1 + drafts} with drafts" if drafts else ""
        raise PlanError(f"chunk_tokens must be at least the number of slots {first.size.num_slots}{each}")
    if not isinstance(sampling, Sampling):
        raise PlanError(f"sampling must be a Sampling, got {brief(sampling)}")
    stops = _stops(stop_tokens)
    ids = [token_ids(prompt, first.layout.cfg.vocab_size) for prompt in prompts]
    # The last token sampled is never fed.
    needs = [len(prompt) + max_new_tokens - 1 for prompt in ids]
    limit = min(first.context_limit, first.pool_limit)
    for i, (prompt, need) in enumerate(zip(ids, needs, strict=True)):
        if not len(prompt):
            raise PlanError(f"prompt {i} is empty")
        if need > limit:
            raise ContextLimitError(f"of prompt {i}", need, limit)

    ahead = decode_steps * (1 + drafts) - 1
    caller = Caller(params, shards, placement, chunk_tokens, decode_steps, drafts, sampling, seed, implementation)
    drawn: list[list[int]] = [[] for _ in ids]
    waiting = collections.deque(range(len(ids)))
    call: Call | None = None  # under way

    def left() -> dict[Request, int]:
        return {r: max_new_tokens - len(drawn[index]) for live in shards.live for r, index in live.items()}

    try:
        while waiting or shards.requests:
            if call is None:
                while waiting:
                    room = min(needs[waiting[0]] + ahead, limit)
                    if not shards.admit(waiting[0], ids[waiting[0]], room):
                        break
                    waiting.popleft()
                call, cache = caller.begin(cache)
            after = None
            if not waiting or shards.full:
                after, cache = caller.follow(call, cache, left())
            fed, brought, ended = 0, dict[int, list[int]](), set[int]()
            for request, count, row in call.drawn():
                if (index := shards.index(request)) is None:
                    continue  # it ended in the call before
                fed += 0 if drawn[index] else count
                if not row:
                    continue  # its prompt is not complete
                most = max_new_tokens - len(drawn[index])
                stop = next((i for i, token in enumerate(row[:most]) if token in stops), most)
                brought[index] = row[:stop]
                request.tokens += brought[index]
                drawn[index] += brought[index]
                if stop < len(row) or len(drawn[index]) == max_new_tokens:
                    ended.add(index)
            for exchange in exchanges:
                exchange.check()
            if on_step is not None:
                also = on_step(StepOutput(fed, brought, tuple(sorted(ended))))
                if also is not None:
                    ended.update(also)
                    waiting = collections.deque(index for index in waiting if index not in ended)
            shards.release(ended)
            call = after if shards.requests else None
    finally:
        shards.release_all()
    return drawn, cache


def _stops(tokens: Iterable[int]) -> frozenset[int]:
    try:
        ids = [(as_int(token), token) for token in tokens]
    except TypeError:
        raise PlanError(f"stop_tokens must be token ids, got {brief(tokens)}") from None
    for number, token in ids:
        if number is None:
            raise PlanError(f"stop_tokens must be integers, got {brief(token)}")
    return frozenset(number for number, _ in ids if number is not None)
