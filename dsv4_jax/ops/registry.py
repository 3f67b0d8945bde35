"""The registry: which ops there are, which implementations each has, and which of them runs.

An op's reference stands in `ops/<op>.py`, beside its public function and its argument record; a kernel stands under the
name of the op in `pallas/`, `cuda/` or `triton/`. Each of these modules declares one object, `IMPLEMENTATION`, and is
imported when that is asked for. `OPS` is the only list of them: `doctor`, `bench` and the tests read it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Protocol, get_args

import jax
import numpy as np

from .. import ffi
from ..errors import ImplementationError

__all__ = [
    "NAMES",
    "OPS",
    "Arguments",
    "Choice",
    "Implementation",
    "Name",
    "Op",
    "find",
    "frozen",
    "offered",
    "pick",
    "run",
]

Name = Literal["xla", "pallas", "cuda", "triton"]
# What `implementation=` of an op takes: a name; names by op (ops that are left out have their default), as a mapping or
# as the hashable pairs that `frozen` makes of one; or None.
Choice = Name | Mapping[str, Name] | tuple[tuple[str, Name], ...] | None
NAMES: tuple[Name, ...] = get_args(Name)
_SPELLED = {"xla": "XLA", "pallas": "Pallas", "cuda": "CUDA", "triton": "Triton"}


class Arguments(Protocol):
    """An op's argument record, a frozen dataclass: what the public function was given, and nothing else.

    Attributes:
        empty: there is nothing to compute, such as no tokens. Kernels need at least one element of each operand.
    """

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    @property
    def empty(self) -> bool: ...


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute an op.

    Attributes:
        op, name: as in `OPS`.
        call: the op's argument record -> its result.
        supports: why it cannot take these arguments, or None. Reads shapes, dtypes and static facts only, so that it
            can be asked while a function is traced.
        problem: why it cannot be used in this process, whatever the arguments, or None.
        targets: the XLA FFI targets that it calls.
        alone: those of them that must not be one of several kernels of a call (`ops.in_sequence`).
        early: those of them that gain by starting while the kernel before them in such a call ends (docs/kernels.md:
            others take room that it needs).
    """

    op: str
    name: Name
    call: Callable[[Any], Any]
    supports: Callable[[Any], str | None] = lambda arguments: None
    problem: Callable[[], str | None] = lambda: None
    targets: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    early: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Op:
    """An op and its implementations.

    Attributes:
        name: of its files.
        gpu: what a GPU tries, in this order: fastest first, of those whose results were compared on one
            (docs/kernels.md).
        elsewhere: what other platforms try.
        by_name: implementations that run only if they are named.
        reference: the module of the reference, if that is not `ops/<op>.py`.
    """

    name: str
    gpu: tuple[Name, ...]
    elsewhere: tuple[Name, ...] = ("xla",)
    by_name: tuple[Name, ...] = ()
    reference: str | None = None

    @property
    def names(self) -> tuple[Name, ...]:
        """All its implementations, in the order of `gpu`."""
        return tuple(dict.fromkeys((*self.gpu, *self.elsewhere, *self.by_name)))

    @property
    def chain(self) -> tuple[Name, ...]:
        """What this process's platform tries."""
        return self.gpu if jax.default_backend() == "gpu" else self.elsewhere

    def module(self, name: Name) -> str:
        """Where an implementation is declared."""
        if name == "xla" and self.reference:
            return self.reference
        return f"dsv4_jax.{'ops' if name == 'xla' else name}.{self.name}"


OPS: dict[str, Op] = {
    op.name: op
    for op in (
        Op("append", gpu=("cuda", "pallas", "xla")),
        Op("compress", gpu=("cuda", "pallas", "xla")),
        Op("queries", gpu=("cuda", "pallas", "xla")),
        Op("gather", gpu=("cuda", "pallas", "xla"), by_name=("triton",)),
        Op("index_scores", gpu=("cuda", "pallas", "xla")),
        Op("top_k", gpu=("cuda", "pallas", "xla")),
        Op("entry_rows", gpu=("cuda", "xla")),
        Op("attend", gpu=("cuda", "pallas", "xla")),
        Op("kv_store", gpu=("cuda", "pallas", "xla"), reference="dsv4_jax.pools.kv_pool"),
        Op("dense_fp8", gpu=("cuda", "xla")),
        Op("dense_e4m3", gpu=("cuda", "xla")),
        Op("dense_bf16", gpu=("cuda", "xla")),
        Op("normalise", gpu=("cuda", "xla")),
        Op("swiglu", gpu=("cuda", "xla")),
        Op("hyper_connection", gpu=("cuda", "xla")),
        Op("route", gpu=("cuda", "xla")),
        Op("moe", gpu=("cuda", "xla")),
        Op("moe_e4m3", gpu=("cuda", "xla")),
        Op("exchange", gpu=("cuda", "xla")),
        Op("sample_tokens", gpu=("cuda", "xla")),
    )
}


