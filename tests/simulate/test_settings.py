"""Settings of traces that are none are refused: a seed that is no integer made another trace every time."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from dsv4_jax.errors import TraceError
from dsv4_jax.simulate import read_trace
from dsv4_jax.simulate.synthesis import ChatTrace, make_trace

LINE = json.dumps({"timestamp": 5, "input_length": 10, "output_length": 2, "hash_ids": [1]})


@pytest.mark.parametrize("value", [None, "1", 1.5, math.nan, True, [1]], ids=str)
@pytest.mark.parametrize("name", ["seed", "chats", "systems", "answer"])
def test_counts_and_the_seed_are_integers(name: str, value: Any) -> None:
    with pytest.raises(TraceError, match=rf"field '{name}': must be of type int"):
        ChatTrace(**{name: value})


@pytest.mark.parametrize("value", [None, "1", math.nan, True, 0, [1]], ids=str)
def test_rates_and_pauses_are_numbers(value: Any) -> None:
    for name in ("rate", "pause"):
        with pytest.raises(TraceError, match=f"field '{name}'"):
            ChatTrace(**{name: value})
    settings = ChatTrace(chats=2, rate=1, pause=3)  # an integer is one
    assert make_trace(settings) == make_trace(ChatTrace(chats=2, rate=1.0, pause=3.0))


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, "1", True, [1]], ids=str)
def test_how_a_trace_is_read(value: Any) -> None:
    for name in ("trace_block_tokens", "timestamp_unit", "limit"):
        with pytest.raises(TraceError, match=f"^{name} must be"):
            read_trace([LINE], **{name: value})
    assert [request.arrival for request in read_trace([LINE], timestamp_unit=2, limit=1)] == [10]
