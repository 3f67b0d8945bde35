"""exchange in the project's own CUDA (`csrc/exchange/exchange.cu`): launches on each GPU, which write to the others."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

from ..checks import INT32_MAX
from ..former_names import former_name
from ..ops.exchange import ExchangeArguments, Peers
from .calls import declare, launch

__all__ = ["IMPLEMENTATION", "MAX_ARRAYS", "MAX_BYTES", "call", "supports"]

MAX_ARRAYS = 4
MAX_BYTES = INT32_MAX  # of a message
_WORD = 16  # bytes; each array of a message begins with one
_KINDS = {"gather": 0, "sum_to_owner": 1, "sum_to_all": 2, "all_to_all": 3}
_DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int32", "uint32", "int16", "uint16", "int8", "uint8")


def _messages(arguments: ExchangeArguments, peers: Peers) -> list[tuple[int, int]]:
    """For each array, its bytes that go to one device, and how many of them stay together in the result."""
    found = []
    for array in arguments.arrays:
        message = run = array.size * array.dtype.itemsize
        if arguments.kind in ("sum_to_owner", "all_to_all"):
            message = run = message // peers.size
        if arguments.kind == "all_to_all":
            run = array.shape[1] * array.dtype.itemsize
        elif arguments.kind == "gather":
            run = math.prod(array.shape[arguments.dimension :]) * array.dtype.itemsize
        found.append((message, run))
    return found


def supports(arguments: ExchangeArguments) -> str | None:
    """Says why the kernel cannot take these arguments; None if it can."""
    if arguments.peers is None:
        return "it needs peers, the mapped buffers of an ops.Exchange"
    if len(arguments.arrays) > MAX_ARRAYS:
        return f"it takes up to {MAX_ARRAYS} arrays, not {len(arguments.arrays)}"
    total = 0
    for array, (message, run) in zip(arguments.arrays, _messages(arguments, arguments.peers), strict=True):
        if array.dtype.name not in _DTYPES or message % 2:
            return f"it takes an even number of bytes of {', '.join(_DTYPES)}, not {message} of {array.dtype}"
        if run != message and run % _WORD:
            return f"it joins runs of a multiple of {_WORD} bytes along dimensions after the first, not of {run}"
        total += -(-message // _WORD) * _WORD
    if total > MAX_BYTES:
        return f"it sends up to {MAX_BYTES} bytes to a device, not {total}"
    return None


def call(arguments: ExchangeArguments) -> tuple[jax.Array, ...]:
    """Computes what `ops.exchange.reference` does.

    Raises:
        ImplementationError: the CUDA library is not there.
    """
    peers, kind = arguments.peers, arguments.kind
    assert peers is not None
    results = []
    for array in arguments.arrays:
        shape = list(array.shape)
        if kind == "gather":
            shape[arguments.dimension] *= peers.size
        elif kind in ("sum_to_owner", "all_to_all"):
            shape[0] //= peers.size
        if kind == "all_to_all":
            shape[1] *= peers.size
        results.append(jax.ShapeDtypeStruct(tuple(shape), array.dtype))
    runs = np.array([run for _, run in _messages(arguments, peers)], np.int64)
    numbers = dict(exchange=peers.number, channel=arguments.channel, kind=_KINDS[kind], runs=runs)
    return tuple(launch("exchange", "dsv4_exchange", tuple(results), *arguments.arrays, **numbers))


# What waits for other devices must not hold up the kernels beside it.
IMPLEMENTATION = declare("exchange", call, supports, "dsv4_exchange", alone=("dsv4_exchange",))

_FORMER = {  # names that were here, for one release: where they are now
    "Exchange": "dsv4_jax.ops.exchange_buffers.Exchange",
    "open_exchanges": "dsv4_jax.ops.exchange_buffers.open_exchanges",
}


def __getattr__(name: str) -> Any:
    return former_name(__name__, _FORMER, name)
