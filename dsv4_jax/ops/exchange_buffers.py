"""Buffers through which the GPUs of a host exchange rows in the project's own CUDA (`csrc/exchange/exchange.cu`).

    exchange = ops.Exchange(mesh, "data")                                     # ExchangeError: XLA's collectives it is
    (rows,) = ops.all_gather((x,), "data", peers=exchange.peers)              # in a function under jax.shard_map
    ...
    exchange.check()                                                          # whenever the host has results in hand

**What a device that stops does to the others.** A kernel cannot raise, least of all one in a captured graph. One that
has waited for longer than the time limit fills what did not come with bytes 0xff (floating-point NaN, integer -1),
leaves a word for the host, and all further calls on that channel end at once with such results. The host learns of it
from `check()`, which raises `ExchangeError`; a call that XLA launches outside of a captured graph is refused then, too
(`jax.errors.JaxRuntimeError`).
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Iterator
from types import TracebackType

import jax
import numpy as np
from jax.sharding import Mesh

from .. import ffi
from ..errors import ExchangeError, ImplementationError
from .exchange import Peers

__all__ = ["MAX_DEVICES", "Exchange", "open_exchanges"]

MAX_DEVICES = 8
_PROBLEM_BYTES = 512
_ROUND = 256  # bytes; slots are multiples
_MAX_S = 3600


class Exchange:
    """Buffers on the GPUs of a mesh that the others along some of its axes can write into. All of one process.

    It takes 2 * channels * n * (slot_bytes + 2 * packet_bytes) of each device, and a little more. Use it as a context
    manager, or `close()` it: when nothing that was compiled with its `peers` will run any more.

    Args:
        mesh: of the devices.
        axes: a name or several; the devices along them exchange, each group for itself.
        slot_bytes: of the message that one launch moves, that is of what a device sends to one other in a call, each
            array of it rounded up to 16 bytes. Larger messages take several launches.
        channels: calls that can be under way at the same time.
        packet_bytes: messages up to this many bytes travel as packets: twice the bytes, without a wait behind them.
        limit_s: how long a device waits for another one, in seconds. A first call waits for what the runtime of the
            other does before: compiling is behind it, loading code is not.

    Attributes:
        peers: what calls of the op take.

    Raises:
        ExchangeError: fewer than two or more than eight devices along the axes, no such axes, a device of another
            process, no GPUs, no way from a device to another's memory, no memory, or a size out of range.
        ImplementationError: the CUDA library cannot be used here.
    """

    peers: Peers

    def __init__(
        self,
        mesh: Mesh,
        axes: str | tuple[str, ...],
        *,
        slot_bytes: int = 2 << 20,
        channels: int = 4,
        packet_bytes: int = 256 << 10,
        limit_s: float = 30.0,
    ):
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        self._devices = _groups(mesh, names)
        if not 0 < limit_s <= _MAX_S:
            raise ExchangeError(f"limit_s is {limit_s}, expected more than 0 and up to {_MAX_S}")
        slot_bytes = -(-slot_bytes // _ROUND) * _ROUND
        packet_bytes = min(-(-packet_bytes // _ROUND) * _ROUND, slot_bytes)
        if problem := ffi.cuda_problem("exchange"):
            raise ImplementationError(f"exchange: {problem}")
        self._library = ffi.load_cuda()
        self._limit_s = limit_s
        groups, ranks = self._devices.shape
        ordinals = [device.local_hardware_id for device in self._devices.flat]
        problem = ctypes.create_string_buffer(_PROBLEM_BYTES)
        enter = self._library.dsv4_exchange_open
        enter.restype = ctypes.c_int64
        number = enter(
            (ctypes.c_int32 * len(ordinals))(*ordinals),
            ctypes.c_int(groups),
            ctypes.c_int(ranks),
            ctypes.c_int(channels),
            ctypes.c_int64(slot_bytes),
            ctypes.c_int64(packet_bytes),
            ctypes.c_uint64(int(limit_s * 1e9)),
            problem,
            ctypes.c_int64(_PROBLEM_BYTES),
        )
        if number < 0:
            raise ExchangeError(f"no exchange along {names}: {problem.value.decode()}")
        self.peers = Peers(number, names, ranks, slot_bytes, channels)

    def check(self) -> None:
        """Raises if a device did not come to a call in time: what was computed since is worthless.

        Reads a word a device in host memory: it waits for nothing, so call it when results have come.

        Raises:
            ExchangeError: names the device, the channel and the limit. `reset()` begins anew.
        """
        reports = (ctypes.c_uint64 * self._devices.size)()
        if self._library.dsv4_exchange_reports(ctypes.c_int64(self.peers.number), reports):
            raise ExchangeError("this exchange is closed")
        for index, word in enumerate(reports):
            if word:
                group, rank = divmod(index, self.peers.size)
                missing, channel = self._devices[group, word >> 32 & 0xFF], word >> 40 & 0xFF
                raise ExchangeError(
                    f"{missing} did not come to call {word & 0xFFFFFFFF} on channel {channel} of the exchange along "
                    f"{self.peers.axes} within {self._limit_s:g} s; {self._devices[group, rank]} gave up"
                )

    def reset(self) -> None:
        """Makes the buffers as new: calls are counted from the first again.

        Waits for the devices; nothing may be launched meanwhile.

        Raises:
            ExchangeError: it is closed, or a device has failed.
        """
        if status := self._library.dsv4_exchange_reset(ctypes.c_int64(self.peers.number)):
            raise ExchangeError(f"the exchange cannot be reset, or is closed: CUDA error {status}")

    def close(self) -> None:
        """Frees the buffers. What was compiled with `peers` is refused then, or, as a captured graph, must not run."""
        self._library.dsv4_exchange_close(ctypes.c_int64(self.peers.number))

    def __enter__(self) -> Exchange:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextlib.contextmanager
def open_exchanges(mesh: Mesh | None, *, slot_bytes: int = 8 << 20) -> Iterator[tuple[Exchange, ...]]:
    """One along each axis of a mesh with several devices; none where it cannot be, as on CPUs, or without a mesh."""
    opened: list[Exchange] = []
    with contextlib.ExitStack() as stack:
        if mesh is not None:
            axes = [axis for axis, size in mesh.shape.items() if size > 1]
            with contextlib.suppress(ExchangeError, ImplementationError):
                opened += [stack.enter_context(Exchange(mesh, axis, slot_bytes=slot_bytes)) for axis in axes]
        yield tuple(opened)


def _groups(mesh: Mesh, axes: tuple[str, ...]) -> np.ndarray:
    """Returns the devices as [groups, ranks], ranks in the order of `lax.axis_index(axes)`."""
    if missing := [axis for axis in axes if axis not in mesh.shape]:
        raise ExchangeError(f"the mesh has no axis {missing[0]!r}, it has {', '.join(map(repr, mesh.axis_names))}")
    ranks = math.prod(mesh.shape[axis] for axis in axes)
    if not 2 <= ranks <= MAX_DEVICES:
        raise ExchangeError(f"{ranks} devices along {axes}, expected 2 to {MAX_DEVICES}")
    from_axes = [mesh.axis_names.index(axis) for axis in axes]
    devices = np.moveaxis(mesh.devices, from_axes, range(-len(axes), 0)).reshape(-1, ranks)
    for device in devices.flat:
        if device.platform != "gpu":
            raise ExchangeError(f"{device} is no GPU")
        if device.process_index != jax.process_index():
            raise ExchangeError(f"{device} is of process {device.process_index}, this is {jax.process_index()}")
    return devices
