"""Odd values at every option of every command, taken from the parsers themselves: a new option is tried, too.

A command ends with a documented status. If that is 2, stdout is empty and one line on stderr names the option.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import json
import os
import pathlib
import re
import sys
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsv4_jax import DSV4Config, cli, model, native_build
from dsv4_jax.bench import measure
from dsv4_jax.cli import main, printing
from dsv4_jax.cli.answers import Speed
from dsv4_jax.cli.options import EXIT_STATUS
from dsv4_jax.cli.printing import present
from dsv4_jax.engine import ShadowExecutor
from dsv4_jax.text import save_byte_tokenizer

ODD = (
    "", " ", "\t", "-", "--", "-1", "-0", "0", "+1", "1e400", "1e-400", "nan", "-nan", "inf", "-inf", "1_000", "0.1_5",
    "\u0661\u0662", "0.\u0665", "\u00b2", "0x10", "1.5", "1.", ".5", "1,", ",", ",,", "1,,2", "=", "a=", "=a", ":",
    "a:", ":a", "a: --nope", "a: 'open", "0:0", str(2**31 - 1), str(2**31), str(2**63), "9" * 400,
    "1" * 5000, "x" * 100_000, "1GiB", "9TiB", "128K", "1M", "none", "a\nb", "\x1b[31m", "a\0b",
    "\udcff", "\u00e9", "\U0001f4a5",
    "\u202e1", "%s%n%(prog)s", "{}{0}", "[/red]", "$\\frac{$", "~", "*", "/", ".", "..", "/dev/null", "/dev/zero",
    "/dev/full", "/dev/stdout", "/proc/self/mem", "none/none", "a/" * 3000, "--help", "@x",
)  # fmt: skip
CHECKPOINT = DSV4Config.tiny()
LINE = json.dumps({"arrival": 0, "prompt": [["a", 10]], "output": 5})


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> pathlib.Path:
    """A folder with a good file for every input."""
    folder = tmp_path_factory.mktemp("inputs")
    model.save_hf(CHECKPOINT, model.init_params(CHECKPOINT, 1), folder / "checkpoint")
    save_byte_tokenizer(folder / "checkpoint")
    (folder / "t.jsonl").write_text(LINE + "\n")
    np.save(folder / "t.npy", np.arange(3))
    return folder


def complete(command: str, place: pathlib.Path) -> list[str]:
    """The shortest command line that does something: options that are tried come after it and win."""
    return {
        "bench": ["append", "step", "model"],
        "chat": ["--checkpoint", str(place / "checkpoint"), "--cache-memory", "8MiB"],
        "generate": ["--checkpoint", str(place / "checkpoint"), "--tokens", "1,2,3"],
        "init": ["checkpoint", "--force"],
        "plan": ["--hbm", "80GiB", "--requests", "4"],
        "serve": ["--checkpoint", str(place / "checkpoint"), "--port", "0", "--cache-memory", "8MiB"],
        "simulate": [str(place / "t.jsonl"), "--model", "tiny", "--max-requests", "2"],
        "logits": ["--checkpoint", str(place / "checkpoint"), "--tokens", str(place / "t.npy"), "--out", "out.npy"],
    }.get(command, [])


def commands() -> dict[str, argparse.ArgumentParser]:
    (action,) = (a for a in cli._parser()._actions if isinstance(a, argparse._SubParsersAction))
    return {name: parser for name, parser in action.choices.items() if isinstance(parser, argparse.ArgumentParser)}


OPTIONS = [
    (command, action.option_strings[-1] if action.option_strings else action.dest)
    for command, parser in commands().items()
    for action in parser._actions
]


class Shadow(ShadowExecutor):
    """In the place of a `DeviceExecutor`."""

    def __init__(self, params, cache, shapes, **options):
        super().__init__(shapes, cache.layout.cfg.vocab_size)

    def drain(self): ...


class NoServer:
    """In the place of processes of HTTP."""

    def __init__(self, listening, config, *, frontends):
        self.address = listening.getsockname()[:2]

    def __enter__(self):
        return self

    def __exit__(self, *_): ...

    def attach(self, engine, **facts): ...

    def close(self): ...


def answer_one(core, executor, answers, printer, progress):
    """In the place of the engine's loop: a token for each prompt."""
    for i, answer in enumerate(answers):
        printer.show(i, answer.add([5], True, 0.0))
    return Speed()


