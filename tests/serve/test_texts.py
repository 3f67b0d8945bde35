"""What the server answers with a model is what `model.generate` gives alone, whatever runs beside it."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dsv4_jax import CacheLayout, CacheSize, DSV4Config, init_cache, model
from dsv4_jax.chat import Chat
from dsv4_jax.engine import Engine, Prompt
from dsv4_jax.engine.prompt import derived_seed
from dsv4_jax.manager import KVCacheManager
from dsv4_jax.model import Sampling

from ..model.feeding import HCA
from .serving import VOCAB, Stand

CFG = DSV4Config.tiny(layer_types=(HCA,), vocab_size=VOCAB)
LAYOUT = CacheLayout(CFG, "f32", "f32", block_tokens=16)
SIZE, MOST, SEED = CacheSize(600, 4, 90, num_snapshots=40), 12, 11
WORDS = ("cache", "block", "token", "hit", "\u4e16\u754c", "What", "is", "a")


@pytest.mark.parametrize("count", [3, pytest.param(100, marks=pytest.mark.slow)])
def test_conversations_are_those_of_the_model_alone(tmp_path, count):
    """Of two turns, the second after the answer to the first; others are left, or have tools, meanwhile."""
    params = model.init_params(CFG, seed=1)
    engine = Engine.of(params, LAYOUT, SIZE, chunk_tokens=64, weights_id="tiny")
    asked: list[tuple[list[int], list[int], str]] = []
    lock, cached = threading.Lock(), list[int]()

    with Stand(tmp_path, engine=engine) as stand:

        def say(turns: list[Any], number: int, **more: Any) -> Any:
            body = {"model": "tiny", "messages": turns, "max_tokens": MOST, "seed": derived_seed(SEED, number)}
            body |= {"temperature": 0.9, "return_token_ids": True, "ignore_eos": True} | more
            status, said = stand.post("/v1/chat/completions", body)
            assert status == 200, said
            return said

        def converse(number: int) -> dict[int, Any]:
            chance, found, turns = random.Random(number % 3), dict[int, Any](), list[Any]()
            for turn in range(2):
                index = 2 * number + turn
                content = " ".join(chance.choice(WORDS) for _ in range(chance.randrange(1, 20)))
                turns.append({"role": "user", "content": content})
                prompt = stand.post("/tokenize", {"messages": turns})[1]["tokens"]
                said = say(turns, index)
                (choice,) = said["choices"]
                turns.append(choice["message"])
                found[index] = prompt, choice["token_ids"], choice["message"]["content"]
                with lock:
                    cached.append(said["usage"]["prompt_cache_hit_tokens"])
            return found

        def disturb(number: int) -> None:
            prompt = Prompt(tokens=[number % VOCAB] * 40, max_new_tokens=50)
            handle = engine.add(prompt)
            say([{"role": "user", "content": "Hi"}], 7, tools=[{"type": "function", "function": {"name": "weather"}}])
            handle.abort()

        with ThreadPoolExecutor(6) as pool:
            beside = [pool.submit(disturb, number) for number in range(count // 2)]
            answers = [pool.submit(converse, number) for number in range(count)]
            found: dict[int, Any] = {}
            for one in answers:
                found |= one.result()
            for one in beside:
                one.result()
        stand.idle()
    asked = [found[number] for number in range(2 * count)]
    assert sum(each > 0 for each in cached) >= count, "second turns go on from first ones"
    manager = KVCacheManager(LAYOUT, SIZE)
    options = dict(max_new_tokens=MOST, chunk_tokens=64, sampling=Sampling(temperature=0.9), seed=SEED)
    alone, _ = model.generate(params, init_cache(LAYOUT, SIZE), manager, [prompt for prompt, *_ in asked], **options)
    chat = Chat.load(tmp_path)
    for (_, ids, text), drawn in zip(asked, alone, strict=True):
        assert ids == drawn
        parser = chat.parser(chat.prompt([{"role": "user", "content": ""}], thinking=False))
        parser.feed(ids)
        parser.end("length")
        assert text == parser.content
