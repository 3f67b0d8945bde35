"""Calls that are joined into one, tried with the CPU twins of the swap kernels: what is joined, and equal results."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax import ffi
from dsv4_jax.cache import KVCache
from dsv4_jax.layout import CacheLayout
from dsv4_jax.ops import grouping, in_sequence
from dsv4_jax.ops.grouping import groups_of, in_order, read_program
from dsv4_jax.ops.lanes import MAX_LANES, places, waits_of
from dsv4_jax.tiers.host_cache import HostCache
from dsv4_jax.tiers.swap import swap_in, swap_out
from dsv4_jax.tiers.swap_plan import plan_swap

from .. import native
from ..tiers.swapping import CFG, PAGES, SIZE, image, random_cache, random_host
from .ordering import compare

TARGETS = ("dsv4_swap_out", "dsv4_swap_in")
SIZES = dict(num_device=SIZE.num_blocks, num_host=PAGES, length=2)
OUT, BACK = plan_swap("out", [1, 2], [5, 3], **SIZES), plan_swap("in", [4, 6], [3, 5], **SIZES)


@pytest.fixture(autouse=True, scope="module")
def library() -> None:
    native.load_cpu()


def there_and_back(cache: KVCache, host: HostCache) -> tuple[KVCache, HostCache]:
    host = swap_out(cache, host, OUT, implementation="ffi")
    return swap_in(cache, host, BACK, implementation="ffi"), host


def state() -> tuple[KVCache, HostCache]:
    layout = CacheLayout(CFG)
    return random_cache(layout, 1), random_host(layout, 2)


def joined(function: Callable) -> Callable:
    return in_sequence(function, TARGETS, "cpu")


def calls(function: Callable) -> list[str]:
    """Of each FFI call: the handler's name, or those of a sequence."""
    text = jax.jit(joined(function)).lower(*state()).as_text()
    sequences = iter(re.findall(r'targets = "([^"]*)"', text))
    return [next(sequences) if name == "dsv4_sequence" else name for name in re.findall(r"@(dsv4_\w+)\(", text)]


def test_calls_that_follow_one_another_are_one_and_do_the_same() -> None:
    assert calls(there_and_back) == ["dsv4_swap_out;dsv4_swap_in"]
    (cache, host), (want, pages) = (
        jax.jit(function)(*state()) for function in (joined(there_and_back), there_and_back)
    )
    np.testing.assert_array_equal(host.pages, pages.pages)
    for name, bytes_ in image(want).items():
        np.testing.assert_array_equal(image(cache)[name], bytes_)


