"""`dsv4-jax init`: a checkpoint as published ones are, and nothing in its way destroyed."""

from __future__ import annotations

import json

from dsv4_jax import DSV4Config
from dsv4_jax.cli import main
from dsv4_jax.cli import models as command_models
from dsv4_jax.text import BYTE_TOKENS, stop_tokens_of

from ..model import released
from .refusals import refused

CFG = DSV4Config.tiny_released()
FILES = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


def test_it_is_as_published_ones_are(tmp_path, capsys):
    """Names, dtypes and shapes are those that the tests know by themselves; other commands take it."""
    path = tmp_path / "new" / "checkpoint"
    assert main(["init", str(path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["files"] == sorted(file.name for file in path.iterdir()) == FILES
    assert DSV4Config.from_hf(path) == CFG and report["bytes"] < 12 << 20
    written, known = released.read(path), released.tensors(CFG)
    assert {n: (d, x.shape) for n, (d, x) in written.items()} == {n: (d, x.shape) for n, (d, x) in known.items()}
    command_models.check(path, CFG, "released", drafts=True)
    assert stop_tokens_of(path) == [1] and CFG.vocab_size >= BYTE_TOKENS
    assert main(["plan", "--model", str(path), "--hbm", "1GiB", "--context", "8K", "--weights", "released"]) == 0


def test_only_its_own_files_are_replaced(tmp_path, capsys):
    path = tmp_path / "checkpoint"
    argv = ["init", path, "--weights", "float32"]
    assert main([*map(str, argv)]) == 0
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    capsys.readouterr()
    refused(capsys, [*argv, "--seed", "1"], f"DIR: {path} has a checkpoint in it (--force replaces it)")
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    assert main([*map(str, argv), "--seed", "1", "--force"]) == 0
    changed = [file.name for file in path.iterdir() if file.read_bytes() != before[file.name]]
    assert sorted(before) == FILES and changed == ["model.safetensors"]
    capsys.readouterr()
    (path / "model.safetensors.index.json").touch()
    refused(capsys, [*argv, "--force"], "has model.safetensors.index.json in it, which is no file of this command's")
    refused(capsys, ["init", path / "config.json"], "argument DIR: ", "is not a directory")
    refused(capsys, ["init", ""], "argument DIR: an empty name")
    refused(capsys, [*argv, "--seed", "-1"], "argument --seed: must not be negative")
