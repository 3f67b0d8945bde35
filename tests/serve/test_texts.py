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
from .serving import END, VOCAB, Stand

# Of a third of the conversations, by the official client's field: a ban, and some that come more or less often.
BIASES = {token: (token % 9 - 4) / 2 for token in range(20, 120)} | {130: -100, 131: 3.25}
CFG = DSV4Config.tiny(layer_types=(HCA,), vocab_size=VOCAB)
LAYOUT = CacheLayout(CFG, "f32", "f32", block_tokens=16)
SIZE, MOST, SEED = CacheSize(600, 4, 90, num_snapshots=40), 12, 11
TOOLS = [{"type": "function", "function": {"name": "weather"}}]
WORDS = ("cache", "block", "token", "hit", "\u4e16\u754c", "What", "is", "a")


@pytest.mark.parametrize("count", [3, pytest.param(200, marks=pytest.mark.slow)])
def test_conversations_are_those_of_the_model_alone(tmp_path, count):
    """Of two turns, the second after the answer to the first, a third of them with tools; others are left meanwhile."""
    params = model.init_params(CFG, seed=1)
    engine = Engine.of(params, LAYOUT, SIZE, chunk_tokens=64, weights_id="tiny")
    lock, cached = threading.Lock(), list[int]()

    with Stand(tmp_path, engine=engine) as stand:

        def say(turns: list[Any], number: int, **more: Any) -> Any:
            body = {"model": "tiny", "messages": turns, "max_tokens": MOST, "seed": derived_seed(SEED, number)}
            body |= {"temperature": 0.9, "return_token_ids": True, "ignore_eos": True} | more
            status, said = stand.post("/v1/chat/completions", body)
            assert status == 200, said
            return said

        def converse(number: int) -> dict[int, Any]:
            """All that the answers were asked by, and the answers."""
            chance, found = random.Random(number), dict[int, Any]()
            tools = {"tools": TOOLS} if number % 3 == 2 else {}
            biases = {"logit_bias": {str(token): value for token, value in BIASES.items()}} if number % 3 == 1 else {}
            # A block and more, many of them alike.
            turns: list[Any] = [{"role": "system", "content": f"{WORDS[number % 2]} " * 20}]
            for turn in range(2):
                index = 2 * number + turn
                content = " ".join(chance.choice(WORDS) for _ in range(chance.randrange(1, 20)))
                turns.append({"role": "user", "content": content})
                prompt = stand.post("/tokenize", {"messages": turns} | tools)[1]["tokens"]
                said = say(turns, index, **tools, **biases)
                (choice,) = said["choices"]
                found[index] = prompt, choice["token_ids"], [*turns], tools, choice["message"]["content"]
                turns.append(choice["message"])
                with lock:
                    cached.append(said["usage"]["prompt_cache_hit_tokens"])
            return found

        def disturb(number: int) -> None:
            prompt = Prompt(tokens=[number % VOCAB] * 40, max_new_tokens=50)
            handle = engine.add(prompt)
            say([{"role": "user", "content": "Hi"}], 7, tools=TOOLS)
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
    options = dict(max_new_tokens=MOST, chunk_tokens=64, seed=SEED)
    prompts, cache = [prompt for prompt, *_ in asked], init_cache(LAYOUT, SIZE)
    plain, cache = model.generate(params, cache, manager, prompts, sampling=Sampling(temperature=0.9), **options)
    how = Sampling(temperature=0.9, logit_bias=BIASES)
    biased, _ = model.generate(params, cache, manager, prompts, sampling=how, **options)
    alone = [(biased if index // 2 % 3 == 1 else plain)[index] for index in range(2 * count)]
    assert all(130 not in ids for ids in biased) and biased != plain
    chat = Chat.load(tmp_path)
    for (prompt, ids, turns, tools, text), drawn in zip(asked, alone, strict=True):
        assert ids == drawn
        put = chat.prompt(turns, thinking=False, **tools)
        assert put.ids == prompt
        parser = chat.parser(put)
        parser.feed([token for token in ids if token != END])
        parser.end("length")
        assert text == parser.content
