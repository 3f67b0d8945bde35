"""The host side: decides which bytes go where and says so in plans. Imports no jax."""

from .allocator import BlockAllocator
from .block_pool import BlockPool
from .handoff import Handoff
from .manager import KVCacheManager
from .metrics import ManagerStats, prometheus_text
from .planning import build_plan
from .policies import CachePolicy, HostWatermark, SnapshotPlacement, WritePolicy
from .prefix.events import BlockEvent, EventBatch, EventLog, coalesce
from .prefix.hashing import BlockHasher, HashSpec, MediaItem, Namespace
from .prefix.node import Tier
from .remote_tier import Arrival, RemoteRead, RemoteTier
from .request import Request, RequestRef, RequestState
from .step_shape import StepSequence, StepShape, shape_for
from .storage_tier import StorageMove, StorageTier
from .tiered_cache import HostSize
from .transfers import TransferStage

__all__ = [
    "Arrival",
    "BlockAllocator",
    "BlockEvent",
    "BlockHasher",
    "BlockPool",
    "CachePolicy",
    "EventBatch",
    "EventLog",
    "Handoff",
    "HashSpec",
    "HostSize",
    "HostWatermark",
    "KVCacheManager",
    "ManagerStats",
    "MediaItem",
    "Namespace",
    "RemoteRead",
    "RemoteTier",
    "Request",
    "RequestRef",
    "RequestState",
    "SnapshotPlacement",
    "StepSequence",
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
