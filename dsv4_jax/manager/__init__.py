"""The host side: decides which bytes go where and says so in plans. Imports no jax."""

from .allocator import BlockAllocator
from .manager import KVCacheManager
from .planning import RowFeed, StepShape, build_plan, shape_for
from .request import Request, RequestState
from .stats import ManagerStats

__all__ = [
    "BlockAllocator",
    "KVCacheManager",
    "ManagerStats",
    "Request",
    "RequestState",
    "RowFeed",
    "StepShape",
    "build_plan",
    "shape_for",
]
