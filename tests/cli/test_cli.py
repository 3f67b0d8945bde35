"""The command line: what it prints, what it refuses in one line, and that Ctrl-C leaves nothing behind."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from dsv4_jax import DSV4Config, model
from dsv4_jax.cli import doctor, main
from dsv4_jax.cli import logits as logits_command
from dsv4_jax.config import AttentionType, DSparkHead

from .refusals import refused

CFG = DSV4Config.tiny(layer_types=(AttentionType.CSA, AttentionType.HCA))
F32 = ["--kv-format", "f32", "--index-format", "f32"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("checkpoint")
    model.save_hf(CFG, model.init_params(CFG, 1), path)
    return path


def save_tokens(path: pathlib.Path, tokens) -> str:
    np.save(path, tokens)
    return str(path)


def test_usage_errors(capsys):
    refused(capsys, [], "COMMAND")
    refused(capsys, ["bake"], "invalid choice: 'bake'")
    refused(capsys, ["plan", "--requests", "0", "--hbm", "1e9"], "--requests", "at least 1")
    refused(capsys, ["plan", "--hbm", "80 bananas", "--requests", "1"], "'80 bananas' is not a size")
    refused(
        capsys, ["plan", "--hbm", "1e9"], "give at least two of --hbm, --requests and --context (missing: --requests"
    )
    refused(
        capsys, ["plan", "--hbm", "1MiB", "--requests", "9"], "error: --hbm: 1.00 MiB are too few", " MiB are missing"
    )
    for argv in (["plan", "--hbm", "80", "--requests", "9"], ["simulate", "--generate", "", "--host", "80"]):
        refused(
            capsys,
            argv,
            f"argument {argv[-2] if argv[0] == 'simulate' else '--hbm'}: '80' is 80 bytes, did you mean 80GiB?",
        )
    refused(capsys, ["plan", "--hbm", "1e9", "--request", "9"], "'--request', did you mean --requests?")
    refused(capsys, ["doctor", "extra"], "doctor: error: unknown argument 'extra' (see")
    refused(capsys, ["plan", "--requests", 2**31 - 1, "--context", "1M"], "--requests, --context: too large a cache")
    refused(capsys, ["plan", "--model", "v5", "--hbm", "1e9", "--requests", "1"], "--model: 'v5'")
    refused(
        capsys, ["plan", "--context", "2M", "--requests", "1"], "--context: 2097152 tokens exceed the model's 1048576"
    )
    refused(
        capsys, ["plan", "--context", "8", "--requests", "1", "--block-tokens", "100"], "--block-tokens must be", "128"
    )


def test_plan_with_drafts(capsys, tmp_path):
    """The state of the model's own head, and its weights."""
    head = DSparkHead(5, 128799, (40, 41, 42), 256)
    cfg = dataclasses.replace(DSV4Config.flash(), num_mtp_layers=0, dspark=head)
    (tmp_path / "config.json").write_text(json.dumps(cfg.to_hf("bfloat16")))
    argv = ["plan", "--model", str(tmp_path), "--requests", "8", "--context", "8K", "--weights", "released", "--json"]
    reports = []
    for more in ((), ("--draft-tokens", "5"), ("--drafts", "5")):
        assert main([*argv, *more]) == 0
        reports.append(json.loads(capsys.readouterr().out))
    _, room, whole = (report["bytes_by_pool"] for report in reports)
    assert whole["draft"] % 233_016 == 0 < whole["draft"] and "draft" not in room
    assert whole.keys() - room.keys() == {"draft"}
    assert reports[2]["weight_bytes"] == model.device_bytes(cfg, drafts=True) > reports[1]["weight_bytes"]
    refused(capsys, [*argv, "--drafts", "5", "--draft-tokens", "2"], "--draft-tokens: --drafts has room for its own")
    refused(capsys, ["plan", "--model", "tiny", *argv[3:7], "--drafts", "2"], "--drafts: the model has no layers that")


