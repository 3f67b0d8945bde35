"""The cache operations, one file each: public function, argument record, `jnp` reference.

The reference is the contract. Every function takes `implementation`: a name, which runs or raises
`ImplementationError` ("xla", the reference; "pallas", "cuda" or "triton", the kernel of the same file name in
`dsv4_jax.pallas` and so on); names by op, such as {"attend": "pallas"}; or None, the first of the platform's that
takes the arguments (`registry`). "cuda" asks for the library, not for a GPU, so that a function can be lowered for
another machine's. With nothing to compute, such as no tokens, every implementation is the reference.
Values to store, queries and weights may be `Columns` of a wider matrix.
"""

from ..plan import register_pytrees
from .append import WindowView, append, encode, window_rows, window_view
from .attend import attend
from .columns import Columns
from .compress import CompressorGeometry, CompressorInputs, compress_csa, compress_hca
from .copy import copy_units
from .dense_bf16 import dense_bf16
from .dense_fp8 import dense_fp8
from .entry_rows import entry_rows
from .epilogue import Epilogue
from .exchange import Peers, all_gather, sum_to_all, sum_to_owner
from .exchange_buffers import Exchange, open_exchanges
from .gather import gather_rows
from .hyper_connection import Written, connection_vector, hyper_connection, hyper_head
from .index_scores import index_scores
from .moe import moe
from .normalise import normalise
from .numerics import hadamard, inv_frequencies, rms_norm, rope, rope_frequencies
from .queries import finish_queries
from .route import route
from .sequence import in_sequence
from .swiglu import swiglu
from .top_k import top_k

__all__ = [
    "Columns",
    "CompressorGeometry",
    "CompressorInputs",
    "Epilogue",
    "Exchange",
    "Peers",
    "WindowView",
    "Written",
    "all_gather",
    "append",
    "attend",
    "compress_csa",
    "compress_hca",
    "connection_vector",
    "copy_units",
    "dense_bf16",
    "dense_fp8",
    "encode",
    "entry_rows",
    "finish_queries",
    "gather_rows",
    "hadamard",
    "hyper_connection",
    "hyper_head",
    "in_sequence",
    "index_scores",
    "inv_frequencies",
    "moe",
    "normalise",
    "open_exchanges",
    "rms_norm",
    "rope",
    "rope_frequencies",
    "route",
    "sum_to_all",
    "sum_to_owner",
    "swiglu",
    "top_k",
    "window_rows",
    "window_view",
]

register_pytrees()
