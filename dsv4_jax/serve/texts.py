"""Texts to ids and back by a checkpoint's `tokenizer.json`, without the package that the extra `text` brings."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from ..errors import CheckpointError
from ..text.byte_level import byte_characters
from ..untrusted import read_json

__all__ = ["Vocabulary"]

_MAX_BYTES = 1 << 28


class Vocabulary:
    """What a byte-level tokenizer's ids stand for.

    Args:
        path: of `tokenizer.json`.

    Raises:
        CheckpointError: there is none, or it is of another kind.
    """

    def __init__(self, path: pathlib.Path):
        from deepseek_recipe import Tokenizer

        try:
            told = read_json(path, _MAX_BYTES)
            vocab, added = told["model"]["vocab"], told.get("added_tokens") or []
            own = {char: byte for byte, char in enumerate(byte_characters())}
            self._bytes: dict[int, bytes] = {}
            for text, token in vocab.items():
                self._bytes[token] = bytes(map(own.__getitem__, text)) if own.keys() >= set(text) else text.encode()
            self._marks = {one["id"]: one["content"].encode() for one in added}
            self.tokenizer = Tokenizer.from_file(str(path))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise CheckpointError(f"{path} is no byte-level tokenizer: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text to go on with: marks in it are the tokens that they name."""
        return self.tokenizer.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, without marks."""
        return b"".join([self.bytes_of(i) for i in ids if i not in self._marks]).decode("utf-8", "replace")

    def bytes_of(self, token: int) -> bytes:
        """Returns the bytes of a token, of a mark those of its name, of one that has no text b""."""
        return self._marks.get(token) or self._bytes.get(token, b"")

    def is_mark(self, token: int) -> bool:
        """Whether it is a mark, and no text."""
        return token in self._marks
