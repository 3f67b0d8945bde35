"""Pools for other architectures: token-level KV, its allocator and request table, recurrent state, prefix caches.

Host objects (no jax): `TokenToKVPoolAllocator`, `ReqToTokenPool`, `StateSlots`, `RadixCache`, `ChunkCache`.
Each has one owner (no locks): its calls come from one thread, and each is done wholly or not at all.
Device pytrees (pure functions, in place when donated): `KVPool`, `TokenTable`, `GDNPool`.
Names load on first use, so that a scheduler process that needs only the former imports no jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ..former_names import former_name

if TYPE_CHECKING:
    from .chunk_cache import ChunkCache as ChunkCache
    from .factories import PoolCapacity as PoolCapacity
    from .factories import make_full_attention_net_mem_pool as make_full_attention_net_mem_pool
    from .factories import make_gdn_pool as make_gdn_pool
    from .factories import make_req_to_token_pool as make_req_to_token_pool
    from .factories import plan_pools as plan_pools
    from .gdn_pool import GDNPool as GDNPool
    from .gdn_pool import copy_states as copy_states
    from .kv_pool import KVPool as KVPool
    from .kv_pool import store_kv as store_kv
    from .radix_cache import RadixCache as RadixCache
    from .request_table import ReqToTokenPool as ReqToTokenPool
    from .slots import StateSlots as StateSlots
    from .spec import GDNSpec as GDNSpec
    from .spec import KVSpec as KVSpec
    from .token_allocator import TokenToKVPoolAllocator as TokenToKVPoolAllocator
    from .token_table import TokenTable as TokenTable

_HOME = {
    "ChunkCache": "chunk_cache",
    "GDNPool": "gdn_pool",
    "GDNSpec": "spec",
    "KVPool": "kv_pool",
    "KVSpec": "spec",
    "PoolCapacity": "factories",
    "RadixCache": "radix_cache",
    "ReqToTokenPool": "request_table",
    "StateSlots": "slots",
    "TokenTable": "token_table",
    "TokenToKVPoolAllocator": "token_allocator",
    "copy_states": "gdn_pool",
    "make_full_attention_net_mem_pool": "factories",
    "make_gdn_pool": "factories",
    "make_req_to_token_pool": "factories",
    "plan_pools": "factories",
    "store_kv": "kv_pool",
}

_FORMER = {  # names that were here, for one release: where they are now
    "page_digests": "digests.page_digests",
    "reset_states": "gdn_pool.reset_states",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    return former_name(__name__, _FORMER, name)


def __dir__() -> list[str]:
    return sorted(__all__)
