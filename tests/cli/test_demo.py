"""The demo: its verdict first, what it read and wrote, what a smaller cache changes, and nothing left behind."""

from __future__ import annotations

import json
import math
import pathlib
import re
from typing import cast

import numpy as np
import pytest
from rich.console import Console

from dsv4_jax import model
from dsv4_jax.cli import demo, demo_passes, demo_plot, main
from dsv4_jax.cli.demo_passes import Served
from dsv4_jax.errors import PlanError
from dsv4_jax.text import Tokenizer

from .. import pictures
from ..docs import pages
from ..model.feeding import SMALL


@pytest.mark.slow
def test_demo(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user runs it, with everything it can write."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["demo", "--json", "demo.json", "--plot", "demo.svg"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(pathlib.Path("demo.json").read_text())
    assert {path.name for path in tmp_path.iterdir()} == {"demo.json", "demo.svg"}
    assert report["written"] == ["demo.svg", "demo.json"] and "Written: demo.svg, demo.json." in out
    # The verdict is the first line, and no error of a random model's logits is a headline.
    assert out.splitlines()[0] == "PASSED: decoding from the cache equals a forward that has no cache."
    assert not re.search(r"e\+\d|nan", out) and max(map(len, out.splitlines())) <= 80
    assert "Traceback" not in err
    assert report["passed"] and report["max_logit_difference"] <= report["tolerance"] == 1e-4
    assert report["tokens"] == report["same_likeliest_token"] == sum(demo_passes.PROMPTS) + 4 * 64
    # What it read is the text, what it wrote is there.
    text = " ".join(demo_passes.TEXT.split())
    for request in report["requests"]:
        assert request["prompt"].strip() in text and len(request["generated"]) > 32
        assert request["generated"][:30].strip() in out
    # The quantised cache, where the numbers mean something.
    quantised = report["quantised"]
    assert [layer["attention"] for layer in quantised["layers"]] == ["SWA", "CSA", "HCA"]
    assert all(0.01 < layer["output_error"] < 0.045 for layer in quantised["layers"])
    same = [layer["same_entries"] for layer in quantised["layers"]]
    assert same[0] is None is same[2] and 0.8 < same[1] < 0.99
    assert 0 < quantised["kl_nats"] < quantised["kl_nats_between_neighbours"] / 20
    assert quantised["experts"] == "by token" and "Experts are looked up by token" in out
    assert "Speed of the CPU reference, a tiny random model" in out and "It says nothing of other" in " ".join(
        out.split()
    )
    _check_page(out.replace("Written: demo.svg, demo.json.", _NOTHING_WRITTEN))
    picture = pathlib.Path("demo.svg").read_text()
    assert "Tiny random model: decoding from the cache equals a forward that has no cache" in picture


_NOTHING_WRITTEN = "Nothing was written (--keep DIR: the model and the text; --plot PNG: a picture)."
_NUMBER = re.compile(r"(?<![\w-])\d[\d,]*(?:\.\d+)?(?:e-\d+)?")


def _check_page(out: str) -> None:
    """What docs/start.md shows is what the demo prints. Another CPU rounds otherwise: numbers may differ a little."""
    (said,) = (
        prints
        for block in pages.blocks(pages.DOCS / "start.md")
        if block.language == "console"
        for command, prints in pages.commands(block)
        if command == "dsv4-jax demo"
    )
    pages.check_output(_NUMBER.sub("#", out), _NUMBER.sub("#", said), "dsv4-jax demo")
    for line in said.splitlines():
        if line.startswith("\u2502"):
            (got,) = (each for each in out.splitlines() if each.startswith(line[:8]))
            numbers = [[float(number) for number in _NUMBER.findall(each)] for each in (line, got)]
            assert numbers[0] == pytest.approx(numbers[1], rel=0.1)


def _report(**changes) -> dict:
    requests = [
        {"prompt_tokens": n, "new_tokens": 64, "prompt": "[/red] a", "generated": "b", "max_logit_difference": 1e-6}
        for n in demo_passes.PROMPTS
    ]
    layers = [
        {
            "layer": i,
            "attention": "CSA" if i % 2 else "HCA",
            "output_error": 0.03,
            "same_entries": 0.9 if i % 2 else None,
        }
        for i in range(4)
    ]
    quantised = {
        "kv_format": "fp8",
        "index_format": "fp4",
        "layers": layers,
        "kl_nats": 0.015,
        "kl_nats_between_neighbours": 0.7,
        "same_likeliest_token": 0.9,
        "experts": "by router",
        "bytes_per_token": 31.5,
        "float32_bytes_per_token": 104.0,
    }
    speed = {"of": "the CPU reference", "prefill_tokens_per_s": 1.0, "decode_tokens_per_s": 2.0}
    return {
        "passed": True,
        "verdict": "it equals",
        "max_logit_difference": 1e-6,
        "tolerance": 1e-4,
        "largest_logit": 5.0,
        "tokens": 766,
        "same_likeliest_token": 766,
        "model": "a/b",
        "random": False,
        "requests": requests,
        "continued": [{"begun": "a\n[b]", "written": "c[/d]", "prompt_tokens": 9, "cached": 8}],
        "quantised": quantised,
        "speed": speed,
        "written": [],
    } | changes


def _said(report: dict) -> str:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        demo.say(console, report)
        return console.export_text()


def test_a_difference_is_a_failure() -> None:
    rows = np.zeros((3, 8), np.float32)
    off = rows.copy()
    off[1, 2] = 0.5
    good, bad = (demo.exactness(Served([[]], [logits], 0.0, 0.0), [rows]) for logits in (rows, off))
    assert (good["passed"], good["same_likeliest_token"]) == (True, 3)
    assert (bad["passed"], bad["max_logit_difference"], bad["same_likeliest_token"]) == (False, 0.5, 2)
    said = _said(_report(**bad)).splitlines()[0]
    assert said == "FAILED: decoding from the cache does not equal a forward that has no cache."


def test_what_is_said_of_a_model_of_ones_own() -> None:
    said = " ".join(_said(_report()).split())
    assert "random" not in said and "[/red] a" in said and "The router decides in both." in said
    assert "Nothing was written" in said
    assert "of whose 9 tokens 8 were in the cache: ... a [b] c[/d]" in said


def test_readable() -> None:
    assert demo.readable([*b"a\tb\n", 0, 255, 300, *"é".encode()]) == "a b ...é"


class _Letters:
    """A tokenizer of one token a letter, far from its byte."""

    def encode(self, text: str) -> list[int]:
        return [1000 + ord(letter) for letter in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(token - 1000) for token in tokens)


def test_tokens_of_a_tokenizer(tmp_path: pathlib.Path) -> None:
    letters = cast("Tokenizer", _Letters())
    own = demo_passes.read_prompts(None, letters)
    assert tuple(map(len, own)) == demo_passes.PROMPTS
    assert demo.readable(own[0], letters) in " ".join("".join(demo_passes.FILES).split())
    (tmp_path / "text").write_text("\u00e4b " * 200)
    first, *_ = demo_passes.read_prompts(tmp_path / "text", letters)
    assert first[:3] == [1000 + ord(letter) for letter in "\u00e4b "]
    (tmp_path / "text").write_text("\u00e4" * 200)
    with pytest.raises(PlanError, match="200 tokens, needs at least 233"):
        demo_passes.read_prompts(tmp_path / "text", letters)


@pytest.mark.slow
def test_the_trained_model_writes_python(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    """As `make demo` runs it, and the second file finds what it shares with the first."""
    pytest.importorskip("tokenizers")
    assert main(["demo", "--checkpoint", str(SMALL), "--json", str(tmp_path / "demo.json")]) == 0
    report, out = json.loads((tmp_path / "demo.json").read_text()), capsys.readouterr().out
    assert report["passed"] and not report["random"]
    cold, warm = report["continued"]
    assert (cold["cached"], warm["cached"]) == (0, 128)
    assert cold["written"].strip().splitlines()[0].startswith("self.") and cold["written"].splitlines()[0] in out
    assert "of whose 262 tokens 128 were in the cache" in out


def test_divergence() -> None:
    want, got = np.log([[0.5, 0.5], [0.9, 0.1]]), np.log([[0.25, 0.75], [0.9, 0.1]]) + 7
    expected = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    np.testing.assert_allclose(demo.divergence(want, got), [expected, 0], atol=1e-12)


def test_prompts_of_its_own_text() -> None:
    prompts = demo_passes.read_prompts(None)
    assert tuple(map(len, prompts)) == demo_passes.PROMPTS and bytes(prompts[0]) == demo_passes.TEXT.encode()[:233]


def test_what_is_kept_can_be_read_again(tmp_path: pathlib.Path) -> None:
    assert demo_passes.keep(tmp_path) == [tmp_path / "checkpoint", tmp_path / "text.txt"]
    cfg, params = model.load_hf(tmp_path / "checkpoint")
    want, made = demo_passes.random_model()
    assert cfg == want and np.array_equal(params["embed"], made["embed"])
    assert demo_passes.read_prompts(tmp_path / "text.txt") == demo_passes.read_prompts(None)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint", "text.txt"}


@pytest.mark.parametrize(("layers", "size"), [(1, 1.0), (4, 0.0), (43, 1.0)])
def test_picture(layers: int, size: float) -> None:
    rng = np.random.default_rng(0)
    report = _report(random=True)
    report["quantised"]["layers"] = [report["quantised"]["layers"][i % 2] | {"layer": i} for i in range(layers)]
    lengths = [n + 64 for n in demo_passes.PROMPTS]
    differences = [size * 1e-5 * rng.random(n) for n in lengths]
    divergences = [size * 0.02 * rng.random(n) for n in lengths]
    figure = demo_plot.picture(report, differences, divergences)
    pictures.check(figure)
    assert len(figure.axes) == (3 if layers == 1 else 4)  # one layer alone picks nothing
    shown = pictures.words(figure)
    assert "Tiny random model: it equals" in shown and "request 2: 150 + 64 tokens" in pictures.labels(figure)


def test_bad_inputs_are_refused_before_the_work(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    (tmp_path / "short.txt").write_text("too short")
    assert main(["demo", "--text", str(tmp_path / "short.txt")]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "9 bytes, needs at least 233" in err
