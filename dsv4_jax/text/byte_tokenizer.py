"""A tokenizer of a token a byte with the marks of DeepSeek-V4's conversations, for checkpoints to try things with."""

from __future__ import annotations

import json
import pathlib

from ..output import open_output
from .byte_level import byte_characters

__all__ = ["BYTE_TOKENS", "save_byte_tokenizer"]

_NAMED = ("begin\u2581of\u2581sentence", "end\u2581of\u2581sentence", "User", "Assistant")
_MORE = ("latest_reminder", "action", "query", "authority", "domain", "title", "read_url")
_MARKS = (
    *(f"<\uff5c{name}\uff5c>" for name in _NAMED),
    *("<think>", "</think>", "\uff5cDSML\uff5c"),
    *(f"<\uff5c{name}\uff5c>" for name in _MORE),
)
BYTE_TOKENS = len(_MARKS) + 256


def save_byte_tokenizer(path: str | pathlib.Path) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json` of a tokenizer with `BYTE_TOKENS` ids into a folder.

    The marks come first, beginning and end of a text as 0 and 1, as in the published tokenizers; then byte b as the
    number of marks plus b.

    Raises:
        FileError: they cannot be written there.
    """
    ids = {text: i for i, text in enumerate((*_MARKS, *byte_characters()))}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    bytewise = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": ids[mark], "content": mark, **flags, "special": True} for mark in _MARKS],
        "pre_tokenizer": bytewise,
        "decoder": bytewise,
        "model": {"type": "BPE", "vocab": ids, "merges": []},
    }
    config = {"bos_token": _MARKS[0], "eos_token": _MARKS[1], "add_bos_token": False}
    for name, value in {"tokenizer.json": tokenizer, "tokenizer_config.json": config}.items():
        with open_output(pathlib.Path(path) / name, encoding="utf-8") as file:
            json.dump(value, file, ensure_ascii=False, indent=1)
