"""`dsv4-jax serve` as a process: two devices, two frontends, a store, other weights while it serves."""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from typing import Any

import pytest

from dsv4_jax import AttentionType, CacheLayout, CacheSize, DSV4Config, init_cache, model
from dsv4_jax.manager import KVCacheManager
from dsv4_jax.text import save_byte_tokenizer

from .serving import VOCAB, wait_for

ROOT = pathlib.Path(__file__).parents[2]
CFG = DSV4Config.tiny(layer_types=(AttentionType.CSA,), hc_sinkhorn_iters=1, vocab_size=VOCAB)
PROMPT, MOST = [*range(30, 200)], 6


class Command:
    """The command with these options, once it serves; leaving it tells it to end, and waits for that."""

    def __init__(self, *options: str):
        command = [sys.executable, "-m", "dsv4_jax", "serve", "--port", "0", *options]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ})
        assert self._process.stderr is not None
        self.said = list[str]()
        for line in self._process.stderr:
            self.said.append(line)
            if found := re.match(r"(http://\S+)/ serves ", line):
                self.url = found[1]
                return
        raise AssertionError("".join(self.said))

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGINT)
        _, rest = self._process.communicate(timeout=300)
        assert self._process.returncode == 0, "".join(self.said) + rest

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Status, and the JSON of the answer."""
        request = urllib.request.Request(f"{self.url}{path}", json.dumps(body).encode())
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def answer(self) -> tuple[list[int], int]:
        """What it answers to the prompt, and how much of that was found."""
        body = {"model": "one", "prompt": PROMPT, "max_tokens": MOST, "temperature": 0, "return_token_ids": True}

        def asked() -> Any:  # a frontend may have to find the engine yet
            status, said = self.post("/v1/completions", body | {"ignore_eos": True})
            assert status in (200, 503), said
            return said if status == 200 else None

        said = wait_for(asked)
        return said["choices"][0]["token_ids"], said["usage"]["prompt_cache_hit_tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [1, 2])
def test_two_devices_two_frontends_a_store_and_other_weights(tmp_path, tensor):
    layout, size, alone = CacheLayout(CFG, "f32", "f32", block_tokens=16), CacheSize(40, 2, 20), list[list[int]]()
    for seed, name in enumerate(("one", "two"), 1):
        params = model.init_params(CFG, seed)
        model.save_hf(CFG, params, tmp_path / name)
        save_byte_tokenizer(tmp_path / name)
        cache, manager = init_cache(layout, size), KVCacheManager(layout, size)
        alone += model.generate(params, cache, manager, [PROMPT], max_new_tokens=MOST, chunk_tokens=64)[0]
    options = ["--checkpoint", str(tmp_path / "one"), "--devices", "2", "--tensor", str(tensor), "--frontends", "2"]
    options += ["--host-memory", "8MiB", "--store", str(tmp_path / "kept"), "--cache-memory", "8MiB", "--admin"]
    options += ["--max-context", "512", "--max-requests", "4", "--chunk", "64", "--block-tokens", "16"]
    options += ["--kv-format", "f32", "--index-format", "f32", "--weights", "float32"]
    with Command(*options) as here:
        assert here.answer() == (alone[0], 0) and here.answer() == (alone[0], 160)
        assert here.post("/sleep", {})[0] == here.post("/wake_up", {})[0] == 200
        assert here.answer() == (alone[0], 160)
    with Command(*options) as here:
        assert here.answer() == (alone[0], 160), "what the first one computed lies in the store"
        for where, name in (("nowhere", "two"), (str(tmp_path / "two"), "")):
            assert here.post("/update_weights", {"checkpoint": where, "weights_id": name})[0] == 400
        update = {"checkpoint": str(tmp_path / "two"), "weights_id": "two"}
        assert here.post("/update_weights", update)[0] == 200
        assert here.answer() == (alone[1], 0) and here.answer() == (alone[1], 160)
