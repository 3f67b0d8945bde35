"""Simulated traces: what is found, exactly; that tenants share nothing; what bad traces are told."""

from __future__ import annotations

import io
import itertools
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
from rich.console import Console

from dsv4_jax import CacheLayout, CacheSize, DSV4Config, KVCacheManager
from dsv4_jax.cli import main
from dsv4_jax.cli.simulate_server import placement
from dsv4_jax.cli.simulate_table import hosts_table
from dsv4_jax.errors import TraceError
from dsv4_jax.manager import CachePolicy, HostSize, Namespace, SnapshotPlacement, WritePolicy
from dsv4_jax.simulate import Server, StepTime, TraceRequest, read_trace, simulate
from dsv4_jax.simulate.plot import hosts_picture
from dsv4_jax.simulate.report import report
from dsv4_jax.simulate.synthesis import ChatTrace, make_trace
from dsv4_jax.simulate.tokens import prefix_names, run_tokens
from dsv4_jax.simulate.trace import TraceRun, write_trace

from . import refusals

BLOCK = 128
LAYOUT = CacheLayout(DSV4Config.tiny(max_position_embeddings=1 << 16))
EVERY_BLOCK = SnapshotPlacement(every=1)
STEP = StepTime(1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
TINY = ["--model", "tiny", "--max-requests", "4", "--snapshots", "8"]


def server(blocks: int = 64, slots: int = 4, snapshots: int = 64, **options) -> Server:
    options.setdefault("policy", CachePolicy(snapshots=EVERY_BLOCK))
    return Server(LAYOUT, CacheSize(blocks, slots, 64, snapshots), step_time=STEP, **options)


def request(arrival: float, *runs: tuple, output: int = 1, tenant: str | None = None) -> TraceRequest:
    name = f"answer at {arrival} to {tenant}"
    return TraceRequest(arrival, tuple(TraceRun(*run) for run in runs), (TraceRun(name, output),), tenant)


def refused(capsys, argv: list, *parts: str) -> None:
    refusals.refused(capsys, ["simulate", *argv], *parts)


# Traces


def test_runs_are_prefixes_of_sequences_that_their_names_alone_determine() -> None:
    long, short = run_tokens([TraceRun("a", 300)], 1000), run_tokens([TraceRun(7, 5), TraceRun("a", 100)], 1000)
    assert long.dtype == np.int32 and long.min() >= 0 and long.max() < 1000
    assert np.array_equal(short[5:], long[:100])
    assert not np.array_equal(run_tokens([TraceRun("7", 5)], 1000), short[:5])
    assert len(set(long.tolist())) > 200
    assert np.array_equal(run_tokens([TraceRun("a", 100, 50), TraceRun("a", 2, 7)], 1000)[:100], long[50:150])
    assert run_tokens([], 10).shape == (0,)


def test_names_are_those_of_beginnings() -> None:
    ids = run_tokens([TraceRun("a", 1000)], 500)
    names = prefix_names(ids, 128, "t")
    assert len(names) == len(set(names)) == 7 and prefix_names(ids[:600], 128, "t") == names[:4]
    assert not set(names) & set(prefix_names(ids, 128, "u"))
    for place in (0, 127, 130, 700):
        other = ids.copy()
        other[place] ^= 1
        first = place // 128
        assert prefix_names(other, 128, "t")[:first] == names[:first]
        assert not set(prefix_names(other, 128, "t")[first:]) & set(names)
    swapped = np.concatenate([ids[128:256], ids[:128]])
    assert not set(prefix_names(swapped, 128, "t")) & set(names)


def test_both_forms() -> None:
    native = {"arrival": 2.5, "prompt": [["s", 200], [4, 1, 9]], "output": [["answer", 9]], "tenant": "t"}
    mooncake = {"timestamp": 1500, "input_length": 1025, "output_length": 3, "hash_ids": [7, 8, 9], "type": "x"}
    lines = [json.dumps(native), "\n", json.dumps(mooncake), json.dumps(native | {"arrival": 0, "output": 0})]
    first, second, third = read_trace(lines)
    assert (first.arrival, first.output, first.tenant) == (0.0, (), "t")
    assert (second.arrival, second.prompt, second.output_tokens) == (1.5, ((7, 512, 0), (8, 512, 0), (9, 1, 0)), 3)
    assert third == TraceRequest(2.5, (TraceRun("s", 200), TraceRun(4, 1, 9)), (TraceRun("answer", 9),), "t")
    assert len(read_trace(lines, limit=1)) == 1
    assert read_trace(lines[2:3], timestamp_unit=1.0)[0].arrival == 1500
    (floor,) = read_trace([json.dumps(mooncake | {"hash_ids": [7, 8]})])  # no id for the last, partial block
    assert floor.prompt[:2] == second.prompt[:2] and floor.prompt_tokens == 1025 and floor.prompt[2].hash != 9
    written = io.StringIO()
    write_trace([second, third], written)
    assert read_trace(written.getvalue().splitlines()) == [second, third]


NATIVE = {"arrival": 0, "prompt": [["a", 10]], "output": 5}
MOONCAKE = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("{", ("not JSON",)),
        ("[1]", ("a JSON object, got [1]",)),
        (NATIVE | {"arrival": -1}, ("'arrival'", "got -1")),
        (NATIVE | {"arrival": "now"}, ("'arrival'", '"now"')),
        (NATIVE | {"arrival": float("inf")}, ("'arrival'", "Infinity")),
        (NATIVE | {"prompt": []}, ("'prompt'", "no tokens")),
        (NATIVE | {"prompt": "abc"}, ("'prompt'", "list of [hash, tokens]")),
        (NATIVE | {"prompt": [["a", 1], ["b", 0]]}, ("'prompt'", "item 1", "got 0")),
        (NATIVE | {"prompt": [["a"]]}, ("'prompt'", "item 0")),
        (NATIVE | {"prompt": [["a", 1, 2, 3]]}, ("'prompt'", "item 0")),
        (NATIVE | {"prompt": [["a", 1, -1]]}, ("'prompt'", "start at 0 or later", "got -1")),
        (NATIVE | {"prompt": [[1.5, 3]]}, ("'prompt'", "a hash is", "1.5")),
        (NATIVE | {"output": -2}, ("'output'", "got -2")),
        (NATIVE | {"output": True}, ("'output'", "got true")),
        (NATIVE | {"tenant": [1]}, ("'tenant'", "got [1]")),
        (NATIVE | {"tenent": 1}, ("'tenent'", "unknown field")),
        ({"arrival": 0, "output": 1}, ("'prompt'", "is missing")),
        (MOONCAKE | {"input_length": 0}, ("'input_length'", "at least 1")),
        (MOONCAKE | {"hash_ids": []}, ("'hash_ids'", "0 ids, not 1 or 2 for 600 tokens in blocks of 512")),
        (MOONCAKE | {"input_length": 512}, ("'hash_ids'", "2 ids, not 1 for 512 tokens")),
        (MOONCAKE | {"hash_ids": 3}, ("'hash_ids'", "must be a list")),
        (MOONCAKE | {"hash_ids": [1, None]}, ("'hash_ids'", "item 1", "null")),
        (MOONCAKE | {"output_length": 2**31}, ("'output_length'",)),
        ({"timestamp": 0, "hash_ids": [1]}, ("'input_length'", "is missing")),
    ],
)
def test_bad_lines_are_named(line: object, parts: tuple[str, ...]) -> None:
    text = line if isinstance(line, str) else json.dumps(line)
    with pytest.raises(TraceError) as caught:
        read_trace([json.dumps(NATIVE), text], source="t.jsonl")
    assert str(caught.value).startswith("t.jsonl, line 2") and caught.value.line == 2
    assert all(part in str(caught.value) for part in parts), caught.value


