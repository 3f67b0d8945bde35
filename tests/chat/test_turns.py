"""What one turn drew is what the next turn's prompt says of it, id for id: else the cache has it for nothing."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_jax.chat import Chat, ChatPrompt
from dsv4_jax.chat.encoding import DSML, END, THINK

from .golden import user, v4

NAMES = st.text(st.sampled_from("abz_-09"), min_size=1, max_size=8)
KEYS = st.text(st.sampled_from("abcé日_ .-/\\'{"), min_size=1, max_size=6)
TEXTS = st.text(
    st.sampled_from('ab \n</>"\\é日😀{}\t,:\uff5cDSML') | st.characters(exclude_categories=["Cs"]), max_size=12
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
SPELLINGS = {
    "canonical": {},
    "compact": {"separators": (",", ":")},
    "ascii": {"ensure_ascii": True},
    "pretty": {"indent": 1},
}


def spelt(value: Any, spelling: str) -> str:
    return json.dumps(value, **{"ensure_ascii": False} | SPELLINGS[spelling])


def drawn(chat: Chat, prompt: ChatPrompt, parts: list[tuple[str, bool]]) -> list[int]:
    """Ids of an output: texts, and which of them are marks."""
    text, marks = "", []
    for part, is_mark in parts:
        if is_mark:
            marks.append((len(text), len(text) + len(part)))
        text += part
    return chat.tokenizer.encode_marked(text, marks)


def written(reasoning: str | None, content: str, calls: list[Any], spelling: str, opened: bool, space: str):
    """An output, part by part."""
    parts = [] if reasoning is None else [(reasoning, False), (THINK[1], True)]
    tag: Any = lambda text, slash="": [(f"<{slash}", False), (DSML, True), (f"{space}{text}>", False)]  # noqa: E731
    block = "calls" if space else "tool_calls"
    if not opened:
        parts.append((content, False))
    if calls:
        if not opened:
            parts += [("\n\n", False), *tag(block), ("\n", False)]
        for i, (name, arguments) in enumerate(calls):
            parts += [("\n" * bool(i), False), *tag(f'invoke name="{name}"'), ("\n", False)]
            for key, value in arguments.items():
                kind = "true" if isinstance(value, str) else "false"
                parts += tag(f'parameter name="{key}" string="{kind}"')
                parts += [(value if isinstance(value, str) else spelt(value, spelling), False)]
                parts += [*tag("parameter", "/"), ("\n", False)]
            parts += tag("invoke", "/")
        parts += [("\n", False), *tag(block, "/")]
    return [*parts, (END, True)]


@settings(max_examples=150)
@given(
    thinking=st.booleans(),
    declared=st.booleans(),
    required=st.booleans(),
    reasoning=TEXTS.filter(lambda text: not text.startswith("\n")),
    content=TEXTS.map(lambda text: text.strip("\n")),
    calls=st.lists(st.tuples(NAMES, st.dictionaries(KEYS, VALUES, max_size=3)), max_size=3),
    spelling=st.sampled_from([*SPELLINGS]),
    effort=st.sampled_from(["low", "high"]),
)
def test_the_next_prompt_goes_on_from_what_was_drawn(
    thinking, declared, required, reasoning, content, calls, spelling, effort
):
    whole = v4()
    chat = Chat(whole.tokenizer)
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
        for name in {name for name, _ in calls} | {"other"}
    ]
    calls = calls if declared else []
    asked: dict[str, Any] = dict(thinking=thinking, reasoning_effort=effort)
    if declared:
        asked |= dict(tools=tools, tool_choice="required" if required and calls else "auto")
    history = [user("a question")]
    prompt = chat.prompt(history, **asked)
    opened = prompt.start == "calls"
    assert opened == (required and bool(calls) and not thinking)
    if opened:
        content = ""
    if not (content or calls or thinking):
        content = "x"
    output = drawn(chat, prompt, written(reasoning if thinking else None, content, calls, spelling, opened, ""))
    parser = chat.parser(prompt)
    parser.feed(output)
    parser.end("stop")
    assert parser.content == content
    assert [(call.name, json.loads(call.arguments)) for call in parser.calls] == calls
    assert parser.finish_reason == ("tool_calls" if calls else "stop")
    chat.remember(parser.calls)
    message = json.loads(json.dumps(parser.message()))
    results = [{"role": "tool", "tool_call_id": call.id, "content": "found"} for call in parser.calls]
    after = chat.prompt(
        [*history, message, *results, *([] if results else [user("more")])], **asked | {"tool_choice": None}
    )
    assert prompt.reuse == ("output" if declared or not thinking else "prompt")
    if prompt.reuse == "output":
        assert after.ids[: len(prompt.ids) + len(output)] == prompt.ids + output
    else:
        assert after.ids[: len(prompt.ids) - 1] == prompt.ids[:-1] and after.ids[len(prompt.ids) - 1] != prompt.ids[-1]
    assert len(parser.message().get("tool_calls", ())) == len(calls)
