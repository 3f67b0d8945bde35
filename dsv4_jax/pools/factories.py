"""Pools with their host sides, and how many tokens the memory holds. Imports jax only to allocate."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from ..checks import check_integer
from ..errors import CapacityError, PoolError
from .request_table import ReqToTokenPool
from .slots import StateSlots
from .spec import GDNSpec, KVSpec
from .token_allocator import TokenToKVPoolAllocator

if TYPE_CHECKING:
    from .gdn_pool import GDNPool
    from .kv_pool import KVPool
    from .token_table import TokenTable

__all__ = [
    "PoolCapacity",
    "make_full_attention_net_mem_pool",
    "make_gdn_pool",
    "make_req_to_token_pool",
    "plan_pools",
]


def make_full_attention_net_mem_pool(
    size: int,
    layers: int,
    k_heads: int,
    k_dim: int,
    v_heads: int | None = None,
    v_dim: int | None = None,
    *,
    storage: str = "bf16",
    page_size: int = 1,
    sort: bool = True,
    sharding: Any = None,
) -> tuple[KVPool, TokenToKVPoolAllocator]:
    """Returns a KV pool and the allocator of its slots. Arguments as of `KVSpec` and `TokenToKVPoolAllocator`."""
    from .kv_pool import KVPool

    spec = KVSpec(size, layers, k_heads, k_dim, v_heads, v_dim, storage, page_size)
    allocator = TokenToKVPoolAllocator(spec.size, page_size, sort=sort)
    return KVPool.init(spec, sharding=sharding), allocator


def make_req_to_token_pool(max_requests: int, max_context: int) -> tuple[ReqToTokenPool, TokenTable]:
    """Returns a request table: the host's and, empty, the device's."""
    from .token_table import TokenTable

    pool = ReqToTokenPool(max_requests, max_context)
    return pool, TokenTable.init(pool)


def make_gdn_pool(spec: GDNSpec, *, sharding: Any = None) -> tuple[GDNPool, StateSlots]:
    """Returns a state pool and the books of its track slots."""
    from .gdn_pool import GDNPool

    return GDNPool.init(spec, sharding=sharding), StateSlots(spec)


@dataclasses.dataclass(frozen=True)
class PoolCapacity:
    """The sizes of pools that fill the memory.

    Attributes:
        kv: the KV pool to allocate.
        budget_bytes: what the pools may take.
        kv_bytes, table_bytes, gdn_bytes: what each takes, as allocated.
        limited_by: "memory", or "max_tokens" if that is less.
    """

    kv: KVSpec
    budget_bytes: int
    kv_bytes: int
    table_bytes: int
    gdn_bytes: int
    limited_by: str

    @property
    def tokens(self) -> int:
        """Tokens that can be handed out: `size` of the KV pool and of its allocator, in whole pages."""
        return self.kv.size

    @property
    def total_bytes(self) -> int:
        return self.kv_bytes + self.table_bytes + self.gdn_bytes


def plan_pools(
    *,
    free_before_model: int,
    free_after_model: int,
    memory_fraction: float,
    layers: int,
    k_heads: int,
    k_dim: int,
    v_heads: int | None = None,
    v_dim: int | None = None,
    storage: str = "bf16",
    page_size: int = 1,
    max_requests: int = 0,
    max_context: int = 0,
    gdn: GDNSpec | None = None,
    max_tokens: int | None = None,
) -> PoolCapacity:
    """How many tokens fit. The pools may take

        budget = free_after_model - (1 - memory_fraction) * free_before_model

    bytes: the rest of the memory that was free before the model came is left to activations. The state pool
    and the request table are paid first, KV rows get what remains.

    Args:
        free_before_model, free_after_model: bytes free on a device before and after the weights were loaded.
        memory_fraction: of `free_before_model`, what weights and pools together may take, in (0, 1].
        layers, k_heads, k_dim, v_heads, v_dim, storage: see `KVSpec`.
        page_size: of the allocator; at least one page must fit.
        max_requests, max_context: of the request table; 0 for none.
        gdn: the state pool, if any.
        max_tokens: no more than this in whole pages, whatever fits.

    Raises:
        CapacityError: not even one page fits; the message lists every term.
        PoolError: an argument is impossible.
    """
    before = check_integer("free_before_model", free_before_model, 1, error=PoolError)
    after = check_integer("free_after_model", free_after_model, error=PoolError)
    if isinstance(memory_fraction, bool) or not isinstance(memory_fraction, int | float | np.floating):
        raise PoolError(f"memory_fraction must be a number, got {memory_fraction!r}")
    if not 0 < memory_fraction <= 1:
        raise PoolError(f"memory_fraction must be in (0, 1], got {memory_fraction}")
    requests, context = (
        check_integer("max_requests", max_requests, error=PoolError),
        check_integer("max_context", max_context, error=PoolError),
    )
    page = check_integer("page_size", page_size, 1, error=PoolError)
    if gdn is not None and not isinstance(gdn, GDNSpec):
        raise PoolError(f"gdn must be a GDNSpec or None, got {gdn!r}")
    one = KVSpec(page, layers, k_heads, k_dim, v_heads, v_dim, storage, page)
    reserved = int(np.ceil(before * (1 - float(memory_fraction))))
    table_bytes = 4 * (requests + 1) * (context + 1) if requests and context else 0
    gdn_bytes = gdn.total_bytes if gdn is not None else 0
    budget = after - reserved
    left = budget - table_bytes - gdn_bytes
    rows = max(left // one.bytes_per_token, 0) // 8 * 8  # whole groups of 8
    fits = max(rows // page - 1, 0) * page  # whole pages, less the padding's
    size = (
        fits
        if max_tokens is None
        else min(fits, check_integer("max_tokens", max_tokens, 1, error=PoolError) // page * page)
    )
    if size < page:
        raise CapacityError(
            f"no room for a KV pool of {page} tokens ({one.total_bytes} bytes, {one.bytes_per_token} a token): "
            f"{after} bytes free after the model - {reserved} reserved ({before} free before it, "
            f"memory_fraction {memory_fraction}) - {gdn_bytes} recurrent states - {table_bytes} request table = {left} "
            f"bytes, {fits} tokens; max_tokens {max_tokens}"
        )
    kv = dataclasses.replace(one, size=size)
    limited = "memory" if size == fits else "max_tokens"
    return PoolCapacity(kv, budget, kv.total_bytes, table_bytes, gdn_bytes, limited)