def assert_same(function: Callable) -> None:
    for one, other in zip(*(jax.tree.leaves(jax.jit(f)(*state())) for f in (joined(function), function)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_stands_between_keeps_them_apart() -> None:
    def changed(cache: KVCache, host: HostCache):
        host = swap_out(cache, host, OUT, implementation="ffi")
        return swap_in(cache, dataclasses.replace(host, pages=host.pages ^ np.uint8(1)), BACK, implementation="ffi")

    def old(cache: KVCache, host: HostCache):
        """The second reads what the first overwrites."""
        return swap_out(cache, host, OUT, implementation="ffi"), swap_in(cache, host, BACK, implementation="ffi")

    def stale(cache: KVCache, host: HostCache):
        """The third reads what the second overwrites, a result of the first."""
        first = swap_out(cache, host, OUT, implementation="ffi")
        changed = first.pages ^ np.uint8(1)
        second = swap_out(cache, first, plan_swap("out", [3, 4], [5, 3], **SIZES), implementation="ffi")
        return swap_in(cache, first, BACK, implementation="ffi"), second, changed

    assert calls(changed) == ["dsv4_swap_out", "dsv4_swap_in"]
    assert sorted(calls(old)) == ["dsv4_swap_in", "dsv4_swap_out"]
    assert sorted(calls(stale)) == ["dsv4_swap_out", "dsv4_swap_out;dsv4_swap_in"]
    assert_same(stale)


def test_what_a_call_makes_the_next_may_overwrite_and_parts_are_read_in_place() -> None:
    def twice(cache: KVCache, host: HostCache):
        both = jnp.stack([host.pages, host.pages ^ np.uint8(1)])
        for i in (1, 0):
            host = swap_out(cache, swap_out(cache, host, OUT, implementation="ffi"), OUT, implementation="ffi")
            cache = swap_in(cache, dataclasses.replace(host, pages=both[i]), BACK, implementation="ffi")
        return cache, host

    assert calls(twice) == [";".join(["dsv4_swap_out", "dsv4_swap_out", "dsv4_swap_in"] * 2)]
    assert_same(twice)


def random_program(seed: int) -> tuple[Callable[..., list[jax.Array]], list[np.ndarray]]:
    """Calls and additions on some of what there is, or on rows of it; a third of the calls overwrite an operand."""
    rng, kind = np.random.default_rng(seed), jax.ShapeDtypeStruct((4, 32), jnp.float32)
    kinds, picked = rng.random((40, 4)), rng.integers(0, 6, (40, 2))

    def function(*arrays: jax.Array) -> list[jax.Array]:
        made = list(arrays)
        for (sort, over, cut, row), picks in zip(kinds, picked, strict=True):
            x, y = (made[-1 - k % len(made)] for k in picks)
            if sort < 0.2:
                made.append(x + y)
            else:
                first = int(3 * row)  # a row, or two as one
                y = y if cut < 0.6 else y[first] if cut < 0.8 else y[first : first + 2].reshape(64)
                aliases = {0: 0} if over < 0.3 else {}
                made.append(jax.ffi.ffi_call("dsv4_call", kind, input_output_aliases=aliases)(x, y))
        return made[-3:]

    return function, [np.zeros((4, 32), np.float32)] * 3


@pytest.mark.parametrize("seed", range(10))
def test_random_calls_do_what_they_did_whatever_their_lanes_leave_open(seed: int) -> None:
    function, arrays = random_program(seed)
    together = in_sequence(function, ["dsv4_call"], "cpu", early=())
    assert compare(jax.make_jaxpr(function)(*arrays), jax.make_jaxpr(together)(*arrays)) > 5


@pytest.mark.parametrize("seed", range(20))
def test_groups_and_lanes_keep_what_must_come_first_first(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(grouping, "MAX_CALLS", 3 if seed % 2 else 64)
    function, arrays = random_program(seed)
    program = read_program(jax.make_jaxpr(function)(*arrays).jaxpr, frozenset({"dsv4_call"}))
    groups = groups_of(program)
    order = [i for group in in_order(groups) for i in group.nodes]
    place = {i: k for k, i in enumerate(order)}
    assert sorted(order) == list(range(len(program.nodes)))
    assert all(place[p] < place[i] for i in order for p in program.nodes[i].before)
    assert len(groups) < len(order)
    for group in groups:
        nodes = [program.nodes[i] for i in group.nodes]
        done: list[set[int]] = []  # by what lanes and waits say, when each starts
        tails: dict[int, int] = {}
        for i, (where, needed) in enumerate(zip(places(nodes, frozenset({"dsv4_call"})), waits_of(nodes), strict=True)):
            before = {*where.waits, *([tails[where.lane]] if where.lane in tails else [])}
            done.append(set().union(before, *(done[k] for k in before)))
            assert needed <= done[-1] and where.lane < MAX_LANES
            assert where.early != 1 or (where.lane == 0 and 0 in tails)
            assert where.early != 2 or len(where.waits) == 1
            tails[where.lane] = i
        for i, node in enumerate(nodes):  # within a group nobody reads what another has overwritten
            for v in node.overwrites if group.joined else ():
                assert not any(v is r for later in nodes[i + 1 :] for r in later.reads)


def test_what_joining_would_lose_stays() -> None:
    """An array that a call both reads and overwrites is two operands, effects and permutations stay as they are."""
    shape = jax.ShapeDtypeStruct((2, 3), jnp.uint8)
    call = functools.partial(jax.ffi.ffi_call, "dsv4_swap_in", shape)

    def function(x: jax.Array) -> tuple[jax.Array, ...]:
        both = call()(call(input_output_aliases={1: 0})(x, x))
        call(has_side_effect=True)(x)
        return both, jax.lax.reshape(both, (6,), dimensions=(1, 0))

    text = jax.jit(joined(function)).lower(jnp.zeros((2, 3), jnp.uint8)).as_text()
    assert "@dsv4_sequence(%arg0, %arg0)" in text
    assert "has_side_effect = true" in text
    assert "stablehlo.transpose" in text


def test_numbers_and_operations_without_results_are_taken() -> None:
    """A kernel of a number that is no array, and one that only has an effect."""
    call = jax.ffi.ffi_call("dsv4_swap_in", jax.ShapeDtypeStruct((4,), jnp.float32))

    def function(x: jax.Array) -> jax.Array:
        jax.debug.print("{}", x)
        return call(call(x), np.float32(2))

    x = np.zeros(4, np.float32)
    assert compare(jax.make_jaxpr(function)(x), jax.make_jaxpr(joined(function))(x)) == 2


def test_functions_without_calls_stay_as_they_are() -> None:
    def function(x: jax.Array, offset: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {"y": jnp.cumsum(x.reshape(2, 3), 1) + offset["z"][None]}

    x, offset = jnp.arange(6.0), {"z": jnp.ones(3)}
    np.testing.assert_array_equal(in_sequence(function)(x, offset)["y"], function(x, offset)["y"])


def test_a_library_without_the_handler_says_so() -> None:
    call = jax.ffi.ffi_call(ffi.cpu_target("dsv4_sequence"), jax.ShapeDtypeStruct((2,), jnp.float32))
    for attributes, message in (
        (dict(targets="dsv4_none", wiring=np.zeros(2, np.int64), call0={}), "there is no handler of dsv4_none"),
        (dict(targets="dsv4_sequence", wiring=np.zeros(2, np.int64), call0={}), "no handler of dsv4_sequence"),
        (dict(targets="dsv4_swap_in", wiring=np.array([0, 0, 0]), call0={}), "wiring of dsv4_swap_in are missing"),
        (dict(targets="dsv4_swap_in", wiring=np.array([4, 0, 0, 0, 1, 0]), call0={}), "the lane of dsv4_swap_in"),
        (dict(targets="dsv4_swap_in", wiring=np.array([0, 0, 0, 1, 0, 1, 0]), call0={}), "what it waits for, is none"),
        (dict(targets="dsv4_swap_in", wiring=np.array([0, 0, 0, 0, 1, 0, 9, 0, 0]), call0={}), "points nowhere"),
        (dict(targets="dsv4_swap_in", wiring=np.array([0, 0, 0, 0, 1, 0, 0, 0, 1, 5]), call0={}), "larger than its"),
        (dict(targets="dsv4_swap_in", wiring=np.array([0, 0, 0, 0, 1, 0, 0, 3, 0]), call0={}), "larger than its"),
        (dict(targets="", wiring=np.array([1])), "more wiring than calls"),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            jax.block_until_ready(call(jnp.zeros(2), **attributes))
