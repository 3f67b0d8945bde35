"""What is asked of an engine, and what it answers. Imports no jax."""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from ..checks import as_int, check_boolean, check_integer, check_iterable, check_seconds, shown
from ..errors import RequestError
from ..manager import MediaItem, Namespace
from ..manager.prefix.token_ids import token_ids

if TYPE_CHECKING:
    from ..tiers.remote import Peer

__all__ = ["Completion", "Mask", "Output", "Prompt", "derived_seed", "stop_ids"]

# Fills the row [ceil(vocab / 32)] uint32 with the tokens that may come after these ids: bit i % 32 of word i // 32.
Mask = Callable[[Sequence[int], np.ndarray], object]
MAX_SAMPLES, MAX_PRIORITY = 1024, 1 << 20


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Prompt:
    """One request of an engine. Immutable; checked when it is made, but for what depends on the engine.

    Attributes:
        tokens: ids of the prompt, at least one.
        max_new_tokens: sampled for it at most.
        sampling: a `model.Sampling`; None: always the likeliest token. Draws depend on its seed, the sample's index
            and the position alone; without a seed the core gives it one.
        stop_tokens: it ends before the first of these that is sampled.
        stop_after: called in the engine's thread with the ids newly sampled; true: it ends behind them, as "stop".
        n: answers, each from random numbers of its own; they share the prompt's blocks. The first is that of `n=1`.
        namespace: who may share its blocks; `Namespace.tenant` has a share of the engine's time, too.
        items: multimodal items of the prompt.
        priority: small is urgent. One that waits gains a level every `Limits.aging` seconds.
        deadline: seconds from when it is added until it ends as "deadline", whatever it has by then.
        logprobs: None: none; 0: the raw log-probability of each sampled token; N: also the N likeliest tokens of each
            place and theirs.
        mask: fills a row with the tokens that may come next, before each step that samples for it; called in the
            engine's thread with what is sampled so far, a tuple.
        routed_experts: whether outputs say which experts the tokens went to.
        reuse: "output": the next turn goes on from the answer; "prompt": from the prompt only (the answer is left out
            of it), so that no state is kept at the end of the answer.
        score: nothing is sampled: its outputs are `tokens` but the first, with `logprobs` and `top` of each, computed
            in one pass through the cache in which nothing is looked up and of which nothing stays.
        export: its blocks are computed for another host, and it ends as "handoff" when all is told. Called in the
            engine's thread with each part, as soon as it can be read (`Handoff.to_json`), to be sent to the engine that
            goes on (`Engine.receive`); again, until the lease is over, with parts that were lost.
        export_to: name of the transport of the host that is to go on (`RecordTransport.name` there): its word alone
            ends the lease, whose pages count as its share (`LeaseShares.peer`). None: of the first host that says one.
        peer: the host that computes its prefix (`RecordTransport.connect`): it waits, for `Limits.patience` after each
            part, and what has not come by then is computed here.
        id: any hashable that no other request of the engine has; default: a number that only grows.

    Raises:
        RequestError: naming the attribute.
    """

    tokens: Sequence[int] | np.ndarray
    max_new_tokens: int = 64
    sampling: Any = None
    stop_tokens: Collection[int] = ()
    stop_after: Callable[[list[int]], object] | None = None
    n: int = 1
    namespace: Namespace | None = None
    items: Iterable[MediaItem] = ()
    priority: int = 0
    deadline: float | None = None
    logprobs: int | None = None
    mask: Mask | None = None
    routed_experts: bool = False
    reuse: Literal["output", "prompt"] = "output"
    score: bool = False
    export: Callable[[bytes], object] | None = None
    export_to: str | None = None
    peer: Peer | None = None
    id: Hashable | None = None

    def __post_init__(self) -> None:
        put: Callable[[str, Any], None] = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731
        if isinstance(self.tokens, str | bytes) or not hasattr(self.tokens, "__len__"):
            raise RequestError(f"tokens must be a sequence of token ids, got {shown(self.tokens)}")
        ids = np.array(token_ids(self.tokens), np.int32)  # a copy: nobody changes it
        ids.setflags(write=False)
        put("tokens", ids)
        if not len(self.tokens):
            raise RequestError("tokens is empty: a prompt has one token at least")
        for name, low, high in (
            ("max_new_tokens", 1, 2**31 - 1),
            ("n", 1, MAX_SAMPLES),
            ("priority", -MAX_PRIORITY, MAX_PRIORITY),
        ):
            put(name, check_integer(name, getattr(self, name), low, high, error=RequestError))
        if self.logprobs is not None:
            put("logprobs", check_integer("logprobs", self.logprobs, 0, 2**31 - 1, error=RequestError))
        if self.deadline is not None:
            put("deadline", check_seconds("deadline", self.deadline, error=RequestError))
        for name in ("stop_after", "mask", "export"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise RequestError(f"{name} must be callable or None, got {shown(getattr(self, name))}")
        for name in ("routed_experts", "score"):
            put(name, check_boolean(name, getattr(self, name), error=RequestError))
        put("stop_tokens", stop_ids(self.stop_tokens))
        put("items", tuple(check_iterable("items", self.items, error=RequestError)))
        if self.namespace is not None and not isinstance(self.namespace, Namespace):
            raise RequestError(f"namespace must be a Namespace or None, got {shown(self.namespace)}")
        if not isinstance(self.reuse, str) or self.reuse not in ("output", "prompt"):
            raise RequestError(f'reuse must be "output" or "prompt", got {shown(self.reuse)}')
        if self.score and (len(self.tokens) < 2 or self.n > 1 or (self.export or self.peer) is not None):
            raise RequestError("score: of one text of two tokens at least, which no other host has to do with")
        if self.export is not None and (self.n > 1 or self.peer is not None):
            raise RequestError("export: what is handed off is one request, and computed here")
        if self.export_to is not None and (self.export is None or not isinstance(self.export_to, str)):
            raise RequestError(f"export_to must be the name of a transport, with export, got {shown(self.export_to)}")
        if self.peer is not None and not hasattr(self.peer, "error"):
            raise RequestError(f"peer must be a Peer or None, got {shown(self.peer)}")

    @property
    def is_plain(self) -> bool:
        """Whether its outputs are tokens and nothing else, and end at tokens alone."""
        return self.logprobs is None and self.stop_after is None and not self.routed_experts


class Output(NamedTuple):
    """What became of a request since its last output.

    Attributes:
        id: the request's.
        index: of its sample, 0..n-1.
        tokens: newly sampled, stop token left out.
        logprobs: raw log-probability of each; empty if not asked for.
        top: of each, pairs of the likeliest ids and their log-probabilities, likeliest first; empty if not asked for.
        finish: None: it goes on; "stop", "length", "abort", "deadline", "handoff" or "error".
        error: what went wrong, if it ended in "error".
        cached: tokens of its prompt that were found in the cache.
        weights_id: name of the weights that gave these tokens.
        experts: int16 [layers, tokens, k], of the tokens computed since the last output; None if not asked for.
        lease: of its hand-off, if it ended in "handoff".
    """

    id: Hashable
    index: int = 0
    tokens: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    top: Sequence[tuple[Sequence[int], Sequence[float]]] = ()
    finish: str | None = None
    error: Exception | None = None
    cached: int = 0
    weights_id: Any = None
    experts: np.ndarray | None = None
    lease: str | None = None


@dataclasses.dataclass
class Completion:
    """All of a sample's outputs together; attributes as those of `Output`.

    Attributes:
        weights: (token, weights_id): from which token on which weights gave them; more than one if they changed.
    """

    id: Hashable
    index: int = 0
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    top: list[tuple[Sequence[int], Sequence[float]]] = dataclasses.field(default_factory=list)
    finish: str | None = None
    error: Exception | None = None
    cached: int = 0
    weights_id: Any = None
    experts: list[np.ndarray] = dataclasses.field(default_factory=list)
    lease: str | None = None
    weights: list[tuple[int, Any]] = dataclasses.field(default_factory=list)

    def add(self, output: Output) -> None:
        """Takes up the next output."""
        if output.tokens and (not self.weights or self.weights[-1][1] != output.weights_id):
            self.weights.append((len(self.tokens), output.weights_id))
        self.tokens += output.tokens
        if output.logprobs:  # hundreds of outputs have none in every step
            self.logprobs += output.logprobs
            self.top += output.top
        if output.experts is not None:
            self.experts.append(output.experts)
        self.finish, self.error, self.lease = output.finish, output.error, output.lease
        self.cached, self.weights_id = output.cached, output.weights_id

    def weights_of(self, token: int) -> Any:
        """Name of the weights that gave this token."""
        return next(name for start, name in reversed(self.weights) if start <= token)


def stop_ids(tokens: Iterable[int], error: Callable[[str], Exception] = RequestError) -> frozenset[int]:
    """Returns stop tokens as a set. Raises `error` if they are not integers."""
    try:
        ids = [(as_int(token), token) for token in tokens]
    except TypeError:
        raise error(f"stop_tokens must be token ids, got {shown(tokens)}") from None
    for number, token in ids:
        if number is None:
            raise error(f"stop_tokens must be integers, got {shown(token)}")
    return frozenset(number for number, _ in ids if number is not None)


def derived_seed(seed: int, index: int) -> int:
    """Returns a seed of 64 bits for each index: of one request among several, or of one of its n answers."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed & (2**64 - 1), index), digest_size=8).digest()
    return int.from_bytes(digest, "little")
