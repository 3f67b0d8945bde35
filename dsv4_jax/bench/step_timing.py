"""How long a whole step takes, on the device and on the host, and against the floors of its parts."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..errors import OptionError
from .timing import Ceilings, profiled

__all__ = ["StepPart", "against_floors", "longest_kernels", "timed"]


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
