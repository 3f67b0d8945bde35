"""The text of an answer while its ids come: whole characters, up to where a string ends it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from ..errors import RequestError
from ..untrusted import brief

__all__ = ["Decoder", "StopText", "TextStream"]

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_MOST_HELD = 3  # bytes of a character that is not complete


class Decoder(Protocol):
    """What `TextStream` needs of a tokenizer."""

    def decode(self, ids: Sequence[int], /) -> str:
        """Returns the text of ids; a U+FFFD or several where their bytes are no characters."""
        ...


class TextStream:
    """The text of ids that come one by one, up to the first of some strings: the pieces add up to it.

    A character may be spread over several ids: nothing is said of it before its last. What may be the beginning of a
    string that ends the text is held back. Some decoders drop a space where a text begins, so ids are decoded behind
    those before them. An id costs the same wherever it comes, in bytes that are no characters, too.

    Args:
        tokenizer: whose `decode` is asked.
        stops: strings that end the text, as for `StopText`.

    Attributes:
        stopped: one of them was found: nothing more is said.

    Raises:
        RequestError: one of `stops` is empty or no string.
    """

    def __init__(self, tokenizer: Decoder, stops: Iterable[str] = ()):
        self._tokenizer, self._stop = tokenizer, StopText(stops)
        self._ids: list[int] = []  # from the piece before on
        self._said = 0  # characters of their text
        self._before = 0  # ids of the piece before

    @property
    def stopped(self) -> bool:
        return self._stop.found

    def add(self, token: int) -> str:
        """Returns what can be said once this id is there. Raises what the tokenizer raises."""
        return "" if self.stopped else self._stop.add(self._decoded(token))

    def end(self) -> str:
        """Returns the text that is left, once no id follows."""
        if self.stopped:
            return ""
        left = self._tokenizer.decode(self._ids)[self._said :]
        return self._stop.add(left) + self._stop.end()

    def _decoded(self, token: int) -> str:
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        whole = text.rstrip(_INCOMPLETE)
        if len(text) - len(whole) > _MOST_HELD:  # what was no character before the last bytes will not become one
            whole = text[:-_MOST_HELD]
        piece = whole[self._said :]
        self._said = max(self._said, len(whole))
        held = len(text) - len(whole)  # as many ids, if the text is made of both parts
        if piece and (not held or self._made_of(whole, text[len(whole) :])):
            self._ids = self._ids[self._before :]
            self._before = len(self._ids) - held
            self._said = len(self._tokenizer.decode(self._ids)) - held
        return piece

    def _made_of(self, text: str, held: str) -> bool:
        decode, cut = self._tokenizer.decode, len(held)
        return (decode(self._ids[:-cut]), decode(self._ids[-cut:])) == (text, held)


class StopText:
    """Lets text through up to the first of some strings. What may be the beginning of one is held back.

    The first is the one that ends first, and of several that end at the same place the longest: that is decided as soon
    as its last character is there, so it does not depend on how the text is cut into pieces.

    Attributes:
        found: one of them was found; nothing more is asked then.

    Raises:
        RequestError: one of them is empty or no string.
    """

    def __init__(self, stops: Iterable[str]):
        self._stops = tuple(stops)
        wrong = [stop for stop in self._stops if not isinstance(stop, str) or not stop]
        if wrong:
            raise RequestError(f"a string that ends a text must have a character, got {brief(wrong[0])}")
        self._held = ""
        self.found = False

    def add(self, text: str) -> str:
        """Returns what of the text so far can be shown now."""
        text = self._held + text
        places = [(place + len(stop), place) for stop in self._stops if (place := text.find(stop)) >= 0]
        self.found = bool(places)
        shown = min(places)[1] if places else len(text) - self._begun(text)
        self._held = "" if places else text[shown:]
        return text[:shown]

    def end(self) -> str:
        """Returns what was held back, once no text follows."""
        return self._held

    def _begun(self, text: str) -> int:
        """How many characters at the end of `text` are the most that a stop string begins with."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        tails = (text[-n:] for n in range(min(longest, len(text)), 0, -1))
        return next((len(tail) for tail in tails if any(stop.startswith(tail) for stop in self._stops)), 0)
