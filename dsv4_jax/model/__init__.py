"""The reference DeepSeek-V4 model over the cache: load or make parameters, prefill, decode, generate.

It is meant to be read: `attention.py` shows how model code uses the cache, `forward.py` how a
jitted step does, `draft_steps.py` how the MTP layer drafts and a step verifies.
"""

from .attention import index_qat_default
from .draft_steps import draft_loop, draft_step
from .forward import GPU_DECODE_OPTIONS, decode_loop, decode_step, forward, prefill
from .generate import Drawn, generate
from .mtp import mtp_forward
from .sampling import Sampling, sample
from .uncached import forward_uncached, mtp_uncached
from .weights.initialisation import init_params
from .weights.loading import load_hf
from .weights.packing import pack_layers
from .weights.params import Params, param_specs, weight_bytes
from .weights.placement import device_bytes, shard_params
from .weights.quantised import Quantised
from .weights.saving import save_hf
from .weights.split import Split
from .weights.stacking import stack_projections

__all__ = [
    "GPU_DECODE_OPTIONS",
    "Drawn",
    "Params",
    "Quantised",
    "Sampling",
    "Split",
    "decode_loop",
    "decode_step",
    "device_bytes",
    "draft_loop",
    "draft_step",
    "forward",
    "forward_uncached",
    "generate",
    "index_qat_default",
    "init_params",
    "load_hf",
    "mtp_forward",
    "mtp_uncached",
    "pack_layers",
    "param_specs",
    "prefill",
    "sample",
    "save_hf",
    "shard_params",
    "stack_projections",
    "weight_bytes",
]
