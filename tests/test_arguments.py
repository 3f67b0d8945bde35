"""Arguments are checked with their names: of a layer's methods with its number, traced or not; ones of other kinds."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax import (
    AttentionType,
    CacheLayout,
    CacheSize,
    DSV4Config,
    Epilogue,
    KVCacheManager,
    cache_sharding,
    init_cache,
    init_host_cache,
    model,
    plan_capacity,
    rope_frequencies,
)
from dsv4_jax.errors import ConfigError, LayoutError, ShapeError, StepError
from dsv4_jax.manager import StepShape
from dsv4_jax.manager.planning import build_plan
from dsv4_jax.manager.step_shape import shape_for
from dsv4_jax.ops.arguments import Check

_, CSA, HCA = AttentionType
CFG = DSV4Config.tiny(layer_types=(CSA, HCA), num_attention_heads=2, index_n_heads=4)
LAYOUT = CacheLayout(CFG)
SIZE = CacheSize(4, 2, 2)
SHAPE = StepShape.bound(LAYOUT, 1, 1, columns=1)
T, D, DI = 2, CFG.head_dim, CFG.index_head_dim
FREQ = jnp.asarray(rope_frequencies(CFG, CSA))


def zeros(*shape: int, dtype: Any = np.float32) -> jax.Array:
    return jnp.zeros(shape, dtype)


def epilogue(dim: int, **changes: Any) -> Epilogue:
    return dataclasses.replace(Epilogue(zeros(dim), FREQ), **changes)


MAIN = dict(kv=zeros(T, 2 * D), score=zeros(T, 2 * D), epilogue=epilogue(D), ape=zeros(4, 2 * D))
INDEX = dict(kv=zeros(T, 2 * DI), score=zeros(T, 2 * DI), epilogue=epilogue(DI, hadamard=True), ape=zeros(4, 2 * DI))
SCORES = dict(queries=zeros(T, 4, DI), weights=zeros(T, 4))
ATTEND = dict(
    queries=zeros(T, 2, D),
    sink=zeros(2),
    selected=(zeros(T, 8, dtype=np.int32), zeros(T, dtype=np.int32)),
    inverse_rope=FREQ,
)


def layer():
    manager = KVCacheManager(LAYOUT, SIZE)
    plan = manager.plan_step([(manager.admit_request([1]), 1) for _ in range(T)])
    return init_cache(LAYOUT, SIZE).begin(plan).layer(0)


def written():
    return layer().append(zeros(T, D)).compress(**MAIN).compress_index(**INDEX)


CALLS: dict[str, Callable[..., Any]] = {
    "append": lambda **changed: layer().append(**(dict(kv=zeros(T, D)) | changed)).step,
    "compress": lambda **changed: layer().compress(**(MAIN | changed)).step,
    "compress_index": lambda **changed: layer().compress_index(**(INDEX | changed)).step,
    "queries": lambda **changed: layer().queries(**(dict(q=zeros(T, 2, D), inv_freq=FREQ) | changed)),
    "index_queries": lambda **changed: layer().index_queries(
        **(dict(q=zeros(T, 4, DI), inv_freq=FREQ, qat=True) | changed)
    ),
    "index_scores": lambda **changed: written().index_scores(**(SCORES | changed)),
    "top_k": lambda **changed: written().top_k(**(dict(scores=zeros(T, 64)) | changed)),
    "attend": lambda **changed: written().attend(**(ATTEND | changed)),
}
LONG = jnp.asarray(np.ones(CFG.rope_dim, np.float32))  # as many frequencies as there are dims: twice too many
WRONG = [
    ("append", dict(kv=zeros(T, D, dtype=np.int32)), r"kv is int32 \[2, 32\], expected float \[2, 32\]"),
    ("append", dict(kv=zeros(T + 1, D)), r"kv is float32 \[3, 32\], expected float \[2, 32\]"),
    ("append", dict(kv=[[0.0] * D] * T), r"kv is \[\["),
    ("append", dict(epilogue=FREQ), "epilogue is .* expected Epilogue"),
    ("append", dict(epilogue=epilogue(D + 1)), r"epilogue.norm is float32 \[33\], expected float32 \[32\]"),
    ("append", dict(epilogue=epilogue(D, inv_freq=LONG)), r"epilogue.inv_freq is float32 \[8\], expected"),
    ("compress", dict(epilogue=None), "epilogue is None, expected Epilogue"),
    ("compress", dict(kv=zeros(T, D)), r"kv is float32 \[2, 32\], expected float32 \[2, 64\]"),
    ("compress", dict(score=zeros(T, 2 * D, dtype=jnp.bfloat16)), r"score is bfloat16 \[2, 64\], expected float32"),
    ("compress", dict(ape=zeros(T, 2 * D)), r"ape is float32 \[2, 64\], expected float32 \[4, 64\]"),
    ("compress", dict(index=tuple(MAIN.values())), r"index kv is float32 \[2, 64\], expected float32 \[2, 32\]"),
    ("compress_index", dict(epilogue=epilogue(D)), r"index epilogue.norm is float32 \[32\], expected float32 \[16\]"),
    ("compress_index", dict(ape=INDEX["ape"].astype(jnp.int32)), r"index ape is int32"),
    ("queries", dict(q=zeros(T, 2 * D)), r"q is float32 \[2, 64\], expected float \[2, heads, 32\]"),
    ("queries", dict(inv_freq=LONG), r"inv_freq is float32 \[8\], expected float32 \[4\]"),
    ("index_queries", dict(q=zeros(T, 4, D)), r"q is float32 \[2, 4, 32\], expected float \[2, heads, 16\]"),
    ("index_queries", dict(inv_freq=FREQ[:-1]), r"inv_freq is float32 \[3\], expected float32 \[4\]"),
    ("index_scores", dict(queries=zeros(1, 4, DI)), r"queries is float32 \[1, 4, 16\], expected"),
    ("index_scores", dict(weights=zeros(T, 3)), r"weights is float32 \[2, 3\], expected float \[2, 4\]"),
    ("top_k", dict(scores=zeros(T, 64, dtype=np.int32)), r"scores is int32 \[2, 64\], expected float32"),
    ("attend", dict(queries=zeros(1, 2, D)), r"queries is float32 \[1, 2, 32\], expected float \[2, heads, 32\]"),
    ("attend", dict(sink=zeros(3)), r"sink is float32 \[3\], expected float32 \[2\]"),
    ("attend", dict(sink=zeros(2, dtype=jnp.bfloat16)), r"sink is bfloat16 \[2\], expected float32 \[2\]"),
    ("attend", dict(inverse_rope=LONG), r"inverse_rope is float32 \[8\], expected float32 \[4\]"),
    ("attend", dict(selected=zeros(T, 8, dtype=np.int32)), "selected is no pair"),
    ("attend", dict(selected=(zeros(T, 8), zeros(T, dtype=np.int32))), "selected entries is float32"),
    ("attend", dict(selected=(ATTEND["selected"][0], zeros(1, dtype=np.int32))), r"selected count is int32 \[1\]"),
]


@pytest.mark.every_case
@pytest.mark.parametrize(("method", "change", "problem"), WRONG, ids=lambda x: x if isinstance(x, str) else "")
def test_a_wrong_argument_is_named_with_its_layer(method: str, change: dict, problem: str) -> None:
    with pytest.raises(ShapeError, match=f"layer 0: {problem}"):
        jax.eval_shape(lambda: CALLS[method](**change))  # as in a traced step: nothing is computed


def test_what_is_right_passes() -> None:
    for call in CALLS.values():
        jax.eval_shape(call)
    # Any float type where no contract of bits asks for one; a share of the heads, as on a tensor axis.
    jax.eval_shape(lambda: CALLS["append"](kv=zeros(T, D, dtype=jnp.bfloat16)))
    jax.eval_shape(lambda: CALLS["attend"](queries=zeros(T, 1, D), sink=zeros(1)))


@pytest.mark.parametrize("method", CALLS)
def test_each_argument_is_checked_once(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the layer's method: ops get records of what was checked."""
    checked, check = [], Check.array

    def noted(self: Check, name: str, *rest: Any) -> Any:
        checked.append((self.op, name))
        return check(self, name, *rest)

    before = written()
    monkeypatch.setattr(Check, "array", noted)
    monkeypatch.setitem(globals(), "written", lambda: before)
    jax.eval_shape(lambda: CALLS[method]())  # a function of its own: what it traced before jax knows
    assert {op for op, _ in checked} == {"layer 0"}
    assert max(collections.Counter(checked).values()) == 1


