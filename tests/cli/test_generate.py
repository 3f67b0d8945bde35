"""`dsv4-jax generate`: what it prints and reports, as `model.generate` draws it; what it refuses before it loads."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import importlib.util
import json
import pathlib
import sys
import types

import jax
import numpy as np
import pytest

from dsv4_jax import CacheLayout, CacheSize, DSV4Config, init_cache, model
from dsv4_jax.cli import engine, main
from dsv4_jax.cli import generate as command
from dsv4_jax.cli.engine import DeviceMemory, choose_size, shares_a_block
from dsv4_jax.cli.prompts import given_prompts
from dsv4_jax.config import AttentionType
from dsv4_jax.engine import Drawn
from dsv4_jax.engine.device import DeviceExecutor
from dsv4_jax.errors import OptionError
from dsv4_jax.manager import KVCacheManager
from dsv4_jax.model.released import is_released
from dsv4_jax.model.weights.placement import default_form
from dsv4_jax.text import save_byte_tokenizer

from ..model import released
from ..text.folders import ASSISTANT, BEGIN, ids_of
from .refusals import refused

CFG = DSV4Config.tiny(layer_types=(AttentionType.CSA,), hc_sinkhorn_iters=1, vocab_size=300, num_mtp_layers=1)

ONE = dataclasses.replace(released.CFG, layer_types=(AttentionType.HCA,), hc_sinkhorn_iters=1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("checkpoint")
    model.save_hf(CFG, model.init_params(CFG, 1, drafts=True), path)
    (path / "generation_config.json").write_text('{"eos_token_id": 1}')
    return path


@pytest.fixture(scope="module")
def with_text(checkpoint, tmp_path_factory) -> pathlib.Path:
    """The same with a tokenizer: a token a byte, and marks."""
    if importlib.util.find_spec("tokenizers") is None:
        pytest.importorskip("deepseek_recipe")
    path = tmp_path_factory.mktemp("text")
    for file in checkpoint.iterdir():
        (path / file.name).symlink_to(file)
    save_byte_tokenizer(path)
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": BEGIN}, "add_bos_token": True}))
    return path


class Script:
    """In the place of a `DeviceExecutor`: draws what it is told."""

    def __init__(self, *answers: list[int], interrupt_after: int | None = None):
        self.answers, self.interrupt_after = answers, interrupt_after
        self.managers: list[KVCacheManager] = []

    def __call__(self, params, cache, shapes, **options):
        self.params, self.cache, self.shapes, self.options, self.layout = params, cache, shapes, options, cache.layout
        self.drawn, self.asked, self.sent = collections.Counter(), {}, list[tuple[bool, str, int]]()
        return self

    def check(self, prompt): ...

    def drain(self): ...

    def move(self, transfers): ...

    def send(self, work):
        rows = [[self.draw(row, work.steps) for row in some] for some in work.rows]
        self.sent.append((any(work.rows), work.kind, work.steps))
        return types.SimpleNamespace(get=lambda: Drawn(rows))

    def draw(self, row, steps):
        number = row.prompt.id
        self.asked[number] = row.prompt
        if not row.samples:
            return []
        at = self.drawn[number]
        if at == self.interrupt_after:
            raise KeyboardInterrupt
        self.drawn[number] += steps
        return [*self.answers[number][at : at + steps], *[0] * steps][:steps]

    @property
    def prompts(self):
        return [prompt.tokens.tolist() for _, prompt in sorted(self.asked.items())]


@pytest.fixture
def script(monkeypatch):
    def install(*answers: list[int], **options) -> Script:
        script = Script(*answers, **options)

        def manager(*args, **options):
            script.managers.append(KVCacheManager(*args, **options))
            return script.managers[-1]

        monkeypatch.setattr("dsv4_jax.engine.build.DeviceExecutor", script)
        monkeypatch.setattr("dsv4_jax.engine.build.KVCacheManager", manager)
        return script

    return install


def generate(path: pathlib.Path, *argv) -> list[str]:
    return ["generate", "--checkpoint", str(path), *map(str, argv)]


@pytest.mark.slow
def test_answers_are_those_of_the_model(checkpoint, tmp_path, capsys, monkeypatch):
    """Three prompts, two at a time, all beginning with the same block: each as alone in a cache that finds nothing."""
    made, real = [], DeviceExecutor

    def noted(params, cache, shapes, **options):
        made.append(params)
        return real(params, cache, shapes, **options)

    monkeypatch.setattr("dsv4_jax.engine.build.DeviceExecutor", noted)
    same = np.random.default_rng(0).integers(2, 300, 40).tolist()
    prompts = [[*same, 7, 8, 9], [*same[:20], 5], same]
    np.save(tmp_path / "p.npy", np.array(prompts[0]))
    (tmp_path / "p.jsonl").write_text(f"{prompts[2]}\n\n".replace("[", '{"tokens": [').replace("]", "]}"))
    argv = generate(checkpoint, "--tokens", tmp_path / "p.npy", "--tokens", ",".join(map(str, prompts[1])))
    argv += ["--prompt-file", str(tmp_path / "p.jsonl"), "--max-batch", "2", "--max-new-tokens", "6"]
    argv += ["--block-tokens", "16", "--kv-format", "f32", "--index-format", "f32"]
    assert main([*argv, "--json", str(tmp_path / "answers.json")]) == 0
    out, err = capsys.readouterr()
    report = json.loads((tmp_path / "answers.json").read_text())
    layout, size = CacheLayout(CFG, "f32", "f32", block_tokens=16), CacheSize(8, 2, 4)
    cold = dict(max_new_tokens=6, chunk_tokens=128, stop_tokens=[1])
    prompts = [prompts[2], *prompts[:2]]  # files come before --tokens
    for i, (prompt, answer) in enumerate(zip(prompts, report["answers"], strict=True)):
        drawn, _ = model.generate(made[0], init_cache(layout, size), KVCacheManager(layout, size), [prompt], **cold)
        assert [answer["tokens"]] == drawn and answer["prompt_tokens"] == len(prompt)
        assert (answer["end"], answer["text"]) == ("length", None)
        named = ",".join(map(str, prompt[:20]))[:37]
        tokens = ",".join(map(str, drawn[0]))
        assert f"[{i + 1}] '{named}...': 6 tokens, length\n{tokens}\n\n" in out
    assert report["max_batch"] == 2 and report["prefix_caching"] and report["cached_tokens"] >= 16
    fed = report["prompt_tokens"] + report["cached_tokens"]
    assert fed == sum(map(len, prompts)) and report["new_tokens"] == 18
    assert report["chunk_tokens"] == 128 and report["decode_calls"] and report["compile_s"] > report["decode_s"]
    assert " tokens of prompts (" in err and "first token after" in err


@pytest.mark.slow
def test_what_was_computed_is_found_in_the_next_run(checkpoint, tmp_path, capsys):
    """In a folder; and a cache too small for all makes them take turns. The answers are the same."""
    text = np.random.default_rng(3).integers(2, 300, 70).tolist()
    texts = [",".join(map(str, text[:n])) for n in (70, 65, 60)]
    options = [
        "--block-tokens",
        "16",
        "--kv-format",
        "f32",
        "--index-format",
        "f32",
        "--max-new-tokens",
        "40",
        "--json",
    ]
    options += ["--stop-tokens", "none", "--logprobs", "2"]
    bytes_ = CacheLayout(CFG, "f32", "f32", block_tokens=16).total_bytes(CacheSize(13, 3, 7, num_snapshots=4))

    def report(prompts, *more):
        argv = generate(checkpoint, *[word for prompt in prompts for word in ("--tokens", prompt)])
        assert main([*argv, *options, *more]) == 0
        return json.loads(capsys.readouterr().out)

    stored = ["--host-memory", "64MiB", "--store", str(tmp_path / "kept")]
    first, second = report(texts[:1], *stored), report(texts[:1], *stored)
    assert (first["cached_tokens"], second["cached_tokens"]) == (0, 64)
    assert first["answers"][0]["tokens"] == second["answers"][0]["tokens"]
    few = "--no-prefix-caching", "--cache-memory", f"{bytes_ / 1024}KiB"
    tight, roomy = report(texts, *few), report(texts, "--no-prefix-caching")
    assert tight["preemptions"] > 0 == roomy["preemptions"]
    assert [a["tokens"] for a in tight["answers"]] == [a["tokens"] for a in roomy["answers"]]
    answer = tight["answers"][0]
    assert len(answer["logprobs"]) == len(answer["top"]) == 40
    likeliest = [max(top.values()) for top in answer["top"]]
    assert np.allclose(answer["logprobs"], likeliest, atol=1e-5), "greedy"


def test_one_prompt_streams(checkpoint, script, capsys, monkeypatch):
    shown = []
    monkeypatch.setattr("dsv4_jax.cli.answers.write_text", shown.append)
    script([5, 6, 7, 8, 9, 1, 3])
    assert main(generate(checkpoint, "--tokens", "1,2,3", "--max-new-tokens", "5")) == 0
    assert shown == ["5", ",6", ",7", ",8", ",9", "\n"]
    shown.clear()
    assert main(generate(checkpoint, "--tokens", "1,2,3", "--max-new-tokens", "7", "--decode-steps", "2")) == 0
    assert shown == ["5", ",6,7", ",8,9", "\n"], "token 1 is the checkpoint's end"
    capsys.readouterr()
    assert main(generate(checkpoint, "--tokens", "1,2,3", "--stop-tokens", "8,300", "--json")) == 0
    (answer,) = json.loads(capsys.readouterr().out)["answers"]
    assert (answer["tokens"], answer["end"], answer["first_token_s"] > 0) == ([5, 6, 7], "stop", True)
    assert main(generate(checkpoint, "--tokens", "1", "--stop-tokens", "none", "--max-new-tokens", "6", "--json")) == 0
    (answer,) = json.loads(capsys.readouterr().out)["answers"]
    assert (answer["tokens"], answer["end"]) == ([5, 6, 7, 8, 9, 1], "length")


def test_a_closed_stdout(checkpoint, script, monkeypatch):
    script([10, 11])
    monkeypatch.setattr("sys.stdout", None)
    assert main(generate(checkpoint, "--tokens", "1", "--max-new-tokens", "2")) == 0


def test_options_reach_the_model(checkpoint, script):
    asked = script([5, 6])
    argv = generate(checkpoint, "--tokens", "1,2", "--max-new-tokens", "2", "--implementation", "xla")
    drawing = ["--temperature", "0.5", "--top-k", "7", "--top-p", "0.9", "--seed", "3"]
    assert main([*argv, "--drafts", "2", *drawing]) == 0
    assert asked.asked[0].sampling == model.Sampling(0.5, 7, 0.9)
    assert (asked.shapes.drafts, asked.options["implementation"]) == (2, "xla")
    assert asked.options["least_confidence"] == 0
    assert asked.layout.include_drafts and asked.layout.draft_tokens == 2 and "mtp" in asked.params
    assert main([*argv, "--decode-steps", "9", "--chunk", "7"]) == 0
    assert (asked.shapes.drafts, asked.shapes.steps, asked.shapes.mixed.tokens) == (0, 2, 7)
    assert not asked.layout.include_drafts and asked.layout.draft_tokens == 0 and "mtp" not in asked.params


def test_one_request_does_not_wait_for_the_host_of_a_gpu(checkpoint, script, monkeypatch):
    argv = generate(checkpoint, "--tokens", "1,2", "--max-new-tokens", "9")
    asked = script([5, 6])
    assert main(argv) == 0 and asked.shapes.steps == 1
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    assert main(argv) == 0 and asked.shapes.steps == 8
    assert main([*argv, "--decode-steps", "3"]) == 0 and asked.shapes.steps == 3


def test_all_steps_are_compiled_before_the_first(checkpoint, script):
    """Single ones of requests that others wait for, and loops behind them; without such, none that do not come."""
    asked, argv = script([5] * 9, [6] * 9, [7] * 9), generate(checkpoint, "--max-new-tokens", "9", "--decode-steps", 3)
    argv += [option for text in ("1,2", "3,4", "5,6") for option in ("--tokens", text)]
    for most, wanted in ((2, {("mixed", 1), ("decode", 1), ("decode", 3)}), (3, {("mixed", 1), ("decode", 3)})):
        assert main([*argv, "--max-batch", str(most)]) == 0
        for ran in (False, True):
            assert {(kind, steps) for rows, kind, steps in asked.sent if rows == ran} == wanted


@pytest.mark.slow
def test_several_devices(checkpoint, script, capsys):
    """Heads are split for few prompts; else the devices have prompts of their own, side by side in all as asked for."""
    asked, many = script(*[[5, 6]] * 9), generate(checkpoint, *["--tokens", "1,2"] * 9, "--max-new-tokens", "2")
    for argv, mesh, slots in (
        ([*many, "--devices", "2"], {"data": 2, "tensor": 1}, 5),
        ([*many, "--devices", "2", "--max-batch", "8", "--pool"], {"data": 1, "tensor": 2}, 8),
    ):
        asked.managers.clear()
        assert main([*argv, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        found = {leaf.sharding.mesh for leaf in asked.cache.arrays.values()}
        assert [dict(mesh.shape) for mesh in found] == [mesh] and len(asked.managers) == mesh["data"]
        assert {manager.size.num_slots for manager in asked.managers} == {slots}
        assert (report["devices"], report["tensor"]) == (mesh["data"] * mesh["tensor"], mesh["tensor"])
        assert report["max_batch"] == slots * mesh["data"]
        ranks = mesh["tensor"] if "--pool" in argv else 1
        assert report["pool_ranks"] == asked.cache.pool_axis.size == asked.managers[0].size.pool_ranks == ranks


@pytest.mark.parametrize(("prompts", "shown"), [(1, "5,6\n"), (2, "[1] '9': 2 tokens, interrupted\n5,6\n\n[2]")])
def test_what_was_drawn_before_ctrl_c_stays(checkpoint, script, capsys, prompts, shown):
    script([5, 6, 7, 8], [6, 7, 8, 9], interrupt_after=3)
    assert main(generate(checkpoint, *["--tokens", "9"] * prompts)) == 130
    out, err = capsys.readouterr()
    assert out.startswith(shown) and out.count("\n") == {1: 1, 2: 6}[prompts] and err == "interrupted\n"


def test_text(with_text, script, capsys):
    """Prompts are put with the token that begins a text; an answer is text, ended by tokens or by strings."""
    answer = ids_of("déjà vu: once, twice")
    asked = script([*answer, 1, 0], answer)
    assert main(generate(with_text, "--prompt", "Hé!")) == 0
    assert capsys.readouterr().out == "déjà vu: once, twice\n"
    assert asked.prompts == [[0, *ids_of("Hé!")]]
    argv = generate(with_text, "--prompt", "a", "--stop", "once more", "--stop", "à v", "--json")
    assert main(argv) == 0
    (report,) = json.loads(capsys.readouterr().out)["answers"]
    assert (report["text"], report["end"], report["prompt"]) == ("déj", "stop", "a")
    assert report["tokens"] == ids_of("déjà v")
    assert main(generate(with_text, "--prompt", "a", "--stop", "once more", "--max-new-tokens", "15")) == 0
    assert capsys.readouterr().out == "déjà vu: once\n", "what was held back comes with the end"
    assert main(generate(with_text, "--prompt", "a\nb", "--tokens", "4", "--max-new-tokens", "2")) == 0
    assert capsys.readouterr().out.startswith("[1] 'a\\nb': 2 tokens, length\nd\ufffd\n\n[2] '4': 2 tokens, length\n")


def test_chat(with_text, script, capsys, tmp_path, monkeypatch):
    pytest.importorskip("deepseek_recipe")
    asked = script([ids_of("no")[0], 1])
    assert main(generate(with_text, "--prompt", "why?", "--chat")) == 0
    assert asked.prompts == [[0, 2, *ids_of("why?"), 3, 5]]
    assert main(generate(with_text, "--prompt", "why?", "--chat", "think")) == 0
    assert asked.prompts[0][-2:] == [3, 4]
    assert asked.prompts[0][1:7] == ids_of("Reason"), "high effort, by default"
    assert main(generate(with_text, "--prompt", "<think>", "--chat", "think", "--effort", "low")) == 0
    assert asked.prompts == [[0, 2, *ids_of("<think>"), 3, 4]], "what users type is no mark"
    capsys.readouterr()
    script([*ids_of("no way"), 5, *ids_of("no?"), 1], [*ids_of("hm"), 1])
    argv = generate(with_text, "--chat", "think", "--stop", "way", "--stop", "?", "--prompt", "a")
    assert main([*argv, "--json", str(tmp_path / "answers.json")]) == 0
    assert capsys.readouterr().out == "no way\n\nno\n", "reasoning, then the answer, which alone is what a text ends"
    (found,) = json.loads((tmp_path / "answers.json").read_text())["answers"]
    assert (found["reasoning"], found["text"], found["end"]) == ("no way", "no", "stop")
    assert main([*argv, "--prompt", "b"]) == 0
    out = capsys.readouterr().out
    assert out == "[2] 'b': 2 tokens, stop\nhm\n\n[1] 'a': 10 tokens, stop\nno way\n\nno\n\n", "as they end"
    script([*ids_of("hm"), *ids_of("hm")], interrupt_after=3)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(argv) == 130
    assert capsys.readouterr().out == "\x1b[2mhm\x1b[0m\n", "nothing that follows is dimmed"
    argv = generate(with_text, "--prompt", "a", "--effort", "5")
    refused(capsys, [*argv, "--chat", "think"], "--chat: ", "levels only")
    refused(capsys, argv, "--effort: says how hard --chat think thinks")


def test_refusals(checkpoint, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "load", None)  # nothing is loaded before all is known to be right
    (lines := tmp_path / "lines.jsonl").write_text('"ok"\n{"tokens": "x"}\n')
    (lone := tmp_path / "lone.jsonl").write_text('"\\ud800"')
    (bad := tmp_path / "bad.txt").write_bytes(b"a\n\xff\n")
    (tmp_path / "empty.txt").touch()
    for argv, *parts in (
        ([], "--prompt, --prompt-file, --tokens: give at least one"),
        (["--prompt", ""], "--prompt: an empty prompt"),
        (["--prompt-file", tmp_path / "empty.txt"], "give at least one"),
        (["--prompt-file", bad], "--prompt-file", "line 2: not UTF-8"),
        (["--prompt-file", lines], "--prompt-file", "line 2: {'tokens': 'x'} is neither"),
        (["--prompt-file", tmp_path], "is a directory"),
        (["--prompt-file", lone], "line 1: '\\ud800' is no Unicode text"),
        (["--tokens", "1,x"], "argument --tokens: 'x' is not an integer"),
        (["--tokens", tmp_path / "none.npy"], "--tokens", "none.npy"),
        (["--tokens", "1,300"], "--tokens: token 300 is outside the vocabulary 0..299"),
        (["--tokens", "1", "--max-new-tokens", "99999"], "--tokens, --max-new-tokens: 1 tokens and 99999 new ones"),
        (["--tokens", "1", "--temperature", "-1"], "--temperature must be finite and at least 0"),
        (["--tokens", "1", "--top-p", "0"], "--top-p must be in (0, 1]"),
        (["--tokens", "1", "--top-p", "x"], "argument --top-p: 'x' is not a number"),
        (["--tokens", "1", "--stop", "a"], "--stop: ends texts"),
        (["--tokens", "1", "--chat"], "--chat: puts texts"),
        (["--tokens", "1", "--weights", "released"], "--weights: wq_a"),
        (
            ["--tokens", "1", "--numerics", "released", "--weights", "float32"],
            "--numerics: ",
            "--weights released, got f",
        ),
        (["--tokens", "1", "--drafts", "4"], "--drafts: an MTP layer guesses at most 3 tokens, got 4"),
        (["--tokens", "1", "--drafts", "9"], "argument --drafts: invalid choice: 9"),
        (["--tokens", "1", "--least-confidence", "1.5"], "--least-confidence: '1.5' is not a number in [0, 1)"),
        (["--tokens", "1", "--drafts", "2", "--least-confidence", "0.5"], "--least-confidence: of --drafts by DSpark"),
        (["--tokens", "1", "--drafts", "2", "--chunk", "2"], "--chunk: a token and its 2 drafts are 3, got 2"),
        (["--tokens", "1", "--devices", "8"], "--devices, --tensor: 4 experts do not divide by 8 devices"),
        (["--tokens", "1", "--tensor", "2"], "--tensor: 1 devices do not divide by 2"),
        (["--tokens", "1", "--implementation", "cuda"], "--implementation: ", "cuda", "cannot run"),
        (["--tokens", "1", "--store", "x"], "--store: what is kept goes there from --host-memory"),
        (["--tokens", "1", "--host-memory", "1GiB"], "--host-memory: without --prefix-caching"),
        (["--tokens", "1", "--prefix-caching", "--host-memory", "2000"], "--host-memory: "),
        (["--tokens", "1", "--prefix-caching", "--host-memory", "9TiB"], "--host-memory: 9.00 TiB, this machine has "),
        (["--tokens", "1", "--pool"], "--pool: blocks are shared by devices that share the heads"),
    ):
        refused(capsys, generate(checkpoint, *argv), *parts)
    monkeypatch.setattr(engine, "device_limit", lambda: 10_000)
    refused(
        capsys,
        generate(checkpoint, "--tokens", "1"),
        "--weights: float32 weights take ",
        "jax has 9.77 KiB of",
        "do not fit on 4 devices either",
    )
    needed = model.device_bytes(CFG, "float32")
    monkeypatch.setattr(engine, "device_limit", lambda: needed - 1)
    refused(capsys, generate(checkpoint, "--tokens", "1"), "--weights: ", "; --devices 2 would hold them")
    monkeypatch.setattr(engine, "device_limit", lambda: needed + 1000)
    refused(
        capsys, generate(checkpoint, "--tokens", "1"), "--max-new-tokens: a cache for 128 tokens", "has 900 B for it"
    )
    (tmp_path / "text").mkdir()
    save_byte_tokenizer(tmp_path / "text")
    (tmp_path / "text" / "config.json").symlink_to(checkpoint / "config.json")
    for package in ("tokenizers", "deepseek_recipe"):
        monkeypatch.setitem(sys.modules, package, None)
    needed = "need the extra text (pip install 'dsv4_jax[text]')"
    refused(capsys, generate(tmp_path / "text", "--prompt", "a"), needed)


def test_checkpoints_that_do_not_run_are_named(capsys, tmp_path, monkeypatch):
    """Before anything is loaded or its room computed."""
    monkeypatch.setattr(command, "load", lambda *_, **options: pytest.fail("loaded"))
    monkeypatch.setattr(engine, "weight_bytes", lambda *_, **options: pytest.fail("computed"))
    released.write(tmp_path, released.with_fp8_experts(released.tensors()))
    argv = generate(tmp_path, "--tokens", "1", "--weights", "released")
    refused(
        capsys, argv, "--checkpoint: the checkpoint's routed experts are FP8 (e4m3", "only FP4 experts run", "bfloat16"
    )
    released.write(tmp_path, released.tensors() | {"mtp.0.head.weight": ("BF16", np.ones((4, 128), np.uint16))})
    refused(capsys, [*argv, "--drafts", "1"], "--checkpoint: ", "of its own (mtp.0.head.weight)", "without drafts")
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"dspark_block_size": 5}))
    refused(capsys, argv, "--checkpoint: config field 'dspark_noise_token_id'", "missing")
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(pytest.fail.Exception, match="computed"):
        main(argv)


def test_weights_are_kept_as_released_where_kernels_read_them(monkeypatch):
    """Not on a CPU, which would dequantise them in every step, unless their values in bfloat16 take too much memory."""
    cfg, quantised = DSV4Config.tiny_released(), {"quantization_config": {"quant_method": "fp8"}}
    needed = model.device_bytes(cfg, "bfloat16")
    assert default_form(quantised, 2 * needed, lambda: needed) == "bfloat16"
    assert default_form(quantised, 2 * needed - 1, lambda: needed) == "released"
    assert default_form({}, 1, lambda: pytest.fail("it does not matter")) == "float32"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert default_form(quantised, 1 << 60, lambda: 1) == "released"


@pytest.mark.slow
def test_a_cpu_draws_the_same_from_weights_in_either_form(tmp_path, capsys):
    """Of a prefill and a decode. The third token of these random weights hangs on a tie of a router, which the order of
    sums decides: bfloat16 and float32 differ there, too."""
    assert main(["init", str(tmp_path), "--json"]) == 0
    answers = []
    for form in ([], ["--weights", "released"]):
        capsys.readouterr()
        argv = generate(tmp_path, "--tokens", ",".join(map(str, range(200))), "--max-new-tokens", 2, *form, "--json")
        assert main([*argv, "--logprobs", "5"]) == 0
        report = json.loads(capsys.readouterr().out)
        answers.append((report["answers"][0], report["weights"]))
    (first, wide), (second, kept) = answers
    assert first["tokens"] == second["tokens"] and len(first["tokens"]) == 2
    for one, other in zip(first["top"], second["top"], strict=True):
        assert one == pytest.approx(other, abs=1e-4)
    assert (wide, kept) == ("bfloat16", "released")


@pytest.fixture(scope="module")
def of_one_layer(tmp_path_factory) -> pathlib.Path:
    """As published."""
    path = tmp_path_factory.mktemp("released")
    released.write(path, released.tensors(ONE), ONE)
    return path


def test_numerics_reach_the_model(of_one_layer, script, capsys):
    """Also on a CPU, which would hold these weights as bfloat16."""
    drawn = script([5])
    argv = generate(of_one_layer, "--tokens", "1,2", "--max-new-tokens", 1, "--stop-tokens", "none", "--json")
    assert main([*argv, "--numerics", "released"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["numerics"], report["weights"], drawn.layout.numerics) == ("released", "released", "released")
    assert is_released(drawn.params)
    assert main(argv) == 0
    assert json.loads(capsys.readouterr().out)["numerics"] == drawn.layout.numerics == "plain"


@pytest.mark.slow
def test_what_one_numerics_stored_the_other_does_not_find(of_one_layer, tmp_path, capsys):
    text = np.random.default_rng(0).integers(0, ONE.vocab_size, 140).tolist()
    argv = generate(of_one_layer, "--tokens", ",".join(map(str, text)), "--max-new-tokens", 6, "--stop-tokens", "none")
    argv += ["--host-memory", "64MiB", "--store", str(tmp_path), "--json", "--weights", "released"]
    found = []
    for numerics in ("released", "released", "plain"):
        assert main([*argv, "--numerics", numerics]) == 0
        report = json.loads(capsys.readouterr().out)
        found.append((report["answers"][0]["tokens"], report["cached_tokens"]))
    (first, cold), (again, warm), (other, plain) = found
    assert first == again != other and (cold, warm, plain) == (0, 128, 0)


def test_checkpoints_without_text(checkpoint, with_text, capsys, tmp_path):
    refused(capsys, generate(checkpoint, "--prompt", "a"), "--checkpoint: ", "has no tokenizer.json", "--tokens")
    (tmp_path / "config.json").symlink_to(checkpoint / "config.json")
    (tmp_path / "tokenizer.json").write_text('{"version": 1}')
    refused(capsys, generate(tmp_path, "--prompt", "a"), "--checkpoint: ", "tokenizer.json is no tokenizer")
    odd = json.loads((with_text / "tokenizer.json").read_text())
    odd["pre_tokenizer"] = {"type": "none"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(odd))
    refused(capsys, generate(tmp_path, "--prompt", "a"), "--checkpoint: ", "tokenizer.json is no tokenizer")
    odd["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}  # at which the package panics
    (tmp_path / "tokenizer.json").write_text(json.dumps(odd))
    refused(capsys, generate(tmp_path, "--prompt", "a"), "--checkpoint: ", "tokenizer.json is no tokenizer")
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").symlink_to(with_text / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "add_bos_token": true}')
    refused(capsys, generate(tmp_path, "--prompt", "a"), "before each text, but tokenizer.json has no token <s>")
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": true}')
    refused(capsys, generate(tmp_path, "--prompt", "a"), "before each text, but it names no bos_token")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": BEGIN}))
    (tmp_path / "tokenizer.json").unlink()
    short = json.loads((with_text / "tokenizer.json").read_text())
    short["added_tokens"] = [token for token in short["added_tokens"] if token["content"] != ASSISTANT]
    del short["model"]["vocab"][ASSISTANT]
    (tmp_path / "tokenizer.json").write_text(json.dumps(short))
    if importlib.util.find_spec("deepseek_recipe"):
        lacks = f"--chat: {tmp_path}: tokenizer.json has no token {ASSISTANT}"
        refused(capsys, generate(tmp_path, "--prompt", "a", "--chat"), lacks)
    else:
        refused(capsys, generate(tmp_path, "--prompt", "a", "--chat"), "--chat: conversations need the extra serve")
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").symlink_to(with_text / "tokenizer.json")
    refused(capsys, generate(tmp_path, "--prompt", "\udcff"), "argument --prompt: '\\udcff' is no Unicode text")
    refused(capsys, generate(tmp_path, "--prompt", "a", "--stop", ""), "--stop: an empty text")
    (tmp_path / "tokenizer_config.json").write_text("[]")
    refused(capsys, generate(tmp_path, "--prompt", "a"), "--checkpoint: ", "tokenizer_config.json holds []")
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "\\ud800"}')
    refused(capsys, generate(tmp_path, "--prompt", "a"), "--checkpoint: bos_token of its tokenizer_config.json")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, "2"]}')
    refused(capsys, generate(tmp_path, "--tokens", "1"), "--stop-tokens: eos_token_id in ", "is [1, '2'], no ids")


def test_files_of_prompts(tmp_path):
    """No mark of an editor's, no end of a line is part of one."""
    (lines := tmp_path / "lines.jsonl").write_bytes(b'\xef\xbb\xbf"a"\r\n')
    args = argparse.Namespace(prompt=[], prompt_file=lines, tokens=[], chat=None, effort=None)
    assert [content for _, content in given_prompts(args)] == ["a"]


