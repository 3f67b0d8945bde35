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
    from .gdn_pool import GDNPool as GDNPool
    from .gdn_pool import copy_states as copy_states
    from .kv_pool import KVPool as KVPool
    from .radix_cache import RadixCache as RadixCache
    from .request_table import ReqToTokenPool as ReqToTokenPool
    from .slots import StateSlots as StateSlots
    from .spec import GDNSpec as GDNSpec
    from .spec import KVSpec as KVSpec
    from .token_allocator import TokenToKVPoolAllocator as TokenToKVPoolAllocator
    from .token_table import TokenTable as TokenTable

_HOME = {
    "GDNPool": "gdn_pool",
    "GDNSpec": "spec",
    "KVPool": "kv_pool",
    "KVSpec": "spec",
    "RadixCache": "radix_cache",
    "ReqToTokenPool": "request_table",
    "StateSlots": "slots",
    "TokenTable": "token_table",
    "TokenToKVPoolAllocator": "token_allocator",
    "copy_states": "gdn_pool",
}

_FORMER = {  # names that were here, for one release: where they are now
    "ChunkCache": "chunk_cache.ChunkCache",
    "PoolCapacity": "factories.PoolCapacity",
    "make_full_attention_net_mem_pool": "factories.make_full_attention_net_mem_pool",
    "make_gdn_pool": "factories.make_gdn_pool",
    "make_req_to_token_pool": "factories.make_req_to_token_pool",
    "page_digests": "digests.page_digests",
    "plan_pools": "factories.plan_pools",
    "reset_states": "gdn_pool.reset_states",
    "store_kv": "kv_pool.store_kv",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    return former_name(__name__, _FORMER, name)


def __dir__() -> list[str]:
    return sorted(__all__)
