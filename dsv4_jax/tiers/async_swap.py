"""Swaps as computations of their own, each with a `TransferHandle` for who needs to know when it has ended."""

from __future__ import annotations

import functools
import time

import jax
import jax.numpy as jnp

from ..cache import KVCache
from ..plan import StateSwapPlan, SwapPlan
from . import swap
from .host_cache import HostCache
from .record_copy import SwapImplementation
from .transfer_handle import TransferHandle

__all__ = ["restore_async", "snapshot_async", "swap_in_async", "swap_out_async"]


def swap_out_async(
    cache: KVCache, host: HostCache, plan: SwapPlan, *, implementation: SwapImplementation = None
) -> tuple[HostCache, TransferHandle]:
    """`swap.swap_out` as a computation of its own; `host` is donated. Raises as `swap_out`."""
    return _start("swap_out", cache, host, plan, implementation)


def swap_in_async(
    cache: KVCache, host: HostCache, plan: SwapPlan, *, implementation: SwapImplementation = None
) -> tuple[KVCache, TransferHandle]:
    """`swap.swap_in` as a computation of its own; `cache` is donated. Raises as `swap_in`."""
    return _start("swap_in", cache, host, plan, implementation)


def snapshot_async(
    cache: KVCache, host: HostCache, plan: StateSwapPlan, *, implementation: SwapImplementation = None
) -> tuple[HostCache, TransferHandle]:
    """`swap.snapshot` as a computation of its own; `host` is donated. Raises as `snapshot`."""
    return _start("snapshot", cache, host, plan, implementation)


def restore_async(
    cache: KVCache, host: HostCache, plan: StateSwapPlan, *, implementation: SwapImplementation = None
) -> tuple[KVCache, TransferHandle]:
    """`swap.restore` as a computation of its own; `cache` is donated. Raises as `restore`."""
    return _start("restore", cache, host, plan, implementation)


def _start(operation: str, cache, host, plan: SwapPlan | StateSwapPlan, implementation: SwapImplementation):
    started = time.monotonic()
    result, token = _compiled(operation)(cache, host, plan, implementation=implementation)
    return result, TransferHandle(token, started)


@functools.cache
def _compiled(operation: str):
    move = getattr(swap, operation)

    def run(cache: KVCache, host: HostCache, plan: SwapPlan | StateSwapPlan, implementation: SwapImplementation):
        # Outputs of one executable become ready together: any of them tells of the transfer.
        return move(cache, host, plan, implementation=implementation), jnp.sum(jnp.asarray(plan.device_ids))

    written = "host" if operation in ("swap_out", "snapshot") else "cache"
    return jax.jit(run, donate_argnames=written, static_argnames="implementation")