@pytest.mark.slow
def test_plan(capsys, tmp_path, checkpoint):
    argv = ["plan", "--model", "flash", "--hbm", "80GiB", "--context", "128K"]
    assert main([*argv, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["hbm_bytes"], report["max_context"], report["block_tokens"]) == (80 * 2**30, 131072, 128)
    assert report["total_bytes"] + report["leftover_bytes"] == 80 * 2**30 and report["limited_by"] == "blocks"
    assert main([*argv, "--plot", str(tmp_path / "plan.png")]) == 0
    assert f"{report['total_bytes']:,}" in capsys.readouterr().out
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert main([*argv[:3], "--hbm", "240GiB", "--context", "128K", "--weights", "released", "--json"]) == 0
    with_weights = json.loads(capsys.readouterr().out)
    assert round(with_weights["weight_bytes"] / 2**30, 1) == 145.3
    assert with_weights["total_bytes"] + with_weights["weight_bytes"] + with_weights["leftover_bytes"] == 240 * 2**30
    assert main([*argv[:3], "--requests", "1", "--context", "128K", "--weights", "bfloat16"]) == 0
    assert "529.69 GiB" in capsys.readouterr().out
    refused(
        capsys,
        [*argv, "--weights", "released"],
        "--hbm: 80.00 GiB are too few: weights take 145.29 GiB; ",
        "--devices 2",
    )
    refused(capsys, ["plan", "--model", "tiny", *argv[3:], "--weights", "released"], "--weights: wq_a [32, 64]: fp8")
    two = [*argv[:3], "--hbm", "141GB", "--context", "128K", "--weights", "released", "--devices", "2"]
    assert main([*two, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["weight_bytes"] == model.device_bytes(DSV4Config.flash(), "released", model.Split(data=2))
    assert main([*two, "--tensor", "2"]) == 0 and "1 x 2: what follows is of each" in capsys.readouterr().out
    refused(capsys, [*two[:-1], "3"], "--devices, --tensor: 3 devices")
    refused(capsys, [*two, "--tensor", "3"], "--tensor: 2 devices do not divide by 3")
    for option in ("--devices", "--tensor"):
        refused(capsys, [*argv, option, "2"], "--devices, --tensor: go with --weights")
    assert main(["plan", "--model", str(checkpoint), "--requests", "3", "--context", "100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["size"]["num_blocks"] == 3


def test_doctor(capsys):
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["packages"]["jax"] == jax.__version__ and report["problem"] is None
    assert len(report["devices"]) == len(jax.devices())
    assert report["implementations"]["attend"]["xla"] == report["transports"]["loopback"] == "usable"
    assert main(["doctor"]) == 0
    table = capsys.readouterr().out
    assert jax.__version__ in table and "usable: append, compress" in table and table.count("┌") == 1
    assert table.count("the backend is cpu:") == 1 and len(table.splitlines()) < 30


def test_doctor_says_each_thing_once(capsys, monkeypatch):
    """Also of a GPU machine whose kernels are usable in part."""
    reason = "the {} kernel in /x.so is built for 9.0"
    state = {"append": "usable", "attend": reason.format("attend"), "top_k": reason.format("top_k")}
    gpu = {"kind": "H", "compute_capability": "8.9", "memories": ["device"]}
    report = doctor.examine() | {
        "devices": [gpu | {"id": i} for i in range(8)],
        "native": {"cuda": "usable", "cpu": "usable"},
        "implementations": {op: {"cuda": cuda, "triton": "no kernel"} for op, cuda in state.items()},
        "cuda_build": {"toolkit": "13.0", "least_driver": "580", "driver_runs": "13.1"},
        "cuda_code": {
            **{op: {"capabilities": ["9.0"], "problem": None} for op in state},
            "swap": {"capabilities": ["8.0", "9.0"], "problem": None},
        },
    }
    monkeypatch.setattr(doctor, "examine", lambda: report)
    monkeypatch.setenv("COLUMNS", "150")
    assert main(["doctor"]) == 0
    table = capsys.readouterr().out
    for once in (
        "devices 0 to 7",
        "H, compute capability 8.9, memories device",
        "usable: append ",
        "no kernel",
        "the kernel in /x.so is built for 9.0: attend, top_k",
        "built with CUDA 13.0 (needs a driver of 580 or later)",
        "this driver runs CUDA 13.1",
        "capability 9.0: append, attend, top_k",
        "capability 8.0, 9.0: swap",
    ):
        assert table.count(once) == 1, (once, table)
    monkeypatch.setattr(doctor, "examine", lambda: report | {"problem": "jax finds no [device]"})
    assert main(["doctor"]) == 1 and "jax finds no [device]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("chunks", "dtype", "options"),
    [("13,1,1,7", np.int64, []), ("1", np.uint8, []), ("500", np.uint64, ["--draft-tokens", "2"])],
)
@pytest.mark.slow
def test_logits(capsys, tmp_path, checkpoint, chunks, dtype, options):
    tokens = np.random.default_rng(0).integers(0, CFG.vocab_size, 60).astype(dtype)
    out = tmp_path / "logits.npy"
    argv = ["logits", "--checkpoint", str(checkpoint), "--tokens", save_tokens(tmp_path / "t.npy", tokens)]
    assert main([*argv, "--chunks", chunks, "--out", str(out), "--json", *F32, *options]) == 0
    report = json.loads(capsys.readouterr().out)
    logits = np.load(out)
    assert logits.dtype == np.float32 and logits.shape == (60, CFG.vocab_size) and report["tokens"] == 60
    assert report["chunks"] == {"13,1,1,7": 3 + 7, "1": 60, "500": 1}[chunks]
    _, params = model.load_hf(checkpoint)
    want = jax.jit(model.forward_uncached, static_argnums=0)(CFG, params, tokens.astype(np.int32))
    np.testing.assert_allclose(logits, want, rtol=0, atol=1e-4)
    assert [p.name for p in tmp_path.iterdir() if "part" in p.name] == []


def test_any_list_of_chunks_compiles_few_steps():
    assert set(logits_command.step_sizes([13, 1, 1, 7])) == {13}
    assert set(logits_command.step_sizes([1] * 22)) == set(logits_command.step_sizes([1] * 1000)) == {1}
    assert logits_command.step_sizes([90, 64, 65, 1, 3]) == [90, 64, 90, 64, 64]
    assert logits_command.step_sizes([90, *[1] * 65, 3]) == [90, *[1] * 65, 64]  # many pay for a step of their own
    assert set(logits_command.step_sizes([5000, 17, 100, 1025])) == {64, 1024, 5000}


def test_few_tokens_on_a_cpu_do_without_optimisations():
    assert logits_command.compiler_options(22) == {"xla_backend_optimization_level": 0}
    assert logits_command.compiler_options(257) is None


def test_one_token(tmp_path, checkpoint):
    argv = ["logits", "--checkpoint", str(checkpoint), "--tokens", save_tokens(tmp_path / "t.npy", np.array([7]))]
    assert main([*argv, "--chunks", "13,1", "--out", str(tmp_path / "l.npy"), *F32]) == 0
    assert np.load(tmp_path / "l.npy").shape == (1, CFG.vocab_size)


def test_logits_refusals(capsys, tmp_path, checkpoint, monkeypatch):
    monkeypatch.setattr(logits_command, "load", None)  # nothing is loaded before all is known to be right
    out = tmp_path / "logits.npy"

    def argv(tokens, *more) -> list:
        path = save_tokens(tmp_path / "t.npy", tokens)
        return ["logits", "--checkpoint", checkpoint, "--tokens", path, "--out", out, *more]

    refused(capsys, argv([1, 2, 256]), "token 2 is 256", "0..255")
    refused(capsys, argv([1, -1, 300]), "token 1 is -1")
    refused(capsys, argv(np.array([2**63], np.uint64)), f"token 0 is {2**63}")
    refused(capsys, argv([[1, 2]]), "int64 of shape (1, 2)")
    refused(capsys, argv([1.0]), "float64")
    refused(capsys, argv([True]), "bool")
    refused(capsys, argv(np.zeros(0, int)), "holds no token")
    refused(capsys, argv([1], "--implementation", "cuda"), "--implementation: cuda cannot run here: ")
    refused(capsys, argv([1], "--chunks", "3,0"), "--chunks", "at least 1")
    refused(capsys, argv([1], "--chunks", "3,,1"), "--chunks")
    refused(capsys, argv([1], "--kv-format", "fp2"), "--kv-format")
    refused(capsys, argv([1], "--out", tmp_path / "nowhere" / "l.npy"), "nowhere")
    refused(capsys, argv([1], "--checkpoint", tmp_path), "config.json")
    refused(capsys, argv([1], "--tokens", tmp_path / "none.npy"), "none.npy")
    (tmp_path / "empty.npy").touch()
    refused(capsys, argv([1], "--tokens", tmp_path / "empty.npy"), "not a .npy file")
    assert not out.exists()


@pytest.mark.slow
def test_interrupt(tmp_path, checkpoint):
    """Ctrl-C while tokens are fed: status 130, one line, no traceback, no file."""
    tokens, out = save_tokens(tmp_path / "t.npy", np.zeros(20_000, np.int64)), tmp_path / "logits.npy"
    arguments = ["logits", "--checkpoint", checkpoint, "--tokens", tokens, "--chunks", "1", "--out", out]
    # A shell that runs the tests in the background may have had SIGINT ignored, and children inherit that.
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from dsv4_jax.cli import entry; print('started', flush=True); entry()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"XLA_FLAGS": ""},
        start_new_session=True,
    )
    assert process.stdout.readline() == "started\n"
    time.sleep(3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=300)  # a compilation is not interrupted
    *progress, last = stderr.splitlines()
    assert (process.returncode, stdout, last) == (130, "", "interrupted")
    assert all(line.startswith("chunks: ") for line in progress)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t.npy"]


def test_an_interrupt_of_the_imports():
    program = (
        "import sys\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'dsv4_jax.cli': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "from dsv4_jax.__main__ import command; command()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_an_interrupt_in_a_collectors_callback_is_not_lost():
    """Python drops exceptions raised there."""
    program = (
        "import gc, signal, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from dsv4_jax import cli\n"
        "def command():\n"
        "    gc.disable()\n"
        "    gc.callbacks.append(lambda phase, info: gc.callbacks.clear() or signal.raise_signal(signal.SIGINT))\n"
        "    gc.collect()\n"
        "    time.sleep(30)\n"
        "cli._arguments = lambda argv: command()\n"
        "cli.entry()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")
