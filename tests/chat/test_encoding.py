"""Conversations to ids, as DeepSeek's own package writes them."""

from __future__ import annotations

from typing import Any

import pytest

from dsv4_jax import chat
from dsv4_jax.chat import Chat

from .golden import cases, v4


class Letters:
    """In the place of a tokenizer: a character is an id, and a mark is its text."""

    def encode_marked(self, text: str, marks: Any) -> Any:
        return text, marks


def options(case: dict[str, Any]) -> dict[str, Any]:
    fields = ("tools", "tool_choice", "thinking", "reasoning_effort", "response_format")
    return {"model": case["model"]} | {name: case[name] for name in fields if name in case}


@pytest.mark.every_case
@pytest.mark.parametrize("case", cases("chat_encoding"))
def test_conversations_are_written_as_the_vendor_writes_them(case):
    pytest.importorskip("deepseek_recipe")
    text, marks = Chat(Letters()).encode(case["messages"], **options(case))
    assert text == case["text"]
    if case["special_ranges"]:
        assert [list(mark) for mark in marks] == case["special_ranges"]
    if case["ids"]:
        v4()
        assert chat.encode(case["messages"], **options(case)) == case["ids"]