def test_what_is_too_long_for_memory_is_refused(monkeypatch) -> None:
    """A line, a trace of any iterable or file, and a request that fits an enormous cache."""
    monkeypatch.setattr("dsv4_jax.simulate.trace.MAX_LINE", 100)
    monkeypatch.setattr("dsv4_jax.simulate.trace.MAX_PARTS", 600)

    class Endless(io.TextIOBase):
        def readline(self, size: int = -1) -> str:
            assert 0 <= size < 1000, "the whole line was asked for"
            return "x" * size

    for lines in (Endless(), itertools.repeat("x" * 1000)):
        with pytest.raises(TraceError, match="line 1: is longer than 100 characters"):
            read_trace(lines)
    line = json.dumps(NATIVE) + "\n"
    for lines, count in ((itertools.repeat("\n"), 151), (itertools.repeat(line), 101), (io.StringIO(line * 200), 101)):
        with pytest.raises(TraceError, match="the trace is too long") as caught:
            read_trace(lines, source="t")
        assert caught.value.line == count
    assert len(read_trace(itertools.repeat(line), limit=50)) == 50
    monkeypatch.setattr("dsv4_jax.simulate.engine.MAX_TOKENS", 300)
    with pytest.raises(TraceError, match="request 1 has 302 tokens: at most 300 can be simulated"):
        simulate([request(0, ("a", 299)), request(1, ("b", 301))], server())


