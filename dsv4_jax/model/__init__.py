"""The reference DeepSeek-V4 model over the cache: load or make parameters, prefill, decode, generate.

It is meant to be read: `attention.py` shows how model code uses the cache, `forward.py` how a
jitted step does, `draft_steps.py` how the MTP layer drafts and a step verifies.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ..former_names import former_name
from .attention import index_qat_default
from .draft_steps import draft_loop, draft_step
from .forward import GPU_DECODE_OPTIONS, decode_loop, decode_step, forward, prefill, sample_step, score_step
from .sampling import Sampled, Sampling, SamplingRows
from .uncached import forward_uncached
from .weights.initialisation import init_params
from .weights.loading import load_hf
from .weights.packing import pack_layers
from .weights.params import Params, param_specs, weight_bytes
from .weights.placement import device_bytes, shard_params
from .weights.saving import save_hf
from .weights.split import Split
from .weights.stacking import stack_projections

if TYPE_CHECKING:
    from ..engine.generate import generate as generate

__all__ = [
    "GPU_DECODE_OPTIONS",
    "Params",
    "Sampled",
    "Sampling",
    "SamplingRows",
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
    "pack_layers",
    "param_specs",
    "prefill",
    "sample_step",
    "save_hf",
    "score_step",
    "shard_params",
    "stack_projections",
    "weight_bytes",
]

_FORMER = {  # names that were here, for one release: where they are now
    "Drawn": "dsv4_jax.engine.generate.StepOutput",
    "Quantised": "weights.quantised.Quantised",
    "mtp_forward": "mtp.mtp_forward",
    "mtp_uncached": "uncached.mtp_uncached",
    "sample": "sampling.sample",
}


def __getattr__(name: str) -> Any:
    if name == "generate":  # which is a loop of the engine's, above this room, and has been a name of it
        return importlib.import_module("dsv4_jax.engine.generate").generate
    return former_name(__name__, _FORMER, name)