# Parts


def test_the_cache_is_what_prompts_need_and_fits():
    layout = CacheLayout(CFG, "f32", "f32", block_tokens=16)
    needs = [10, 40, 17]  # 1, 3 and 2 blocks
    memory = DeviceMemory(1 << 40, 1000)
    size = choose_size(layout, needs, 2, memory)
    assert (size.num_blocks, size.num_slots, size.max_blocks_per_request, size.num_snapshots) == (5, 2, 3, 0)
    assert choose_size(layout, needs, 3, memory, snapshots=True).num_snapshots == 4
    tight = choose_size(layout, needs, 3, memory, layout.total_bytes(CacheSize(4, 3, 3)))
    assert (tight.num_slots, tight.num_blocks) == (3, 4), "not all of the six that they need at their ends"
    for options, names in (
        (dict(memory=DeviceMemory(2000, 1000)), ""),
        (dict(memory=memory, most=900), "--cache-memory, "),
    ):
        with pytest.raises(
            OptionError, match=f"^{names}--max-new-tokens: a cache for 40 tokens, prompt included, takes"
        ):
            choose_size(layout, needs, 3, **options)


def test_what_prompts_share():
    assert shares_a_block([[1, 2, 3, 4, 5], [1, 2, 3, 9, 9, 9], [5]], 2)
    assert not shares_a_block([[1, 2]] * 2, 2), "the last token is always computed"
    assert not shares_a_block([[1, 2, 3], [5]], 2)
