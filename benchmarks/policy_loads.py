"""Loads of `bench_policies.py`, each made from a seed: what caches are asked in different trades. No jax."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

from dsv4_jax.simulate.synthesis import ChatTrace, make_trace
from dsv4_jax.simulate.trace import TraceRequest, TraceRun

__all__ = ["LOADS", "Load"]


@dataclasses.dataclass(frozen=True)
class Load:
    """Requests, and the memory that they are given.

    Attributes:
        make: makes the requests, earliest first.
        hbm: of the device's cache, as `dsv4-jax simulate` takes it.
        host: of the host tier; "" for none.
    """

    make: Callable[[], list[TraceRequest]]
    hbm: str
    host: str = ""


def chats() -> list[TraceRequest]:
    """Chats of several turns, of tenants with a long system prompt each."""
    settings = "chats=200,tenants=4,turns=4,system=4000,question=500,answer=250,rate=4,pause=15,seed=7"
    return make_trace(ChatTrace.parse(settings))


def rereads() -> list[TraceRequest]:
    """Documents asked again: of one of 60 a random part from its beginning on, and a question."""
    chance, out = random.Random(11), []
    lengths = [chance.randint(24_000, 96_000) for _ in range(60)]
    for i in range(600):
        document = chance.randrange(len(lengths))
        depth = lengths[document] if i < 30 else chance.randint(2_000, lengths[document])
        prompt = (TraceRun(f"document {document}", depth), TraceRun(f"question {i}", chance.randint(50, 400)))
        out.append(_request(20.0 * i, prompt, f"answer {i}", 100))
    return out


def short_prompts() -> list[TraceRequest]:
    """Chats, and between them short prompts: one of 600 instructions of a few blocks, and something to work on."""
    chance = random.Random(13)
    settings = "chats=250,tenants=1,systems=4,turns=4,system=2000,question=300,answer=200,rate=0.25,pause=30,seed=13"
    out = [dataclasses.replace(request, tenant=None) for request in make_trace(ChatTrace.parse(settings))]
    lengths = [chance.randint(150, 1_000) for _ in range(600)]
    end = out[-1].arrival
    count = 4_000 - len(out)
    for i in range(count):
        which = chance.randrange(len(lengths))
        prompt = (TraceRun(f"instruction {which}", lengths[which]), TraceRun(f"item {i}", chance.randint(40, 300)))
        out.append(_request(end * i / count, prompt, f"result {i}", 30))
    return sorted(out, key=lambda request: request.arrival)


def branching_agents() -> list[TraceRequest]:
    """Agents that go on from where any of their earlier steps has ended: the last one half of the time."""
    chance, out = random.Random(17), []
    for agent in range(40):
        start, tools = 20.0 * agent, TraceRun(f"tools {agent % 4}", 6_000)
        histories: list[tuple[TraceRun, ...]] = [(tools, TraceRun(f"task {agent}", chance.randint(200, 2_000)))]
        for step in range(30):
            before = histories[-1] if chance.random() < 0.5 else chance.choice(histories)
            seen = TraceRun(f"result {agent}.{step}", chance.randint(100, 3_000))
            request = _request(start, (*before, seen), f"action {agent}.{step}", chance.randint(50, 400))
            out.append(request)
            histories.append((*request.prompt, *request.output))
            start += chance.expovariate(1 / 15)
    return sorted(out, key=lambda request: request.arrival)


def scans() -> list[TraceRequest]:
    """Chats of four tenants, and a fifth that reads 700 long documents once."""
    settings = "chats=160,tenants=4,turns=5,system=4000,question=500,answer=250,rate=0.16,pause=60,seed=19"
    out, chance = make_trace(ChatTrace.parse(settings)), random.Random(19)
    end = out[-1].arrival
    for i in range(700):
        prompt = (TraceRun("scan", 500), TraceRun(f"page {i}", chance.randint(8_000, 24_000)))
        out.append(_request(end * i / 700, prompt, f"note {i}", 50, "scanner"))
    return sorted(out, key=lambda request: request.arrival)


def _request(
    arrival: float, prompt: tuple[TraceRun, ...], answer: str, tokens: int, tenant: str | None = None
) -> TraceRequest:
    return TraceRequest(round(arrival, 6), prompt, (TraceRun(answer, tokens),), tenant)


LOADS = {
    "chats": Load(chats, "1500MiB", "4GiB"),
    "rereads at random depths": Load(rereads, "20GiB"),
    "short prompts, no host": Load(short_prompts, "4GiB"),
    "branching agents": Load(branching_agents, "4GiB"),
    "scans of one tenant": Load(scans, "3GiB"),
}