def test_generated_traces() -> None:
    settings = ChatTrace.parse("seed=3,chats=12,tenants=2,rate=0.5")
    assert settings == ChatTrace(seed=3, chats=12, tenants=2, rate=0.5)
    trace = make_trace(settings)
    assert trace == make_trace(settings) != make_trace(ChatTrace(seed=4, chats=12, tenants=2, rate=0.5))
    assert [r.arrival for r in trace] == sorted(r.arrival for r in trace)
    assert {r.tenant for r in trace} == {"tenant 0", "tenant 1"}
    last = max(trace, key=lambda r: len(r.prompt))
    earlier = [r for r in trace if r.prompt == last.prompt[: len(r.prompt)] and r is not last]
    assert len(earlier) == len(last.prompt) // 2 - 1 >= 2, "a chat's prompts contain those before, and the answers"
    for bad in ("chats=0", "turns=x", "rate=-1", "colour=red"):
        with pytest.raises(TraceError, match=bad.partition("=")[0]):
            ChatTrace.parse(bad)


# What is found


def test_hits_are_exact() -> None:
    """The second prompt shares 3 blocks and a bit, the third repeats it: all but the last token's block."""
    trace = [
        request(0, ("s", 3 * BLOCK + 50), ("a", 200)),
        request(100, ("s", 3 * BLOCK + 50), ("b", 206)),  # 5 blocks exactly
        request(200, ("s", 3 * BLOCK + 50), ("b", 206)),
    ]
    result = simulate(trace, server())
    assert [job.hit for job in result.jobs] == [0, 3 * BLOCK, 4 * BLOCK]
    assert [job.seen for job in result.jobs] == [0, 3 * BLOCK, 4 * BLOCK]
    assert result.scheduled_tokens == sum(r.prompt_tokens for r in trace) - 7 * BLOCK
    assert [round(job.first_token - job.trace.arrival, 9) for job in result.jobs][1:] == [2.0, 1.0]
    numbers = report(result)
    assert numbers["hits"]["tokens"] == {"device": 7 * BLOCK, "host": 0}
    assert numbers["hits"]["rate"] == pytest.approx(7 * BLOCK / (634 + 640 + 640))
    assert numbers["hits"]["share_of_highest"] == 1
    assert numbers["recomputed_tokens"] == {"seen_before": 0, "after_preemption": 0}


def test_without_a_policy_nothing_is_found() -> None:
    trace = [request(t, ("s", 400)) for t in (0, 100)]
    result = simulate(trace, server(policy=None))
    assert [job.hit for job in result.jobs] == [0, 0] and result.scheduled_tokens == 800
    assert report(result)["recomputed_tokens"]["seen_before"] == 3 * BLOCK


def test_answers_are_found_by_the_next_turn() -> None:
    """The answer's last token is never fed, so that block is not cached; those before it are."""
    answer = TraceRun("answer", 2 * BLOCK + 28)
    chat = [
        TraceRequest(0, (TraceRun("q", 100),), (answer,)),
        TraceRequest(1000, (TraceRun("q", 100), answer, TraceRun("more", 10)), (TraceRun("x", 1),)),
    ]
    placement = SnapshotPlacement(every=None)
    result = simulate(chat, server(policy=CachePolicy(snapshots=placement)))
    assert [job.hit for job in result.jobs] == [0, 2 * BLOCK]  # fed: 100 + 283 tokens; the end of output is at 256


