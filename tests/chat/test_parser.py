"""Answers to messages, however their ids are cut."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from dsv4_jax.chat import Parser

from .golden import TOOL, cases, v4


def read(parser: Parser, ids: list[int], finish: str, cuts: random.Random | None) -> dict[str, Any]:
    """What the pieces add up to, which is what the parser says of the whole."""
    reasoning = content = ""
    calls: list[dict[str, str]] = []
    place = 0
    while place <= len(ids):
        size = cuts.choice((1, 1, 2, 7, 50)) if cuts else 1
        delta = parser.feed(ids[place : place + size]) if place < len(ids) else parser.end(finish)
        reasoning, content, place = reasoning + delta.reasoning, content + delta.content, place + size
        place = min(place, len(ids)) if place - size < len(ids) else len(ids) + 1
        for piece in delta.calls:
            if piece.index == len(calls):
                assert piece.id and piece.name is not None
                calls.append({"name": piece.name, "arguments": ""})
            else:
                assert piece.id is piece.name is None
            calls[piece.index]["arguments"] += piece.arguments
    message = parser.message()
    assert message["content"] == content == parser.content
    assert message.get("reasoning_content", "") == reasoning == parser.reasoning
    assert [call["function"] for call in message.get("tool_calls", ())] == calls
    return {"reasoning_content": reasoning, "content": content, "tool_calls": calls} | {
        "finish_reason": parser.finish_reason
    }


@pytest.mark.every_case
@pytest.mark.parametrize("case", cases("chat_parsing"))
def test_answers_are_read_as_the_vendor_reads_them(case):
    tools = [TOOL] if case["parse_tool_calls"] else None
    ids = [token for chunk in case["chunks"] for token in chunk]
    rng = random.Random(case["id"])
    for trial in range(12):
        parser = Parser(model=case["model"], thinking=case["thinking"], tools=tools, tokenizer=v4().tokenizer)
        found = read(parser, ids, case["finish"], rng if trial else None)
        for call in (*found["tool_calls"], *(case["expected"]["tool_calls"] if not trial else ())):
            call["arguments"] = json.loads(call["arguments"])
        assert found == case["expected"]
        if case.get("reasoning_tokens") is not None:
            assert parser.reasoning_tokens == case["reasoning_tokens"]
