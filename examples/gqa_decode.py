"""A small GQA model, or a hybrid with linear-attention layers, decoding through `dsv4_jax.pools`.

    python examples/gqa_decode.py [--hybrid]

The host (allocator, request table, prefix cache) decides which slots are whose; one jitted step with the pools
donated does the rest. The run is checked against the same model without any cache.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax.pools import (
    GDNPool,
    GDNSpec,
    KVPool,
    KVSpec,
    RadixCache,
    ReqToTokenPool,
    StateSlots,
    TokenTable,
    TokenToKVPoolAllocator,
    copy_states,
)

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Config:
    """`layers` names each layer's kind: "attention" or "linear"."""

    layers: tuple[str, ...] = ("attention", "attention")
    vocab: int = 64
    dim: int = 32
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    linear_heads: int = 2
    k_dim: int = 8
    v_dim: int = 12
    conv_kernel: int = 4

    @property
    def conv_dim(self) -> int:
        return self.linear_heads * (2 * self.k_dim + self.v_dim)


GQA = Config()
HYBRID = Config(layers=("linear", "attention", "linear"))


def init_params(cfg: Config, seed: int = 0) -> Params:
    rng = np.random.default_rng(seed)

    def weight(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * shape[0] ** -0.5).astype(np.float32)

    layers = []
    for kind in cfg.layers:
        if kind == "attention":
            widths = {"q": cfg.heads * cfg.head_dim, "k": cfg.kv_heads * cfg.head_dim, "v": cfg.kv_heads * cfg.head_dim}
            out = cfg.heads * cfg.head_dim
        else:
            widths = {"qkv": cfg.conv_dim, "decay": cfg.linear_heads, "beta": cfg.linear_heads}
            out = cfg.linear_heads * cfg.v_dim
        layer = {name: weight(cfg.dim, width) for name, width in widths.items()} | {"out": weight(out, cfg.dim)}
        layers.append(layer if kind == "attention" else layer | {"conv": weight(cfg.conv_kernel, cfg.conv_dim).T})
    params = {"embed": weight(cfg.vocab, cfg.dim), "head": weight(cfg.dim, cfg.vocab), "layers": layers}
    return jax.tree.map(jnp.asarray, params)


# The model


def norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + np.float32(1e-6))


def rope(x: jax.Array, position: jax.Array) -> jax.Array:
    """Rotates [..., heads, dim] by position [...]."""
    half = x.shape[-1] // 2
    frequency = np.float32(100.0) ** -(np.arange(half, dtype=np.float32) / half)
    angle = jnp.multiply.outer(position.astype(jnp.float32), frequency)[..., None, :]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)], -1)


def project(cfg: Config, layer: Params, x: jax.Array, position: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """[T, dim] -> q [T, heads, head_dim], k and v [T, kv_heads, head_dim]."""
    q, k, v = ((x @ layer[n]).reshape(*x.shape[:-1], -1, cfg.head_dim) for n in "qkv")
    return rope(q, position), rope(k, position), v


def attend(q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array) -> jax.Array:
    """q [T, heads, d], k and v [T, keys, kv_heads, d], visible [T, keys] -> [T, heads * d]."""
    t, heads, dim = q.shape
    q = q.reshape(t, k.shape[2], -1, dim)
    scores = jnp.einsum("thgd,tkhd->thgk", q, k) * np.float32(dim**-0.5)
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, np.float32(-1e30)))
    return jnp.einsum("thgk,tkhd->thgd", weights, v).reshape(t, heads * dim)


