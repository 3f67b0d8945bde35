"""Masks: whatever is drawn under one is what was asked for, and what cannot be held is refused at once."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from dsv4_jax.chat import Chat, ChatPrompt, Constraint, Grammars, constraint
from dsv4_jax.errors import RequestError

from .golden import TOOL, of_bytes, user

VOCAB = 300
OPEN = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}, "n": {"type": "integer"}}}
PICK = {"type": "object", "properties": {"e": {"type": "string", "enum": ["x y", "</b>"]}}, "required": ["e"]}


def tool(name: str, schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def drawn(chat: Chat, masks: Grammars, asked: Constraint, prompt: ChatPrompt, rng: np.random.Generator):
    """An answer of random tokens, those that end something more often than others."""
    mask, ids, row = masks.mask(asked), list[int](), np.zeros(-(-VOCAB // 32), np.uint32)
    favoured = {chat.tokenizer.encode(char)[0] for char in '"}]<>/0'} | set(range(1, 14))
    while len(ids) < 2000 and ids[-1:] != [1]:
        mask(ids, row)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[:VOCAB])
        weights = np.where(np.isin(allowed, [*favoured]), 40.0, 1.0)
        ids.append(int(rng.choice(allowed, p=weights / weights.sum())))
    parser = chat.parser(prompt)
    parser.feed(ids)
    parser.end("stop" if ids[-1] == 1 else "length")
    return parser


def test_a_required_call_is_a_call_and_json_is_json(tmp_path):
    pytest.importorskip("llguidance")
    chat = of_bytes(tmp_path)
    masks, rng = Grammars(chat.tokenizer, VOCAB), np.random.default_rng(0)
    tools = [tool("f", OPEN), tool("g", PICK)]
    for thinking in (False, True):
        for choice in ("required", {"type": "function", "function": {"name": "g"}}):
            prompt = chat.prompt([user("a")], tools, thinking=thinking, tool_choice=choice)
            asked = constraint(prompt, chat.tokenizer, tool_choice=choice, parallel_tool_calls=False)
            assert asked is not None and Constraint(*json.loads(json.dumps(asked))) == asked, "plain data"
            for _ in range(4):
                parser = drawn(chat, masks, asked, prompt, rng)
                if parser.finish_reason == "length":
                    continue
                (call,) = parser.calls
                values = json.loads(call.arguments)
                assert parser.content == "" and parser.finish_reason == "tool_calls"
                assert call.name == "g" or choice == "required"
                assert values["e"] in ("x y", "</b>") if call.name == "g" else len(values.get("a", "")) <= 9
    schema = {
        "type": "object",
        "properties": {"k": {"type": "boolean"}},
        "required": ["k"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    prompt = chat.prompt([user("json")], thinking=False, response_format=form)
    asked = constraint(prompt, chat.tokenizer, response_format=form)
    assert asked is not None
    for _ in range(5):
        assert json.loads(drawn(chat, masks, asked, prompt, rng).content)["k"] in (True, False)
    assert constraint(chat.prompt([user("a")], [TOOL]), chat.tokenizer) is None
    prompt = chat.prompt([user("json")], tools, thinking=False, response_format=form)
    asked = constraint(prompt, chat.tokenizer, response_format=form)
    assert asked is not None
    found = {"calls": 0, "content": 0}
    for _ in range(12):
        parser = drawn(chat, masks, asked, prompt, rng)
        if parser.finish_reason == "length":
            continue
        found["calls" if parser.calls else "content"] += 1
        assert parser.content == "" if parser.calls else json.loads(parser.content)["k"] in (True, False)
    assert all(found.values()), "with tools an answer is JSON, or calls"


def test_what_cannot_be_held_is_refused(tmp_path):
    pytest.importorskip("llguidance")
    chat = of_bytes(tmp_path)
    prompt = chat.prompt([user("json")], thinking=False)
    deep: Any = {"type": "string"}
    for _ in range(500):
        deep = {"type": "object", "properties": {"a": deep}}
    for schema in (
        deep, {"type": "strin"}, {"not": {}}, {"type": "integer", "multipleOf": 1000003}, {"$ref": "http://a/b"},
        {"enum": ["x" * 1000 + str(i) for i in range(5000)]}, {"type": "string", "pattern": "("},
        {"allOf": [{"anyOf": [{"properties": {f"a{i}{j}": {}}} for j in range(4)]} for i in range(12)]},
    ):  # fmt: skip
        form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        with pytest.raises(RequestError):
            constraint(prompt, chat.tokenizer, response_format=form)
    for form in ({"type": "regex", "regex": "("}, {"type": "regex"}, {"type": "xml"}, {"type": "json_schema"}):
        with pytest.raises(RequestError):
            constraint(prompt, chat.tokenizer, response_format=form)
