"""A headless Chromium, driven over its DevTools protocol by as much of a websocket as that takes."""

from __future__ import annotations

import base64
import itertools
import json
import os
import pathlib
import re
import shutil
import socket
import struct
import subprocess
import time
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
    "--remote-debugging-port=0",
    "--hide-scrollbars",
)


class Browser:
    """One tab.

    Args:
        folder: for its profile; empty.
        width, height: of the tab.
        dark: whether pages are asked to be dark.
    """

    def __init__(self, folder: pathlib.Path, width: int = 1280, height: int = 860, *, dark: bool = False):
        assert CHROMIUM is not None
        command = [CHROMIUM, *_FLAGS, f"--user-data-dir={folder}", "about:blank"]
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        self._numbers = itertools.count(1)
        until = time.monotonic() + 60
        while not (found := re.search(r"ws://127.0.0.1:(\d+)(/\S+)", (folder / "log").read_text(errors="replace"))):
            assert time.monotonic() < until and self._process.poll() is None, (folder / "log").read_text()
            time.sleep(0.02)
        self._socket = socket.create_connection(("127.0.0.1", int(found[1])), timeout=60)
        key = base64.b64encode(os.urandom(16)).decode()
        head = f"GET {found[2]} HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        self._socket.sendall(f"{head}Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode())
        self._file = self._socket.makefile("rb")
        while self._file.readline() not in (b"\r\n", b""):
            pass
        self._session = ""
        target = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.problems: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._process.terminate()
        self._process.wait(30)

    def call(self, method: str, **parameters: Any) -> Any:
        """A command of the protocol, and its result."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._send(json.dumps(message).encode())
        while True:
            said = json.loads(self._receive())
            if said.get("id") == number:
                assert "error" not in said, said
                return said["result"]
            if said.get("method") == "Runtime.exceptionThrown":
                self.problems.append(json.dumps(said["params"]["exceptionDetails"])[:500])
            if said.get("method") == "Log.entryAdded" and said["params"]["entry"]["level"] == "error":
                self.problems.append(said["params"]["entry"]["text"])

    def resize(self, width: int, height: int) -> None:
        size = dict(width=width, height=height, deviceScaleFactor=1, mobile=width < 500)
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def value(self, expression: str) -> Any:
        """What a line of JavaScript gives."""
        said = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in said, said
        return said["result"].get("value")

    def wait(self, expression: str, seconds: float = 60.0) -> Any:
        """What it gives once it is true."""
        until = time.monotonic() + seconds
        while not (found := self.value(expression)):
            assert time.monotonic() < until, f"{expression} never came true; {self.value('document.body.innerText')}"
            time.sleep(0.02)
        return found

    def type(self, text: str) -> None:
        """Keys, into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, code: int) -> None:
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    def picture(self, path: pathlib.Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def _send(self, data: bytes) -> None:
        size = len(data)
        short = size if size < 126 else 126 if size < 1 << 16 else 127
        length = b"" if short < 126 else struct.pack(">H" if short == 126 else ">Q", size)
        mask = os.urandom(4)
        masked = bytes(byte ^ mask[i % 4] for i, byte in enumerate(data))
        self._socket.sendall(bytes([0x81, 0x80 | short]) + length + mask + masked)

    def _receive(self) -> bytes:
        """The next text, of one frame or several."""
        whole = b""
        while True:
            first, second = self._file.read(2)
            size = second & 0x7F
            if size > 125:
                form = ">H" if size == 126 else ">Q"
                (size,) = struct.unpack(form, self._file.read(struct.calcsize(form)))
            data = self._file.read(size)
            if first & 0x0F in (0, 1):
                whole += data
                if first & 0x80:
                    return whole
