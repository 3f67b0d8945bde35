"""Token ids of runs, and short names of what they mean. Pure numpy; all sums are modulo 2^64."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable

import numpy as np

from .trace import TraceRun

__all__ = ["prefix_names", "run_tokens"]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def run_tokens(runs: Iterable[TraceRun], vocab_size: int) -> np.ndarray:
    """[N] int32 token ids of runs, one after the other: a hash of the run's name and the place in its sequence."""
    runs = [run for run in runs if run.tokens]
    if not runs:
        return np.zeros(0, np.int32)
    counts = np.array([run.tokens for run in runs], np.int64)
    seeds = np.array([_seed(run.hash) for run in runs], np.uint64)
    places = np.array([run.start for run in runs], np.int64) - (np.cumsum(counts) - counts)  # of a run's token 0
    first = seeds + (places + 1).astype(np.uint64) * _GOLDEN
    mixed = _mix(np.arange(counts.sum(), dtype=np.uint64) * _GOLDEN + np.repeat(first, counts))
    return ((mixed >> np.uint64(32)) * np.uint64(vocab_size) >> np.uint64(32)).astype(np.int32)


def prefix_names(ids: np.ndarray, block_tokens: int, space: object) -> list[int]:
    """Returns a 64-bit number for each full block: of its tokens, all before them, and `space`.

    Equal beginnings have equal names. That different ones differ is a matter of chance (2^-64 a pair), not of
    cryptography: these are for looking after the manager, not for its use.
    """
    full = len(ids) // block_tokens
    words = ids[: full * block_tokens].reshape(full, block_tokens).astype(np.uint64) @ _weights(block_tokens)
    chain = np.cumsum(_mix(words + np.arange(full, dtype=np.uint64) * _GOLDEN), dtype=np.uint64)
    return _mix(chain + np.uint64(_seed(space))).tolist()


def _mix(x: np.ndarray) -> np.ndarray:
    """Returns the finish of splitmix64: every bit of the result depends on all of `x`, which is overwritten."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x ^= x >> np.uint64(shift)
        x *= np.uint64(factor)
    x ^= x >> np.uint64(31)
    return x


@functools.lru_cache(maxsize=4)
def _weights(count: int) -> np.ndarray:
    """Odd numbers [count], by which the tokens of a block are summed."""
    return _mix(np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN) | np.uint64(1)


@functools.lru_cache(maxsize=1 << 16)
def _seed(name: object) -> int:
    """A seed from SHA-256, so that the sequences of two names have nothing to do with each other."""
    return int.from_bytes(hashlib.sha256(json.dumps(name).encode()).digest()[:8], "little")
