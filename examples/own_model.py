"""A model of one's own on this cache, three times: in plain JAX, in flax NNX and in Equinox.

A tiny decoder with the three kinds of attention of DeepSeek-V4, its own weights and its own MLP. What the cache asks of
a model is `attention`: it is the same for all three, because it takes products and small parameters, not modules.

    python examples/own_model.py            # on one device
    python examples/own_model.py --mesh     # requests over all devices, on a mesh with an explicit axis

Needs the `frameworks` extra (`pip install 'dsv4_jax[frameworks]'`). docs/model.md has the formulas.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import dsv4_jax as dsv4
from dsv4_jax.manager import StepShape

SWA, CSA, HCA = dsv4.AttentionType
# The cache reads the shapes of its rows, windows and ratios; `hidden_size` and `vocab_size` are this model's own.
CFG = dsv4.DSV4Config.tiny(
    layer_types=(SWA, CSA, HCA),
    hidden_size=48,
    vocab_size=64,
    num_attention_heads=2,
    index_n_heads=4,
    index_topk=4,
    sliding_window=12,
    hca_ratio=8,
    max_position_embeddings=256,
)
LAYOUT = dsv4.CacheLayout(CFG, block_tokens=8)
SIZE = dsv4.CacheSize(num_blocks=32, num_slots=4, max_blocks_per_request=8, num_snapshots=4)
Params = dict[str, Any]
D, DI, HIDDEN = CFG.head_dim, CFG.index_head_dim, CFG.hidden_size


def products_of(attn: dsv4.AttentionType) -> dict[str, int]:
    """Matrices that multiply a layer's input, and their widths. CSA: a half for the next entry, one for its own."""
    entries = {SWA: {}, CSA: {"entry_kv": 2 * D, "entry_score": 2 * D}, HCA: {"entry_kv": D, "entry_score": D}}[attn]
    index = {"index_kv": 2 * DI, "index_score": 2 * DI, "index_q": CFG.index_n_heads * DI, "index_w": CFG.index_n_heads}
    return {"q": CFG.num_attention_heads * D, "kv": D} | entries | (index if attn is CSA else {})


def small_of(attn: dsv4.AttentionType) -> dict[str, tuple[int, ...]]:
    """The parameters that the cache takes as they are: norms, position biases and the sink."""
    shapes: dict[str, tuple[int, ...]] = {"kv_norm": (D,), "sink": (CFG.num_attention_heads,)}
    if attn is not SWA:
        shapes |= {"entry_norm": (D,), "entry_ape": (CFG.ratio(attn), D * (1 + (attn is CSA)))}
    return shapes | ({"index_norm": (DI,), "index_ape": (CFG.csa_ratio, 2 * DI)} if attn is CSA else {})


def attention(
    layer: dsv4.LayerCacheHandle, made: dict[str, jax.Array], small: dict[str, jax.Array]
) -> tuple[jax.Array, dsv4.CacheStep]:
    """One layer: ([T, heads * head_dim], the step with its writes).

    Args:
        made: the layer's input times the matrices of `products_of`, [T, width] float32 each.
        small: the parameters of `small_of`.
    """
    attn, tokens = layer.spec.attn, layer.plan.num_tokens
    freq = jnp.asarray(dsv4.rope_frequencies(CFG, attn))
    qat = dsv4.model.index_qat_default(LAYOUT)  # keys and queries of the index alike
    layer, selected = layer.append(made["kv"], dsv4.Epilogue(small["kv_norm"], freq)), None
    if attn is not SWA:
        main = made["entry_kv"], made["entry_score"], dsv4.Epilogue(small["entry_norm"], freq)
        index = None
        if attn is CSA:
            norm = dsv4.Epilogue(small["index_norm"], freq, hadamard=qat)
            index = made["index_kv"], made["index_score"], norm, small["index_ape"]
        layer = layer.compress(*main, index, ape=small["entry_ape"])
    if attn is CSA:
        q = layer.index_queries(made["index_q"].reshape(tokens, -1, DI), freq, qat=qat)
        selected = layer.top_k(layer.index_scores(q, made["index_w"], scale=(DI * CFG.index_n_heads) ** -0.5))
    q = layer.queries(made["q"].reshape(tokens, -1, D), freq)
    out, _ = layer.attend(q, small["sink"], selected, inverse_rope=freq)
    return out.reshape(tokens, -1), layer.step


def norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + np.float32(1e-6)) * weight[None]


