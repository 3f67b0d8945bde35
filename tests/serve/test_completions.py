"""`/v1/completions` and what all routes share: fields, streams, limits, keys, admin."""

from __future__ import annotations

import json

import pytest

from dsv4_jax.engine.prompt import derived_seed
from dsv4_jax.serve.config import Config
from dsv4_jax.serve.problems import ApiError
from dsv4_jax.serve.requests import Body, common
from dsv4_jax.text import BYTE_TOKENS, Tokenizer, save_byte_tokenizer

from .serving import Stand

PROMPT = list(range(100, 140))


def ids_of(stand: Stand, **more) -> list[list[int]]:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "seed": 7, "return_token_ids": True} | more
    status, said = stand.post("/v1/completions", body)
    assert status == 200, said
    return [choice["token_ids"] for choice in said["choices"]]


def test_ids_are_those_of_the_engine(stand):
    assert ids_of(stand) == [stand.expected(PROMPT, 24, 7)]
    assert ids_of(stand, n=3) == [stand.expected(PROMPT, 24, derived_seed(7, i) if i else 7) for i in range(3)]
    two = ids_of(stand, prompt=[PROMPT, PROMPT[:5]])
    assert two == [stand.expected(PROMPT, 24, 7), stand.expected(PROMPT[:5], 24, 7)]
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "seed": 7, "return_token_ids": True, "n": 2}
    streamed: list[list[int]] = [[], []]
    for chunk in stand.stream("/v1/completions", body):
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice["token_ids"]
    assert streamed == ids_of(stand, n=2)


def test_usage_and_cached_tokens(stand):
    body = {"model": "tiny", "prompt": [*range(30, 130)], "max_tokens": 4, "seed": 1, "ignore_eos": True}
    for cached in (0, 96):
        status, said = stand.post("/v1/completions", body | {"cache_salt": "usage"})
        assert status == 200 and said["choices"][0]["finish_reason"] == "length"
        assert said["usage"]["prompt_tokens_details"] == {"cached_tokens": cached}
        assert (said["usage"]["prompt_tokens"], said["usage"]["completion_tokens"]) == (100, 4)
    chat = {"messages": [{"role": "user", "content": "Hi"}]} | {key: body[key] for key in body if key != "prompt"}
    for path, asked in (("/v1/completions", body), ("/v1/chat/completions", chat)):
        *chunks, last = stand.stream(path, asked | {"stream_options": {"include_usage": True}})
        assert last["choices"] == [] and last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + 4
        assert chunks and all(chunk["usage"] is None for chunk in chunks), "null until then, as OpenAI has it"
        assert all("usage" not in chunk for chunk in stand.stream(path, asked))
    for other in ({"cache_salt": "another"}, {"user": "somebody"}):  # others' prefixes are not found
        assert stand.post("/v1/completions", body | other)[1]["usage"]["prompt_cache_hit_tokens"] == 0


def test_texts_are_read_as_generate_reads_them(tmp_path):
    """With the token that a checkpoint puts before each text."""
    frontend = pytest.importorskip("dsv4_jax.serve.frontend").frontend
    save_byte_tokenizer(tmp_path)
    told = {"bos_token": "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(told))
    texts = frontend(Config(socket="", checkpoint=str(tmp_path), models=["m"])).texts
    assert texts.encode("a") == Tokenizer(tmp_path).encode("a") == [0, BYTE_TOKENS - 256 + ord("a")]


def test_text_ends_where_a_text_ends_it(stand):
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 200, "seed": 3, "ignore_eos": True}
    text = stand.post("/v1/completions", body)[1]["choices"][0]["text"]
    stop = next(text[i : i + 2] for i in range(40, len(text)) if text[i : i + 2].isascii())
    status, said = stand.post("/v1/completions", body | {"stop": ["never there", stop]})
    assert status == 200 and said["choices"][0]["finish_reason"] == "stop"
    assert said["choices"][0]["text"] == text[: text.index(stop)]
    streamed = "".join(c["choices"][0]["text"] for c in stand.stream("/v1/completions", body | {"stop": stop}))
    assert streamed == text[: text.index(stop)]
    stand.idle()  # the engine was told


def test_ends_that_are_ignored_are_no_text(stand):
    ids = stand.tell(901, "one", END_TOKEN, " two")
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "seed": 901, "max_tokens": len(ids)}
    said = stand.post("/v1/chat/completions", asked | {"ignore_eos": True, "return_token_ids": True})[1]
    (choice,) = said["choices"]
    assert choice["message"]["content"] == "one two" and choice["finish_reason"] == "length"
    assert choice["token_ids"] == ids and said["usage"]["completion_tokens"] == len(ids)


