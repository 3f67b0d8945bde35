"""The reference DeepSeek-V4 model over the cache: load or make parameters, prefill, decode, generate.

It is meant to be read: `attention.py` shows how model code uses the cache, `forward.py` how a
jitted step does. MTP layers are parsed and counted in the config; the model does not run them.
"""

from .attention import index_qat_default
from .checkpoint import load_hf
from .forward import GPU_DECODE_OPTIONS, decode_loop, decode_step, forward, prefill
from .generate import generate
from .initial import init_params
from .packing import pack_layers
from .params import Params, param_specs, weight_bytes
from .projections import stack_projections
from .quantised import Quantised
from .sampling import Sampling, sample
from .saving import save_hf
from .uncached import forward_uncached

__all__ = [
    "GPU_DECODE_OPTIONS",
    "Params",
    "Quantised",
    "Sampling",
    "decode_loop",
    "decode_step",
    "forward",
    "forward_uncached",
    "generate",
    "index_qat_default",
    "init_params",
    "load_hf",
    "pack_layers",
    "param_specs",
    "prefill",
    "sample",
    "save_hf",
    "stack_projections",
    "weight_bytes",
]
