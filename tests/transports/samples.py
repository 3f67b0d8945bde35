"""What the tests of transports share with the processes that they start: a layout, pools of known bytes, engines."""

from __future__ import annotations

import numpy as np

from dsv4_jax.config import DSV4Config
from dsv4_jax.layout import CacheLayout
from dsv4_jax.records import page_bytes
from dsv4_jax.tiers.remote import RecordTransport
from dsv4_jax.transports import open_engine

__all__ = ["LAYOUT", "PAGES", "open_transport", "pool"]

LAYOUT = CacheLayout(DSV4Config.tiny())
PAGES = 40


def pool(seed: int | None = None, layout: CacheLayout = LAYOUT, pages: int = PAGES) -> np.ndarray:
    """Pages of random bytes, all of them others than another seed's; None: zeros. Page 0 is zeros."""
    shape = (1 + pages, page_bytes(layout))
    data = np.zeros(shape, np.uint8)
    if seed is not None:
        data[1:] = np.random.default_rng(seed).integers(0, 256, (pages, shape[1]), np.uint8)
    return data


def open_transport(engine: str, **options: float) -> RecordTransport:
    return RecordTransport(open_engine(engine), **options)
