"""The cache of a list of prompts: as many slots and blocks as they use together, and no more than the device has."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from ..capacity import largest_fitting
from ..errors import OptionError
from ..layout import CacheLayout, CacheSize
from .options import naming

__all__ = ["Room", "choose_size", "shared_tokens"]

_SPARE = 0.1  # of what the weights leave: for what a step computes with


class Room(NamedTuple):
    """Bytes of the device, and of them those of the weights."""

    device: int
    weights: int

    @property
    def free(self) -> int:
        """For a cache."""
        return int((self.device - self.weights) * (1 - _SPARE))

    def check(self, form: str) -> None:
        """Raises `OptionError` if the weights alone are too many."""
        if self.weights >= self.device:
            raise OptionError(
                f"--weights: {form} weights take {self.weights} bytes, jax has {self.device} of the device "
                "(XLA_PYTHON_CLIENT_MEM_FRACTION is its share)"
            )


def choose_size(
    layout: CacheLayout, needs: Sequence[int], most: int, room: Room, *, snapshots: bool = False, ranks: int = 1
) -> CacheSize:
    """The cache in which up to `most` requests run at once, fewer if there is no memory for so many.

    Args:
        needs: tokens of each request.
        snapshots: states are kept, one for each request and one more.
        ranks: devices that share each request's blocks, each with this room.

    Raises:
        OptionError: not even one request fits.
    """
    blocks = sorted((layout.blocks_for(need) for need in needs), reverse=True)

    def size(slots: int) -> CacheSize:
        each = sum(-(-count // ranks) for count in blocks[:slots])
        return CacheSize(each, slots, blocks[0], slots + 1 if snapshots else 0, pool_ranks=ranks)

    fitting = largest_fitting(lambda slots: layout.total_bytes(size(slots)) <= room.free, most)
    if not fitting:
        raise OptionError(
            f"--max-new-tokens: a cache for {max(needs)} tokens, prompt included, takes {layout.total_bytes(size(1))} "
            f"bytes, the device has {max(room.free, 0)} for it beside {room.weights} of weights"
        )
    with naming("--max-batch"):
        layout.check_size(size(fitting))
    return size(fitting)


def shared_tokens(prompts: Sequence[Sequence[int]], block_tokens: int) -> int | None:
    """Tokens, in whole blocks, with which all prompts begin, one at least left to compute.

    None: no two prompts have their first block in common: nothing to find in a cache.
    """
    firsts = Counter(tuple(prompt[:block_tokens]) for prompt in prompts if len(prompt) > block_tokens)
    if max(firsts.values(), default=0) < 2:
        return None
    least = min(len(prompt) - 1 for prompt in prompts)
    same = next((i for i in range(least) if len({prompt[i] for prompt in prompts}) > 1), least)
    return math.floor(same / block_tokens) * block_tokens
