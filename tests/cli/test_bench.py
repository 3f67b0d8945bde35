"""`bench`: what it prints and writes at tiny sizes, and what it refuses in one line."""

from __future__ import annotations

import builtins
import dataclasses
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import records
from render import pages

from dsv4_jax.bench import measure, step, timing
from dsv4_jax.bench import model as bench_model
from dsv4_jax.bench.records import Measurement
from dsv4_jax.bench.shapes import QUICK
from dsv4_jax.cli import main
from dsv4_jax.model.released import is_released
from dsv4_jax.model.weights.placement import device_specs
from dsv4_jax.model.weights.split import ALONE

from .test_cli import refused

SMALL = pathlib.Path(__file__).parents[2] / "checkpoints" / "small"
RATIOS = ("floor_us", "of_floor", "of_copy", "of_matmul")


@pytest.fixture(autouse=True, scope="module")
def compiled_in_a_moment():
    """What is compiled runs once or twice: most of the time would go into making it fast."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(autouse=True)
def no_ceilings(monkeypatch):
    monkeypatch.setattr(timing, "measure_ceilings", lambda: timing.Ceilings(4e12, 8e14))


@pytest.fixture
def without_weights(monkeypatch):
    """Weights that are zeros, all experts chosen: nothing is compiled but the step (tests/bench/test_model.py has
    both).
    """

    def zeros(cfg, seed, weights, *, packed, drafts, numerics, mesh, progress):
        assert (seed, weights, packed, mesh) == (0, "released", True, None)
        progress(0, 1)
        return jax.tree.map(
            lambda x: np.zeros(x.shape, x.dtype), device_specs(cfg, split=ALONE, drafts=drafts, numerics=numerics)
        )

    def every_expert(params, cache, plan, tokens, *, implementation):
        cfg = cache.layout.cfg
        return jnp.ones((cfg.num_layers, cfg.n_routed_experts), bool), cache

    monkeypatch.setattr("dsv4_jax.model.init_params", zeros)
    monkeypatch.setattr("dsv4_jax.bench.model.chosen_experts", every_expert)


@pytest.fixture
def a_gpu(monkeypatch):
    """What this machine's backend is taken for: the sizes stay tiny."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr("dsv4_jax.cli.bench.CASES", QUICK)
    monkeypatch.setattr("dsv4_jax.bench.timing.L2_FLUSH", 1 << 12)


@pytest.mark.slow
def test_two_ops_to_json(capsys):
    argv = ["bench", "gather", "index_scores", "--quick", "--implementations", "pallas,xla", "--json"]
    assert main(argv) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["quick"], report["software"]["backend"], report["ceilings"]) == (True, "cpu", {})
    assert report["command"] == f"dsv4-jax {' '.join(argv)}"
    found = report["rows"]
    assert [(r["op"], r["implementation"]) for r in found] == [
        (op, name) for op in ("gather", "index_scores") for name in ("pallas", "xla")
    ]
    fields = {field.name for field in dataclasses.fields(Measurement)}
    assert all(set(r) == fields | {"table"} and r["table"] == "ops" for r in found)
    assert records.check(report | {"quick": False, "commit": "0123abc"})["rows"] == found
    assert {r["problem"] for r in found if r["implementation"] == "pallas"} == {"the backend is cpu"}
    scores = found[-1]
    assert scores["flops"] == 2 * 2 * 64 * 128 * 64 and scores["bytes"] == 2 * (64 * 72 + 8 + 64 * 260)
    assert scores["us"] > 0 and scores["correct"] is True and scores["relative_error"] == 0
    assert all(scores[name] is None for name in RATIOS)


def test_a_quick_run_prints_no_ratios(capsys):
    assert main(["bench", "gather", "step", "--quick", "--layers", "1", "--implementations", "xla"]) == 0
    table = capsys.readouterr().out
    assert "tiny sizes" in table and "decode step" in table and "│ us │" in " ".join(table.split()).replace("┃", "│")
    assert not any(word in table for word in ("floor", "GB/s", "FLOP", "%", "goal", "None"))


