"""Random mixes one after the other in the same arrays, and what they exercised. See mixes.py."""

from __future__ import annotations

import collections

import numpy as np

from ..checks import check_integer
from ..errors import PlanError
from ..tiers.host_cache import init_host_cache
from .mixes import Mix, host_size
from .runner import StepRunner, with_garbage

__all__ = ["EXERCISED", "Mixes", "assert_serving_invariant"]

# What a run has to have seen for its equalities to mean anything; the last four with a layout that has drafts.
EXERCISED = (
    "hits on the device",
    "hits on the host",
    "hits at a junction",
    "prefixes restored from device snapshots",
    "preemptions",
    "resumes from parked state",
    "resumes from a cached prefix",
    "resumes from nothing",
    "forks",
    "forks before the first step",
    "sleeps",
    "aborts",
    "lost steps",
    "lost transfers",
    "rewritten",
    "reservations",
    "replayed tokens",
    "blocks out",
    "blocks in",
    "snapshots out",
    "snapshots in",
    "evictions from the device",
    "evictions from the host",
    "snapshot evictions",
    "duplicate blocks",
    "waits for a slot",
    "steps without enough blocks",
    "drafts accepted",
    "drafts rejected",
    "steps taken back whole",
)
_OF_DRAFTS = ("drafts accepted", "drafts rejected", "steps taken back whole")


class Mixes:
    """Mixes one after the other in the same arrays.

    Attributes:
        seen: how often what happened.
    """

    def __init__(self, runner: StepRunner) -> None:
        self.runner, self.seen = runner, collections.Counter[str]()
        self.cache = with_garbage(runner.empty_cache(), np.random.default_rng(0))
        records = host_size(runner)
        self.host = init_host_cache(runner.layout, records.num_pages)

    def run(self, seed: int, kind: type[Mix] = Mix) -> None:
        """Runs one mix. Raises `AssertionError` if anything in it is not as in a lone, cold run."""
        mix = kind(self.runner, self.cache, self.host, seed, self.seen)
        try:
            mix.run()
        except Exception as error:
            error.add_note(f"in mix {seed}")
            raise
        finally:
            self.cache, self.host = mix.cache, mix.host
        self.seen["mixes"] += 1

    @property
    def missing(self) -> list[str]:
        """Lists what should have happened in the mixes and did not."""
        drafts = self.runner.layout.draft_tokens
        return [name for name in EXERCISED if not self.seen[name] and (drafts or name not in _OF_DRAFTS)]


def assert_serving_invariant(runner: StepRunner, *, mixes: int = 3, first: int = 0) -> collections.Counter[str]:
    """Whatever a manager does with them, requests have the tokens, logits and bytes of lone, cold runs.

    Each mix is 3..12 requests with shared, repeated and continued prompts in tight pools: chunks of odd sizes, prefix
    hits on device and host, preemption, forks, rejected drafts (with `draft_tokens`), aborts, lost steps,
    texts that are changed while their request is preempted, sleep.

    Args:
        mixes: how many, at least one; a few see the usual mistakes, some hundred the rare ones.
        first: seed of the first.

    Returns:
        What happened how often: look whether it is what you wanted to see (`Mixes.missing` says what never did).

    Raises:
        PlanError: no number of mixes.
        AssertionError: names the request, the position, or the pool that differs, and the mix.
    """
    mixes = check_integer("mixes", mixes, 1, error=PlanError)
    run = Mixes(runner)
    for seed in range(first, first + mixes):
        run.run(seed)
    if runner.executables != 1:
        raise AssertionError(f"the step was compiled {runner.executables} times: bits are promised for one executable")
    return run.seen