@functools.cache
def find(op: str, name: Name) -> Implementation:
    """Returns the declared implementation; imports its module.

    Raises:
        ImplementationError: there is no such name, or this op has no implementation of that name.
    """
    if name not in NAMES:
        expected = ", ".join(map(repr, NAMES))
        raise ImplementationError(f"{op}: unknown implementation {name!r}, expected {expected} or None")
    if name not in OPS[op].names:
        there = " or ".join(map(repr, OPS[op].names))
        raise ImplementationError(f"{op}: there is no {_SPELLED[name]} kernel for this op, use {there}")
    return importlib.import_module(OPS[op].module(name)).IMPLEMENTATION


def pick(op: str, arguments: Arguments, choice: Choice = None) -> Implementation:
    """The implementation that runs with these arguments.

    A name is that implementation or an error. None is the first of the platform's chain that can be used here and
    takes the arguments. Where there is nothing to compute it is the reference, whichever was named.

    Warns, once in a process, with `PerformanceWarning` if an NVIDIA GPU has no CUDA library to use.

    Raises:
        ImplementationError: the named one does not exist or cannot run, or none can. Says the op, the name and why.
    """
    name = _named(op, choice)
    if name is not None:
        find(op, name)
    if arguments.empty and "xla" in OPS[op].names:
        return find(op, "xla")
    reasons = []
    for tried in OPS[op].chain if name is None else (name,):
        implementation = find(op, tried)
        reason = implementation.problem() or implementation.supports(arguments)
        if reason is None:
            if reasons and "cuda" in OPS[op].chain:
                ffi.warn_without_cuda()
            return implementation
        reasons.append(f"implementation {tried!r} cannot run: {reason}")
    raise ImplementationError(f"{op}: {'; '.join(reasons)}")


def run(op: str, arguments: Arguments, choice: Choice = None) -> Any:
    """Runs the picked implementation on the arguments. Raises as `pick`."""
    implementation = pick(op, arguments, choice)
    return _compiled(implementation, arguments) if implementation.name == "xla" else implementation.call(arguments)


def _compiled(reference: Implementation, arguments: Arguments) -> Any:
    """Runs a reference on the arguments as one jitted function.

    Outside of a step that is one call instead of twenty; in a step the layers that ask for the same share one trace.
    Arrays are the function's operands, whatever else the record holds is static.
    """
    record = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(arguments)}
    leaves, tree = jax.tree.flatten(record)
    operands = [leaf if isinstance(leaf, jax.Array | np.ndarray) else None for leaf in leaves]
    facts = tuple(None if isinstance(leaf, jax.Array | np.ndarray) else leaf for leaf in leaves)
    return _jitted(reference, type(arguments))(tree, facts, operands)


@functools.cache
def _jitted(reference: Implementation, record: type) -> Any:
    def call(tree: Any, facts: tuple[Any, ...], operands: list[jax.Array | None]) -> Any:
        leaves = [fact if operand is None else operand for fact, operand in zip(facts, operands, strict=True)]
        return reference.call(record(**jax.tree.unflatten(tree, leaves)))

    call.__name__ = call.__qualname__ = reference.op  # what profiles and compiled programs call it
    return jax.jit(call, static_argnums=(0, 1))


def frozen(choice: Choice) -> Name | tuple[tuple[str, Name], ...] | None:
    """Returns the choice as something hashable: a static argument of a jitted function.

    Raises:
        ImplementationError: it names an op or an implementation that does not exist.
    """
    if isinstance(choice, Mapping):
        choice = tuple(sorted(choice.items()))
    if isinstance(choice, tuple):
        for op, name in choice:
            if op not in OPS:
                raise ImplementationError(f"unknown op {op!r}, expected some of {', '.join(OPS)}")
            find(op, name)
    return choice


def offered(op: str, choice: Choice) -> Choice:
    """`choice`, or None where it is one name for all ops and this op has nothing of that name."""
    return None if isinstance(choice, str) and choice in NAMES and choice not in OPS[op].names else choice


def _named(op: str, choice: Choice) -> Name | None:
    choice = frozen(choice)
    return dict(choice).get(op) if isinstance(choice, tuple) else choice
