"""The slab: one file of fixed-size slots on a local disk (`file`), its books in memory (`index`), both as a store."""

from .store import SlabStore

__all__ = ["SlabStore"]
