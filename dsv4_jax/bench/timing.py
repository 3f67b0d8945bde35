"""How long a call takes, by wall time and by the profiler, and the ceilings of the device that it is compared with.

One executable holds several calls. Time of a call = (time of MANY calls - time of FEW) / (MANY - FEW), each the
best of several repeats, so what an execution costs by itself drops out. Before every execution the GPU's L2 is
filled with other data, so all rows come from device memory. A whole step is timed as it is called, one after the other,
and compared with the sum of its parts' floors.
"""

from __future__ import annotations

import collections
import math
import pathlib
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import OptionError
from .ops import Problem

__all__ = [
    "Ceilings",
    "StepPart",
    "Timing",
    "against_floors",
    "call_count",
    "executable",
    "flush_l2",
    "kernel_times",
    "longest_kernels",
    "measure_ceilings",
    "profiled",
    "time_problem",
    "timed",
]

MAX_CALLS, MIN_CALLS = 16, 6
REFERENCE_CALLS = 6  # the reference is slow to compile, and slow enough to be timed well
MEMORY = 8 << 30  # bytes that the calls of one executable may move, about what they hold
L2_FLUSH = 256 << 20  # bytes read between executions; an H200 has 50 MB of L2


class Timing(NamedTuple):
    """The times of one call.

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
    """Returns how many calls an executable has."""
    return 2 if quick else max(MIN_CALLS, min(MAX_CALLS, MEMORY // bytes_moved))


def flush_l2() -> Callable[[], None]:
    """Returns a function that reads more than an L2 holds (on a CPU one that does nothing)."""
    if jax.default_backend() != "gpu":
        return lambda: None
    data = jnp.ones(L2_FLUSH // 4, jnp.int32)
    read = jax.jit(jnp.sum)
    return lambda: jax.block_until_ready(read(data))


def executable(problem: Problem, implementation: str) -> Callable[..., tuple[Any, list[Any]]]:
    """Returns a function (shared, carry, calls, count) -> (carry, outs): the first `count` calls of a problem, jitted,
    carry donated.
    """

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
    """Returns `kernel_times` of a call, whose profiler trace is left in `keep` if that is given."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = keep or pathlib.Path(temporary)
        with jax.profiler.trace(str(folder)):
            jax.block_until_ready(call())
        return kernel_times(folder)


def kernel_times(folder: pathlib.Path) -> dict[str, float]:
    """Sums us of every kernel and device copy in a profiler trace, by name; {} if it holds no GPU streams."""
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


class Ceilings(NamedTuple):
    """copy: bytes read and written per second by an elementwise kernel. matmul: bf16 FLOP per second."""

    copy: float
    matmul: float

    def floor_us(self, bytes_moved: float, flops: float) -> float:
        """Returns the time that nothing can beat: the larger of the two."""
        return 1e6 * max(bytes_moved / self.copy, flops / self.matmul)

    def as_dict(self) -> dict[str, float]:
        return {"copy_gb_per_s": self.copy / 1e9, "matmul_tflop_per_s": self.matmul / 1e12}


def measure_ceilings(*, quick: bool = False) -> Ceilings:
    """Measures both, with 2 GiB and 8192 x 8192 (4 MiB and 256 x 256 if quick)."""
    x = jnp.zeros(1 << (20 if quick else 29), jnp.int32)
    copy = 2 * x.nbytes / _seconds_each(jax.jit(lambda x: x + np.int32(1), donate_argnums=0), x)
    n = 256 if quick else 8192
    a = jax.random.normal(jax.random.key(0), (n, n), jnp.bfloat16) * jnp.bfloat16(n**-0.5)  # keeps products' size
    # cuBLAS: searching for the best of XLA's own kernels takes longer than all the rest.
    multiply = jax.jit(jnp.matmul, compiler_options={"xla_gpu_enable_triton_gemm": False})
    return Ceilings(copy, 2 * n**3 / _seconds_each(partial(multiply, a), a))


def _seconds_each(step: Callable[[jax.Array], jax.Array], x: jax.Array, steps: int = 8) -> float:
    """Returns the time of a step, many in a row a synchronisation: a slow host must not lower a ceiling."""
    best = math.inf
    x = jax.block_until_ready(step(x))
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(steps):
            x = step(x)
        jax.block_until_ready(x)
        best = min(best, time.perf_counter() - start)
    return best / steps


# Whole steps


class StepPart(NamedTuple):
    """A part of a step, with the bytes of device memory and the FLOPs that it cannot do without."""

    name: str
    bytes: float
    flops: float


def timed(run: Callable[[], jax.Array], steps: int, loop: int) -> dict[str, float]:
    """Takes the best time of one step, and its host times: with nothing queued, and of calls issued one after the
    other.

    Args:
        run: issues a call, and returns what to wait for.
        steps: calls per synchronisation.
        loop: steps of a call.

    Raises:
        OptionError: the numbers that `run` returns are not finite.
    """
    for _ in range(2):
        out = run()
    if not bool(jnp.isfinite(out).all()):
        raise OptionError("the step gave numbers that are not finite")
    walls, firsts, issues = [], [], []
    for _ in range(5):
        start = time.perf_counter()
        out = run()
        firsts.append(time.perf_counter() - start)
        for _ in range(steps - 1):
            out = run()
        issues.append((time.perf_counter() - start) / steps)
        jax.block_until_ready(out)
        walls.append((time.perf_counter() - start) / steps)
    return {
        "step_ms": min(walls) * 1e3 / loop,
        "first_dispatch_us": min(firsts) * 1e6 / loop,
        "dispatch_us": min(issues) * 1e6 / loop,
    }


def against_floors(parts: Sequence[StepPart], ceilings: Ceilings, step_ms: float) -> dict[str, Any]:
    """Returns what a step's parts take at the ceilings, and the step's time over it."""
    floor_us = {name: ceilings.floor_us(bytes_, flops) for name, bytes_, flops in parts}
    moved, total = sum(bytes_ for _, bytes_, _ in parts), sum(floor_us.values()) / 1e3
    return {"floor_us": floor_us, "floor_ms": total, "over_floor": step_ms / total, "gb_per_s": moved / step_ms / 1e6}


def longest_kernels(run: Callable[[], jax.Array], loop: int, keep: pathlib.Path | None) -> dict[str, Any]:
    """Profiles the kernel time of one step, and of each of its twenty longest kernels; None where there is no profile
    of them.
    """
    times: dict[str, float] = {}
    if keep or jax.default_backend() == "gpu":
        times = {name: us / loop for name, us in profiled(run, keep).items()}
    if not times:
        return {"kernel_ms": None, "kernels": None}
    longest = sorted(times, key=lambda name: -times[name])[:20]
    return {"kernel_ms": sum(times.values()) / 1e3, "kernels": {name: times[name] for name in longest}}