def linear_step(
    cfg: Config, layer: Params, x: jax.Array, state: jax.Array, conv: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One token of each row through a gated delta net.

    Args:
        x: [B, dim].
        state: [B, heads, v_dim, k_dim].
        conv: [B, conv_dim, kernel - 1], the inputs before this one.

    Returns:
        (out [B, heads * v_dim], the new state, the new conv).
    """
    batch, heads = x.shape[0], cfg.linear_heads
    inputs = jnp.concatenate([conv, (x @ layer["qkv"])[:, :, None]], -1)
    mixed = jax.nn.silu((inputs * layer["conv"][None]).sum(-1)).reshape(batch, heads, -1)
    q, k, v = jnp.split(mixed, [cfg.k_dim, 2 * cfg.k_dim], -1)
    q, k = norm(q) * np.float32(cfg.k_dim**-0.5), norm(k) * np.float32(cfg.k_dim**-0.5)
    decay, beta = (jax.nn.sigmoid(x @ layer[n])[:, :, None, None] for n in ("decay", "beta"))
    state = decay * state
    error = v - jnp.einsum("bhvk,bhk->bhv", state, k)
    state = state + beta * error[..., None] * k[:, :, None]
    return jnp.einsum("bhvk,bhk->bhv", state, q).reshape(batch, -1), state, inputs[:, :, 1:]


def forward(cfg: Config, params: Params, tokens: jax.Array) -> jax.Array:
    """Logits [T, vocab] of one sequence, without any cache."""
    count = tokens.shape[0]
    position = jnp.arange(count)
    x = params["embed"][tokens]
    for kind, layer in zip(cfg.layers, params["layers"], strict=True):
        h = norm(x)
        if kind == "attention":
            q, k, v = project(cfg, layer, h, position)
            k, v = (jnp.broadcast_to(y, (count, *y.shape)) for y in (k, v))
            out = attend(q, k, v, position[None] <= position[:, None])
        else:

            def one(carry: Any, row: jax.Array, layer: Params = layer) -> tuple[Any, jax.Array]:
                out, *carry = linear_step(cfg, layer, row[None], *carry)
                return tuple(carry), out[0]

            shapes = (1, cfg.linear_heads, cfg.v_dim, cfg.k_dim), (1, cfg.conv_dim, cfg.conv_kernel - 1)
            _, out = jax.lax.scan(one, tuple(jnp.zeros(s) for s in shapes), h)
        x = x + out @ layer["out"]
    return norm(x) @ params["head"]


# The same through the pools


class Caches(NamedTuple):
    """What the step donates and returns. `states` is None without linear layers."""

    kv: KVPool
    table: TokenTable
    states: GDNPool | None


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def decode_step(
    cfg: Config, params: Params, caches: Caches, update: Any, slots: jax.Array, tokens: jax.Array
) -> tuple[jax.Array, Caches]:
    """One token of each request: logits [B, vocab] and the pools, updated in place.

    Args:
        update: what the host's table has changed: it lists this step's tokens already.
        slots: [B] request slots, 0 for idle rows.
        tokens: [B].
    """
    kv, table, states = caches.kv, caches.table.apply(update), caches.states
    ids, lengths = table.rows(slots, table.ids.shape[1])
    position = jnp.maximum(lengths - 1, 0)
    new = jnp.take_along_axis(ids, position[:, None], 1)[:, 0]
    visible = jnp.arange(ids.shape[1])[None] < lengths[:, None]
    x = params["embed"][tokens]
    for number, (kind, layer) in enumerate(zip(cfg.layers, params["layers"], strict=True)):
        h, ordinal = norm(x), cfg.layers[:number].count(kind)
        if kind == "attention":
            q, k, v = project(cfg, layer, h, position)
            kv = kv.set_kv_buffer(ordinal, new, k, v)
            keys, values, kv = kv.gather_kv(ordinal, ids, jnp.float32)
            out = attend(q, keys, values, visible)
        else:
            assert states is not None  # a model with such layers has a pool for them
            state, conv, states = states.get_states(ordinal, slots, position)
            out, state, conv = linear_step(cfg, layer, h, state, conv)
            states = states.set_states(ordinal, slots, state, conv)
        x = x + out @ layer["out"]
    return norm(x) @ params["head"], Caches(kv, table, states)


class Server:
    """The host's side: who holds which slots, and which prefixes are known.

    Args:
        tokens: KV slots.
        max_requests, max_context: of the request table.
        track_slots: state snapshots for prefix hits, if there are linear layers.
    """

    def __init__(
        self,
        cfg: Config,
        params: Params,
        *,
        tokens: int = 127,
        max_requests: int = 4,
        max_context: int = 32,
        track_slots: int = 4,
    ):
        self.cfg, self.params = cfg, params
        self.allocator = TokenToKVPoolAllocator(tokens)
        self.table = ReqToTokenPool(max_requests, max_context)
        kv = KVSpec(tokens, max(cfg.layers.count("attention"), 1), cfg.kv_heads, cfg.head_dim, storage="f32")
        states, self.track = None, None
        if linear := cfg.layers.count("linear"):
            spec = GDNSpec(
                max_requests,
                linear,
                cfg.linear_heads,
                cfg.k_dim,
                cfg.v_dim,
                cfg.conv_dim,
                cfg.conv_kernel,
                track_slots,
                conv_storage="f32",
            )
            states, self.track = GDNPool.init(spec), StateSlots(spec)
        self.caches = Caches(KVPool.init(kv), TokenTable.init(self.table), states)
        self.prefixes = RadixCache(self.allocator, states=self.track)
        self.hits: list[int] = []  # tokens found in the prefix cache, by request

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[tuple[list[int], np.ndarray]]:
        """Greedy decoding of prompts together: per prompt its new tokens and their logits [new_tokens, vocab]."""
        live = [self._admit(prompt, new_tokens) for prompt in prompts]
        while any(r.wants(new_tokens) for r in live):
            slots, fed = (np.zeros(self.table.max_requests, np.int32) for _ in range(2))
            for row, request in enumerate(live):
                if request.wants(new_tokens):
                    at = self.table.length(request.slot)
                    self.table.append(request.slot, request.ids[at : at + 1])
                    slots[row], fed[row] = request.slot, request.tokens[at]
            capacity = self.table.max_requests * self.table.max_context  # one shape for every step
            logits, self.caches = decode_step(
                self.cfg, self.params, self.caches, self.table.drain(capacity), slots, fed
            )
            logits = np.asarray(logits)
            for row, request in enumerate(live):
                if slots[row] and self.table.length(request.slot) == len(request.tokens):
                    request.logits.append(logits[row])
                    request.tokens.append(int(logits[row].argmax()))
        return [self._finish(request) for request in live]

    def _admit(self, prompt: list[int], new_tokens: int) -> Request:
        # One token at least is left to compute: its logits are the first that are wanted.
        hit = self.prefixes.match(prompt, limit=len(prompt) - 1)
        lock = self.prefixes.lock(hit.node)  # before anything that may evict
        self.hits.append(hit.length)
        (slot,) = self.table.alloc()
        needed = len(prompt) - hit.length + new_tokens
        if needed > self.allocator.available_size():
            self.prefixes.evict(needed - self.allocator.available_size())
        ids = np.concatenate([hit.ids, self.allocator.alloc(needed)])
        self.table.write(slot, 0, hit.ids)
        if hit.snapshot is not None and self.caches.states is not None:  # else the state at position 0 is empty
            states = copy_states(self.caches.states, [hit.snapshot], [slot])
            self.caches = self.caches._replace(states=states)
        return Request(list(prompt), slot, ids, lock, len(prompt), [])

    def _finish(self, request: Request) -> tuple[list[int], np.ndarray]:
        """Leaves the request's tokens to the prefix cache, with a snapshot of its state where they end."""
        ids = self.table.free(request.slot)
        snapshot = None
        if self.track is not None and self.caches.states is not None:
            if not self.track.num_free:
                self.prefixes.evict_snapshots(1)
            if self.track.num_free:
                snapshot = self.track.alloc_track_slot()
                self.caches = self.caches._replace(states=copy_states(self.caches.states, [request.slot], [snapshot]))
        done = self.prefixes.insert(request.tokens[: len(ids)], ids, snapshot=snapshot)
        if self.track is not None and snapshot is not None and not done.took_snapshot:
            self.track.free_track_slot(snapshot)
        self.allocator.free(np.concatenate([done.kept, request.ids[len(ids) :]]))
        self.prefixes.unlock(request.lock)
        return request.tokens[request.prompt :], np.stack(request.logits)


@dataclasses.dataclass
class Request:
    """A live request: its tokens so far, its request slot and, reserved ahead, its KV slots."""

    tokens: list[int]
    slot: int
    ids: np.ndarray
    lock: Any
    prompt: int
    logits: list[np.ndarray]

    def wants(self, new_tokens: int) -> bool:
        return len(self.logits) < new_tokens


def uncached(cfg: Config, params: Params, prompt: list[int], new_tokens: int) -> tuple[list[int], np.ndarray]:
    """What `Server.generate` must give: the whole sequence again for every token."""
    length = -(-(len(prompt) + new_tokens) // 32) * 32
    run = jax.jit(forward, static_argnums=0)
    tokens, logits = list(prompt), []
    for _ in range(new_tokens):
        # Tokens behind the last cannot change it: one shape for many lengths.
        out = run(cfg, params, jnp.asarray(tokens + [0] * (length - len(tokens))))
        logits.append(np.asarray(out[len(tokens) - 1]))
        tokens.append(int(logits[-1].argmax()))
    return tokens[len(prompt) :], np.stack(logits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hybrid", action="store_true", help="linear-attention layers among the GQA ones")
    cfg = HYBRID if parser.parse_args().hybrid else GQA
    params = init_params(cfg)
    server = Server(cfg, params)
    prompts, turns = [[1, 2, 3, 4, 5], [9, 8], [1, 2, 3, 7, 7, 7]], 2
    for turn in range(turns):
        answers = server.generate(prompts, 4)
        for prompt, (tokens, logits), hit in zip(prompts, answers, server.hits[-len(prompts) :], strict=True):
            expected, expected_logits = uncached(cfg, params, prompt, 4)
            same = tokens == expected and bool(np.allclose(logits, expected_logits, atol=1e-5))
            print(f"turn {turn}: {prompt} ({hit} cached) -> {tokens}  equal to the cache-free run: {same}")
        prompts = [prompt + tokens + [11, 12] for prompt, (tokens, _) in zip(prompts, answers, strict=True)]
    print(f"{server.allocator.available_size()} of {server.allocator.capacity} KV slots free,", end=" ")
    print(f"{server.prefixes.total_size} in the prefix cache, {server.caches.kv.mem_bytes} bytes of KV")


if __name__ == "__main__":
    main()