def test_biases_and_least_tokens(stand):
    """The shadow's logits are all alike: it samples tokens of the largest bias."""
    only = ids_of(stand, logit_bias={"50": 2.5, "60": 2.5, "70": 2, "80": -7})[0]
    assert len(only) == 24 and set(only) == {50, 60}
    drawn = set(ids_of(stand, ignore_eos=True)[0])
    banned = {str(token): -0.5 for token in drawn}
    assert not drawn & set(ids_of(stand, logit_bias=banned, ignore_eos=True)[0])
    nothing = dict.fromkeys(map(str, range(272)), 0)
    assert ids_of(stand, logit_bias=nothing, ignore_eos=True) == ids_of(stand, ignore_eos=True)
    stops = [token for token in range(2, 272) if token % 2]
    (some,) = ids_of(stand, stop_token_ids=stops, min_tokens=20)
    assert len(some) >= 20 and not set(some[:20]) & {END_TOKEN, *stops}


END_TOKEN = 1


def test_logprobs(stand):
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 5, "seed": 7, "logprobs": 0, "ignore_eos": True}
    said = stand.post("/v1/completions", body)[1]["choices"][0]["logprobs"]
    assert said["token_logprobs"] == [-1.0] * 5 and len(said["tokens"]) == 5 and said["text_offset"][0] == 0


@pytest.mark.parametrize(
    ("change", "param", "status"),
    [
        ({"temperature": 3}, "temperature", 400),
        ({"temperature": "hot"}, "temperature", 400),
        ({"top_p": 0}, "top_p", 400),
        ({"n": 0}, "n", 400),
        ({"n": True}, "n", 400),
        ({"max_tokens": 0}, "max_tokens", 400),
        ({"max_tokens": 10**30}, "max_tokens", 400),
        ({"max_tokens": 100_000}, "prompt", 400),
        ({"prompt": [1] * 5000}, "prompt", 400),
        ({"prompt": [1, 272]}, "prompt", 400),
        ({"prompt": [1, "a"]}, "prompt", 400),
        ({"prompt": []}, "prompt", 400),
        ({"prompt": ""}, "prompt", 400),
        ({"prompt": None}, "prompt", 400),
        ({"stop": [""]}, "stop", 400),
        ({"stop": ["a"] * 17}, "stop", 400),
        ({"stop": 5}, "stop", 400),
        ({"logprobs": 21}, "logprobs", 400),
        ({"logit_bias": {"5": 100.5}}, "logit_bias", 400),
        ({"logit_bias": {"5": -101}}, "logit_bias", 400),
        ({"logit_bias": {"5": True}}, "logit_bias", 400),
        ({"logit_bias": {"5": "3"}}, "logit_bias", 400),
        ({"logit_bias": {"5": None}}, "logit_bias", 400),
        ({"logit_bias": {"5": float("nan")}}, None, 400),
        ({"logit_bias": {"x": 100}}, "logit_bias", 400),
        ({"logit_bias": {"-1": 1}}, "logit_bias", 400),
        ({"logit_bias": {"272": 1}}, "logit_bias", 400),
        ({"logit_bias": {"5": 1, "05": 1}}, "logit_bias", 400),
        ({"logit_bias": [1]}, "logit_bias", 400),
        ({"suffix": "end"}, "suffix", 400),
        ({"guided_json": {"type": "object"}}, "guided_json", 400),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs", 400),
        ({"regex": "a"}, "regex", 400),
        ({"ebnf": 'root ::= "a"'}, "ebnf", 400),
        ({"response_format": {"type": "xml"}}, "response_format", 400),
        ({"response_format": "json_object"}, "response_format", 400),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}}, "response_format", 400),
        ({"best_of": 3}, "best_of", 400),
        ({"stream_options": {"include_usage": True}}, "stream_options", 400),
        ({"stream": "yes"}, "stream", 400),
        ({"seed": 2**64}, "seed", 400),
        ({"model": "another"}, "model", 404),
        ({"model": None}, "model", 400),
        ({"echo": True, "logprobs": 1}, "echo", 400),
        ({"priority": 1.5}, "priority", 400),
    ],
)
def test_bad_fields_are_named(stand, change, param, status):
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 5} | change
    found, said = stand.post("/v1/completions", body)
    assert (found, said["error"]["param"]) == (status, param), said
    assert said["error"]["type"] in ("invalid_request_error", "not_found_error") and said["error"]["message"]


