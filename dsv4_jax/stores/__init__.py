"""Stores: records in, records out. A file, a bucket or memory under one contract, `RecordStore`; no jax, no device.

A store knows nothing of caches: records are bytes of one length, keys are digests. What a record holds says
`dsv4_jax.records`; who moves records between host memory and a store is `dsv4_jax.tiers`.
"""

from .async_store import AsyncStore
from .base import RecordStore, StoreStats
from .mooncake_store import MooncakeStore
from .object_store import ObjectStore
from .slab import SlabStore

__all__ = ["AsyncStore", "MooncakeStore", "ObjectStore", "RecordStore", "SlabStore", "StoreStats"]
