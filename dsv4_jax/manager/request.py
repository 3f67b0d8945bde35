"""A live request: what the host knows of it. Pure Python."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Hashable

from ..errors import RequestError

__all__ = ["Request", "RequestState"]


class RequestState(enum.Enum):
    """`LIVE` requests hold a slot; `RELEASED` ones hold nothing and are refused everywhere."""

    LIVE = "live"
    RELEASED = "released"


@dataclasses.dataclass(eq=False, slots=True)
class Request:
    """One request. Made by `KVCacheManager.admit_request`; only `tokens` is the caller's to change.

    It stands in for its slot number wherever an integer is wanted (`operator.index(request)`).

    Attributes:
        id: the caller's, or a number that only grows.
        slot: its row of per-request state, >= 1.
        generation: of the manager that admitted it; `reset()` makes older ones stale.
        max_tokens: the most tokens it may ever hold, prompt and output together.
        tokens: prompt and output ids known so far. Append what was drawn: `request.tokens.append(t)`.
            A caller that keeps its token ids elsewhere may leave this empty.
        num_cached: tokens whose rows are in the cache once the steps planned so far have run.
        blocks: block ids in path order: block i holds tokens [i, i + 1) * block_tokens.
        num_tabled: leading blocks whose block-table entries a plan has already carried.
        reserved: tokens for which blocks are kept whatever happens (see `KVCacheManager.reserve`).
        fed: tokens of its last step, while that step may still be accepted in part; else 0.
        last_step: number of the last step that fed it, 0 before the first.
    """

    id: Hashable
    slot: int
    generation: int
    max_tokens: int
    tokens: list[int]
    num_cached: int = 0
    blocks: list[int] = dataclasses.field(default_factory=list)
    num_tabled: int = 0
    reserved: int = 0
    fed: int = 0
    last_step: int = 0
    state: RequestState = RequestState.LIVE

    def __index__(self) -> int:
        """The slot. Raises `RequestError` once released: the slot may be someone else's by then."""
        if self.state is not RequestState.LIVE:
            raise RequestError(f"request {self.id!r} was released: it has no slot")
        return self.slot

    @property
    def num_pending(self) -> int:
        """Known tokens that are not in the cache yet."""
        return max(len(self.tokens) - self.num_cached, 0)
