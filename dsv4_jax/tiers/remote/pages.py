"""`Pages`: the pages of a host pool by their ids, in the memories of one device or of each pool rank. No jax."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...plan import own_ids

__all__ = ["Pages"]


class Pages:
    """Rows of memory: `pages[i]` is page i, `len(pages)` counts the null page 0.

    Of n pool ranks rank r has pages r + 1, r + 1 + n, ..., each beside a null page of its own.

    Args:
        memories: of each rank, [1 + pages, page bytes] uint8; of one shape.

    Attributes:
        memories: as given.
        width: bytes of a page.
    """

    def __init__(self, memories: Sequence[np.ndarray]):
        self.memories = tuple(memories)
        self.width = self.memories[0].shape[1]

    def __len__(self) -> int:
        return 1 + len(self.memories) * (len(self.memories[0]) - 1)

    def __getitem__(self, page: int) -> np.ndarray:
        rank, own = own_ids(int(page), len(self.memories))
        return self.memories[rank][own]
