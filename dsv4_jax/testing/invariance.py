"""A request's logits and cache bytes do not depend on its chunks, its neighbours, or what a manager did with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ..errors import PlanError
from ..manager import KVCacheManager
from ..manager.request import Request
from .live import assert_same_bytes
from .runner import Cold, StepRunner, with_garbage

__all__ = ["assert_batch_invariant", "assert_chunking_invariant", "assert_same_logits", "chunkings"]


def assert_chunking_invariant(
    runner: StepRunner, tokens: Sequence[int], chunks: Sequence[Sequence[int]] | None = None
) -> None:
    """However a request's tokens are cut into steps, its logits and its cache bytes are the same, bit by bit.

    Args:
        tokens: of the request; at least two blocks of them, or the compressors have nothing to do.
        chunks: the ways to cut, at least one; default: `chunkings`.

    Raises:
        PlanError: there is no way, or one that does not cut these tokens.
        AssertionError: says which chunks differ from single tokens, and where.
    """
    ways = [*(chunkings(runner, len(tokens)) if chunks is None else chunks)]
    if not ways:
        raise PlanError(f"no chunks to cut {len(tokens)} tokens into: nothing would be compared")
    for sizes in ways:
        if sum(sizes) != len(tokens) or not all(0 < size <= runner.shape.tokens for size in sizes):
            raise PlanError(f"chunks {list(sizes)} do not cut {len(tokens)} tokens into 1..{runner.shape.tokens} each")
    serial = runner.alone(tokens, [1] * len(tokens))
    for sizes in ways:
        _assert_same(runner.alone(tokens, sizes), serial, f"chunks {_short(sizes)} against single tokens")


def chunkings(runner: StepRunner, total: int, seed: int = 0) -> Iterator[list[int]]:
    """Yields ways to cut `total` tokens: as large as may be, odd sizes, sizes around the ratios, and ragged ones."""
    cfg, most, rng = runner.layout.cfg, runner.shape.tokens, np.random.default_rng(seed)
    ragged = rng.integers(1, 1 + most, total).tolist()
    around = [cfg.csa_ratio - 1, cfg.csa_ratio + 1, cfg.hca_ratio - 1, cfg.hca_ratio + 1]
    for sizes in ([most], [3], [5, 1, most], around, ragged):
        cut, left = [], total
        for size in list(sizes) * total:
            cut.append(min(max(size, 1), most, left))
            left -= cut[-1]
            if not left:
                break
        yield cut


def assert_batch_invariant(runner: StepRunner, prompts: Sequence[Sequence[int]], *, seed: int = 0) -> None:
    """A request among others has the logits and the cache bytes that it has alone, bit by bit.

    All prompts run together, in steps of random requests with random numbers of tokens each, in a cache that is full
    of garbage.

    Args:
        prompts: 2 or more, at most as many as the runner's size has slots.

    Raises:
        PlanError: there are fewer than two: nobody is anybody's neighbour.
        AssertionError: says which prompt differs, and where.
    """
    if len(prompts) < 2:
        raise PlanError(f"requests among others are at least two, got {len(prompts)} prompts")
    rng = np.random.default_rng(seed)
    manager = KVCacheManager(runner.layout, runner.size)
    cache = with_garbage(runner.empty_cache(), rng)
    requests = [manager.admit_request(list(prompt)) for prompt in prompts]
    logits: dict[Request, list[np.ndarray]] = {request: [] for request in requests}
    while waiting := [request for request in requests if request.num_pending]:
        scheduled, room = [], runner.shape.tokens
        for i in rng.permutation(len(waiting)):
            count = min(int(rng.integers(0, 1 + room)), waiting[i].num_pending)
            if count:
                scheduled.append((waiting[i], count))
                room -= count
        plan = manager.plan_step(scheduled, shape=runner.shape)
        out, cache = runner.run(cache, manager, plan)
        first = 0
        for request, count in scheduled:
            logits[request].append(out[first : first + count])
            first += count
    for i, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
        together = Cold(np.concatenate(logits[request]), runner.live(cache, request))
        _assert_same(together, runner.alone(prompt), f"prompt {i} among {len(prompts)} against alone")


def assert_same_logits(actual: np.ndarray, expected: np.ndarray, context: str = "") -> None:
    """Asserts equal bits of two arrays [N, vocab], row by row.

    Raises:
        AssertionError: names the first row that differs.
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise AssertionError(
            f"{context}: logits are {actual.dtype}{actual.shape}, not {expected.dtype}{expected.shape}"
        )
    as_bits = f"u{actual.dtype.itemsize}"
    same = np.ascontiguousarray(actual).view(as_bits) == np.ascontiguousarray(expected).view(as_bits)
    if not same.all():
        row = int(np.argmin(same.all(-1)))
        worst = np.abs(actual.astype(np.float64) - expected).max()
        raise AssertionError(
            f"{context}: logits of position {row} differ in {(~same[row]).sum()} of {same[row].size} values "
            f"(rows that differ: {(~same.all(-1)).sum()} of {len(same)}; by up to {worst:.3g})"
        )


def _assert_same(actual: Cold, expected: Cold, context: str) -> None:
    assert_same_logits(actual.logits, expected.logits, context)
    assert_same_bytes(actual.live, expected.live, context)


def _short(sizes: Sequence[int]) -> str:
    return f"{list(sizes[:6])[:6]}{'...' if len(sizes) > 6 else ''}"
