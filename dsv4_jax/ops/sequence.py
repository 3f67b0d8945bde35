"""Many kernels as one call of XLA's.

XLA prepares each custom call of a step by itself, on the host, in every step; and from one to the next its command
buffers wait for the last block of a kernel before the first of the next one starts. Within a call neither need be: a
kernel of `csrc/` that comes second may ask for its weights while the one before it still runs
(`csrc/common/overlap.cuh`), and those that need nothing of one another run side by side, on streams that the call forks
and joins (`csrc/fusion/sequence.cu`).

`in_sequence` makes such calls of the ones that a function makes. Which of them become one: those that wait for the same
operations of XLA's, and for which the same ones wait (`grouping`). So none waits for more than it must.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.extend.core import Literal

from .. import ffi
from . import registry
from .grouping import CallNode, groups_of, in_order, read_program
from .lanes import places

__all__ = ["in_sequence"]

T = TypeVar("T")


@functools.cache
def _kernels() -> tuple[frozenset[str], frozenset[str]]:
    """The CUDA kernels that may be joined, and those of them that may start early, as their implementations say."""
    kernels = [registry.find(op.name, "cuda") for op in registry.OPS.values() if "cuda" in op.names]
    targets = {target for kernel in kernels for target in kernel.targets if target not in kernel.alone}
    return frozenset(targets), frozenset(target for kernel in kernels for target in kernel.early)


def in_sequence(
    function: Callable[..., T],
    targets: Iterable[str] | None = None,
    platform: str = "cuda",
    *,
    early: Iterable[str] | None = None,
) -> Callable[..., T]:
    """Returns `function` with its kernels joined to a few calls.

    Kernels are one call unless an operation of XLA's stands between: one that some of them wait for and others do not,
    or that waits for some and not for others. What a call overwrites nobody reads later. All results of a call are
    there when the last of its kernels has ended, and take memory until then. They have the same bits. Off a GPU nothing
    changes.

    Args:
        function: of pytrees of arrays, to be traced.
        targets: of the FFI calls that may be joined; None: all CUDA kernels that do not say otherwise.
        platform: of the library that has the sequence: "cuda" or "cpu".
        early: those that may start while the kernel before them ends; None: all that gain by it.
    """

    @functools.wraps(function)
    def joined(*args: Any) -> T:
        if platform == "cuda" and jax.default_backend() != "gpu":
            return function(*args)
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        joinable = _kernels()[0] if targets is None else frozenset(targets)
        ahead = _kernels()[1] if early is None else frozenset(early)
        out = _evaluate(closed, jax.tree.leaves(args), joinable, ahead, platform)
        return jax.tree.unflatten(jax.tree.structure(shapes), out)

    return joined


class _Attributes(dict[str, Any]):
    """Attributes of a call as one attribute: hashable, as jax asks, also where some of them are dictionaries."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    @classmethod
    def of(cls, attributes: Any) -> _Attributes:
        items = attributes.items() if isinstance(attributes, Mapping) else attributes
        return cls((name, cls.of(value) if isinstance(value, Mapping) else value) for name, value in items)


def _evaluate(closed: Any, args: list[Any], targets: frozenset[str], early: frozenset[str], platform: str) -> list[Any]:
    """Returns the results of a jaxpr, evaluated with its calls joined."""
    jaxpr = closed.jaxpr
    values: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *args), strict=True))
    program = read_program(jaxpr, targets)
    groups = groups_of(program)

    def read(v: Any) -> Any:
        if isinstance(v, Literal):
            return v.val
        if v not in values:  # a view of what is there
            eqn = program.views[v]
            values[v] = _bind(eqn, [read(x) for x in eqn.invars])[0]
        return values[v]

    for group in in_order(groups):
        nodes = [program.nodes[i] for i in group.nodes]
        if group.joined:
            values |= _together(nodes, program.places, read, early, platform)
        else:
            (node,) = nodes
            out = _bind(node.eqn, [read(v) for v in node.eqn.invars])
            values |= dict(zip(node.eqn.outvars, out, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _together(
    nodes: list[CallNode], views: dict[Any, Any], read: Callable[[Any], Any], early: frozenset[str], platform: str
) -> dict[Any, Any]:
    """Makes one call of several: its results by variable."""
    operands: list[Any] = []
    results: list[Any] = []
    aliases: dict[int, int] = {}  # operand -> result
    where: dict[Any, int] = {}  # result's variable -> result
    numbers: dict[Any, int] = {}  # operand's variable -> operand
    wiring: list[int] = []  # operands from 0 on, results from -1 down until all operands are known
    attributes: dict[str, Any] = {}

    def operand(v: Any, apart: bool) -> int:
        if apart or v not in numbers:  # a literal, which is always apart, has no hash
            operands.append(read(v))
            if apart:
                return len(operands) - 1
            numbers[v] = len(operands) - 1
        return numbers[v]

    for i, (node, place) in enumerate(zip(nodes, places(nodes, early), strict=True)):
        eqn = node.eqn
        overwritten = dict(eqn.params["input_output_aliases"])
        wiring += (place.lane, place.early, place.awaited, len(place.waits), *place.waits)
        wiring += (len(eqn.invars), len(eqn.outvars))
        given: dict[int, int] = {}  # output -> the result that it overwrites
        for k, v in enumerate(eqn.invars):
            root, offset = (v, 0) if isinstance(v, Literal) else views[v]
            if not isinstance(root, Literal) and root in where:
                index = -1 - where[root]
                if k in overwritten:
                    given[overwritten[k]] = where[root]
            else:
                # What a call both reads and overwrites is two operands: XLA copies one.
                apart = isinstance(v, Literal) or (k in overwritten and sum(root is r for r in node.reads) > 1)
                index = operand(root, apart)
                if k in overwritten:
                    given[overwritten[k]] = aliases[index] = len(results)
                    results.append(root.aval)
            wiring += (index, offset, v.aval.ndim, *v.aval.shape)
        for k, v in enumerate(eqn.outvars):
            if k not in given:
                given[k] = len(results)
                results.append(v.aval)
            where[v] = given[k]
            wiring += (-1 - given[k], 0, v.aval.ndim, *v.aval.shape)
        attributes[f"call{i}"] = _Attributes.of(eqn.params["attributes"])
    target = ffi.cpu_target("dsv4_sequence") if platform == "cpu" else ffi.cuda_target("sequence", "dsv4_sequence")
    call = jax.ffi.ffi_call(target, tuple(results), input_output_aliases=aliases)
    flat = [x if x >= 0 else len(operands) - 1 - x for x in map(int, wiring)]
    names = ";".join(node.eqn.params["target_name"] for node in nodes)
    out = call(*operands, targets=names, wiring=np.array(flat, np.int64), **attributes)
    return {v: out[index].reshape(v.aval.shape) for v, index in where.items()}


def _bind(eqn: Any, inputs: list[Any]) -> list[jax.Array]:
    out = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]
