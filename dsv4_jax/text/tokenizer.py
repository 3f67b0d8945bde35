"""Text to token ids and back by a checkpoint's own tokenizer. The packages for it are an extra: ids need neither.

The released checkpoints of DeepSeek-V4 have no chat template: a program of theirs (`encoding/`) writes conversations
out. One question is: the token that begins a text, User, the question, Assistant, then <think> or, for no reasoning,
</think>, with all but the question as single tokens. Between the first of them and User may stand a text that asks for
effort; none is put here.

In a conversation marks are tokens and all else is text: what a user types is encoded as if the tokenizer had no tokens
beside those of its merges, so that it never becomes a mark.
"""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import CheckpointError, RequestError
from ..untrusted import brief, plain, read_json
from .chat_template import AMBIGUOUS, TEMPLATE_FILE, ChatTemplate, Message, failing, find_template

__all__ = ["Tokenizer", "stop_tokens_of"]

_MAX_BYTES = 1 << 28
_USER, _ASSISTANT = (f"<\uff5c{name}\uff5c>" for name in ("User", "Assistant"))
_THINKING = {False: "</think>", True: "<think>"}
_EFFORT = {
    False: "no text about effort is put, which 0731 checkpoints take for low (their vendor puts high), preview ones "
    "for high",
    True: "the checkpoint's chat template decides on the effort",
}
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """The tokenizer of a checkpoint directory: `tokenizer.json`, and what `tokenizer_config.json` adds to it.

    Raises:
        CheckpointError: there is none, it cannot be read, or the package that reads it is missing.
    """

    def __init__(self, checkpoint: str | pathlib.Path):
        try:
            import tokenizers
        except ImportError:
            raise CheckpointError("its texts need the extra text (pip install 'dsv4_jax[text]')") from None
        checkpoint = pathlib.Path(checkpoint)
        path = checkpoint / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{checkpoint} has no tokenizer.json")
        with failing(CheckpointError, f"{path} is no tokenizer"):
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
            self._tokenizer.no_truncation()  # what training cut or padded
            self._tokenizer.no_padding()
        self._checkpoint, self._load = checkpoint, tokenizers.Tokenizer.from_str
        self._config = _object(checkpoint / "tokenizer_config.json")
        self._begin = self._named("bos_token")

    @property
    def effort(self) -> str:
        """How hard a conversation that is to reason asks for it, in words. Raises as `encode_chat`."""
        return _EFFORT[self._template is not None]

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text to go on with: marks in it are the tokens that they name.

        Raises:
            RequestError: it has no ids.
            CheckpointError: each text is to begin with a token that is not there.
        """
        ids = self._ids(self._tokenizer, text, special=True)
        if self._config.get("add_bos_token") is not True:
            return ids
        first = self._begin and self._tokenizer.token_to_id(self._begin)
        if not isinstance(first, int):
            lacks = f"tokenizer.json has no token {plain(self._begin)}" if self._begin else "it names no bos_token"
            raise CheckpointError(f"tokenizer_config.json asks for a token before each text, but {lacks}")
        return ids if ids[:1] == [first] else [first, *ids]

    def encode_chat(self, messages: Sequence[Message], think: bool) -> list[int]:
        """The ids of a conversation, up to where the answer begins.

        What is a mark comes from the chat template or, where the checkpoint has none, from DeepSeek-V4's own encoding;
        never from a text of `messages`.

        Args:
            messages: `role`, `content` and what else the template reads. Without a template: one of role "user".
            think: the answer begins with its reasoning.

        Raises:
            CheckpointError: the checkpoint says nothing of conversations, and which mark or file it lacks; or its
                template is none.
            RequestError: `messages` are none; the template fails, or its own marks cannot be told from their texts;
                a mark in them is a token of the tokenizer's merges, too.
        """
        if isinstance(messages, str) or not all(isinstance(message, Mapping) for message in messages):
            raise RequestError(f"a conversation is a sequence of messages, each a mapping, got {brief(messages)}")
        if self._template is not None:
            return self._put(self._template, messages, think)
        marks = (self._begin, _USER, _ASSISTANT, *_THINKING.values())
        known = {mark: token for mark in marks if (token := self._tokenizer.token_to_id(mark)) is not None}
        lacks = [f"{plain(mark)} in tokenizer.json" for mark in marks if mark not in known]
        if not self._begin:
            there = (self._checkpoint / "tokenizer_config.json").exists()
            lacks = ["bos_token in tokenizer_config.json" if there else "tokenizer_config.json with a bos_token"]
        missing = f"{self._checkpoint} has no {TEMPLATE_FILE}"
        if lacks:
            raise CheckpointError(f"{missing}, and DeepSeek-V4's own encoding needs {lacks[0]}")
        if len(messages) != 1 or messages[0].get("role") != "user" or not isinstance(messages[0].get("content"), str):
            raise RequestError(f"{missing}: only one question can be put")
        begin, user, assistant, *thinking = (known[mark] for mark in marks)
        return [begin, user, *self._text_ids(messages[0]["content"]), assistant, thinking[think]]

    def encode_marked(self, text: str, marks: Sequence[tuple[int, int]]) -> list[int]:
        """The ids of a text in which some places are marks, a token each, and all else is text, whatever it looks like.

        Args:
            marks: half-open ranges of characters, in order.

        Raises:
            RequestError: they are not in order or not within the text; what is between them has no ids.
            CheckpointError: one of them is no token of the tokenizer.
        """
        ends = [0, *(place for mark in marks for place in mark), len(text)]
        if ends != sorted(ends):
            raise RequestError(f"marks must be ranges of 0..{len(text)} in order, got {brief(marks)}")
        placed = []
        for start, stop in marks:
            token = self._tokenizer.token_to_id(text[start:stop])
            if token is None:
                raise CheckpointError(f"tokenizer.json has no token {plain(text[start:stop])}")
            placed.append((token, start, stop))
        return self._joined(text, placed)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, without special tokens. Raises `RequestError` for what are no ids."""
        with failing(RequestError, f"the tokenizer has no text for ids {brief(ids)}"):
            return self._tokenizer.decode(ids)

    @functools.cached_property
    def _template(self) -> ChatTemplate | None:
        source = find_template(self._checkpoint, self._config)
        tokens = {name: self._named(name) for name in _NAMED}
        return None if source is None else ChatTemplate(source, {name: text for name, text in tokens.items() if text})

    @functools.cached_property
    def _added(self) -> dict[int, str]:
        """The tokens that are found in a text before its merges."""
        return {token: added.content for token, added in self._tokenizer.get_added_tokens_decoder().items()}

    @functools.cached_property
    def _without_added(self) -> Any:
        with failing(CheckpointError, "the tokenizer cannot do without its added tokens"):
            return self._load(json.dumps(json.loads(self._tokenizer.to_str()) | {"added_tokens": []}))

    def _put(self, template: ChatTemplate, messages: Sequence[Message], think: bool) -> list[int]:
        text, disguised, exact = template.render(messages, think, "".join(self._added.values()))
        ids, marks = self._with_marks(text)
        own = [mark for mark in self._with_marks(disguised)[1] if text[slice(*mark[1:])] == disguised[slice(*mark[1:])]]
        if marks == own:  # as transformers encodes it
            return ids
        if not exact:
            raise RequestError(AMBIGUOUS)
        return self._joined(text, own)

    def _joined(self, text: str, marks: Sequence[tuple[int, int, int]]) -> list[int]:
        """The ids of a text with these marks in it, each as (token, start, stop)."""
        ids, end = list[int](), 0
        for token, start, stop in marks:
            ids += [*self._text_ids(text[end:start]), token]
            end = stop
        return ids + self._text_ids(text[end:])

    def _with_marks(self, text: str) -> tuple[list[int], list[tuple[int, int, int]]]:
        """Returns the ids of a text, and of the marks among them each with the place of its characters."""
        with failing(RequestError, f"the tokenizer has no ids for {brief(text)}"):
            found = self._tokenizer.encode(text, add_special_tokens=False)
        each = zip(found.ids, found.offsets, strict=True)
        return found.ids, [(token, *place) for token, place in each if token in self._added]

    def _text_ids(self, text: str) -> list[int]:
        """The ids of what is text, whatever it looks like."""
        ids = self._ids(self._without_added, text, special=False)
        mark = next((self._added[token] for token in self._added.keys() & ids if self._added[token] in text), None)
        if mark is not None:
            raise RequestError(f"the tokenizer has no ids for {plain(mark)} as text, only as a mark")
        return ids

    def _ids(self, tokenizer: Any, text: str, *, special: bool) -> list[int]:
        with failing(RequestError, f"the tokenizer has no ids for {brief(text)}"):
            return tokenizer.encode(text, add_special_tokens=special).ids

    def _named(self, name: str) -> str:
        """The text of one of the tokens that `tokenizer_config.json` names; "" if it does not."""
        token = self._config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if not isinstance(token, str):
            return ""
        try:
            token.encode()
        except UnicodeEncodeError:
            raise CheckpointError(f"{name} of its tokenizer_config.json is no Unicode text") from None
        return token


def stop_tokens_of(checkpoint: str | pathlib.Path) -> list[int]:
    """What ends a text, by `generation_config.json` or else `config.json`; [] if neither says it.

    Raises:
        CheckpointError: a file says something else than ids.
    """
    for name in ("generation_config.json", "config.json"):
        said = _object(pathlib.Path(checkpoint) / name).get("eos_token_id")
        ids = said if isinstance(said, list) else [said]
        if any(type(token) is not int for token in ids) and said is not None:
            raise CheckpointError(f"eos_token_id in {pathlib.Path(checkpoint) / name} is {brief(said)}, no ids")
        if ids and said is not None:
            return ids
    return []


def _object(path: pathlib.Path) -> dict[str, Any]:
    """The JSON object of a file; {} if there is none."""
    if not path.exists():
        return {}
    try:
        value = read_json(path, _MAX_BYTES)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {brief(value)}, no JSON object")
    return value