@pytest.fixture(autouse=True)
def no_work(monkeypatch, tmp_path):
    """Values that are taken must not lead to minutes of work, nor to files that stay."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    monkeypatch.setattr(native_build, "build", lambda *_, **__: [])
    monkeypatch.setattr(measure, "measure", lambda *_, **__: [])
    monkeypatch.setattr("dsv4_jax.bench.step.measure_step", lambda options, ceilings: {"model": "tiny"})
    monkeypatch.setattr(model, "init_params", lambda *_, **__: {})
    monkeypatch.setattr("dsv4_jax.bench.model.measure_model", lambda options, params, ceilings: {"model": "tiny"})
    monkeypatch.setattr("dsv4_jax.cli.generate.load", lambda *_, **__: (CHECKPOINT, {}))
    monkeypatch.setattr("dsv4_jax.cli.engine.load", lambda *_, **__: (CHECKPOINT, {}))
    monkeypatch.setattr("dsv4_jax.engine.build.DeviceExecutor", Shadow)
    monkeypatch.setattr("dsv4_jax.cli.generate.answer", answer_one)
    monkeypatch.setattr("dsv4_jax.serve.server.Server", NoServer)
    monkeypatch.setattr("dsv4_jax.cli.serve._wait", lambda *_: None)
    monkeypatch.setattr("dsv4_jax.cli.logits.feed", lambda *_: (np.zeros((3, 4), np.float32), 1))
    monkeypatch.setattr("dsv4_jax.cli.demo.run", lambda args: 0)
    monkeypatch.setattr("dsv4_jax.cli.init._write", lambda cfg, folder, *_: folder.mkdir(parents=True, exist_ok=True))
    parser = cli._parser()  # once, not for every value
    monkeypatch.setattr(cli, "_parser", lambda: parser)


def outcome(argv: list[str]) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(argv)
        except SystemExit as done:
            status = done.code
    return status, out.getvalue(), err.getvalue()


def check(argv: list[str], *names: str) -> None:
    """The promise of this file. `names`: of which an error says one."""
    status, out, err = outcome(argv)
    assert status in EXIT_STATUS and "Traceback" not in err, (argv, err)
    if status == 2:
        assert (out, err.count("\n")) == ("", 1) and err.startswith(f"dsv4-jax {argv[0]}: error: "), (argv, err)
        assert err[:-1].isprintable() and len(err) < 1000, (argv, err)
        assert any(name in err for name in names), (argv, err)
    else:
        assert status == 0, (argv, status, err)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:prompts find next to nothing")
@pytest.mark.parametrize(("command", "option"), OPTIONS, ids=str)
def test_odd_values(command, option, place, monkeypatch):
    monkeypatch.setattr("dsv4_jax.cli.logits.load", lambda *_, **__: (CHECKPOINT, {}))
    base, names = complete(command, place), [option, {"what": "OP", "folder": "DIR"}.get(option, option.upper())]
    if option in ("trace", "what", "folder"):
        base = base[1:]
    if option in ("--shapes", "--plot"):
        base = base[: command == "simulate" or -2]
    if command in ("plan", "simulate"):
        names.append("--hbm")  # it is too small for what the option asks for
    for value in ODD:
        words = [f"{option}={value}"] if option.startswith("-") else ["--", value]
        check([command, *base, *words], *names)
    if option.startswith("--"):
        check([command, *base, option], *names)
        check(
            [command, *base, f"{option[:-1]}=1"], f"did you mean {option}", "did you mean --"
        )  # not a name's beginning


WORDS = st.lists(st.sampled_from([option for _, option in OPTIONS]) | st.sampled_from(ODD) | st.text(max_size=9))


@pytest.mark.slow
@given(command=st.sampled_from(list(commands())), words=WORDS)
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_odd_command_lines(command, words):
    err = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        try:
            cli._arguments([command, *words])
        except SystemExit as done:
            assert done.code in (0, 2) and err.getvalue().count("\n") == (done.code == 2)


# Files that are read


def binary(path: pathlib.Path) -> None:
    path.write_bytes(bytes(range(256)) * 99)


ODD_FILES = {
    "folder": pathlib.Path.mkdir,
    "empty": pathlib.Path.touch,
    "binary": binary,
    "fifo": os.mkfifo,
    "dangling": lambda path: path.symlink_to(path.parent / "none"),
    "loop": lambda path: path.symlink_to(path),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "no file": lambda path: None,
    "in a file": lambda path: path.parent.touch(),
    "null": lambda path: path.write_text("null"),
    "list": lambda path: path.write_text("[]"),
    "object": lambda path: path.write_text("{}"),
    "deep": lambda path: path.write_text("[" * 200_000),
    "not UTF-8": lambda path: path.write_bytes(b'{"a": "\xff"}'),
    "UTF-16": lambda path: path.write_text("{}", encoding="utf-16"),
    "digits": lambda path: path.write_text('{"hidden_size": ' + "1" * 5000 + "}"),
    "infinite": lambda path: path.write_text('{"hidden_size": 1e999, "rows": [{"table": "ops"}], "schema": NaN}'),
    "odd values": lambda path: path.write_text('{"hidden_size": [{}], "rows": [1], "schema": 1, "model_type": {}}'),
    "magic": lambda path: path.write_bytes(b"\x93NUMPY\x01\x00" + b"\xff" * 99),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ODD_FILES)
def test_odd_files(kind, place, tmp_path):
    """Wherever a file is read; none of these is a good one anywhere."""
    (folder := tmp_path / "folder").mkdir()
    path = folder / "file" / "x" if kind == "in a file" else folder / "config.json"
    ODD_FILES[kind](path)
    (weights := tmp_path / "weights").mkdir()
    (weights / "config.json").write_bytes((place / "checkpoint" / "config.json").read_bytes())
    if kind not in ("loop", "in a file"):
        ODD_FILES[kind](weights / "model.safetensors")
    tokens, out = str(place / "t.npy"), ["--out", "out.npy"]
    for option, argv in (
        ("--model", ["plan", "--hbm", "1GiB", "--requests", "4", "--model", str(path)]),
        ("--model", ["plan", "--hbm", "1GiB", "--requests", "4", "--model", str(folder)]),
        ("--model", ["simulate", str(place / "t.jsonl"), "--model", str(path)]),
        ("TRACE", ["simulate", str(path)]),
        ("--tokens", ["logits", "--checkpoint", str(place / "checkpoint"), "--tokens", str(path), *out]),
        ("--checkpoint", ["generate", "--checkpoint", str(path), "--tokens", "1"]),
        ("--checkpoint", ["logits", "--checkpoint", str(path), "--tokens", tokens, *out]),
        ("--checkpoint", ["logits", "--checkpoint", str(folder), "--tokens", tokens, *out]),
        ("--checkpoint", ["logits", "--checkpoint", str(weights), "--tokens", tokens, *out]),
        ("--nvcc", ["build", "--nvcc", str(path)]),
    ):
        status, _, err = outcome(argv)
        assert status == 2, (argv, err)
        check(argv, option)
    assert not (tmp_path / "out.npy").exists()


# What all commands do


def finished(place: pathlib.Path) -> dict[str, list[str]]:
    """A command line of each that ends well, or nearly."""
    return {name: [name, *complete(name, place)] for name in commands() if name != "demo"}


@pytest.mark.slow
def test_json_means_the_same_everywhere(place, tmp_path):
    for name, argv in finished(place).items():
        status, table, _ = outcome(argv)
        assert status == 0 and (table or name in ("build", "chat", "serve")), name
        status, out, _ = outcome([*argv, "--json"])
        report = json.loads(out)
        assert status == 0 and isinstance(report, dict) and out == json.dumps(report, indent=2) + "\n"
        assert outcome([*argv, "--json=-"])[1].split('"')[1] == out.split('"')[1]
        status, beside, _ = outcome([*argv, "--json", str(file := tmp_path / f"{name}.json")])
        assert status == 0 and beside.splitlines()[:1] == table.splitlines()[:1]
        assert json.loads(file.read_text()).keys() == report.keys()


def test_what_is_not_finite_is_null():
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        present({"a": [1.5, float("nan")], "b": {"c": (float("inf"), -float("inf"))}}, "-", lambda console: None)
    assert json.loads(out.getvalue()) == {"a": [1.5, None], "b": {"c": [None, None]}}


class Broken(io.TextIOBase):
    """A stream that fails as told."""

    def __init__(self, number: int):
        self.number = number

    def write(self, text: str) -> int:
        raise OSError(self.number, os.strerror(self.number))


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--json"], ["--help"]], ids=str)
def test_outputs_that_break(more, place, monkeypatch):
    for name, argv in finished(place).items():
        if name in ("build", "chat", "serve") and not more:
            continue  # its table is the libraries, and here it builds none
        for number, status in ((errno.EPIPE, 141), (errno.ENOSPC, 2)):
            monkeypatch.setattr(sys, "stdout", Broken(number))
            assert main([*argv, *more]) == status, (name, number)
    for number in (errno.EPIPE, errno.ENOSPC):
        monkeypatch.setattr(sys, "stdout", io.StringIO())
        monkeypatch.setattr(sys, "stderr", Broken(number))
        assert main(["plan", "--hbm", "1KiB", "--requests", "4"]) == 2  # nobody reads why
        with pytest.raises(SystemExit, match="2"):
            main(["plan", "--hbm", "x"])


@pytest.mark.parametrize("name", commands())
def test_ctrl_c(name, monkeypatch, place):
    def run(args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    parser = commands()[name]
    monkeypatch.setitem(parser._defaults, "run", run)
    assert outcome([name, *complete(name, place)]) == (130, "", "interrupted\n")


@pytest.mark.parametrize("columns", ["20", "80", "300"])
def test_help(columns, monkeypatch):
    """One name of the program; examples that are understood; the exit status. Narrow terminals, too."""
    monkeypatch.setenv("COLUMNS", columns)
    for name in ("", *commands()):
        status, out, err = outcome([*name.split(), "--help"])
        assert (status, err) == (0, "") and "exit status" in out
        assert not re.search(r"dsv4_jax (?!is the same)(-|\w)", out.replace(f"python -m dsv4_jax {name}", ""))
        examples = out.split("examples:\n")[1].split("\n\n")[0].replace("\\\n", " ")
        assert len(re.findall(r"dsv4-jax", examples)) >= 2
        assert "python -m dsv4_jax" in out
    status, out, _ = outcome(["--version"])
    assert status == 0 and out.startswith("dsv4-jax ")


def test_the_exit_statuses_are_those_of_the_page():
    page = (pathlib.Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", page, re.M)
    assert {int(status): meaning for status, meaning in rows} == EXIT_STATUS
    shown = outcome(["--help"])[1].partition("exit status:\n")[2]
    assert dict(re.findall(r"^  (\d+) +(.*)$", shown, re.M)) == {str(key): said for key, said in EXIT_STATUS.items()}


# Progress


def test_progress_is_lines_where_there_is_no_terminal(monkeypatch, capsys):
    said = threading.Event()
    real = printing.say
    monkeypatch.setattr(printing, "say", lambda line: (real(line), said.set()))
    monkeypatch.setattr(printing, "_FIRST_LINE", 0.0)
    monkeypatch.setattr(printing, "_LINES_EVERY", 0.0)
    with printing.Progress("decoding", 1200) as progress:
        progress.update("decoding\nmore", done=1000)
        progress.advance(34)
        said.clear()
        assert said.wait(60)
    out, err = capsys.readouterr()
    last = err.splitlines()[-1]
    assert out == "" and re.fullmatch(r"decoding more: 1,034 of 1,200, \d+ s", last) and threading.active_count() < 50


def test_a_quick_command_says_nothing_of_its_progress(capsys):
    with printing.Progress("decoding") as progress:
        progress.advance()
    assert capsys.readouterr() == ("", "")
