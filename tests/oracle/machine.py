"""A DeepSeek-V4 cache as a plain state machine: one request, one token, one layer at a time.

Nothing is batched, chunked or donated. Each request keeps a window ring, the raw rows its
compressors may still need (or HCA's online softmax triple), and entries in pages that the machine
allocates itself, from the top of its own pool down.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from . import maths, rows


class ProjectedRows(NamedTuple):
    """Projected float32 rows of tokens, layers first: what a model would feed the cache.

    Scores hold their position bias already. A layer axis may be empty.
    """

    kv: np.ndarray  # [layers, N, d]
    csa_kv: np.ndarray  # [csa layers, N, 2d]
    csa_score: np.ndarray
    index_kv: np.ndarray  # [csa layers, N, 2di]
    index_score: np.ndarray
    hca_kv: np.ndarray  # [hca layers, N, d]
    hca_score: np.ndarray
    residual: np.ndarray  # [mtp layers, N, n * hidden]

    def tokens(self, index) -> ProjectedRows:
        return ProjectedRows(*(x[:, index] for x in self))


class Norms(NamedTuple):
    """Compressor norm weights, layers first."""

    csa: np.ndarray  # [csa layers, d]
    index: np.ndarray  # [csa layers, di]
    hca: np.ndarray  # [hca layers, d]


class Entry(NamedTuple):
    pool: str
    layer: int
    parts: tuple[np.ndarray, ...]


class Machine:
    """All requests of one cache. `block` tokens per page."""

    def __init__(self, cfg, kv_row, index_row, hca_state, block, norms: Norms, pages: int = 512):
        self.cfg, self.kv_row, self.index_row, self.hca_state = cfg, kv_row, index_row, hca_state
        self.block, self.norms = block, norms
        self.free = list(range(pages))
        self.pages: dict[tuple[str, int, int], list] = {}  # (pool, layer, page) -> entries
        self.requests: dict[int, _Request] = {}
        yarn = cfg.yarn
        self.inv_freq = maths.yarn_frequencies(
            cfg.rope_dim,
            cfg.compress_rope_theta,
            yarn.factor,
            yarn.original_max_position_embeddings,
            yarn.beta_fast,
            yarn.beta_slow,
        )

    def feed(self, key: int, token: ProjectedRows) -> None:
        """One token ([layers, width] rows) of request `key`."""
        request = self.requests.setdefault(key, _Request())
        t = request.length
        if t % self.block == 0:
            request.table.append(self.free.pop())
        parts = rows.encode(self.kv_row, token.kv)
        request.window[t] = parts
        request.window.pop(t - self.cfg.sliding_window, None)
        for layer in range(len(token.csa_kv)):
            self._csa(request, "csa", layer, token.csa_kv[layer], token.csa_score[layer])
            self._csa(request, "index", layer, token.index_kv[layer], token.index_score[layer])
        for layer in range(len(token.hca_kv)):
            self._hca(request, layer, token.hca_kv[layer], token.hca_score[layer])
        request.residual = token.residual
        request.length += 1

    def _csa(self, request: _Request, pool: str, layer: int, kv: np.ndarray, score: np.ndarray) -> None:
        m, t, e = self.cfg.csa_ratio, request.length, kv.size // 2
        ring = request.state.setdefault((pool, layer), {})
        ring[t] = (kv, score)
        if (t + 1) % m:
            return
        values, logits = [], []
        for p in range(t - 2 * m + 1, t + 1):
            half = slice(e, 2 * e) if p > t - m else slice(0, e)
            values.append(ring[p][0][half] if p >= 0 else np.zeros(e, np.float32))
            logits.append(ring[p][1][half] if p >= 0 else np.full(e, -np.inf, np.float32))
        norm = (self.norms.csa if pool == "csa" else self.norms.index)[layer]
        self._emit(request, pool, layer, _softmax_pool(values, logits), norm, m)
        for p in range(t - 2 * m + 1, t - m + 1):
            ring.pop(p, None)

    def _hca(self, request: _Request, layer: int, kv: np.ndarray, score: np.ndarray) -> None:
        r, t = self.cfg.hca_ratio, request.length
        state = request.state.setdefault(("hca", layer), {})
        if self.hca_state == "raw":
            state[t] = (kv, score)
            if (t + 1) % r == 0:
                order = range(t - r + 1, t + 1)
                pooled = _softmax_pool([state[p][0] for p in order], [state[p][1] for p in order])
        else:
            top, total, acc = state.get("triple", (np.float32(-np.inf), np.float32(0), np.float32(0)))
            new_top = np.maximum(top, score)
            decay, weight = np.split(maths.exp(np.concatenate([top - new_top, score - new_top])), 2)
            total = maths.mul(total, decay) + weight
            acc = maths.mul(acc, decay) + maths.mul(weight, kv)
            state["triple"] = (new_top, total, acc)
            pooled = acc / total
        if (t + 1) % r == 0:
            self._emit(request, "hca", layer, pooled, self.norms.hca[layer], r)
            state.clear()

    def _emit(self, request: _Request, pool: str, layer: int, pooled: np.ndarray, norm: np.ndarray, ratio: int) -> None:
        entry = request.length // ratio
        row = maths.rms_norm(pooled, norm, 1e-6)
        row = maths.rope(row, entry * ratio, self.inv_freq)
        index = pool == "index"
        parts = rows.encode(self.index_row, maths.hadamard(row)) if index else rows.encode(self.kv_row, row)
        page = self.pages.setdefault((pool, layer, request.table[-1]), [])
        assert len(page) == entry % (self.block // ratio)
        page.append(parts)

    def live(self, key: int, counts: dict[str, int]) -> dict[str, list[np.ndarray]]:
        """The canonical live view of a request (see `live.py`); `counts`: layers per kind."""
        request = self.requests[key]
        view: dict[str, list[np.ndarray]] = {}
        window = [request.window[p] for p in sorted(request.window)]
        view["swa"] = [np.stack(part, 1) for part in zip(*window, strict=True)]
        if len(request.residual):
            view["residual"] = [request.residual[:, None]]
        for pool, layers in counts.items():
            stored = []
            for layer in range(layers):
                entries = [e for page in request.table for e in self.pages.get((pool, layer, page), [])]
                stored.append([np.stack(part) for part in zip(*entries, strict=True)])
            view[pool] = [np.stack(part) for part in zip(*stored, strict=True)]
            state = [request.state[pool, layer] for layer in range(layers)]
            if pool == "hca" and self.hca_state == "online":
                flat = [[np.concatenate(s["triple"])] if s else [] for s in state]
            else:
                done = 0 if pool == "hca" else request.length // self.cfg.csa_ratio * self.cfg.csa_ratio
                flat = [[np.concatenate([_seen(x, p < done) for x in s[p]]) for p in sorted(s)] for s in state]
            view[f"{pool}_state"] = [np.array(flat, np.float32)]
        return view


class _Request:
    def __init__(self) -> None:
        self.length = 0
        self.table: list[int] = []
        self.window: dict[int, tuple[np.ndarray, ...]] = {}
        self.state: dict[tuple[str, int], dict] = {}
        self.residual = np.zeros((0, 0), np.float32)


def _seen(values: np.ndarray, finished: bool) -> np.ndarray:
    """What later entries take of a token's kv or scores: of a finished CSA entry's the first half, else zeros."""
    half = len(values) // 2
    return np.concatenate([values[:half], np.zeros_like(values[half:])]) if finished else values


def _softmax_pool(values: list[np.ndarray], logits: list[np.ndarray]) -> np.ndarray:
    logit = np.stack(logits)
    weights = maths.exp(logit - logit.max(0))
    return maths.tree_sum(maths.mul(weights, np.stack(values))) / maths.tree_sum(weights)
