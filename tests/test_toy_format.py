"""The recipe of CONTRIBUTING for a row format, taken: formats of one's own in every implementation of every op.

Each runs, and gives what the reference gives with the format's codec, or says why it does not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax import CacheLayout, CacheSize, DSV4Config, init_cache, plan_capacity
from dsv4_jax.bench.step import random_cache
from dsv4_jax.config import AttentionType
from dsv4_jax.errors import ImplementationError, LayoutError
from dsv4_jax.formats import KV_FORMATS, FormatSpec, Part, RowFormat, codec, index_format, kv_format
from dsv4_jax.model import index_qat_default
from dsv4_jax.ops import append, registry

from . import native, test_cache, test_state_machine, toys
from .formats import test_codecs
from .harness import Driver, layer_writes, pinned_shape, random_stream
from .oracle.close import assert_rows_close
from .tiers import test_swap

CSA, HCA = AttentionType.CSA, AttentionType.HCA
WIDTHS = {
    "tiny": dict(head_dim=32, rope_dim=8, index_head_dim=16),
    "others": dict(head_dim=96, rope_dim=32, index_head_dim=32),
    "v4": dict(head_dim=512, rope_dim=64, index_head_dim=128),
}
OF_ROWS = {"append", "compress", "gather", "index_scores", "attend"}  # ops that are told a row format


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    toys.register(monkeypatch)


def config(widths: str, **more) -> DSV4Config:
    small = dict(
        layer_types=(CSA, HCA), hca_ratio=16, sliding_window=9, index_topk=3, num_attention_heads=2, index_n_heads=4
    )
    return DSV4Config.tiny(**small | WIDTHS[widths] | more)


def layout_of(widths: str, kv: str, index: str) -> CacheLayout:
    return CacheLayout(config(widths), kv, index, draft_tokens=1)


def whole_step(cache, plan, rows, norms):
    """All writes and all reads of a step, through its handles."""
    step, cfg = cache.begin(plan), cache.layout.cfg
    ones, freq = jnp.ones, jnp.linspace(1e-4, 1, cfg.rope_dim // 2)
    for spec in cache.layout.schedule:
        handle, selected = layer_writes(step, spec, rows, norms), None
        if spec.attn is CSA:
            q = handle.index_queries(ones((plan.num_tokens, cfg.index_n_heads, cfg.index_head_dim)), freq, qat=True)
            selected = handle.top_k(handle.index_scores(q, ones((plan.num_tokens, cfg.index_n_heads))))
        q = handle.queries(ones((plan.num_tokens, cfg.num_attention_heads, cfg.head_dim)), freq)
        handle.attend(q, ones(cfg.num_attention_heads), selected, inverse_rope=freq)
        handle.gather_swa()
        handle.gather_all_compressed()
        step = handle.step
    return step.finish()


def visiting(visit: Callable[[str, Any], None]) -> Callable[..., Any]:
    """`whole_step`, with `visit` called for every op that it calls, with what the op is given."""
    pick = registry.pick

    def visited(op: str, arguments: Any, choice: registry.Choice = None) -> registry.Implementation:
        visit(op, arguments)
        return pick(op, arguments, choice)

    def step(*args):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(registry, "pick", visited)
            return whole_step(*args)

    return step


STEPS = {"a chunk that overruns the window": (18, 2), "drafts that complete entries": (2, 2)}


def driver_of(layout: CacheLayout) -> Driver:
    driver = Driver(layout, CacheSize(6, 3, 2))
    for slot in (2, 1):
        driver.admit(slot, random_stream(layout, 40, slot))
    return driver


def plans(driver: Driver):
    for counts in STEPS.values():
        shape = pinned_shape(driver.layout, 2, sum(counts), 2, history=max(counts) > 2)
        yield driver.plan(list(zip((2, 1), counts, strict=True)), shape)


def ops_of_steps(layout: CacheLayout) -> list[tuple[str, Any]]:
    """What the ops of the steps are given, traced: their shapes, dtypes and static facts."""
    seen: list[tuple[str, Any]] = []
    driver = driver_of(layout)
    for plan in plans(driver):
        step = visiting(lambda op, arguments: seen.append((op, arguments)))
        jax.eval_shape(step, driver.cache, plan, driver.rows_of(plan), driver.norms)
    assert {op for op, _ in seen} == OF_ROWS | {"entry_rows", "queries", "top_k"}
    return seen


def format_of(arguments) -> list[RowFormat]:
    """The row formats that an op is given."""
    return [inputs.geometry.fmt for inputs in getattr(arguments, "compressors", ())] or [arguments.fmt]


def check_result(op: str, formats: list[RowFormat], actual, expected) -> None:
    """Rows and states are equal but for last bits, anything else within a rounding to bf16."""
    if op == "append":
        assert_rows_close(*formats, actual, expected)
        return
    if op == "compress":
        for fmt, (state, pool), (want_state, want_pool) in zip(formats, actual, expected, strict=True):
            assert_rows_close(None, [state], [want_state])
            assert_rows_close(fmt, pool, want_pool)
        return
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, e = np.asarray(a, np.float32), np.asarray(e, np.float32)
        finite = np.isfinite(e)
        np.testing.assert_array_equal(np.isfinite(a), finite)
        np.testing.assert_allclose(a[finite], e[finite], rtol=1e-2, atol=1e-2 * np.abs(e[finite]).max(initial=0))


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("name", toys.TOYS)
def test_every_implementation_of_every_op_says_why_it_does_not_run(name: str, widths: str, monkeypatch) -> None:
    """And none runs but the reference: these codes and carriers are nobody else's."""
    tried = set()
    for op, arguments in ops_of_steps(layout_of(widths, name, name)):
        if op not in OF_ROWS:
            continue
        for implementation in (registry.find(op, n) for n in registry.OPS[op].names if n != "xla"):
            reason = implementation.supports(arguments)
            assert reason is not None and any(fmt.contents in reason for fmt in format_of(arguments)), reason
            tried.add((op, implementation.name))
        with monkeypatch.context() as patch:
            patch.setattr(jax, "default_backend", lambda: "gpu")
            assert registry.pick(op, arguments).name == "xla", "the chain of a GPU ends at the reference"
    assert tried == {(op, n) for op in OF_ROWS for n in registry.OPS[op].names if n != "xla"}


