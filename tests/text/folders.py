"""Folders with a tokenizer, as tests of texts need them."""

from __future__ import annotations

import json
import pathlib

BEGIN, END = "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"
USER, ASSISTANT = "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"


def ids_of(path: pathlib.Path, text: str) -> list[int]:
    import tokenizers

    return tokenizers.Tokenizer.from_file(str(path / "tokenizer.json")).encode(text).ids


def a_chat(with_text: pathlib.Path, path: pathlib.Path, *, template: str | None = None, **config) -> pathlib.Path:
    """`with_text` with another tokenizer_config.json and chat template, in `path`."""
    for file in with_text.iterdir():
        if file.name != "tokenizer_config.json":
            (path / file.name).symlink_to(file)
    configure(path, **config)
    if template is not None:
        (path / "chat_template.jinja").write_text(template, encoding="utf-8")
    return path


def configure(path: pathlib.Path, **config) -> None:
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": BEGIN, "eos_token": END} | config))