def test_hits_on_the_host() -> None:
    """Others push the prompt to the host: the first to ask finds it there, the next one on the device."""
    others = [request(100 + 10 * i, (f"other {i}", 6 * BLOCK)) for i in range(2)]
    trace = [request(0, ("s", 5 * BLOCK)), *others, request(200, ("s", 5 * BLOCK)), request(300, ("s", 5 * BLOCK))]
    for write in (WritePolicy.write_back(), WritePolicy.write_through()):
        policy = CachePolicy(write=write, snapshots=EVERY_BLOCK)
        result = simulate(trace, server(blocks=10, policy=policy, host=HostSize.of(LAYOUT, 64, 64)))
        hits = [(job.hit - job.hit_host, job.hit_host) for job in result.jobs]
        assert hits == [(0, 0), (0, 0), (0, 0), (0, 4 * BLOCK), (4 * BLOCK, 0)], write.name
        numbers = report(result)
        moved, unit = numbers["transfer_bytes"], numbers["pools"]["host"]["unit_bytes"]
        assert moved["swap_in"] == 4 * unit and moved["swap_out"] % unit == 0 < moved["swap_out"]
        assert numbers["evictions"]["device"] > 0
        assert [n for n in result.stats.cache.counters.hit_tokens.values() if n] == [4 * BLOCK] * 2
    lost = simulate(trace, server(blocks=10))
    assert [job.hit for job in lost.jobs] == [0, 0, 0, 0, 4 * BLOCK]
    assert report(lost)["recomputed_tokens"]["seen_before"] == 4 * BLOCK


def test_requests_wait_and_are_preempted() -> None:
    """Three requests that need 4 blocks each at their end, in 5 blocks and 2 slots."""
    trace = [request(0, (name, 250), output=200) for name in "abc"]
    result = simulate(trace, server(blocks=5, slots=2, snapshots=0, policy=None))
    assert result.preemptions >= 1 and result.lost > 0
    assert result.scheduled_tokens == sum(250 + 200 - 1 for _ in trace) + result.lost
    first, second, third = sorted(result.jobs, key=lambda job: job.index)
    assert first.ended < second.ended <= third.ended and third.admitted > 0
    numbers = report(result)
    assert numbers["admission_failures"]["slot"] >= 1
    assert numbers["pools"]["device"]["peak_used"] == 5
    assert [job.sampled for job in result.jobs] == [200] * 3
    assert numbers["seconds"]["queued"]["max"] == third.admitted


def test_prompts_that_memory_has_no_room_for_wait_at_the_door(monkeypatch) -> None:
    trace = [request(0.1 * i, ("s", 200), (f"own {i}", 100), output=150) for i in range(9)]
    whole = report(simulate(trace, server(blocks=20)))
    monkeypatch.setattr("dsv4_jax.simulate.host.AT_DOOR", 1500)
    held = report(simulate(trace, server(blocks=20)))
    for numbers in (whole, held):
        del numbers["cpu"]
    assert held["timeline"].pop("waiting") == whole["timeline"].pop("waiting") and held == whole


def test_what_can_never_run_is_rejected() -> None:
    trace = [request(0, ("a", 65 * BLOCK)), request(0, ("b", 30 * BLOCK)), request(0, ("c", 10))]
    done: list[int] = []
    result = simulate(trace, server(blocks=20), on_done=lambda: done.append(1))
    assert (dict(result.rejected), len(result.jobs), len(done)) == ({"context": 1, "device": 1}, 1, 3)
    with pytest.raises(TraceError, match="no request of the trace fits: this cache holds 2560 tokens"):
        simulate(trace[:2], server(blocks=20))


# Tenants


def test_ten_tenants_with_equal_prompts_share_nothing() -> None:
    """Of every tenant the first request finds nothing, whatever the nine others have cached; the second all."""
    rounds = [[request(1000 * k + t, ("s", 5 * BLOCK), tenant=f"t{t}") for t in range(10)] for k in range(2)]
    roomy = simulate([*rounds[0], *rounds[1]], server(blocks=64, slots=10))
    assert [job.hit for job in roomy.jobs] == [0] * 10 + [4 * BLOCK] * 10
    tight = CachePolicy(write=WritePolicy.write_through(), snapshots=EVERY_BLOCK)
    for result in (
        roomy,
        simulate([*rounds[0], *rounds[1]], server(12, 2, 6, policy=tight, host=HostSize.of(LAYOUT, 30, 30))),
    ):
        assert (result.shadow.foreign, result.shadow.wrong) == (0, 0)
        assert all(job.hit <= job.seen for job in result.jobs)
    same = simulate([request(100 * r.arrival, *r.prompt) for r in rounds[0]], server())
    assert [job.hit for job in same.jobs] == [0] + [4 * BLOCK] * 9, "without tenants they would share"