def test_a_run_on_a_gpu_prints_ratios(capsys, tmp_path, a_gpu):
    png = tmp_path / "roofline.png"
    argv = ["bench", "top_k", "--implementations", "lax.top_k", "--plot", str(png), "--json", str(tmp_path / "r.json")]
    assert main(argv) == 0
    table, report = capsys.readouterr().out, json.loads((tmp_path / "r.json").read_text())
    assert "copy 4,000 GB/s, bf16 matmul 800 TFLOP/s" in table and "of floor" in table
    assert report["ceilings"] == {"copy_gb_per_s": 4000, "matmul_tflop_per_s": 800}
    (row,) = report["rows"]
    assert row["floor_us"] == pytest.approx(max(row["bytes"] / 4e12, row["flops"] / 8e14) * 1e6)
    assert row["of_floor"] == pytest.approx(row["floor_us"] / row["us"])
    assert png.read_bytes().startswith(b"\x89PNG")


def test_table_and_file(capsys, tmp_path):
    path = tmp_path / "bench.json"
    svg = tmp_path / "times.svg"
    assert main(["bench", "top_k", "--quick", "--batch", "1", "--json", str(path), "--plot", str(svg)]) == 0
    assert "top_k: times at tiny sizes" in svg.read_text() and "%" not in "".join(
        re.findall(">([^<]+)<", svg.read_text())
    )
    out = capsys.readouterr().out
    assert "top_k v4-widths" in out and "lax.top_k" in out and "not measured: " in out and "the backend is cpu" in out
    assert {r["batch"] for r in json.loads(path.read_text())["rows"]} == {1}