SWAPPED: dict[str, tuple[Callable[[], Any], str]] = {
    "manager": (lambda: KVCacheManager(SIZE, LAYOUT), r"must be a CacheLayout, got CacheSize\("),
    "manager's size": (lambda: KVCacheManager(LAYOUT, LAYOUT), r"must be a CacheSize, got CacheLayout\("),
    "manager's arrays": (lambda: KVCacheManager(LAYOUT, SIZE, arrays=(6, 3, 2)), r"must be a CacheSize, got \(6, 3, 2"),
    "cache": (lambda: init_cache(SIZE, LAYOUT), r"must be a CacheLayout, got CacheSize\("),
    "cache's size": (lambda: init_cache(LAYOUT, CFG), r"must be a CacheSize, got DSV4Config\("),
    "host cache": (lambda: init_host_cache(4, LAYOUT), "must be a CacheLayout, got 4"),
    "sharding": (lambda: cache_sharding(None, LAYOUT), "must be a CacheLayout, got None"),
    "capacity": (lambda: plan_capacity(CFG, max_requests=1, max_context=8), "must be a CacheLayout, got DSV4Config"),
    "plan": (lambda: build_plan(SIZE, [(1, 0, 1)], SHAPE), "must be a CacheLayout, got CacheSize"),
    "plan's size": (
        lambda: build_plan(LAYOUT, [(1, 0, 1)], SHAPE, size=LAYOUT),
        "must be a CacheSize, got CacheLayout",
    ),
    "shape": (lambda: shape_for(SIZE, [(1, 0, 1)]), "must be a CacheLayout, got CacheSize"),
    "bound": (lambda: StepShape.bound(SIZE, 1, 1, columns=1), "must be a CacheLayout, got CacheSize"),
    "layout": (lambda: CacheLayout("fp8", CFG), "cfg must be a DSV4Config, got 'fp8'"),
}


