"""How long a kernel takes in a CUDA graph: FFI handlers called by XLA, on operands of their own in every call.

An executable loops over a body of several calls, which XLA makes one command buffer, that is one CUDA graph, whose
nodes follow one another. The time of a call is what more rounds of the loop take, over the calls in them: the gaps
between a graph's nodes are in it, what the host does for an execution is not. Without a GPU the same loop runs what
there is (the reference), which shows that all of it works and says nothing of times.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp

from dsv4_jax.bench.ops import Problem

__all__ = ["Body", "Handler", "graph_us", "handlers", "timed_loop", "whole_call"]

SHORT = 2  # rounds; the longer loop has as many more as take MEASURED seconds, within bounds
MIN_MORE, MAX_MORE, MEASURED = 4, 256, 4e-3
# One node after the other, as the kernels of a stream are captured, and the loop itself outside of the graph.
GRAPH_OPTIONS = {"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE", "xla_gpu_enable_triton_gemm": False}


class Body(NamedTuple):
    """The calls of a round of the loop.

    Attributes:
        fixed: arrays that it reads.
        state: makes the arrays that calls overwrite in place.
        run: (fixed, state) -> (state, results).
        calls: how many.
    """

    fixed: Any
    state: Callable[[], Any]
    run: Callable[[Any, Any], tuple[Any, Any]]
    calls: int


class Handler(NamedTuple):
    """A call of an FFI handler as an op makes it: what `jax.ffi.ffi_call` was given, and whose operands these are.

    Attributes:
        target: of the handler.
        results, aliases: shapes; operand -> result that overwrites it.
        attributes: static arguments.
        places: of each operand the number of the array given to the op that it is, or None: the op makes it.
    """

    target: str
    results: Any
    aliases: dict[int, int]
    attributes: dict[str, Any]
    places: tuple[int | None, ...]


def whole_call(problem: Problem, implementation: str) -> Body:
    """Makes a body of all that the op does, by any implementation."""

    def run(fixed: Any, state: Any) -> tuple[Any, list[Any]]:
        shared, calls = fixed
        results = []
        for call in calls:
            state, out = problem.apply(shared, state, call, implementation)
            results.append(out)
        return state, results

    return Body((problem.shared, problem.calls), problem.carry, run, len(problem.calls))


def handlers(problem: Problem, implementation: str) -> dict[str, Body]:
    """Returns the FFI handlers that an op calls, each by itself: target -> its calls; {} if it calls none.

    Operands that the op makes are made before, of every call of the problem, by the op itself.
    """
    found: list[Handler] = []
    ffi_call = jax.ffi.ffi_call

    def traced(given: Any) -> list[list[jax.Array | None]]:
        """Returns the operands of each handler that are none of those given."""
        numbers = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves(given))}
        made: list[list[jax.Array | None]] = []
        found.clear()

        def spy(target: str, results: Any, *, input_output_aliases: Any = None, **how: Any) -> Callable[..., Any]:
            call = ffi_call(target, results, input_output_aliases=input_output_aliases, **how)

            def called(*operands: Any, **attributes: Any) -> Any:
                places = tuple(numbers.get(id(x)) for x in operands)
                found.append(Handler(target, results, dict(input_output_aliases or {}), attributes, places))
                made.append([x if place is None else None for x, place in zip(operands, places, strict=True)])
                return call(*operands, **attributes)

            return called

        with mock.patch.object(jax.ffi, "ffi_call", spy):
            shared, carry, call = given
            problem.apply(shared, carry, call, implementation)
        return made

    carry = problem.carry()
    prepare = jax.jit(traced)
    made = [prepare((problem.shared, carry, call)) for call in problem.calls]
    given: list[Any] = [jax.tree.leaves((problem.shared, carry, call)) for call in problem.calls]
    targets = [handler.target for handler in found]
    names = [t if targets.count(t) == 1 else f"{t} {i}" for i, t in enumerate(targets)]
    return {
        name: _handler_body(
            handler,
            [
                [all_[place] if own is None else own for own, place in zip(each[i], handler.places, strict=True)]
                for all_, each in zip(given, made, strict=True)
            ],
        )
        for i, (name, handler) in enumerate(zip(names, found, strict=True))
    }


def _handler_body(handler: Handler, operands: Sequence[Sequence[jax.Array]]) -> Body:
    """Makes a body of a handler on several lists of operands. Arrays that are the same in all of them are one operand
    of the loop.
    """
    arrays = list({id(x): x for each in operands for x in each}.values())
    number = {id(x): i for i, x in enumerate(arrays)}
    overwritten = sorted({number[id(each[i])] for each in operands for i in handler.aliases})
    fixed = [None if i in overwritten else x for i, x in enumerate(arrays)]

    def state() -> dict[int, jax.Array]:
        return {i: jnp.copy(arrays[i]) for i in overwritten}

    def run(fixed: list[jax.Array], state: dict[int, jax.Array]) -> tuple[dict[int, jax.Array], list[Any]]:
        call = jax.ffi.ffi_call(handler.target, handler.results, input_output_aliases=handler.aliases)
        state, results = dict(state), []
        for each in operands:
            places = [number[id(x)] for x in each]
            given = [state[place] if place in state else fixed[place] for place in places]
            out = call(*given, **handler.attributes)
            outs = list(out) if isinstance(out, list | tuple) else [out]
            for i, j in handler.aliases.items():
                state[places[i]] = outs[j]
            results.append([x for j, x in enumerate(outs) if j not in handler.aliases.values()])
        return state, results

    return Body(fixed, state, run, len(operands))


def timed_loop(body: Body, rounds: int) -> Callable[[Any, Any], Any]:
    """Returns a jitted (fixed, state) -> (state, results of the last round), which updates the state in place."""

    def loop(fixed: Any, state: Any) -> Any:
        def once(i: jax.Array, carried: tuple[Any, Any]) -> tuple[Any, Any]:
            here, _ = jax.lax.optimization_barrier((fixed, i))  # else a call is the same in every round: made once
            return body.run(here, carried[0])

        shapes = jax.eval_shape(body.run, fixed, state)[1]
        results = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return jax.lax.fori_loop(0, rounds, once, (state, results))

    options = GRAPH_OPTIONS if jax.default_backend() == "gpu" else None
    return jax.jit(loop, donate_argnums=1, compiler_options=options)


def graph_us(body: Body, replays: int = 15) -> float:
    """Returns us of a call: what more rounds take (medians of a long loop and a short one), over the calls in them."""
    state = body.state()

    def once(loop: Callable[[Any, Any], Any]) -> float:
        nonlocal state
        start = time.perf_counter()
        state, results = jax.block_until_ready(loop(body.fixed, state))
        del results
        return time.perf_counter() - start

    short = timed_loop(body, SHORT)
    once(short)
    more = int(min(MAX_MORE, max(MIN_MORE, MEASURED * SHORT / min(once(short) for _ in range(3)))))
    long = timed_loop(body, SHORT + more)
    once(long)
    taken = [(once(short), once(long)) for _ in range(replays)]
    shorter, longer = (statistics.median(times) for times in zip(*taken, strict=True))
    return max(longer - shorter, 1e-9) / (more * body.calls) * 1e6
