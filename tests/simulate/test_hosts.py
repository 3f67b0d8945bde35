"""Several hosts: times computed by hand, nothing lost, nothing left over, and one host as before."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math

import pytest

from dsv4_jax import AttentionType, CacheLayout, CacheSize, DSV4Config
from dsv4_jax.errors import CapacityError, LayoutError, TraceError
from dsv4_jax.manager import CachePolicy, HostSize, SnapshotPlacement, Tier
from dsv4_jax.records import page_bytes, state_pages
from dsv4_jax.simulate import Server, StepTime, TraceRequest, simulate
from dsv4_jax.simulate.hosts import simulate_handed, simulate_joint
from dsv4_jax.simulate.network import Link, Network
from dsv4_jax.simulate.report import hosts_report, report
from dsv4_jax.simulate.router import HostView, choose
from dsv4_jax.simulate.synthesis import ChatTrace, make_trace
from dsv4_jax.simulate.trace import TraceRun

BLOCK = 128
CFG = DSV4Config.tiny(max_position_embeddings=1 << 16)
LAYOUT = CacheLayout(CFG)
PAGE, STATE = page_bytes(LAYOUT), state_pages(LAYOUT, 0)
SECOND = StepTime(1.0, 0.0, 0.0, 0.0, 0.0, 0.0, bandwidth=1e17)  # every step takes one
ROOMY = Server(
    LAYOUT, CacheSize(64, 4, 64, 64), CachePolicy(snapshots=SnapshotPlacement(every=1)), HostSize(400), step_time=SECOND
)
NOW = Link(math.inf, 0.0)
approx = functools.partial(pytest.approx, abs=1e-9)


def request(arrival: float, *runs: tuple, output: int = 3) -> TraceRequest:
    name = f"answer at {arrival}"
    return TraceRequest(arrival, tuple(TraceRun(*run) for run in runs), (TraceRun(name, output),))


# Times


def test_times_are_those_computed_by_hand() -> None:
    """Two blocks in two steps on one host; what is left of the prompt, and each token, in a step on the other."""
    trace = [
        request(0, ("a", 2 * BLOCK + 44)),
        request(10, ("a", 2 * BLOCK + 44), ("b", 9)),  # found where it is decoded
        request(20, ("c", 2 * BLOCK + 1), output=1),
        request(20, ("d", BLOCK), output=0),  # no whole block before the last token
    ]
    run = simulate_handed(trace, ROOMY, 1, 1, NOW)
    jobs = [handed.job for handed in run.requests]
    times = [[job.offered, job.first_token, job.ended] for job in jobs]
    assert times == [approx([2, 3, 5]), approx([10, 11, 13]), approx([22, 23, 23]), approx([20, 21, 21])]
    assert [handed.prompt is not None for handed in run.requests] == [True, False, True, False]
    numbers = hosts_report(run)
    parts = {"wait": 0.0, "prompt": 1.5, "hand-off": 0.0, "decode wait": 0.0, "last chunk": 0.5}
    assert numbers["seconds"]["first_token_parts"] == approx(parts) and numbers["bound"] == "prompt"
    assert numbers["seconds"]["token_gap"]["p99"] == approx(1) and numbers["seconds"]["simulated"] == approx(23)
    assert numbers["per_second"]["requests"] == approx(4 / 23) and numbers["requests"]["per_second"] == approx(3 / 20)
    assert numbers["hits"]["tokens"] == 2 * BLOCK
    assert numbers["computed"] == 4 * BLOCK + (44 + 53 + 1 + BLOCK) - 1  # one token is no chunk
    joint = [handed.job for handed in simulate_joint(trace, ROOMY, 1).requests]
    assert [job.first_token for job in joint] == approx([3, 11, 23, 21])


def test_bytes_take_their_time() -> None:
    """The first block is read while the second is computed; then the second and the state."""
    run = simulate_handed([request(0, ("a", 2 * BLOCK + 44))], ROOMY, 1, 1, Link(10 * PAGE, 0.25))
    (job,) = (handed.job for handed in run.requests)
    assert [job.offered, job.first_token] == approx([2.5 + (1 + STATE) / 10, 3.5 + (1 + STATE) / 10])
    assert run.records == collections.Counter(block=2, slot=1)
    assert run.network is not None and run.network.sent == {0: (2 + STATE) * PAGE}


def test_ends_are_shared() -> None:
    """Two transfers out of one host, and one of them into a host that another one goes to; by hand."""
    ended: dict[str, float] = {}
    waiting: list[tuple[float, int, object]] = []
    network = Network(Link(100.0, 0.0), lambda at, call: waiting.append((at, len(waiting), call)))
    for name, source, target, count in (("a", 0, 2, 100), ("b", 0, 3, 150), ("c", 1, 3, 50)):
        network.transfer(0.0, source, target, count, lambda name=name: ended.setdefault(name, now))
    while waiting:
        first = min(waiting, key=lambda event: event[:2])
        waiting.remove(first)
        now = first[0]
        first[2]()
    assert ended == {"c": 1.0, "a": 2.0, "b": 2.5}  # each at 50 a second, until it has the ends to itself
    assert network.received == {2: 100, 3: 200}


# One host, and several


TIGHT = {
    "room": (Server(LAYOUT, CacheSize(300, 8, 64, 30), CachePolicy(), HostSize(600), token_budget=512), Link()),
    "few blocks": (Server(LAYOUT, CacheSize(10, 12, 64, 4), CachePolicy(), HostSize(80), token_budget=96), Link()),
    "no host room": (Server(LAYOUT, CacheSize(60, 8, 64, 8), CachePolicy(), HostSize(3 + STATE)), Link()),
    "slow": (Server(LAYOUT, CacheSize(60, 8, 64, 8), CachePolicy(), HostSize(60)), Link(PAGE / 30, 0.1)),
    "drafts": (
        Server(CacheLayout(CFG, draft_tokens=2), CacheSize(60, 8, 64, 8), CachePolicy(), HostSize(60)),
        Link(1e6),
    ),
}


@pytest.mark.parametrize("name", TIGHT)
def test_nothing_is_lost_and_nothing_left(name: str) -> None:
    server, link = TIGHT[name]
    trace = make_trace(ChatTrace(seed=5, chats=5, tenants=2, turns=2, system=400, answer=90, rate=500.0, pause=0.01))
    ended: list[int] = []
    run = simulate_handed(trace, server, 2, 1, link, on_done=lambda: ended.append(1))
    numbers = hosts_report(run)
    assert len(ended) == len(trace) == len(run.requests) + run.rejected.total()
    assert all(h.job.sampled == h.job.trace.output_tokens and h.job.ended >= h.job.first_token for h in run.requests)
    decoded = [job.index for kind, host in run.hosts if kind == "decode" for job in host.jobs]
    assert sorted(decoded) == [handed.job.index for handed in run.requests]
    assert set(numbers["isolation"].values()) == {0}
    sent, moved = numbers["hand_offs"], numbers["network"]
    assert sent["sent"] == sent["whole"] + sum(sent["given_up"].values()) > 0
    assert moved["bytes"] == (moved["blocks"] + STATE * moved["states"]) * PAGE
    parts = numbers["seconds"]["first_token_parts"]
    assert min(parts.values()) >= 0
    assert sum(parts.values()) == pytest.approx(numbers["seconds"]["first_token"]["mean"])
    assert bool(sent["given_up"]) == (name in ("no host room", "slow"))
    assert (numbers["preemptions"] > 0) == (name == "few blocks")
    if name != "room":
        return
    assert hosts_report(simulate_handed(trace, server, 2, 1, link)) == numbers
    alone, joint = simulate(trace, server), simulate_joint(trace, server, 1)
    before, after = report(alone), report(joint.hosts[0][1])
    for answer in (before, after):
        del answer["cpu"], answer["timeline"]
    assert before == after


def test_the_most_live_requests_are_of_all_steps() -> None:
    """Also of those that nothing else is looked at of."""
    trace = [request(0, ("a", 9), output=280), request(258.5, ("b", 9), output=2)]
    run = simulate_joint(trace, dataclasses.replace(ROOMY, every_step=True), 1)
    assert hosts_report(run)["hosts"][0]["live_most"] == 2


def test_the_router_sends_where_least_is_to_be_done() -> None:
    views = [HostView(), HostView(), HostView()]
    path = [bytes([i]) * 32 for i in range(4)]
    assert choose(views, path, BLOCK) == (0, 4)
    log = views[1].events
    log.emit_all("stored", Tier.DEVICE, [(digest, None) for digest in path[:3]])
    log.emit_all("stored", Tier.HOST, [(digest, None) for digest in path[:1]])
    log.emit_all("removed", Tier.DEVICE, [(digest, None) for digest in (path[0], path[2])])
    views[1].update()
    assert choose(views, path, BLOCK) == (1, 2), "one is left on the host, one on the device"
    views[1].tokens = 2 * BLOCK + 1
    assert choose(views, path, BLOCK) == (0, 4)
    views[0].requests = 1
    assert choose(views, path, BLOCK) == (2, 4)
    log.emit("cleared", Tier.NONE)
    views[1].update()
    assert views[1].missing(path) == 4


def test_what_cannot_be_is_refused() -> None:
    trace = [request(0, ("a", 300))]
    with pytest.raises(CapacityError, match="host memory"):
        simulate_handed(trace, dataclasses.replace(ROOMY, host=None), 1, 1, NOW)
    with pytest.raises(CapacityError, match="a cache policy"):
        simulate_handed(trace, dataclasses.replace(ROOMY, policy=None), 1, 1, NOW)
    for hosts in (0, 10**6):
        with pytest.raises(CapacityError, match=f"an integer from 1 to 126144, got {hosts}"):
            simulate_joint(trace, ROOMY, hosts)
    for values in ((0.0, 0.0), (-1.0, 0.0), (math.nan, 0.0), (1.0, -1.0), (1.0, math.inf)):
        with pytest.raises(TraceError, match=r"bandwidth|latency"):
            Link(*values)
    windows = CacheLayout(DSV4Config.tiny(layer_types=(AttentionType.SWA,) * 2))
    with pytest.raises(LayoutError, match="no records"):
        simulate_handed(trace, dataclasses.replace(ROOMY, layout=windows), 1, 1, NOW)
    with pytest.raises(TraceError, match="no request of the trace fits"):
        simulate_handed([request(0, ("a", 65 * BLOCK))], ROOMY, 1, 1, NOW)