@pytest.mark.parametrize("name", toys.TOYS)
def test_a_kernel_that_is_named_is_an_error_with_the_reason(name: str) -> None:
    fmt = kv_format(name, 32, 8)
    pool = tuple(jnp.zeros((4, part.width), part.dtype) for part in fmt.parts)
    with pytest.raises(ImplementationError, match=r"append: .*'pallas'.* does not store rows of"):
        append(pool, jnp.ones((1, 32)), jnp.zeros(1, jnp.int32), fmt=fmt, implementation="pallas")


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("formats", [("fp8", "fp4"), ("fp8_per_entry", "fp8"), ("bf16", "bf16"), ("f32", "f32")])
def test_formats_of_equal_parts_are_the_same_to_a_kernel(formats: tuple[str, str], widths: str) -> None:
    """Whatever they and their parts are called: each kernel takes both, or neither for the same reason."""
    known, twins = layout_of(widths, *formats), layout_of(widths, *(f"{name}_twin" for name in formats))
    assert known != twins and known.fingerprint != twins.fingerprint
    for (op, arguments), (of_known, same) in zip(ops_of_steps(twins), ops_of_steps(known), strict=True):
        assert op == of_known
        for implementation in (registry.find(op, n) for n in registry.OPS[op].names):
            reason = implementation.supports(arguments)
            assert reason == implementation.supports(same)
            if widths == "v4" and formats == ("fp8", "fp4"):
                assert reason is None, "rows of V4 are what all kernels are for"


@pytest.mark.slow
def test_a_kernel_runs_on_a_format_of_another_name() -> None:
    """What Pallas makes of it is what the reference makes of it with the format's codec."""
    driver, given = driver_of(layout_of("others", "fp8_twin", "fp4_twin")), []

    def compared(cache, plan, rows, norms):
        results = []

        def visit(op: str, arguments: Any) -> None:
            if op in OF_ROWS and (op == "compress" or op not in dict(given)):  # of either ratio; the others once
                kernel, reference = (registry.find(op, n) for n in ("pallas", "xla"))
                assert kernel.supports(arguments) is None
                results.append((kernel.call(arguments), reference.call(arguments)))
                given.append((op, format_of(arguments)))

        return visiting(visit)(cache, plan, rows, norms), results

    plan = next(plans(driver))
    _, results = jax.jit(compared)(driver.cache, plan, driver.rows_of(plan), driver.norms)
    assert {op for op, _ in given} == OF_ROWS
    for (op, formats), (actual, expected) in zip(given, results, strict=True):
        check_result(op, formats, actual, expected)


