"""Answers to messages, however their ids are cut."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_jax.chat import Parser
from dsv4_jax.errors import RequestError

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


P = '<\uff5cDSML\uff5cparameter name="{}" string="{}">{}</\uff5cDSML\uff5cparameter>\n'.format
D = "\uff5cDSML\uff5c"
F = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"input": {}}}}}


def ids_of(text: str) -> list[int]:
    """Ids of an output, marks and all."""
    return v4().tokenizer.encode(text)


def invoke(name: str, *inside: str) -> str:
    return f'<{D}invoke name="{name}">\n{"".join(inside)}</{D}invoke>\n'


def block(*calls: str, name: str = "tool_calls") -> str:
    return f"<{D}{name}>\n{''.join(calls)}</{D}{name}>"


CALL = invoke("f", P("a", "true", "1"))
ONE = [("f", '{"a": "1"}')]
SMILE = 'he </b> <"\\\n\U0001f600\u00e9'
# Output -> reasoning, content, calls.
TEXTS = {
    "\n\nr\n</think>\n\nc\n\n": ("r\n", "c\n\n", []),
    f"r</think>c \n\n{block(CALL)}": ("r", "c ", ONE),
    f"r</think>c\n \n{block(CALL)}": ("r", "c\n ", ONE),
    f"r\n\n{block(CALL)}\n\nlate": ("r", "", ONE),
    f"r</think>{block(CALL)}x{block(CALL)}": ("r", "", ONE),
    f"r</think>{block(CALL, name='toolcalls')}": ("r", "", ONE),
    f"r</think>{block(CALL, name='tool')}": ("r", "", ONE),
    f"r</think>c{CALL}between{invoke('g')}late": ("r", "c", [*ONE, ("g", "{}")]),
    "r</think>b</think>c": ("r", "bc", []),
    "r<think>s</think>c<think>d</think>e": ("r<think>s", "c<think>de", []),
    f"a{D}b</think>c {D} d </{D}invoke> e": (f"a{D}b", f"c {D} d </{D}invoke> e", []),
    f'r</think>c\n\n<{D} calls>\n<{D} invoke name="f">\n</{D} invoke>\n</{D} calls>': ("r", "c", [("f", "{}")]),
    f"r</think>{block()}": ("r", "", []),
    "\u00e9 \U0001f600</think>\U0001f4a5 d\u00e9j\u00e0 \u65e5": (
        "\u00e9 \U0001f600",
        "\U0001f4a5 d\u00e9j\u00e0 \u65e5",
        [],
    ),
}
# Calls of a block -> what they are.
CALLS = {
    f'<{D}invoke name="f"/>\n{CALL}': [("f", "{}"), *ONE],
    invoke("f", '{"a": [1,2]}\n'): [("f", '{"a": [1,2]}')],
    invoke("f", "junk", P("a", "true", "1"), "junk"): ONE,
    invoke("f", P("a", "false", "two")): [("f", '{"a": "two"}')],
    invoke("f", P("a", "false", "NaN")): [("f", '{"a": "NaN"}')],
    invoke("f", P("a", "false", " [1, 1e3]\n")): [("f", '{"a": [1, 1e3]}')],
    invoke("f", P("a", "maybe", "2")): [("f", '{"a": 2}')],
    invoke("f", f'<{D}parameter name="a" string="true">1</{D}invoke>'): ONE,
    invoke("g", P("arguments", "false", '{"a":1}')): [("g", '{"a":1}')],
    invoke("g", P("input", "true", '{"a":1}')): [("g", '{"a":1}')],
    invoke("g", P("input", "true", "no object")): [("g", '{"input": "no object"}')],
    invoke("g", P("input", "false", "{}"), P("b", "true", "")): [("g", '{"input": {}, "b": ""}')],
    invoke("f", P("input", "false", '{"a":1}')): [("f", '{"input": {"a":1}}')],
    invoke("f", P("q", "true", SMILE)): [("f", '{"q": "he </b> <\\"\\\\\\n\U0001f600\u00e9"}')],
    invoke("f", P('a"b', "true", "1")): [("f", '{"a\\"b": "1"}')],
}
ANSWERS = TEXTS | {f"r</think>{block(inside)}": ("r", "", calls) for inside, calls in CALLS.items()}


@pytest.mark.every_case
@pytest.mark.parametrize("model", ["v4-0731", "v4.1"])
def test_what_a_model_writes_is_read_as_far_as_it_can_be(model):
    rng = random.Random(1)
    for output, (reasoning, content, calls) in ANSWERS.items():
        ids = [*ids_of(output), 1]
        for trial in range(3):
            parser = Parser(model=model, tools=[F], tokenizer=v4().tokenizer)
            found = read(parser, ids, "stop", rng if trial else None)
            told = [(call["name"], call["arguments"]) for call in found["tool_calls"]]
            assert (found["reasoning_content"], found["content"], told) == (reasoning, content, calls), output
            assert found["finish_reason"] == ("tool_calls" if calls else "stop")


def test_a_cut_answer_keeps_what_was_streamed():
    """Wherever it is cut, as the vendor's parser has it: values as far as they came, no brace that was not there."""
    full = (
        f"r</think>ok\n\n{block(invoke('f', P('city', 'true', 'Kö <b>ln'), P('d', 'false', '[1, 22]')), invoke('now'))}"
    )
    ids, whole, seen = ids_of(full), '{"city": "Kö <b>ln", "d": [1, 22]}', set()
    for stop in range(len(ids) + 1):
        parser = Parser(tools=[F], tokenizer=v4().tokenizer)
        found = read(parser, ids[:stop], "length", None)
        assert found["finish_reason"] == "length"
        if found["tool_calls"]:
            arguments = found["tool_calls"][0]["arguments"]
            assert whole.startswith(arguments.removesuffix("</").removesuffix("<"))
            seen.add(arguments)
    assert {"", '{"', '{"city', '{"city": ', '{"city": "Kö', '{"city": "Kö <b>ln"', whole[:-1], whole} <= seen
    assert '{"city": "Kö <b>ln", "d": [1' in seen
    for text, content in (("c\n\n<", "c\n\n<"), (f"c\n\n<{D}", "c"), ("c\n\n", "c\n\n"), (f"c\n\n<{D}tool_ca", "c")):
        parser = Parser(thinking=False, tools=[F], tokenizer=v4().tokenizer)
        assert read(parser, ids_of(text), "length", None)["content"] == content


