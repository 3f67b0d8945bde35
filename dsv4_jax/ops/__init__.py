"""The cache operations, one file each: public function, `jnp` reference, dispatch.

The reference is the contract. Every function takes `implementation`: "xla" (the reference),
"pallas" (the GPU kernel of the same file name in `dsv4_jax.pallas`), or None to pick by platform.
"""

from .append import append, append_window, window_view
from .attend import attend
from .compress import compress_csa, compress_hca
from .copy import copy_units
from .gather import gather_rows
from .index_scores import index_scores
from .top_k import top_k

__all__ = [
    "append",
    "append_window",
    "attend",
    "compress_csa",
    "compress_hca",
    "copy_units",
    "gather_rows",
    "index_scores",
    "top_k",
    "window_view",
]
