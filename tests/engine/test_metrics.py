"""What an engine tells scrapers and probes: numbers that agree with its answers, under the names that are read."""

from __future__ import annotations

import collections
import json
import math
import pathlib
import re
import threading
import time
import types

import pytest

from dsv4_jax.engine import Engine, Limits, Output, Prompt
from dsv4_jax.engine.metrics import EngineMetrics
from dsv4_jax.errors import EngineError, QueueFullError
from dsv4_jax.manager import prometheus_text
from dsv4_jax.tiers.remote.peer import HANDOFF_COUNTS, PeerStats, TransportStats
from dsv4_jax.tiers.store_calls import StoreCalls

from .serving import Seeded, Server


def engine(watchdog=None, **options) -> tuple[Engine, Server]:
    server = Server(**options)
    return Engine(server.core, server.executor, watchdog=watchdog), server


def prompt(number: int, count: int = 12, **options) -> Prompt:
    return Prompt(tokens=[number % 50, 2, 3], max_new_tokens=count, sampling=Seeded(number), **options)


def samples(text: str) -> dict[str, float]:
    """Every sample by its name and labels, but for the label of the model."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = re.sub(r',?model_name="[^"]*"', "", name).replace("{}", "")
            assert name not in found, f"{name} stands there twice"
            found[name] = float(value)
    return found


def test_numbers_agree_with_the_answers():
    serving, _ = engine(shards=2)
    with serving:
        handles = [serving.add(prompt(i, 10 + i)) for i in range(5)] + [serving.add(prompt(9, 1, n=2))]
        tokens = sum(len(one.tokens) for handle in handles for one in handle.results(30))
        serving.add(prompt(7, 100)).abort()
        serving.run([prompt(8, 3)])
        text = serving.metrics("flash")
    seen = samples(text)
    assert 'vllm:num_requests_running{model_name="flash"} 0\n' in text
    assert seen['dsv4_engine_ended_total{reason="length"}'] == 8 == seen["dsv4_engine_added_total"] - 1
    assert seen['vllm:request_success_total{finished_reason="abort"}'] == 1
    assert tokens + 3 <= seen["vllm:generation_tokens_total"] <= tokens + 3 + 100
    assert seen["vllm:prompt_tokens_total"] == seen["dsv4_engine_prompt_tokens_total"] >= 3 * 8
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"):
        counts = [value for key, value in seen.items() if key.startswith(f"vllm:{name}_bucket")]
        assert counts == sorted(counts) and counts[-1] == seen[f"vllm:{name}_count"] > 0
        assert 0 < seen[f"vllm:{name}_sum"] < math.inf
    assert seen["dsv4_engine_request_seconds_count"] == 9 == seen["vllm:request_generation_tokens_count"]
    assert seen["dsv4_engine_queue_seconds_count"] in (8, 9), "one that was aborted may never have had a slot"
    assert seen["vllm:iteration_tokens_total_sum"] == seen["dsv4_engine_computed_tokens_total"]
    assert seen['dsv4_cache_pool_size{pool="device",shard="1"}'] == 36
    assert 'vllm:cache_config_info{block_size="16",num_gpu_blocks="72"}' in seen


def test_times_are_those_of_the_clock():
    """Of two samples, on a clock that the test moves: 2 s in the queue, then a token each second."""
    measured, server = EngineMetrics(), Server()
    serving = Engine(server.core, server.executor)
    serving.close()
    asked = Prompt(tokens=[1, 2, 3], n=2)
    measured.added("a", asked, 100.0)
    for at, tokens in ((103.0, [1]), (104.0, [2]), (107.0, [3, 4, 5])):
        measured.told([Output("a", 0, tokens)], at)
    measured.told([Output("a", 0, finish="stop"), Output("a", 1, finish="length"), Output("b", 0, [1])], 108.0)
    measured.close("a", 109.0)
    found = {each.name: each for each in measured.families(serving.stats(), serving.health())}
    value = {name: found[name].samples[0][1] for name in found if found[name].kind == "histogram"}
    assert (value["time_to_first_token_seconds"].total, value["time_to_first_token_seconds"].count) == (3.0, 1)
    assert (value["between_tokens_seconds"].total, value["between_tokens_seconds"].count) == (4.0, 4)
    assert (value["token_seconds"].total, value["request_seconds"].total) == (1.0, 16.0)
    assert value["request_generation_tokens"].total == 5 and value["request_prompt_tokens"].count == 2
    assert sorted(found["ended_total"].samples, key=str) == [({"reason": "length"}, 1), ({"reason": "stop"}, 1)]


def test_a_scraper_reads_all_of_it():
    parser = pytest.importorskip("prometheus_client.parser", reason="of the extra serve")
    serving, _ = engine(host=True)
    with serving:
        serving.run([prompt(1), prompt(2, n=2)])
        text = serving.metrics('a "name"\nof two lines')
    families = {family.name: family for family in parser.text_string_to_metric_families(text)}
    assert all(family.documentation for family in families.values()) and len(families) > 50
    labels = [sample.labels for family in families.values() for sample in family.samples]
    assert {each["model_name"] for each in labels} == {'a "name"\nof two lines'}
    assert families["vllm:num_requests_waiting"].type == "gauge" and families["vllm:prompt_tokens"].type == "counter"
    assert families["vllm:time_to_first_token_seconds"].type == "histogram"


def test_metrics_are_read_while_it_serves():
    """From several threads at once, beside steps: nothing is torn, nobody is held up."""
    serving, server = engine(slots=5, limits=Limits(queued=100_000))
    wrong: list[object] = []
    stop = threading.Event()

    def scrape() -> None:
        before = 0.0
        while not stop.is_set():
            seen = samples(serving.metrics())
            now = seen["vllm:e2e_request_latency_seconds_count"]
            if now < before or seen["vllm:num_requests_running"] > 5 or not serving.health().ready:
                wrong.append(seen)
            before = now

    threads = [threading.Thread(target=scrape) for _ in range(2)]
    with serving:
        for thread in threads:
            thread.start()
        serving.run(prompt(i) for i in range(60))
        stop.set()
        for thread in threads:
            thread.join(30)
        assert not wrong and samples(serving.metrics())["dsv4_engine_request_seconds_count"] == 60
    server.check_empty()


def test_what_is_not_in_use_is_no_usage():
    """Blocks that stay cached can be evicted: a router must not take a warm host for a full one."""
    serving, server = engine()
    with serving:
        serving.run([Prompt(tokens=list(range(1, 71)), max_new_tokens=4)])
        assert server.managers[0].stats().blocks_used > 3
        assert samples(serving.metrics())["vllm:kv_cache_usage_perc"] == 0
        serving.pause()
        waiting = [serving.add(prompt(i)) for i in range(3)]
        with pytest.raises(QueueFullError):
            serving.add(prompt(1, n=1000))
        seen = samples(serving.metrics())
        assert seen["dsv4_engine_refused_total"] == 1 and seen["dsv4_engine_ready"] == 0
        assert [handle.done for handle in waiting] == [False] * 3


def test_probes_see_a_pause_a_failure_and_the_end():
    fails = threading.Event()

    def on_get() -> None:
        if fails.is_set():
            fails.clear()
            raise OSError("the device is gone")

    serving, server = engine(on_get=on_get)
    with serving:
        assert serving.health() == (True, True, "", None, None)
        serving.pause()
        assert serving.health()[:3] == (True, False, "it is paused")
        serving.resume()
        fails.set()
        assert serving.add(prompt(1)).result(30).finish == "error"
        serving.run([prompt(2)])
        now = serving.health()
        assert now.live and now.ready and now.last_error == "OSError: the device is gone"
        seen = samples(serving.metrics())
        assert seen["dsv4_engine_failures_total"] == 1 and seen['dsv4_engine_ended_total{reason="error"}'] == 1
    assert serving.health()[:3] == (False, False, "the engine is closed")
    assert samples(serving.metrics())["dsv4_engine_live"] == 0
    server.check_empty()


def test_stores_and_other_hosts_are_on_the_page():
    """What their parts tell, whatever it is; those that tell nothing are left out."""
    serving, server = engine()
    counts = collections.Counter(losses=2, reconnects=1, bytes=4096, refused=3)
    peers = tuple(PeerStats("a", error, 0, 0, 0, 0, 0.0) for error in (None, "gone"))
    handoffs = collections.Counter(dict.fromkeys(HANDOFF_COUNTS, 0), foreign=5)
    told = TransportStats("socket", peers, counts, 0.5, handoffs)
    calls = StoreCalls({"block": types.SimpleNamespace(pending_bytes=7)})
    with serving:
        server.core.remote = types.SimpleNamespace(stats=lambda: told)
        server.core.storage = [types.SimpleNamespace(stats=lambda: calls.stats({"block": 64})), object()]
        text = serving.metrics()
    seen = samples(text)
    assert seen['dsv4_storage_pending_bytes{scope="block",shard="0"}'] == 7
    assert seen['dsv4_transport_peers{engine="socket",state="lost"}'] == 1
    assert seen['dsv4_transport_bytes_total{engine="socket"}'] == 4096
    assert seen['dsv4_transport_refused_total{engine="socket"}'] == 3
    assert [seen[f'dsv4_transport_handoffs_{name}_total{{engine="socket"}}'] for name in ("foreign", "dropped")] == [
        5,
        0,
    ]
    assert seen['dsv4_cache_handoffs_ended_total{side="sent",reason="done"}'] == 0
    assert prometheus_text(told, prefix="x").startswith("# HELP x_peers")
    # The dashboard shows what there is, by labels that there are.
    types_of = dict(line.split()[2:] for line in text.splitlines() if line.startswith("# TYPE"))
    panels = json.loads((pathlib.Path(__file__).parents[2] / "docs" / "grafana.json").read_text())["panels"]
    shown = [target["expr"] for panel in panels for target in panel["targets"]]
    names = {name for expr in shown for name in re.findall(r"\b(?:dsv4_|vllm:)\w+", expr)}
    assert len(names) > 25 and {name.removesuffix("_bucket") for name in names} <= types_of.keys()
    for expr in shown:
        for name in re.findall(r"\b(?:dsv4_|vllm:)\w+", expr):
            assert name.endswith("_bucket") == (types_of[name.removesuffix("_bucket")] == "histogram"), name
            assert (types_of[name.removesuffix("_bucket")] == "gauge") == (f"rate({name}" not in expr), expr
            for label in (each for some in re.findall(r"by \(([^)]*)\)", expr) for each in some.split(", ")):
                lines = [line for line in text.splitlines() if line.startswith(f"{name}{{")]
                assert not lines or any(f'{label}="' in line for line in lines), (name, label)


def test_probes_see_a_device_that_hangs():
    hangs, goes_on = threading.Event(), threading.Event()

    def on_get() -> None:
        if hangs.is_set():
            goes_on.wait(60)

    serving, _ = engine(watchdog=0.2, on_get=on_get)
    try:
        hangs.set()
        handle = serving.add(prompt(1))
        with pytest.raises(EngineError):
            raise handle.result(30).error or AssertionError
        now = serving.health()
        assert not now.live and not now.ready and "under way for 0.2 s" in now.reason
        assert now.step_age is not None and now.step_age >= 0.2
        assert samples(serving.metrics())["dsv4_engine_oldest_step_seconds"] >= 0.2
        assert samples(serving.metrics())['dsv4_engine_ended_total{reason="error"}'] == 1
        with pytest.raises(EngineError, match=r"under way for 0\.2 s"):
            serving.pause()
    finally:
        hangs.clear()
        goes_on.set()
    until = time.monotonic() + 30
    while not serving.health().live and time.monotonic() < until:
        time.sleep(0.01)
    assert serving.health().ready, "the device answers again"
    hangs.set()
    goes_on.clear()
    serving.add(prompt(2))
    while serving.health().live and time.monotonic() < until:
        time.sleep(0.01)
    serving.close()  # though nobody says how long
    assert serving.health().reason and serving._thread.is_alive()
    hangs.clear()
    goes_on.set()
    serving._thread.join(30)
    assert not serving._thread.is_alive()
