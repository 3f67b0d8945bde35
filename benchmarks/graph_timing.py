"""Times of kernels in CUDA graphs, and their record, for the benchmarks of plain C entries. Needs torch and a GPU."""

from __future__ import annotations

import pathlib
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dsv4_jax.bench.records import dumps, new_record
from dsv4_jax.bench.targets import TARGETS, Target, verdict


def microseconds(launches: Sequence[Callable[[], object]], replays: int = 15) -> float:
    """A call's time: the median replay of a graph of all launches (at least 16), gaps between its nodes included."""
    for launch in launches[:2]:
        launch()
    torch.cuda.synchronize()
    graph, calls = torch.cuda.CUDAGraph(), max(16, len(launches))
    with torch.cuda.graph(graph):
        for i in range(calls):
            launches[i % len(launches)]()
    times = []
    for _ in range(replays + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return sorted(times[1:])[replays // 2]


def in_turns(launches: Mapping[str, Callable[[], object]], rounds: int = 7, seconds: float = 0.03) -> dict[str, float]:
    """A call's time of each, in a device that stays as warm as under load: the median of as many turns."""
    graphs, calls = {}, 8
    for name, launch in launches.items():
        launch()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for _ in range(calls):
                launch()
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            spent = last = 0.0
            while spent < seconds * 1e6:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                spent += (last := start.elapsed_time(end) * 1e3)
            times[name].append(last / calls)
    return {name: sorted(each)[rounds // 2] for name, each in times.items()}


def copy_ceiling() -> float:
    """GB/s, read + write, of a 1 GiB device copy."""
    x = torch.empty(1 << 30, device="cuda", dtype=torch.uint8)
    y = torch.empty_like(x)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    y.copy_(x)
    start.record()
    for _ in range(10):
        y.copy_(x)
    end.record()
    end.synchronize()
    return 20 * x.numel() / start.elapsed_time(end) / 1e6


def read_ceiling() -> float:
    """GB/s of summing 4 GiB."""
    x = torch.ones(1 << 30, device="cuda")
    return x.numel() * 4 / microseconds([x.sum] * 4, 3) / 1e3


class Recorder:
    """What a benchmark measured, as a record for `benchmarks/records/` (see `dsv4_jax.bench.records`)."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, op: str, shape: str, batch: int, us: float, **more: Any) -> None:
        """A time of our kernel. `more`: further fields of a `Measurement`, such as variant, peer_us, bytes; None: none.

        Targets are those of the same shape in `dsv4_jax.bench.targets`.
        """
        target = TARGETS.get((op, shape, batch), Target())
        row = {"table": "ops", "op": op, "shape": shape, "batch": batch, "implementation": "cuda", "timer": "graph"}
        row |= {"kernel_us": us, "required_us": target.required, "goal_us": target.goal, "peer_us": target.peer}
        row |= {"verdict": verdict(us, target.required, target.goal)}
        self.rows.append({k: v for k, v in (row | more).items() if v is not None})

    def write(self, path: pathlib.Path | None, **ceilings: float) -> None:
        """`ceilings`: such as copy_gb_per_s. Nothing is written without a path."""
        if path is not None:
            made = new_record(
                self.rows, device=torch.cuda.get_device_name(), command=shlex.join(["python", *sys.argv]),
                software={"torch": torch.__version__, "cuda": torch.version.cuda or ""}, ceilings=ceilings,
            )  # fmt: skip
            path.write_text(dumps(made), encoding="utf-8")
