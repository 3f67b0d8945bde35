"""The cache operations, one file each: public function, argument record, `jnp` reference.

The reference is the contract. Every function takes `implementation`: a name, which runs or raises
`ImplementationError` ("xla", the reference; "pallas", "cuda" or "triton", the kernel of the same file name in
`dsv4_jax.pallas` and so on); names by op, such as {"attend": "pallas"}; or None, the first of the platform's that
takes the arguments (`registry`). "cuda" asks for the library, not for a GPU, so that a function can be lowered for
another machine's. With nothing to compute, such as no tokens, every implementation is the reference.
Values to store, queries and weights may be `Columns` of a wider matrix.
"""

from typing import Any

from ..former_names import former_name
from ..plan import register_pytrees
from .append import WindowView, append
from .attend import attend
from .columns import Columns
from .compress import CompressorGeometry, CompressorInputs, compress_csa, compress_hca
from .dense_bf16 import dense_bf16
from .dense_e4m3 import dense_e4m3
from .dense_fp8 import dense_fp8
from .entry_rows import entry_rows
from .epilogue import Epilogue
from .exchange import all_gather, all_to_all, sum_to_all, sum_to_owner
from .exchange_buffers import Exchange
from .gather import gather_rows
from .hyper_connection import hyper_connection
from .index_scores import index_scores
from .moe import moe
from .moe_e4m3 import moe_e4m3
from .normalise import normalise
from .numerics import hadamard, rms_norm, rope, rope_frequencies
from .queries import finish_queries
from .route import route
from .sample_tokens import sample_tokens
from .sequence import in_sequence
from .swiglu import swiglu
from .top_k import top_k

__all__ = [
    "Columns",
    "CompressorGeometry",
    "CompressorInputs",
    "Epilogue",
    "Exchange",
    "WindowView",
    "all_gather",
    "all_to_all",
    "append",
    "attend",
    "compress_csa",
    "compress_hca",
    "dense_bf16",
    "dense_e4m3",
    "dense_fp8",
    "entry_rows",
    "finish_queries",
    "gather_rows",
    "hadamard",
    "hyper_connection",
    "in_sequence",
    "index_scores",
    "moe",
    "moe_e4m3",
    "normalise",
    "rms_norm",
    "rope",
    "rope_frequencies",
    "route",
    "sample_tokens",
    "sum_to_all",
    "sum_to_owner",
    "swiglu",
    "top_k",
]

register_pytrees()

_FORMER = {  # names that were here, for one release: where they are now
    "Peers": "exchange.Peers",
    "Written": "hyper_connection.Written",
    "connection_vector": "hyper_connection.connection_vector",
    "copy_units": "copy.copy_units",
    "encode": "append.encode",
    "hyper_head": "hyper_connection.hyper_head",
    "inv_frequencies": "numerics.inv_frequencies",
    "open_exchanges": "exchange_buffers.open_exchanges",
    "window_rows": "append.window_rows",
    "window_view": "append.window_view",
}


def __getattr__(name: str) -> Any:
    return former_name(__name__, _FORMER, name)
