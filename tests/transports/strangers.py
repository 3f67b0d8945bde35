"""Connections of nobody, for tests: `python -m tests.transports.strangers ADDRESS PORT COUNT`.

Opens so many, as far as this process may have files open, which say nothing, a byte now and then, or anything. Says how
many it holds, opens others for those that are closed, and ends with its standard input. Nothing leaves the machine.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import resource
import select
import socket
import sys
import time

SAYS = (b"", b"\0", os.urandom(64), b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01" + bytes(200))


def main(address: str, port: int, count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, count + 64)), hard))
    count = min(count, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 64)
    events, held, opened = select.epoll(), dict[int, socket.socket](), 0

    def knock() -> None:
        connection = socket.socket()
        connection.setblocking(False)
        if connection.connect_ex((address, port)) in (0, errno.EINPROGRESS):
            held[connection.fileno()] = connection
            events.register(connection, select.EPOLLRDHUP | select.EPOLLOUT | select.EPOLLET)

    def look(seconds: float) -> None:
        for file, what in events.poll(seconds):
            if what & (select.EPOLLHUP | select.EPOLLERR | select.EPOLLRDHUP):
                held.pop(file).close()
            elif what & select.EPOLLOUT:
                try:
                    held[file].send(SAYS[file % len(SAYS)])
                except OSError:
                    held.pop(file).close()

    while opened < count:
        for _ in range(64):
            knock()
        opened += 64
        look(0)
    print(opened, flush=True)
    ended = select.poll()
    ended.register(sys.stdin, select.POLLIN | select.POLLHUP)
    while not ended.poll(0):
        look(0.01)
        for connection in random.sample([*held.values()], min(len(held), 8)):
            with contextlib.suppress(OSError):
                connection.send(b"\0")  # a byte now and then
        for _ in range(min(16, count - len(held))):
            knock()
        time.sleep(0.005)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