def test_biases_of_too_many_tokens_are_refused():
    biases = Body({"logit_bias": dict.fromkeys(map(str, range(1025)), 1)})
    with pytest.raises(ApiError, match="at most 1024 tokens"):
        common(biases, vocab_size=1025, end_tokens=[END_TOKEN], top=0)


def test_formats(stand):
    """A completion is held to its format as a chat is, and ends with it."""
    schema = {"type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"]}
    form = {"type": "json_schema", "json_schema": {"schema": schema | {"additionalProperties": False}}}
    body = {"model": "tiny", "prompt": [PROMPT, PROMPT[:9]], "max_tokens": 400, "n": 2, "response_format": form}
    for seed in range(3):
        status, said = stand.post("/v1/completions", body | {"seed": seed, "ignore_eos": True})
        assert status == 200 and len(said["choices"]) == 4
        for choice in said["choices"]:
            assert set(json.loads(choice["text"])) == {"sure"} and choice["finish_reason"] == "stop"
    body["response_format"] = {"type": "text"}
    assert stand.post("/v1/completions", body | {"max_tokens": 3})[0] == 200


def test_null_and_unknown_fields_are_nothing(stand):
    nothing = dict.fromkeys(("temperature", "top_p", "n", "stop", "seed", "logit_bias", "user", "suffix"))
    status, said = stand.post("/v1/completions", {"model": "tiny", "prompt": "Hi", "unknown": [1], **nothing})
    assert status == 200 and said["object"] == "text_completion"


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"5", b'{"model": "\xff"}', b"[" * 100_000, b'{"a":' * 5000, b'{"model": NaN}', b"\x00" * 100],
)
def test_bodies_that_are_no_objects(stand, data):
    status, said = stand.post("/v1/completions", data)
    assert status == 400 and said["error"]["code"] == "invalid_json"


def test_routes_that_are_not_there(stand):
    for method, path, wanted in (
        ("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405), ("PUT", "/", 405), ("NONSENSE", "/health", 400),
    ):  # fmt: skip
        status, _, data = stand.ask(method, path)
        assert status == wanted and json.loads(data)["error"]["message"]


def test_tokenize_and_back(stand):
    status, said = stand.post("/tokenize", {"prompt": "Grüße, 世界", "return_token_strs": True})
    assert status == 200 and said["count"] == len("Grüße, 世界".encode()) == len(said["token_strs"])
    assert stand.post("/detokenize", {"tokens": said["tokens"]})[1] == {"prompt": "Grüße, 世界"}
    assert stand.post("/detokenize", {"tokens": [-1]})[0] == 400
    status, said = stand.post("/tokenize", {"messages": [{"role": "user", "content": "Hi"}]})
    assert status == 200 and said["tokens"][0] == 0


def test_models_health_version_and_metrics(stand):
    models = json.loads(stand.get("/v1/models")[1])
    assert [model["id"] for model in models["data"]] == ["tiny"] and models["data"][0]["max_model_len"] == stand.context
    assert json.loads(stand.get("/v1/models/tiny")[1])["id"] == "tiny" and stand.get("/v1/models/other")[0] == 404
    assert json.loads(stand.get("/health")[1])["status"] == "ok" and b"version" in stand.get("/version")[1]
    text = stand.get("/metrics")[1].decode()
    assert 'dsv4_http_requests_total{route="/health",status="200"}' in text and 'model_name="tiny"' in text
    assert "\nvllm:num_requests_running{" in text


def test_orders(stand):
    assert stand.post("/pause", {})[0] == 200
    status, said = stand.get("/ready")
    assert status == 503 and b"paused" in said
    assert stand.post("/resume", {})[0] == 200 and stand.get("/ready")[0] == 200
    body = {"model": "tiny", "prompt": [*range(40, 140)], "max_tokens": 2, "seed": 1}
    hits = [stand.post("/v1/completions", body)[1]["usage"]["prompt_cache_hit_tokens"] for _ in range(2)]
    assert stand.post("/reset_prefix_cache", {})[0] == 200
    assert hits[1] == 96 and stand.post("/v1/completions", body)[1]["usage"]["prompt_cache_hit_tokens"] == 0
    assert stand.post("/update_weights", {"checkpoint": "x", "weights_id": "y"})[0] == 400  # nobody loads any here
    assert stand.post("/sleep", {})[0] == 503  # nor does a shadow sleep
