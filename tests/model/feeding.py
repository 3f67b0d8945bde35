"""Feeds one request through the cache in any chunks, as a caller with no manager would."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Iterable

import jax
import numpy as np

from dsv4_jax import AttentionType, CacheLayout, DSV4Config, init_cache, model
from dsv4_jax.layout import CacheSize
from dsv4_jax.manager import StepShape
from dsv4_jax.manager.planning import build_plan
from dsv4_jax.manager.step_shape import StepSequence

forward = jax.jit(model.forward, donate_argnames="cache", static_argnames=("index_qat", "implementation"))
prefill = jax.jit(model.prefill, donate_argnames="cache")
decode_step = jax.jit(model.decode_step, donate_argnames="cache", static_argnames=("index_qat", "implementation"))
uncached = jax.jit(model.forward_uncached, static_argnums=0)

SWA, CSA, HCA = AttentionType
CFG = DSV4Config.tiny(layer_types=(SWA, CSA, HCA), sliding_window=13)  # what tests of the model share
# Of attention as V4 has it, so that every kernel takes part; and of steps that compile in no time.
V4_WIDTHS = dict(
    head_dim=512,
    rope_dim=64,
    index_head_dim=128,
    index_n_heads=64,
    num_attention_heads=64,
    sliding_window=128,
    hca_ratio=128,
)
SMALL_WIDTHS = dict(
    vocab_size=32,
    hidden_size=32,
    num_attention_heads=2,
    q_lora_rank=16,
    o_lora_rank=8,
    sliding_window=6,
    index_n_heads=2,
    index_topk=3,
    hca_ratio=8,
    moe_intermediate_size=16,
)

TEXT = (
    "A cache is a promise about the past: what was computed once need not be computed again, provided that it can "
    "be found, that it is whole, and that nobody wrote over it. The window keeps the last few words as they were "
    "said. The compressed entries keep the sense of the rest, four words to a line, or a page to a line, and an "
    "index says which lines are worth reading now. When the speaker pauses in mid-sentence, a little state remembers "
    "the half line; when he goes on, the line is finished, written down, and the state is wiped for the next one."
)

# The trained checkpoint, and a text that it was not trained on: how dsv4_jax/model/speculative.py began, as token ids,
# for the packages of its tokenizer are not there on every Python.
SMALL = pathlib.Path(__file__).parents[2] / "checkpoints" / "small"
SMALL_TEXT = np.load(pathlib.Path(__file__).with_name("small_text.npy")).astype(np.int32)


def text_tokens(count: int) -> np.ndarray:
    """The first bytes of TEXT, [count] int32."""
    tokens = np.frombuffer(TEXT.encode(), np.uint8).astype(np.int32)
    assert count <= tokens.size
    return tokens[:count]


def feed(
    cfg: DSV4Config,
    params: model.Params,
    tokens: np.ndarray,
    chunks: Iterable[int],
    *,
    most: int | None = None,
    kv_format: str = "f32",
    index_format: str = "f32",
    implementation: str | None = None,
    **layout_options: object,
) -> np.ndarray:
    """Logits [T, vocab] of a token array fed through a fresh cache in these chunks, repeated as needed.

    `most` pins the executable to chunks of at most that many tokens; 1 means decode steps.
    """
    layout = CacheLayout(cfg, kv_format, index_format, **layout_options)
    chunks = list(chunks)
    most = max(chunks) if most is None else most
    length, shape = len(tokens), StepShape.bound(layout, 1, most, columns=layout.blocks_for(len(tokens)))
    # Slot 2 and blocks from 3 on: nothing may depend on ids being low.
    cache = init_cache(layout, CacheSize(layout.blocks_for(length) + 2, 2, layout.blocks_for(length)))
    step, start, held, out = decode_step if most == 1 else forward, 0, 0, []
    for chunk in itertools.cycle(chunks):
        count = min(chunk, length - start)
        needed = layout.blocks_for(start + count)
        entries = [(2, column, 3 + column) for column in range(held, needed)]
        plan = build_plan(layout, [StepSequence(2, start, count)], shape, table_entries=entries)
        padded = np.zeros(most, np.int32)
        padded[:count] = tokens[start : start + count]
        logits, cache = step(params, cache, plan.pack(), padded, implementation=implementation)
        out.append(np.asarray(logits)[:count])
        start, held = start + count, needed
        if start == length:
            return np.concatenate(out)
    raise AssertionError