@pytest.mark.parametrize("widths", ["tiny", "others"])
def test_the_bytes_of_a_cache_are_the_oracles(widths: str) -> None:
    """Every row that steps write, of a format whose facts the oracle knows."""
    for fmt in (kv_format("e5m2", *list(WIDTHS[widths].values())[:2]), index_format("e5m2", 34)):
        test_codecs.check(fmt, test_codecs.ladder(fmt.dim))
    test_state_machine.run_trace(CacheLayout(config(widths), "e5m2", "e5m2"), 40, check_every=3)


def test_every_token_sees_exactly_its_keys(monkeypatch) -> None:
    driver, outs, queries = test_cache.run(CacheLayout(test_cache.CFG, "e5m2", "e5m2"), [1, 2, 30, 7, 35], 75)
    for actual, want in zip(outs, test_cache.expected(driver, queries), strict=True):
        np.testing.assert_allclose(actual, want, rtol=2e-4, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "same"), [("words", "bf16"), ("planes", "f32")])
def test_a_format_that_says_nothing_of_itself_keeps_what_its_codec_keeps(name: str, same: str) -> None:
    """The values of all rows after the same steps, by either format."""
    drivers = []
    for fmt in (name, same):
        layout = CacheLayout(config("others"), fmt, fmt)
        driver = Driver(layout, CacheSize(6, 3, 2))
        driver.admit(2, random_stream(layout, 60, 0))
        for count in (30, 2, 1):
            driver.step([(2, count)], pinned_shape(layout, 1, 30, 2, history=True))
        drivers.append(driver)
    live = [driver.live(2) for driver in drivers]
    for pool in ("swa", "csa", "hca", "index"):
        rows = [d.layout.index_row if pool == "index" else d.layout.kv_row for d in drivers]
        values = [codec(fmt).decode(fmt, tuple(parts[pool])) for fmt, parts in zip(rows, live, strict=True)]
        assert values[0].size
        np.testing.assert_array_equal(*values)


@pytest.mark.parametrize("formats", [("e5m2", "words"), ("words", "planes"), ("planes", "e5m2")], ids="/".join)
def test_records_hold_every_part(formats: tuple[str, str]) -> None:
    native.load_cpu()
    for implementation in (test_swap.TestXla(), test_swap.TestFfi()):
        implementation.test_ten_rounds_of_random_subsets(formats)


@pytest.mark.parametrize("name", toys.TOYS)
def test_layout_capacity_and_model_follow(name: str) -> None:
    layout = CacheLayout(config("others"), name, name)
    size = CacheSize(6, 2, 3)
    cache = init_cache(layout, size)
    assert sum(x.nbytes for x in cache.arrays.values()) == layout.total_bytes(size)
    rows = layout.kv_row.row_bytes + layout.index_row.row_bytes
    assert layout.bytes_per_block == (rows * 128 // 4 + layout.kv_row.row_bytes * 128 // 16)
    fits = plan_capacity(layout, hbm_bytes=1 << 24, max_requests=2, max_context=1024)
    assert layout.total_bytes(fits) <= 1 << 24
    assert index_qat_default(layout) == (name == "e5m2")
    filled = random_cache(layout, size, jax.random.key(0))  # what `bench step` runs on
    assert {n: (x.shape, x.dtype) for n, x in filled.arrays.items()} == {
        n: (x.shape, x.dtype) for n, x in cache.arrays.items()
    }


def test_too_many_parts_are_refused(monkeypatch) -> None:
    def parts(dim: int, _: int) -> tuple[Part, ...]:
        return tuple(Part(f"p{i}", "uint8", dim) for i in range(7))

    monkeypatch.setitem(KV_FORMATS, "many", FormatSpec("nowhere", parts))
    with pytest.raises(LayoutError, match="27 arrays, at most 24: the row formats have too many parts"):
        CacheLayout(config("tiny"), "many")


def test_a_name_that_came_to_mean_other_rows_is_another_layout(monkeypatch) -> None:
    """Compiled steps are found by their layout: an entry that is replaced must not find those of the old one."""
    before = CacheLayout(config("tiny"), "words")
    monkeypatch.setitem(KV_FORMATS, "words", dataclasses.replace(KV_FORMATS["words"], module=f"{toys.__name__}.other"))
    assert CacheLayout(config("tiny"), "words") != before
