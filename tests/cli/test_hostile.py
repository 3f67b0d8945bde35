"""The command line attacked: every bad value, input file and output path is one line on stderr and exit status 2.

No traceback, no memory bomb, nothing left behind.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import stat
import subprocess
import sys

import jax
import numpy as np
import pytest

from dsv4_jax import DSV4Config, model
from dsv4_jax.cli import demo_passes, main
from dsv4_jax.errors import FileError

CFG = DSV4Config.tiny()
LINE = json.dumps({"arrival": 0, "prompt": [["a", 10]], "output": 5})
DIGITS = "1" * 5000  # more than Python converts
BELOW = "below 2^31"


def refused(argv: list, *parts: str) -> str:
    """Runs a command that must end with status 2, nothing on stdout and one short line on stderr with these parts."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main([str(a) for a in argv])
        except SystemExit as exit_:
            status = exit_.code
    said = err.getvalue()
    assert (status, out.getvalue(), said.count("\n")) == (2, "", 1), said
    assert said.startswith("dsv4-jax") and said.rstrip("\n").isprintable() and len(said) < 1000, said
    assert all(part in said for part in parts), said
    return said


@pytest.fixture
def trace(tmp_path) -> pathlib.Path:
    path = tmp_path / "t.jsonl"
    path.write_text(LINE + "\n")
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("checkpoint")
    model.save_hf(CFG, model.init_params(CFG, 1), path)
    return path


def simulate(*argv) -> list:
    return ["simulate", "--model", "tiny", "--snapshots", 8, "--max-requests", 4, *argv]


def tokens_file(path: pathlib.Path, header: str, data: bytes = b"") -> pathlib.Path:
    """A .npy file with any header."""
    text = header.encode() + b"\n"
    path.write_bytes(b"\x93NUMPY\x02\x00" + len(text).to_bytes(4, "little") + text + data)
    return path


# Where outputs may go


OUTPUTS = {
    "simulate --plot": lambda out: simulate("--generate", "chats=1", "--blocks", 99, "--plot", out),
    "simulate --save-trace": lambda out: simulate("--generate", "chats=1", "--blocks", 99, "--save-trace", out),
    "plan --plot": lambda out: ["plan", "--hbm", "80GiB", "--requests", 4, "--plot", out],
    "bench --plot": lambda out: ["bench", "gather", "--quick", "--plot", out],
    "bench --json": lambda out: ["bench", "gather", "--quick", "--json", out],
    "plan --json": lambda out: ["plan", "--hbm", "80GiB", "--requests", 4, "--json", out],
    "doctor --json": lambda out: ["doctor", "--json", out],
    "demo --plot": lambda out: ["demo", "--plot", out],
    "demo --json": lambda out: ["demo", "--json", out],
    "generate --json": lambda out: ["generate", "--checkpoint", "none", "--tokens", "1", "--json", out],
    "logits --out": lambda out: ["logits", "--checkpoint", "none", "--tokens", "none.npy", "--out", out],
}


@pytest.mark.parametrize("option", OUTPUTS)
def test_outputs_are_regular_files(option, tmp_path, monkeypatch):
    """Refused before any work, with the option's name; what is at the path stays as it is."""
    monkeypatch.chdir(tmp_path)
    command, name = OUTPUTS[option], option.split()[1]
    (folder := tmp_path / "folder.png").mkdir()
    os.mkfifo(fifo := tmp_path / "fifo.png")
    (target := tmp_path / "target.png").write_bytes(b"mine")
    (link := tmp_path / "link.png").symlink_to(target)
    (dangling := tmp_path / "dangling.png").symlink_to(tmp_path / "elsewhere")
    (file := tmp_path / "file.png").write_bytes(b"")
    before = {p.name: p.lstat().st_ino for p in tmp_path.iterdir()}
    refused(command(folder), name, "is a directory")
    refused(command("."), name)
    refused(command(fifo), name, "is a FIFO, not a regular file")
    refused(command("/dev/null"), name, "is a device, not a regular file")
    refused(command(link), name, "is a symbolic link", "name the file itself")
    refused(command(dangling), name, "is a symbolic link")
    refused(command("/dev/stdout"), name)
    refused(command(tmp_path / "none" / "x.png"), name, "there is no folder")
    refused(command(file / "x.png"), name)
    refused(command(""), name, "an empty name")
    refused(command("x" * 300 + ".png"), name, "File name too long")
    refused(command("a\0b.png"), name)
    refused(command("/proc/x.png"), name)
    if name != "--json":
        refused(command("-"), name)
    assert {p.name: p.lstat().st_ino for p in tmp_path.iterdir()} == before and target.read_bytes() == b"mine"
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


