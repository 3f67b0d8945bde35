"""Chat templates of checkpoints: found and rendered as `apply_chat_template` of transformers 5.23 does it.

What is rendered has marks of the template's own, which are single tokens, and texts of messages, in which the same
characters may stand: they are told apart here. A template is a program of others: it runs in Jinja's sandbox, whatever
it raises is a typed error, and what it makes of texts is checked and not supposed.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import pathlib
import string
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from ..errors import CacheError, CheckpointError, RequestError
from ..untrusted import brief

__all__ = ["AMBIGUOUS", "TEMPLATE_FILE", "ChatTemplate", "Message", "Rendered", "failing", "find_template"]

Message = Mapping[str, Any]
TEMPLATE_FILE, _MORE_FILES = "chat_template.jinja", "additional_chat_templates"
_DEFAULT = "default"  # of several templates, the one for conversations without tools
_CHOSEN = ("role", "type")  # keys of messages whose values are the program's, not the user's
_LETTERS = {  # each the next one of its kind, the last one the first
    char: kind[i + 1 - len(kind)]
    for kind in (string.ascii_lowercase, string.ascii_uppercase, string.digits)
    for i, char in enumerate(kind)
}
AMBIGUOUS = (
    "the checkpoint's chat template changes the text of a message or goes by what it says: its own marks "
    "cannot be told from that text"
)
_FAILS = "the checkpoint's chat template fails"
_PRIVATE = range(0xF0000, 0xFFFFE)  # characters that no text needs


class Rendered(NamedTuple):
    """A conversation as text, and once more with other characters in the place of those that messages brought.

    Attributes:
        exact: each of those is another one, and no other is. Else the template changes texts, and letters and digits
            are others before it does: the marks are its own if they are the same in both.
    """

    text: str
    disguised: str
    exact: bool


class ChatTemplate:
    """A checkpoint's chat template, a program in Jinja that writes conversations out.

    Args:
        source: its text.
        tokens: name ("bos_token") -> text; what is not there is undefined.

    Raises:
        CheckpointError: it is no template, or the package that renders it is missing.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]):
        self._source, self._tokens = source, dict(tokens)
        with failing(CheckpointError, _FAILS):
            self._template = _environment().from_string(source)

    def render(self, messages: Sequence[Message], think: bool, marks: str) -> Rendered:
        """Renders a conversation up to where the answer begins.

        A character that a message brought is told by rendering a second time, with one of private use in its place: the
        result must be the first one again but for these.

        Args:
            messages: of any role, JSON values; every text in them but `role` and `type` is taken for a user's.
            think: given to the template as `thinking` and `enable_thinking`.
            marks: the characters of the tokenizer's marks.

        Raises:
            RequestError: the template fails; or it changes texts or goes by what they say, and they have characters of
                marks beside letters and digits.
        """
        variables = {
            **self._tokens,
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
            "thinking": think,
            "enable_thinking": think,
            "strftime_now": datetime.datetime.now().strftime,
            "raise_exception": _raise,
        }
        text = self._put(messages, variables)
        said = {*itertools.chain.from_iterable(_texts(messages))}

        def disguised(other: Mapping[str, str]) -> str:
            return self._put([_changed(message, str.maketrans(dict(other))) for message in messages], variables)

        # Templates may strip white space and escape as JSON does: such characters stay, unless a mark has them.
        told = sorted(char for char in said if char in marks or not (char.isspace() or _is_escaped(char)))
        known = {*said, *text, *marks, *self._source}
        private = (char for char in map(chr, _PRIVATE) if char not in known)
        other = dict(zip(told, private, strict=False))
        back = str.maketrans({new: old for old, new in other.items()})
        with contextlib.suppress(RequestError):
            found = Rendered(text, disguised(other), True)
            if len(other) == len(told) and found.disguised.translate(back) == text:
                return found
        spelt = unicodedata.normalize("NFKC", "".join(said))
        if any(char in marks and char not in _LETTERS for char in spelt):
            raise RequestError(AMBIGUOUS)
        return Rendered(text, disguised(_LETTERS), False)

    def _put(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        with failing(RequestError, _FAILS):
            return self._template.render(messages=messages, **variables)


def _environment() -> Any:
    try:
        from jinja2 import nodes
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise CheckpointError("a chat template needs the extra text (pip install 'dsv4_jax[text]')") from None

    class Generation(Extension):
        """The tag around what a model is to learn to say: a prompt has what is inside of it."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            inside = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_inside"), [], [], inside).set_lineno(line)

        def _inside(self, caller: Callable[[], str]) -> str:
            return caller()

    def to_json(
        x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    room = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    room.filters["tojson"] = to_json
    return room


def find_template(checkpoint: pathlib.Path, config: Mapping[str, Any]) -> str | None:
    """The template for a conversation without tools; None if there is no template at all.

    Files win over `tokenizer_config.json` (`config`), which has one or several with names, as a list or an object.

    Raises:
        CheckpointError: none of several is the default; or they cannot be read.
    """
    more = sorted((checkpoint / _MORE_FILES).glob("*.jinja"))
    files = {_DEFAULT: checkpoint / TEMPLATE_FILE} if (checkpoint / TEMPLATE_FILE).is_file() else {}
    files |= {path.name.removesuffix(".jinja"): path for path in more}
    found = {name: _read(path) for name, path in files.items()} or config.get("chat_template")
    if found is None or isinstance(found, str):
        return found
    if isinstance(found, list) and all(isinstance(each, dict) for each in found):
        found = {each.get("name"): each.get("template") for each in found}
    if not isinstance(found, dict) or any(not isinstance(each, str) for pair in found.items() for each in pair):
        raise CheckpointError(
            f"chat_template in tokenizer_config.json is {brief(found)}, neither a text nor texts with names"
        )
    if _DEFAULT not in found:
        raise CheckpointError(f"none of the checkpoint's chat templates is the default: {brief(sorted(found))}")
    return found[_DEFAULT]


@contextlib.contextmanager
def failing(kind: type[CacheError], problem: str) -> Iterator[None]:
    """Raises an error of this kind for whatever a program of others raises, a panic of its Rust, too."""
    try:
        yield
    except (MemoryError, CacheError):
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__module__ == "pyo3_runtime":
            raise kind(f"{problem}: {error}") from None
        raise


def _read(path: pathlib.Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: {brief(str(error))}") from None


def _raise(message: str) -> NoReturn:
    raise ValueError(message)


def _is_escaped(char: str) -> bool:
    return json.dumps(char, ensure_ascii=False) != f'"{char}"'


def _texts(value: Any) -> Iterator[str]:
    """Yields the texts that users brought: those of a message, of messages or of what is in them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from itertools.chain.from_iterable(_texts(inner) for key, inner in value.items() if key not in _CHOSEN)
    elif isinstance(value, Sequence):
        yield from itertools.chain.from_iterable(map(_texts, value))


def _changed(value: Any, other: Mapping[int, str]) -> Any:
    """Returns the value with other characters in its `_texts`; `other`: as `str.translate` takes it."""
    if isinstance(value, str):
        return value.translate(other)
    if isinstance(value, Mapping):
        return {key: inner if key in _CHOSEN else _changed(inner, other) for key, inner in value.items()}
    return [_changed(inner, other) for inner in value] if isinstance(value, Sequence) else value