def test_a_call_that_did_not_end_is_none_to_be_made():
    """An end of the answer within a call leaves arguments that are no JSON, or that lack some."""
    ids = ids_of(f"r</think>{block(CALL, CALL)}")
    ends = [i + 1 for i in range(len(ids)) if v4().tokenizer.decode(ids[: i + 1]).endswith("invoke>")]
    for stop in range(len(ids) + 1):
        parser = Parser(tools=[F], tokenizer=v4().tokenizer)
        parser.feed([*ids[:stop], 1])
        parser.end()
        if parser.finish_reason == "tool_calls":
            assert [(call.name, call.arguments) for call in parser.calls] == ONE * len(parser.calls)
        else:
            assert parser.finish_reason == "stop" and stop not in ends
    assert parser.finish_reason == "tool_calls" and len(parser.calls) == 2


def test_where_an_answer_begins_and_ends():
    tokenizer = v4().tokenizer
    parser = Parser(thinking=False, tools=[F], tokenizer=tokenizer, start="calls")
    parser.feed(ids_of(f"{CALL}</{D}tool_calls>"))
    parser.end()
    assert [(call.name, call.arguments) for call in parser.calls] == ONE
    parser = Parser(thinking=False, tokenizer=tokenizer, continued=True)
    parser.feed(ids_of("\n\nmore"))
    assert parser.end("length").content == "" and parser.content == "\n\nmore"
    with pytest.raises(RequestError, match="the answer has ended"):
        parser.feed([5])
    parser = Parser(tokenizer=tokenizer, stops=["STOP"])
    parser.feed(ids_of("STOP</think>a STO STOP b"))
    assert parser.stopped and (parser.reasoning, parser.content) == ("STOP", "a STO ")
    assert not parser.end("abort") and parser.finish_reason == "stop"
    for wrong in (dict(model="v3"), dict(start="middle"), dict(tools="f"), dict(tools=[{}]), dict(stops=[""])):
        with pytest.raises(RequestError):
            Parser(tokenizer=tokenizer, **wrong)


MARKUP = (128821, 128822, 128825, 30, 1718, 72461, 4941, 12548, 1018, 40148, 5406, 2329, 1281, 1133, 3816, 41523, 3418)
MARKUP = (*MARKUP, 11476, 3320, 271, 19, 60, 61, 92, 128803, 1, 240)


@settings(max_examples=200)
@given(
    ids=st.lists(st.sampled_from(MARKUP), max_size=40),
    thinking=st.booleans(),
    seed=st.integers(0, 99),
    finish=st.sampled_from(["stop", "length", "abort"]),
)
def test_no_ids_break_it(ids, thinking, seed, finish):
    """Marks in any order: the same however they are cut, and calls that ended are JSON."""
    results = []
    for cuts in (None, random.Random(seed)):
        parser = Parser(thinking=thinking, tools=[F], tokenizer=v4().tokenizer)
        results.append(read(parser, ids, finish, cuts))
    assert results[0] == results[1]
    for call in results[0]["tool_calls"]:
        if call["arguments"].endswith("}"):
            json.loads(call["arguments"])
