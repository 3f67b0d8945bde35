"""A Mooncake master of this process's own, and clients of it. Skips a test where the wheel cannot be loaded."""

from __future__ import annotations

import atexit
import functools
import os
import pathlib
import socket
import subprocess
import time
from typing import Any

import pytest

from ..clock import PATIENCE

__all__ = ["another", "client"]


@functools.cache
def client() -> Any:
    """With 64 MiB for others to write to."""
    return _open(64 << 20)


@functools.cache
def another() -> Any:
    """Which has no memory of its own: what it writes lies elsewhere."""
    client()
    return _open(0)


def _open(memory: int) -> Any:
    store = pytest.importorskip("mooncake.store", exc_type=ImportError)
    ports, opened = _master(), store.MooncakeDistributedStore()
    metadata = f"http://127.0.0.1:{ports[1]}/metadata"
    place = f"127.0.0.1:{ports[2] if memory else ports[3]}"
    atexit.register(opened.close)
    until = time.monotonic() + PATIENCE
    while opened.setup(place, metadata, memory, 16 << 20, "tcp", "", f"127.0.0.1:{ports[0]}"):
        assert time.monotonic() < until, "the master does not answer"
        time.sleep(0.05)
    return opened


@functools.cache
def _master() -> list[int]:
    """Starts it. Ports: of the master, of its metadata, and two for clients."""
    import mooncake

    path = pathlib.Path(mooncake.__path__[0]) / "mooncake_master"
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(5)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    options = [f"--rpc_port={ports[0]}", "--enable_http_metadata_server=true", f"--metrics_port={ports[4]}"]
    command = [str(path), *options, f"--http_metadata_server_port={ports[1]}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    owner = os.getpid()
    atexit.register(lambda: process.kill() if os.getpid() == owner else None)
    return ports