@pytest.mark.parametrize("option", [option for option in OUTPUTS if "--json" in option])
@pytest.mark.parametrize("name", ["x.jsonl", "x", "gather", ".json", "x.json.gz"])
def test_a_json_file_is_called_one(option, name, tmp_path):
    """`--json` may stand before an OP or a TRACE, which are not to be overwritten."""
    refused(OUTPUTS[option](tmp_path / name), "--json", "ends in .json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", [option for option in OUTPUTS if "--plot" in option])
@pytest.mark.parametrize("name", ["x.xyz", "x", "x.png.gz", ".png", "x.npy"])
def test_unknown_pictures_are_refused_before_the_work(option, name, tmp_path):
    refused(OUTPUTS[option](tmp_path / name), "--plot", ".png, .pdf or .svg")
    assert list(tmp_path.iterdir()) == []


def test_pictures_have_the_format_of_their_name(tmp_path, capsys):
    for suffix, first in ((".svg", b"<?xml"), (".PDF", b"%PDF")):
        path = tmp_path / f"plan{suffix}"
        assert main(["plan", "--hbm", "80GiB", "--requests", "64", "--plot", str(path)]) == 0
        assert path.read_bytes().startswith(first)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_full_disk_leaves_the_old_file(trace, tmp_path):
    """Of every output: one line, the old bytes, no temporary file."""
    old = tmp_path / "old"
    old.write_bytes(b"old")
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); from dsv4_jax.cli import entry; entry()"
    )
    argv = simulate(trace, "--blocks", 40, "--save-trace", old)
    done = subprocess.run([sys.executable, "-c", program, *map(str, argv)], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert "old: File too large" in done.stderr and old.read_bytes() == b"old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["old", "t.jsonl"]


def test_an_output_is_not_its_own_input(trace, tmp_path):
    refused(simulate(trace, "--blocks", 40, "--save-trace", trace), "--save-trace", "TRACE")
    tokens = tmp_path / "t.npy"
    np.save(tokens, np.arange(3))
    refused(["logits", "--checkpoint", "none", "--tokens", tokens, "--out", tokens], "--out", "--tokens")
    same = tmp_path / "x.png"
    refused(simulate(trace, "--blocks", 40, "--save-trace", same, "--plot", same), "--plot", "--save-trace")
    model.save_hf(CFG, model.init_params(CFG, 1), tmp_path)
    config = tmp_path / "config.json"
    before = config.read_bytes()
    for path in (tmp_path, config):
        argv = ["--model", path, "--json", config]
        refused(simulate(trace, "--blocks", 40, *argv), "--json", "--model")
        refused(["plan", "--hbm", "1GiB", "--requests", 4, *argv], "--json", "--model")
    refused(["logits", "--checkpoint", "x", "--tokens", tokens, "--out", config, "--json", config], "--json", "--out")
    assert config.read_bytes() == before


def test_a_kept_checkpoint_follows_no_link(tmp_path):
    """Each file is whole or not there, and none is written if one cannot be."""

    def write(folder: pathlib.Path) -> None:
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_text("weights")

    demo_passes.save_folder(tmp_path / "a" / "b", write)
    assert (tmp_path / "a" / "b" / "model.safetensors").read_text() == "weights"
    (victim := tmp_path / "victim").write_text("mine")
    (folder := tmp_path / "c").mkdir()
    (folder / "model.safetensors").symlink_to(victim)
    with pytest.raises(FileError, match="symbolic link"):
        demo_passes.save_folder(folder, write)
    assert victim.read_text() == "mine" and [p.name for p in folder.iterdir()] == ["model.safetensors"]


# Option values


NUMBERS = [
    (option, value)
    for option in (
        "--blocks",
        "--limit",
        "--trace-block-tokens",
        "--max-requests",
        "--snapshots",
        "--host-pages",
        "--snapshots-at",
        "--token-budget",
        "--block-tokens",
        "--draft-tokens",
    )
    for value in ("-1", "1e3", "nan", "", "1_0", "١٢", "0x10", "1.5", str(10**18), str(10**400), DIGITS, "a\nb")
]


@pytest.mark.parametrize(("option", "value"), NUMBERS, ids=lambda text: repr(text[:12]))
def test_hostile_numbers(option, value, trace):
    refused(simulate(trace, "--blocks", 40, f"{option}={value}"), option)


@pytest.mark.parametrize(
    "value", ["1e400", "1e30", str(10**400), DIGITS, "-1", "nan", "inf", "", "1.2.3", "80 GiBs", "٣GB"]
)
def test_hostile_sizes(value, trace):
    refused(["plan", f"--hbm={value}", "--requests", 4], "--hbm", "size")
    refused(simulate(trace, f"--hbm={value}"), "--hbm", "size")
    refused(simulate(trace, "--blocks", 40, f"--host={value}"), "--host", "size")


@pytest.mark.parametrize(
    "value", ["0", "-1", "nan", "", "1.5K", str(2**31), "2048M", str(10**400), DIGITS, "٣", "8KiB"]
)
def test_hostile_contexts(value, trace):
    refused(["plan", "--requests", 4, f"--context={value}"], "--context", "tokens")
    refused(simulate(trace, "--blocks", 40, f"--context={value}"), "--context", "tokens")
    refused(["bench", "step", f"--context={value}"], "--context", "tokens")


@pytest.mark.parametrize(
    "value", ["-1", "nan", "inf", "1e400", "1e18", "", "x", "1_0", "\u0661", "1,fixed=1,bandwidth=1,prefill_context=1"]
)
def test_hostile_times(value, trace):
    for name in ("fixed", "prefill_context", "bandwidth"):
        refused(simulate(trace, "--blocks", 40, f"--step-time={name}={value}"), "--step-time", f"field '{name}'")


@pytest.mark.parametrize("option", ["--requests", "--snapshots", "--draft-tokens", "--block-tokens"])
@pytest.mark.parametrize("value", ["-1", "x", str(2**31), DIGITS])
def test_hostile_plans(option, value):
    refused(["plan", "--hbm", "80GiB", "--requests", 4, f"{option}={value}"], option)


@pytest.mark.parametrize(
    "value", ["-1", "1", "nan", "inf", "1e400", "", "30%", "x", DIGITS, "0.1_5", "0_0", "0.\u0665"]
)
def test_hostile_shares(value):
    refused(
        ["plan", "--hbm", "80GiB", "--requests", 4, f"--snapshot-fraction={value}"], "--snapshot-fraction", "[0, 1)"
    )


@pytest.mark.parametrize(
    "value",
    [
        "",
        "every",
        "every:",
        "every:0",
        "every:x",
        "doubling:-1",
        "doubling: ",
        "prompt,,output",
        "none,prompt",
        "prompt:1",
        "every:4,every:5",
        "prompt,output,prompt",
        f"every:{DIGITS}",
        "every:2**31",
        "Prompt",
        "a\nb",
    ],
)
def test_hostile_placements(value, trace):
    refused(simulate(trace, "--blocks", 40, f"--snapshots-at={value}"), "--snapshots-at")


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--blocks", 2**30], ("--blocks: ",)),
        (["--hbm", "4e12"], ("--hbm: ",)),
        (["--blocks", 40, "--max-requests", 2**30], ("--max-requests: ",)),
        (["--blocks", 40, "--snapshots", 2**30], ("--snapshots: ",)),
        (["--blocks", 40, "--host-pages", 2**31 - 1], ("--host-pages: ",)),
        (["--blocks", 40, "--compare", "a: --host-pages 2147483647"], ("--compare a: --host-pages: ",)),
    ],
)
def test_units_that_memory_cannot_list_are_refused(argv, parts, trace):
    refused(simulate(trace, *argv), "at most 67108864", *parts)


