"""The tiers behind the device cache: host memory (`host`, `swap`, `staging`, `transfer`) and block stores.

`records` and `planning` import no jax. The modules load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import async_store as async_store
    from . import host as host
    from . import kv_store as kv_store
    from . import planning as planning
    from . import records as records
    from . import slab as slab
    from . import stages as stages
    from . import staging as staging
    from . import storage as storage
    from . import store as store
    from . import swap as swap
    from . import transfer as transfer

__all__ = [
    "async_store",
    "host",
    "kv_store",
    "planning",
    "records",
    "slab",
    "stages",
    "staging",
    "storage",
    "store",
    "swap",
    "transfer",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
