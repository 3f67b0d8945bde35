"""The host side: decides which bytes go where and says so in plans. Imports no jax."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

from ..events import BlockEvent, EventBatch, EventLog, coalesce
from .allocator import BlockAllocator
from .handoff import Handoff
from .manager import KVCacheManager
from .metrics import ManagerStats, prometheus_text
from .planning import build_plan
from .policies import CachePolicy, HostWatermark, SnapshotPlacement, WritePolicy
from .prefix.hashing import BlockHasher, HashSpec, MediaItem, Namespace
from .prefix.node import Tier
from .remote_tier import Arrival, RemoteTier
from .request import Request, RequestState
from .step_shape import StepSequence, StepShape, shape_for
from .storage_tier import StorageMove, StorageTier
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
    "ManagerStats",
    "MediaItem",
    "Namespace",
    "RemoteTier",
    "Request",
    "RequestState",
    "SnapshotPlacement",
    "StepSequence",
    "StepShape",
    "StorageMove",
    "StorageTier",
    "Tier",
    "WritePolicy",
    "build_plan",
    "coalesce",
    "prometheus_text",
    "shape_for",
]

_FORMER = {  # names that were here, for one release: where they are now
    "BlockPool": "allocator.BlockAllocator",
    "RemoteRead": "remote_tier.RemoteRead",
    "RequestRef": "request.RequestRef",
    "TransferStage": "transfers.TransferStage",
}


def __getattr__(name: str) -> Any:
    if name in _FORMER:
        warnings.warn(f"{__name__}.{name} is {__name__}.{_FORMER[name]} now", DeprecationWarning, stacklevel=2)
        module, _, new = _FORMER[name].rpartition(".")
        return getattr(importlib.import_module(f".{module}", __name__), new)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
