"""What the tests of transports share with the processes that they start: a layout, pools of known bytes, engines."""

from __future__ import annotations

import datetime
import os
import pathlib
import shutil
import socket
import subprocess
from typing import Any

import numpy as np
import pytest

from dsv4_jax.config import DSV4Config
from dsv4_jax.layout import CacheLayout
from dsv4_jax.records import page_bytes
from dsv4_jax.tiers.remote import RecordTransport
from dsv4_jax.transports import open_engine, wire
from dsv4_jax.transports.identity import Identity
from dsv4_jax.transports.wire import Tls

from ..clock import PATIENCE

__all__ = ["LAYOUT", "PAGES", "TLS", "certificates", "join", "knock", "open_transport", "pass_gate", "pool"]


TLS = "DSV4_JAX_TEST_TLS"  # variable with a folder of `certificates`, which the engine "sockets" uses then

LAYOUT = CacheLayout(DSV4Config.tiny())
PAGES = 40


def pool(seed: int | None = None, layout: CacheLayout = LAYOUT, pages: int = PAGES) -> np.ndarray:
    """Pages of random bytes, all of them others than another seed's; None: zeros. Page 0 is zeros."""
    shape = (1 + pages, page_bytes(layout))
    data = np.zeros(shape, np.uint8)
    if seed is not None:
        data[1:] = np.random.default_rng(seed).integers(0, 256, (pages, shape[1]), np.uint8)
    return data


def open_transport(engine: str, **options: Any) -> RecordTransport:
    """Of this engine, with options of its own and of the transport."""
    own = {name: options.pop(name) for name in ("address", "tls", "token") if name in options}
    if engine == "sockets" and TLS in os.environ:
        own = {"tls": _paths(pathlib.Path(os.environ[TLS])), "token": "known to all of them"}
    return RecordTransport(open_engine(engine, **own), **options)


_AUTHORITY = """
[ca]
default_ca = ours
[ours]
database = issued.txt
new_certs_dir = .
rand_serial = yes
unique_subject = no
default_md = sha256
policy = any
x509_extensions = host
[any]
commonName = supplied
[host]
subjectAltName = DNS:localhost,IP:127.0.0.1
basicConstraints = critical,CA:FALSE
"""


def certificates(folder: pathlib.Path, *, by: Tls | None = None, days: tuple[int, int] = (-1, 2)) -> Tls:
    """A certificate for localhost and 127.0.0.1, of an authority of its own, or of that of another certificate.

    It is good from the first of these days on to the second, counted from now. Skips where there is no openssl.
    """
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make certificates with")
    folder.mkdir(parents=True)
    new = "openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    signed = "openssl ca -batch -notext -config ca.cnf -cert authority.pem -keyfile authority.key"
    first, last = (f"{datetime.datetime.now(datetime.UTC) + datetime.timedelta(day):%Y%m%d%H%M%SZ}" for day in days)
    commands = [
        f"{new} -subj /CN=host -keyout key.pem -out request.pem",
        f"{signed} -startdate {first} -enddate {last} -in request.pem -out certificate.pem",
    ]
    if by is None:
        (folder / "ca.cnf").write_text(_AUTHORITY)
        (folder / "issued.txt").touch()
        commands.insert(0, f"{new} -x509 -days 2 -subj /CN=authority -keyout authority.key -out authority.pem")
    else:
        for name in ("authority.pem", "authority.key", "ca.cnf", "issued.txt"):
            shutil.copy(pathlib.Path(by.key).parent / name, folder)
    for command in commands:
        subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    return _paths(folder)


def _paths(folder: pathlib.Path) -> Tls:
    return Tls(folder / "certificate.pem", folder / "key.pem", folder / "authority.pem")


def knock(reach, source="127.0.0.1") -> socket.socket:
    return socket.create_connection((reach.address, reach.port), PATIENCE, (source, 0))


def pass_gate(reach, source="127.0.0.1") -> tuple[socket.socket, bytes]:
    """A connection that has said the secret, and nothing else."""
    connection = knock(reach, source)
    number = wire.read(connection, 16)
    connection.sendall(wire.proof(wire.gate_key(reach.secret, b""), b"gate", number))
    return connection, number


def join(reach, me=None, name="me-", source="127.0.0.1") -> socket.socket:
    """A connection that has said its name."""
    connection, number = pass_gate(reach, source)
    me = me or Identity()
    try:
        wire.introduce(connection, name + me.mark, me, reach, wire.gate_key(reach.secret, b""), number)
    except BaseException:
        connection.close()
        raise
    return connection
