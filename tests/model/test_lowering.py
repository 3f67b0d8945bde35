"""Every step of the model is traced and lowered for a GPU, where its kernels are joined (`ops.in_sequence`).

Each joined call is checked as it is traced: its kernels read what they read before, and none races with another.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from dsv4_jax import CacheLayout, ffi, init_cache, model, ops, shard_step
from dsv4_jax.layout import CacheSize
from dsv4_jax.manager.planning import build_plan
from dsv4_jax.manager.step_shape import StepSequence, shape_for
from dsv4_jax.model import SamplingRows
from dsv4_jax.model.mtp import mtp_forward
from dsv4_jax.model.weights.packing import PackedLayers
from dsv4_jax.model.weights.placement import device_specs
from dsv4_jax.model.weights.split import RowShare, Split
from dsv4_jax.ops.exchange import Peers
from dsv4_jax.plan import StepPlan
from dsv4_jax.sharding import stack_plans

from ..ops.ordering import checked
from .feeding import V4_WIDTHS
from .released import CFG

# As wide as V4 where kernels ask for it, hyper-connections among them.
WIDE = dataclasses.replace(
    CFG,
    **V4_WIDTHS,
    hidden_size=4096,
    moe_intermediate_size=256,
    hc_mult=4,
    n_routed_experts=16,
    o_lora_rank=128,
)
LAYOUT = CacheLayout(WIDE, include_drafts=True, draft_tokens=2)
SIZE = CacheSize(4, 2, 2)
REQUESTS, DRAFTS, STEPS = 2, 2, 2


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ffi, "cuda_problem", lambda op=None: None)
    monkeypatch.setattr(ffi, "cuda_target", lambda op, target: target)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(ops, "in_sequence", checked(ops.in_sequence))


def plan_of(tokens: int) -> StepPlan:
    """Of a step in which each request takes so many tokens."""
    rows = [StepSequence(slot + 1, 5, tokens) for slot in range(REQUESTS)]
    return build_plan(LAYOUT, rows, shape_for(LAYOUT, rows), size=SIZE)


TARGETS = np.zeros(5 * REQUESTS, np.int32)
ROWS = SamplingRows.of([model.Sampling(1.0, top_p=0.9, seed=1)] * REQUESTS)


def sample_step(*args: Any) -> Any:
    """With all that may be asked for."""
    *given, rows = args
    return model.sample_step(*given, sampling=rows, logprobs=True, top=2, routed_experts=True)


def score_step(*args: Any) -> Any:
    """In two blocks of rows."""
    return model.score_step(*args, rows=6, top=2, routed_experts=True)


# Step -> (tokens of each request in the plan, of which it is told, further arrays, static options).
Case = tuple[Callable[..., Any], int, int, list[Any], dict[str, Any]]
WANTED = np.full(REQUESTS, DRAFTS, np.int32)
CASES: dict[str, Case] = {
    "forward": (model.forward, 3, 3, [], {}),
    "prefill": (model.prefill, 5, 5, [], {}),
    "decode_step": (model.decode_step, 1, 1, [], {}),
    "decode_loop": (model.decode_loop, 1, 1, [], dict(num_steps=STEPS)),
    "sample_step": (sample_step, 5, 5, [ROWS], {}),
    "score_step": (score_step, 5, 5, [TARGETS], {}),
    "mtp_forward": (mtp_forward, 3, 3, [], {}),
    "draft_step": (model.draft_step, 1 + DRAFTS, 1 + DRAFTS, [WANTED], dict(width=DRAFTS)),
    "draft_loop": (model.draft_loop, 1 + DRAFTS, 1, [WANTED], dict(width=DRAFTS, num_steps=STEPS)),
}
cases = pytest.mark.parametrize("name", CASES)


def lowered(call: Any, params: Any, cache: Any, name: str, shards: int = 1) -> list[str]:
    """Targets of each call of several kernels."""
    _, planned, told, arrays, _ = CASES[name]
    plan, tokens = stack_plans([plan_of(planned)] * shards), np.zeros(shards * told * REQUESTS, np.int32)
    traced = call.trace(params, cache, plan, tokens, *(np.concatenate([array] * shards) for array in arrays))
    return re.findall(r'targets = "([^"]*)"', traced.lower(lowering_platforms=("cuda",)).as_text())


def chains(names: list[str], chain: str) -> int:
    return sum(len(re.findall(chain, joined)) for joined in names)


@cases
def test_lowers(name: str) -> None:
    """Every layer's attention goes on to the route of its experts within one call."""
    step, _, _, _, options = CASES[name]
    cache = jax.eval_shape(lambda: init_cache(LAYOUT, SIZE))
    call = jax.jit(functools.partial(step, **options), donate_argnums=1)
    names = lowered(call, device_specs(WIDE, drafts=True), cache, name)
    tail = "dsv4_hyper_connection;dsv4_hyper_mixing;dsv4_dense_bf16;dsv4_route"
    assert chains(names, f"dsv4_attend(;dsv4_dense_fp8){{2}};{tail}") >= WIDE.num_layers