@pytest.mark.parametrize("what", SWAPPED)
def test_arguments_of_another_kind(what: str) -> None:
    call, problem = SWAPPED[what]
    with pytest.raises(LayoutError, match=problem):
        call()


def test_parameters_of_a_layout() -> None:
    with pytest.raises(ConfigError, match=r"are those of a DSV4Config, got CacheLayout\("):
        model.init_params(LAYOUT)


@pytest.mark.parametrize(
    ("method", "name", "x"),
    [
        ("append", "kv", zeros(T, D)),
        ("append", "epilogue", epilogue(D)),
        ("compress", "score", MAIN["score"]),
        ("compress", "ape", MAIN["ape"]),
        ("compress_index", "kv", INDEX["kv"]),
        ("index_scores", "weights", SCORES["weights"]),
        ("attend", "queries", ATTEND["queries"]),
        ("attend", "sink", ATTEND["sink"]),
    ],
)
def test_what_goes_into_a_layer_has_no_gradient(method: str, name: str, x: Any) -> None:
    call = lambda x: CALLS[method](**{name: x})  # noqa: E731
    for differentiated in (lambda x: jax.jvp(call, (x,), (x,)), lambda x: jax.vjp(jax.jit(call), x)[0]):
        with pytest.raises(StepError, match="differentiate a forward without a cache"):
            jax.eval_shape(differentiated, x)
    jax.eval_shape(lambda x: jax.jvp(lambda x: call(jax.lax.stop_gradient(x)), (x,), (x,)), x)


def test_only_index_keys_are_rotated() -> None:
    """Queries of windows and entries are not, and no score of a rotated row would be right."""
    turned = epilogue(D, hadamard=True)
    for call, change in (("append", {}), ("compress", {}), ("compress", {"index": tuple(INDEX.values())})):
        with pytest.raises(StepError, match=r"layer 0: epilogue has hadamard=True, which is for index keys"):
            jax.eval_shape(lambda call=call, change=change: CALLS[call](epilogue=turned, **change))


def test_keys_and_queries_agree_on_the_rotation() -> None:
    """Or every score would be wrong, and nothing would say so."""
    q = dict(q=zeros(T, 4, DI), inv_freq=FREQ)
    for keys in (False, True):
        view = layer().compress_index(**(INDEX | dict(epilogue=epilogue(DI, hadamard=keys))))
        jax.eval_shape(lambda keys=keys, view=view: view.index_queries(**q, qat=keys))
        with pytest.raises(StepError, match=rf"layer 0: .*hadamard={keys}\), index_queries has qat={not keys}"):
            view.index_queries(**q, qat=not keys)


def test_queries_are_rotated_by_a_power_of_two() -> None:
    layout = CacheLayout(DSV4Config.tiny(layer_types=(CSA,), index_head_dim=24), index_format="bf16")
    plan = build_plan(layout, [(1, 0, T)], StepShape.bound(layout, 1, T, columns=1), size=SIZE)
    view = init_cache(layout, SIZE).begin(plan).layer(0)
    with pytest.raises(ShapeError, match=r"layer 0: q has 24 dims, a Hadamard rotation \(qat\) needs a power of two"):
        view.index_queries(zeros(T, 4, 24), FREQ, qat=True)