def test_without_a_gpu_sizes_are_tiny(capsys):
    assert main(["bench", "gather", "--implementations", "triton", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["quick"] is True and err == "no GPU: tiny sizes, as with --quick\n"


def test_a_wrong_result_fails(capsys, monkeypatch):
    monkeypatch.setattr(measure, "relative_error", lambda got, want: 0.5)
    assert main(["bench", "gather", "--quick", "--implementations", "xla"]) == 1
    assert "5.0e-01 wrong" in capsys.readouterr().out


@pytest.mark.slow
def test_what_was_measured_survives_an_interruption(capsys, monkeypatch, tmp_path):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("dsv4_jax.bench.step.measure_step", interrupted)
    file = tmp_path / "bench.json"
    options = ["--quick", "--model", "tiny", "--implementations", "xla", "--json", str(file)]
    assert main(["bench", "gather", "step", *options]) == 130
    assert {r["op"] for r in json.loads(file.read_text())["rows"]} == {"gather"}


@pytest.mark.slow
def test_step(capsys, tmp_path):
    file = tmp_path / "step.json"
    options = "--quick --model tiny --layers 1 --context 200 --chunk 9 --loop 2 --xla xla_backend_optimization_level=0"
    assert main(["bench", "step", *options.split(), "--json", str(file)]) == 0
    table = capsys.readouterr().out
    assert "decode step" in table and "xla_backend_optimization_level" in table
    report = json.loads(file.read_text())
    (step,) = report["rows"]
    assert step["table"] == "steps"
    assert (step["model"], step["batch"], step["context"], step["chunk"], step["loop"]) == ("tiny", 2, 200, 9, 2)
    assert records.check(report | {"quick": False, "commit": "0123abc"})
    assert (
        step["cache_in_place"] is True and step["step_ms"] * 1e3 > step["dispatch_us"] > 0 and step["kernel_ms"] is None
    )
    assert "over_floor" not in step


@pytest.mark.slow
def test_a_step_on_a_gpu_has_a_floor(capsys, a_gpu, monkeypatch):
    monkeypatch.setattr("dsv4_jax.bench.timing.profiled", lambda call, keep: {})
    argv = ["bench", "step", "--model", "tiny", "--layers", "1", "--batch", "1", "--context", "200", "--steps", "2"]
    assert main([*argv, "--implementations", "xla", "--json"]) == 0
    (step,) = json.loads(capsys.readouterr().out)["rows"]
    assert step["floor_ms"] == pytest.approx(sum(step["floor_us"].values()) / 1e3)
    assert step["over_floor"] == pytest.approx(step["step_ms"] / step["floor_ms"])


@pytest.mark.slow
def test_whole_layers(capsys, tmp_path, without_weights):
    file = tmp_path / "model.json"
    options = ["--quick", "--model", "tiny", "--layers", "2", "--batch", "3", "--loop", "2", "--json", str(file)]
    assert main(["bench", "model", *options]) == 0
    table = capsys.readouterr().out
    assert table.count("decode step of whole layers") == 1 and "experts" in table
    assert not any(word in table for word in ("floor", "GB/s", "FLOP", "%", "goal", "None"))
    report = json.loads(file.read_text())
    assert records.check(report | {"quick": False, "commit": "0123abc"})
    (row,) = report["rows"]
    assert (row["table"], row["model"], row["layers"], row["batch"], row["loop"]) == ("models", "tiny", 2, 3, 2)
    assert row["kinds"] == {"SWA": 1, "CSA": 1} and row["experts"] == 8
    assert row["cache_in_place"] is True and row["step_ms"] > 0 and row["layer_ms"] * 2 == row["step_ms"]
    assert row["numerics"] is None


def test_whole_layers_of_released_numerics(capsys, monkeypatch, without_weights):
    seen, measure = [], bench_model.measure_model

    def measured(options, params, top):
        layout, _ = step.cache_shape(bench_model.model_config(options), options)
        seen.append((layout.numerics, is_released(params)))
        return measure(options, params, top)

    monkeypatch.setattr(bench_model, "measure_model", measured)
    options = ["--quick", "--model", "tiny", "--layers", "1", "--batch", "1", "--numerics"]
    assert main(["bench", "model", *options, "plain,released", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert seen == [("plain", False), ("released", True)] and all(row["step_ms"] > 0 for row in report["rows"])
    assert [row["numerics"] for row in report["rows"]] == [None, "released"]
    assert records.check(report | {"quick": False, "commit": "0123abc"})


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_prefill_over_devices(capsys, tensor: int):
    """Of one prompt's heads, or of a prompt each."""
    options = ["--quick", "--model", "tiny", "--layers", "1", "--batch", "2", "--chunk", "16", "--devices", "2"]
    assert main(["bench", "model", *options, "--tensor", str(tensor), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["chunk"], row["devices"], row["tensor"], row["cache_in_place"]) == (16, 2, tensor, True)
    assert row["step_ms"] > 0 and row["experts"] > 0


@pytest.mark.slow
def test_whole_layers_on_a_gpu_have_a_floor(capsys, a_gpu, monkeypatch, tmp_path, without_weights):
    monkeypatch.setattr("dsv4_jax.bench.timing.profiled", lambda call, keep: {})
    argv = ["bench", "model", "--model", "tiny", "--layers", "1", "--batch", "2", "--context", "200", "--steps", "2"]
    assert main([*argv, "--implementations", "xla", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    (row,) = report["rows"]
    assert row["floor_ms"] == pytest.approx(sum(row["floor_us"].values()) / 1e3)
    assert row["over_floor"] == pytest.approx(row["step_ms"] / row["floor_ms"])
    assert row["layer_floor_ms"] == row["floor_ms"] and row["moved_gb"] > 0
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "r.json").write_text(json.dumps(report | {"commit": "0123abc", "quick": False}))
    page = pages(tmp_path)["RESULTS.md"]
    assert "1 (1 SWA)" in page and "## Whole layers" in page


def test_a_step_that_cannot_run_says_why(capsys):
    options = "--quick --model tiny --layers 1 --implementations triton --json"
    assert main(["bench", "step", *options.split()]) == 1
    (step,) = json.loads(capsys.readouterr().out)["rows"]
    assert step["implementation"] == "triton" and "no Triton kernel" in step["problem"]


def test_quality(capsys, tmp_path, monkeypatch):
    """Measured in tests/bench/test_quality.py; here what is asked for, printed, written and drawn."""

    def rows(cfg, load, forms, chosen, feeding, *, implementation, compilers, on_start):
        assert forms == [("float32", "plain"), ("released", "plain"), ("released", "released")]
        assert (feeding.windows.shape, feeding.requests, feeding.chunk) == ((3, 129), 3, 256)
        assert [str(each) for each in chosen] == ["f32/f32, throughput", "fp8/fp4, latency"]
        for each in chosen:
            row = each._asdict() | dict(
                weights="released", numerics="released", tokens=384, windows=3, context=128, loss=1.3, kl=None
            )
            if each.kv_format == "fp8":
                beside = dict(against="float32 rows", kl=2e-4, kl_half=1e-4, same_token=0.99, same_entries=0.97)
                row |= beside | dict(same_entries_half=0.01, loss_change=-1e-3, loss_change_half=None)
            yield {"against": None} | row

    def drafts(cfg, params, feeding, width, temperature, *, rule, numerics, implementation):
        assert params == "released with MTP" and numerics == "released" and width == 1
        yield dict(
            head="mtp",
            rule=rule if temperature else None,
            temperature=temperature,
            draft=1,
            accepted=0.8,
            accepted_half=0.1,
            tokens_a_step=1.8,
            places=12,
        )

    monkeypatch.setattr("dsv4_jax.bench.quality.measure_quality", rows)
    monkeypatch.setattr("dsv4_jax.bench.acceptance.measure_acceptance", drafts)

    def load(path, form, *, drafts, numerics):
        return None, drafts and f"{numerics} with MTP"

    monkeypatch.setattr("dsv4_jax.cli.bench_quality.load", load)
    text, file, drawn = tmp_path / "text.npy", tmp_path / "quality.json", tmp_path / "quality.svg"
    np.save(text, np.arange(500, dtype=np.uint16))
    options = "--weights float32,released --numerics plain,released --kv-format fp8 --index-format fp4"
    argv = ["bench", "quality", "--checkpoint", str(SMALL), "--text", str(text), *options.split()]
    argv += ["--key-split", "latency", "--context", "128", "--drafts", "1"]
    assert main([*argv, "--json", str(file), "--plot", str(drawn)]) == 0
    table = capsys.readouterr().out
    assert "-0.0010" in table and "2.0e-04 ±1.0e-04" in table and "97.0% ±1.0%" in table and "1.80" in table
    assert "│ released numerics │ f32 " in table
    report = json.loads(file.read_text())
    assert [row["table"] for row in report["rows"]] == ["quality"] * 2 + ["acceptance"] * 3
    assert records.check(report | {"quick": False, "commit": "0123abc"})
    assert "KL, nats a token; released numerics" in drawn.read_text()
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "r.json").write_text(json.dumps(report | {"commit": "0123abc", "quick": False}))
    page = pages(tmp_path)["RESULTS.md"]
    assert "| 2.00e-04 ± 1.00e-04 |" in page and "| 80.0% ± 10.0% |" in page


def test_quality_refuses(capsys, tmp_path, monkeypatch):
    text = tmp_path / "text.npy"
    np.save(text, np.arange(5000))
    given = ["bench", "quality", "--checkpoint", SMALL, "--text", text]
    refused(capsys, ["bench", "quality"], "quality: needs a trained --checkpoint")
    refused(capsys, ["bench", "quality", "step"], "quality is measured by itself")
    refused(capsys, ["bench", "step", "--text", text], "--text: is for quality")
    refused(capsys, [*given, "--layers", "3"], "--layers: is not for quality")
    refused(capsys, [*given, "--drafts", "4"], "--drafts: an MTP layer guesses at most 3 tokens, got 4")
    refused(capsys, [*given, "--weights", "float32,int8"], "--weights", "'int8' is none of float32, bfloat16")
    of_float32 = [*given, "--weights", "float32", "--numerics", "plain,released"]
    refused(capsys, of_float32, "--numerics: released ones are of --weights released, got float32")
    refused(capsys, [*given, "--context", "128,256"], "--context: quality is measured at one")
    refused(capsys, [*given, "--context", "128K"], "--context: 131072, of 32 to 65536")
    refused(capsys, [*given, "--context", "128"], "--text: a token outside the vocabulary 0..4095")
    np.save(text, np.arange(100))
    refused(capsys, [*given, "--context", "128"], "--text: a text of 100 tokens has no window of 129")
    refused(capsys, ["bench", "quality", "--checkpoint", tmp_path], "--checkpoint", "config.json")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused(capsys, ["bench", "quality", "--checkpoint", SMALL], "--text: a text needs the extra text", ".npy")


def test_refusals(capsys, tmp_path, monkeypatch):
    refused(capsys, ["bench", "bake"], "unknown op 'bake'", "attend")
    refused(capsys, ["bench", "attend", "--quick", "--shapes", "nope"], "no shape of attend", "v4-widths")
    refused(
        capsys, ["bench", "attend", "--quick", "--implementations", "xla,foo"], "--implementations: 'foo' is none of"
    )
    refused(capsys, ["bench", "attend", "--batch", "4,0"], "--batch", "at least 1")
    refused(capsys, ["bench", "attend", "--key-split", "balanced"], "--key-split", "'balanced'")
    refused(capsys, ["bench", "attend", "--context", "3x"], "--context", "'3x'")
    refused(capsys, ["bench", "step", "--xla", "fast"], "--xla", "'fast' is not OPTION=VALUE")
    refused(capsys, ["bench", "step", "--quick", "--context", "1M"], "1048576", "tiny has at most 4096")
    refused(capsys, ["bench", "step", "--quick", "--plot", tmp_path / "x.png"], "--plot")
    refused(capsys, ["bench", "model", "--quick", "--context", "1M"], "1048576", "tiny has at most 4096")
    refused(capsys, ["bench", "model", "--quick", "--layers", "9"], "--layers", "tiny has 4")
    refused(capsys, ["bench", "model", "--quick", "--shapes", "x"], "--shapes", "is for ops")
    refused(capsys, ["bench", "model", "--quick", "--chunk", "4", "--loop", "2"], "--chunk", "prefill is one step")
    refused(capsys, ["bench", "step", "--quick", "--numerics", "released"], "--numerics", "name `model`")
    refused(capsys, ["bench", "model", "--quick", "--numerics", "exact"], "--numerics", "'exact' is none of plain, rel")
    refused(capsys, ["bench", "step", "--quick", "--chunk", "300"], "--chunk", "300 tokens, --context has 256")
    refused(capsys, ["bench", "gather", "--quick", "--layers", "3"], "--layers", "name `step`")
    refused(capsys, ["bench", "step", "--quick", "--layers", "9"], "--layers", "tiny has 4")
    refused(capsys, ["bench", "step", "--quick", "--implementations", "lax.top_k"], "--implementations", "a step runs")
    refused(capsys, ["bench", "--render", "--check"], "--render", "python benchmarks/render.py")
    refused(capsys, ["bench", "gather", "--quick", "--json", tmp_path / "none" / "x.json"], "there is no folder")
    refused(capsys, ["bench", "gather", "--quick", "--plot", tmp_path], "is a directory")
    real = builtins.__import__

    def without_matplotlib(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    refused(capsys, ["bench", "gather", "--quick", "--plot", tmp_path / "x.png"], "install dsv4_jax[plot]")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
def test_kernel_times_on_a_gpu(capsys):
    assert main(["bench", "gather", "top_k", "index_scores", "--quick", "--json"]) == 0
    found = [r for r in json.loads(capsys.readouterr().out)["rows"] if r["problem"] is None]
    assert {r["op"] for r in found} == {"gather", "top_k", "index_scores"}
    for r in found:
        assert r["correct"] and r["kernel_us"] > 0 and r["kernel_us"] == pytest.approx(sum(r["kernels"].values()))


def test_help(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["bench", "--help"])
    out = capsys.readouterr().out
    assert exit_.value.code == 0 and "examples:" in out and "floor" in out


@pytest.mark.parametrize("op", ["compress_csa", "compress_hca", "append"])
def test_ops_with_plans_of_their_own_are_measured(capsys, op: str) -> None:
    assert main(["bench", op, "--quick", "--batch", "1", "--implementations", "xla", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["rows"]
    assert found and all(r["problem"] is None and r["us"] > 0 for r in found)
