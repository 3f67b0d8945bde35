"""Which calls of a traced function become one (`sequence`).

Calls are one group if the same operations of XLA's come before them, and the same ones after: then none of these
operations waits longer for the whole group than for one call of it. A group waits for the groups that any call of it
needs; calls that could start earlier than others for that, counted in kernels, are a group of their own. Groups never
wait for one another in a circle: where an edge leads from one to another, no less comes before the second and no more
after it, and it starts no earlier. A long group is cut where a call waits for all before it.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from typing import Any

import numpy as np
from jax.extend.core import Literal

from .no_gradient import NAME as WITHOUT_GRADIENT

__all__ = ["ALIGNMENT", "CallNode", "Group", "Program", "groups_of", "in_order", "read_program"]

# Bytes: slices that begin at a multiple are read where they lie, others are cut by XLA. Kernels load 16 bytes at a
# time, but of int32, which are ids and counts.
ALIGNMENT = 128
MAX_CALLS = 64  # of a group: their results take memory until its end
_PRODUCTS = ("dot_general", "ffi_call", "jit", "pjit")  # operations that take a kernel's time, if any


@dataclasses.dataclass(frozen=True)
class CallNode:
    """An operation that is more than a view.

    Attributes:
        eqn: of the jaxpr.
        call: whether it may be joined with others.
        reads: of each input the variable it is a view of, or a literal.
        before: the nodes that it waits for.
        overwrites: variables whose memory its results take; None: of something else than a whole variable.
    """

    eqn: Any
    call: bool
    reads: tuple[Any, ...]
    before: frozenset[int]
    overwrites: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Program:
    """What was read from a jaxpr.

    Attributes:
        nodes: in order, without those that nobody needs.
        views: variable -> the equation that makes it, of those that are views.
        places: variable -> (the variable it is a view of, the element at which it begins).
        returned: what `reads` would be of the results.
    """

    nodes: list[CallNode]
    views: dict[Any, Any]
    places: dict[Any, tuple[Any, int]]
    returned: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Group:
    """Nodes that become one call, or one that stays as it is.

    Attributes:
        nodes: their numbers, in order.
        joined: whether they become one call.
        waits: the groups that it waits for.
    """

    nodes: tuple[int, ...]
    joined: bool
    waits: frozenset[int]


def read_program(jaxpr: Any, targets: frozenset[str]) -> Program:
    """The operations of a jaxpr; FFI calls of `targets` without effects may be joined."""
    places: dict[Any, tuple[Any, int]] = {v: (v, 0) for v in (*jaxpr.constvars, *jaxpr.invars)}
    views: dict[Any, Any] = {}
    made: dict[Any, int] = {}
    nodes: list[CallNode] = []
    ordered: list[int] = []  # nodes with effects, which stay in order

    def root(v: Any) -> Any:
        return v if isinstance(v, Literal) else places[v][0]

    for eqn in _needed(jaxpr):
        if (shift := _view(eqn)) is not None:
            source, start = places[eqn.invars[0]]
            if _aligned(start + shift, source.aval.dtype):
                (out,) = eqn.outvars
                places[out], views[out] = (source, start + shift), eqn
                continue
        reads = tuple(map(root, eqn.invars))
        before = {made[r] for r in reads if not isinstance(r, Literal) and r in made}
        call = eqn.primitive.name == "ffi_call" and eqn.params["target_name"] in targets and not eqn.effects
        if eqn.effects:
            before |= {*ordered[-1:]}
            ordered.append(len(nodes))
        over = tuple(_whole(eqn.invars[i], places) for i, _ in eqn.params["input_output_aliases"]) if call else ()
        for out in eqn.outvars:
            places[out], made[out] = (out, 0), len(nodes)
        nodes.append(CallNode(eqn, call, reads, frozenset(before), over))
    return Program(nodes, views, places, tuple(map(root, jaxpr.outvars)))


def _aligned(offset: int, dtype: Any) -> bool:
    return dtype == np.int32 or offset * dtype.itemsize % ALIGNMENT == 0


def _needed(jaxpr: Any) -> list[Any]:
    """Equations that the results need, or that have effects."""
    wanted = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    found = []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or not wanted.isdisjoint(eqn.outvars):
            wanted.update(v for v in eqn.invars if not isinstance(v, Literal))
            found.append(eqn)
    return found[::-1]


def _view(eqn: Any) -> int | None:
    """Returns the element of an operand at which the result of an operation that moves nothing begins."""
    if not eqn.invars or not eqn.outvars or isinstance(eqn.invars[0], Literal):
        return None
    name, params = eqn.primitive.name, eqn.params
    before, after = eqn.invars[0].aval, eqn.outvars[0].aval
    if name in ("squeeze", "expand_dims", WITHOUT_GRADIENT):
        return 0
    if name == "reshape":
        return 0 if params["dimensions"] is None else None
    if name == "broadcast_in_dim":
        return 0 if before.size == after.size and len(eqn.invars) == 1 else None
    if name != "slice" or (params["strides"] is not None and {*params["strides"]} != {1}):
        return None
    # Whole rows: behind the first axis that is not cut down to one, all of each axis.
    cut = next((axis for axis, size in enumerate(after.shape) if size != 1), after.ndim)
    if after.shape[cut + 1 :] != before.shape[cut + 1 :]:
        return None
    strides = (math.prod(before.shape[axis + 1 :]) for axis in range(before.ndim))
    return sum(start * stride for start, stride in zip(params["start_indices"], strides, strict=True))


def _whole(v: Any, places: dict[Any, tuple[Any, int]]) -> Any:
    """The variable of which an input is all, or None."""
    if isinstance(v, Literal):
        return None
    root, offset = places[v]
    return root if offset == 0 and root.aval.size == v.aval.size else None


def groups_of(program: Program) -> list[Group]:
    """Returns the groups: first those of one node in order of the program, as all are."""
    calls = {i for i, node in enumerate(program.nodes) if node.call}
    while True:
        group = _grouped(program.nodes, calls)
        spoilt = {i for i in calls if _loses(program, group, i)}
        if not spoilt:
            break
        calls -= spoilt
    members: dict[int, list[int]] = {}
    for i in range(len(program.nodes)):
        members.setdefault(group[i], []).append(i)
    parts = [part for nodes in members.values() for part in _cut(program.nodes, nodes)]
    number = {i: k for k, part in enumerate(parts) for i in part}
    return [
        Group(tuple(part), len(part) > 1, frozenset({number[p] for i in part for p in program.nodes[i].before} - {k}))
        for k, part in enumerate(parts)
    ]


def _cut(nodes: list[CallNode], group: list[int]) -> list[list[int]]:
    """The calls of a group in parts of up to `MAX_CALLS`, where there are calls that wait for all before them."""
    waits: dict[int, int] = {}  # as bits
    places = [0]
    all_before = 0
    for place, i in enumerate(group):
        waits[i] = 0
        for p in nodes[i].before & waits.keys():
            waits[i] |= waits[p] | 1 << p
        if place and waits[i] == all_before and places[-1] != place - 1:
            places.append(place)
        all_before |= 1 << i
    places.append(len(group))
    starts = [0]
    for place, after in itertools.pairwise(places):
        if place and after - starts[-1] > MAX_CALLS:
            starts.append(place)
    return [group[first:last] for first, last in itertools.pairwise([*starts, len(group)])]


def _grouped(nodes: list[CallNode], calls: set[int]) -> list[int]:
    """Returns a name of the group of each node."""
    after: list[list[int]] = [[] for _ in nodes]
    for i, node in enumerate(nodes):
        for p in node.before:
            after[p].append(i)
    forwards, backwards = range(len(nodes)), range(len(nodes) - 1, -1, -1)
    before = [node.before for node in nodes]

    def reached(order: range, edges: Any, own: Any) -> list[int]:
        """Returns for each node the union, as bits, of what those behind its edges have of their own."""
        bits = [0] * len(nodes)
        for i in order:
            for p in edges[i]:
                bits[i] |= bits[p] | own(p)
        return bits

    def called(i: int) -> int:
        return int(i in calls)

    has_before, has_after = reached(forwards, before, called), reached(backwards, after, called)

    def between(i: int) -> int:
        return 1 << i if i not in calls and has_before[i] and has_after[i] else 0

    up, down = reached(forwards, before, between), reached(backwards, after, between)
    names: dict[Any, int] = {}
    group = [names.setdefault((up[i], down[i]) if i in calls else i, len(names)) for i in forwards]

    # Counted in kernels, from the first call on: when each ends at the earliest, and when a call's group lets it start.
    ends, ready = [0] * len(nodes), [0] * len(nodes)
    for i in forwards:
        for p in before[i]:
            ready[i] = max(ready[i], ready[p] if group[p] == group[i] else ends[p])
            ends[i] = max(ends[i], ends[p])
        if i in calls or (has_before[i] and nodes[i].eqn.primitive.name in _PRODUCTS):
            ends[i] += 1
    names = {}
    return [names.setdefault((group[i], ready[i]) if i in calls else i, len(names)) for i in forwards]


def _loses(program: Program, group: list[int], i: int) -> bool:
    """Whether a call, within its group, would overwrite what is not its own, or what somebody still reads."""
    nodes = program.nodes
    for v in nodes[i].overwrites:
        if v is None:
            return True
        readers = [k for k, node in enumerate(nodes) if any(v is r for r in node.reads)]
        if any(group[k] == group[i] and k > i for k in readers):
            return True
        if any(group[p] == group[i] and any(v is out for out in nodes[p].eqn.outvars) for p in nodes[i].before):
            elsewhere = any(group[k] != group[i] for k in readers) or any(v is r for r in program.returned)
            if elsewhere or sum(v is r for r in nodes[i].reads) > 1:
                return True
    return False


def in_order(groups: list[Group]) -> list[Group]:
    """Each after those that it waits for, else as in the program."""
    waiting = [len(group.waits) for group in groups]
    after: list[list[int]] = [[] for _ in groups]
    for i, group in enumerate(groups):
        for before in group.waits:
            after[before].append(i)
    ready = [(groups[i].nodes[0], i) for i, count in enumerate(waiting) if not count]
    heapq.heapify(ready)
    ordered = []
    while ready:
        _, i = heapq.heappop(ready)
        ordered.append(groups[i])
        for later in after[i]:
            waiting[later] -= 1
            if not waiting[later]:
                heapq.heappush(ready, (groups[later].nodes[0], later))
    assert len(ordered) == len(groups)
    return ordered
