"""Another host, for tests: `python -m tests.transports.peer ENGINE SEED`. Obeys lines on its standard input.

Says its metadata in a line, then for each line it is given one with what became of it. Every line is JSON.
"""

from __future__ import annotations

import base64
import contextlib
import json
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from dsv4_jax.tiers.remote.metadata import PoolMetadata
from dsv4_jax.transports.wire import FRAME, TELL, Reach

from .samples import LAYOUT, join, open_transport, pool

__all__ = ["Host", "host"]

ROOT = pathlib.Path(__file__).parents[2]


class Host:
    """A process of this module, as its parent sees it."""

    def __init__(self, engine: str, seed: int):
        command = [sys.executable, "-m", __spec__.name, engine, str(seed)]
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.process = subprocess.Popen(command, cwd=ROOT, text=True, bufsize=1, **pipes)
        self.metadata = base64.b64decode(self._answer())

    def ask(self, what: str, *arguments: Any) -> Any:
        self.process.stdin.write(json.dumps([what, *arguments]) + "\n")
        return self._answer()

    def checksums(self, kind: str, pages: list[int]) -> list[bytes]:
        return [bytes.fromhex(each) for each in self.ask("checksums", kind, pages)]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()

    def _answer(self) -> Any:
        return json.loads(self.process.stdout.readline())


@contextlib.contextmanager
def host(engine: str, seed: int = 1) -> Iterator[Host]:
    started = Host(engine, seed)
    try:
        yield started
    finally:
        started.close()


def flood(reach: Reach, message: bytes) -> None:
    """Says the same again and again, as fast as it is taken."""
    frame = FRAME.pack(TELL, len(message)) + message
    with join(reach, name="hostile-") as connection:
        while True:
            connection.sendall(frame * max(1, 1000 // len(frame)))


def main(engine: str, seed: int) -> None:
    out = sys.stdout
    sys.stdout = sys.stderr  # what engines print is no answer

    def say(value: Any) -> None:
        print(json.dumps(value), file=out, flush=True)

    pages, peers = pool(seed), {}
    with open_transport(engine) as transport:
        say(base64.b64encode(transport.publish(LAYOUT, pages)).decode())
        for line in sys.stdin:
            match json.loads(line):
                case "checksums", kind, ids:
                    say([each.hex() for each in transport.checksums(kind, ids)])
                case "overwrite", page:
                    pages[page] ^= 1
                    say(None)
                case "notices", count:  # waits for so many
                    notices = []
                    while len(notices) < count:
                        notices += [[each.sender, each.message.hex()] for each in transport.notices()]
                        time.sleep(0.001)
                    say(notices)
                case "connect", metadata:
                    peer = transport.connect(base64.b64decode(metadata))
                    peers[peer.name] = peer
                    say(peer.name)
                case "notify", name, message:
                    transport.notify(peers[name], bytes.fromhex(message))
                    say(None)
                case "flood", metadata, size:  # with notices, until it is killed
                    reach = Reach.unpack(PoolMetadata.unpack(base64.b64decode(metadata)).reach)
                    threading.Thread(target=flood, args=(reach, bytes(size)), daemon=True).start()
                    say(None)
                case "read", name, source, destination:
                    transport.read(peers[name], "block", source, destination, None).wait()
                    say([pages[i].tobytes().hex() for i in destination])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
