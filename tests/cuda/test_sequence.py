"""Steps whose kernels are a few calls, against the same steps with a call each: same bits on a GPU."""

from __future__ import annotations

import dataclasses
from unittest import mock

import jax
import numpy as np
import pytest

from dsv4_jax import model, ops
from dsv4_jax.bench.step import StepOptions, cache_and_plan, random_cache
from dsv4_jax.config import DSV4Config
from dsv4_jax.model.forward import GPU_DECODE_OPTIONS


@pytest.mark.gpu
@pytest.mark.parametrize("commands", [True, False], ids=["command buffer", "streams"])
def test_joined_kernels_give_the_bits_of_calls_of_their_own(commands: bool) -> None:
    """Two SWA, one CSA and one HCA layer; ten steps each, so that what one leaves to the next is compared, too."""
    cfg = dataclasses.replace(DSV4Config.flash(), n_routed_experts=32)
    cfg = dataclasses.replace(cfg, layer_types=cfg.layer_types[:4])
    params = model.init_params(cfg, 0, "released", packed=True)
    options = dict(GPU_DECODE_OPTIONS) if commands else {"xla_gpu_enable_command_buffer": ""}
    for batch in (1, 16, 64) if commands else (2,):
        layout, size, plan = cache_and_plan(cfg, StepOptions("flash", batch, 4096, layers=4))
        tokens = np.random.default_rng(batch).integers(cfg.vocab_size, size=batch).astype(np.int32)
        found = []
        for joined in (True, False):
            cache = random_cache(layout, size, jax.random.key(batch))
            with mock.patch.object(ops, "in_sequence", ops.in_sequence if joined else lambda function, **_: function):
                # A function of its own, for jax keeps the trace of one that it knows.
                step = jax.jit(lambda *given: model.decode_step(*given), donate_argnums=1, compiler_options=options)
                step = step.lower(params, cache, plan, tokens).compile()
            assert ("dsv4_sequence" in step.as_text()) is joined
            for _ in range(10 if commands else 2):
                logits, cache = step(params, cache, plan, tokens)
            found.append([np.asarray(logits), *(np.asarray(x) for x in jax.tree.leaves(cache))])
        for one, other in zip(*found, strict=True):
            np.testing.assert_array_equal(one, other)
