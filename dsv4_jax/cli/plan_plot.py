"""The picture of a plan: requests that fit at once, over the context of each."""

from __future__ import annotations

import pathlib
from typing import Any

from ..capacity import Capacity, capacity
from ..errors import CapacityError
from ..plotting import COLOURS, binary, figure, legends_above, model_title, plain_log, save, style, token_ticks

__all__ = ["draw", "picture"]


def draw(answer: Capacity, model: str, memory: str, path: pathlib.Path, **snapshots: Any) -> None:
    """Writes the picture of a plan.

    Args:
        memory: of the cache, in words.
        snapshots: as `capacity` took them.

    Raises:
        OutputError: the file cannot be written (see `output.check_picture`).
    """
    save(picture(answer, model, memory, **snapshots), path)


def picture(answer: Capacity, model: str, memory: str, **snapshots: Any) -> Any:
    """The `matplotlib.figure.Figure`: every number is written at its point, this plan's is marked."""
    contexts, fits = _fits(answer, **snapshots)
    layout = answer.layout
    with style():
        detail = (
            f"{layout.kv_row.name} rows, {layout.index_row.name} index keys, blocks of {layout.block_tokens} tokens"
        )
        made = figure(f"{model_title(model)}: what fits in {memory} of cache", detail, 4.6)
        axes = made.subplots()
        axes.plot(contexts, fits, "o-", color=COLOURS[0], clip_on=False)
        plan = f"this plan: {answer.full_requests:,} requests of {binary(answer.max_context)} tokens"
        axes.plot(
            answer.max_context, answer.full_requests, "D", color=COLOURS[1], markersize=8, clip_on=False, label=plan
        )
        axes.set(xscale="log", yscale="log", xlabel="context of each request, tokens", ylabel="requests at once")
        for context, fit in zip(contexts, fits, strict=True):
            if context != answer.max_context:
                axes.annotate(f"{fit:,}", (context, fit), (0, 6), textcoords="offset points", fontsize=8.5)
        token_ticks(axes.xaxis, contexts, most=14)
        low, high = min(*fits, answer.full_requests), max(*fits, answer.full_requests)
        plain_log(axes.yaxis, low, high)
        axes.set(ylim=(low / 1.5, high * 1.8), title="Requests of each context that fit at once")
        legends_above([axes], 800)
    return made


def _fits(answer: Capacity, **snapshots: Any) -> tuple[list[int], list[int]]:
    """Contexts, each twice the one before, and how many requests of each fit."""
    layout, weights = answer.layout, answer.weight_bytes
    memory = answer.hbm_bytes or answer.total_bytes + weights
    contexts, fits = [], []
    context = layout.block_tokens
    while context <= layout.cfg.max_position_embeddings:
        try:
            fits.append(
                capacity(
                    layout, hbm_bytes=memory, max_context=context, weight_bytes=answer.weight_bytes, **snapshots
                ).max_requests
            )
        except CapacityError:
            break
        contexts.append(context)
        context *= 2
    return contexts, fits
