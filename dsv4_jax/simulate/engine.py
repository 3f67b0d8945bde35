"""A trace on one host, to its end. Pure Python + numpy, deterministic."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence

from ..errors import TraceError
from .host import Host
from .simulation import Server, SimulatedRequest, Simulation
from .trace import TraceRequest

__all__ = ["runnable", "simulate"]

MAX_TOKENS = 1 << 24  # of a request: its ids are made at once


def simulate(
    trace: Sequence[TraceRequest], server: Server, *, on_done: Callable[[], object] = lambda: None
) -> Simulation:
    """Runs a trace to its end.

    Args:
        trace: earliest first, as `read_trace` returns it.
        on_done: called once for each request, when it ends or is rejected.

    Raises:
        TraceError: no request of the trace can ever run, or one that can is too long to be made.
    """
    host = Host(server, lambda _: on_done())
    jobs, host.result.rejected = runnable(trace, server)
    for _ in range(host.result.rejected.total()):
        on_done()
    now, ahead = 0.0, collections.deque(jobs)
    while ahead or not host.is_idle:
        while ahead and ahead[0].trace.arrival <= now:
            job = ahead.popleft()
            host.take(job, job.trace.arrival)
        if host.begin(now) is not None:
            host.end()
            now = host.result.now
        elif ahead:
            now = max(now, ahead[0].trace.arrival)
    return host.finish()


def runnable(trace: Sequence[TraceRequest], server: Server) -> tuple[list[SimulatedRequest], collections.Counter[str]]:
    """Jobs for the requests that can run on such a server, and how many cannot, by what they exceed.

    Raises `TraceError` as `simulate`.
    """
    jobs: list[SimulatedRequest] = []
    rejected = collections.Counter[str]()
    for index, request in enumerate(trace):
        tokens = request.prompt_tokens + request.output_tokens
        if tokens > server.context_limit:
            rejected["context"] += 1
        elif server.layout.blocks_for(tokens) > server.size.num_blocks:
            rejected["device"] += 1
        elif tokens > MAX_TOKENS:
            raise TraceError(f"request {index} has {tokens} tokens: at most {MAX_TOKENS} can be simulated")
        else:
            jobs.append(SimulatedRequest(request, index))
    if not jobs:
        room = min(server.context_limit, server.size.num_blocks * server.layout.block_tokens)
        raise TraceError(f"no request of the trace fits: this cache holds {room} tokens of one")
    return jobs, rejected
