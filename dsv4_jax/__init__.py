"""dsv4_jax: the KV cache of DeepSeek-V4 for JAX, with the decode path that uses it.

Names load on first use, so that `import dsv4_jax.manager` (a scheduler process) imports no jax.

Docstrings cite pages as "docs/model.md": they are in the repository, and in `share/doc/dsv4_jax` of the environment
(`sys.prefix`) into which the package was installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .former_names import former_name
from .version import __version__

if TYPE_CHECKING:
    from . import model as model
    from . import pools as pools
    from . import records as records
    from . import stores as stores
    from . import testing as testing
    from . import text as text
    from .cache import KVCache as KVCache
    from .cache import init_cache as init_cache
    from .capacity import plan_capacity as plan_capacity
    from .capacity import plan_host_capacity as plan_host_capacity
    from .config import AttentionType as AttentionType
    from .config import DSV4Config as DSV4Config
    from .config import LayerSpec as LayerSpec
    from .config import build_schedule as build_schedule
    from .engine import Engine as Engine
    from .engine import Prompt as Prompt
    from .layout import CacheLayout as CacheLayout
    from .layout import CacheSize as CacheSize
    from .manager import BlockAllocator as BlockAllocator
    from .manager import CachePolicy as CachePolicy
    from .manager import KVCacheManager as KVCacheManager
    from .ops import Columns as Columns
    from .ops import Epilogue as Epilogue
    from .ops import rope_frequencies as rope_frequencies
    from .plan import PackedPlan as PackedPlan
    from .plan import StepPlan as StepPlan
    from .schema import build_schema as build_schema
    from .sharding import cache_sharding as cache_sharding
    from .sharding import shard_step as shard_step
    from .sharding import stack_plans as stack_plans
    from .step import CacheStep as CacheStep
    from .step import LayerCacheHandle as LayerCacheHandle
    from .tiers.host_cache import HostCache as HostCache
    from .tiers.host_cache import init_host_cache as init_host_cache
    from .tiers.swap import swap_in as swap_in
    from .tiers.swap import swap_out as swap_out
    from .tiers.transfers import run_transfers as run_transfers
    from .tiers.transfers import stack_transfers as stack_transfers

_HOME = {
    "AttentionType": "config",
    "DSV4Config": "config",
    "LayerSpec": "config",
    "build_schedule": "config",
    "Engine": "engine",
    "Prompt": "engine",
    "CacheLayout": "layout",
    "CacheSize": "layout",
    "build_schema": "schema",
    "BlockAllocator": "manager",
    "CachePolicy": "manager",
    "KVCacheManager": "manager",
    "Columns": "ops",
    "Epilogue": "ops",
    "rope_frequencies": "ops",
    "PackedPlan": "plan",
    "StepPlan": "plan",
    "KVCache": "cache",
    "init_cache": "cache",
    "CacheStep": "step",
    "LayerCacheHandle": "step",
    "plan_capacity": "capacity",
    "plan_host_capacity": "capacity",
    "cache_sharding": "sharding",
    "shard_step": "sharding",
    "stack_plans": "sharding",
    "HostCache": "tiers.host_cache",
    "init_host_cache": "tiers.host_cache",
    "swap_in": "tiers.swap",
    "swap_out": "tiers.swap",
    "run_transfers": "tiers.transfers",
    "stack_transfers": "tiers.transfers",
}
_FORMER = {  # names that were here, for one release: where they are now
    "StateSwapPlan": "plan.StateSwapPlan",
    "SwapPlan": "plan.SwapPlan",
    "plan_state_swap": "tiers.swap_plan.plan_state_swap",
    "plan_swap": "tiers.swap_plan.plan_swap",
    "restore": "tiers.swap.restore",
    "snapshot": "tiers.swap.snapshot",
}
_SUBMODULES = ("engine", "errors", "manager", "model", "ops", "pools", "records", "stores", "testing", "text", "tiers")

__all__ = ["__version__", *_HOME, *_SUBMODULES]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    if name in _SUBMODULES:
        return importlib.import_module(f".{name}", __name__)
    return former_name(__name__, _FORMER, name)


def __dir__() -> list[str]:
    return sorted(__all__)
