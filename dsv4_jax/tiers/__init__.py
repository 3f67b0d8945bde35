"""The tiers behind the device cache: host memory, and what takes records on to stores and back.

| | |
| --- | --- |
| `host_cache` | `HostCache`: the host's records, pinned, part of the functional state |
| `swap_plan` | `plan_swap`, `plan_state_swap`: which units and records, checked |
| `swap` | `swap_out`, `swap_in`, `snapshot`, `restore`: inside a step |
| `async_swap`, `transfer_handle` | the same as computations of their own, with a handle |
| `overlapped_swap` | the same in two halves, hidden behind a step's compute |
| `transfers` | `run_transfers`: all that the manager wants moved before a step |
| `storage_driver` | `StorageDriver`: host records to and from stores, beside the steps |
| `remote` | `RecordTransport`, `RemoteDriver`: records and prompts of other machines; no jax |

`HostCache`, `run_transfers` and `stack_transfers` are names of `dsv4_jax`. `host_memory` (the memory of a `HostCache`,
for transports), `cache_units`, `record_copy`, `host_records` and `store_calls` are what these are made of. The modules
load on first use; `swap_plan` imports no jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import async_swap as async_swap
    from . import overlapped_swap as overlapped_swap
    from . import remote as remote
    from . import storage_driver as storage_driver
    from . import swap as swap
    from . import swap_plan as swap_plan

__all__ = [
    "async_swap",
    "overlapped_swap",
    "remote",
    "storage_driver",
    "swap",
    "swap_plan",
]


def __getattr__(name: str) -> Any:
    if name in (*__all__, "host_cache", "transfer_handle", "transfers"):
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
