"""`Engine`: one thread that owns the core and the executor; other threads, and asyncio, add requests and read outputs.

    engine = Engine(Core(manager, executor.shapes), executor)
    for output in engine.add(Prompt(tokens=ids, max_new_tokens=100)):
        ...

What other threads ask for goes into an inbox that the thread empties once a turn; what it tells is read from copies.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import gc
import itertools
import queue
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Self, TypeVar

from ..checks import check_boolean, check_integer, check_iterable, check_seconds, shown
from ..errors import EngineError, ManagerInterruptedError, PlanError, QueueFullError, RequestError
from ..events import BlockEvent, EventLog
from ..manager.metrics import Family, ManagerStats, exposition
from ..manager.prefix.hashing import canonical_bytes
from .core import Core, check_id
from .executor import Executor, Pending, Work
from .handle import Handle, Loops, Waiter
from .job import Job
from .metrics import EngineMetrics, EngineStats, Health, vllm_families
from .prompt import Completion, Output, Prompt

__all__ = ["Engine"]

T = TypeVar("T")
HANG = 0.2  # seconds between looks at the watchdog, of who waits for the engine's thread
POLL = 1e-3  # seconds between looks at stores and peers while there is nothing to compute
YOUNG = 50_000  # objects made before Python's collector looks at the youngest, with `freeze`: else it does every 700


class Engine:
    """Serves requests: many at once, from any thread.

    Args:
        core: decides; the engine's own from now on.
        executor: runs steps; the engine's own as well.
        watchdog: seconds that the results of a call may be waited for until all requests end in an error; None: any
            time. Sending a call does not count, as that is when steps are compiled.
        freeze: keep Python's garbage collector from looking at everything that exists when the engine begins, and
            let it look less often: it stops all threads meanwhile (0.3 to 1.3 s in long runs, 0.04 without).
        clock: seconds.

    Raises:
        PlanError: an argument of another kind.

    A context manager: leaving it closes the engine.
    """

    def __init__(
        self,
        core: Core,
        executor: Executor,
        *,
        watchdog: float | None = None,
        freeze: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ):
        if not isinstance(core, Core):
            raise PlanError(f"core must be a Core, got {shown(core)}")
        if not hasattr(executor, "shapes") or not hasattr(executor, "send"):
            raise PlanError(f"executor must be an Executor, got {shown(executor)}")
        if core.shapes != executor.shapes:
            raise PlanError("the core plans steps of other shapes than the executor runs")
        self._watchdog = None if watchdog is None else check_seconds("watchdog", watchdog, error=PlanError)
        self._freeze = check_boolean("freeze", freeze, error=PlanError)
        self._core, self._executor, self._clock, self._measured = core, executor, clock, EngineMetrics()
        core.on_live = _both(core.on_live, self._measured.live)
        self._inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of what follows
        self._handles: dict[Hashable, Handle] = {}
        self._entering = 0  # requests in the inbox
        self._numbers = itertools.count(1)
        self._closed: EngineError | None = None
        self._hung: EngineError | None = None
        self._since: float | None = None  # when the thread began to wait for the device
        self._begun: collections.deque[float] = collections.deque()  # when the calls under way were
        self._computed = core.counts["computed_tokens"]  # up to the call sent last
        self._error: str | None = None  # of the last step that failed
        self._under_way: collections.deque[Pending] = collections.deque()
        self._stop = False
        self._turn_s = 0.0
        self._stats = self._now()
        self._loops = Loops()
        self._news = threading.Condition()
        self._events = [
            None if log is None else EventLog(log.capacity) for log in (manager.events for manager in core.managers)
        ]
        self._thresholds = gc.get_threshold()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dsv4-engine", daemon=True)
        self._thread.start()
        if self._watchdog is not None:
            threading.Thread(target=self._watch, name="dsv4-watchdog", daemon=True).start()

    @classmethod
    def of(
        cls,
        params: Any,
        layout: Any,
        memory: Any,
        *,
        watchdog: float | None = None,
        freeze: bool = False,
        **options: Any,
    ) -> Self:
        """An engine of parameters, a layout, and memory for its cache.

        Args:
            params: over a mesh those of `shard_params`; what is elsewhere is copied to each device whole.
            layout: a `CacheLayout`, with the parameters' numerics.
            memory: bytes of a device for the cache, or a `CacheSize`.
            watchdog, freeze: as of `Engine`.
            max_requests: with bytes: most requests at once, of each data shard (default: 64).
            max_context: with bytes: tokens of one request (default: what the requests can reach at once).
            host: bytes of the host tier, or a `HostSize` of each data shard (default: none).
            stores: of blocks and of snapshots, `AsyncStore` each; needs a host tier and `weights_id`.
            transport: a `RecordTransport` for hand-offs; the engine publishes its host pool on it, and does not close
                it. Needs a host tier and `weights_id`; of one data shard.
            policy: a `CachePolicy`; None: nothing stays cached (default: one with states in blocks, so that no share is
                set aside for them; along a pool axis `CachePolicy()`).
            weights_id: names the weights.
            events: of each data shard an `EventLog`; true: logs with `details`, to be read by `Engine.events`.
            mesh, pool: the devices, and whether those that share the heads share each request's blocks, too.
            exchanges: of the mesh's axes.
            chunk_tokens: most tokens of a step, of each data shard (default: 512, or one of each slot).
            decode_steps: K steps in a call while nobody waits (default: 1).
            decode_rows: how many rows further shapes of decodes have, each an executable: a step takes as long as its
                rows do, whether they have requests or not. (default: on a GPU, from 8 slots on, one and a quarter of
                the slots; else none.) Along with the shape the last bits of a request's logits may change: () has one.
            prefill_tokens: of how many tokens further shapes of steps that compute prompts are, beside the one of
                chunk_tokens; each is an executable, and takes as long as its tokens do (default: on a GPU a quarter of
                chunk_tokens, if that is at least 512 and has room for a token of each slot, and its drafts; else none).
                The last bits are as with decode_rows.
            drafts: most drafts of a request in a step (default: none).
            acceptance: of drafts, as of `draft_step`: "coupled" (default), or "standard", by which more are kept and a
                sampled request's tokens depend on its drafts, and so on what else runs; their distribution does not.
            least_confidence: 0 to 1, of drafts by DSpark: the first of which its head is less sure, and those behind
                it, are not kept. The tokens are the same (default: 0, all that are right are kept).
            ahead: whether a step is planned while the one before it runs (default: yes).
            limits: `Limits`.
            seed: of requests that have none.
            top: the most likeliest tokens that a request may ask for.
            implementation: of the ops.

        Raises:
            CapacityError, LayoutError: no such cache fits.
            PlanError: an argument of another kind, drafts that are not possible, or other numerics of the parameters
                than of the layout.
        """
        from .build import build

        return cls(*build(params, layout, memory, **options), watchdog=watchdog, freeze=freeze)

    @classmethod
    def load(cls, checkpoint: Any, *, watchdog: float | None = None, freeze: bool = False, **options: Any) -> Self:
        """An engine of a checkpoint's folder.

        Args:
            checkpoint: holds `config.json` and safetensors, as `load_hf` reads them.
            watchdog, freeze: as of `Engine`.
            weights: "released", or the dtype of matrices (default: released if the checkpoint has them,
                on a CPU bfloat16 if that takes at most half of its memory; else float32).
            kv_format, index_format, block_tokens: as of `CacheLayout`.
            numerics: as of `CacheLayout`: "released" needs weights as released, and has them by default.
            memory: a share of the device, as a float (default: 0.9 of it, weights included), or bytes for the cache.
            weights_id: default: the folder's path.
            progress: as of `load_hf`.
            options: as of `of`.

        Raises: as `load_hf` and `of`.
        """
        from .build import load

        return cls(*load(checkpoint, **options), watchdog=watchdog, freeze=freeze)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What is asked for, from any thread

    def add(self, prompt: Prompt) -> Handle:
        """Takes on a request; its outputs come by the handle.

        Raises: as `Core.check`, and:
            RequestError: its id is in use, or the executor's steps cannot do what it asks for.
            QueueFullError: too many wait already.
            EngineError: the engine is closed, or its device hangs.
        """
        self._core.check(prompt)
        self._executor.check(prompt)
        with self._lock:
            self._check_open()
            name = prompt.id
            check_id(name, self._handles)
            waiting = self._core.queued + self._entering
            if waiting + prompt.n > self._core.limits.queued:
                self._measured.refused()
                raise QueueFullError(waiting, self._core.limits.queued)
            while name is None or (prompt.id is None and name in self._handles):
                name = next(self._numbers)
            handle = self._handles[name] = Handle(name, prompt.n, self._leave, self._may_wait)
            self._entering += prompt.n
            self._measured.added(name, prompt, self._clock())
            self._inbox.put(lambda: self._enter(prompt, handle))
        return handle

    def abort(self, name: Hashable) -> None:
        """Ends the request of this id, as "abort", if there is one. Within a turn its blocks are free.

        Raises:
            RequestError: it can be nobody's id.
        """
        check_id(name)
        self._inbox.put(lambda: self._core.abort(name))

    def receive(self, name: Hashable, part: bytes | None) -> bool:
        """A part of a hand-off has come (`Prompt.export` of another engine), of the prompt of the request of this id.

        Args:
            part: None: no more will come, and what has not is computed here.

        Returns:
            Whether it waits for that: if not, it is computed here, or has ended.

        Raises:
            HandoffError: anything is wrong with the part; the request waits on.
            PeerError: the other host is lost, so the request is computed here.
            RequestError: the request has no `peer`, or this can be nobody's id.
            EngineError: the engine is closed, or its device hangs.
        """
        check_id(name)
        return self._call(lambda: self._core.receive(name, part, self._clock()))

    def _leave(self, handle: Handle) -> None:
        """Ends the request of this handle, and none that has its name since."""

        def abort() -> None:
            if self._handles.get(handle.id) is handle:
                self._core.abort(handle.id)

        self._inbox.put(abort)

    def _may_wait(self) -> None:
        """Raises `EngineError` in the engine's thread: what waits there for the engine would wait for ever."""
        if threading.current_thread() is self._thread:
            raise EngineError("a callback, in the engine's own thread, cannot wait for the engine")

    def run(self, prompts: Iterable[Prompt]) -> list[list[Completion]]:
        """Answers all of them; returns the samples of each, in order. As many are added as the queue takes.

        Raises: as `add`; then those added before are aborted.
        """
        handles, prompts = list[Handle](), check_iterable("prompts", prompts, error=RequestError)
        try:
            for prompt in prompts:
                while True:
                    try:
                        handles.append(self.add(prompt))
                        break
                    except QueueFullError:
                        waiting = [handle for handle in handles if not handle.done]
                        if not waiting:  # the queue is others'
                            time.sleep(POLL)
                        else:
                            with contextlib.suppress(TimeoutError):
                                waiting[0].results(0.05)
            return [handle.results() for handle in handles]
        except BaseException:
            for handle in handles:
                handle.abort()
            raise

    def score(
        self, sequences: Iterable[Sequence[int]], *, top: int = 0, routed_experts: bool = False
    ) -> list[Completion]:
        """Raw log-probabilities of every token but the first of each sequence, as sampling would give them.

        One pass through the cache, beside requests that sample: nothing is looked up, and nothing of it stays cached.
        `Completion.tokens` are the sequence but its first token, `logprobs` theirs (and `top`, if asked for).

        Raises: as `add`; what a sequence ended in, if not in its end.
        """
        prompts = [
            Prompt(tokens=tokens, score=True, logprobs=top, routed_experts=routed_experts)
            for tokens in check_iterable("sequences", sequences, error=RequestError)
        ]
        answers = [samples[0] for samples in self.run(prompts)]
        for one in answers:
            if one.error is not None:
                raise one.error
            if one.finish != "length":
                raise EngineError(f"a score ended as {one.finish}")
        return answers

    def stats(self) -> EngineStats:
        """The engine at the end of its last turn. Waits for nothing."""
        return self._stats

    def metrics(self, model_name: str | None = None) -> str:
        """All numbers in Prometheus' text exposition format, version 0.0.4. From any thread; holds no step up.

        Under our names (`dsv4_engine_...`, `dsv4_cache_...`, `dsv4_storage_...`, `dsv4_transport_...`) and, what
        routers and autoscalers read, under vLLM's.

        Args:
            model_name: a label of all samples (default: the weights' id, if that is a text).

        Raises:
            IntegrityError: as `KVCacheManager.stats`.
        """
        weights = self._core.managers[0].weights_id
        common = {"model_name": (weights if isinstance(weights, str) else "") if model_name is None else model_name}
        stats, managers = self.stats(), list[ManagerStats]()
        own = {family.name: family for family in self._measured.families(stats, self.health())}
        groups: list[tuple[str, dict[str, str], Iterable[Family]]] = [("dsv4_engine", common, own.values())]
        several = len(self._core.managers) > 1
        for shard, manager in enumerate(self._core.managers):
            labels = common | ({"shard": str(shard)} if several else {})
            with contextlib.suppress(ManagerInterruptedError):  # nobody knows them before it is reset
                managers.append(manager.stats())
                groups.append(("dsv4_cache", labels, managers[-1].families()))
        for prefix, parts in (("dsv4_storage", self._core.storage), ("dsv4_transport", [self._core.remote])):
            for shard, part in enumerate(parts):
                tell = getattr(part, "stats", None)
                if (seen := None if tell is None else tell()) is not None:
                    labels = common | ({"shard": str(shard)} if len(parts) > 1 else {})
                    groups.append((prefix, labels, seen.families()))
        block = self._core.layout.block_tokens
        return exposition([*groups, ("", common, vllm_families(stats, own, managers, block))])

    def health(self) -> Health:
        """What a probe asks. From any thread; waits for nothing."""
        reason = live = ""
        hung, closed = self._hung, self._closed
        if hung is not None:
            reason = live = str(hung)
        elif closed is not None:
            reason, live = str(closed), str(closed) if self._ended.is_set() else ""
        elif self._core.asleep or self._core.paused:
            reason = f"it is {'asleep' if self._core.asleep else 'paused'}"
        age: float | None = None
        with contextlib.suppress(IndexError):  # none is under way
            age = time.monotonic() - self._begun[0]
        return Health(not live, not reason, reason, age, self._error)

    @property
    def managers(self) -> Sequence[Any]:
        """The managers, for what they tell any thread (`stats`, `digests`, ...)."""
        return tuple(self._core.managers)

    @property
    def weights_form(self) -> str:
        """The form of the weights, as `load` is told of it: others have to come in the same.

        Raises:
            EngineError: the executor has no weights.
        """
        form = getattr(self._executor, "weights_form", None)
        if form is None:
            raise EngineError("this executor has no weights")
        return form

    def events(self, since: int = 0, *, shard: int = 0, timeout: float | None = None) -> tuple[list[BlockEvent], int]:
        """What has appeared in the cache and left it, for routers: as the last turn left it, from any thread.

        Args:
            since: number of the last event that the reader has seen.
            shard: of the data shards.
            timeout: seconds to wait for an event, if there is none yet; None: none.

        Returns:
            The events after that number, and how many of those are no longer kept.

        Raises:
            EngineError: there is no such shard, or it tells of no events.
            PlanError: a number that is none.
        """
        since = check_integer("since", since, error=PlanError)
        log = self._events[check_integer("shard", shard, 0, len(self._events) - 1, error=EngineError)]
        if log is None:
            raise EngineError("this engine has no events: give it logs (`Engine.of(events=True)`)")
        if timeout is not None:
            until = time.monotonic() + check_seconds("timeout", timeout, error=EngineError)
            self._may_wait()
            with self._news:
                while log.last <= since and not self._ended.is_set() and (rest := until - time.monotonic()) > 0:
                    self._news.wait(rest)
        return log.since(since)

    def _show(self) -> None:
        """Lets other threads see where things stand now, between two calls of a manager."""
        self._stats = self._now()
        fresh = 0
        for copy, manager in zip(self._events, self._core.managers, strict=True):
            log = manager.events
            if copy is not None and log is not None and log.last != copy.last:
                fresh += copy.copy_from(log)
        if fresh:
            with self._news:
                self._news.notify_all()

    def warm_up(self) -> None:
        """Compiles what plain requests need (see `Core.warm_up`), so that the first one does not wait for it."""
        self._call(self._warm_up)

    def pause(self) -> None:
        """Returns when no call of the device is under way; plans none until `resume`. Requests keep what they have."""
        self._call(self._pause)

    def resume(self, *, keep: bool = True) -> None:
        """Goes on after `pause`.

        Args:
            keep: whether requests that were live go on; else they end, as "abort".
        """
        keep = check_boolean("keep", keep, error=EngineError)
        self._call(lambda: self._resume(keep))

    def update_weights(self, params: Any, weights_id: Any, *, donate: bool = False) -> None:
        """Other weights from now on: nothing that the old ones computed is found again, and nothing is compiled again.

        Requests that are live begin anew from what they have by then (`Output.weights_id` says whose a token is). Not
        while the engine is paused for longer than this takes: `pause` before, to have a step of the trainer between.

        Args:
            params: of the same structure, shapes and dtypes as those in use; on other devices or the host they are
                copied.
            weights_id: their name (see `KVCacheManager`); another than before.
            donate: whether the memory of the old ones is given up at once, whoever else holds them.

        Raises:
            RequestError: they do not fit, or have the name of those in use. Nothing has changed.
            EngineError: the engine is closed.
        """
        self._call(lambda: self._update(params, weights_id, donate))

    def forget(self) -> None:
        """Nothing that is cached is found again; requests that are live begin anew from what they have by then."""
        self._call(self._forget)

    def sleep(self) -> None:
        """Gives up the device's memory, the cache's and what is in it, for somebody else, until `wakeup`.

        What is cached or live goes to the host tier as far as there is room. Requests wait.
        """
        self._call(self._sleep)

    def wakeup(self) -> None:
        """Takes memory for the cache again, and goes on. Raises what the device does if there is none."""
        self._call(self._wakeup)

    def close(self, *, drain: bool = False, timeout: float | None = None) -> None:
        """Ends it: requests end as "abort", or, with `drain`, as they would. Nothing is added any more.

        From a callback it does not wait; nor for a device that hangs, as the watchdog finds.

        Args:
            timeout: seconds to wait; then the thread ends when the device lets it, and the process when it likes.

        Raises:
            EngineError: an argument of another kind; it is not closed then.
        """
        drain = check_boolean("drain", drain, error=EngineError)
        if timeout is not None:
            timeout = check_seconds("timeout", timeout, error=EngineError)
        with self._lock:
            if self._closed is None:
                self._closed = EngineError("the engine is closed")
        self._inbox.put(lambda: self._quit(drain))
        if threading.current_thread() is not self._thread:  # a callback of a request
            until = None if timeout is None else time.monotonic() + timeout
            while self._thread.is_alive() and self._hung is None:
                left = HANG if until is None else min(HANG, until - time.monotonic())
                if left <= 0:
                    break
                self._thread.join(left)

    # The thread

    def _run(self) -> None:
        try:
            if self._freeze:
                gc.collect()
                gc.freeze()
                gc.set_threshold(YOUNG, *self._thresholds[1:])
            while not (self._stop and self._core.idle):
                self._turn()
        except BaseException as error:  # the executor does not recover
            problem = EngineError(f"the engine has ended: {type(error).__name__}: {error}")
            problem.__cause__ = error
            with self._lock:
                self._closed = problem
            self._fail_all(problem)
        finally:
            self._ended.set()
            with self._news:
                self._news.notify_all()
            if self._freeze:
                gc.unfreeze()
                gc.set_threshold(*self._thresholds)
            with self._lock:
                closed = self._closed or EngineError("the engine is closed")
            while not self._inbox.empty():
                with contextlib.suppress(Exception):  # of one call: the others are answered all the same
                    self._empty_inbox()
            self._fail_all(closed)

    def _turn(self) -> None:
        """Plans and sends the next call, then waits for the one before it and tells what it brought."""
        core, executor = self._core, self._executor
        try:
            self._empty_inbox()
            began = self._clock()
            work = core.plan(began)
            if work is not None:
                self._send(work)
            elif not self._under_way and (transfers := core.flush()):
                executor.move(transfers)
            busy, rests = self._poll(idle=work is None), work is None
            self._tell(core.drain())
            self._turn_s = self._clock() - began
            if self._under_way and (rests or len(self._under_way) >= core.depth):
                drawn = self._wait()
                began = self._clock()
                self._tell(core.take(drawn, began))
                self._turn_s += self._clock() - began
                rests = False
        except Exception as error:
            self._fail(error)
            return
        self._show()
        if rests and not (self._stop and self._core.idle):
            self._rest(busy)

    def _send(self, work: Work) -> None:
        self._begun.append(time.monotonic())
        self._under_way.append(self._executor.send(work))
        before, self._computed = self._computed, self._core.counts["computed_tokens"]
        self._measured.call(self._computed - before)

    def _wait(self) -> Any:
        """What the oldest call has drawn. Raises what went wrong with it; `EngineError` if it took too long."""
        with self._lock:
            self._since = time.monotonic()
        try:
            drawn = self._under_way[0].get()
        finally:
            with self._lock:  # from here on the watchdog is too late
                self._since, hung = None, self._hung
        if hung is not None:
            raise hung
        self._under_way.popleft()
        self._begun.popleft()
        return drawn

    def _poll(self, *, idle: bool) -> bool:
        """Goes on with what is under way beside the steps. Whether there is anything."""
        poll = getattr(self._executor, "poll", None)
        return bool(poll(idle=idle)) if poll is not None else False

    def _rest(self, busy: bool) -> None:
        """Nothing to compute: waits for the inbox, or for whatever is looked at again and again."""
        core = self._core
        nap: float | None = POLL if busy or core.fetching else None
        if (core.queued or core.live or core.preempted) and not (core.paused or core.asleep):
            nap = POLL  # room that comes without a call of ours: a lease that ends, say
        if nap is None and (soonest := core.next_deadline) is not None:
            nap = min(max(soonest - self._clock(), POLL), threading.TIMEOUT_MAX)
        try:
            call = self._inbox.get(timeout=nap)
        except queue.Empty:
            return
        try:
            call()
        except Exception as error:
            self._fail(error)

    def _empty_inbox(self) -> None:
        while True:
            try:
                call = self._inbox.get_nowait()
            except queue.Empty:
                return
            call()

    def _enter(self, prompt: Prompt, handle: Handle) -> None:
        try:
            if self._handles.get(handle.id) is handle and not self._ended.is_set():
                self._core.add(prompt, self._clock(), name=handle.id)
        except Exception as error:
            self._fail_one(handle, error)
        finally:
            with self._lock:  # it is counted here until it is counted there
                self._entering -= prompt.n

    def _tell(self, outputs: list[Output]) -> None:
        """Gives outputs to their readers; each loop of asyncio is called once."""
        if not outputs:
            return
        self._show()  # who reads an answer finds it counted
        now = self._clock()
        self._measured.told(outputs, now)
        waiters: list[Waiter] = []
        for output in outputs:
            handle = self._handles.get(output.id)
            if handle is None:
                continue
            waiters += handle.put(output)
            if handle.done:
                self._measured.close(output.id, now)
                with self._lock:
                    self._handles.pop(output.id, None)
        self._loops.wake(waiters)

    def _fail_one(self, handle: Handle, error: Exception) -> None:
        with self._lock:
            if self._handles.get(handle.id) is handle:
                self._measured.close(handle.id, self._clock())
                del self._handles[handle.id]
        self._loops.wake(handle.fail(error))

    def _fail_all(self, error: Exception) -> None:
        with self._lock:
            handles = list(self._handles.values())
        for handle in handles:
            self._fail_one(handle, error)

    def _fail(self, error: Exception) -> None:
        """A step has failed: its requests end in this error, the others begin anew on an empty cache."""
        self._under_way.clear()
        self._begun.clear()
        self._error = f"{type(error).__name__}: {error}"
        self._executor.recover()
        outputs = self._core.fail(error)
        with self._lock:
            hung, self._hung = self._hung is not None, None
        if hung:  # nobody reads any more
            self._core.abort_all()
        self._tell(outputs)
        self._show()

    def _watch(self) -> None:
        """The watchdog's thread: a device that hangs must not hang those who wait for it."""
        assert self._watchdog is not None
        while not self._ended.wait(self._watchdog / 8):
            since = self._since
            if since is not None and time.monotonic() - since >= self._watchdog:
                self._trip(since)

    def _trip(self, since: float) -> None:
        """All are told that the wait which began then takes too long, unless it is over by now."""
        error = EngineError(f"a call of the device has been under way for {self._watchdog} s")
        with self._lock:
            if self._since != since or self._hung is not None:
                return
            self._hung = error
        self._fail_all(error)

    def _now(self) -> EngineStats:
        core = self._core
        return EngineStats(core.queued, core.live, core.preempted, core.counts.copy(), self._turn_s, core.paused)

    # Calls that the thread makes for others

    def _check_open(self) -> None:
        if self._closed is not None:
            raise self._closed
        if self._hung is not None:
            raise self._hung

    def _call(self, function: Callable[[], T]) -> T:
        """Has the thread call this between two turns; returns what that returned."""
        self._may_wait()
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            if self._ended.is_set():
                future.set_exception(EngineError("the engine is closed"))
                return
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
                if not isinstance(error, Exception):
                    raise

        with self._lock:
            self._check_open()
            self._inbox.put(call)
        while True:
            try:
                return future.result(HANG)
            except TimeoutError:
                if future.done():  # what it has raised itself
                    raise
                if self._hung is not None:
                    raise self._hung from None

    def _settle(self) -> None:
        """Takes up all calls under way."""
        try:
            while self._under_way:
                self._tell(self._core.take(self._wait(), self._clock()))
        except Exception as error:
            self._fail(error)

    def _warm_up(self) -> None:
        self._settle()
        works = self._core.warm_up()
        while (work := next(works, None)) is not None:
            try:
                self._executor.send(work).get()
            except Exception as error:
                self._fail(error)
                raise

    def _pause(self) -> None:
        self._settle()
        self._core.paused = True

    def _resume(self, keep: bool) -> None:
        if not keep:
            for name in dict.fromkeys(job.id for job in self._core.jobs if job.request is not None or job.out):
                self._core.abort(name)
        self._core.paused = False

    def _update(self, params: Any, weights_id: Any, donate: bool) -> None:
        canonical_bytes(weights_id)  # else it may be anything, and compare as it likes
        if any(manager.weights_id == weights_id for manager in self._core.managers):
            raise RequestError(
                f"weights_id {shown(weights_id)} is that of the weights in use: other weights, another id"
            )
        update = getattr(self._executor, "update", None)
        if update is None:
            raise EngineError("this executor has no weights")
        self._settle()
        update(params, donate, lambda: self._core.forget(weights_id=weights_id))

    def _forget(self) -> None:
        self._settle()
        self._core.forget()

    def _sleep(self) -> None:
        sleep = getattr(self._executor, "sleep", None)
        if sleep is None:
            raise EngineError("this executor cannot sleep")
        if self._core.asleep:
            raise EngineError("it sleeps already")
        self._settle()
        try:
            sleep(self._core.sleep)
        except Exception as error:
            if self._core.asleep:  # it failed on its way: what was cached is lost
                self._core.wakeup()
                self._fail(error)
            raise

    def _wakeup(self) -> None:
        if not self._core.asleep:  # the executor would make its cache anew
            raise EngineError("it does not sleep")
        self._executor.wakeup()  # type: ignore[attr-defined]
        self._core.wakeup()

    def _quit(self, drain: bool) -> None:
        self._stop = True
        self._core.paused = False
        if not drain or self._core.asleep:
            self._core.abort_all()


def _both(first: Callable[[Job], object] | None, second: Callable[[Job], object]) -> Callable[[Job], object]:
    """Calls the one, if there is one, and then the other."""
    if first is None:
        return second

    def call(job: Job) -> None:
        first(job)
        second(job)

    return call