def test_the_count_of_foreign_units_sees_them(monkeypatch) -> None:
    """A manager that forgets the namespaces is caught by what lies on the device."""
    admit = KVCacheManager.admit_request

    def forgetful(self, tokens, *, namespace: Namespace | None = None, **options):
        return admit(self, tokens, **options)

    monkeypatch.setattr(KVCacheManager, "admit_request", forgetful)
    trace = [request(100 * t, ("s", 5 * BLOCK), tenant=f"t{t}") for t in range(3)]
    assert simulate(trace, server()).shadow.foreign == 2 * (4 + 1)  # 4 blocks and a state, twice


@pytest.mark.parametrize("write", [None, WritePolicy.write_back(), WritePolicy.write_through_selective(2)])
def test_generated_chats_under_pressure(write: WritePolicy | None) -> None:
    """Preemption, eviction and host tier at once: every unit holds what it should, and everyone ends."""
    settings = ChatTrace(seed=1, chats=12, tenants=2, turns=3, system=500, answer=60, rate=50.0, pause=1.0)
    trace = make_trace(settings)
    policy = write and CachePolicy(write=write, snapshots=SnapshotPlacement(every=2))
    result = simulate(trace, server(36, 8, 10, policy=policy, host=HostSize.of(LAYOUT, 30, 12), token_budget=512))
    assert (result.shadow.foreign, result.shadow.wrong) == (0, 0)
    assert [job.sampled for job in result.jobs] == [job.trace.output_tokens for job in result.jobs]
    assert len(result.jobs) == len(trace) and result.preemptions > 0
    assert all(job.trace.arrival <= job.admitted < job.first_token <= job.ended for job in result.jobs)
    assert all(job.hit <= job.seen for job in result.jobs)
    pools = result.stats.cache.pools
    assert not any(pool.private for pool in pools.values())
    assert pools["device"].evictable == pools["device"].cached


# The command


