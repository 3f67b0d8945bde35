"""A worker of NVIDIA Dynamo: the `LLMEngine` of ai-dynamo 1.6.1 on an `Engine`.

    python -m dsv4_jax.integrations.dynamo --checkpoint DIR [--mode prefill|decode] ...

Dynamo's frontend has the text: chats, tools, stop strings, HTTP. Token ids come here, and go. See docs/dynamo.md.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import importlib.util
import logging
import threading
import uuid
from collections.abc import AsyncIterator
from functools import partial
from typing import TYPE_CHECKING, Any

from ..engine import Engine, Handle, Output, Prompt
from ..errors import CacheError, EngineError, HandoffError, OptionError, PeerError, QueueFullError
from ..events import Tier
from ..serve.masks import Masks, grammars_of
from .dynamo_arguments import build_engine, chunk_of, load_weights, parser, prompt_arguments
from .kv_events import Announcer, Cleared, Stored, block_hash


def _of_dynamo(module: str) -> Any:
    return importlib.import_module(f"dynamo.{module}")


HAS_DYNAMO = importlib.util.find_spec("dynamo") is not None
if TYPE_CHECKING:
    _Base: Any = object
else:
    _Base = _of_dynamo("common.backend").LLMEngine if HAS_DYNAMO else object

__all__ = ["DynamoWorker", "main"]

NEAR = {tier: "GPU" for tier in Tier if tier}  # a block on the host is as good a hit: one medium
# By Dynamo's name, the engine's. Its runtime takes the worker out of discovery before the first two, and back after the
# next two have succeeded: under these names alone.
CONTROLS = {"sleep": "sleep", "pause_generation": "pause", "wake_up": "wakeup", "resume_generation": "resume"}
CONTROLS |= {"reset": "forget"}
TICK = 0.2  # seconds between what is told of load, at most
_log = logging.getLogger(__name__)


class DynamoWorker(_Base):
    """One engine as Dynamo drives it. All methods are Dynamo's, but for `build`.

    Args:
        options: the command line (`main`).

    Attributes:
        engine: None before `start` and after `cleanup`.
        broken: what has ended a thread that tells of events; health checks fail from then on.
    """

    def __init__(self, options: argparse.Namespace):
        self.options, self.mode = options, options.mode
        self.engine: Engine | None = None
        self.transport: Any = None
        self.broken: Exception | None = None
        self._handles: dict[str, Handle] = {}
        self._peers: dict[str, Any] = {}
        self._connecting = threading.Lock()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._snapshots: Any = None

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[DynamoWorker, Any]:
        """The worker of a command line, and what Dynamo is told of it."""
        options = parser().parse_args(argv)
        config = _of_dynamo("common.backend").WorkerConfig(
            namespace=options.namespace,
            component=options.component or ("prefill" if options.mode == "prefill" else "backend"),
            model_name=str(options.checkpoint),
            served_model_name=_name(options),
            discovery_backend=options.discovery_backend,
            request_plane="tcp",
            event_plane="zmq",
            tool_call_parser=options.tool_call_parser,
            reasoning_parser=options.reasoning_parser,
            disaggregation_mode=_of_dynamo("common.constants").DisaggregationMode(options.mode),
            enable_kv_routing=not options.no_kv_routing,
        )
        return cls(options), config

    def build(self) -> tuple[Engine, Any]:
        """The engine, ready for requests, and the transport of its hand-offs or None. Another host may have others."""
        return build_engine(self.options)

    async def start(self, worker_id: int) -> Any:
        self.engine, self.transport = await asyncio.to_thread(self.build)
        await asyncio.to_thread(importlib.import_module, "dsv4_jax.model")  # which takes its time
        vocab = self._first.layout.cfg.vocab_size
        self._masks = Masks(vocab, grammars_of(self.options.checkpoint, vocab))
        shards, size = len(self.engine.managers), self._first.size
        return _of_dynamo("common.backend").EngineConfig(
            model=str(self.options.checkpoint),
            served_model_name=_name(self.options),
            llm=_of_dynamo("common.backend").LlmRegistration(
                context_length=self._context,
                kv_cache_block_size=self._first.layout.block_tokens,
                total_kv_blocks=size.total_blocks,
                max_num_seqs=size.num_slots * shards,
                data_parallel_size=shards,
            ),
        )

    @property
    def _first(self) -> Any:
        assert self.engine is not None
        return self.engine.managers[0]

    @property
    def _context(self) -> int:
        return min(self._first.context_limit, self._first.pool_limit)

    # Requests

    async def generate(self, request: Any, context: Any) -> AsyncIterator[dict[str, Any]]:
        probe = _of_dynamo("common.backend.health_check").is_probe(request)
        errors = _of_dynamo("llm.exceptions")
        if self.engine is None or (probe and self.broken is not None):
            raise errors.EngineShutdown(f"the worker does not serve: {self.broken or 'it has no engine'}")
        name, parts = f"{context.id()}-{uuid.uuid4().hex[:8]}", list[bytes]()
        try:
            prompt: dict[str, Any] = self.prompt(request)
            if self.mode == "prefill" and not probe:
                if (
                    len(prompt["tokens"]) <= self._first.layout.block_tokens
                ):  # not a block to hand over: the other computes it
                    yield chunk_of(Output(name, finish="handoff"), None) | {"disaggregated_params": {"parts": []}}
                    return
                prompt = dict(tokens=prompt["tokens"], export=parts.append)
            told = ((request.get("prefill_result") or {}).get("disaggregated_params") or {}) if not probe else {}
            if told.get("parts") and told.get("host"):
                prompt["peer"] = await asyncio.to_thread(self._peer, told["host"])
            handle = self.engine.add(Prompt(id=name, **prompt))
        except QueueFullError as error:
            raise errors.WorkerUnavailable(str(error)) from error
        except EngineError as error:  # it is closed, or its device hangs: another worker
            raise errors.EngineShutdown(str(error)) from error
        except CacheError as error:
            raise errors.InvalidArgument(str(error)) from error
        self._handles[context.id()] = handle
        try:
            if prompt.get("peer") is not None:
                await asyncio.to_thread(self._receive, name, told["parts"])
            async for chunk in self._chunks(handle, prompt, parts):
                yield chunk
        finally:
            self._handles.pop(context.id(), None)
            if not handle.done:
                handle.abort()

    async def _chunks(
        self, handle: Handle, prompt: dict[str, Any], parts: list[bytes]
    ) -> AsyncIterator[dict[str, Any]]:
        samples, sampled = prompt.get("n", 1), 0
        async for output in handle:
            sampled += len(output.tokens)
            samples -= output.finish is not None
            if output.finish == "error":
                raise _of_dynamo("llm.exceptions").Unknown(f"the request ended in an error: {output.error}")
            chunk = chunk_of(output, None if samples else (len(prompt["tokens"]), sampled))
            if output.finish == "handoff":
                host = base64.b64encode(self.transport.published).decode()
                chunk["disaggregated_params"] = {"host": host, "parts": [part.decode() for part in parts]}
            yield chunk

    def prompt(self, request: Any) -> dict[str, Any]:
        """What is asked for, as arguments of a `Prompt`. Raises `RequestError` for what cannot be done here."""
        return prompt_arguments(request, self._context, self._masks)

    async def abort(self, context: Any) -> None:
        if (handle := self._handles.get(context.id())) is not None:
            handle.abort()

    # Prefill and decode

    def _peer(self, host: str) -> Any:
        """The prefill host of this metadata; connected anew if it was lost."""
        with self._connecting:
            peer = self._peers.get(host)
            if peer is not None and peer.error is None:
                return peer
            try:
                if peer is not None:
                    self.transport.disconnect(peer)
                self._peers[host] = self.transport.connect(base64.b64decode(host))
            except (CacheError, OSError, ValueError) as error:
                _log.warning("a prefill host cannot be reached, its prompt is computed here: %s", error)
            return self._peers.get(host)

    def _receive(self, name: str, parts: list[str]) -> None:
        assert self.engine is not None
        try:
            for part in parts:
                if not self.engine.receive(name, part.encode()):
                    return
        except (HandoffError, PeerError) as error:
            _log.warning("a hand-off is of no use, its prompt is computed here: %s", error)
            self.engine.receive(name, None)

    async def is_quiescent(self) -> bool:
        return self.engine is None or not any(manager.leases.active for manager in self.engine.managers)

    # What the frontend knows of it

    async def kv_event_sources(self) -> list[Any]:
        source = _of_dynamo("common.backend.publisher").PushSource
        shards = self.component_metrics_dp_ranks()
        return [source(on_ready=partial(self._begin, shard), dp_rank=shard) for shard in shards]

    def component_metrics_dp_ranks(self) -> list[int]:
        return [*range(1 if self.engine is None else len(self.engine.managers))]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        self._snapshots = publisher

    def _begin(self, shard: int, publisher: Any) -> None:
        self._threads.append(threading.Thread(target=self._tell, args=(shard, publisher), daemon=True))
        self._threads[-1].start()

    def _tell(self, shard: int, publisher: Any) -> None:
        """Blocks and load of a shard, until `cleanup`."""
        announcer, told, seen = Announcer(NEAR), set[int](), 0
        try:
            while not self._stop.is_set() and (engine := self.engine) is not None:
                events, missed = engine.events(seen, shard=shard, timeout=TICK)
                seen += missed + len(events)
                for each in announcer.update(events, missed) if events or missed else ():
                    # The publisher has no "cleared".
                    hashes = sorted(told) if isinstance(each, Cleared) else [*map(block_hash, each.digests)]
                    if isinstance(each, Stored):
                        told.update(hashes)
                        ids = [token for block in each.tokens for token in block]
                        parent = None if each.parent is None else block_hash(each.parent)
                        publisher.publish_stored(ids, [*map(len, each.tokens)], hashes, parent)
                    elif hashes:
                        told.difference_update(hashes)
                        publisher.publish_removed(hashes)
                if self._snapshots is not None:
                    self._snapshots.publish(shard, _load(engine, shard))
                if not engine.health().live:
                    self._stop.wait(TICK)
        except Exception as error:
            self.broken = error
            _log.exception("routers are told of no more blocks")

    async def health_check_payload(self) -> Any:  # once the thread above has died, `generate` refuses it
        return _of_dynamo("common.backend.health_check").build_health_check_payload(bos_token_id=0)

    async def register_prometheus(self, metrics: Any) -> None:
        assert self.engine is not None  # it is between `start` and `cleanup`
        metrics.register_prometheus_expfmt_callback(self.engine.metrics)

    # Its life

    def supported_controls(self) -> set[str]:
        return {*CONTROLS}

    async def engine_control(self, control: str, body: dict[str, Any]) -> dict[str, Any]:
        if control not in CONTROLS:
            return {"status": "error", "message": f"no such control: {control}"}
        assert self.engine is not None  # it is between `start` and `cleanup`
        if control == "wake_up" and self.engine.health().ready:  # it did not sleep, and has to come back all the same
            return {"status": "ok"}
        keep = {"keep": body["keep"]} if "keep" in body else {}
        done = await self._done(getattr(self.engine, CONTROLS[control]), **keep)
        if control in ("wake_up", "resume_generation") and not self.engine.health().ready:
            done["is_sleeping"] = True  # or paused: Dynamo's runtime does not take it back yet
        return done

    def supported_updates(self) -> set[str]:
        return {"weights"}

    async def engine_update(self, update: str, body: dict[str, Any]) -> dict[str, Any]:
        """{"path": a checkpoint of the same shapes, "weights_id": its name (default: the path)}"""
        if update != "weights" or not isinstance(body.get("path"), str):
            return {"status": "error", "message": 'only "weights" can be updated, from a "path"'}
        name = body.get("weights_id") or body["path"]
        return await self._done(load_weights, self.engine, self.options, body["path"], name)

    async def _done(self, call: Any, *args: Any, **options: Any) -> dict[str, Any]:
        try:
            await asyncio.to_thread(call, *args, **options)
        except (CacheError, OSError, TypeError) as error:
            return {"status": "error", "message": str(error)}
        return {"status": "ok"}

    async def cleanup(self) -> None:
        self._stop.set()
        engine, self.engine = self.engine, None
        if engine is not None:
            await asyncio.to_thread(engine.close, timeout=10.0)
        for thread in self._threads:
            await asyncio.to_thread(thread.join, 2.0)
        if self.transport is not None:
            self.transport.close()
            self.transport = None


def _name(options: argparse.Namespace) -> str:
    return options.served_model_name or options.checkpoint.resolve().name


def _load(engine: Engine, shard: int) -> Any:
    """Blocks in use by live requests; those that could be evicted are room, or a warm worker would get nothing."""
    stats = engine.managers[shard].stats()
    pool, cache = stats.cache.pools["device"], stats.cache
    used = pool.total - pool.free - pool.evictable
    hits = cache.hit_rate() if cache.counters.lookup_tokens else None
    snapshot = _of_dynamo("common.backend.publisher").ComponentSnapshot
    return snapshot(used, pool.total, used / max(pool.total, 1), shard, hits)


def main(argv: list[str] | None = None, worker: type[DynamoWorker] = DynamoWorker) -> None:
    """Runs a worker until it is told to end. Raises `OptionError` without ai-dynamo."""
    parser().parse_args(argv)
    if not HAS_DYNAMO:
        raise OptionError("a worker needs ai-dynamo: pip install --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1")
    _of_dynamo("common.backend.run").run(worker, argv)


if __name__ == "__main__":
    main()
