"""DSpark's three stages in NumPy's float64: written from their definition, knows no cache.

Its state is what the definition says: three rings of window rows of the tokens that were fed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from dsv4_jax import DSV4Config

__all__ = ["Drafted", "Twin"]

Tree = Mapping[str, Any]


@dataclasses.dataclass
class Drafted:
    """What a block says: drafts, the logits that each was drawn from, and how sure the head was of each."""

    drafts: list[int]
    logits: np.ndarray
    confidence: list[float]


def rms(x: np.ndarray, weight: np.ndarray | None, eps: float) -> np.ndarray:
    y = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    return y if weight is None else y * weight


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def turned(x: np.ndarray, position: np.ndarray, dims: int, theta: float, back: bool = False) -> np.ndarray:
    """Adjacent pairs of the last dims as complex numbers, times e^(i angle); positions are of axis 0."""
    angle = position[:, None] * theta ** (-np.arange(0, dims, 2) / dims) * (-1 if back else 1)
    while angle.ndim < x.ndim:
        angle = angle[:, None]
    pairs = (x[..., -dims::2] + 1j * x[..., -dims + 1 :: 2]) * np.exp(1j * angle)
    out = x.copy()
    out[..., -dims::2], out[..., -dims + 1 :: 2] = pairs.real, pairs.imag
    return out


def fp8(x: np.ndarray, group: int = 64) -> np.ndarray:
    """To e4m3 with a power-of-two scale per group, and back."""
    v = x.reshape(*x.shape[:-1], -1, group)
    scale = 2.0 ** np.ceil(np.log2(np.maximum(np.abs(v).max(-1, keepdims=True), 1e-4) / 448))
    codes = np.clip(v / scale, -448, 448).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    return (codes.astype(np.float64) * scale).reshape(x.shape)


class Twin:
    """The stages of a model with float32 parameters, and the rings of one request.

    Args:
        params: as `init_params` gives them.
        rounds: rows as the 584-byte format stores them; else as they are.
    """

    def __init__(self, cfg: DSV4Config, params: Tree, *, drafts: int, rounds: bool = False):
        self.cfg, self.rounds = cfg, rounds
        wide = lambda tree: {  # noqa: E731
            name: wide(x) if isinstance(x, Mapping) else np.asarray(x, np.float64) for name, x in tree.items()
        }
        self.stages = [wide(stage) for stage in params["mtp"]]
        self.embed, self.head = (np.asarray(params[name], np.float64) for name in ("embed", "head"))
        self.ring = cfg.sliding_window + drafts
        self.rings = [np.full((self.ring, cfg.head_dim), np.nan) for _ in self.stages]

    def row(self, p: Tree, x: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Window rows of what `wkv` is given: of the backbone's vector, or of a block's input."""
        cfg = self.cfg
        row = turned(rms(x @ p["wkv"].T, p["kv_norm"], cfg.rms_norm_eps), position, cfg.rope_dim, cfg.rope_theta)
        if not self.rounds:
            return row
        rope = row[..., cfg.nope_dim :].astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
        return np.concatenate([fp8(row[..., : cfg.nope_dim]), rope], -1)

    def commit(self, heard: np.ndarray, first: int) -> None:
        """Takes tokens from position `first` on: [T, layers heard * hidden]."""
        p, position = self.stages[0], np.arange(first, first + len(heard))
        x = rms(heard @ p["main_proj"].T, p["main_norm"], self.cfg.rms_norm_eps)
        for stage, ring in zip(self.stages, self.rings, strict=True):
            for t, row in zip(position, self.row(stage["attn"], x, position), strict=True):
                ring[t % self.ring] = row

    def draft(
        self,
        fed: int,
        anchor: int,
        pick: Callable[[int, np.ndarray], int] = lambda k, x: int(x.argmax()),
        since: int = 0,
    ) -> Drafted:
        """Runs a block after so many tokens fed; window rows before position `since` are not there."""
        cfg = self.cfg
        spark = cfg.dspark
        assert spark is not None
        rows, eps, last = spark.block_size, cfg.rms_norm_eps, self.stages[-1]
        ids = [anchor] + [spark.noise_token_id] * (rows - 1)
        position, seen = np.arange(fed, fed + rows), np.arange(max(0, fed - cfg.sliding_window, since), fed)
        streams = np.repeat(self.embed[ids][:, None], cfg.hc_mult, 1)
        for stage, ring in zip(self.stages, self.rings, strict=True):
            for site, norm in (("hc_attn", "attn_norm"), ("hc_ffn", "ffn_norm")):
                pre, post, comb = self.mixes(stage[site], streams)
                x = rms(np.einsum("tn,tnd->td", pre, streams), stage[norm], eps)
                if site == "hc_attn":
                    y = self.attend(stage["attn"], x, position, ring[seen % self.ring])
                else:
                    y = self.experts(stage["ffn"], x)
                streams = post[..., None] * y[:, None] + np.einsum("tij,tid->tjd", comb, streams)
        of = last["hc_head"]
        flat = rms(streams.reshape(rows, -1), None, eps)
        h = np.einsum("tn,tnd->td", sigmoid(flat @ of["fn"].T * of["scale"] + of["base"]) + cfg.hc_eps, streams)
        logits, token, drafts, sure = rms(h, last["norm"], eps) @ self.head.T, anchor, [], []
        for k in range(rows):
            pair = last["markov"]["w1"][token]
            logits[k] += last["markov"]["w2"] @ pair
            sure.append(float(sigmoid(np.concatenate([h[k], pair]) @ last["confidence"][0])))
            token = pick(k, logits[k])
            drafts.append(token)
        return Drafted(drafts, logits, sure)

    def attend(self, p: Tree, x: np.ndarray, position: np.ndarray, window: np.ndarray) -> np.ndarray:
        cfg, heads = self.cfg, self.cfg.num_attention_heads
        eps, rope = cfg.rms_norm_eps, (cfg.rope_dim, cfg.rope_theta)
        q = (rms(x @ p["wq_a"].T, p["q_norm"], eps) @ p["wq_b"].T).reshape(len(x), heads, cfg.head_dim)
        q = turned(rms(q, None, eps), position, *rope)
        keys = np.concatenate([window, self.row(p, x, position)])
        z = np.einsum("bhd,kd->bhk", q, keys) * cfg.head_dim**-0.5
        z = np.concatenate([z, np.broadcast_to(p["attn_sink"][:, None], (len(x), heads, 1))], -1)
        weights = np.exp(z - z.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out = turned(np.einsum("bhk,kd->bhd", weights[..., :-1], keys), position, *rope, back=True)
        out = out.reshape(len(x), cfg.o_groups, -1)
        latent = np.einsum("bgi,gri->bgr", out, p["wo_a"].reshape(cfg.o_groups, -1, out.shape[-1]))
        return latent.reshape(len(x), -1) @ p["wo_b"].T

    def mixes(self, p: Tree, streams: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        cfg, n = self.cfg, self.cfg.hc_mult
        mix = rms(streams.reshape(len(streams), -1), None, cfg.rms_norm_eps) @ p["fn"].T
        pre, post, comb = np.split(mix, [n, 2 * n], -1)
        bases = np.split(p["base"], [n, 2 * n])
        pre, post, comb = (x * s + b for x, s, b in zip((pre, post, comb), p["scale"], bases, strict=True))
        comb = comb.reshape(-1, n, n)
        comb = np.exp(comb - comb.max(-1, keepdims=True))
        comb = comb / comb.sum(-1, keepdims=True) + cfg.hc_eps
        comb = comb / (comb.sum(-2, keepdims=True) + cfg.hc_eps)
        for _ in range(cfg.hc_sinkhorn_iters - 1):
            comb = comb / (comb.sum(-1, keepdims=True) + cfg.hc_eps)
            comb = comb / (comb.sum(-2, keepdims=True) + cfg.hc_eps)
        return sigmoid(pre) + cfg.hc_eps, 2 * sigmoid(post), comb

    def experts(self, p: Tree, x: np.ndarray) -> np.ndarray:
        cfg = self.cfg
        scores = np.sqrt(np.log1p(np.exp(x @ p["gate"].T)))
        best = np.argsort(-(scores + p["gate_bias"]), -1, kind="stable")[:, : cfg.num_experts_per_tok]

        def expert(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
            gate, up = np.minimum(gate @ x, cfg.swiglu_limit), np.clip(up @ x, -cfg.swiglu_limit, cfg.swiglu_limit)
            return down @ (gate * sigmoid(gate) * up)

        out = np.stack([expert(row, *(p["shared"][name] for name in ("gate", "up", "down"))) for row in x])
        for t, chosen in enumerate(best):
            share = scores[t, chosen] / scores[t, chosen].sum() * cfg.routed_scaling_factor
            for e, weight in zip(chosen, share, strict=True):
                gate, up = np.split(p["experts"]["gate_up"][e], 2)
                out[t] += weight * expert(x[t], gate, up, p["experts"]["down"][e])
        return out