def cli(capsys, *argv: object) -> dict:
    assert main(["simulate", *map(str, argv), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


SPREAD = dict(mean=float, p50=float, p99=float, max=float)
RUN: dict[str, Callable | type | tuple | dict] = {
    "name": str,
    "options": str,
    "requests": dict(
        run=int, rejected=dict(context=int, device=int), tenants=int, prompt_tokens=int, output_tokens=int
    ),
    "cache": dict(
        size=dict(num_blocks=int, num_slots=int, max_blocks_per_request=int, num_snapshots=int, pool_ranks=int),
        host=dict(num_pages=int),
        kv_format=str,
        index_format=str,
        block_tokens=int,
        bytes=int,
        host_bytes=int,
        policy=str,
        order=str,
    ),
    "hits": dict(
        requests=int,
        tokens=dict(device=int, host=int),
        rate=float,
        rate_by_tier=dict(device=float, host=float),
        seen_before_tokens=int,
        highest_possible_rate=float,
        share_of_highest=float,
    ),
    "recomputed_tokens": dict(seen_before=int, after_preemption=int),
    "evictions": dict(device=int, host=int, storage=int, snapshot=int),
    "transfer_bytes": dict(swap_out=int, snapshot=int, swap_in=int, restore=int, total=int),
    "preemptions": int,
    "admission_failures": dict(slot=int, device=int, never=int),
    "pools": {
        name: dict(total=int, peak_used=int, peak_in_use=int, unit_bytes=int) for name in ("device", "host", "slot")
    },
    "seconds": dict(simulated=float, busy=float, waited_for_transfers=float)
    | dict.fromkeys(("queued", "first_token", "whole_request"), SPREAD),
    "steps": int,
    "planned_steps": int,
    "scheduled_tokens": int,
    "isolation": dict(foreign_units=int, wrong_units=int),
    "cpu": dict.fromkeys(("step", "admission"), SPREAD),
    "bound": dict(
        endless_rate=float,
        blocks_rate=float,
        states_rate=float,
        clairvoyant_rate=float,
        share_of_endless=float,
        share_of_clairvoyant=float,
    ),
}


def matches(value: object, schema: object) -> bool:
    if isinstance(schema, dict):
        return (
            isinstance(value, dict)
            and value.keys() == schema.keys()
            and all(matches(value[k], schema[k]) for k in schema)
        )
    return type(value) is schema


@pytest.mark.slow
def test_json_plot_and_equal_output(capsys, tmp_path: pathlib.Path) -> None:
    made, plot = tmp_path / "trace.jsonl", tmp_path / "sim.png"
    options = [*TINY, "--blocks", 60, "--host-pages", 400]
    chats = "chats=4,turns=2,system=300,question=80,answer=20"
    whole = cli(capsys, "--generate", f"{chats},seed=2", "--save-trace", made, *options, "--plot", plot, "--bound")
    assert (whole.keys(), whole["model"], whole["linked_outputs"]) == (
        {"model", "title", "linked_outputs", "runs"},
        "tiny",
        0,
    )
    (first,), (again,) = whole["runs"], cli(capsys, made, *options, "--bound")["runs"]
    timeline = first.pop("timeline")
    assert matches(first, RUN)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert len({len(column) for column in timeline.values()}) == 1 < len(timeline["seconds"]) <= 514
    assert timeline["seconds"] == sorted(timeline["seconds"])
    assert timeline["hit_device_tokens"][-1] == first["hits"]["tokens"]["device"] > 0
    assert timeline["running"][-1] == timeline["waiting"][-1] == 0
    assert again.pop("timeline") == timeline
    assert first.pop("cpu").keys() == again.pop("cpu").keys() and first == again
    (other,) = cli(capsys, "--generate", f"{chats},seed=3", *options)["runs"]
    assert other["requests"] != first["requests"] and other["bound"] is None


def test_variants_side_by_side(capsys, tmp_path: pathlib.Path) -> None:
    """Each is what the command would be with its options; the shares of memory are those asked for."""
    plot = tmp_path / "sim.png"
    chats = ["--generate", "chats=4,turns=2,system=300,question=80,answer=20", *TINY[:4]]
    variants = {
        "none": "--policy none",
        "as given": "",
        "blocks": "--blocks 30 --snapshots 3",
        "host": "--host 20MB --snapshot-fraction 0.5 --policy selective:2",
        "slow": "--step-time fixed=1,prefill_token=0 --every-step",
    }
    words = [word for name, options in variants.items() for word in ("--compare", f"{name}: {options}")]
    result = cli(capsys, *chats, "--hbm", "20MB", *words, "--plot", plot)
    runs = {run["name"]: run for run in result["runs"]}
    assert list(runs) == list(variants) and [run["options"] for run in result["runs"]] == list(variants.values())
    alone = cli(capsys, *chats, "--hbm", "20MB")["runs"][0]
    for name in ("hits", "cache", "seconds", "timeline"):
        assert runs["as given"][name] == alone[name]
    assert runs["none"]["cache"]["policy"] == "none" and runs["none"]["cache"]["size"]["num_snapshots"] == 0
    assert (runs["blocks"]["cache"]["size"]["num_blocks"], runs["blocks"]["cache"]["size"]["num_snapshots"]) == (30, 3)
    assert runs["slow"]["planned_steps"] == runs["slow"]["steps"] < runs["slow"]["seconds"]["busy"] + 1
    assert alone["planned_steps"] < alone["steps"]
    size, pools = runs["host"]["cache"], runs["host"]["pools"]
    assert 0.9 * 20e6 < size["host_bytes"] <= 20e6 and size["policy"] == "write_through_selective"
    assert size["host"] == {"num_pages": pools["host"]["total"]}
    assert (1 + pools["host"]["total"]) * pools["host"]["unit_bytes"] == size["host_bytes"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert main(["simulate", *chats, "--hbm", "20MB", *words]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in variants) and "steps" in out


def test_several_hosts(capsys, tmp_path: pathlib.Path) -> None:
    """Both ways at each speed; the same every time; what is asked of the network is what is told of it."""
    plot = tmp_path / "hosts.png"
    words = ["--generate", "chats=3,turns=1,system=600,answer=20", *TINY, "--blocks", 60, "--prefill-hosts", 1]
    words += ["--decode-hosts", "1", "--network", "8Gbit/s", "--latency", "1ms", "--speed", "1,8"]
    result = cli(capsys, *words, "--host-pages", 99, "--plot", plot)
    assert result["hosts"] == {"prefill": 1, "decode": 1, "joint": 2}
    assert result["network"] == {"bandwidth": 1e9, "latency": 1e-3}
    assert [(run["name"], run["speed"]) for run in result["runs"]] == [
        ("1 + 1", 1),
        ("2 joint", 1),
        ("1 + 1", 8),
        ("2 joint", 8),
    ]
    handed, joint, faster, _ = result["runs"]
    assert handed["hand_offs"]["whole"] > 0 == joint["hand_offs"]["sent"] and handed["network"]["bytes"] > 0
    assert faster["requests"]["per_second"] == pytest.approx(8 * handed["requests"]["per_second"])
    assert [host["kind"] for run in (handed, joint) for host in run["hosts"]] == ["prefill", "decode", "joint", "joint"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert main(["simulate", *map(str, words), "--host-pages", "99"]) == 0
    out = capsys.readouterr().out
    assert "2 joint" in out and "TTFT" in out and "served" in out
    refused(capsys, words, "error: --prefill-hosts: hand-offs need --host, and a --policy")
    refused(capsys, [*words, "--host-pages", 9, "--context", "128"], "error: --blocks, --context: no request of the")
    for option, value, problem in (
        ("--network", "50", "'50' is not a rate above 0 such as 50GB/s"),
        ("--network", "50Gb/s", "'50Gb/s' is not a rate"),
        ("--network", "0GB/s", "'0GB/s' is not a rate"),
        ("--network", "-1GB/s", "not a rate"),
        ("--latency", "5", "'5' is not a time"),
        ("--speed", "1,1", "different numbers"),
        ("--speed", "0", "from 1e-6"),
        ("--speed", "nan", "from 1e-6"),
        ("--prefill-hosts", "0", "at least 1"),
        ("--decode-hosts", "-1", "must not be negative"),
        ("--prefill-hosts", "100000000", "an integer from 1 to "),
    ):
        refused(capsys, [*words, "--host-pages", 99, f"{option}={value}"], option, problem)
    for extra in ("--bound", "--compare=a:"):
        refused(capsys, [*words, "--host-pages", 99, extra], "not with several hosts")
    refused(capsys, ["--generate", "", "--speed", "2"], "--speed: goes with both --prefill-hosts and --decode-hosts")
    few = "--token-budget: 8, less than a token of each of 64 slots"
    refused(capsys, ["--generate", "", "--max-requests", 64, "--token-budget", 8], few)
    refused(capsys, ["--generate", "", "--decode-hosts", "2"], "--decode-hosts: goes with both")


def test_the_rate_of_several_hosts_is_the_rate_served() -> None:
    """In the table, of which no column is cut at 80, and in the plot; whatever was asked of the hosts."""
    first, token = {"p50": 123.4, "p95": 1234.5}, {"p50": 0.1234, "p95": 1.2345, "p99": 1.2345}
    runs = [
        {
            "name": name,
            "speed": speed,
            "bound": "decode wait",
            "hits": {"rate": 0.9876},
            "network": {"bytes": 10**13},
            "requests": {"run": 999_999, "prompt_tokens": 10**9, "per_second": 15.25, "rejected": {}},
            "per_second": {"requests": 8 - speed, "output_tokens": 123_456.0},
            "seconds": {"first_token": first, "per_output_token": token, "token_gap": token},
        }
        for speed in (1, 2)
        for name in ("12 + 4", "16 joint")
    ]
    result = {"model": "flash", "title": "flash: 20.00 GiB of HBM a host", "runs": runs}
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(hosts_table(result))
    text = console.export_text()
    assert "\u2026" not in text and "7.00" in text and "15.25" not in text
    assert max(map(len, text.splitlines())) <= 80 and text.count("decode") == text.count("wait") == len(runs)
    for axes in hosts_picture(result).axes:
        assert axes.get_xlabel() == "requests served a second"
        assert {tuple(line.get_xdata()) for line in axes.lines} == {(7, 6)}


def test_several_hosts_of_a_trace_in_seconds_since_1970(capsys, tmp_path: pathlib.Path) -> None:
    """Times come out as from 0 on, however slow; and answers of one token can be sampled."""
    options = [*TINY, "--blocks", 60, "--host-pages", 99, "--prefill-hosts", 1, "--decode-hosts", 1, "--speed", 1e-6]
    runs = []
    for began in (0, 1.7e9):
        trace = tmp_path / f"{began}.jsonl"
        lines = [dict(arrival=began + i, prompt=[[f"p{i}", 600]], output=1) for i in range(3)]
        trace.write_text("\n".join(map(json.dumps, lines)))
        runs.append(cli(capsys, trace, *options, "--plot", tmp_path / "hosts.png")["runs"])
    assert runs[0] == runs[1]


def test_the_table_and_the_options(capsys, tmp_path: pathlib.Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text("".join(json.dumps(MOONCAKE | {"timestamp": 1000 * i}) + "\n" for i in range(3)))
    assert (
        main(["simulate", str(trace), *TINY, "--blocks", "20", "--snapshots-at", "prompt,every:3", "--order", "lfu"])
        == 0
    )
    out = capsys.readouterr().out
    assert "hit rate" in out and "56.89%" in out  # 4 of 600 tokens' 4 whole blocks, by two of three: 2 * 512 / 1800
    (report,) = cli(capsys, trace, *TINY, "--blocks", 20, "--limit", 1, "--policy", "none")["runs"]
    assert (report["requests"]["run"], report["cache"]["policy"], report["hits"]["rate"]) == (1, "none", 0.0)
    (sized,) = cli(capsys, trace, *TINY, "--hbm", "40MB", "--policy", "selective:3", "--context", "1K")["runs"]
    size, unit = sized["cache"]["size"], sized["pools"]["device"]["unit_bytes"]
    assert size["max_blocks_per_request"] == 8 and 0 <= 40 * 10**6 - sized["cache"]["bytes"] < unit


def test_refusals(capsys, tmp_path: pathlib.Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps(NATIVE) + "\n" + json.dumps(NATIVE | {"output": -1}) + "\n")
    refused(capsys, [bad], "bad.jsonl, line 2, field 'output'", "got -1")
    (empty := tmp_path / "empty.jsonl").write_text("\n")
    refused(capsys, [empty], "empty.jsonl: there is no request")
    refused(capsys, [tmp_path / "none.jsonl"], "No such file")
    refused(capsys, [], "give either a TRACE or --generate")
    refused(capsys, [bad, "--generate", ""], "give either a TRACE or --generate")
    refused(capsys, ["--generate", "chats=0"], "field 'chats'", "at least 1")
    refused(capsys, ["--generate", "", "--policy", "best"], "'best' is neither")
    refused(capsys, ["--generate", "", "--policy", "selective:0"], "at least 1")
    refused(capsys, ["--generate", "", "--blocks", "4", "--hbm", "1GB"], "not allowed with")
    refused(capsys, ["--generate", "", "--hbm", "1MB"], "976.56 KiB are too few", "MiB are missing")
    refused(capsys, ["--generate", "", "--host", "400KB"], "390.62 KiB are too few")
    refused(capsys, ["--generate", "", "--step-time", "fixed=-1"], "field 'fixed'")
    refused(capsys, ["--generate", "", "--step-time", "speed=1"], "unknown setting")
    refused(capsys, ["--generate", "", "--step-time", "bandwidth=0"], "field 'bandwidth'")
    refused(capsys, ["--generate", "", "--snapshot-fraction", "1"], "'1' is not a number in [0, 1)")
    refused(capsys, ["--generate", "", "--compare", "--policy none"], "has no name")
    refused(capsys, ["--generate", "", "--compare", " : "], "has no name")
    refused(capsys, ["--generate", "", "--compare", ": --policy none"], "has no name")
    refused(capsys, ["--generate", "", "--compare", "a: --policy best"], "--compare", "'a'", "'best' is neither")
    refused(capsys, ["--generate", "", "--compare", "a: --hbm 'x"], "--compare", "'a'", "No closing quotation")
    refused(capsys, ["--generate", "", "--compare", "a: --model pro"], "unrecognized arguments: --model pro")
    refused(capsys, ["--generate", "", "--compare", "a:", "--compare", "a: --order lfu"], "the same name")
    refused(capsys, ["--generate", "chats=2", "--blocks", "3"], "no request of the trace fits")
    with pytest.raises(SystemExit) as exit_:
        main(["simulate", "--help"])
    assert exit_.value.code == 0 and "examples:" in capsys.readouterr().out


def test_it_imports_no_jax() -> None:
    code = (
        "import sys; from dsv4_jax.cli import main; "
        "main('simulate --generate chats=1,turns=1 --model tiny --blocks 200 --json'.split()); "
        "assert 'jax' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# Where snapshots are kept, in words


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("prompt,output,junctions,doubling:4,every:64", SnapshotPlacement()),
        ("none", SnapshotPlacement.none()),
        ("prompt", SnapshotPlacement(None, True, False, False, None)),
        ("output,every:32", SnapshotPlacement(32, False, True, False, None)),
        ("doubling:4,junctions", SnapshotPlacement(None, False, False, True, 4)),
    ],
)
def test_names_of_places_add_up(text: str, wanted: SnapshotPlacement) -> None:
    assert placement(text) == wanted
