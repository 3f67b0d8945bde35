"""A server over a shadow of a device: an engine here, a process of HTTP beside it, no model."""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import dsv4_jax as dsv4
from dsv4_jax.engine import Core, Engine, Limits, ShadowExecutor, shapes_of
from dsv4_jax.engine.shadow import answer_of
from dsv4_jax.manager import CachePolicy, HostSize, KVCacheManager
from dsv4_jax.text import BYTE_TOKENS, save_byte_tokenizer

VOCAB = 272
END = 1
CFG = dsv4.DSV4Config.tiny(layer_types=tuple(dsv4.AttentionType), vocab_size=VOCAB)


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """What the condition returns, once it is true."""
    until = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < until, "it never came true"
        time.sleep(0.01)
    return found


def memory_of(pid: int) -> int:
    """Resident bytes."""
    return int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Speaker(ShadowExecutor):
    """A shadow that says what it is told to: `said`, by seed, until that is over."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.said: dict[int, list[int]] = {}

    def _draw(self, seed: int, place: int, fed: int, mask: Any) -> int:
        rest = self.said.get(seed)
        return rest.pop(0) if rest else super()._draw(seed, place, fed, mask)


class Stand:
    """A server, and how it is asked.

    Args:
        folder: for a tokenizer of bytes; or a checkpoint that has one.
        engine: another than one of a shadow, with what `Server.attach` is told of it.
        config: fields of `serve.Config`.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        *,
        slots: int = 8,
        columns: int = 128,
        blocks: int | None = None,
        chunk: int = 256,
        limits: Limits | None = None,
        vocab_size: int = VOCAB,
        engine: Engine | None = None,
        attach: bool = True,
        queue_tokens: int = 1 << 22,
        frontends: int = 1,
        on_get: Callable[[], object] = lambda: None,
        update: Callable[[str, str], None] | None = None,
        **config: Any,
    ):
        from dsv4_jax.serve.config import Config
        from dsv4_jax.serve.masks import grammars_of
        from dsv4_jax.serve.server import Server, listen

        if not (folder / "tokenizer.json").exists():
            assert BYTE_TOKENS <= VOCAB
            save_byte_tokenizer(folder)
        self.managers: list[KVCacheManager] = []
        if engine is None:
            cfg = dataclasses.replace(CFG, vocab_size=vocab_size)
            layout = dsv4.CacheLayout(cfg, "f32", "f32", block_tokens=16)
            size = dsv4.CacheSize(blocks or slots * columns, slots, columns, num_snapshots=4 * slots)
            host = HostSize.of(layout, 64, 16)
            self.managers = [KVCacheManager(layout, size, policy=CachePolicy(), host=host)]
            shapes = shapes_of(self.managers, chunk)
            core = Core(self.managers, shapes, limits=limits or Limits(queued=256))
            self.speaker = Speaker(shapes, vocab_size, on_get=on_get)
            engine = Engine(core, self.speaker)
        self.engine = engine
        first = engine.managers[0]
        self.context = min(first.context_limit, first.pool_limit)
        options = {"models": ["tiny"], "end_tokens": [END], "thinking": False, "drain_s": 1.0} | config
        listening = listen("127.0.0.1", 0)
        self.server = Server(listening, Config("", str(folder), **options), frontends=frontends)
        self.port = self.server.address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        masks = grammars_of(folder, vocab_size)
        self._facts = dict(vocab_size=vocab_size, context=self.context, grammar=masks, queue_tokens=queue_tokens)
        self._facts |= dict(weights_id="first", update=update)
        if attach:
            self.attach()
            wait_for(lambda: self.get("/ready")[0] == 200)

    def attach(self) -> None:
        self.server.attach(self.engine, **self._facts)

    def __enter__(self) -> Stand:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.close(5.0)
        self.engine.close()

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, timeout: float = 60
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            connection.request(method, path, data, headers or {})
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def get(self, path: str, **more: Any) -> tuple[int, bytes]:
        try:
            status, _, body = self.ask("GET", path, **more)
        except OSError:
            return 0, b""
        return status, body

    def post(self, path: str, body: Any, **more: Any) -> tuple[int, Any]:
        """Status, and the JSON of the answer."""
        status, _, data = self.ask("POST", path, body, **more)
        return status, json.loads(data)

    def stream(self, path: str, body: Any) -> Iterator[Any]:
        """The events of a stream, as JSON."""
        status, _, data = self.ask("POST", path, {**body, "stream": True})
        assert status == 200, data
        for line in data.decode().splitlines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line[6:])

    def tell(self, seed: int, *parts: str | int) -> list[int]:
        """Has the request of this seed answered by texts, with their marks, and ids; returns all ids."""
        ids: list[int] = []
        for part in parts:
            ids += [part] if isinstance(part, int) else self.post("/tokenize", {"prompt": part})[1]["tokens"]
        self.speaker.said[seed] = [*ids]
        return ids

    def expected(self, prompt: list[int], count: int, seed: int) -> list[int]:
        """What the shadow answers, up to the end of a text."""
        out = answer_of(prompt, count, seed, VOCAB)
        return out[: out.index(END)] if END in out else out

    def idle(self) -> None:
        """Waits until nothing is being answered; then nothing is held."""
        wait_for(lambda: not (self.engine.stats().live or self.engine.stats().queued or self.engine.stats().preempted))
        for manager in self.managers:
            assert not manager.requests and not manager.preempted
        bridge: Any = self.server._bridge
        wait_for(lambda: bridge.waiting_tokens == 0)
