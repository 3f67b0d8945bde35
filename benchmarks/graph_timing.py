"""Times of kernels in CUDA graphs, for the benchmarks of plain C entries. Needs torch and a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


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
