"""Equal rows give equal bytes: however they are chunked, whoever else is in the batch, whatever was rejected."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from dsv4_jax.config import AttentionType, DSV4Config
from dsv4_jax.layout import CacheLayout, CacheSize
from dsv4_jax.manager import StepShape
from dsv4_jax.manager.planning import build_plan
from dsv4_jax.manager.step_shape import StepSequence, shape_for
from dsv4_jax.testing.live import assert_same_bytes, assert_untouched

from .harness import Driver, image, jit_write_step, optimised_write_step, pinned_shape, random_stream
from .oracle.machine import ProjectedRows

CSA, HCA = AttentionType.CSA, AttentionType.HCA
SMALL = DSV4Config.tiny(layer_types=(CSA, HCA))
TOKENS = 150


def chunkings(total: int) -> list[list[int]]:
    """One shot, single tokens, odd sizes, sizes around the ratios, ragged."""
    rng = np.random.default_rng(0)
    ragged = [int(n) for n in rng.integers(1, 45, total)]
    out = []
    for sizes in ([total], [1], [3], [5, 1, 31], [33], [16], [17, 2], ragged):
        chunks = []
        for n in sizes * total:
            n = min(n, total - sum(chunks))
            if not n:
                break
            chunks.append(n)
        out.append(chunks)
    return out


def fill(layout: CacheLayout, chunks: list[int], shape=None, **options) -> Driver:
    driver = Driver(layout, CacheSize(4, 2, 2), **options)
    driver.admit(2, random_stream(layout, sum(chunks), 1))
    for n in chunks:
        driver.step([(2, n)], shape or pinned_shape(layout, 1, 1 if n == 1 else TOKENS, 2))
    return driver


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        pytest.param(dict(kv_format="fp8_per_entry", index_format="fp8"), marks=pytest.mark.slow),
        pytest.param(dict(kv_format="bf16", index_format="bf16", hca_state="raw"), marks=pytest.mark.slow),
        pytest.param(dict(kv_format="f32", index_format="f32", draft_tokens=3), marks=pytest.mark.slow),
        dict(kv_format="f32", index_format="f32", draft_tokens=2, hca_state="raw"),
    ],
    ids=lambda o: "-".join(str(v) for v in o.values()) or "default",
)
def test_every_chunking_gives_the_same_cache_bytes(options: dict) -> None:
    layout = CacheLayout(SMALL, **options)
    reference, *others = [fill(layout, chunks) for chunks in chunkings(TOKENS)]
    expected = image(reference.cache)
    for chunks, driver in zip(chunkings(TOKENS)[1:], others, strict=True):
        different = [name for name, data in image(driver.cache).items() if data != expected[name]]
        assert not different, f"chunks {chunks[:8]}...: {different} differ from one-shot prefill"
    assert_untouched(reference.cache, {2}, reference.touched_blocks)


@pytest.mark.parametrize(
    "write_step",
    [jit_write_step, pytest.param(optimised_write_step, marks=pytest.mark.slow)],
    ids=["plain", "optimised"],
)
@pytest.mark.slow
def test_bytes_do_not_depend_on_the_plan_shape(write_step) -> None:
    """The exact shape of each step, a compile of its own, writes what the padded shape writes."""
    layout = CacheLayout(SMALL)
    chunks = [37, 1]
    padded = fill(layout, chunks, pinned_shape(layout, 3, 61, 2, history=True), write_step=write_step)
    exact, start = Driver(layout, CacheSize(4, 2, 2), write_step=write_step), 0
    exact.admit(2, random_stream(layout, sum(chunks), 1))
    for n in chunks:
        exact.step([(2, n)], shape_for(layout, [StepSequence(2, start, n)], table_entries=1))
        start += n
    assert image(padded.cache) == image(exact.cache)


# Speculation


@functools.cache
def serial(layout: CacheLayout, tokens: int) -> list[dict]:
    """Live bytes after each of `tokens` single-token steps, in a cache without room for drafts."""
    layout = CacheLayout(layout.cfg, hca_state=layout.hca_state)
    driver = Driver(layout, CacheSize(4, 1, 4))
    driver.admit(1, random_stream(layout, tokens, 2))
    views, shape = [driver.live(1)], pinned_shape(layout, 1, 1, 4)
    for _ in range(tokens):
        driver.step([(1, 1)], shape)
        views.append(driver.live(1))
    return views


def wrong(stream: ProjectedRows) -> ProjectedRows:
    """What rejected drafts would have fed: other rows, other scores."""
    return ProjectedRows(*(np.float32(3) - np.float32(2) * x for x in stream))


def verify(driver: Driver, start: int, width: int, accept: int, shape: StepShape, expected: list[dict]) -> None:
    """From `start` tokens: one verify step of which `accept` tokens stay, the state right then, and serial steps."""
    while driver.length[1] < start:
        driver.step([(1, min(1 + driver.layout.draft_tokens, start - driver.length[1]))], shape)
    good, bad = driver.streams[1], wrong(driver.streams[1])
    kept = start + accept
    mixed = ProjectedRows(*(np.concatenate([g[:, :kept], b[:, kept:]], 1) for g, b in zip(good, bad, strict=True)))
    driver.step([(1, width)], shape, {1: mixed})
    driver.rollback(1, kept)
    where = f"start {start}, width {width}, {accept} accepted"
    assert_same_bytes(driver.live(1), expected[kept], f"{where}: at once")
    for n in range(1, 7):
        driver.step([(1, 1)], shape)
        if n in (1, 3, 6):
            assert_same_bytes(driver.live(1), expected[kept + n], f"{where}: {n} tokens later")


def run_verify(layout: CacheLayout, cases: list[tuple[int, int, int]]) -> None:
    total = max(start + width for start, width, _ in cases) + 6
    expected = serial(CacheLayout(layout.cfg, hca_state=layout.hca_state), total)
    shape = pinned_shape(layout, 1, 1 + layout.draft_tokens, 4)
    for start, width, accept in cases:
        driver = Driver(layout, CacheSize(4, 1, 4))
        driver.admit(1, random_stream(layout, total, 2))
        verify(driver, start, width, accept, shape, expected)


def acceptances(layout: CacheLayout) -> range:
    """With drafts even the first token may be taken back; a plain decode step always stands."""
    return range(0 if layout.draft_tokens else 1, 2 + layout.draft_tokens)


@pytest.mark.parametrize(
    ("hca_state", "drafts"),
    [
        *(("online", n) for n in (0, 7)),
        *(pytest.param("online", n, marks=pytest.mark.slow) for n in (1, 2, 3, 4, 5, 6)),
        pytest.param("raw", 1, marks=pytest.mark.slow),
        ("raw", 7),
    ],
)
def test_verify_every_width_every_acceptance(hca_state: str, drafts: int) -> None:
    """Widths 1..8 in rings of exactly that width, every acceptance, every phase mod 4, across HCA entries of 16."""
    layout = CacheLayout(SMALL, draft_tokens=drafts, hca_state=hca_state)
    run_verify(layout, [(s, 1 + drafts, a) for s in (0, 9, 14, 31, 44) for a in acceptances(layout)])


@pytest.mark.slow
def test_verify_at_many_phases_of_128() -> None:
    """The real HCA ratio: verify steps of 8 that stop short of, end at, start at and cross a 128 boundary."""
    cfg = DSV4Config.tiny(layer_types=(CSA, HCA), hca_ratio=128, head_dim=16, rope_dim=4, index_head_dim=16)
    rng = np.random.default_rng(3)
    starts = [0, 3, 65, 119, 120, 121, 122, 123, 124, 125, 126, 127, 128, 129, 250]
    cases = [(start, 8, int(accept)) for start in starts for accept in {0, 8, *rng.integers(1, 8, 2)}]
    run_verify(CacheLayout(cfg, draft_tokens=7), cases)


def test_shorter_verify_steps_fit_a_wider_ring() -> None:
    """A layout for 7 drafts also takes steps of 1..7 tokens, of any acceptance, one after the other."""
    layout = CacheLayout(SMALL, draft_tokens=7)
    rng = np.random.default_rng(4)
    total = 120
    expected = serial(CacheLayout(SMALL), total)
    driver = Driver(layout, CacheSize(4, 1, 4))
    driver.admit(1, random_stream(layout, total, 2))
    good, bad, shape = driver.streams[1], wrong(driver.streams[1]), pinned_shape(layout, 1, 8, 4, history=False)
    while driver.length[1] < total - 8:
        width = int(rng.integers(1, 9))
        accept = int(rng.integers(0, width + 1))
        keep = driver.length[1] + accept
        mixed = ProjectedRows(*(np.concatenate([g[:, :keep], b[:, keep:]], 1) for g, b in zip(good, bad, strict=True)))
        driver.step([(1, width)], shape, {1: mixed})
        driver.rollback(1, keep)
        assert_same_bytes(driver.live(1), expected[keep], f"{keep} tokens kept")


# Company and padding


def test_a_request_does_not_depend_on_its_company() -> None:
    """Six requests with joins, leaves and slot reuse; each has the bytes of a run alone."""
    layout = CacheLayout(SMALL)
    rng = np.random.default_rng(5)
    shape = pinned_shape(layout, 6, 48, 2, history=True)
    driver = Driver(layout, CacheSize(14, 6, 2))
    streams = [random_stream(layout, 140, 10 + i) for i in range(9)]
    alone = Driver(layout, CacheSize(14, 6, 2))
    waiting, owner = list(range(9)), {}
    finished = 0
    while finished < 9:
        for slot in range(1, 7):
            if slot not in owner and waiting and len(driver.free) >= 2 * (len(owner) + 1):
                owner[slot] = waiting.pop(0)
                driver.admit(slot, streams[owner[slot]])
        scheduled, budget = [], 48
        for slot in rng.permutation(list(owner)):
            count = min(int(rng.integers(0, 30)), budget, 140 - driver.length[int(slot)])
            budget -= count
            if count:
                scheduled.append((int(slot), count))
        driver.step(scheduled, shape)
        for slot in list(owner):
            if driver.length[slot] == 140 or (driver.length[slot] > 60 and rng.random() < 0.05):
                alone.admit(1, streams[owner.pop(slot)])
                while alone.length[1] < driver.length[slot]:
                    alone.step([(1, min(48, driver.length[slot] - alone.length[1]))], shape)
                assert_same_bytes(driver.live(slot), alone.live(1), f"slot {slot}")
                alone.release(1)
                driver.release(slot)
                finished += 1


@pytest.mark.parametrize("rows", [[], [StepSequence(1, 37, 1)], [StepSequence(1, 37, 20), StepSequence(3, 50, 1)]])
def test_padding_writes_nothing(rows: list[StepSequence]) -> None:
    """Padded tokens, rows, groups, flushes, copies and table entries change no byte of anybody else."""
    layout = CacheLayout(SMALL)
    driver = Driver(layout, CacheSize(4, 3, 1))
    shape = pinned_shape(layout, 4, 64, 1, history=True)
    for slot, length in ((1, 37), (2, 45), (3, 50)):
        driver.admit(slot, random_stream(layout, 128, slot))
        driver.step([(slot, length)], shape)
    before = {slot: driver.live(slot) for slot in driver.length}
    expected = image(driver.cache)
    plan = build_plan(layout, rows, shape)
    # What stands in the padding's rows must not matter: the harness fills it with NaN.
    driver.cache = jit_write_step(driver.cache, plan, driver.rows_of(plan), driver.norms)
    fed = {row.slot for row in rows}
    for slot in driver.length:
        if slot not in fed:
            assert_same_bytes(driver.live(slot), before[slot], f"slot {slot}")
    if not rows:
        assert image(driver.cache) == expected
    assert_untouched(driver.cache, driver.touched_slots, driver.touched_blocks)