@pytest.mark.parametrize(
    ("argv", "option"),
    [
        (["--blocks", 2**31 - 1], "--blocks"),
        (["--hbm", "8e18"], "--hbm"),
        (["--blocks", 40, "--max-requests", 2**31 - 1], "--max-requests"),
        (["--blocks", 40, "--snapshots", 2**31 - 1], "--snapshots"),
    ],
)
def test_units_that_int32_cannot_number_are_refused(argv, option, trace):
    refused(simulate(trace, *argv), option, "2147483646")


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ("chats=10000000000", "chats"),
        ("chats=1,turns=1000000", "chats"),
        ("tenants=100000000000", "tenants"),
        (f"system={10**400}", "system"),
        (f"question={2**31}", "question"),
        (f"answer={DIGITS}", "answer"),
        (f"seed={DIGITS}", "seed"),
        ("rate=nan", "rate"),
        ("rate=inf", "rate"),
        ("rate=1e-300", "rate"),
        ("pause=1e-300", "pause"),
        ("chats=1,chats=2", "chats"),
        (f"systems={10**400}", "systems"),
        ("=", ""),
        ("chats", "chats"),
        ("\n\n=1", "field"),
        ("x" * 5000, "unknown setting"),
        ("chats=1_0", "chats"),
        ("chats=\u0663", "chats"),
        ("rate=1_0", "rate"),
    ],
)
def test_hostile_generators(settings, field):
    refused(simulate("--blocks", 99, "--generate", settings), "--generate: ", field)


