"""The equalities this package lives by, for models, steps and kernels of one's own.

    runner = testing.StepRunner(step, params, layout)       # step(params, cache, plan, tokens) -> (logits, cache)
    testing.assert_chunking_invariant(runner, tokens)       # the same bits however the tokens are cut into steps
    testing.assert_batch_invariant(runner, prompts)         # the same bits alone and among others
    testing.assert_serving_invariant(runner, mixes=20)      # the same bits after prefix hits, preemption, forks, ...
    testing.assert_no_copies(step, params, cache, plan, tokens, donate_argnums=1)
    step = jax.jit(testing.assert_one_trace(step), donate_argnums=1)

All raise `AssertionError` with what differs and where. Equal bits are asked of one executable: a runner compiles the
step once and uses it for everything. `assert_same_cache` compares two requests of any caches.

Most failures have one of three causes: a position, a norm or a mask that is taken from the place in the step instead of
the plan (`plan.token_position`); something that mixes the tokens of a step (a mean, a capacity, a sort); or products
whose bits depend on how many rows they have. The first two are bugs; the last is the compiler's, and the padded,
pinned shape of a runner keeps it out.
"""

from typing import Any

from ..former_names import former_name
from .compiled import assert_no_copies, assert_one_trace
from .invariance import assert_batch_invariant, assert_chunking_invariant
from .live import assert_same_cache
from .runner import StepRunner
from .serving import assert_serving_invariant

__all__ = [
    "StepRunner",
    "assert_batch_invariant",
    "assert_chunking_invariant",
    "assert_no_copies",
    "assert_one_trace",
    "assert_same_cache",
    "assert_serving_invariant",
]

_FORMER = {  # names that were here, for one release: where they are now
    "Cold": "runner.Cold",
    "Held": "live.Held",
    "Mix": "mixes.Mix",
    "Mixes": "serving.Mixes",
    "assert_same_bytes": "live.assert_same_bytes",
    "assert_same_logits": "invariance.assert_same_logits",
    "assert_untouched": "live.assert_untouched",
    "chunkings": "invariance.chunkings",
    "live_bytes": "live.live_bytes",
    "pool_copies": "compiled.pool_copies",
    "with_garbage": "runner.with_garbage",
}


def __getattr__(name: str) -> Any:
    return former_name(__name__, _FORMER, name)
