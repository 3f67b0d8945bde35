"""How long a call takes: wall time over many calls per synchronisation, and the profiler's kernel times.

One executable holds several calls. Time of a call = (time of MANY calls - time of FEW) / (MANY - FEW), each the
best of several repeats, so what an execution costs by itself drops out. Before every execution the GPU's L2 is
filled with other data, so all rows come from device memory.
"""

from __future__ import annotations

import collections
import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .ops import Problem

__all__ = ["Timing", "call_count", "executable", "flush_l2", "kernel_times", "profiled", "time_problem"]

MOST_CALLS, FEWEST_CALLS = 16, 6
REFERENCE_CALLS = 6  # the reference is slow to compile, and slow enough to be timed well
MEMORY = 8 << 30  # bytes that the calls of one executable may move, about what they hold
L2_FLUSH = 256 << 20  # bytes read between executions; an H200 has 50 MB of L2


class Timing(NamedTuple):
    """Times of one call.

    Attributes:
        us: wall time.
        kernels: device time of each of its kernels, in us; None off a GPU.
        timer: what that comes from, see `records.Measurement`.
    """

    us: float
    kernels: dict[str, float] | None
    timer: str

    @property
    def kernel_us(self) -> float | None:
        return None if self.kernels is None else sum(self.kernels.values())


def call_count(bytes_moved: int, *, quick: bool = False) -> int:
    """Calls of an executable."""
    return 2 if quick else max(FEWEST_CALLS, min(MOST_CALLS, MEMORY // bytes_moved))


def flush_l2() -> Callable[[], None]:
    """A function that reads more than an L2 holds (nothing on a CPU)."""
    if jax.default_backend() != "gpu":
        return lambda: None
    data = jnp.ones(L2_FLUSH // 4, jnp.int32)
    read = jax.jit(jnp.sum)
    return lambda: jax.block_until_ready(read(data))


def executable(problem: Problem, implementation: str) -> Callable[..., tuple[Any, list[Any]]]:
    """(shared, carry, calls, count) -> (carry, outs): the first `count` calls of a problem, jitted, carry donated."""

    def run(shared: Any, carry: Any, calls: list[Any], count: int) -> tuple[Any, list[Any]]:
        outs = []
        for call in calls[:count]:
            carry, out = problem.apply(shared, carry, call, implementation)
            outs.append(out)
        return carry, outs

    return jax.jit(run, static_argnums=3, donate_argnums=1)


def time_problem(problem: Problem, implementation: str, *, repeats: int) -> Timing:
    """Times `implementation` on the calls of a problem. Raises whatever it raises."""
    # Executables of any count take the arguments of all calls, so that passing them drops out too.
    step = executable(problem, implementation)
    flush, carry = flush_l2(), problem.carry()

    def once(count: int) -> float:
        nonlocal carry
        flush()
        start = time.perf_counter()
        carry, outs = step(problem.shared, carry, problem.calls, count)
        jax.block_until_ready((carry, outs))
        return time.perf_counter() - start

    many = min(len(problem.calls), REFERENCE_CALLS) if implementation == "xla" else len(problem.calls)
    few = max(1, many // 4)
    best = {}
    for count in (few, many):
        once(count)  # compiles
        best[count] = min(once(count) for _ in range(repeats))
    us = 1e6 * (best[many] - best[few]) / (many - few)
    if us <= 0:  # calls too short for the clock (tiny sizes): an upper bound
        us = 1e6 * best[many] / many
    kernels = None
    if jax.default_backend() == "gpu":
        flush()
        times = profiled(lambda: step(problem.shared, carry, problem.calls, many))
        kernels = {name: total / many for name, total in times.items()} or None
    return Timing(us, kernels, "profiler" if kernels else "wall")


def profiled(call: Callable[[], Any], keep: pathlib.Path | None = None) -> dict[str, float]:
    """`kernel_times` of a call, whose profiler trace is left in `keep` if that is given."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = keep or pathlib.Path(temporary)
        with jax.profiler.trace(str(folder)):
            jax.block_until_ready(call())
        return kernel_times(folder)


def kernel_times(folder: pathlib.Path) -> dict[str, float]:
    """us of every kernel and device copy in a profiler trace, by name; {} if it holds no GPU streams."""
    times: dict[str, float] = collections.defaultdict(float)
    for file in folder.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
            if not plane.name.startswith("/device:GPU"):
                continue
            for line in plane.lines:
                if line.name.startswith("Stream"):  # the others repeat the same time by op and module
                    for event in line.events:
                        times[event.name[:100]] += event.duration_ns / 1e3
    return dict(times)
