"""The host pool's memory itself, for what is no computation: transports that read it and write to it."""

from __future__ import annotations

import ctypes

import numpy as np

from .host_cache import HostCache

__all__ = ["host_memory"]


def host_memory(host: HostCache) -> np.ndarray:
    """The pages [1 + n, page_bytes(layout)] uint8 of a host pool on one device, where they are. Waits for them.

    It keeps nothing alive: it is good while the pool is, which donation hands on in place, and its `ctypes.data` tells
    whether a later pool is still there. Whoever writes a page does so only while no computation reads or writes it: the
    runtime knows nothing of it.
    """
    pages = host.pages.block_until_ready()
    memory = (ctypes.c_uint8 * pages.nbytes).from_address(pages.unsafe_buffer_pointer())
    return np.ctypeslib.as_array(memory).reshape(pages.shape)
