"""The host side: decides which bytes go where and says so in plans. Imports no jax."""

from __future__ import annotations

from typing import Any

from ..events import BlockEvent, EventBatch, EventLog, coalesce
from ..former_names import former_name
from .allocator import BlockAllocator
from .handoff import Handoff
from .manager import KVCacheManager
from .metrics import ManagerStats, prometheus_text
from .policies import CachePolicy, HostWatermark, LeaseShares, NamespaceShares, SnapshotPlacement, WritePolicy
from .prefix.hashing import BlockHasher, HashSpec, MediaItem, Namespace
from .prefix.node import Tier
from .remote_tier import Arrival
from .request import Request
from .step_shape import StepShape
from .tiered_cache import HostSize

__all__ = [
    "Arrival",
    "BlockAllocator",
    "BlockEvent",
    "BlockHasher",
    "CachePolicy",
    "EventBatch",
    "EventLog",
    "Handoff",
    "HashSpec",
    "HostSize",
    "HostWatermark",
    "KVCacheManager",
    "LeaseShares",
    "ManagerStats",
    "MediaItem",
    "Namespace",
    "NamespaceShares",
    "Request",
    "SnapshotPlacement",
    "StepShape",
    "Tier",
    "WritePolicy",
    "coalesce",
    "prometheus_text",
]

_FORMER = {  # names that were here, for one release: where they are now
    "BlockPool": "allocator.BlockAllocator",
    "RemoteRead": "remote_tier.RemoteRead",
    "RemoteTier": "remote_tier.RemoteTier",
    "RequestRef": "request.RequestRef",
    "RequestState": "request.RequestState",
    "StepSequence": "step_shape.StepSequence",
    "StorageMove": "storage_tier.StorageMove",
    "StorageTier": "storage_tier.StorageTier",
    "TransferStage": "transfers.TransferStage",
    "build_plan": "planning.build_plan",
    "shape_for": "step_shape.shape_for",
}


def __getattr__(name: str) -> Any:
    return former_name(__name__, _FORMER, name)
