"""Whether a function whose kernels are joined (`ops.in_sequence`) does what it did, told from the traced calls alone.

Values are symbols: what operation made them, of what; of a view also the element at which it begins. A joined call is
taken apart by its wiring (`csrc/fusion/sequence.h`) and run on symbolic buffers; each of its kernels must find there
the operands that it had before. Any two kernels of a call of which one writes what the other reads or writes must be
ordered by their lanes and by what they wait for, and one that starts early may ask for its weights alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal
from numpy.lib.stride_tricks import as_strided

from dsv4_jax.ops import no_gradient
from dsv4_jax.ops.lanes import MAX_LANES

__all__ = ["checked", "compare"]

# Operands that a kernel asks for before the one before it has ended (`wait_for_previous` of csrc/).
ASKED_EARLY = {
    "dsv4_dense_bf16": (1,),
    "dsv4_dense_e4m3": (2, 3),
    "dsv4_dense_fp8": (1, 2),
    "dsv4_dense_stream": (1,),
    "dsv4_finish_queries": (),
    "dsv4_hyper_connection": (1, 2),
    "dsv4_normalise": (1,),
    "dsv4_route": (1,),
}
ALIGNED = 16  # bytes that kernels load at a time, but of int32
# A value: its symbol, the element at which it begins, its shape and dtype.
Value = tuple[Any, int, tuple[int, ...], str]


class Symbols:
    """Values of the equations of a jaxpr, and of each kernel which operands it may overwrite."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}
        self.aliases: dict[Any, set[tuple[tuple[int, int], ...]]] = {}  # kernel and its operands -> operand, result
        self.joined = 0  # kernels

    def made(self, *key: Any) -> int:
        return self.numbers.setdefault(key, len(self.numbers))

    def kernel(self, target: str, attributes: Any, operands: list[Value]) -> Any:
        return self.made("kernel", target, frozen(attributes), tuple(operands))

    def run(self, closed: Any) -> tuple[list[Value], list[int]]:
        """The results, and the operations with effects, in order."""
        jaxpr, effects = closed.jaxpr, []
        values: dict[Any, Value] = {}

        def keep(v: Any, symbol: Any) -> None:
            values[v] = (symbol, 0, v.aval.shape, str(v.aval.dtype))

        def read(v: Any) -> Value:
            if isinstance(v, Literal):
                aval: Any = v.aval
                return (self.made(of_constant(np.asarray(v.val, aval.dtype))), 0, aval.shape, str(aval.dtype))
            return values[v]

        for v, const in zip(jaxpr.constvars, closed.consts, strict=True):
            keep(v, self.made(of_constant(const)))
        for i, v in enumerate(jaxpr.invars):
            keep(v, self.made("argument", i))
        for eqn in jaxpr.eqns:
            inputs = [read(v) for v in eqn.invars]
            name, params = eqn.primitive.name, eqn.params
            target = params["target_name"] if name == "ffi_call" else ""
            if target == "dsv4_sequence":
                for v, value in zip(eqn.outvars, self.sequence(eqn, inputs), strict=True):
                    values[v] = value
                continue
            if (offset := view(eqn)) is not None:
                symbol, start, _, dtype = inputs[0]
                values[eqn.outvars[0]] = (symbol, start + offset, eqn.outvars[0].aval.shape, dtype)
                continue
            if target:
                key = self.kernel(target, params["attributes"], inputs)
                self.aliases.setdefault(key, set()).add(tuple(sorted(params["input_output_aliases"])))
            else:
                key = self.made(name, told(params), tuple(inputs), tuple(str(v.aval) for v in eqn.outvars))
            if eqn.effects:
                effects.append(key)
            for i, v in enumerate(eqn.outvars):
                keep(v, self.made(key, i))
        return [read(v) for v in jaxpr.outvars], effects

    def sequence(self, eqn: Any, operands: list[Value]) -> list[Value]:
        """The results of a joined call."""
        attributes = dict(eqn.params["attributes"])
        wiring = iter(attributes["wiring"].val.tolist())
        taken = {given + len(operands): k for k, given in eqn.params["input_output_aliases"]}  # result -> operand
        results = range(len(operands), len(operands) + len(eqn.outvars))
        storage = {i: taken.get(i, i) for i in (*range(len(operands)), *results)}
        dtypes = {i: str(v.aval.dtype) for i, v in enumerate((*eqn.invars, *eqn.outvars))}
        sizes = {i: v.aval.size for i, v in enumerate((*eqn.invars, *eqn.outvars))}
        held: dict[int, Value] = dict(enumerate(operands))
        calls: list[Call] = []

        def buffer() -> tuple[int, int, tuple[int, ...]]:
            index, offset, axes = next(wiring), next(wiring), next(wiring)
            shape = tuple(next(wiring) for _ in range(axes))
            assert offset + math.prod(shape) <= sizes[index]
            assert dtypes[index] == "int32" or offset * np.dtype(dtypes[index]).itemsize % ALIGNED == 0
            return index, offset, shape

        for i, target in enumerate(attributes["targets"].split(";")):
            lane, early, awaited, waited = (next(wiring) for _ in range(4))
            call = Call(target, lane, early, awaited, [next(wiring) for _ in range(waited)])
            reads, writes = next(wiring), next(wiring)
            inputs = []
            for index, offset, shape in [buffer() for _ in range(reads)]:
                symbol, start, _, _ = held[storage[index]]  # KeyError: nobody has written it
                inputs.append((symbol, start + offset, shape, dtypes[index]))
                call.reads.append(storage[index])
            key = self.kernel(target, attributes[f"call{i}"], inputs)
            assert key in self.aliases, f"{target} is given what it was not"
            overwritten = []
            for k, (index, offset, shape) in enumerate([buffer() for _ in range(writes)]):
                where = storage[index]
                assert index in results and offset == 0 and math.prod(shape) == sizes[index]
                assert where not in call.writes, f"{target} writes two results to one place"
                overwritten += [(j, k) for j, other in enumerate(call.reads) if other == where]
                call.writes.append(where)
                held[where] = (self.made(key, k), 0, shape, dtypes[index])
            assert tuple(sorted(overwritten)) in self.aliases[key], f"{target} overwrites what it did not"
            calls.append(call)
        assert next(wiring, None) is None
        check_order(calls)
        self.joined += len(calls)
        found = [held[storage[i]] for i in results]
        return [(value[0], 0, v.aval.shape, value[3]) for value, v in zip(found, eqn.outvars, strict=True)]


