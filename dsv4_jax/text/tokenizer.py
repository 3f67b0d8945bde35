"""Text to token ids and back by a checkpoint's own tokenizer. The packages for it are an extra: ids need neither.

In a conversation marks are tokens and all else is text: what a user types is encoded as if the tokenizer had no tokens
beside those of its merges, so that it never becomes a mark.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Sequence
from typing import Any

from ..errors import CheckpointError, RequestError
from ..untrusted import brief, failing, plain, read_json
from .byte_level import Codec, open_codec

__all__ = ["Tokenizer", "stop_tokens_of"]

_MAX_BYTES = 1 << 28


class Tokenizer:
    """The tokenizer of a checkpoint directory: `tokenizer.json`, and what `tokenizer_config.json` adds to it.

    Attributes:
        source: the text of `tokenizer.json`.

    Raises:
        CheckpointError: there is none, it cannot be read, or the package that reads it is missing.
    """

    def __init__(self, checkpoint: str | pathlib.Path):
        checkpoint = pathlib.Path(checkpoint)
        path = checkpoint / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{checkpoint} has no tokenizer.json")
        with failing(CheckpointError, f"{path} is no tokenizer"):
            self.source = path.read_text(encoding="utf-8")
            self._codec = open_codec(self.source)
        self._checkpoint = checkpoint
        self._config = _object(checkpoint / "tokenizer_config.json")
        self._begin = self._named("bos_token")

    def mark(self, text: str) -> int:
        """The id of a mark. Raises `CheckpointError` if it is no token of the tokenizer."""
        token = self._codec.token(text)
        if token is None:
            raise CheckpointError(f"{self._checkpoint}: tokenizer.json has no token {plain(text)}")
        return token

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text to go on with: marks in it are the tokens that they name.

        Raises:
            RequestError: it has no ids.
            CheckpointError: each text is to begin with a token that is not there.
        """
        ids = self._ids(self._codec, text, special=True)
        if self._config.get("add_bos_token") is not True:
            return ids
        first = self._begin and self._codec.token(self._begin)
        if not isinstance(first, int):
            lacks = f"tokenizer.json has no token {plain(self._begin)}" if self._begin else "it names no bos_token"
            raise CheckpointError(f"tokenizer_config.json asks for a token before each text, but {lacks}")
        return ids if ids[:1] == [first] else [first, *ids]

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
        ids, end = list[int](), 0
        for start, stop in marks:
            token = self.mark(text[start:stop])
            ids += [*self._text_ids(text[end:start]), token]
            end = stop
        return ids + self._text_ids(text[end:])

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, without special tokens. Raises `RequestError` for what are no ids."""
        with failing(RequestError, f"the tokenizer has no text for ids {brief(ids)}"):
            return self._codec.text(ids)

    def bytes_of(self, token: int) -> bytes:
        """Returns the bytes of a token, of a mark those of its name; b"" of an id that is no token."""
        return self._codec.bytes(token)

    def is_special(self, token: int) -> bool:
        """Whether it is one of those that `decode` leaves out."""
        return token in self._codec.special

    @functools.cached_property
    def _without_added(self) -> Codec:
        with failing(CheckpointError, "the tokenizer cannot do without its added tokens"):
            return self._codec.without_added()

    def _text_ids(self, text: str) -> list[int]:
        """The ids of what is text, whatever it looks like."""
        ids = self._ids(self._without_added, text, special=False)
        added = self._codec.added
        mark = next((added[token] for token in added.keys() & ids if added[token] in text), None)
        if mark is not None:
            raise RequestError(f"the tokenizer has no ids for {plain(mark)} as text, only as a mark")
        return ids

    def _ids(self, codec: Codec, text: str, *, special: bool) -> list[int]:
        with failing(RequestError, f"the tokenizer has no ids for {brief(text)}"):
            return list(codec.ids(text, special=special))

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
