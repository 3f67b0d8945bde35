"""Byte-level tokenizers by the packages that can read them: tokenizers, or else DeepSeek's deepseek-recipe."""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Mapping, Sequence, Set
from typing import Any, Protocol

from ..errors import CheckpointError

__all__ = ["Codec", "byte_characters", "open_codec"]


class Codec(Protocol):
    """A `tokenizer.json` in use. What it raises is its package's."""

    @property
    def added(self) -> Mapping[int, str]:
        """The tokens that are found in a text before its merges."""
        ...

    @property
    def special(self) -> Set[int]:
        """Those of them that are no text."""
        ...

    def token(self, text: str) -> int | None:
        """The id of a token."""
        ...

    def ids(self, text: str, *, special: bool) -> Sequence[int]:
        """The ids of a text. `special`: with those that the file puts around each."""
        ...

    def text(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens."""
        ...

    def bytes(self, token: int) -> bytes:
        """The bytes of a token, of an added one those of its name; b"" if there is none."""
        ...

    def without_added(self) -> Codec:
        """The same without the tokens of `added`."""
        ...


def open_codec(source: str) -> Codec:
    """Returns what reads the text of a `tokenizer.json`.

    Raises:
        CheckpointError: the packages for it are missing.
        Exception: it is none; whatever the package raises.
    """
    try:
        import tokenizers
    except ImportError:
        pass
    else:
        return _HuggingFace(tokenizers, source)
    try:
        recipe = importlib.import_module("deepseek_recipe")
    except ImportError:
        raise CheckpointError("its texts need the extra text (pip install 'dsv4_jax[text]'), or serve") from None
    return _Recipe(recipe, source)


class _HuggingFace:
    def __init__(self, package: Any, source: str):
        self._package, self._tokenizer = package, package.Tokenizer.from_str(source)
        self._tokenizer.no_truncation()  # what training cut or padded
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self.added = {token: each.content for token, each in added.items()}
        self.special = {token for token, each in added.items() if each.special}

    def token(self, text: str) -> int | None:
        return self._tokenizer.token_to_id(text)

    def ids(self, text: str, *, special: bool) -> Sequence[int]:
        return self._tokenizer.encode(text, add_special_tokens=special).ids

    def text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)

    def bytes(self, token: int) -> bytes:
        text = self._tokenizer.id_to_token(token) or ""
        return text.encode() if token in self.added else _bytes(text)

    def without_added(self) -> Codec:
        return _HuggingFace(self._package, json.dumps(json.loads(self._tokenizer.to_str()) | {"added_tokens": []}))


class _Recipe:
    """The package encodes; it does not say how it decodes, which is bytes by a table."""

    def __init__(self, package: Any, source: str):
        self._package, self._file = package, json.loads(source) | {"truncation": None, "padding": None}
        kinds = [(self._file.get(part) or {}).get("type") for part in ("model", "decoder", "post_processor")]
        if kinds[0] != "BPE" or kinds[1] != "ByteLevel" or kinds[2] not in (None, "ByteLevel"):
            raise ValueError(f"without the package tokenizers only byte-level merges are read, not {kinds}")
        self._native = package.Tokenizer.from_str(json.dumps(self._file))
        vocab, added = self._file["model"]["vocab"], self._file["added_tokens"]
        self.added = {each["id"]: each["content"] for each in added}
        self.special = {each["id"] for each in added if each["special"]}
        self._tokens = vocab | {text: token for token, text in self.added.items()}
        self._bytes = {token: _bytes(text) for text, token in vocab.items()}
        self._bytes |= {token: text.encode() for token, text in self.added.items()}

    def token(self, text: str) -> int | None:
        return self._tokens.get(text)

    def ids(self, text: str, *, special: bool) -> Sequence[int]:
        return self._native.encode(text)

    def text(self, ids: Sequence[int]) -> str:
        if any(not 0 <= token < 1 << 32 for token in ids):
            raise ValueError("an id is no number of 32 bits")
        return b"".join(self.bytes(token) for token in ids if token not in self.special).decode(errors="replace")

    def bytes(self, token: int) -> bytes:
        return self._bytes.get(token, b"")

    def without_added(self) -> Codec:
        return _Recipe(self._package, json.dumps(self._file | {"added_tokens": []}))


def byte_characters() -> list[str]:
    """The characters that stand for bytes in byte-level vocabularies: printable ones for themselves, others from 256
    on."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(byte if byte in own else next(others)) for byte in range(256)]


@functools.cache
def _codes() -> dict[int, int]:
    return {ord(char): byte for byte, char in enumerate(byte_characters())}


def _bytes(text: str) -> bytes:
    codes = _codes()
    try:
        return bytes(codes[ord(char)] for char in text)
    except KeyError:  # a token of the merges that stands for itself
        return text.encode()
