"""What `generate` goes on with: texts and token ids of the command line and of files."""

from __future__ import annotations

import argparse
import codecs
import pathlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from ..chat import MODELS, Chat, ChatPrompt, model_of
from ..errors import CheckpointError, FileError, OptionError
from ..text import Tokenizer
from ..untrusted import brief, parse_json
from .inputs import read_tokens, read_whole
from .options import naming, option
from .values import given_path, natural, short, unicode_text

__all__ = [
    "Given",
    "Prompt",
    "add_conversation",
    "add_prompts",
    "encode",
    "given_prompts",
    "open_chat",
    "open_tokenizer",
    "token_ids",
]

_MAX_BYTES = 1 << 28


class Given(NamedTuple):
    """A prompt as it was given: a text, or ids."""

    source: str  # the option, and the line of a file
    content: str | list[int]


class Prompt(NamedTuple):
    """A prompt as it is fed. `text`: None if it was given as ids; `chat`: None if it is no conversation."""

    source: str
    tokens: list[int]
    text: str | None
    chat: ChatPrompt | None = None


def add_prompts(parser: argparse.ArgumentParser) -> None:
    """Adds the options that give prompts."""
    group = parser.add_argument_group("prompts, all of them together")
    option(group, "--prompt", unicode_text, "TEXT", "a text; several: several times", action="append", default=[])
    lines = 'a text a line, or (.jsonl) "text", [1, 2, 3], {"prompt": "text"} or {"tokens": [1, 2, 3]}'
    option(group, "--prompt-file", given_path, "FILE", lines)
    ids = "1,2,3 or a .npy of integers; several: several times. Its answer is ids, too"
    option(group, "--tokens", _ids_or_file, "IDS|FILE", ids, action="append", default=[])
    chat = "texts are questions, put as the checkpoint has learnt them; think: it reasons first"
    group.add_argument("--chat", nargs="?", choices=("answer", "think"), const="answer", help=chat)
    add_conversation(group)


def add_conversation(group: argparse._ActionsContainer) -> None:
    """Adds the options that say how conversations are encoded."""
    effort = "how hard it thinks: low, medium, high (default), max; of V4.1 also a number from 1 to 100"
    option(group, "--effort", _effort, "LEVEL", effort)
    model = "whose conversations the checkpoint has learnt (default: as its own encoder says, else v4-0731)"
    option(group, "--chat-model", str, "NAME", model, choices=MODELS)


def given_prompts(args: argparse.Namespace) -> list[Given]:
    """Returns the prompts of --prompt, then of --prompt-file, then of --tokens.

    Raises `OptionError`, `FileError`, `PlanError`.
    """
    prompts = [Given("--prompt", text) for text in args.prompt]
    prompts += _lines(args.prompt_file) if args.prompt_file else []
    for ids in args.tokens:
        prompts.append(Given("--tokens", ids if isinstance(ids, list) else read_tokens(ids).tolist()))
    if not prompts:
        raise OptionError("--prompt, --prompt-file, --tokens: give at least one prompt")
    for source, content in prompts:
        if not content:
            raise OptionError(f"{source}: an empty prompt")
    if args.effort is not None and args.chat != "think":
        raise OptionError("--effort: says how hard --chat think thinks")
    if args.chat and all(isinstance(content, list) for _, content in prompts):
        raise OptionError("--chat: puts texts as questions, and there are only ids")
    return prompts


def open_tokenizer(checkpoint: pathlib.Path) -> Tokenizer:
    """Returns the tokenizer of the prompts that are texts. Raises `OptionError`: there is none, and ids need none."""
    try:
        return Tokenizer(checkpoint)
    except CheckpointError as error:
        raise OptionError(f"--checkpoint: {error}: give prompts as ids (--tokens)") from error


def open_chat(args: argparse.Namespace, tokenizer: Tokenizer) -> Chat:
    """Returns what encodes conversations of the checkpoint. Raises `OptionError`."""
    with naming("--checkpoint"):
        return Chat(tokenizer, model=args.chat_model or model_of(args.checkpoint))


def encode(
    given: list[Given], tokenizer: Tokenizer | None, chat: Chat | None, args: argparse.Namespace, vocab_size: int
) -> list[Prompt]:
    """Returns the ids of all.

    Args:
        tokenizer: there if one is a text.
        chat: there if texts are questions.

    Raises `OptionError`.
    """
    prompts = []
    for source, content in given:
        if isinstance(content, list):
            prompts.append(Prompt(source, content, None))
            continue
        assert tokenizer is not None
        with naming("--chat" if chat else "--checkpoint"):
            asked = None
            if chat is not None:
                said = [{"role": "user", "content": content}]
                asked = chat.prompt(said, thinking=args.chat == "think", reasoning_effort=args.effort)
            ids = tokenizer.encode(content) if asked is None else asked.ids
        if not ids:
            raise OptionError(f"{source}: {short(content)} has no tokens")
        prompts.append(Prompt(source, ids, content, asked))
    for source, tokens, text, _ in prompts:
        wrong = next((token for token in tokens if not 0 <= token < vocab_size), None)
        if wrong is not None:
            of = "" if text is None else " (the tokenizer is another model's)"
            raise OptionError(f"{source}: token {wrong} is outside the vocabulary 0..{vocab_size - 1}{of}")
    return prompts


def token_ids(text: str) -> list[int]:
    """Parses ids separated by commas."""
    return [natural(part) for part in text.split(",")]


def _effort(text: str) -> str | int:
    return natural(text) if text.isdecimal() else text


def _ids_or_file(text: str) -> list[int] | pathlib.Path:
    return given_path(text) if text.lower().endswith(".npy") else token_ids(text)


def _lines(path: pathlib.Path) -> Iterator[Given]:
    data = read_whole(path, "--prompt-file", _MAX_BYTES)
    read = _json if path.suffix.lower() == ".jsonl" else _text
    for number, line in enumerate(re.split(rb"\r?\n", data.removeprefix(codecs.BOM_UTF8)), 1):
        if line.strip():
            source = f"--prompt-file {path}, line {number}"
            try:
                yield Given(source, read(line))
            except ValueError as error:
                raise FileError(f"{source}: {error}") from None


def _text(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None


def _json(line: bytes) -> str | list[int]:
    """Returns the prompt of a line of JSON. Raises `ValueError`."""
    value: Any = parse_json(line, unique_keys=True)
    inner = next(iter(value.items())) if isinstance(value, dict) and len(value) == 1 else None
    for name, content in (inner,) if inner else (("prompt", value), ("tokens", value)):
        if name == "prompt" and isinstance(content, str):
            try:
                return unicode_text(content)
            except argparse.ArgumentTypeError as error:
                raise ValueError(str(error)) from None
        if name == "tokens" and isinstance(content, list) and all(type(token) is int for token in content):
            return content
    raise ValueError(f'{brief(value)} is neither "text", a list of ids, {{"prompt": "text"}} nor {{"tokens": [1, 2]}}')
