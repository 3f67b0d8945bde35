"""OpenAI's and Anthropic's own clients against the server: chats, streams, tools, schemas, errors."""

from __future__ import annotations

import json

import pytest

from dsv4_jax.text import BYTE_TOKENS

openai = pytest.importorskip("openai", reason="the clients are installed on Python 3.12 alone")
anthropic = pytest.importorskip("anthropic", reason="the clients are installed on Python 3.12 alone")

ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a cache?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"name": "weather", "description": "Tells the weather.", "parameters": PARAMETERS, "strict": True}
TOOLS = [{"type": "function", "function": TOOL}]
SCHEMA = {
    "type": "object",
    "properties": {"sure": {"type": "boolean"}},
    "required": ["sure"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
THINK = {"thinking": {"type": "enabled"}}
# DeepSeek's package drops bytes at the end of an answer that are no characters, as noise has them: letters only.
LETTERS = {"seed": 3, "logit_bias": {str(BYTE_TOKENS - 256 + ord(char)): 100 for char in "abcdefghij "}}


@pytest.fixture(scope="module")
def client(stand):
    with openai.OpenAI(base_url=f"{stand.url}/v1", api_key="any", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def claude(stand):
    with anthropic.Anthropic(base_url=stand.url, api_key="any", max_retries=0) as made:
        yield made


def chat(client, **more):
    asked = {"model": "tiny", "messages": ASKED, "max_completion_tokens": 40, "seed": 5} | more
    return client.chat.completions.create(**asked)


def test_a_chat_is_what_its_stream_is(client):
    whole = chat(client, n=2, extra_body=THINK)
    texts = [["", ""], ["", ""]]
    ends, used = ["", ""], None
    for chunk in chat(client, n=2, extra_body=THINK, stream=True, stream_options={"include_usage": True}):
        used = chunk.usage or used
        for choice in chunk.choices:
            texts[choice.index][0] += getattr(choice.delta, "reasoning_content", None) or ""
            texts[choice.index][1] += choice.delta.content or ""
            ends[choice.index] = choice.finish_reason or ends[choice.index]
    said = [[getattr(c.message, "reasoning_content", "") or "", c.message.content or ""] for c in whole.choices]
    assert texts == said and any(texts[0]) and texts[0] != texts[1]
    assert ends == [c.finish_reason for c in whole.choices]
    assert whole.usage.completion_tokens == used.completion_tokens
    assert used.completion_tokens_details.reasoning_tokens > 0
    assert used.prompt_tokens_details.cached_tokens > whole.usage.prompt_tokens - 32


def test_tools_that_have_to_be_called(client):
    whole = chat(client, tools=TOOLS, tool_choice="required", max_completion_tokens=400)
    (choice,) = whole.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    parts: dict[int, list[str]] = {}
    for chunk in chat(client, tools=TOOLS, tool_choice="required", max_completion_tokens=400, stream=True):
        for piece in chunk.choices[0].delta.tool_calls or ():
            one = parts.setdefault(piece.index, ["", ""])
            one[0] += piece.function.name or ""
            one[1] += piece.function.arguments or ""
    calls = choice.message.tool_calls
    assert [[call.function.name, call.function.arguments] for call in calls] == [*parts.values()]
    for call in calls:
        arguments = json.loads(call.function.arguments)
        assert call.function.name == "weather" and set(arguments) == {"city", "days"}
        assert arguments["city"] in ("Rome", "Oslo") and arguments["days"] in (1, 2)
    # The result goes back, and what the call computed is found again.
    turns = [*ASKED, choice.message.model_dump(exclude_none=True)]
    turns += [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in calls]
    again = chat(client, messages=turns, tools=TOOLS)
    assert again.usage.prompt_tokens_details.cached_tokens >= (whole.usage.total_tokens - 1) // 16 * 16 - 16


def test_json_of_a_schema(client):
    answer = chat(client, response_format=FORMAT, max_completion_tokens=400)
    assert answer.choices[0].finish_reason == "stop"
    assert set(json.loads(answer.choices[0].message.content)) == {"sure"}


def test_biases(client):
    """Tokens that nobody named come no more once some of them are named, and none of those alike comes first."""
    letters = [BYTE_TOKENS - 256 + ord(char) for char in "xyz"]
    for biases, said in (({letters[0]: 1, letters[1]: 1, letters[2]: 0.5}, set("xy")), ({letters[2]: 0.01}, {"z"})):
        biases = {str(token): value for token, value in biases.items()}
        assert set(chat(client, logit_bias=biases).choices[0].message.content) == said


def test_logprobs(client):
    answer = chat(client, logprobs=True, top_logprobs=0, max_completion_tokens=6)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens and all(one.logprob == -1 for one in content)
    assert all(bytes(one.bytes).decode("utf-8", "replace") == one.token for one in content)


def test_stop_texts_end_the_answer_alone(client):
    text = chat(client, max_completion_tokens=120).choices[0].message.content
    stop = text[len(text) // 2 :][:3]
    answer = chat(client, max_completion_tokens=120, stop=[stop])
    assert answer.choices[0].message.content == text[: text.index(stop)] and answer.choices[0].finish_reason == "stop"


def test_errors_are_openais(client):
    for kind, change in (
        (openai.NotFoundError, {"model": "other"}),
        (openai.BadRequestError, {"messages": []}),
        (openai.BadRequestError, {"messages": [{"role": "stranger", "content": "Hi"}]}),
        (openai.BadRequestError, {"temperature": 5}),
        (openai.BadRequestError, {"tool_choice": "required"}),
        (openai.BadRequestError, {"max_completion_tokens": 10**6}),
        (openai.BadRequestError, {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}}),
        (openai.BadRequestError, {"top_logprobs": 5}),
        (openai.BadRequestError, {"logit_bias": {"5": 101}}),
    ):
        with pytest.raises(kind) as caught:
            chat(client, **change)
        assert caught.value.body["message"] and "type" in caught.value.body
    assert caught.value.param == "logit_bias"
    strict = {"type": "function", "function": TOOL | {"parameters": PARAMETERS | {"allOf": []}}}
    for field, value in (
        ("response_format", {"type": "xml"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "strin"}}}),
        ("response_format", {"type": "regex", "regex": "("}),
        ("response_format", "json_object"),
        ("tools", [*TOOLS, *TOOLS]),
        ("tools", [strict]),
        ("tools", [{"type": "function", "function": {"name": "a b"}}]),
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b.png"}}]}]),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            chat(client, **{field: value})
        assert caught.value.param == field, value
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_responses(client):
    asked = dict(model="tiny", input="What is a cache?", instructions="Be brief.", max_output_tokens=40)
    whole = client.responses.create(**asked, reasoning={"effort": "none"}, extra_body=LETTERS)
    names, text = [], ""
    with client.responses.stream(**asked, reasoning={"effort": "none"}, extra_body=LETTERS) as stream:
        for event in stream:
            names.append(event.type)
            text += event.delta if event.type == "response.output_text.delta" else ""
            last = event
    assert last.response.output_text == whole.output_text == text
    assert names[0] == "response.created" and names[-1] in ("response.incomplete", "response.completed")
    form = {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA}}
    said = client.responses.create(**asked | {"max_output_tokens": 400}, text=form, reasoning={"effort": "none"})
    assert set(json.loads(said.output_text)) == {"sure"}
    flat = [{"type": "function", **TOOL}]
    called = client.responses.create(
        **asked | {"max_output_tokens": 400}, tools=flat, tool_choice="required", reasoning={"effort": "none"}
    )
    assert called.output[0].type == "function_call" and set(json.loads(called.output[0].arguments)) == {"city", "days"}
    with pytest.raises(openai.BadRequestError):
        client.responses.create(**asked, previous_response_id="resp_1")
    for part in ({"type": "input_image", "image_url": "http://a/b.png"}, {"type": "input_file", "file_id": "x"}):
        with pytest.raises(openai.BadRequestError):
            client.responses.create(**asked | {"input": [{"role": "user", "content": [part]}]})


def test_messages_of_a_format(claude):
    """Anthropic's structured outputs, under their name and that of their beta."""
    form = {"type": "json_schema", "schema": SCHEMA}
    asked = dict(model="tiny", max_tokens=400, messages=ASKED[1:])
    for field in ({"output_config": {"format": form}}, {"output_format": form}):
        said = claude.messages.create(**asked, extra_body=field | {"seed": 5})
        assert set(json.loads("".join(part.text for part in said.content))) == {"sure"}
        assert said.stop_reason == "end_turn"
    for wrong in (
        {"type": "json_object"},
        {"type": "json_schema"},
        form | {"schema": {"type": 5}},
        form | {"schema": 5},
    ):
        with pytest.raises(anthropic.BadRequestError):
            claude.messages.create(**asked, extra_body={"output_config": {"format": wrong}})
    free = claude.messages.create(**asked | {"max_tokens": 5}, extra_body={"output_config": {"effort": "low"}})
    assert free.usage.output_tokens <= 5


def test_messages(claude):
    asked = dict(model="tiny", max_tokens=40, system="Be brief.", messages=ASKED[1:])
    asked["extra_body"] = LETTERS
    whole = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert [part.text for part in whole.content] == [text] and last.usage.output_tokens == whole.usage.output_tokens
    assert last.usage.cache_read_input_tokens > 0
    count = claude.messages.count_tokens(model="tiny", system="Be brief.", messages=ASKED[1:])
    assert count.input_tokens == last.usage.input_tokens + last.usage.cache_read_input_tokens
    tool = {"name": "weather", "description": "Tells the weather.", "input_schema": PARAMETERS, "strict": True}
    called = claude.messages.create(
        **asked | {"max_tokens": 400, "extra_body": {}}, tools=[tool], tool_choice={"type": "any"}
    )
    assert called.stop_reason == "tool_use" and set(called.content[0].input) == {"city", "days"}
    stop = text[len(text) // 2 :][:2]
    cut = claude.messages.create(**asked, stop_sequences=[stop])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    used = {"type": "tool_use", "id": "x", "name": "f", "input": {"type": "image"}}
    turns = [*ASKED[1:], {"role": "assistant", "content": [used]}]
    result = {"type": "tool_result", "tool_use_id": "x", "content": "a"}
    assert claude.messages.create(**asked | {"messages": [*turns, {"role": "user", "content": [result]}]}).content
    for kind, change in (
        (anthropic.NotFoundError, {"model": "other"}),
        (anthropic.BadRequestError, {"messages": []}),
        (anthropic.BadRequestError, {"messages": [{"role": "user", "content": [picture]}]}),
        (
            anthropic.BadRequestError,
            {"messages": [*turns, {"role": "user", "content": [result | {"content": [picture]}]}]},
        ),
    ):
        with pytest.raises(kind) as caught:
            claude.messages.create(**asked | change)
        assert caught.value.body["type"] == "error"