def test_odd_command_lines():
    refused(["plan", "--requests", "4", "a\nb\x1b[31m"], "unknown argument 'a\\nb\\x1b[31m'")
    refused(["pl\nan"], "invalid choice")
    refused(["bench", "\n"], "unknown op")
    refused(["x" * 100_000])
    refused(["bench", "gather", "--quick", "--shapes", "x\ny"], "no shape")
    refused(["bench", "gather", "--batch", DIGITS], "--batch")
    refused(["bench", "gather", "--quick", "--batch", "500000000"], "gather", "bytes")
    refused(["bench", "attend", "--quick", "--batch", "2,500000000"], "attend", "bytes")
    refused(["bench", "step", "--quick", "--model", "tiny", "--batch", "500000000"], "step", "bytes")
    refused(["bench", "step", "--quick", "--model", "tiny", "--batch", "2000000000"], "--batch")
    refused(["bench", "step", "--quick", "--profile", __file__], "--profile", "is not a directory")
    refused(["demo", "--keep", __file__], "--keep", "is not a directory")
    refused(["demo", "--new-tokens", DIGITS], "--new-tokens", BELOW)
    refused(["demo", "--chunk", 10**18], "--chunk", BELOW)
    refused(["logits", "--checkpoint", "x", "--tokens", "y", "--out", "z.npy", "--chunks", DIGITS], "--chunks")