class Call:
    """A kernel of a joined call: when it runs, and the memory that it reads and writes."""

    def __init__(self, target: str, lane: int, early: int, awaited: int, waits: list[int]) -> None:
        self.target, self.lane, self.early, self.awaited, self.waits = target, lane, early, awaited, waits
        self.reads: list[int] = []
        self.writes: list[int] = []


def check_order(calls: list[Call]) -> None:
    """That whatever order lanes and waits leave open makes no difference."""
    before: list[set[int]] = []  # of each call those that have ended when it starts, or when its early start does
    tails: dict[int, int] = {}
    for i, call in enumerate(calls):
        assert 0 <= call.lane < MAX_LANES
        event = 2 if call.early == 2 else 1
        assert all(k < i and calls[k].awaited & event for k in call.waits), "an event that nobody records"
        direct = {*call.waits, *([tails[call.lane]] if call.lane in tails else [])}
        before.append(set().union(direct, *(before[k] for k in direct)))
        if call.early:
            if call.early == 1:
                assert call.lane == 0 and call.lane in tails
            else:
                assert len(call.waits) == 1 and calls[call.waits[0]].target in ASKED_EARLY
            asked = {call.reads[k] for k in ASKED_EARLY[call.target]}
            assert not any(asked & {*other.writes} for other in calls[: i + 1]), f"{call.target} asks too early"
        tails[call.lane] = i
    for i, call in enumerate(calls):
        for k in range(i):
            if k not in before[i]:
                ours, theirs = {*call.reads, *call.writes}, {*calls[k].reads, *calls[k].writes}
                clash = (ours & {*calls[k].writes}) | (theirs & {*call.writes})
                assert not clash, f"{calls[k].target} and {call.target} are not ordered"


def view(eqn: Any) -> int | None:
    """Of an operation whose result lies in its operand, row by row: the element at which it begins."""
    name, params = eqn.primitive.name, eqn.params
    if name == no_gradient.NAME:
        return 0
    if name not in ("reshape", "squeeze", "expand_dims", "broadcast_in_dim", "slice"):
        return None
    before, after = eqn.invars[0].aval, eqn.outvars[0].aval
    if name != "slice":
        moves = name == "reshape" and params["dimensions"] is not None
        return None if moves or before.size != after.size or len(eqn.invars) > 1 else 0
    strides = [math.prod(before.shape[axis + 1 :]) for axis in range(before.ndim)]
    whole = as_strided(np.zeros(1, np.uint8), before.shape, strides)  # never read
    steps = params["strides"] or [1] * before.ndim
    cuts = tuple(slice(*cut) for cut in zip(params["start_indices"], params["limit_indices"], steps, strict=True))
    part = whole[cuts]
    if not part.flags.c_contiguous:
        return None
    return part.__array_interface__["data"][0] - whole.__array_interface__["data"][0]


def of_constant(x: Any) -> Any:
    if isinstance(x, jax.core.Tracer):
        return ("outside", id(x))
    array = np.asarray(x)
    return (array.shape, str(array.dtype), array.tobytes())


def frozen(x: Any) -> Any:
    """Attributes, whether a dictionary or its items."""
    if isinstance(x, Mapping) or (isinstance(x, tuple) and all(isinstance(e, tuple) and len(e) == 2 for e in x)):
        return tuple(sorted((key, frozen(value)) for key, value in dict(x).items()))
    return (type(x).__name__, str(x))


def told(params: dict[str, Any]) -> str:
    """Parameters but for functions, which each trace has of its own."""
    return str({key: value for key, value in params.items() if not callable(value) or hasattr(value, "eqns")})


def compare(plain: Any, joined: Any) -> int:
    """Checks the jaxpr of a function whose kernels are joined against that of the function; how many are joined."""
    symbols = Symbols()
    want = symbols.run(plain)
    assert symbols.run(joined) == want
    return symbols.joined


def checked(in_sequence: Callable[..., Callable[..., Any]]) -> Callable[..., Callable[..., Any]]:
    """`in_sequence`, which compares what it makes with what it was given, and has kernels to join."""

    def checking(function: Callable[..., Any], **how: Any) -> Callable[..., Any]:
        joined = in_sequence(function, **how)

        def run(*args: Any) -> Any:
            assert compare(jax.make_jaxpr(function)(*args), jax.make_jaxpr(joined)(*args)) > 0
            return joined(*args)

        return run

    return checking
