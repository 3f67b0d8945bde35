"""`chat`: lines in, answers out, through a terminal and through pipes. What is drawn is letters, by no model."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import pty
import select
import subprocess
import sys
import time
import types

import pytest

from dsv4_jax import DSV4Config, model
from dsv4_jax.cli import main
from dsv4_jax.engine import ShadowExecutor
from dsv4_jax.errors import OptionError
from dsv4_jax.text import BYTE_TOKENS, save_byte_tokenizer

from ..clock import PATIENCE
from ..model import released
from .refusals import refused

FIRST = BYTE_TOKENS - 256
CFG = DSV4Config.tiny(vocab_size=300)
CLOSE = 5  # the id of </think>


class Letters(ShadowExecutor):
    """Draws "abc" behind "</think>" if it reasons, then the end; of long conversations 500 letters a second."""

    def __init__(self, params, cache, shapes, **options):
        super().__init__(shapes, cache.layout.cfg.vocab_size)

    def drain(self): ...

    def _draw(self, seed, place, fed, mask):
        if place > 400:
            time.sleep(0.002)
            return FIRST + ord("z")
        return {4: FIRST + ord("r"), FIRST + ord("r"): CLOSE, CLOSE: FIRST + ord("a"), FIRST + ord("c"): 1}.get(
            fed, fed + 1
        )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> pathlib.Path:
    pytest.importorskip("deepseek_recipe")
    path = tmp_path_factory.mktemp("checkpoint")
    model.save_hf(CFG, model.init_params(CFG, 1), path)
    (path / "generation_config.json").write_text('{"eos_token_id": 1}')
    save_byte_tokenizer(path)
    return path


def use_letters(patch) -> None:
    patch("dsv4_jax.cli.engine.load", lambda *_, **__: (CFG, {}))
    patch("dsv4_jax.engine.build.DeviceExecutor", Letters)


ARGV = ("--cache-memory", "64MiB", "--effort", "low")


def talk(monkeypatch, capsys, path, lines: str, *argv: str) -> tuple[str, list[str], list[dict]]:
    """What is on stdout and stderr, and what the report says of the turns."""
    use_letters(monkeypatch.setattr)
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    assert main(["chat", "--checkpoint", str(path), *ARGV, "--json", str(path / "turns.json"), *argv]) == 0
    out, err = capsys.readouterr()
    turns = json.loads((path / "turns.json").read_text())["turns"]
    return out, err.splitlines(), turns


def test_lines_are_answered(checkpoint, capsys, monkeypatch):
    lines = (
        "/think\nOne\n\n//two \\\nlines\n/nothing\n/effort huge\n/think on\n/reset\nThree\n/undo\nThree\n/exit\nFour"
    )
    out, err, turns = talk(monkeypatch, capsys, checkpoint, lines, "--system", "Be brief.")
    assert out == "abc\nabc\nr\n\nabc\nr\n\nabc\n"
    assert [turn["question"] for turn in turns] == ["One", "/two \nlines", "Three", "Three"]
    assert [turn["reasoning"] for turn in turns] == ["", "", "r", "r"]
    assert [turn["answer"] for turn in turns] == ["abc"] * 4 and {turn["end"] for turn in turns} == {"stop"}
    first, second, *rest = [turn["prompt_tokens"] for turn in turns]
    assert second == first + 3 + 1 + len("/two \nlines") + 3, "the next turn goes on from all that was said"
    assert rest[0] == rest[1], "nothing is left of what was taken back"
    assert "/nothing: /help says what can be typed" in err
    assert sum("reasoning_effort must be one of none, minimal, low" in line for line in err) == 1
    assert sum(line.startswith("3 tokens") and f"of {first} tokens of the prompt" in line for line in err) == 1


def test_json_alone_and_ends(checkpoint, capsys, monkeypatch):
    use_letters(monkeypatch.setattr)
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\n" + "b" * 500))
    argv = ["chat", "--checkpoint", str(checkpoint), *ARGV, "--no-thinking", "--max-new-tokens", "7", "--stop", "bc"]
    assert main([*argv, "--json"]) == 0
    turns = json.loads(capsys.readouterr().out)["turns"]
    assert [(turn["answer"], turn["end"]) for turn in turns] == [("a", "stop"), ("z" * 7, "length")]
    refused(capsys, [*argv[:3], "--effort", "huge"], "--effort: reasoning_effort must be one of")
    refused(capsys, [*argv[:3], "--chat-model", "v4.1"], "--checkpoint: ", "tokenizer.json has no token")
    refused(capsys, [*argv, "--stop", ""], "--stop: an empty text")


def test_what_serve_cannot_use_is_refused(checkpoint, capsys, tmp_path):
    """In one line, before a process of HTTP is started."""
    pytest.importorskip("uvicorn")
    argv = ["serve", "--checkpoint", str(checkpoint), "--port", "0"]
    refused(capsys, [*argv, "--host", ""], "--host, --port: nothing can listen at :0")
    refused(capsys, [*argv, "--host", ".."], "--host, --port: nothing can listen at ..:0")
    refused(capsys, [*argv, "--host", "192.0.2.1"], "--host, --port: nothing can listen at 192.0.2.1:0")
    refused(capsys, [*argv, "--port", "65536"], "argument --port: '65536' is no port")
    refused(capsys, [*argv, "--api-keys", "/dev/zero"], "--api-keys /dev/zero: is a device")
    refused(capsys, [*argv, "--api-keys", "/proc/self/mem"], "--api-keys /proc/self/mem: ")
    refused(capsys, [*argv, "--model-name", "\udcff"], "argument --model-name: '\\udcff' is no Unicode text")
    (tmp_path / "pem").write_text("none")
    refused(capsys, [*argv, "--tls", tmp_path / "pem", tmp_path / "pem"], "--tls: ", "are no certificate and its key")
    refused(capsys, [*argv, "--tls", tmp_path / "pem", "/dev/zero"], "--tls /dev/zero: is a device")


@pytest.mark.parametrize("command", ["chat", "serve"])
def test_what_does_not_fit_is_refused_before_it_is_loaded(command, checkpoint, capsys, monkeypatch):
    """As `generate` refuses it: with what would hold it."""
    if command == "serve":
        pytest.importorskip("uvicorn")
        server = contextlib.nullcontext(types.SimpleNamespace(address=("127.0.0.1", 1)))
        monkeypatch.setattr("dsv4_jax.serve.server.Server", lambda *_, **__: server)
    monkeypatch.setattr("dsv4_jax.cli.engine.load", lambda *_, **__: pytest.fail("loaded"))
    argv = [command, "--checkpoint", str(checkpoint), *(["--port", "0"] if command == "serve" else [])]
    refused(capsys, [*argv, "--numerics", "released", "--weights", "float32"], "--numerics: ", "--weights released")
    needed = model.device_bytes(CFG, "float32")
    monkeypatch.setattr("dsv4_jax.cli.engine.device_limit", lambda: needed - 1)
    refused(capsys, argv, "--weights: float32 weights take ", "; --devices 2 would hold them")
    monkeypatch.setattr("dsv4_jax.cli.engine.device_limit", lambda: needed + (1 << 23))
    refused(capsys, [*argv, "--cache-memory", "9MiB"], "--cache-memory: 9.00 MiB, the device has 8.00 MiB beside ")
    refused(capsys, [*argv, "--max-context", "128K"], "--max-context")
    if command == "serve":
        refused(capsys, [*argv, "--chunk", "63"], "--chunk: requests and their drafts are 64 tokens of a step")
        refused(capsys, [*argv, "--host-memory", "5KiB"], "--host-memory: 5120 bytes are too few")
        refused(capsys, [*argv, "--host-memory", "9TiB"], "--host-memory: 9.00 TiB, this machine has ")


@pytest.mark.parametrize("command", ["chat", "serve"])
def test_numerics_reach_the_model(command, capsys, tmp_path, monkeypatch):
    pytest.importorskip("deepseek_recipe")
    if command == "serve":
        pytest.importorskip("uvicorn")
        server = contextlib.nullcontext(types.SimpleNamespace(address=("127.0.0.1", 1)))
        monkeypatch.setattr("dsv4_jax.serve.server.Server", lambda *_, **__: server)
    given = []

    def load(checkpoint, form, **options):
        given.append((form, options["numerics"]))
        raise OptionError("enough")

    monkeypatch.setattr("dsv4_jax.cli.engine.load", load)
    released.write(tmp_path, released.tensors())
    save_byte_tokenizer(tmp_path)
    argv = [command, "--checkpoint", str(tmp_path), *(["--port", "0"] if command == "serve" else [])]
    for more in ([], ["--numerics", "released"]):
        refused(capsys, [*argv, "--weights", "released", *more], "enough")
    assert given == [("released", "plain"), ("released", "released")]


class Terminal:
    """The program in a terminal of its own."""

    def __init__(self, *argv: str):
        here = str(pathlib.Path(__file__).parents[2])
        code = (
            "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # Ctrl-C there is a signal here\n"
            "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "from unittest import mock; import dsv4_jax.cli.chat; from tests.cli.test_chat import use_letters\n"
            "use_letters(lambda name, value: mock.patch(name, value).start())\n"
            "from dsv4_jax.cli import entry; entry()"
        )
        self.shown = ""
        self.end, inner = pty.openpty()

        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *argv],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            cwd=here,
            env={**os.environ, "TERM": "dumb"},
            start_new_session=True,
        )
        os.close(inner)

    def read(self, until: str) -> str:
        """What is shown next, up to this text."""
        ends = time.monotonic() + PATIENCE
        while until not in self.shown:
            assert select.select([self.end], [], [], max(0.0, ends - time.monotonic()))[0], self.shown
            self.shown += os.read(self.end, 1 << 16).decode(errors="replace")
        text, _, self.shown = self.shown.partition(until)
        return text + until

    def type(self, text: str) -> None:
        os.write(self.end, text.encode())

    def interrupt_prompt(self) -> None:
        """Ctrl-C, again where nothing happens: between its prompt and its wait for keys Python's readline misses it."""
        for _ in range(10):
            self.type("\x03")
            if select.select([self.end], [], [], 2.0)[0]:
                break
        self.read("> ")
        self.type("/think on\n")
        self.read("thinking on")
        self.read("> ")


def test_in_a_terminal(checkpoint):
    """Reasoning is dimmed; Ctrl-C ends an answer, and what it was drawing; then a question is answered as before."""
    terminal = Terminal("chat", "--checkpoint", str(checkpoint), *ARGV, "--max-new-tokens", "1000000")
    try:
        terminal.read("> ")
        terminal.type("One\n")
        shown = terminal.read("cached")
        assert "\x1b[2mr\x1b[0m\r\n\r\nabc\r\n" in shown and "\x1b[2m5 tokens" in shown
        terminal.read("> ")
        terminal.interrupt_prompt()
        terminal.type("/system " + "long " * 90 + "\n")
        terminal.read("> ")
        terminal.type("Two\n")
        terminal.read("zzzz")
        terminal.type("\x03")
        assert "ended by Ctrl-C" in terminal.read("cached") + terminal.read("> ")
        terminal.type("/system\n")
        terminal.read("> ")
        terminal.type("Three\n")
        assert "abc" in terminal.read("cached"), "the request before was aborted: this one has the slot"
        terminal.read("> ")
        terminal.type("\x04")
        assert terminal.process.wait(PATIENCE) == 0
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.end)