def draw(seed: int = 0) -> Params:
    """Random weights, as NumPy arrays: matrices are [in, out]. The three models hold the same ones."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (rng.standard_normal(shape) * scale).astype(np.float32)

    def layer(attn: dsv4.AttentionType) -> Params:
        wide = CFG.num_attention_heads * D
        matrices = products_of(attn) | {"up": 2 * HIDDEN}
        return {
            "matrices": {name: normal(HIDDEN, width, scale=HIDDEN**-0.5) for name, width in matrices.items()}
            | {"out": normal(wide, HIDDEN, scale=wide**-0.5), "down": normal(2 * HIDDEN, HIDDEN, scale=0.1)},
            "small": {name: normal(*s) + np.float32("norm" in name) for name, s in small_of(attn).items()},
            "norms": np.ones((2, HIDDEN), np.float32),
        }

    return {
        "embed": normal(CFG.vocab_size, HIDDEN),
        "head": normal(HIDDEN, CFG.vocab_size),
        "layers": [layer(attn) for attn in CFG.layer_types],
    }


# Plain JAX: parameters are a pytree, the model is a function.


def plain_step(params: Params, cache: dsv4.KVCache, plan: Any, tokens: jax.Array) -> tuple[jax.Array, dsv4.KVCache]:
    """Logits [T, vocab] of every token of a step."""
    step, x = cache.begin(plan), params["embed"][tokens]
    for i, p in enumerate(params["layers"]):
        matrix, h = p["matrices"], norm(x, p["norms"][0])
        made = {name: h @ matrix[name] for name in products_of(CFG.layer_types[i])}
        y, step = attention(step.layer(i), made, p["small"])
        x = x + y @ matrix["out"]
        x = x + jax.nn.silu(norm(x, p["norms"][1]) @ matrix["up"]) @ matrix["down"]
    return x @ params["head"], step.finish()


def plain(weights: Params) -> tuple[Callable, Any]:
    """Returns (step, params) of this framework."""
    return plain_step, jax.tree.map(jnp.asarray, weights)


# flax NNX: modules hold parameters; their state is what a step takes.


class NnxLayer(nnx.Module):
    def __init__(self, weights: Params, attn: dsv4.AttentionType):
        self.attn = attn
        self.matrices = nnx.Dict({name: self.linear(w) for name, w in weights["matrices"].items()})
        self.small = nnx.Dict({name: nnx.Param(jnp.asarray(w)) for name, w in weights["small"].items()})
        self.norms = nnx.Param(jnp.asarray(weights["norms"]))

    @staticmethod
    def linear(weight: np.ndarray) -> nnx.Linear:
        return nnx.Linear(*weight.shape, use_bias=False, rngs=nnx.Rngs(0), kernel_init=lambda *_: jnp.asarray(weight))

    def __call__(self, x: jax.Array, layer: dsv4.LayerCacheHandle) -> tuple[jax.Array, dsv4.CacheStep]:
        h = norm(x, self.norms[0])
        made = {name: self.matrices[name](h) for name in products_of(self.attn)}
        y, step = attention(layer, made, {name: param[...] for name, param in self.small.items()})
        x = x + self.matrices["out"](y)
        return x + self.matrices["down"](jax.nn.silu(self.matrices["up"](norm(x, self.norms[1])))), step


class NnxModel(nnx.Module):
    def __init__(self, weights: Params):
        self.embed, self.head = (nnx.Param(jnp.asarray(weights[name])) for name in ("embed", "head"))
        pairs = zip(weights["layers"], CFG.layer_types, strict=True)
        self.layers = nnx.List([NnxLayer(w, attn) for w, attn in pairs])

    def __call__(self, cache: dsv4.KVCache, plan: Any, tokens: jax.Array) -> tuple[jax.Array, dsv4.KVCache]:
        step, x = cache.begin(plan), self.embed[tokens]
        for i, layer in enumerate(self.layers):
            x, step = layer(x, step.layer(i))
        return x @ self.head[...], step.finish()


def flax_nnx(weights: Params) -> tuple[Callable, Any]:
    """Returns (step, params) of this framework."""
    graph, state = nnx.split(NnxModel(weights))
    return lambda state, cache, plan, tokens: nnx.merge(graph, state)(cache, plan, tokens), state


# Equinox: a module is a pytree, and so it is the parameters.


class EqxLayer(eqx.Module):
    matrices: dict[str, eqx.nn.Linear]
    small: dict[str, jax.Array]
    norms: jax.Array
    attn: dsv4.AttentionType = eqx.field(static=True)

    def __init__(self, weights: Params, attn: dsv4.AttentionType):
        self.matrices = {name: self.linear(w) for name, w in weights["matrices"].items()}
        self.small = {name: jnp.asarray(w) for name, w in weights["small"].items()}
        self.norms, self.attn = jnp.asarray(weights["norms"]), attn

    @staticmethod
    def linear(weight: np.ndarray) -> eqx.nn.Linear:
        empty = eqx.nn.Linear(*weight.shape, use_bias=False, key=jax.random.key(0))
        return eqx.tree_at(lambda linear: linear.weight, empty, jnp.asarray(weight.T))

    def __call__(self, x: jax.Array, layer: dsv4.LayerCacheHandle) -> tuple[jax.Array, dsv4.CacheStep]:
        matrix = {name: jax.vmap(linear) for name, linear in self.matrices.items()}
        h = norm(x, self.norms[0])
        y, step = attention(layer, {name: matrix[name](h) for name in products_of(self.attn)}, self.small)
        x = x + matrix["out"](y)
        return x + matrix["down"](jax.nn.silu(matrix["up"](norm(x, self.norms[1])))), step


class EqxModel(eqx.Module):
    embed: jax.Array
    head: jax.Array
    layers: list[EqxLayer]

    def __init__(self, weights: Params):
        self.embed, self.head = (jnp.asarray(weights[name]) for name in ("embed", "head"))
        self.layers = [EqxLayer(w, attn) for w, attn in zip(weights["layers"], CFG.layer_types, strict=True)]

    def __call__(self, cache: dsv4.KVCache, plan: Any, tokens: jax.Array) -> tuple[jax.Array, dsv4.KVCache]:
        step, x = cache.begin(plan), self.embed[tokens]
        for i, layer in enumerate(self.layers):
            x, step = layer(x, step.layer(i))
        return x @ self.head, step.finish()


def equinox(weights: Params) -> tuple[Callable, Any]:
    """Returns (step, params) of this framework."""
    return lambda model, cache, plan, tokens: model(cache, plan, tokens), EqxModel(weights)


MODELS: dict[str, Callable[[Params], tuple[Callable, Any]]] = {
    "plain JAX": plain,
    "flax NNX": flax_nnx,
    "Equinox": equinox,
}


# Serving: one manager for each shard of the cache; without a mesh there is one.


def generate(step: Callable, params: Any, prompts: list[list[int]], new: int, mesh: Mesh | None = None):
    """Greedy answers to all prompts at once, in chunks of 16 tokens, and the cache they left: (answers, cache)."""
    shards = 1 if mesh is None else mesh.shape["data"]
    placement = None if mesh is None else NamedSharding(mesh, PartitionSpec("data"))
    cache = dsv4.init_cache(LAYOUT, SIZE, sharding=placement)
    run: Callable = jax.jit(step, donate_argnums=1) if mesh is None else dsv4.shard_step(step, mesh)
    managers = [dsv4.KVCacheManager(LAYOUT, SIZE) for _ in range(shards)]
    shape = StepShape.bound(LAYOUT, SIZE.num_slots, 16, columns=SIZE.max_blocks_per_request, history=True)
    requests = [managers[i % shards].admit_request(prompt) for i, prompt in enumerate(prompts)]
    goals = {request: len(prompt) + new for request, prompt in zip(requests, prompts, strict=True)}
    while any(request.num_pending for request in requests):
        scheduled = [manager.schedule(token_budget=16, shape=shape) for manager in managers]
        plans = [manager.plan_step(some, shape=shape) for manager, some in zip(managers, scheduled, strict=True)]
        tokens = np.concatenate([m.plan_tokens(plan) for m, plan in zip(managers, plans, strict=True)])
        logits, cache = run(params, cache, dsv4.stack_plans(plans), tokens)
        best = np.asarray(logits.argmax(-1)).reshape(shards, -1)
        for shard, (plan, some) in enumerate(zip(plans, scheduled, strict=True)):
            for seq, (request, count) in enumerate(some):
                if not request.num_pending and len(request.tokens) < goals[request]:
                    request.tokens.append(int(best[shard, plan.seq_first[seq] + count - 1]))
    return [request.tokens[len(prompt) :] for request, prompt in zip(requests, prompts, strict=True)], cache


def explicit_mesh() -> Mesh:
    """All devices along one axis whose shardings are part of the types."""
    return jax.make_mesh((len(jax.devices()),), ("data",), axis_types=(AxisType.Explicit,))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", action="store_true", help="requests over all devices")
    mesh = explicit_mesh() if parser.parse_args(argv).mesh else None
    prompts = [[1, 2, 3, 4, 5], [9, 8], list(range(30))]
    weights = draw()
    for name, build in MODELS.items():
        step, params = build(weights)
        answers, _ = generate(step, params, prompts, 8, mesh)
        print(f"{name:9} {answers}")


if __name__ == "__main__":
    main()
