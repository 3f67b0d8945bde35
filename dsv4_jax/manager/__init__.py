"""The host side: decides which bytes go where and says so in plans. Imports no jax."""

from .allocator import BlockAllocator
from .block_pool import BlockPool
from .manager import KVCacheManager
from .metrics import prometheus_text
from .planning import RowFeed, StepShape, build_plan, shape_for
from .policies import CachePolicy, HostWatermark, SnapshotPlacement, WritePolicy
from .prefix.events import EventLog
from .prefix.hashing import MediaItem, Namespace
from .request import Request, RequestRef, RequestState
from .stats import ManagerStats
from .tiered_cache import HostSize
from .transfers import TransferStage

__all__ = [
    "BlockAllocator",
    "BlockPool",
    "CachePolicy",
    "EventLog",
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
    "TransferStage",
    "WritePolicy",
    "build_plan",
    "prometheus_text",
    "shape_for",
]