@pytest.mark.parametrize("name", ["forward", "prefill", "decode_step", "score_step"])
def test_released_numerics_leave_no_sum_to_a_library(name: str) -> None:
    """Whose order could depend on the number of rows. Of a whole vocabulary, and of steps that are not joined."""
    step, planned, _, arrays, options = CASES[name]
    cfg = dataclasses.replace(WIDE, num_mtp_layers=0, vocab_size=129280)
    params, layout = model.param_specs(cfg, "released", numerics="released"), CacheLayout(cfg, numerics="released")
    for tokens in {planned, 200} if planned > 1 else {1}:
        rows = [StepSequence(slot + 1, 5, tokens) for slot in range(REQUESTS)]
        plan = build_plan(layout, rows, shape_for(layout, rows), size=SIZE)
        cache = jax.eval_shape(lambda: init_cache(layout, SIZE))
        given = plan, *(np.zeros(tokens * REQUESTS, np.int32) for _ in range(1 + len(arrays)))
        traced = jax.jit(functools.partial(step, **options)).trace(params, cache, *given)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert not re.findall(r"stablehlo\.(?:dot\w*|convolution|reduce_window)\b", text)
        assert not {"add", "multiply"} & set(re.findall(r"stablehlo\.reduce\(.*? applies stablehlo\.(\w+)", text))
        assert "bf16_streams = true" in text and "bf16_streams = false" not in text


@cases
def test_lowers_over_devices(name: str) -> None:
    """Two data shards, in each of which two devices share the heads: their exchanges stand between calls."""
    step, _, _, _, options = CASES[name]
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), kinds, devices=jax.devices("cpu")[:4])

    def of_all(node: Any, parts: int = 1) -> Any:
        """Of a part of a device's parameters, that of all devices."""
        if isinstance(node, RowShare):
            return dataclasses.replace(node, rows=of_all(node.rows, 2))
        if isinstance(node, PackedLayers):
            axes = (("tensor", 2), ("data", 2))
            return dataclasses.replace(node, arrays=of_all(node.arrays, 4), axes=axes)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((parts * x.shape[0], *x.shape[1:]), x.dtype), node)

    params = device_specs(WIDE, split=Split(2, 2), drafts=True)
    cache = of_all(jax.eval_shape(lambda: init_cache(LAYOUT, SIZE)), 2)
    peers = [Peers(i, (axis,), 2, 8 << 20, 4) for i, axis in enumerate(("data", "tensor"))]
    call = shard_step(step, mesh, peers=peers, out_axis=int("loop" in name), **options)
    names = lowered(call, {key: of_all(node) for key, node in params.items()}, cache, name, 2)
    assert chains(names, "dsv4_attend;dsv4_dense_fp8") >= WIDE.num_layers
    assert not chains(names, "exchange")