# Traces


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (LINE.replace(": 0", f": {10**400}"), ("line 1", "'arrival'", "must be a time")),
        (LINE.replace(": 0", ": 1e19"), ("'arrival'", "must be a time")),
        (LINE.replace(": 0", f": {DIGITS}"), ("line 1", "not JSON")),
        (LINE.replace(": 0", ": NaN"), ("'arrival'",)),
        (LINE.replace(": 5", f": {10**400}"), ("'output'", "2^31")),
        (LINE.replace("10", f"{10**400}"), ("'prompt'", "2^31")),
        ("[" * 200_000, ("line 1", "nested too deep")),
        ('{"arrival": ' + "[" * 900 + "]" * 900 + "}", ("line 1",)),
        ('{"a":' * 100_000, ("line 1", "nested too deep")),
        (LINE + "\n\0\0\n", ("line 2", "not JSON")),
        (b"\xff\xfe" + LINE.encode("utf-16-le"), ("line 1", "not UTF-8")),
        (LINE.encode() + b'\n{"arrival": 0, "prompt": [["\xe9", 10]], "output": 5}', ("line 2", "not UTF-8")),
        (LINE.replace("5}", '5, "\\n\\u001b[2J": 1}'), ("unknown field",)),
        (LINE.replace("5}", f'5, "{"x" * 9000}": 1}}'), ("unknown field",)),
        ("\ufeff\n", ("there is no request",)),
        (LINE + LINE, ("not JSON", "Extra data")),
    ],
    ids=range(16),
)
def test_hostile_traces(text, parts, tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(simulate(path, "--blocks", 40), "TRACE", "t.jsonl", *parts)


@pytest.mark.parametrize("text", ["\ufeff" + LINE + "\r\n\r\n" + LINE, LINE + "\r" + LINE, LINE + "\n" + LINE])
def test_marks_and_line_ends_are_read(text, tmp_path, capsys):
    (path := tmp_path / "t.jsonl").write_bytes(text.encode())
    assert main([str(a) for a in simulate(path, "--blocks", 40, "--json")]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["requests"]["run"] == 2


def test_a_trace_is_a_regular_file_or_stdin(trace, tmp_path, capsys, monkeypatch):
    os.mkfifo(fifo := tmp_path / "fifo")
    for path in (fifo, "/dev/zero", tmp_path):
        refused(simulate(path, "--blocks", 40), "not a regular file")
    refused(simulate("", "--blocks", 40), "TRACE", "an empty name")
    refused(simulate("a\0b", "--blocks", 40), "TRACE")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(LINE.encode())))
    assert main([str(a) for a in simulate("-", "--blocks", 40, "--json")]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["requests"]["run"] == 1


def test_names_are_text_not_markup(trace, tmp_path, capsys, monkeypatch):
    """Paths go into tables and titles: neither rich's markup nor matplotlib's formulas may be read from them."""
    monkeypatch.chdir(tmp_path)
    model.save_hf(CFG, model.init_params(CFG, 1), tmp_path / "[" / "red]$\\frac{$")
    argv = ["--model", "[/red]$\\frac{$", "--plot", "x.png"]
    assert main([str(a) for a in simulate(trace, "--blocks", 40, *argv)]) == 0
    assert "[/red]$\\frac{$" in capsys.readouterr().out
    assert main(["plan", "--hbm", "80GiB", "--requests", "4", *argv]) == 0
    assert "[/red]$\\frac{$" in capsys.readouterr().out


# Tokens and texts


@pytest.mark.parametrize(
    ("header", "parts"),
    [
        ("{'descr': '<i8', 'fortran_order': False, 'shape': (1000000000000000,), }", ("1000000000000000", "16777216")),
        ("{'descr': '<i8', 'fortran_order': False, 'shape': (1000000,), }", ("1000000 tokens", "8000000 bytes")),
        ("{'descr': '<i8', 'fortran_order': False, 'shape': (-1,), }", ("holds no token",)),
        ("{'descr': '<i8', 'fortran_order': False, 'shape': (0,), }", ("holds no token",)),
        ("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", ("object",)),
        ("{'descr': [('a', '<i8')], 'fortran_order': False, 'shape': (1,), }", ("expected integers",)),
        ("{'descr': '<i8', 'fortran_order': False, 'shape': (" + "(" * 5000, ("not a .npy file",)),
        ("-" * 9000 + "1", ("not a .npy file",)),
        ("x" * 20000, ("not a .npy file",)),
        ("\0", ("not a .npy file",)),
        ("", ("not a .npy file",)),
    ],
    ids=range(11),
)
def test_hostile_tokens(header, parts, tmp_path, checkpoint):
    path = tokens_file(tmp_path / "t.npy", header, b"\0" * 8)
    argv = ["logits", "--checkpoint", checkpoint, "--tokens", path, "--out", tmp_path / "l.npy"]
    refused(argv, "--tokens", "t.npy", *parts)
    assert [p.name for p in tmp_path.iterdir()] == ["t.npy"]


def test_more_logits_than_memory(tmp_path, checkpoint, monkeypatch):
    np.save(path := tmp_path / "t.npy", np.zeros(1000, np.uint8))
    monkeypatch.setattr("dsv4_jax.cli.logits.machine_bytes", lambda: 500 * 256 * 4)
    argv = ["logits", "--checkpoint", checkpoint, "--tokens", path, "--out", tmp_path / "l.npy"]
    refused(argv, "1,000.00 KiB", "500.00 KiB")


def test_tokens_are_a_regular_file(tmp_path, checkpoint):
    os.mkfifo(fifo := tmp_path / "fifo")
    for path in (fifo, "/dev/zero", tmp_path):
        argv = ["logits", "--checkpoint", checkpoint, "--tokens", path, "--out", tmp_path / "l.npy"]
        refused(argv, "--tokens", "not a regular file")
        refused(["demo", "--checkpoint", checkpoint, "--text", path], "--text", "not a regular file")
    refused(["demo", "--checkpoint", checkpoint, "--text", tmp_path / "none"], "--text", "No such file")


def test_a_long_text_is_not_read_whole(tmp_path, checkpoint, monkeypatch):
    """Only the prompts' bytes are: the file may be larger than the memory."""
    with (path := tmp_path / "long").open("wb") as file:
        file.truncate(2**36)
    prompts = demo_passes.read_prompts(path)
    assert [len(prompt) for prompt in prompts] == [233, 150, 90, 37]
    path.write_bytes(bytes(range(233)))
    assert demo_passes.read_prompts(path)[3] == list(range(37))


# Processes: limits, closed outputs, signals


def process(*argv, limit: tuple[str, int] | None = None, **options) -> subprocess.CompletedProcess:
    lines = ["from dsv4_jax.cli import entry", "entry()"]
    if limit:
        lines.insert(0, f"import resource; resource.setrlimit(resource.{limit[0]}, ({limit[1]}, {limit[1]}))")
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "timeout": 60} | options
    return subprocess.run([sys.executable, "-c", "\n".join(lines), *map(str, argv)], text=True, **options)


