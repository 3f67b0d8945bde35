"""The host side: decides which bytes go where and says so in plans. Imports no jax."""

from .allocator import BlockAllocator
from .block_pool import BlockPool
from .manager import KVCacheManager
from .metrics import prometheus_text
from .planning import RowFeed, StepShape, build_plan, shape_for
from .policies import CachePolicy, HostWatermark, SnapshotPlacement, WritePolicy
from .prefix.events import BlockEvent, EventBatch, EventLog, coalesce
from .prefix.hashing import BlockHasher, HashSpec, MediaItem, Namespace
from .prefix.node import Tier
from .request import Request, RequestRef, RequestState
from .stats import ManagerStats
from .storage_tier import StorageMove, StorageTier
from .tiered_cache import HostSize
from .transfers import TransferStage

__all__ = [
    "BlockAllocator",
    "BlockEvent",
    "BlockHasher",
    "BlockPool",
    "CachePolicy",
    "EventBatch",
    "EventLog",
    "HashSpec",
    "HostSize",
    "HostWatermark",
    "KVCacheManager",
    "ManagerStats",
    "MediaItem",
    "Namespace",
    "Request",
    "RequestRef",
    "RequestState",
    "RowFeed",
    "SnapshotPlacement",
    "StepShape",
    "StorageMove",
    "StorageTier",
    "Tier",
    "TransferStage",
    "WritePolicy",
    "build_plan",
    "coalesce",
    "prometheus_text",
    "shape_for",
]
