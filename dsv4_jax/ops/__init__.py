"""The cache operations, one file each: public function, `jnp` reference, dispatch.

The reference is the contract. Every function takes `implementation`: "xla" (the reference),
"pallas" (the GPU kernel of the same file name in `dsv4_jax.pallas`), or None to pick by platform.
Values to store, queries and weights may be `Columns` of a wider matrix.
"""

from ..plan import register_pytrees
from .append import WindowView, append, encode, window_rows, window_view
from .attend import attend
from .columns import Columns
from .compress import CompressorGeometry, CompressorInputs, compress_csa, compress_hca
from .copy import copy_units
from .epilogue import Epilogue
from .gather import gather_rows
from .index_scores import index_scores
from .queries import finish_queries
from .top_k import top_k

__all__ = [
    "Columns",
    "CompressorGeometry",
    "CompressorInputs",
    "Epilogue",
    "WindowView",
    "append",
    "attend",
    "compress_csa",
    "compress_hca",
    "copy_units",
    "encode",
    "finish_queries",
    "gather_rows",
    "index_scores",
    "top_k",
    "window_rows",
    "window_view",
]

register_pytrees()