def test_endless_lines_fit_in_little_memory(tmp_path):
    with (path := tmp_path / "t.jsonl").open("wb") as file:
        file.truncate(2**36)
    done = process(*simulate(path, "--blocks", 40), limit=("RLIMIT_AS", 3 * 2**30))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert "t.jsonl, line 1: is longer than 8388608 characters" in done.stderr


def test_ctrl_c_leaves_no_half_file(tmp_path):
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from dsv4_jax import cli\n"
        "from dsv4_jax.output import open_output\n"
        "def command(argv):\n"
        f"    with open_output({str(tmp_path / 'x')!r}) as file:\n"
        "        file.write(b'half')\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "cli._arguments = command\n"
        "cli.entry()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (MemoryError(), 1, "there is not enough memory"),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\n  of 3 GiB\x1b"), 1, "memory of 3 GiB\\x1b"),
        (OSError(5, "Input/output error", "a\nb"), 2, "Input/output error: 'a\\nb'"),
    ],
)
def test_failures_of_the_machine(error, status, said, monkeypatch, capsys):
    def run(args):
        raise error

    monkeypatch.setattr("dsv4_jax.cli.doctor.run", run)
    assert main(["doctor"]) == status
    err = capsys.readouterr().err
    assert err.startswith("dsv4-jax doctor: error: ") and err.endswith(said + "\n") and err.count("\n") == 1


def test_a_warning_is_one_line(trace):
    """Python's has the file and the source line that warns."""
    done = process(*simulate(trace, "--blocks", 40, "--snapshots-at", "none", "--json"))
    assert done.returncode == 0 and json.loads(done.stdout)["runs"][0]["requests"]["run"] == 1
    assert done.stderr.startswith("dsv4-jax: warning: prompts find next to nothing") and done.stderr.count("\n") == 1


def test_closed_outputs(tmp_path):
    """A reader that has gone is status 141, a full disk 2: neither is a complaint at exit."""
    argv = ["plan", "--hbm", "80GiB", "--requests", "4", "--json"]
    read, write = os.pipe()
    os.close(read)
    gone = process(*argv, stdout=write)
    os.close(write)
    assert (gone.returncode, gone.stderr) == (141, "")
    with open("/dev/full", "wb") as full:
        done = process(*argv, stdout=full)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "No space left" in done.stderr
    program = f"exec {sys.executable} -c 'from dsv4_jax.cli import entry; entry()' "
    closed = subprocess.run(["sh", "-c", f"{program} {' '.join(argv)} >&-"], capture_output=True, text=True)
    assert (closed.returncode, closed.stderr.count("\n")) == (2, 1), closed.stderr
